"""The tables of daemon.toml: every key with its default, its limits and its description.

docs/configuration.md and daemon.toml are generated from this file, pipeline.py, output.py, models.py and
second_look.py.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import re
import textwrap
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlencode

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from daemon.config.ignored import check_patterns
from daemon.config.values import (
    OUT_OF_RANGE,
    ByteCount,
    ContainerKind,
    Ratio,
    check_address,
    check_name,
    check_networks,
    check_public_names,
    check_root_path,
    check_url,
    most_of,
)
from daemon.core.urls import check_bucket
from stages.contract.binning import Thresholds


class Section(BaseModel):
    """What a key means stands below it, for people who read the code, the reference and the page."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    @functools.cache
    def about(cls) -> dict[str, str]:
        """These texts, by key. Not by pydantic, which would read the source at every start."""
        [table] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        found = {}
        for each in itertools.pairwise(ast.iter_child_nodes(table)):
            match each:
                case ast.AnnAssign(ast.Name(key)), ast.Expr(ast.Constant(str(text))):
                    found[key] = " ".join(text.split())
        return found

    @field_validator("*")
    @classmethod
    def _check_number(cls, value: object, field: ValidationInfo) -> object:
        """Refuse infinite values and those that are too large for timers, the ledger or the kernel."""
        most = most_of(field.field_name or "")
        if isinstance(value, int | float) and not -most <= value <= most:  # also refuses NaN
            raise PydanticCustomError(OUT_OF_RANGE, "is out of range")
        return value


class Inbox(Section):
    path: Path = Path("inbox")
    """Folder to watch."""
    url: Annotated[str, AfterValidator(check_bucket)] = ""
    """Instead of path: a prefix of an object store, for example "s3://bucket/prefix" (also gs://, az://). It is listed every
    rescan_seconds; objects stay where they are. Credentials come from the environment."""
    name: Annotated[str, AfterValidator(check_name)] = ""
    """Sub-folder for this inbox in results, failed, done and bins. Required if there are several inboxes."""
    priority: int = Field(0, ge=-1_000_000, le=1_000_000)
    """Images of the inbox with the highest priority are processed first: for urgent images beside an archive."""
    recursive: bool = True
    """Whether to watch folders inside the inbox too. false: if those belong to other programs."""
    settle_seconds: float = Field(2.0, ge=0)
    """A file is complete when it has not changed for this long; one that arrives by rename, at once. Longer for uploads that
    pause."""
    ignore: Annotated[list[str], AfterValidator(check_patterns)] = []
    """More files and folders to ignore, as in .gitignore: names, paths in the inbox, folders with / at the end. Hidden and
    unfinished files, recycle bins, and files beside images such as a.xmp are ignored by default; "!pattern" makes an
    exception."""
    on_success: Literal["keep", "move", "delete"] = "keep"
    """What to do with an image when its result is durable. move: into [output] done."""
    unpack: list[ContainerKind] = []
    """Kinds of files that are unpacked: the files in an archive, the pages of a PDF or a multi-page TIFF, and frames of a video
    become images of their own. pdf and video need the extra `documents`."""
    uploads: bool = False
    """Whether programs can upload images into it, by POST /api/images at the address of [page]. Each upload needs the token."""
    watch: Literal["auto", "inotify", "poll"] = "auto"
    """How to notice changes. poll: only by scans. auto: poll on network file systems, which send no events; otherwise inotify.
    Set poll for a mount that sends no events and is not recognized, as in some containers; inotify for a network folder into
    which only programs on this machine write."""

    def misuses(self) -> Iterator[str]:
        """Settings that a prefix of a store cannot have, only a folder."""
        if not self.url:
            return
        if "path" in self.model_fields_set:
            yield f"inbox: {self.url} has both a `path` and a `url`; keep one of them."
        if self.on_success != "keep":
            yield (
                f"inbox.on_success: visiond moves and deletes no object of {self.url}, as no store can do that only if the "
                'object is still the same; use "keep", and let a lifecycle rule of the bucket delete old objects.'
            )
        if self.unpack:
            yield (
                f"inbox.unpack: visiond writes nothing to {self.url}, so it unpacks nothing there; remove `unpack`, and drop "
                "archives into an inbox that is a folder."
            )
        if self.uploads:
            yield (
                f"inbox.uploads: visiond writes nothing to {self.url}; remove `uploads`, and let programs upload into an "
                "inbox that is a folder, or into the store itself."
            )
        if self.watch == "inotify":
            yield f'inbox.watch: a store such as {self.url} sends no events; use "auto".'

    @property
    def place(self) -> str:
        """Its folder, or its URL."""
        return self.url or str(self.path)

    @property
    def root(self) -> bytes:
        """The same, as the ledger has it."""
        return os.fsencode(self.place)


class StateSection(Section):
    path: Path = Path("state")
    """The daemon's own folder: ledger, lock, control socket, compiled kernels, what `visiond tune` measured."""


def _check_hours(text: str) -> str:
    """Accept "HH:MM-HH:MM" or ""."""
    found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", text)
    if text and not found:
        raise ValueError(
            f'"{text}" is not a time range; write a start and an end, for example "02:00-05:00", or ""'
        )
    if found and found.group(1, 2) == found.group(3, 4):
        raise ValueError(f'"{text}" starts and ends at the same time; write "" for any time')
    return text


class UpkeepSection(Section):
    quiet_hours: Annotated[str, AfterValidator(_check_hours)] = "02:00-05:00"
    """Local time range in which upkeep may start, while no image is in flight; it may cross midnight. Empty: any time."""
    verify_days: float = Field(7, ge=0)
    """Days between checks of the whole ledger and of a tenth of the sidecars, while work goes on. 0: never, if you run `visiond
    verify` yourself."""
    vacuum_days: float = Field(7, ge=0)
    """Days between attempts to shrink the ledger's file, if a quarter of it is free. Stops when images or commands arrive. 0:
    never, for a large ledger, as copying it back holds up new images for some seconds per gigabyte."""
    forget_days: float = Field(1, ge=0)
    """Days between looks for files that were skipped, and are deleted or ignored since: they leave the list. 0: never, and `run
    --once` does not look either."""
    prune_days: float = Field(0, ge=0)
    """Days between prunes, as by `visiond prune`, for inboxes whose files are often replaced or deleted. 0: never."""
    prune_age_days: float = Field(90, ge=1)
    """Prune versions that were replaced or gone longer ago than this many days; like --older-than. Set it to how long you need
    the results of replaced files."""
    backup_folder: str = ""
    """Folder for backups of the ledger, named by date; best on another disk. Empty: no backups."""
    backup_days: float = Field(1, gt=0)
    """Days between backups, if backup_folder is set. More for a large ledger."""
    backups_kept: int = Field(7, ge=1)
    """Number of backups to keep in backup_folder, and at backup_url; older ones are removed."""
    backup_url: Annotated[str, AfterValidator(check_bucket)] = ""
    """Prefix of an object store that gets each backup too, for example "s3://bucket/backups". No other daemon may use it.
    Credentials come from the environment."""

    @model_validator(mode="after")
    def _check_uploads(self) -> Self:
        if self.backup_url and not self.backup_folder:
            raise ValueError(
                "backup_url needs backup_folder too: a backup is made there first, then uploaded"
            )
        return self


DEFAULTS = Thresholds()


class BinningSection(Section):
    text_boxes_threshold: int = Field(DEFAULTS.text_boxes, ge=0, le=1_000_000_000)
    """A: more text boxes than this."""
    text_area_threshold: Ratio = DEFAULTS.text_area
    """A: text over more of the image's area."""
    text_score_threshold: Ratio = DEFAULTS.text_score
    """A: only lines with a higher score count as text boxes. A single letter or sign never counts, and two or more letters, of
    which at most three are different, only from 0.8. Lines of a page reader have no score, and count."""
    object_count_threshold: int = Field(DEFAULTS.object_count, ge=0, le=1_000_000_000)
    """B: more objects than this."""
    unique_objects_threshold: int = Field(DEFAULTS.unique_objects, ge=0, le=1_000_000_000)
    """B: more kinds of object than this."""
    spatial_dispersion_threshold: Ratio = DEFAULTS.spatial_dispersion
    """B: centers of objects spread over more of the image's area."""
    clip_similarity_threshold: float = Field(DEFAULTS.clip_similarity, ge=-1, le=1)
    """C: similarity of caption and image. Only reported."""
    rules: str = ""
    """A custom rule, "module:function", which gets a record and returns the name of the bin. Not with mode = "cascade".
    docs/results.md describes the record and has an example."""

    def thresholds(self) -> Thresholds:
        names = Thresholds.__struct_fields__
        return Thresholds(**{name: getattr(self, f"{name}_threshold") for name in names})


class Http(Section):
    listen: Annotated[str, AfterValidator(check_address)] = "127.0.0.1:9464"
    """Address of the pages. Empty: no pages. Port 0: any free port; the log line `ready` names it."""
    token_file: str = ""
    """File with a token, 8 or more printable ASCII characters, that every request must send as "Authorization: Bearer …".
    Empty: no token needed. The page needs it too, for changes, and on an address that is not a loopback address."""
    tls_certificate: str = ""
    """PEM file of a certificate, to serve the pages only by HTTPS. Empty: HTTP."""
    tls_key: str = ""
    """PEM file of the certificate's key, if it is not in the same file."""
    names: Annotated[list[str], AfterValidator(check_public_names)] = []
    """Names under which a reverse proxy serves these pages or [page], as browsers show them: "photos.example.org", or
    "photos.example.org:8443". Reading [page] then needs the token."""
    proxies: Annotated[list[str], AfterValidator(check_networks)] = ["127.0.0.1", "::1"]
    """IP addresses and networks of reverse proxies, which are believed in X-Forwarded-Proto and X-Forwarded-For. For one that
    is not on this machine, for example ["172.18.0.0/16"]."""

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def url_at(self, port: int) -> str:
        """port: the one that was taken, if any free one was asked for."""
        return f"{'https' if self.tls_certificate else 'http'}://{self.listen.rpartition(':')[0]}:{port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it, also not through a proxy."""
        return self.is_loopback and not self.names


class PageSection(Section):
    listen: Annotated[str, AfterValidator(check_address)] = "127.0.0.1:9465"
    """Address of the page with images, search and results. Empty: no page. Port 0: any free port; the log line `page` names it.
    The token, the certificate, `names` and `proxies` are those of [http]."""
    root_path: Annotated[str, AfterValidator(check_root_path)] = ""
    """Path below which a reverse proxy serves the page, for example "/visiond"; the proxy may take it away or leave it. Empty:
    the page has a name of its own."""
    pictures_bytes: ByteCount = 1 << 30
    """Most disk space for small pictures of images, which are kept in the state folder."""

    upload_bytes: ByteCount = Field(256 << 20, ge=1 << 20)
    """Most bytes of an uploaded file; a larger one is answered with 413."""
    uploads_waiting: int = Field(100_000, ge=1)
    """An inbox in which this many images wait takes no uploads: they are answered with 429. More, if programs deliver in
    bursts; disk space limits uploads too."""

    def address(self, path: str, /, **values: object) -> str:
        """Of a path, with the values that are not empty as its query. Without a scheme and a host, which a proxy knows."""
        given = {name: str(value) for name, value in values.items() if value not in ("", 0, None)}
        return self.root_path + (f"{path}?{urlencode(given)}" if given else path)


class SearchSection(Section):
    probability_threshold: Ratio = 0.00003
    """A search by meaning leaves out images that match the words with a lower probability. Only SigLIP's models give one; with
    others all images are ranked. 0: nothing is left out. docs/page.md explains the value."""


class TracesSection(Section):
    sample: Ratio = 0.0
    """Share of the images of which a trace is sent, for example 0.01. 0: none. Needs `pip install 'visiond[traces]'`."""
    endpoint: Annotated[str, AfterValidator(check_url)] = ""
    """Address of the receiver of OTLP over HTTP, for example "http://127.0.0.1:4318". Empty: as the environment variables
    OTEL_EXPORTER_OTLP_… say, or that address."""


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""
    format: Literal["auto", "console", "json"] = "auto"
    """auto: console on a terminal, otherwise json."""
