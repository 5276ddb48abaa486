"""Recognizes PP-OCR's networks in a folder: checkpoints of transformers, and ONNX files. Imports no torch.

A folder has a text detector, a text recognizer, or both: by itself, or in the subfolders det and rec. What a file
is follows from its content: the model_type of a config.json, or the graph of an ONNX file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stages.contract import recognition
from stages.contract.descriptor import Files, KnownModel
from stages.contract.manifest import PackError, WeightsError

PROCESSOR = ("image processor",)
PLACES = ("det", "rec", ".", "ocr/det", "ocr/rec", "ocr")
DETECTION, RECOGNITION = "ForObjectDetection", "ForTextRecognition"
MODELS = tuple(
    KnownModel(f"pp_ocr{name}_{role}", f"PPOCR{title}{role.title()}{task}", what, parts=PROCESSOR, role=role)
    for role, task, rows in (
        (
            "det",
            DETECTION,
            (
                ("v6_small", "V6Small", "PP-OCRv6 tiny's and small's text detector"),
                ("v6_medium", "V6Medium", "PP-OCRv6 medium's text detector"),
                ("v5_mobile", "V5Mobile", "PP-OCRv5 mobile's text detector"),
                ("v5_server", "V5Server", "PP-OCRv5 server's text detector"),
            ),
        ),
        (
            "rec",
            RECOGNITION,
            (
                ("v6_tiny", "V6Tiny", "PP-OCRv6 tiny's text recognizer"),
                ("v6_small", "V6Small", "PP-OCRv6 small's and medium's text recognizer"),
                ("v5_mobile", "V5Mobile", "PP-OCRv5 mobile's text recognizer, of any language"),
                ("v5_server", "V5Server", "PP-OCRv5 server's text recognizer"),
            ),
        ),
    )
    for name, title, what in rows
)
ROLES = {model.type: model.role for model in MODELS}
NAMES = {"det": "text detector", "rec": "text recognizer"}


def find(path: Path) -> dict[str, str]:
    """The networks in a folder, or in an ONNX file, by role: "det", "rec", and "dict" for the dictionary of a
    recognizer in an ONNX file that lacks it. Raises PackError if there are two of one role, or if one is missing and an
    ONNX file is damaged: otherwise rapidocr's file would silently replace it."""
    if path.is_file():
        if path.suffix != ".onnx":
            return {}
        if not (found := dict(find_in_file(path))):
            raise PackError(f"{path} is not a text detector or a text recognizer of PP-OCR.")
        return found
    found = {}
    damage: dict[Path, PackError] = {}
    for place in PLACES:
        for role, name in find_in(path / place, damage):
            file = (Path(place) / name).as_posix()
            if role in found:
                raise PackError(
                    f"{path} has two {NAMES[role]}s, {found[role]} and {file}; remove one, or name the file itself."
                )
            found[role] = file
    # In a folder of any other name, a file that cannot be read may be of another stage.
    if NAMES.keys() - found.keys():
        for folder, error in damage.items():
            if found or folder.name in ("ocr", *NAMES):
                raise error
    return found


def find_in(folder: Path, damage: dict[Path, PackError]) -> Iterator[tuple[str, str]]:
    """Role and name of each network in a folder. damage: gets the folder, if an ONNX file cannot be read."""
    if (folder / "config.json").is_file():
        if role := ROLES.get(recognition.name_model(folder)[0]):
            yield role, "."
        return
    for file in sorted(folder.glob("*.onnx")):
        try:
            yield from find_in_file(file)
        except PackError as error:
            damage.setdefault(folder, error)


def describe_damage(folder: Path) -> str:
    """What is wrong with the first ONNX file of a folder without a config.json that cannot be read; "" if there is none."""
    damage: dict[Path, PackError] = {}
    list(find_in(folder, damage))
    return str(damage.get(folder, ""))


def find_in_file(file: Path) -> Iterator[tuple[str, str]]:
    """The role of an ONNX file; and the dictionary beside it, if it needs one."""
    from stages.ocr.onnxfile import count_classes, read_dictionary, read_onnx

    opened = read_onnx(file)
    role = opened.role
    if role:
        yield role, file.name
    if role != "rec" or "character" in opened.metadata:
        return
    classes = count_classes(opened.graph)
    for dictionary in sorted(file.parent.glob("*.txt")):
        with suppress(WeightsError):  # another text, not in UTF-8
            if len(read_dictionary(dictionary)) in (classes - 1, classes - 2):
                yield "dict", dictionary.name
                return


def check(files: Files, *, allow_pickle: bool) -> None:
    """Raises PackError if a file is damaged, or is not what PP-OCR has."""
    from stages.ocr.onnxfile import is_bundled

    for role in NAMES:
        if role not in files:
            continue
        if files[role].is_dir():
            model = recognition.check_transformers(
                [model for model in MODELS if model.role == role], files[role]
            )
            if role == "rec":
                check_characters(model, files[role])
        elif not is_bundled(files[role]):
            check_onnx(role, files)


def check_characters(model: KnownModel, folder: Path) -> None:
    """The dictionary belongs to the model: without it there would be no text, and with another one wrong text."""
    configs = [
        folder / name for name in recognition.MODEL_PARTS["image processor"] if (folder / name).is_file()
    ]
    config = recognition.read_config(configs[0])
    characters = config.get("image_processor", config).get("character_list")
    if not isinstance(characters, list) or not characters:
        raise PackError(
            f"{configs[0]} has no character_list, the dictionary of the {model.description}. Save it there with "
            "save_pretrained of the model's image processor."
        )


def check_onnx(role: str, files: Files) -> None:
    from stages.ocr.onnxfile import read_characters, read_onnx

    file = read_onnx(files[role])
    if file.role != role:
        raise PackError(f"{files[role]} is not a {NAMES[role]} of PP-OCR.")
    if role == "rec":
        read_characters(file, files[role], files.get("dict"))
