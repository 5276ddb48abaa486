"""Reads what is in a file, in the sealed child process: each kind yields its members, one after another.

The libraries get an open file, as the child can open none. Whatever they raise is the file's fault.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import pkgutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from daemon.unpacking.kinds import LIBRARIES
from stages.base import ImageError
from stages.decoding import pages, tiff

PIECE = 1 << 20  # bytes of a member that are passed on together
SHARPNESS = 95  # of frames, as JPEG
POINTS = 72  # of a PDF, to the inch
ENCRYPTED = 0x1  # a member of a zip
ADVICE = "files in it are encrypted: unpack it with its password, and put the files into the inbox"
ZIP_HEAD = b"PK\x03\x04"
USUAL_RATE = 25.0  # frames a second of a video without times


class Rules(msgspec.Struct, frozen=True):
    """dpi: of a document's pages. video_seconds: between two frames. pixels: the most that a page may have."""

    dpi: int = 200
    video_seconds: float = 1.0
    pixels: int = 100_000_000


class Expected(NamedTuple):
    """What the container says that it has; it may be wrong. It lets the parent refuse it before it writes anything."""

    files: int
    bytes: int = 0


class Member(NamedTuple):
    """A file in a file. name: as the container has it, which may be anything. pieces: its bytes. size: how many it
    should have; 0: not known."""

    name: bytes
    pieces: Iterator[bytes]
    size: int = 0


class Link(NamedTuple):
    """A link, device or FIFO, which is left out."""


# None: nothing yet, but it goes on.
Item = Expected | Member | Link | None


class Unusable(Exception):
    """A container or a member cannot be read; the message says why."""


class _Raw(io.RawIOBase):
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


class Source(io.BufferedReader):
    """An open file without `fileno`: libtiff would duplicate the descriptor, which the child may not."""

    def __init__(self, fd: int) -> None:
        super().__init__(_Raw(fd), PIECE)
        self.fd = fd


def walk_zip(file: Source, _: Rules) -> Iterator[Item]:
    with _opened_zip(file) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        yield Expected(len(entries), sum(entry.file_size for entry in entries))
        for entry in entries:
            if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
                yield Link()
                continue
            # Names are UTF-8, or else the old code page 437.
            name = entry.filename.encode(errors="surrogateescape")
            yield Member(name, _read_entry(archive, entry), entry.file_size)
        if any(entry.flag_bits & ENCRYPTED for entry in entries):
            raise Unusable(ADVICE)


def _opened_zip(file: Source) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        file.seek(0)
        if file.read(len(ZIP_HEAD)) != ZIP_HEAD:
            raise
        raise Unusable(
            "it begins as a zip file, but the list of its files, which is at the end, cannot be read; "
            "perhaps it was cut: copy it into the inbox again"
        ) from error


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    if entry.flag_bits & ENCRYPTED:
        raise Unusable("it is encrypted")
    with archive.open(entry) as source:
        yield from _pieces(source)


class _Entry(tarfile.TarInfo):
    """An entry of a tar whose end is marked: tarfile takes a damaged header for the end, and the rest would be lost
    without a message."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Entry:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            if not archive.offset:
                raise  # it is no tar
            raise Unusable(f"after {archive.offset:,} bytes it is damaged, or was cut: {error}") from error


def walk_tar(file: Source, _: Rules) -> Iterator[Item]:
    """Read from the start to the end: a tar has no list of what is in it."""
    options: Any = {"tarinfo": _Entry, "errors": "surrogateescape", "encoding": "utf-8"}
    with tarfile.open(fileobj=file, mode="r:*", **options) as archive:
        while entry := archive.next():
            archive.members.clear()  # type: ignore[attr-defined]  # otherwise it remembers all of them
            if entry.isdir():
                yield None
            elif entry.isfile() and (source := archive.extractfile(entry)):
                yield Member(entry.name.encode(errors="surrogateescape"), _pieces(source), entry.size)
            else:
                yield Link()


def _pieces(source: Any) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece


def walk_tiff(file: Source, rules: Rules) -> Iterator[Item]:
    """Its pages, without masks and smaller copies."""
    with mmap.mmap(file.fd, 0, prot=mmap.PROT_READ) as data, memoryview(data) as view:
        count = pages.count_pages("TIFF", view)
        if count >= tiff.MOST:
            raise Unusable(f"it has {tiff.MOST:,} pages or more; split it into smaller files")
        yield Expected(count)
        for number, page in enumerate(tiff.walk(view), 1):
            yield None if page.is_copy else Member(b"page-%04d.png" % number, _draw_page(page, rules))


def _draw_page(page: tiff.Directory, rules: Rules) -> Iterator[bytes]:
    from stages.decoding import pixels

    width, height = page.integer(tiff.WIDTH), page.integer(tiff.HEIGHT)
    if width * height > rules.pixels:
        raise Unusable(f"it has more pixels than max_pixels = {rules.pixels}")
    try:
        page.refuse()
        with pixels.open_tiff(page) as image:
            image.load()
            # Pillow has turned what it has read itself.
            turn = pixels.TRANSPOSITIONS.get(page.orientation) if page.is_deep else None
            # A copy has no file, whose name Pillow would look up.
            yield from _encode(image.transpose(turn) if turn is not None else image.copy(), "PNG")
    except ImageError as error:
        raise Unusable(error.detail) from error


def walk_pdf(file: Source, rules: Rules) -> Iterator[Item]:
    import pypdfium2  # type: ignore[import-untyped]

    try:
        document = pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise Unusable(
                "it is encrypted; save it without its password, and put that file into the inbox"
            ) from error
        raise Unusable(str(error)) from error
    yield Expected(len(document))
    for number in range(len(document)):
        yield Member(b"page-%04d.png" % (number + 1), _render(document, number, rules))


def _render(document: Any, number: int, rules: Rules) -> Iterator[bytes]:
    page = document[number]
    scale = rules.dpi / POINTS
    width, height = page.get_size()
    if not width * height * scale**2 <= rules.pixels:
        raise Unusable(f"it has more pixels than max_pixels = {rules.pixels} at {rules.dpi} dpi")
    picture = page.render(scale=scale)
    yield from _encode(picture.to_pil(), "PNG")
    picture.close()
    page.close()


def walk_video(file: Source, rules: Rules) -> Iterator[Item]:
    """The first frame, and each time the first one after the next step."""
    import av

    with av.open(file, mode="r") as source:
        if not source.streams.video:
            raise Unusable("there are no pictures in it")
        stream = source.streams.video[0]
        yield Expected(int((source.duration or 0) / av.time_base / rules.video_seconds) + 1)
        rate, following, count, damaged = float(stream.average_rate or USUAL_RATE), 0.0, 0, 0
        for packet in source.demux(stream):
            try:
                frames: list[Any] = packet.decode()
            except av.error.InvalidDataError:
                frames, damaged = [], damaged + 1
            for frame in frames:
                seconds = count / rate if frame.time is None else float(frame.time)
                count += 1
                if seconds >= following:
                    yield Member(b"at-%010.3fs.jpg" % seconds, _draw(frame, rules))
                    following = seconds + rules.video_seconds
            yield None
        if damaged:
            raise Unusable(f"some of its pictures are damaged ({damaged:,} packets)")


def _draw(frame: Any, rules: Rules) -> Iterator[bytes]:
    if frame.width * frame.height > rules.pixels:
        raise Unusable(f"it has more pixels than max_pixels = {rules.pixels}")
    image = frame.to_image()
    # The angle is counterclockwise for both.
    yield from _encode(image.rotate(frame.rotation, expand=True), "JPEG", quality=SHARPNESS)


def _encode(image: Any, kind: str, **options: Any) -> Iterator[bytes]:
    file = io.BytesIO()
    if kind == "PNG":
        if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            image, options["icc_profile"] = image.convert("RGB"), None
        options["compress_level"] = 1
    image.save(file, kind, **options)
    file.seek(0)
    return _pieces(file)


WALKERS: dict[str, Callable[[Source, Rules], Iterator[Item]]] = {
    "zip": walk_zip,
    "tar": walk_tar,
    "tiff": walk_tiff,
    "pdf": walk_pdf,
    "video": walk_video,
}
MODULES = ("bz2", "gzip", "lzma", "zlib", "encodings.cp437")


def prepare(kind: str) -> None:
    """Import all that this kind may need, while files can still be opened. Raises ImportError."""
    from PIL import Image

    from stages.decoding import pixels

    pixels.prepare()
    Image.init()  # its plug-ins
    if kind == "tiff":
        importlib.import_module("stages.decoding.samples")
    for module in MODULES:
        importlib.import_module(module)
    if kind in LIBRARIES:
        package = importlib.import_module(LIBRARIES[kind])
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__") and "._cli" not in found.name:
                importlib.import_module(found.name)
