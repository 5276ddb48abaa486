"""Identifies YOLO's files without loading them. Imports no torch, and runs no code of a pickle.

ultralytics' own loader also builds RT-DETR and others, which later fail or give nonsense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stages.contract.manifest import PackError, WeightsError
from stages.contract.recognition import read_config, read_header
from stages.yolo.structure import has_library, list_layers, needs_library

LONGEST_PICKLE = 64 << 20  # bytes that are searched; a model has about 100 kB
NO_PICKLE = b"."  # the end
TAKEN = "visiond takes YOLO detection models (DetectionModel with a Detect head)"
CLASSES = {
    "PoseModel": "a YOLO pose model",
    "OBBModel": "a YOLO model of oriented boxes",
    "SegmentationModel": "a YOLO segmentation model",
    "SemanticSegmentationModel": "a YOLO segmentation model",
    "ClassificationModel": "a YOLO classification model",
    "DepthModel": "a YOLO depth model",
    "WorldModel": "a YOLO-World model",
    "YOLOEModel": "a YOLOE model",
    "YOLOESegModel": "a YOLOE segmentation model",
    "RTDETRDetectionModel": "an RT-DETR model",
}
MODELS = {"DetectionModel", "YOLOv10DetectionModel"}
HEADS = {"Detect", "v10Detect"}
NAMELESS = ("", "n/a", "__background__")  # of classes, in lower case

Positive = Annotated[float, Meta(gt=0)]
Row = tuple[int | list[int], int, str, list[Any]]  # as in stages/yolo/structure.py


class Structure(msgspec.Struct):
    """What every YAML of ultralytics has, and what it may have."""

    backbone: list[Row]
    head: Annotated[list[Row], Meta(min_length=1)]
    scales: dict[str, tuple[Positive, Positive, Positive]] | None = None
    scale: str | None = None


class YoloJson(msgspec.Struct):
    """A yolo.json. Other keys do no harm."""

    model: str | Structure
    nc: Annotated[int, Meta(ge=1)]
    names: list[Any]
    imgsz: Annotated[int, Meta(ge=32)]


def has_name(label: str) -> bool:
    """Whether a class stands for something: COCO has 91 numbers for 80 classes, and models name the others "N/A"."""
    return label.strip().lower() not in NAMELESS


def check(files: Mapping[str, Path], *, allow_pickle: bool = True) -> None:
    """Raises PackError if files are not those of a YOLO detection model, or may not be read.
    files: as for load_network."""
    weights = files.get("weights", Path())
    if "weights" not in files or (weights.suffix != ".pt" and "config" not in files):
        raise PackError(
            f"a YOLO model needs files for weights and config; the pack's manifest names {', '.join(files) or 'none'}."
        )
    if weights.suffix == ".pt":
        check_checkpoint(weights)
        refuse_pickle(weights, allow_pickle=allow_pickle)
        check_library(weights)
        return
    read_header(weights)
    check_structure(weights, files["config"])


def check_structure(weights: Path, file: Path) -> None:
    """Raises PackError if a yolo.json does not describe a detection model that can be built here."""
    config = read_config(file)
    if missing := [key for key in ("model", "nc", "names", "imgsz") if key not in config]:
        raise PackError(f"{file} has no {', '.join(missing)} of the model; `visiond models make` writes it.")
    try:
        checked = msgspec.convert(config, YoloJson)
    except msgspec.ValidationError as error:
        raise PackError(
            f"{file} does not describe a YOLO model: {error}. Copy it again; `visiond models make` writes it."
        ) from error
    if len(checked.names) != checked.nc:
        raise PackError(
            f"{file} has {len(checked.names)} names for {checked.nc} classes (nc). Copy it again."
        )
    head = "" if isinstance(checked.model, str) else checked.model.head[-1][2]
    if head and head not in HEADS:
        raise PackError(f"by its {file.name}, {weights} is a YOLO model with a {head} head; {TAKEN}.")
    if needs_library(config["model"]):
        check_library(weights, list_layers(config["model"]))


def find_license(files: Mapping[str, Path]) -> str:
    """Of ultralytics, if a model of these files needs it. files: as for load_network."""
    if "config" not in files:
        return "AGPL-3.0"
    try:
        model = read_config(files["config"]).get("model")
    except PackError:
        return ""  # no library can use it
    return "AGPL-3.0" if needs_library(model) else ""


def check_library(weights: str | Path, layers: Sequence[str] = ()) -> None:
    """Raises WeightsError if ultralytics is not installed. weights: what needs it. layers: those that only it has."""
    if has_library():
        return
    why = "can only be read by ultralytics"
    if layers:
        why = f"has layers that only ultralytics has ({', '.join(layers)})"
    raise WeightsError(
        f"{weights} {why}, which is not installed: pip install 'visiond[ultralytics]' (AGPL-3.0), then restart visiond; "
        "or choose a detector without it; `visiond models list --stage yolo` shows them."
    )


def refuse_pickle(weights: Path, *, allow_pickle: bool) -> None:
    """Raises WeightsError unless it is allowed."""
    if not allow_pickle:
        raise WeightsError(
            f"{weights} is a pickle, which can run code when it is read. If you trust it, convert it to safetensors once with "
            f"`visiond models make FOLDER --yolo {weights} --allow-pickle`, or set allow_pickle = true under "
            "[stages.yolo.options]."
        )


def check_checkpoint(file: Path) -> None:
    """Raises PackError if a .pt file names another class than YOLO's detection model.
    A file that is not a torch archive is left to the loader."""
    classes = list_classes(file)
    names: dict[str, list[str]] = {}
    for module, name in classes:
        names.setdefault(module, []).append(name)
    models, heads = names.get("ultralytics.nn.tasks", []), names.get("ultralytics.nn.modules.head", [])
    if other := next((name for name in models if name not in MODELS), ""):
        raise PackError(f"{file} is {CLASSES.get(other, 'an ultralytics model')} ({other}); {TAKEN}.")
    if other := next((name for name in heads if name not in HEADS), ""):
        raise PackError(f"{file} is a YOLO model with a {other} head; {TAKEN}.")
    if classes and not models:
        raise PackError(f"{file} does not contain an ultralytics model, but {'.'.join(classes[0])}; {TAKEN}.")


def list_classes(file: Path) -> list[tuple[str, str]]:
    """Module and name of each class in a torch archive, in order. They are read as text; nothing is imported or run."""
    # Every worker imports this module, and these two take a tenth of its start.
    import pickletools
    import zipfile

    try:
        operations = pickletools.genops(read_pickle(file))
        named = [
            argument.split(" ", 1) for code, argument, _ in operations if code.name == "GLOBAL" and argument
        ]
    except OSError as error:
        raise PackError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (zipfile.BadZipFile, ValueError) as error:
        raise PackError(f"{file} is cut short or damaged: {error}. Copy it again.") from error
    return list(dict.fromkeys((module, name) for module, name in named))


def read_pickle(file: Path) -> bytes:
    """The pickle in a torch archive; of another file, or if it is too long, one that names nothing. Raises PackError,
    OSError, zipfile.BadZipFile."""
    import zipfile

    with file.open("rb") as opened:
        if opened.read(2) != b"PK":
            return NO_PICKLE
    with zipfile.ZipFile(file) as archive:
        entry = next((entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")), None)
        if entry is None:
            raise PackError(f"{file} is not a torch checkpoint; {TAKEN}.")
        return NO_PICKLE if entry.file_size > LONGEST_PICKLE else archive.read(entry)
