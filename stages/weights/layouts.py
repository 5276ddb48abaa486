"""Recognizes which stages a folder of weights without a manifest provides. Imports no torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stages.contract import recognition
from stages.contract.base import StageSpec
from stages.contract.descriptor import Backend, Descriptor
from stages.contract.manifest import MANIFEST, Manifest, PackError, StageEntry, read_manifest
from stages.ocr.files import describe_damage
from stages.registry import registry


def recognize(path: Path, stage: str = "", backend: str = "", *, asked: str = "") -> dict[str, StageEntry]:
    """The stages that a folder in the hub's layout provides: clip/, blip/, yolo.safetensors, or one model by itself.

    stage: look for this one alone, and return {} if the folder does not provide it. backend: use this
    backend's rule alone. asked: the stage that the configuration names the folder for, if any; the message says what
    that stage can use. A plug-in that fails on the folder is left out with a warning, unless its stage is
    the one that is looked for. Raises PackError when no stage is found, or a model that no stage takes.
    """
    found: dict[str, StageEntry] = {}
    problems: list[PackError] = []
    for name in registry.STAGES:
        is_asked = stage in ("", name)
        try:
            with plugin_errors(name, path):
                if entry := find_stage(path, name, backend if is_asked else "", found, check=is_asked):
                    found[name] = entry
        except PackError as error:
            if name == stage or not (stage or name in registry.SOURCES):
                raise
            problems.append(error)
    if stage:
        return {name: found[name] for name in found.keys() & {stage}}
    if not found:
        raise problems[0] if problems else PackError(describe_unknown(path, asked))
    for problem in problems:
        warnings.warn(str(problem), RuntimeWarning, stacklevel=2)
    return found


def find_stage(
    path: Path, stage: str, wanted: str, others: Mapping[str, StageEntry], *, check: bool
) -> StageEntry | None:
    """A stage's files in a folder. wanted: as for `find_weights`. others: the stages found before.
    check: whether to look into the files."""
    folder = path if path.is_dir() else path.parent
    match = find_weights(path, stage, registry.STAGES[stage].backends, wanted)
    if match is None:
        return None
    name, backend, files = match
    files = {**files, **shared_files(backend, others)}
    if check:
        backend.check({role: folder / file for role, file in files.items()}, allow_pickle=True)
    return StageEntry(name, files)


def find_weights(
    path: Path, stage: str, backends: Mapping[str, Backend], wanted: str
) -> tuple[str, Backend, dict[str, str]] | None:
    """The first of the backends that knows what is in a folder, or the wanted one; and the files by role.
    Raises PackError for a subfolder with the name of the stage whose model none of them takes."""
    asked = {name: backend for name, backend in backends.items() if wanted in ("", name)}
    for name, backend in asked.items():
        if files := backend.find(path):
            return name, backend, files
    models = [model for backend in asked.values() for model in backend.models]
    if models and (path / stage / "config.json").is_file():
        recognition.check_config(models, path / stage)
    return None


def shared_files(backend: Backend, others: Mapping[str, StageEntry]) -> dict[str, str]:
    """The files that a backend shares with other stages."""
    shares = [
        (role, others[other].files, part) for role, (other, part) in backend.shares.items() if other in others
    ]
    return {role: files[part] for role, files, part in shares if part in files}


@contextmanager
def plugin_errors(stage: str, path: Path) -> Iterator[None]:
    """Turns every error of a plug-in's `find` or `check` into a PackError that names the plug-in."""
    try:
        yield
    except Exception as error:  # a plug-in's code may raise anything
        if stage not in registry.SOURCES:
            raise
        what = str(error) if isinstance(error, PackError) else f"{type(error).__name__}: {error}"
        plugin = f'the stage "{stage}" of the plug-in {registry.SOURCES[stage]}'
        raise PackError(f"{plugin} cannot use {path}: {what.rstrip('.')}.") from error


def explain_no_weights(folder: Path, manifest: Manifest, stage: str, backend: str) -> str:
    by = f' that the backend "{backend}" takes' if backend else ""
    present = ", ".join(manifest.stages) or "none"
    other = manifest.other_than(stage)
    place = f" Name it under [stages.{other}]." if other else ""
    if stage not in registry.ORDER:  # no pack of visiond has one
        place = f' Set model in the table of each {stage}, for example model = "/srv/models/nsfw".'
    return f"{folder} has no weights for {stage}{by}; it has {present}.{place}"


def describe_unknown(path: Path, stage: str) -> str:
    """stage: the stage that the configuration names it for, if any."""
    if path.is_file():
        if (path.parent / "config.json").is_file():
            return f"{path} is one file of a model; name its folder, {path.parent}."
        return f"{path} must be a YOLO model: a .pt file, or a .safetensors file with a yolo.json beside it."
    if (path / "config.json").is_file():
        return describe_model(path, stage)
    if (path / "adapter_config.json").is_file():
        return (
            f"{path} has an adapter (LoRA), but not its model. Merge both (merge_and_unload in PEFT), and save the whole model "
            "with save_pretrained."
        )
    if any(path.glob("*.safetensors")) and not (path / "yolo.safetensors").is_file():
        return f"{path} has weights, but no config.json for them. Save the whole model there with save_pretrained."
    if damage := describe_damage(path):
        return damage
    if any(path.glob("*/config.json")) and (
        advice := recognition.advise(recognition.names_in(path), str(path))
    ):
        return f"{path} has no config.json. {advice}"
    return (
        f"{path} has no weights that visiond knows: it must have a model as transformers saves it (config.json with "
        f"model.safetensors), a {MANIFEST}, or clip/, blip/, yolo.safetensors with yolo.json, or det/ and rec/ of PP-OCR."
    )


def describe_model(path: Path, stage: str) -> str:
    """A model of transformers that no stage takes, and what to use instead."""
    model_type, name = recognition.name_model(path)
    described = {one: describe_families(kind) for one, kind in registry.STAGES.items() if stage in ("", one)}
    wanted = "; ".join(f"for {one}: {names}" for one, names in described.items() if names)
    return (
        f'{path} contains {name or "a model"} (model_type "{model_type}" in config.json), which visiond cannot use. It can '
        f"use these models {wanted}. `visiond models list{f' --stage {stage}' if stage else ''}` lists them by name."
    )


def describe_families(stage: Descriptor) -> str:
    """The models that the backends of a stage can use, in words."""
    kinds = stage.backends.items()
    others = [f"files of {name}" for name, kind in kinds if kind.needs_weights and not kind.models]
    return ", ".join([*dict.fromkeys(model.description for model in stage.models), *others])


def describe_weights(spec: StageSpec) -> str:
    """How the weights of a stage were recognized: "D-FINE (DFineForObjectDetection), backend transformers, float32"."""
    backend = registry.find_backend(spec.name, spec.backend)
    found = name_models(backend, spec.paths)
    return ", ".join([*found, f"backend {spec.backend}", spec.dtype])


def name_models(backend: Backend, files: Mapping[str, Path]) -> list[str]:
    """The models of transformers among a stage's files: "D-FINE (DFineForObjectDetection)"."""
    found = find_types(files).items()
    return [
        f"{model.description} ({model.name})"
        for entry in found
        for model in backend.models
        if (model.role, model.type) == entry
    ]


def find_types(files: Mapping[str, Path]) -> dict[str, str]:
    """The model_type of each model of transformers among a stage's files, by role."""
    folders = {role: file for role, file in files.items() if (file / "config.json").is_file()}
    return {role: recognition.name_model(folder)[0] for role, folder in folders.items()}


def list_versions(backend: Backend, files: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """The versions of the models of transformers among a stage's files, those of other stages too, as a part of its
    fingerprint; {} if all are the first."""
    if not backend.models:
        return {}
    known = [model for kind in registry.BUILT_IN for model in kind.models]
    versions = {model.type: str(model.version) for model in known if model.version > 1}
    found = {role: versions[type_] for role, type_ in find_types(files).items() if type_ in versions}
    return {"versions": found} if found else {}


def describe_words(spec: StageSpec, look: str = "") -> str:
    """A sentence if a model uses the words of the demonstration pack, which it did not come with, as its labels; else
    empty. look: the name of the second look that runs it, if one does."""
    place = f"in the options of [[second_look]] {look}" if look else f"under [stages.{spec.name}.options]"
    for role in registry.find_backend(spec.name, spec.backend).vocabulary:
        words, model = (Path(spec.files.get(file, "")) for file in (role, "model"))
        if role not in spec.files or model.is_relative_to(words.parent):
            continue
        pack = read_manifest(words.parent / MANIFEST) if (words.parent / MANIFEST).is_file() else None
        if pack and "demonstration" in pack.notice_of(spec.name):
            return (
                f"{spec.name}: the model uses the tags of the demonstration pack {pack.name} ({words}), which probably do "
                f'not fit your images. Set your own {place}, for example {role} = ["invoice", "street"].'
            )
    return ""
