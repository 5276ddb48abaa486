"""`visiond models make`: a pack from the user's own checkpoints, tried before it gets its name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from daemon.cli.tryouts import try_stages
from daemon.config.loading import parse
from daemon.errors import ModelsUnusable, NotWritable
from daemon.layout import Layout, pack_errors
from daemon.monitoring.notices import join_words
from stages.manifest import MANIFEST, Manifest
from stages.registry import BUILT_IN
from stages.training.folders import replace_folder
from stages.weights.assembly import assemble

Say = Callable[[str], None]


def make_pack(
    folder: Path,
    sources: Mapping[str, Path],
    say: Say,
    *,
    labels: Path | None = None,
    allow_pickle: bool = False,
    force: bool = False,
) -> Manifest:
    """Make the pack beside the folder and rename it, so that a failure leaves nothing behind. sources: by stage.

    Raises ModelsUnusable when a checkpoint is not what its stage takes, NotWritable.
    """
    folder = Path(os.path.abspath(folder))
    check_place(folder, force=force)
    try:
        with pack_errors(), tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            new = Path(beside) / folder.name
            manifest = assemble(new, folder.name, sources, say, labels=labels, allow_pickle=allow_pickle)
            try_pack(new, list(manifest.stages), folder, say)
            replace_folder(folder, new)
    except OSError as error:  # of a source that cannot be read, or of the folder
        raise NotWritable(f"{folder} was not made: {error.filename or folder}: {error.strerror or error}.") from error
    return manifest


def check_place(folder: Path, *, force: bool) -> None:
    """Raises NotWritable if the pack would replace something."""
    if not folder.parent.is_dir():
        raise NotWritable(f"{folder} cannot be made: the folder {folder.parent} does not exist.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).is_file():
        raise NotWritable(f"{folder} is not a pack, and would be lost; name a new folder.")
    if not force:
        raise NotWritable(f"{folder} already exists; name another folder, or replace it with --force.")


def try_pack(new: Path, stages: list[str], folder: Path, say: Say) -> None:
    """Build each stage and try it on a page, as `visiond check` does. Raises ModelsUnusable."""
    config = parse({"models": {"pack": str(new), "folder": str(new.parent)}, "pipeline": {"stages": stages}}, new.parent)
    for tryout in try_stages(Layout.of(config)):
        if tryout.problem:
            raise ModelsUnusable(f"{tryout.stage} on {tryout.device}: {tryout.problem.replace(str(new), str(folder))}")
        say(
            f"{tryout.stage} loads in {tryout.load_seconds:.1f} s on {tryout.device} and answers a test page in "
            f"{tryout.run_seconds:.1f} s"
        )


def tell_use(folder: Path, manifest: Manifest) -> list[str]:
    """Lines that say what to write into the configuration."""
    names = [stage.name for stage in BUILT_IN]
    held = [stage for stage in names if stage == "ocr" or stage in manifest.stages]
    lines = [f"{folder.absolute()} holds {join_words(list(manifest.stages))}. In daemon.toml:", "", "    [models]"]
    lines += [f'    pack = "{folder.absolute()}"', ""]
    if missing := [stage for stage in names if stage not in held]:
        stages = ", ".join(f'"{stage}"' for stage in held)
        lines.append(
            f"It has no {join_words(missing)}: add `stages = [{stages}]` under [pipeline], or name other weights, for "
            f'example `model = "/path"` under [stages.{missing[0]}].'
        )
    return lines
