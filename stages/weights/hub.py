"""The model hub, by its own library. Imports no torch.

What the library has in its cache is taken from there; and if the hub cannot be reached, so is the newest commit that it
has. A hub that is busy is asked again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from stages.contract.manifest import MANIFEST, HubBusy, HubUnreachable, PackError
from stages.contract.recognition import POINTER

SUPPORT = (".json", ".txt", ".jinja", ".model")
UNWANTED = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")  # lists of weights that are not taken

# CLIP's labels in addition to the names of YOLO's classes.
SCENES = (
    "document", "receipt", "form", "letter", "book page", "handwritten note", "table of numbers", "map", "diagram",
    "chart", "screenshot", "website", "logo", "poster", "street sign", "menu", "business card", "whiteboard",
    "landscape", "mountain", "beach", "forest", "city street", "building", "office", "kitchen", "living room", "shop",
    "portrait of a person", "group of people", "crowd", "animal", "plant", "flower", "meal", "drawing", "painting",
    "toy", "tool", "machine", "piece of clothing", "night scene", "sky", "water", "sports scene", "plain background",
)  # fmt: skip


# Errors of the folder for the files, not of the network.
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO}
BUSY = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
WAITS_SECONDS = (1, 2, 4, 8)  # before another attempt, unless the hub says how long
FILE_WAITS_SECONDS = (2, 8)  # as the hub's library itself asks again for most files
LONGEST_WAIT_SECONDS = 120  # for a longer one, the command ends and says so

Answer = TypeVar("Answer")


class Listing(NamedTuple):
    """A commit of a repository. license: as its card names it, for example "apache-2.0"; "" for none.
    sizes: bytes by file, as far as the hub knows them."""

    commit: str
    files: list[str]
    license: str = ""
    sizes: Mapping[str, int] = MappingProxyType({})


class Hub(Protocol):
    """The source of models. Both methods raise HubUnreachable if it cannot be reached, HubBusy if it refuses too many requests;
    `download` raises OSError if the folder cannot be written."""

    def describe(self, repository: str, revision: str = "") -> Listing:
        """The commit of a branch, tag or commit of a repository, "" for the newest."""

    def download(self, repository: str, commit: str, files: list[str], folder: Path) -> None:
        """Download files of a commit into a folder, except those that are already there."""


class HuggingFaceHub:
    """say: called with a sentence about what delays the download. count: called with numbers of bytes that were written."""

    def __init__(
        self, say: Callable[[str], None] = print, count: Callable[[int], None] = lambda _: None
    ) -> None:
        self._say = say
        self._count = count

    def describe(self, repository: str, revision: str = "") -> Listing:
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            return self._repeat(repository, lambda: ask(repository, revision))
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
            if find_response(error) is None and (cached := find_cached(repository, revision)):
                self._say(
                    f"The model hub cannot be reached: {repository} is taken from the cache of its library."
                )
                return cached
            raise unreachable(repository, error) from error

    def download(self, repository: str, commit: str, files: list[str], folder: Path) -> None:
        for file in files:
            try:
                self._repeat(
                    repository, partial(self._get, repository, commit, file, folder), FILE_WAITS_SECONDS
                )
            except network_errors() as error:
                if getattr(error, "errno", None) in OF_THE_DISK:
                    raise
                raise unreachable(repository, error) from error
            check_pointer(folder / file, f"{repository}/{file}")

    def _get(self, repository: str, commit: str, file: str, folder: Path) -> None:
        """One file, from the cache of the hub's library if it is there."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(repository, file, revision=commit)
        if not isinstance(cached, str):
            hf_hub_download(
                repository, file, revision=commit, local_dir=folder, tqdm_class=make_counter(self._count)
            )
        elif not (folder / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            copied = folder / f"{file}.incomplete"
            shutil.copyfile(cached, copied)
            os.replace(copied, folder / file)
            self._count((folder / file).stat().st_size)

    def _repeat(
        self, repository: str, request: Callable[[], Answer], waits_seconds: Sequence[int] = WAITS_SECONDS
    ) -> Answer:
        """The answer to a request, which is made again while the hub is busy. Raises HubBusy, and what the request raises."""
        for default in (*waits_seconds, None):
            try:
                return request()
            except network_errors() as error:
                response = find_response(error)
                if response is None or response.status_code not in BUSY:
                    raise
                seconds = read_wait(response, default)
                if default is None or seconds > LONGEST_WAIT_SECONDS:
                    raise busy(repository, response.status_code, seconds) from error
                self._say(
                    f"The model hub is busy (HTTP status {response.status_code}); trying again in {seconds} s."
                )
                time.sleep(seconds)
        raise AssertionError


def ask(repository: str, revision: str) -> Listing:
    """What the hub says. Raises the errors of its library."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision or None, files_metadata=True)
    license_ = info.card_data.get("license") if info.card_data else None
    return Listing(
        str(info.sha),
        [file.rfilename for file in info.siblings or []],
        license_ if isinstance(license_, str) else "",
        {file.rfilename: file.size for file in info.siblings or [] if file.size is not None},
    )


def find_cached(repository: str, revision: str) -> Listing | None:
    """What the cache of the hub's library has of a branch, tag or commit."""
    from huggingface_hub import ModelCard, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    license_ = None
    with contextlib.suppress(OSError, ValueError):
        license_ = ModelCard.load(folder / "README.md").data.get("license")
    sizes = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file()
    }
    return Listing(folder.name, sorted(sizes), license_ if isinstance(license_, str) else "", sizes)


def make_counter(count: Callable[[int], None]) -> type[Any]:
    """A progress bar for the hub's library that draws nothing and counts bytes."""
    from huggingface_hub.utils.tqdm import tqdm

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]
            count(options.get("initial") or 0)  # of an earlier attempt

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    return Counter


def check_pointer(file: Path, name: str) -> None:
    """Raises PackError if a file is what Git has in the place of a large one."""
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) != POINTER:
            return
    file.unlink()  # so that the next attempt asks again
    raise PackError(
        f"{name} is a Git LFS pointer, not the file itself: the model hub, or the mirror that HF_ENDPOINT names, does not have "
        "it. Pull it from another one."
    )


def network_errors() -> tuple[type[Exception], ...]:
    """OSError, and the error of the HTTP library that the installed huggingface_hub uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


def find_response(error: BaseException) -> Any:
    """The hub's answer, which its library may hide behind a missing file; None if there was none."""
    cause: BaseException | None = error
    response: Any = None
    while cause and (response := getattr(cause, "response", None)) is None:
        cause = cause.__cause__
    return response


def read_wait(response: Any, default: int | None) -> int:
    """The seconds that the hub asks to wait, or else the default."""
    said = str(response.headers.get("Retry-After", ""))
    return int(said) if said.isdecimal() else default or 0


def busy(repository: str, status: int, seconds: int) -> HubBusy:
    later = f"in {seconds} s" if seconds else "later"
    return HubBusy(
        f"{repository} could not be pulled, because the model hub is busy (HTTP status {status}). Give the same command again "
        f"{later}: it continues with what is missing."
    )


def unreachable(repository: str, error: BaseException) -> PackError:
    """What to do about an error of the model hub, or of the network."""
    from huggingface_hub.constants import ENDPOINT

    response = find_response(error)
    if response is not None and response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        said = response.headers.get("X-Error-Message") or f"HTTP status {response.status_code}"
        return PackError(
            f"{repository} could not be pulled, because the model hub refuses it ({said.rstrip('.')}). If the model is gated, "
            f"accept the terms at {ENDPOINT}/{repository}, and set HF_TOKEN to a token of the same account."
        )
    if response is not None:
        return PackError(
            f"{repository} could not be pulled: the model hub, {ENDPOINT}, answered with HTTP status {response.status_code}. "
            "Give the same command again later."
        )
    first = str(error).strip().split("\n")[0] or type(error).__name__
    mirror = "" if os.environ.get("HF_ENDPOINT") else " If you have a mirror, set HF_ENDPOINT to it."
    return HubUnreachable(f"the model hub, {ENDPOINT}, cannot be reached ({first}).{mirror}")


def choose_support(files: Collection[str]) -> list[str]:
    """The configs and the tokenizer of a repository: its small files that change answers."""
    return sorted(
        file
        for file in files
        if "/" not in file and file.endswith(SUPPORT) and not file.endswith(UNWANTED) and file != MANIFEST
    )
