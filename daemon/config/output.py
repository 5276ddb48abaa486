"""The tables of daemon.toml about outputs: folders, bins and sinks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator

from daemon.config.sections import Section
from daemon.config.values import check_webhook_url
from daemon.core.urls import check_bucket

FileSinkName = Literal["captions", "hocr", "alto", "xmp", "xmp-adobe", "label-studio"]
FILE_SINKS = frozenset(get_args(FileSinkName))  # with a file for each image
FOLDER_SINKS = FILE_SINKS | {"lance", "yolo"}


class WebhookSection(Section):
    url: Annotated[str, AfterValidator(check_webhook_url)] = ""
    """Where the sink webhook posts records, for example "https://host/path"."""
    secret_file: str = ""
    """File with the secret that signs each request (Standard Webhooks): 8 or more printable ASCII characters, or whsec_ and
    base64 of 24 to 64 bytes. Empty: requests are not signed."""
    content: Literal["summary", "record"] = "summary"
    """summary: number, state, path, bin or reason of each image; record: everything that its sidecar has."""


class StoreSection(Section):
    url: Annotated[str, AfterValidator(check_bucket)] = ""
    """Prefix of an object store for the sink store, for example "s3://bucket/annotated" (also gs://, az://). Credentials come
    from the environment."""
    images: bool = False
    """Whether to upload images too, each into its bin: <url>/bins/<bin>/<inbox>/<path>. The images must stay in their inboxes:
    on_success = "keep", and bins not "move"."""


class OutputSection(Section):
    results: Path = Path("results")
    """Folder for sidecars: <inbox's name>/<path in the inbox>.json."""
    failed: Path = Path("failed")
    """Folder for the reason of each failed image; also for the image itself, unless on_success is "keep" and bins not
    "move"."""
    done: Path = Path("done")
    """Folder for images that are moved by on_success = "move"."""
    bins_folder: Path = Path("bins")
    """Folder of the bins A, B, C, …"""
    bins: Literal["none", "link", "copy", "move"] = "none"
    """What goes into a bin: a symbolic link to the image's absolute path, a copy, or the image itself."""
    sinks: list[Literal["jsonl", "webhook", "store", "lance", "yolo", FileSinkName]] = []
    """More outputs. jsonl: append each new record that is DONE to <results>.jsonl, at least once per id; a redo appends another
    line. webhook: post each record that is DONE or FAILED to [output.webhook] url, up to 128 in a request. store: upload each
    sidecar to [output.store] url. lance: write a row for each image that is DONE to the data set <results>.lance. yolo: add
    each image that is DONE to the data set <results>.yolo, as a link with its labels. captions, hocr, alto, xmp, xmp-adobe:
    write the file of this export for each image that is DONE to the folder <results>.<sink>; label-studio: a task of each, and
    <results>.label-studio.xml, the labeling configuration. A sink that fails delays nothing else."""
    webhook: WebhookSection = WebhookSection()
    store: StoreSection = StoreSection()

    @property
    def jsonl_file(self) -> Path:
        """The file of the sink jsonl."""
        return Path(f"{self.results}.jsonl")

    @property
    def labeling_file(self) -> Path:
        """The labeling configuration of the sink label-studio: in its folder Label Studio would take it for a task."""
        return Path(f"{self.results}.label-studio.xml")

    def folder_of(self, sink: str) -> Path:
        """The folder of a sink that has one."""
        return Path(f"{self.results}.{sink}")

    @property
    def sink_folders(self) -> dict[str, Path]:
        """Those of the sinks that are on, by their keys."""
        return {f'output.sinks "{sink}"': self.folder_of(sink) for sink in self.sinks if sink in FOLDER_SINKS}
