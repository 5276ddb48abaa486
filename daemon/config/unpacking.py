"""The table [unpacking] of daemon.toml."""

from __future__ import annotations

from pydantic import Field

from daemon.config.sections import Section
from daemon.config.values import ByteCount


class UnpackingSection(Section):
    most_files: int = Field(
        100_000,
        ge=1,
        le=1_000_000,
        description="Most files, folders and links that may come from one archive, document or video. With more, nothing of it "
        "is unpacked. Raise this and the next two for archives that you trust.",
    )
    most_bytes: ByteCount = Field(
        64 << 30,
        ge=1 << 20,
        description="Most bytes that these files may have together. With more, nothing of it is unpacked.",
    )
    most_ratio: int = Field(
        1100,
        ge=1,
        le=1_000_000_000_000,
        description="Most bytes that these files may have for each byte of the archive; 64 MiB are always allowed. Deflate, "
        "which zip files use, reaches 1,032.",
    )
    dpi: int = Field(
        200,
        ge=1,
        le=1200,
        description="Resolution at which the pages of a PDF are drawn. More for small print.",
    )
    video_seconds: float = Field(
        1.0,
        ge=0.01,
        description="Time between two frames that are taken from a video. More for long recordings.",
    )
