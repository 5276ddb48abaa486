"""Takes files apart, in the sealed child process: each kind yields its members, one after another.

The libraries get an open file, as the child can open none. Whatever they raise is the file's fault.
"""

from __future__ import annotations

import importlib
import io
import os
import pkgutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from daemon.unpacking.kinds import LIBRARIES

PIECE = 1 << 20  # bytes of a member that are passed on together
SHARPNESS = 95  # of frames, as JPEG
POINTS = 72  # of a PDF, to the inch
ENCRYPTED = 0x1  # a member of a zip


class Rules(msgspec.Struct, frozen=True):
    """dpi: of a document's pages. video_seconds: between two frames. pixels: the most that a page may have."""

    dpi: int = 200
    video_seconds: float = 1.0
    pixels: int = 100_000_000


class Member(NamedTuple):
    """A file in a file. name: as the container has it, which may be anything. pieces: its bytes."""

    name: bytes
    pieces: Iterator[bytes]


class Unusable(Exception):
    """The container cannot be taken apart; the message says why."""


def walk_zip(file: BinaryIO, _: Rules) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if entry.is_dir() or kind not in (0, stat.S_IFREG):
                continue
            if entry.flag_bits & ENCRYPTED:
                raise Unusable("it is encrypted; unpack it with its password")
            # Names are UTF-8, or else the old code page 437.
            yield Member(entry.filename.encode(errors="surrogateescape"), _read_entry(archive, entry))


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(entry) as source:
        yield from _pieces(source)


def walk_tar(file: BinaryIO, _: Rules) -> Iterator[Member]:
    """Read from the start to the end: a tar has no list of what is in it."""
    with tarfile.open(fileobj=file, mode="r:*", errors="surrogateescape", encoding="utf-8") as archive:
        for entry in archive:
            source = archive.extractfile(entry) if entry.isfile() else None
            if source:
                yield Member(entry.name.encode(errors="surrogateescape"), _pieces(source))
            archive.members = []  # type: ignore[attr-defined]  # otherwise it remembers all of them


def _pieces(source: Any) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece


def walk_tiff(file: BinaryIO, _: Rules) -> Iterator[Member]:
    """Every page but the first: that one is the image that the file itself is."""
    from PIL import Image

    with Image.open(file, formats=("TIFF",)) as image:
        for page in range(1, getattr(image, "n_frames", 1)):
            image.seek(page)
            # A copy has no file, whose name Pillow would look up.
            yield Member(b"page-%04d.png" % (page + 1), _encode(image.copy(), "PNG"))


def walk_pdf(file: BinaryIO, rules: Rules) -> Iterator[Member]:
    import pypdfium2  # type: ignore[import-untyped]

    try:
        document = pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        raise Unusable(str(error)) from error
    for number in range(len(document)):
        yield Member(b"page-%04d.png" % (number + 1), _render(document, number, rules))


def _render(document: Any, number: int, rules: Rules) -> Iterator[bytes]:
    page = document[number]
    scale = rules.dpi / POINTS
    width, height = page.get_size()
    if width * height * scale**2 > rules.pixels:
        raise Unusable(f"page {number + 1} has more than max_pixels = {rules.pixels} at {rules.dpi} dpi")
    picture = page.render(scale=scale)
    yield from _encode(picture.to_pil(), "PNG")
    picture.close()
    page.close()


def walk_video(file: BinaryIO, rules: Rules) -> Iterator[Member]:
    """The first frame, and each time the first one after the next step. Damaged frames are left out."""
    import av

    with av.open(file, mode="r") as source:
        if not source.streams.video:
            raise Unusable("there are no pictures in it")
        stream = source.streams.video[0]
        following = 0.0
        for frame in source.decode(stream):
            seconds = float(frame.time or 0.0)
            if seconds < following:
                continue
            if frame.width * frame.height > rules.pixels:
                raise Unusable(f"its frames have more than max_pixels = {rules.pixels}")
            yield Member(b"at-%010.3fs.jpg" % seconds, _encode(_picture(frame), "JPEG", quality=SHARPNESS))
            following = seconds + rules.video_seconds


def _picture(frame: Any) -> Any:
    return frame.to_image()


def _encode(image: Any, kind: str, **options: Any) -> Iterator[bytes]:
    file = io.BytesIO()
    if kind == "PNG":
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            image = image.convert("RGB")
        options |= {"compress_level": 1}
    image.save(file, kind, **options)
    yield file.getvalue()


WALKERS: dict[str, Callable[[BinaryIO, Rules], Iterator[Member]]] = {
    "zip": walk_zip,
    "tar": walk_tar,
    "tiff": walk_tiff,
    "pdf": walk_pdf,
    "video": walk_video,
}
MODULES = ("bz2", "gzip", "lzma", "zlib", "encodings.cp437")


class Plain(io.RawIOBase):
    """A file that shows no descriptor, as libtiff would duplicate it, which the child may not."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._fd, offset, whence)

    def readinto(self, buffer: Any) -> int:
        data = os.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def open_plain(fd: int) -> BinaryIO:
    return io.BufferedReader(Plain(fd), PIECE)


def prepare(kind: str) -> None:
    """Import all that this kind may need, while files can still be opened. Raises ImportError."""
    from PIL import Image

    from stages.decoding import pixels

    pixels.prepare()
    Image.init()  # its plug-ins
    for module in MODULES:
        importlib.import_module(module)
    if kind in LIBRARIES:
        package = importlib.import_module(LIBRARIES[kind])
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__") and "._cli" not in found.name:
                importlib.import_module(found.name)
