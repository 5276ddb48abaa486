"""Where `visiond bench` works: a folder with images and weights, which stay for the next time, and a daemon's own folders."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from daemon import __version__
from daemon.config.loading import Config, load
from daemon.config.state import KERNELS
from daemon.core.errors import VisiondError
from daemon.system.gpus import driver_version, list_gpus
from stages.contract.processes import count_cores, environment, python
from stages.scenes.truth import TRUTH

NEW_TOKENS = 12  # of each caption, forced
ROOT = Path(__file__).parent.parent.parent

CONFIG = """\
# Made by `visiond bench`; each run writes it again.
[[inbox]]
path = {inbox}
settle_seconds = 0
unpack = {unpack}
[http]
listen = ""
[log]
level = "warning"
[models]
pack = {pack}
folder = {models}
[stages.blip]
options = {{ max_new_tokens = {tokens}, force_tokens = {tokens} }}
[pipeline]
reuse_results = false
{pipeline}
"""


class MachineInfo(msgspec.Struct, frozen=True):
    gpus: list[str]
    driver: str | None
    torch: str
    python: str
    cores: int

    @classmethod
    def this(cls) -> MachineInfo:
        names = [gpu.name for gpu in list_gpus()]
        return cls(names, driver_version(), version("torch"), sys.version.split()[0], count_cores())


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What every report says."""

    command: list[str]
    version: str
    commit: str | None
    machine: MachineInfo


def describe_run() -> dict[str, Any]:
    """The fields of Report, for this process."""
    return {
        "command": sys.argv,
        "version": __version__,
        "commit": find_commit(),
        "machine": MachineInfo.this(),
    }


class Place:
    """The folder of a benchmark."""

    def __init__(
        self, folder: Path, pack: str = "", pipeline: Sequence[str] = (), second_look: str = ""
    ) -> None:
        """pack: as in [models]; "" for random weights. pipeline: lines for that table of the configuration.
        second_look: a [[second_look]] table of the configuration."""
        self.folder = folder.absolute()
        self.daemon_folder = self.folder / "daemon"
        self.config_file = self.daemon_folder / "daemon.toml"
        self.drop = self.folder / "drop"
        self.pack = str(Path(pack).absolute()) if "/" in pack else pack or str(self.folder / "pack")
        self._pipeline = "\n".join([*pipeline, second_look])

    def with_settings(self, lines: Sequence[str]) -> Place:
        """The same folder with these lines before the others of [pipeline]."""
        other = copy.copy(self)
        other._pipeline = "\n".join([*lines, self._pipeline])
        return other

    def make_pack(self) -> None:
        """Make the published architectures with random weights, unless they exist or a pack was named."""
        if self.pack == str(self.folder / "pack"):
            make_once(self.folder / "pack", lambda part: run_module("stages.weights.published", str(part)))

    def make_images(self, count: int) -> list[Path]:
        """Make the images of the standard job, unless they exist."""
        from stages.scenes.generator import standard_job

        inbox = make_once(self.folder / f"images-{count}", lambda part: standard_job(part, count, seed=0))
        return [path for path in sorted(inbox.iterdir()) if path.name != TRUTH]

    def make_inbox(self, images: Sequence[Path], repeat: int) -> Path:
        """A folder with each image under `repeat` names. The daemon treats each name as a separate image."""
        if repeat == 1:
            return images[0].parent
        return make_once(
            images[0].parent.with_name(f"{images[0].parent.name}x{repeat}"),
            lambda part: link_images(images, repeat, part),
        )

    def prepare(self, inbox: Path, *, cold: bool = False, unpack: Sequence[str] = ()) -> Config:
        """Remove ledger and results, and write the configuration. Keeps compiled kernels unless `cold`."""
        for path in (self.daemon_folder / "results", *self.daemon_folder.glob("state/*")):
            if path.is_file():
                path.unlink()
            elif cold or path.name != KERNELS:
                shutil.rmtree(path, ignore_errors=True)
        self.daemon_folder.mkdir(parents=True, exist_ok=True)
        strings = {"inbox": inbox, "pack": self.pack, "models": Path("models").absolute()}
        quoted = {key: json.dumps(str(value)) for key, value in strings.items()}
        listed = json.dumps(list(unpack))
        self.config_file.write_text(
            CONFIG.format(**quoted, unpack=listed, tokens=NEW_TOKENS, pipeline=self._pipeline)
        )
        return load(self.config_file)


def link_images(images: Sequence[Path], repeat: int, folder: Path) -> None:
    folder.mkdir()
    for turn, image in itertools.product(range(repeat), images):
        (folder / f"{turn:04}-{image.name}").hardlink_to(image)


def make_once(target: Path, make: Callable[[Path], object]) -> Path:
    """Make a folder by calling `make`, completely or not at all."""
    if not target.exists():
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        make(part)
        part.rename(target)
    return target


def run_module(
    module: str, *arguments: str, task: bytes = b"", changes: Mapping[str, str] | None = None
) -> bytes:
    """Run a module that needs torch in a separate process; returns its output. Raises VisiondError."""
    result = subprocess.run(
        python("-m", module, *arguments), input=task, stdout=subprocess.PIPE, env=environment(changes)
    )
    if result.returncode:
        raise VisiondError(
            f"python -m {module} ended with status {result.returncode}; its messages are above."
        )
    return result.stdout


def find_commit() -> str | None:
    """The commit of the source tree, with -dirty if files differ; None for an installed package."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return None
    described = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return described.stdout.strip() or None
