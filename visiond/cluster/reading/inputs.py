"""Lists INPUT: a folder, a pattern, a prefix of a store, a list of URLs or bytes as Parquet or JSON lines, tars.

The driver reads names only. A tar, or a row group of Parquet with bytes, is one input with many images: an actor
reads them (fetching.py).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

import msgspec

from daemon.config.ignored import ignored_by
from daemon.config.loading import Config
from daemon.core.errors import MissingLibrary, NothingFound, WrongArgument
from daemon.core.stores import StoreFailed
from daemon.core.urls import is_url, split_url
from daemon.inbox.walk import Unread, Walk
from daemon.unpacking.kinds import FOLDER, TIFF, kind_of
from visiond.cluster.reading.objects import list_again, open_object, open_stream, read_object

URL_COLUMNS = ("url", "uri", "path", "location", "file", "file_name")
BYTES_COLUMNS = ("bytes", "image", "data", "content")
TAR = (".tar", ".tar.gz", ".tgz")
PARQUET = ".parquet"
LISTS = (PARQUET, ".jsonl", ".ndjson")
TAR_IMAGES, CONTAINER_IMAGES = 1000, 100  # guesses: in a tar, and in a file that is unpacked
WILD = re.compile(r"[*?\[]")
T = TypeVar("T")
IN_UNPACKED = re.compile(re.escape(FOLDER) + b"/")


class ClusterInput(NamedTuple):
    """What makes a row, or for a tar or a row group many.

    name: of the row, relative to the listing's root. at: the file or object with the bytes. kind: "file", "tar",
    "rows" (the row group number `offset` of a Parquet file), "line" (`length` bytes at `offset` of a file of JSON
    lines), or "nothing" (row `offset` of a list, which has no URL). images: their number, as far as the driver knows.
    column: the one with the bytes. list_name: the list as INPUT names it, or the tar as the image's path does; empty in a
    folder. row: its number in the list, from 0; that of the first for "rows"; -1 for a tar, and in a folder. start, size:
    where its line is in a list of JSON lines, in bytes.
    """

    name: bytes
    at: bytes
    version: bytes = b""
    kind: str = "file"
    offset: int = 0
    length: int = 0
    images: int = 1
    column: str = ""
    list_name: bytes = b""
    row: int = -1
    start: int = 0
    size: int = 0


class InputListing:
    """The inputs of an INPUT, in an order that is nearly the same each time.

    root: what names are relative to; empty for a list of URLs. unread: folders that could not be listed.
    """

    def __init__(self, source: str, config: Config, *, column: str = "") -> None:
        """column: of a list, with the URLs or the bytes. Raises WrongArgument."""
        self._ignored = ignored_by(config.inbox[0].ignore)
        self._recursive, self._kinds = config.inbox[0].recursive, config.inbox[0].unpack
        self.column, self._given = column, source
        self.source = source if is_url(source) else os.path.abspath(os.path.expanduser(source))
        self._host = "/".join(self.source.split("/")[:3]) if is_url(self.source) else ""
        if WILD.search(self._host) and not self._host.startswith("http"):
            raise WrongArgument(
                f"{source} has a wildcard in the name of its bucket; name one bucket, as in s3://photos/*.jpg."
            )
        self.is_list = self.source.endswith(LISTS)
        self._wild = not self.is_list and self._has_pattern()
        self.root = self._find_root()
        self._pattern = compile_pattern(self.source[len(self.root) + 1 :]) if self._wild else None
        self.unread = Unread(os.fsencode(self.root), logs=False)
        start = self.root or self.source
        if not is_url(self.source) and not os.path.exists(start):
            raise WrongArgument(f"There is no {start}; name a folder, a file or a URL.")

    def _has_pattern(self) -> bool:
        """A name with such characters is a name, if there is a file of that name."""
        if is_url(self.source):
            return bool(WILD.search(split_url(self.source)[1]))
        return bool(WILD.search(self.source)) and not os.path.exists(self.source)

    def _find_root(self) -> str:
        if self.is_list:
            return ""
        if self._wild:
            start = WILD.search(self.source, len(self._host))
            assert start
            return self.source[: start.start()].rpartition("/")[0]
        if self.source.endswith(TAR) or (not is_url(self.source) and os.path.isfile(self.source)):
            return self.source.rpartition("/")[0]
        return self.source.rstrip("/")

    def inputs(self) -> Iterator[ClusterInput]:
        """Raises NothingFound, StoreFailed, WrongArgument."""
        found = 0
        for found, each in enumerate(self._inputs(), 1):  # noqa: B007 - the count is for after the loop
            yield each
        if not found and not self.unread:
            raise NothingFound(f"{self.source}: there is no file.")

    def _inputs(self) -> Iterator[ClusterInput]:
        if self.is_list:
            find = _list_parquet if self.source.endswith(PARQUET) else _list_lines
            yield from find(self.source, self.column, os.fsencode(self._given))
            return
        if self.root != self.source.rstrip("/") and not self._wild:  # a single file
            name = os.fsencode(self.source[len(self.root) + 1 :])
            yield self._input(
                unquote_to_bytes(name) if is_url(self.source) else name, version_of(self.source)
            )
            return
        found = self._list_store() if is_url(self.root) else self._walk()
        for name, version in found:
            if self._matches(name):
                yield self._input(name, version)

    def _matches(self, name: bytes) -> bool:
        return self._pattern is None or bool(self._pattern.fullmatch(name))

    def _input(self, name: bytes, version: bytes) -> ClusterInput:
        # Only a pattern or a name asks for the images in a tar; in a folder a tar is a file like others.
        is_tar = self.source.endswith(TAR) and name.endswith(tuple(map(str.encode, TAR)))
        at = os.path.join(os.fsencode(self.root), name)
        if is_url(self.root):
            at = f"{self.root}/{quote(name)}".encode()
        if is_tar:
            return ClusterInput(name, at, version, "tar", images=TAR_IMAGES, list_name=name)
        is_container = kind_of(name, self._kinds) not in ("", TIFF)
        return ClusterInput(name, at, version, images=CONTAINER_IMAGES if is_container else 1)

    def _walk(self) -> Iterator[tuple[bytes, bytes]]:
        """The files that an inbox would take, in the order of the folders."""
        for entry in Walk(os.fsencode(self.root), self._ignored, self._recursive, self.unread).files():
            if entry and stat.S_ISREG(entry[1].st_mode) and not self._is_unpacked(entry[0]):
                status = entry[1]
                yield entry[0], b"%d %d" % (status.st_size, status.st_mtime_ns)

    def _is_unpacked(self, path: bytes) -> bool:
        """Whether the daemon unpacked this file from a container that is an input too. That is unpacked here as well, so
        the file would get two rows."""
        return bool(self._kinds) and any(
            self._is_container(path[: found.start()]) for found in IN_UNPACKED.finditer(path)
        )

    def _is_container(self, path: bytes) -> bool:
        """Whether this is an input that will be unpacked."""
        if not (kind_of(path, self._kinds) and self._matches(path)):
            return False
        if self._ignored.hides(path):
            return False
        try:
            return stat.S_ISREG(os.lstat(os.path.join(os.fsencode(self.root), path)).st_mode)
        except OSError:
            return False

    def _list_store(self) -> Iterator[tuple[bytes, bytes]]:
        if self.root.startswith("http"):
            for url in list_pages(self.root + "/"):
                yield unquote_to_bytes(url[len(self.root) + 1 :].encode()), b""
            return
        prefix = split_url(self.root)[1]
        for meta in chain.from_iterable(list_again(self.root)):
            name = meta["path"][len(prefix) :].lstrip("/").encode()
            if self._takes(name.split(b"/"), meta["size"]):
                yield name, b"%d %s" % (meta["size"], (meta["e_tag"] or meta["version"] or "").encode())

    def _takes(self, parts: list[bytes], size: int) -> bool:
        """Whether an inbox in a store would take this object. size: a store's web console makes an object
        without bytes for each new folder."""
        if len(parts) > 1 and not self._recursive:
            return False
        is_folder = not size and not os.path.splitext(parts[-1])[1]
        return bool(parts[-1]) and not is_folder and not self._ignored.hides(b"/".join(parts))


def unquote_to_bytes(name: bytes) -> bytes:
    return unquote(name.decode()).encode()


def compile_pattern(pattern: str) -> re.Pattern[bytes]:
    """A shell pattern of paths: * and ? stand for no slash, ** for any folders."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    text = "".join(
        parts.get(part) or (part.replace("[!", "[^") if number % 2 else re.escape(part))
        for number, part in enumerate(found)
    )
    return re.compile(os.fsencode(text), re.DOTALL)


def version_of(file: str) -> bytes:
    """Size and time of a file. Empty for a URL."""
    if is_url(file):
        return b""
    status = os.stat(file)
    return b"%d %d" % (status.st_size, status.st_mtime_ns)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def list_pages(url: str) -> Iterator[str]:
    """The files that a web server's index pages link, below a URL that ends in a slash."""
    pages, seen = [url], {url}
    while pages:
        page, links = pages.pop(), _Links()
        links.feed(read_object(page).decode(errors="replace"))
        for link in links.found:
            target = urljoin(page, link)
            if urlsplit(target).query or not target.startswith(url) or target in seen:
                continue
            seen.add(target)
            if target.endswith("/"):
                pages.append(target)
            else:
                yield target


# Lists


def _list_parquet(file: str, column: str, given: bytes) -> Iterator[ClusterInput]:
    """given: the list as INPUT names it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingLibrary(
            "Parquet needs pyarrow, which the extra ray has: pip install 'visiond[ray]'."
        ) from error
    with open_list(file, open_object) as source:
        table = pyarrow.parquet.ParquetFile(source)
        types = {field.name: field.type for field in table.schema_arrow}
        chosen = choose_column(file, list(types), column)
        kind = types[chosen]
        is_struct = pyarrow.types.is_struct(kind)  # as Hugging Face's datasets write images
        if is_struct or pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
            at, name, version = os.fsencode(file), os.fsencode(os.path.basename(file)), version_of(file)
            first = 0
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                yield ClusterInput(name, at, version, "rows", group, 0, rows, chosen, given, first)
                first += rows
            return
        batches = table.iter_batches(columns=[chosen])
        values = (value for batch in batches for value in batch.column(0).to_pylist())
        for number, value in enumerate(values, 1):
            if value is None:
                at, own = os.fsencode(file), os.fsencode(f"{os.path.basename(file)}/{number}")
                version = version_of(file)
                yield ClusterInput(own, at, version, "nothing", number, 0, 1, chosen, given, number - 1)
            else:
                yield _named(file, str(value), given, number - 1)


def open_list(file: str, opener: Callable[[str], T]) -> T:
    """What `opener` returns. Raises WrongArgument, or StoreFailed if the store is the cause."""
    try:
        return opener(file)
    except OSError as error:
        if isinstance(error, StoreFailed) and error.is_general:
            raise
        raise WrongArgument(f"{file} cannot be read: {error.strerror or error}.") from error


def _list_lines(file: str, column: str, given: bytes) -> Iterator[ClusterInput]:
    offset, chosen, rows = 0, column, 0
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    at, version = os.fsencode(file), version_of(file)
    with open_list(file, open_stream) as source:
        for number, line in enumerate(source, 1):
            if line.strip():
                row = _decode(file, number, line, decode, is_first=not chosen)
                chosen = chosen or choose_column(file, list(row), "")
                value, own = row.get(chosen), f"{os.path.basename(file)}/{number}"
                if value is not None and (chosen in URL_COLUMNS or (column and is_url(str(value)))):
                    yield _named(file, str(value), given, rows, offset, len(line))
                else:  # a line that has nothing is found when it is read, and is a row with the reason
                    name = os.fsencode(str(row.get("name") or row.get("path") or own))
                    span = offset, len(line)
                    yield ClusterInput(name, at, version, "line", *span, 1, chosen, given, rows, *span)
                rows += 1
            offset += len(line)


def _decode(
    file: str, number: int, line: bytes, decode: Callable[[bytes], dict[str, Any]], *, is_first: bool
) -> dict[str, Any]:
    """Empty if it is no object of JSON. Raises WrongArgument for the first line: then the file is no such list."""
    try:
        return decode(line)
    except msgspec.MsgspecError as error:
        if is_first:
            raise WrongArgument(f"{file}, line {number}: {error}.") from error
        return {}


def choose_column(file: str, names: list[str], column: str) -> str:
    """The column with the URLs or the bytes. Raises WrongArgument."""
    if column and column not in names:
        raise WrongArgument(f'{file} has no column "{column}"; it has {", ".join(names)}.')
    for name in (column, *BYTES_COLUMNS, *URL_COLUMNS):
        if name and name in names:
            return name
    raise WrongArgument(
        f"{file} has none of the columns {', '.join((*URL_COLUMNS, *BYTES_COLUMNS))}; name it with --column."
    )


def _named(file: str, value: str, given: bytes, row: int, start: int = 0, size: int = 0) -> ClusterInput:
    """An input by its URL or path; a relative path is relative to the list's folder."""
    if is_url(value):
        place = at = value
    elif file.startswith("http"):
        place = at = urljoin(file, value)
    elif is_url(file):  # s3://, gs:// or az://, for which urljoin does nothing
        root, path = split_url(file)
        name = os.path.normpath(os.path.join("/", os.path.dirname(path), value))
        place, at = f"{root}{name}", f"{root}{quote(name)}"
    else:
        place = at = os.path.join(os.path.dirname(file), value)
    return ClusterInput(
        os.fsencode(place), os.fsencode(at), b"", "file", 0, 0, 1, "", given, row, start, size
    )
