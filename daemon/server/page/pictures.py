"""Small pictures of images. Files are decoded in disposable processes, as the daemon does it, and whatever a file holds, a
browser gets pixels that were encoded here; unless somebody opens or downloads the original."""

from __future__ import annotations

import contextlib
import io
import os
import textwrap
import threading
import time
from pathlib import Path
from urllib.parse import quote
from xml.sax.saxutils import escape

import anyio
from anyio.to_thread import run_sync
from PIL import Image as Picture
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from daemon.config.loading import Config
from daemon.config.state import PICTURES
from daemon.core.errors import SourceChanged
from daemon.inbox.origin import origin_of
from daemon.ledger.record import Record
from daemon.server.page.exif import read_exif
from daemon.server.page.views import visible
from daemon.system.ownership import hand_over, make_folder
from stages.contract.base import ImageError, Limits
from stages.images.decoder import Decoders
from stages.images.images import inspect

DECODERS = 2
MOST_BYTES = 1 << 29  # of a file
FAILURE_SECONDS, MOST_FAILURES = 300.0, 10_000
QUALITY = 80  # of WebP
SUFFIX = ".webp"
KEPT = 0.9  # of the bound, after the oldest were removed

PART = 1 << 20  # bytes: whoever takes them slowly does not have all in a buffer
SHOWN_BY_BROWSERS = {name: f"image/{name.lower()}" for name in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "AVIF")}

PLACEHOLDER = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 320 240"><rect width="320" height="240" fill="#565b61"/>'
    '<g fill="#fff" font-family="system-ui, sans-serif" font-size="16" text-anchor="middle">{}</g></svg>'
)
LINE = '<text x="160" y="{}">{}</text>'
LINE_LETTERS, MOST_LINES = 32, 6


class NoPicture(Exception):
    """There is no picture; the message says why, in a few words."""


class Pictures:
    """Decodes, shrinks and keeps pictures. Any thread may use it."""

    def __init__(self, folder: Path, most_bytes: int, limits: Limits) -> None:
        """folder: of the kept pictures. most_bytes: that they may have together."""
        self._cache = Cache(folder, most_bytes)
        self._limits = limits
        self._decoders = Decoders(DECODERS, limits)
        self._failures: dict[str, tuple[float, str]] = {}  # until when, and why

    @classmethod
    def of(cls, config: Config) -> Pictures:
        return cls(config.state.path / PICTURES, config.page.pictures_bytes, config.pipeline.limits())

    def close(self) -> None:
        self._decoders.close()

    def find(self, record: Record, side: int) -> bytes | None:
        """What `get` would return, if that needs no work. Raises NoPicture if the file could not be shown a moment ago."""
        name = _name_of(record, side)
        if (known := self._failures.get(name)) and time.monotonic() < known[0]:
            raise NoPicture(known[1])
        # Without a digest the file could not be read, or not be decoded.
        return self._cache.get(name) if record.digest else None

    def get(self, record: Record, side: int) -> bytes:
        """As WebP, at most `side` pixels wide and high. Raises NoPicture."""
        if found := self.find(record, side):
            return found
        name = _name_of(record, side)
        try:
            content = self._make(record, side)
        except NoPicture as error:
            if len(self._failures) >= MOST_FAILURES:
                self._failures.clear()
            self._failures[name] = time.monotonic() + FAILURE_SECONDS, str(error)
            raise
        if record.digest:
            self._cache.put(name, content)
        return content

    def _make(self, record: Record, side: int) -> bytes:
        data = memoryview(read_source(record))
        try:
            header = inspect(data, self._limits)
        except ImageError as error:
            raise NoPicture(error.detail) from error
        [pixels] = self._decoders.decode_all([(data, header)])
        if isinstance(pixels, ImageError):
            raise NoPicture(pixels.detail)
        picture = Picture.fromarray(pixels)
        picture.thumbnail((side, side), Picture.Resampling.BICUBIC, reducing_gap=2.0)
        out = io.BytesIO()
        picture.save(out, "WEBP", quality=QUALITY, method=2)
        return out.getvalue()


def _name_of(record: Record, side: int) -> str:
    return f"{record.digest.hex() or record.id}-{side}-srgb"


def draw_reason(reason: str) -> bytes:
    """An SVG that stands for a picture and says why there is none, or only that there is none."""
    lines = textwrap.wrap(f"No picture: {reason}" if reason else "No picture", LINE_LETTERS)[:MOST_LINES]
    top = 126 - 11 * (len(lines) - 1)
    drawn = [LINE.format(top + 22 * place, escape(line)) for place, line in enumerate(lines)]
    return PLACEHOLDER.format("".join(drawn)).encode()


def read_source(record: Record) -> bytes:
    """The bytes of an image's file, if it is still the version that has the result. Raises NoPicture."""
    try:
        if record.version.size > MOST_BYTES:
            raise NoPicture("the file is too large to be shown")
        return origin_of(record.inbox_path).read_source(record)
    except FileNotFoundError:
        raise NoPicture("the file is no longer there") from None
    except SourceChanged:
        raise NoPicture("the file has changed since") from None
    except OSError as error:
        raise NoPicture(f"the file cannot be read: {error.strerror or error}") from error


def read_making(record: Record) -> list[tuple[str, str]]:
    """When and with which camera it was made, as its file says. Raises NoPicture."""
    return [(name, visible(text)) for name, text in read_exif(read_source(record))]


class Original(Response):
    """A file as it is, if it is still the version that has the result. A browser shows it only if it is a picture of a kind
    that browsers know; anything else, such as a page with scripts, is downloaded."""

    def __init__(self, record: Record, limiter: anyio.CapacityLimiter, *, as_download: bool) -> None:
        """limiter: of the files that are in memory at once."""
        super().__init__()
        self._record, self._limiter, self._as_download = record, limiter, as_download

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, kind = self._record, SHOWN_BY_BROWSERS.get(self._record.format)
        way = "attachment" if self._as_download or not kind else "inline"
        headers = {
            "content-disposition": f"{way}; filename*=UTF-8''{quote(os.path.basename(record.path), safe='')}",
            "content-security-policy": "default-src 'none'; sandbox",
        }
        async with self._limiter:
            try:
                content = memoryview(await run_sync(read_source, record))
            except NoPicture as error:
                answer: Response = PlainTextResponse(f"There is no original: {error}.\n", 404)
            else:
                headers["content-length"] = str(len(content))
                parts = (bytes(content[at : at + PART]) for at in range(0, len(content), PART))
                answer = StreamingResponse(
                    parts, headers=headers, media_type=kind or "application/octet-stream"
                )
            await answer(scope, receive, send)


class Cache:
    """Files of a folder, of which the longest unused go when there are too many."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most = most_bytes
        self._lock = threading.Lock()
        make_folder(folder)
        self._bytes = sum(size for _, size, _ in self._list())

    def get(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return content

    def put(self, name: str, content: bytes) -> None:
        """Keep it, unless the disk does not take it."""
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{threading.get_ident()}")
        try:
            make_folder(path.parent)
            temporary.write_bytes(content)
            hand_over(temporary)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        with self._lock:
            self._bytes += len(content)
            if self._bytes > self._most:
                self._remove_oldest()

    def _remove_oldest(self) -> None:
        found = sorted(self._list())
        self._bytes = sum(size for _, size, _ in found)
        for _, size, path in found:
            if self._bytes <= KEPT * self._most:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            self._bytes -= size

    def _list(self) -> list[tuple[float, int, Path]]:
        """When each file was last used, its size, and the file."""
        found = []
        for path in self._folder.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}{SUFFIX}"
