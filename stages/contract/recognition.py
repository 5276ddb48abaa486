"""Identifies a transformers model from its files alone. Imports no torch, and runs no code of a pickle.

A model of another class can load without an error and give nonsense answers: BLIP for questions has every weight
of a captioner. So each model is identified here before any is loaded; YOLO's files in stages/yolo/recognition.py.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import struct
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from stages.contract.descriptor import Backend, Files, KnownModel
from stages.contract.files import open_file
from stages.contract.manifest import PackError, leads_outside
from stages.contract.timm import WRAPPER, describe_missing, is_of_timm

LONGEST_HEADER = 100_000_000  # bytes; the limit of the format
PICKLE = "pytorch_model.bin"
POINTER = b"version https://git-lfs"
# Weights in another precision: model.fp16.safetensors, or the list of such ones. They keep their names in the list.
VARIANT = re.compile(r"(model|pytorch_model)[._]\w+(\.safetensors|\.safetensors\.index\.json|\.bin)")
FORMS = {  # of weights, by the end of a file's name
    "adapter_model.safetensors": "an adapter (LoRA) without its model",
    "open_clip_model.safetensors": "a model of OpenCLIP",
    "open_clip_pytorch_model.bin": "a model of OpenCLIP",
    "open_clip_config.json": "a model of OpenCLIP",
    ".bin.index.json": "a list of pickles",
    "consolidated.safetensors": "a model in its authors' own format",
    ".gguf": "a model for llama.cpp",
    ".onnx": "a model for ONNX",
    ".h5": "a model for TensorFlow",
    ".msgpack": "a model for Flax",
    ".ckpt": "a pickle",
    ".pth": "a pickle",
}

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

READ = (  # JSON objects beside the weights, which transformers reads
    *("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "chat_template.json"),
)

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
    "Siglip2ForImageClassification": "SigLIP 2 for classes",
    "Mistral3ForConditionalGeneration": "Mistral 3",
}


def make_backend(
    place: str,
    options: type[msgspec.Struct],
    models: tuple[KnownModel, ...],
    *,
    stage: str = "",
    **fields: Any,
) -> Backend:
    """The backend that takes these models from a folder, as transformers saves them; its role is "model".
    stage: as for `find_model`. fields: the other fields of the backend."""

    def find(path: Path) -> dict[str, str]:
        folder = find_model(path, models, stage)
        return {"model": folder} if folder else {}

    def check(files: Files, *, allow_pickle: bool) -> None:
        check_transformers(models, files["model"])

    return Backend(place=place, options=options, models=models, **{"find": find, "check": check, **fields})


def find_model(path: Path, models: Sequence[KnownModel], stage: str = "") -> str | None:
    """The folder of one of these transformers models, by its config.json: a subfolder with the name of a type or
    of the stage, or the folder itself."""
    names = {model.name for model in models}
    for folder in dict.fromkeys([*(model.type for model in models), stage or ".", "."]):
        if (path / folder / "config.json").is_file():
            (kind, name), files = name_model(path / folder), names_in(path / folder)
            is_taken = any(model.fits(kind, files) for model in models)
            if is_taken and (name in names or not is_classifier(name)):
                return folder
    return None


def is_classifier(name: str) -> bool:
    """Whether a class of transformers gives scores of classes, by its name."""
    return "ForImageClassification" in name


def choose_model(models: Sequence[KnownModel], kind: str, name: str) -> KnownModel | None:
    """The model of a model_type: of several, the one of this class."""
    same = [model for model in models if model.type == kind]
    return next((model for model in same if model.name == name), same[0] if same else None)


def check_transformers(models: Sequence[KnownModel], folder: Path, *, pickle: bool = False) -> KnownModel:
    """The model in a folder. Raises PackError if the folder does not have one of these models, complete.
    pickle: its weights may be a pickle."""
    model = check_config(models, folder)
    if marked := find_marked(folder):
        raise PackError(
            f"{', '.join(map(str, marked))} begins with a byte order mark, which transformers does not read. Save it as UTF-8 "
            "without one, for example with: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE"
        )
    check_support(folder)
    check_parts(model, {file.name for file in folder.iterdir()}, str(folder))
    check_size(model, folder)
    taken = describe_taken([model])
    for file in list_weights(folder, pickle=pickle):
        tensors = read_header(file)
        for prefix, other in model.foreign.items():
            if any(name.startswith(prefix) for name in tensors):
                raise PackError(f"{file} holds weights of {other} ({prefix}…); {taken}")
    return model


def check_config(models: Sequence[KnownModel], folder: Path) -> KnownModel:
    """The model that a folder's config.json names. Raises PackError if it is not one of these."""
    model_type, found = name_model(folder)
    model = choose_model(models, model_type, found)
    taken = describe_taken([model] if model else models)
    if model is None or found not in ("", model.name):
        known = f" ({OTHER_CLASSES[found]})" if found in OTHER_CLASSES else ""
        what = f"a {found}{known}" if found else "no model of a class that visiond knows"
        raise PackError(f'by its config.json, {folder} holds {what} (model_type "{model_type}"); {taken}')
    config = read_config(folder / "config.json")
    if problem := describe_quantized(folder, config) or describe_missing(folder, config):
        raise PackError(problem)
    vision = config.get("vision_config")
    if other := model.foreign.get(str(vision.get("model_type")) if isinstance(vision, dict) else ""):
        raise PackError(f"by its config.json, {folder} holds {other}; {taken}")
    return model


def describe_quantized(folder: Path | str, config: Mapping[str, Any]) -> str:
    """A sentence if the weights in a folder are quantized, as they then need more libraries, or code from the model hub; ""
    otherwise. config: the content of its config.json."""
    found = config.get("quantization_config") or config.get("quantization")  # the latter of MLX
    if not found:
        return ""
    method = found.get("quant_method") if isinstance(found, dict) else ""
    return (
        f"the weights in {folder} are quantized ({method or 'as for MLX'}), which visiond does not read; take the model's "
        'version in bfloat16, with dtype = "int8", "float8" or "int4".'
    )


def check_parts(model: KnownModel, files: Collection[str], place: str) -> None:
    """Raises PackError if a part that the model needs is not among the files of a folder or repository."""
    for what in model.parts:
        if not any(file in files for file in MODEL_PARTS[what]):
            raise PackError(
                f"{place} has no {what}: none of {', '.join(MODEL_PARTS[what])}. Save it there with save_pretrained."
            )


def check_size(model: KnownModel, folder: Path) -> None:
    """Raises PackError if images are prepared in another size than the model takes. Where a file does not say a size, it is
    that of transformers."""
    vision = read_config(folder / "config.json").get("vision_config")
    prepared = next(
        (each for name in MODEL_PARTS["image processor"] if (each := folder / name).is_file()), None
    )
    if not model.has_size or prepared is None or not isinstance(vision, dict):
        return
    settings = read_config(prepared)
    settings = settings.get("image_processor", settings)
    crops = settings.get("do_center_crop", "crop_size" in settings)
    made = _sides(settings.get("crop_size" if crops else "size"))
    taken = _sides(vision.get("image_size"))
    if made and taken and made != taken:
        raise PackError(
            f"{prepared} makes images of {made[0]} × {made[1]} pixels, but by its config.json (image_size) the model takes "
            f"{taken[0]} × {taken[1]}. Copy both files again, from the same model."
        )


def _sides(size: Any) -> tuple[int, int] | None:
    """Height and width, given as one number, two, or by name; None for anything else."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    sides = [size, size] if isinstance(size, int) else size
    is_pair = isinstance(sides, list) and len(sides) == 2 and all(isinstance(side, int) for side in sides)
    return (sides[0], sides[1]) if is_pair else None


def describe_taken(models: Sequence[KnownModel]) -> str:
    names = ", ".join(f"{model.name} ({model.description})" for model in models)
    return f"for {models[0].type}, visiond takes {names}." if len(models) == 1 else f"visiond takes {names}."


def name_model(folder: Path) -> tuple[str, str]:
    """The model_type and the class in a folder's config.json; empty if they are missing."""
    config = read_config(folder / "config.json")
    if is_of_timm(config):
        return WRAPPER
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    return str(config.get("model_type") or ""), name


def read_config(file: Path) -> dict[str, Any]:
    """A JSON object as Python reads and writes it: it may have NaN, Infinity and a byte order mark. Raises PackError."""
    return _parse(file, _read(file))


def _read(file: Path) -> bytes:
    """Raises PackError."""
    with reading(file) as opened:
        data = opened.read()
    check_start(file, data)
    return data


def _parse(file: Path, data: bytes) -> dict[str, Any]:
    try:
        config: dict[str, Any] = msgspec.convert(json.loads(data.decode("utf-8-sig")), dict[str, Any])
    except (ValueError, msgspec.ValidationError) as error:
        raise PackError(f"{file} cannot be read: {error}. Copy it again.") from error
    return config


def _is_standard(data: bytes) -> bool:
    """Whether it is surely a JSON object. To parse a tokenizer of 20 MB takes half a second, and this 20 ms."""
    try:
        data.decode()
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def reading(file: Path) -> Iterator[BufferedReader]:
    """The open file. Raises PackError if it cannot be read."""
    try:
        with open_file(file) as opened:
            yield opened
    except OSError as error:
        raise PackError(f"{file} cannot be read: {error.strerror}. Copy it again.") from error


def check_start(file: Path, data: bytes) -> None:
    """Raises PackError if a file begins like one that Git has in the place of a large one, or like a text that is not UTF-8."""
    if data.startswith(POINTER):
        raise PackError(
            f"{file} is a Git LFS pointer, not the file itself. In a clone of its repository, type `git lfs pull`; otherwise "
            "copy it again."
        )
    encoding = json.detect_encoding(data[:4]) if file.suffix == ".json" else ""
    if encoding.startswith(("utf-16", "utf-32")):
        raise PackError(
            f"{file} is encoded in {encoding[:6].upper()}, which transformers does not read. Save it as UTF-8, for example "
            f"with: iconv -f {encoding} -t utf-8 {shlex.quote(str(file))} > NEW.json"
        )


def check_support(folder: Path) -> None:
    """Raises PackError with the name of a file beside the weights that transformers could not read: its own error has none."""
    for file in sorted(folder.iterdir()):
        if file.name in READ:
            if not _is_standard(data := _read(file)):
                _parse(file, data)
        elif file.suffix in (".txt", ".model", ".jinja") and not file.is_dir():
            with reading(file) as opened:
                check_start(file, opened.read(len(POINTER)))


def find_marked(folder: Path) -> list[Path]:
    """The JSON files of a folder that begin with a byte order mark, as editors on Windows write it. transformers refuses
    them."""
    files = (file for file in sorted(folder.glob("*.json")) if file.is_file())
    return [file for file in files if _is_marked(file)]


def _is_marked(file: Path) -> bool:
    with open_file(file) as opened:
        return opened.read(len(BOM_UTF8)) == BOM_UTF8


def list_weights(folder: Path, *, pickle: bool = False) -> list[Path]:
    """The safetensors files of a transformers model; none if it has a pickle instead, and pickles are allowed."""
    whole, index = (folder / name for name in WEIGHTS)
    if whole.is_file():
        return [whole]
    if index.is_file():
        places = read_config(index).get("weight_map")
        names = set(map(str, places.values())) if isinstance(places, dict) else set()
        if outside := sorted(filter(leads_outside, names)):
            raise PackError(
                f"{index} names {outside[0]}, which is outside the folder, so its digest is not kept."
            )
        return sorted(folder / name for name in names)
    if (folder / PICKLE).is_file():
        if pickle:
            return []
        raise PackError(
            f"the weights in {folder} are a pickle, {PICKLE}; `visiond models make` converts it to a pack with safetensors."
        )
    advice = advise(names_in(folder), str(folder)) or "Save them there with save_pretrained."
    raise PackError(f"{folder} has no weights: none of {', '.join(WEIGHTS)}. {advice}")


def names_in(folder: Path) -> set[str]:
    """The names of the files in a folder, and in its subfolders."""
    return {file.relative_to(folder).as_posix() for pattern in ("*", "*/*") for file in folder.glob(pattern)}


def advise(files: Collection[str], folder: str, before: str = "") -> str:
    """What there is instead of weights, or of a model, where transformers looks for them, and what to type so that they are
    there; "" for nothing known.

    files: their names, those in subfolders too. folder: where they are, after the command `before`.
    """
    for file in sorted(files):
        place, _, name = file.rpartition("/")
        if place and f"{place}/config.json" in files:
            return f"The subfolder {place} has a model: {before and f'type `{before}`, and '}name the folder {folder}/{place}."
        if command := move_weights(place, name, folder):
            typed = " && ".join(filter(None, (before, command)))
            return f"There is {file}: to use it, type `{typed}`, and name the folder {folder}."
    for end, form in FORMS.items():
        if found := min((file for file in files if file.endswith(end)), default=""):
            return (
                f"There is {found}, which is {form}; visiond does not read it. Load the model with transformers if "
                "possible, and save it with save_pretrained."
            )
    return ""


def move_weights(place: str, name: str, folder: str) -> str:
    """The command that brings weights to where transformers looks for them; "" for another file. place: a subfolder."""
    if place:
        return f"mv {folder}/{place}/* {folder}/" if name in (*WEIGHTS, PICKLE) else ""
    variant = VARIANT.fullmatch(name)
    return f"mv {folder}/{name} {folder}/{variant[1]}{variant[2]}" if variant else ""


def read_header(file: Path) -> dict[str, Any]:
    """The tensors in a safetensors file's header, by name. Raises PackError if the file is not complete."""
    damaged = f"{file} is cut short or damaged"
    try:
        size = file.stat().st_size
        with open_file(file) as opened:
            check_start(file, opened.read(len(POINTER)))
            opened.seek(0)
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
