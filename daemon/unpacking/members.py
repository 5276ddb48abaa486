"""Reads what is in a file, in the sealed child process: each kind yields its members, one after another.

The libraries get an open file, as the child can open none. Whatever they raise is the file's fault.
"""

from __future__ import annotations

import importlib
import io
import lzma
import mmap
import os
import pkgutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from daemon.unpacking.kinds import LIBRARIES
from daemon.unpacking.messages import PIECE, Declared, FolderEntry, Link, Twin
from daemon.unpacking.zips import RepairedZip, load_code_pages, zip_names
from stages.contract.base import ImageError
from stages.images import pages, tiff

SHARPNESS = 95  # of frames, as JPEG
POINTS = 72  # of a PDF, to the inch
ENCRYPTED = 0x1  # a member of a zip
CUT = (
    "it begins as a zip file, but the list of its files, which is at the end, cannot be read; "
    "perhaps it is incomplete: copy it into the inbox again"
)
ADVICE = "files in it are encrypted: unpack it with its password, and put the files into the inbox"
ZIP_HEAD = b"PK\x03\x04"  # before a member
IS_FOLDER = 0x10  # in DOS
NO_FILES = (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK)
NO_MEMBERS = (tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)  # of a tar
NOTES = (b"V", b"D")  # of GNU tar: the name of a volume, the list of a folder
USUAL_RATE = 25.0  # frames a second of a video without times
STRIP_ROWS = 256  # of a page that are looked at together
WIDEST = 16  # a pixel may be so many times as wide as high, or the reverse; more is damage


class Rules(msgspec.Struct, frozen=True):
    """dpi: of a document's pages. video_seconds: between two frames. pixels: the most that a page may have."""

    dpi: int = 200
    video_seconds: float = 1.0
    pixels: int = 100_000_000


class Member(NamedTuple):
    """A file in a file. name: as the container has it, which may be anything. pieces: its bytes. size: how many it
    should have; 0: not known."""

    name: bytes
    pieces: Iterator[bytes]
    size: int = 0


# None: nothing yet, but it goes on.
Item = Declared | Member | Link | FolderEntry | Twin | None


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
        try:
            data = os.read(self._fd, len(buffer))
        except OSError:  # a library would call the file damaged
            os._exit(os.EX_IOERR)
        buffer[: len(data)] = data
        return len(data)


class UnbufferedReader(io.BufferedReader):
    """An open file without `fileno`: libtiff would duplicate the descriptor, which the child may not."""

    def __init__(self, fd: int) -> None:
        super().__init__(_Raw(fd), PIECE)
        self.fd = fd


def walk_zip(file: UnbufferedReader, _: Rules) -> Iterator[Item]:
    entries = _opened_zip(file).infolist()
    if not entries and _begins_as_zip(file):
        raise Unusable(CUT)
    yield Declared(len(entries), sum(entry.file_size for entry in entries))
    for entry, name in zip(entries, zip_names(entries), strict=True):
        yield _item_of(file, entry, name)
    if any(entry.flag_bits & ENCRYPTED for entry in entries):
        raise Unusable(ADVICE)


def _item_of(file: UnbufferedReader, entry: zipfile.ZipInfo, name: str) -> Item:
    mode = entry.external_attr >> 16
    is_folder = stat.S_ISDIR(mode) or entry.external_attr & IS_FOLDER
    if name.endswith(("/", "\\")) or (is_folder and not entry.file_size):
        return FolderEntry()
    if stat.S_IFMT(mode) in NO_FILES:  # some tools write nonsense there
        return Link()
    return Member(name.encode(errors="replace"), _read_entry(file, entry), entry.file_size)


def _opened_zip(file: UnbufferedReader) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(RepairedZip(file), metadata_encoding="latin-1")
    except zipfile.BadZipFile as error:
        if not _begins_as_zip(file):
            raise
        raise Unusable(CUT) from error


def _begins_as_zip(file: UnbufferedReader) -> bool:
    file.seek(0)
    return file.read(len(ZIP_HEAD)) == ZIP_HEAD


def _read_entry(file: UnbufferedReader, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """Its bytes. The name before them is not looked at: tools write it in other ways than that in the list."""
    if entry.flag_bits & ENCRYPTED:
        raise Unusable("it is encrypted: unpack it with its password, and put that file into the inbox")
    # macOS's Archive Utility states places in 32 bits only.
    for place in range(entry.header_offset, -1, -(1 << 32)):
        file.seek(place)
        head = file.read(30)
        if len(head) == 30 and head.startswith(ZIP_HEAD):
            break
    else:
        raise zipfile.BadZipFile("no file begins where the list says")
    file.seek(sum(struct.unpack_from("<HH", head, 26)), os.SEEK_CUR)
    with zipfile.ZipExtFile(file, "r", entry) as source:
        yield from _pieces(source)


class _Entry(tarfile.TarInfo):
    """An entry of a tar: tarfile takes a damaged header for the end, and the rest would be lost without a message."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Entry:
        try:
            return super().fromtarfile(archive)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
            raise  # its end, marked or, as some programs leave it, not
        except tarfile.HeaderError as error:
            if not archive.offset:
                raise  # it is no tar
            raise Unusable(f"after {archive.offset:,} bytes it is damaged or incomplete: {error}") from error


def walk_tar(file: UnbufferedReader, _: Rules) -> Iterator[Item]:
    """Read from the start to the end: a tar has no list of what is in it."""
    options: Any = {"tarinfo": _Entry, "errors": "surrogateescape", "encoding": "utf-8"}
    with tarfile.open(fileobj=file, mode="r:*", **options) as archive:
        for entry in _walk_entries(archive):
            archive.members.clear()  # type: ignore[attr-defined]  # otherwise it remembers all of them
            if entry is None:
                yield None
            elif entry.isdir() or entry.type in NOTES:
                yield FolderEntry()
            elif entry.islnk():
                yield Twin(_tar_name(entry.name), _tar_name(entry.linkname))
            elif entry.type in NO_MEMBERS:
                yield Link()
            elif source := archive.extractfile(entry):  # a type that is not known is a file, by POSIX
                yield Member(_tar_name(entry.name), _pieces(source), entry.size)


def _walk_entries(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo | None]:
    """Also those of archives behind its end, as `cat a.tar b.tar` makes them; tar reads these only when asked."""
    has_ended = False
    while True:
        try:
            entry = archive.next()
        except (Unusable, *DAMAGE):
            if has_ended:  # by what is no tar
                return
            raise
        yield entry
        if has_ended := entry is None:
            archive.offset += tarfile.BLOCKSIZE  # of zeros


def _tar_name(name: str) -> bytes:
    """Its bytes, as no list of all names tells their code page."""
    return name.encode(errors="surrogateescape")


def _pieces(source: Any) -> Iterator[bytes]:
    while piece := source.read(PIECE):
        yield piece


def walk_tiff(file: UnbufferedReader, rules: Rules) -> Iterator[Item]:
    """Its pages, without masks and smaller copies."""
    size = os.lseek(file.fd, 0, os.SEEK_END)  # mmap itself would look it up, which a sealed process may not
    with mmap.mmap(file.fd, size, prot=mmap.PROT_READ) as data, memoryview(data) as view:
        count = pages.count_pages("TIFF", view)
        if count >= tiff.MOST:
            raise Unusable(f"it has {tiff.MOST:,} pages or more; split it into smaller files")
        yield Declared(count)
        for number, page in enumerate(tiff.walk(view), 1):
            yield None if page.is_copy else Member(b"page-%04d.png" % number, _draw_page(page, rules))


def _check_pixels(count: float, rules: Rules, fix: str = ": raise it under [pipeline]") -> None:
    if not count <= rules.pixels:  # a PDF may say NaN
        raise Unusable(f"it has more pixels than max_pixels = {rules.pixels}{fix} in daemon.toml")


def _draw_page(page: tiff.Directory, rules: Rules) -> Iterator[bytes]:
    from stages.images import pixels

    width, height = page.integer(tiff.WIDTH), page.integer(tiff.HEIGHT)
    _check_pixels(width * height, rules)
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


def walk_pdf(file: UnbufferedReader, rules: Rules) -> Iterator[Item]:
    import pypdfium2  # type: ignore[import-untyped]

    try:
        document = pypdfium2.PdfDocument(file)
    except pypdfium2.PdfiumError as error:
        if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
            raise Unusable(
                "it is encrypted; save it without its password, and put that file into the inbox"
            ) from error
        raise
    yield Declared(len(document))
    for number in range(len(document)):
        yield Member(b"page-%04d.png" % (number + 1), _render(document, number, rules))


def _render(document: Any, number: int, rules: Rules) -> Iterator[bytes]:
    page = document[number]
    scale = rules.dpi / POINTS
    width, height = page.get_size()
    _check_pixels(width * height * scale**2, rules, f" at {rules.dpi} dpi: lower dpi under [unpacking]")
    picture = page.render(scale=scale)
    yield from _encode(without_needless_colors(picture.to_pil()), "PNG")
    picture.close()
    page.close()


def without_needless_colors(image: Any) -> Any:
    """In gray if nothing has a color, as a scan: that takes two thirds of the time to write and to read."""
    if image.mode != "RGB":
        return image
    width, height = image.size
    for top in range(0, height, STRIP_ROWS):  # as a whole, its copies would take as much memory as the page
        strip = image.crop((0, top, width, min(top + STRIP_ROWS, height)))
        red, green, blue = (channel.tobytes() for channel in strip.split())
        if not red == green == blue:
            return image
    return image.getchannel("R")


def walk_video(file: UnbufferedReader, rules: Rules) -> Iterator[Item]:
    """The first frame, and each time the first one after the next step."""
    import av

    with av.open(file, mode="r") as source:
        if not source.streams.video:
            raise Unusable(
                "there are no pictures in it: it is incomplete, or not a video; copy it into the inbox again"
            )
        stream = source.streams.video[0]
        yield Declared(int((source.duration or 0) / av.time_base / rules.video_seconds) + 1)
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
                    yield Member(
                        b"at-%010.3fs.jpg" % seconds, _draw(frame, stream.sample_aspect_ratio, rules)
                    )
                    following = seconds + rules.video_seconds
            yield None
        if damaged:
            raise Unusable(f"some of its pictures are damaged ({damaged:,} packets)")


def _draw(frame: Any, shape: Any, rules: Rules) -> Iterator[bytes]:
    """shape: a pixel's width by its height; None or 0 if the video does not say."""
    width, height = frame.width, frame.height
    if shape and shape != 1 and 1 / WIDEST <= shape <= WIDEST:  # nothing is made smaller
        width, height = (round(width * shape), height) if shape > 1 else (width, round(height / shape))
    _check_pixels(width * height, rules)
    image = frame.to_image(width=width, height=height)
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


WALKERS: dict[str, Callable[[UnbufferedReader, Rules], Iterator[Item]]] = {
    "zip": walk_zip,
    "tar": walk_tar,
    "tiff": walk_tiff,
    "pdf": walk_pdf,
    "video": walk_video,
}
# What damaged bytes make the libraries raise. Other errors are bugs, and say which.
DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, SyntaxError),
    *(ValueError, struct.error, RuntimeError),  # libav's, pdfium's, Pillow's
)
WORDS = {"zip": "zip file", "tar": "tar archive", "tiff": "TIFF", "pdf": "PDF", "video": "video"}


def explain(error: Exception, kind: str) -> str:
    """Why a container or, with `kind` "", one of its members cannot be read. The libraries' own messages would name
    numbers, objects in memory and paths of this machine."""
    if isinstance(error, Unusable):
        return str(error)
    if isinstance(error, NotImplementedError) and kind in ("", "zip"):
        return "visiond cannot read its compression, for example Deflate64: compress it again with Deflate"
    if not isinstance(error, DAMAGE):
        return f"it cannot be read: the library for it fails ({type(error).__name__})"
    if kind:
        return f"it is damaged or incomplete, or not a {WORDS[kind]}: copy it into the inbox again"
    return "it is incomplete" if isinstance(error, EOFError) else "it is damaged"


MODULES = ("bz2", "gzip", "lzma", "zlib", "encodings.latin_1")


def prepare(kind: str) -> None:
    """Import all that this kind may need, while files can still be opened. Raises ImportError."""
    from PIL import Image

    from stages.images import pixels

    pixels.prepare()
    load_code_pages()
    Image.init()  # its plug-ins
    if kind == "tiff":
        importlib.import_module("stages.images.samples")
    for module in MODULES:
        importlib.import_module(module)
    if kind in LIBRARIES:
        package = importlib.import_module(LIBRARIES[kind])
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__") and "._cli" not in found.name:
                importlib.import_module(found.name)
