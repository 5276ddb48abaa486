"""Identifies a checkpoint's model from its files alone. Imports no torch, and runs no code of a pickle.

A model of another class can load without an error and give nonsense answers: YOLO's own loader also builds
RT-DETR, and BLIP for questions has every weight of a captioner. So each model is identified here before any
is loaded.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stages.descriptor import Backend, Files, Model
from stages.manifest import PackError

LONGEST_HEADER = 100_000_000  # bytes; the limit of the format
LONGEST_PICKLE = 64 << 20  # bytes that are searched; a model has about 100 kB
PICKLE = "pytorch_model.bin"

# What a transformers model needs in addition to its config.json: one file of each.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
MODEL_PARTS = {
    "image processor": ("preprocessor_config.json", "processor_config.json"),
    "tokenizer": (
        "tokenizer.json",
        "vocab.txt",
        "vocab.json",
        "spiece.model",
        "tokenizer.model",
        "sentencepiece.bpe.model",
    ),
}


OTHER_CLASSES = {
    "BlipForQuestionAnswering": "BLIP for questions",
    "BlipForImageTextRetrieval": "BLIP for retrieval",
    "BlipModel": "BLIP without a decoder for captions",
    "Blip2ForConditionalGeneration": "BLIP-2",
    "Blip2Model": "BLIP-2 without captions",
    "Blip2ForImageTextRetrieval": "BLIP-2 for retrieval",
    "InstructBlipForConditionalGeneration": "InstructBLIP",
    "CLIPVisionModel": "CLIP's image half alone",
    "CLIPVisionModelWithProjection": "CLIP's image half alone",
    "CLIPTextModel": "CLIP's text half alone",
    "CLIPTextModelWithProjection": "CLIP's text half alone",
    "CLIPForImageClassification": "CLIP for classes",
    "SiglipForImageClassification": "SigLIP for classes",
    "Siglip2ForImageClassification": "SigLIP 2 for classes",
    "Mistral3ForConditionalGeneration": "Mistral 3",
}
YOLO_TAKEN = "visiond takes YOLO detection models (DetectionModel with a Detect head)"
YOLO_CLASSES = {
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
YOLO_MODELS = {"DetectionModel", "YOLOv10DetectionModel"}
YOLO_HEADS = {"Detect", "v10Detect"}


def make_backend(
    place: str, options: type[msgspec.Struct], models: tuple[Model, ...], *, stage: str = "", **fields: Any
) -> Backend:
    """The backend that takes these models from a folder, as transformers saves them; its role is "model".
    stage: as for `find_model`. fields: the other fields of the backend."""

    def find(path: Path) -> dict[str, str]:
        folder = find_model(path, models, stage)
        return {"model": folder} if folder else {}

    def check(files: Files, *, allow_pickle: bool) -> None:
        check_transformers(models, files["model"])

    return Backend(place=place, options=options, models=models, **{"find": find, "check": check, **fields})


def find_model(path: Path, models: Sequence[Model], stage: str = "") -> str | None:
    """The folder of one of these transformers models, by its config.json: a subfolder with the name of a type or
    of the stage, or the folder itself."""
    types = [model.type for model in models]
    for folder in dict.fromkeys([*types, stage or ".", "."]):
        if (path / folder / "config.json").is_file() and name_model(path / folder)[0] in types:
            return folder
    return None


def check_transformers(models: Sequence[Model], folder: Path, *, pickle: bool = False) -> Model:
    """The model in a folder. Raises PackError if the folder does not have one of these models, complete.
    pickle: its weights may be a pickle."""
    model = check_config(models, folder)
    check_parts(model, {file.name for file in folder.iterdir()}, str(folder))
    taken = describe_taken([model])
    for file in list_weights(folder, pickle=pickle):
        for prefix, other in model.foreign.items():
            if any(name.startswith(prefix) for name in read_header(file)):
                raise PackError(f"{file} holds weights of {other} ({prefix}…); {taken}")
    return model


def check_config(models: Sequence[Model], folder: Path) -> Model:
    """The model that a folder's config.json names. Raises PackError if it is not one of these."""
    model_type, found = name_model(folder)
    model = next((model for model in models if model.type == model_type), None)
    taken = describe_taken([model] if model else models)
    if model is None or found not in ("", model.name):
        known = f" ({OTHER_CLASSES[found]})" if found in OTHER_CLASSES else ""
        what = f"a {found}{known}" if found else "no model of a class that visiond knows"
        raise PackError(f'by its config.json, {folder} holds {what} (model_type "{model_type}"); {taken}')
    return model


def check_parts(model: Model, files: Collection[str], place: str) -> None:
    """Raises PackError if a part that the model needs is not among the files of a folder or repository."""
    for what in model.parts:
        if not any(file in files for file in MODEL_PARTS[what]):
            raise PackError(
                f"{place} has no {what}: none of {', '.join(MODEL_PARTS[what])}. Save it there with save_pretrained."
            )


def describe_taken(models: Sequence[Model]) -> str:
    names = ", ".join(f"{model.name} ({model.description})" for model in models)
    return f"for {models[0].type}, visiond takes {names}." if len(models) == 1 else f"visiond takes {names}."


def name_model(folder: Path) -> tuple[str, str]:
    """The model_type and the class in a folder's config.json; empty if they are missing."""
    config = read_config(folder / "config.json")
    classes = config.get("architectures")
    return str(config.get("model_type") or ""), str(classes[0]) if isinstance(
        classes, list
    ) and classes else ""


def read_config(file: Path) -> dict[str, Any]:
    """Raises PackError if it is not a JSON object."""
    try:
        config: dict[str, Any] = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise PackError(f"{file} cannot be read: {error}. Copy it again.") from error
    return config


def list_weights(folder: Path, *, pickle: bool = False) -> list[Path]:
    """The safetensors files of a transformers model; none if it has a pickle instead,
    and pickles are allowed."""
    whole, index = (folder / name for name in WEIGHTS)
    if whole.is_file():
        return [whole]
    if index.is_file():
        places = read_config(index).get("weight_map")
        return sorted({folder / str(name) for name in places.values()}) if isinstance(places, dict) else []
    if (folder / PICKLE).is_file():
        if pickle:
            return []
        raise PackError(
            f"the weights in {folder} are a pickle, {PICKLE}; `visiond models make` converts it to a pack with safetensors."
        )
    raise PackError(
        f"{folder} has no weights: none of {', '.join(WEIGHTS)}. Save them there with save_pretrained."
    )


def read_header(file: Path) -> dict[str, Any]:
    """The tensors in a safetensors file's header, by name. Raises PackError if the file is not complete."""
    damaged = f"{file} is cut short or damaged"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            head = opened.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(size - 8, LONGEST_HEADER):
                raise PackError(f"{damaged}: it does not start like a safetensors file. Copy it again.")
            tensors: dict[str, Any] = msgspec.json.decode(opened.read(length), type=dict[str, Any])
        tensors.pop("__metadata__", None)
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except OSError as error:
        raise PackError(f"{file} cannot be read: {error.strerror}. Copy it again.") from error
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise PackError(f"{damaged}: its header is not a list of tensors. Copy it again.") from error
    if 8 + length + end != size:
        raise PackError(
            f"{damaged}: it has {size:,} bytes, but its header says {8 + length + end:,}. Copy it again."
        )
    return tensors


def check_yolo(files: Mapping[str, Path], *, allow_pickle: bool = True) -> None:
    """Raises PackError if files are not those of a YOLO detection model, or may not be read.
    files: as for load_network."""
    weights = files["weights"]
    if weights.suffix == ".pt":
        check_checkpoint(weights)
        if not allow_pickle:
            raise PackError(explain_pickle(weights))
        return
    read_header(weights)
    config = read_config(files["config"])
    if missing := [key for key in ("model", "nc", "names", "imgsz") if key not in config]:
        raise PackError(
            f"{files['config']} has no {', '.join(missing)} of the model; `visiond models make` writes it."
        )
    try:
        head = str(config["model"]["head"][-1][2]) if isinstance(config["model"], dict) else ""
    except (LookupError, TypeError):
        raise PackError(
            f"{files['config']}: its model has no head; `visiond models make` writes it."
        ) from None
    if head and head not in YOLO_HEADS:
        raise PackError(
            f"by its {files['config'].name}, {weights} is a YOLO model with a {head} head; {YOLO_TAKEN}."
        )


def explain_pickle(weights: str | Path) -> str:
    return (
        f"{weights} is a pickle, which can run code when it is read. If you trust it, convert it to safetensors once with "
        f"`visiond models make FOLDER --yolo {weights} --allow-pickle`, or set allow_pickle = true under [stages.yolo.options]."
    )


def check_checkpoint(file: Path) -> None:
    """Raises PackError if a .pt file names another class than YOLO's detection model.
    A file that is not a torch archive is left to the loader."""
    classes = list_classes(file)
    models = [name for module, name in classes if module == "ultralytics.nn.tasks"]
    if other := [name for name in models if name not in YOLO_MODELS]:
        raise PackError(
            f"{file} is {YOLO_CLASSES.get(other[0], 'an ultralytics model')} ({other[0]}); {YOLO_TAKEN}."
        )
    heads = [name for module, name in classes if module == "ultralytics.nn.modules.head"]
    if other := [name for name in heads if name not in YOLO_HEADS]:
        raise PackError(f"{file} is a YOLO model with a {other[0]} head; {YOLO_TAKEN}.")
    if classes and not models:
        raise PackError(
            f"{file} does not contain an ultralytics model, but {'.'.join(classes[0])}; {YOLO_TAKEN}."
        )


def list_classes(file: Path) -> list[tuple[str, str]]:
    """Module and name of each class in a torch archive, in order. They are read as text;
    nothing is imported or run."""
    try:
        with file.open("rb") as opened:
            if opened.read(2) != b"PK":
                return []
        with zipfile.ZipFile(file) as archive:
            entry = next((entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")), None)
            if entry is None:
                raise PackError(f"{file} is not a torch checkpoint; {YOLO_TAKEN}.")
            if entry.file_size > LONGEST_PICKLE:
                return []
            operations = pickletools.genops(archive.read(entry))
            named = [
                argument.split(" ", 1)
                for code, argument, _ in operations
                if code.name == "GLOBAL" and argument
            ]
    except OSError as error:
        raise PackError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (zipfile.BadZipFile, ValueError) as error:
        raise PackError(f"{file} is cut short or damaged: {error}. Copy it again.") from error
    return list(dict.fromkeys((module, name) for module, name in named))
