"""Archives, documents and videos, made on the spot."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping

import numpy as np
from PIL import Image


def make_zip(files: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def make_tar(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return file.getvalue()


def make_pages(kind: str, pages: int) -> bytes:
    """A TIFF or a PDF with this number of gray pages."""
    file = io.BytesIO()
    first, *others = (Image.new("L", (60, 40), 10 * page) for page in range(pages))
    first.save(file, kind, save_all=True, append_images=others)
    return file.getvalue()


def make_video(seconds: int, rate: int = 5) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(seconds * rate):
            pixels = np.full((48, 64, 3), 3 * number, np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()
