"""`visiond models make`: makes a pack from the user's own checkpoints, and tries it before it gets its name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from daemon.config.loading import parse
from daemon.core.errors import ModelsUnusable, NotWritable
from daemon.core.notices import join_words
from daemon.layout.layout import Layout
from daemon.layout.models import pack_errors
from daemon.models.tryouts import try_stages
from stages.contract.folders import replace_folder
from stages.contract.manifest import MANIFEST, Manifest
from stages.registry.registry import BUILT_IN
from stages.weights.assembly import assemble

Print = Callable[[str], None]


def make_pack(
    folder: Path,
    sources: Mapping[str, Path],
    progress: Print,
    *,
    labels: Path | None = None,
    allow_pickle: bool = False,
    force: bool = False,
) -> Manifest:
    """Make the pack in a temporary folder and rename it, so that a failure leaves nothing behind.
    sources: by stage.

    Raises ModelsUnusable when a stage cannot use its checkpoint, NotWritable.
    """
    folder = Path(os.path.abspath(folder))
    check_place(folder, force=force)
    try:
        with (
            pack_errors(),
            tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary,
        ):
            new = Path(temporary) / folder.name
            manifest = assemble(new, folder.name, sources, progress, labels=labels, allow_pickle=allow_pickle)
            try_pack(new, list(manifest.stages), folder, progress)
            replace_folder(folder, new)
    except OSError as error:  # of a source that cannot be read, or of the folder
        raise NotWritable(
            f"cannot create {folder}: {error.filename or folder}: {error.strerror or error}."
        ) from error
    return manifest


def check_place(folder: Path, *, force: bool) -> None:
    """Raises NotWritable if the pack would replace something."""
    if not folder.parent.is_dir():
        raise NotWritable(f"cannot create {folder}: the folder {folder.parent} does not exist.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).is_file():
        raise NotWritable(f"{folder} exists and is not a pack; name a new folder.")
    if not force:
        raise NotWritable(f"{folder} already exists; name another folder, or replace it with --force.")


def try_pack(new: Path, stages: list[str], folder: Path, progress: Print) -> None:
    """Build each stage and try it on the test images, as `visiond check` does. Raises ModelsUnusable."""
    config = parse(
        {"models": {"pack": str(new), "folder": str(new.parent)}, "pipeline": {"stages": stages}}, new.parent
    )
    for tryout in try_stages(Layout.of(config)):
        if tryout.problem:
            raise ModelsUnusable(
                f"{tryout.stage} on {tryout.device}: {tryout.problem.replace(str(new), str(folder))}"
            )
        progress(
            f"{tryout.stage} on {tryout.device}: {tryout.summary}"
            + f"; {tryout.warning}" * bool(tryout.warning)
        )


def explain_use(folder: Path, manifest: Manifest) -> list[str]:
    """Lines that show what to write into the configuration."""
    names = [stage.name for stage in BUILT_IN]
    held = [stage for stage in names if stage == "ocr" or stage in manifest.stages]
    lines = [
        f"{folder.absolute()} contains {join_words(list(manifest.stages))}. To use it, write into daemon.toml:",
        "",
        "    [models]",
    ]
    lines += [f'    pack = "{folder.absolute()}"', ""]
    if missing := [stage for stage in names if stage not in held]:
        stages = ", ".join(f'"{stage}"' for stage in held)
        lines.append(
            f"It does not contain {join_words(missing)}. Either write `stages = [{stages}]` under [pipeline], or name other "
            f'weights, for example `model = "/path"` under [stages.{missing[0]}].'
        )
    return lines
