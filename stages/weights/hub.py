"""Pulls the standard pack from the model hub, once. Imports no torch until there is something to convert.

Commits and digests are recorded in the pack's manifest, and every later start is checked against them. At the
time of writing, none of the three models is available as safetensors alone: YOLO's weights are pickles, and
so are those of CLIP and BLIP on their main branches. They are read here once, by torch's restricted loader,
which makes only tensors (and for YOLO ultralytics' known classes) and calls nothing else, and are written as
safetensors. The pickles are deleted.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from stages.contract.manifest import (
    MANIFEST,
    Manifest,
    PackError,
    StageEntry,
    digest_folder,
    read_manifest,
    write_manifest,
)
from stages.yolo.recognition import check_library

# Stage → repository.
SOURCES = {
    "clip": "openai/clip-vit-base-patch32",
    "blip": "Salesforce/blip-image-captioning-base",
    "yolo": "Ultralytics/YOLOv8",
}
YOLO_WEIGHTS = "yolov8n.pt"
PICKLE = "pytorch_model.bin"
SUPPORT = (".json", ".txt", ".jinja", ".model")
UNWANTED = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")  # lists of weights that are not taken

# CLIP's labels in addition to the names of YOLO's classes.
SCENES = (
    *(
        "document",
        "receipt",
        "form",
        "letter",
        "book page",
        "handwritten note",
        "table of numbers",
        "map",
        "diagram",
    ),
    *(
        "chart",
        "screenshot",
        "website",
        "logo",
        "poster",
        "street sign",
        "menu",
        "business card",
        "whiteboard",
    ),
    *(
        "landscape",
        "mountain",
        "beach",
        "forest",
        "city street",
        "building",
        "office",
        "kitchen",
        "living room",
        "shop",
    ),
    *(
        "portrait of a person",
        "group of people",
        "crowd",
        "animal",
        "plant",
        "flower",
        "meal",
        "drawing",
        "painting",
    ),
    *(
        "toy",
        "tool",
        "machine",
        "piece of clothing",
        "night scene",
        "sky",
        "water",
        "sports scene",
        "plain background",
    ),
)


# Errors of the folder for the files, not of the network.
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO}


class Listing(NamedTuple):
    """A commit of a repository. license: as its card names it, for example "apache-2.0"; "" for none.
    sizes: bytes by file, as far as the hub knows them."""

    commit: str
    files: list[str]
    license: str = ""
    sizes: Mapping[str, int] = MappingProxyType({})


class Hub(Protocol):
    """The source of models. Both methods raise PackError if it cannot be reached; `download` raises OSError if the
    folder cannot be written."""

    def describe(self, repository: str, revision: str = "") -> Listing:
        """The commit of a branch, tag or commit of a repository, "" for the newest."""

    def download(self, repository: str, commit: str, files: list[str], folder: Path) -> None:
        """Download files of a commit into a folder, except those that are already there."""


class HuggingFaceHub:
    def describe(self, repository: str, revision: str = "") -> Listing:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            info = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
        except RevisionNotFoundError as error:
            raise PackError(
                f"{repository} has no branch, tag or commit {revision} on the model hub."
            ) from error
        except HFValidationError as error:
            raise PackError(f"{repository} is not a name that the model hub allows: {error}") from error
        except GatedRepoError as error:
            raise unreachable(repository, error) from error
        except RepositoryNotFoundError as error:
            raise PackError(
                f"the model hub has no repository {repository}, or you may not read it. For a private one set HF_TOKEN."
            ) from error
        except network_errors() as error:
            raise unreachable(repository, error) from error
        card = info.card_data
        license_ = card.get("license") if card else None
        return Listing(
            str(info.sha),
            [file.rfilename for file in info.siblings or []],
            license_ if isinstance(license_, str) else "",
            {file.rfilename: file.size for file in info.siblings or [] if file.size is not None},
        )

    def download(self, repository: str, commit: str, files: list[str], folder: Path) -> None:
        from huggingface_hub import snapshot_download

        try:
            snapshot_download(repository, revision=commit, allow_patterns=files, local_dir=folder)
        except network_errors() as error:
            if getattr(error, "errno", None) in OF_THE_DISK:
                raise
            raise unreachable(repository, error) from error


def network_errors() -> tuple[type[Exception], ...]:
    """OSError, and the error of the HTTP library that the installed huggingface_hub uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


def unreachable(repository: str, error: BaseException) -> PackError:
    """What to do about an error of the model hub, or of the network."""
    first = str(error).strip().split("\n")[0] or type(error).__name__
    cause: BaseException | None = error
    response: Any = None
    while cause and (response := getattr(cause, "response", None)) is None:
        cause = cause.__cause__  # the hub's library hides a refused file behind a missing one
    from huggingface_hub.constants import ENDPOINT

    if response is not None and response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        said = response.headers.get("X-Error-Message") or f"HTTP status {response.status_code}"
        return PackError(
            f"{repository} could not be pulled, because the model hub refuses it ({said.rstrip('.')}). If the model is gated, "
            f"accept the terms at {ENDPOINT}/{repository}, and set HF_TOKEN to a token of the same account."
        )
    return PackError(
        f"{repository} could not be pulled from the model hub, {ENDPOINT} ({first}). Set HF_ENDPOINT to a mirror; "
        "or, without a network, give the same command on a machine that has one, and copy the models folder from there."
    )


def pull(folder: Path, progress: Callable[[str], None], hub: Hub | None = None) -> Manifest:
    """Make the standard pack in a folder, unless it exists.
    progress: called with a sentence about what is being done.

    Raises PackError if the hub cannot be reached, or if its files cannot be used.
    """
    if (folder / MANIFEST).is_file():
        progress(f"{folder} already exists; delete it to pull it again.")
        return read_manifest(folder / MANIFEST)
    check_library(YOLO_WEIGHTS)
    # Kept after a failure, so that the next try can continue.
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    source = hub or HuggingFaceHub()
    revision = {
        repository: fetch(source, repository, partial / stage, progress)
        for stage, repository in SOURCES.items()
    }
    try:
        convert(partial, progress)
    except ValueError as error:
        raise PackError(f"the files from the model hub cannot be used: {error}") from error
    manifest = describe_standard(partial, revision)
    write_manifest(partial / MANIFEST, manifest)
    os.rename(partial, folder)
    progress(f"{folder} is ready.")
    return manifest


def fetch(hub: Hub, repository: str, folder: Path, progress: Callable[[str], None]) -> str:
    """Download the needed files of a repository. Returns its commit."""
    listing = hub.describe(repository)
    commit, wanted = listing.commit, choose_files(listing.files)
    if not wanted:
        raise PackError(f"{repository} at {commit} has no weights that visiond can use.")
    progress(f"{repository} at {commit}: {', '.join(wanted)}")
    hub.download(repository, commit, wanted, folder)
    return commit


def choose_files(files: list[str]) -> list[str]:
    """The needed files of a repository: YOLO's weights alone, or configs, tokenizer and weights,
    if possible as safetensors."""
    if YOLO_WEIGHTS in files:
        return [YOLO_WEIGHTS]
    top = [file for file in files if "/" not in file]
    weights = [file for file in top if file.endswith(".safetensors")] or [
        file for file in top if file == PICKLE
    ]
    return weights and sorted([*weights, *choose_support(files)])


def choose_support(files: Collection[str]) -> list[str]:
    """The configs and the tokenizer of a repository: its small files that change answers."""
    return sorted(
        file
        for file in files
        if "/" not in file and file.endswith(SUPPORT) and not file.endswith(UNWANTED) and file != MANIFEST
    )


def convert(folder: Path, progress: Callable[[str], None]) -> None:
    """Convert every pickle in the folder to safetensors, and delete it.
    Raises ValueError if one is not plain weights."""
    from transformers import BlipForConditionalGeneration, CLIPModel

    from stages.pretrained.checkpoints import convert_pickle
    from stages.yolo.weights import convert_checkpoint

    for stage, kind in (("clip", CLIPModel), ("blip", BlipForConditionalGeneration)):
        if (folder / stage / PICKLE).is_file():
            progress(f"converting {stage}/{PICKLE} to safetensors")
            convert_pickle(kind, folder / stage)
            (folder / stage / PICKLE).unlink()
    checkpoint = folder / "yolo" / YOLO_WEIGHTS
    if checkpoint.is_file():
        progress(f"converting yolo/{YOLO_WEIGHTS} to safetensors")
        convert_checkpoint(checkpoint, folder / "yolo")
        checkpoint.unlink()


def describe_standard(folder: Path, revision: dict[str, str]) -> Manifest:
    """Write the labels. Returns the manifest of the folder."""
    names = json.loads((folder / "yolo" / "yolo.json").read_text())["names"]
    (folder / "labels.txt").write_text("\n".join([*names, *SCENES]) + "\n")
    stages = {
        "yolo": StageEntry("ultralytics", {"weights": "yolo/yolo.safetensors", "config": "yolo/yolo.json"}),
        "clip": StageEntry("transformers", {"model": "clip", "labels": "labels.txt"}),
        "blip": StageEntry("transformers", {"model": "blip", "clip": "clip"}),
    }
    return Manifest(
        name="standard",
        description="YOLOv8n, CLIP ViT-B/32 and BLIP base, from the model hub.",
        stages=stages,
        digests=digest_folder(folder),
        revision=revision,
    )
