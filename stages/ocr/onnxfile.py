"""ONNX files with PP-OCR's weights: where PP-OCRv6 small's are, what a file holds, and its layers in order.
Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.contract.manifest import WeightsError

if TYPE_CHECKING:
    from numpy.typing import NDArray

WHEEL = "rapidocr"
# A recognizer has a class for each character. A classifier of lines, which is in the same folders, has 2 or 4.
FEWEST_CLASSES = 10
WHEEL_FILES = {"det": "PP-OCRv6_det_small.onnx", "rec": "PP-OCRv6_rec_small.onnx"}


def weight_files() -> dict[str, Path]:
    """The detection ("det") and recognition ("rec") files inside the installed rapidocr package, which is not imported."""
    try:
        folder = Path(str(distribution(WHEEL).locate_file(WHEEL))) / "models"
    except PackageNotFoundError:
        raise WeightsError(
            f"the OCR weights are part of the package {WHEEL}, which is not installed: pip install {WHEEL}"
        ) from None
    files = {role: folder / name for role, name in WHEEL_FILES.items()}
    for path in files.values():
        if not path.is_file():
            raise WeightsError(f"{path} is missing: install {WHEEL} again, or name the files in [stages.ocr]")
    return files


def is_bundled(file: Path) -> bool:
    """Whether a file is part of the rapidocr package: then it was checked when that was made."""
    return file.name in WHEEL_FILES.values() and file.parent.parent.name == WHEEL


@dataclass(frozen=True, slots=True)
class Layer:
    """An operation with weights: "Conv", "ConvTranspose", "MatMul" or "LayerNorm".
    Batch norms are folded into convolutions."""

    kind: str
    weight: NDArray[np.float32]  # in torch's layout: a linear layer's is [out, in]
    bias: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """layers: in the order of the file's nodes. graph: onnx's own."""

    layers: list[Layer]
    metadata: dict[str, str]
    graph: Any

    @property
    def role(self) -> str:
        """What the file does: "det" finds text, "rec" reads a line; "" for anything else."""
        end = find_end(self.graph)
        if end == "Softmax" and count_classes(self.graph) >= FEWEST_CLASSES:
            return "rec"
        kinds = {node.op_type for node in self.graph.node}
        return "det" if end != "Softmax" and {"ConvTranspose", "Sigmoid"} <= kinds else ""


def read_onnx(path: Path | str) -> OnnxFile:
    """The layers of an ONNX file in file order. Their order identifies them, because exporters change the names."""
    import onnx

    fix = f"Install {WHEEL} again" if is_bundled(Path(path)) else "Copy it again"
    try:
        model = onnx.load(str(path))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}. {fix}.") from error
    except Exception as error:  # the type of protobuf's error depends on its version
        raise WeightsError(f"{path} is cut short or damaged: it is not an ONNX file. {fix}.") from error
    if not model.graph.node:
        raise WeightsError(f"{path} is cut short or damaged: it contains no operations. {fix}.")
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    return OnnxFile(list(walk_layers(model.graph)), metadata, model.graph)


def find_end(graph: Any) -> str:
    """The operation that makes the output of a graph."""
    makers = {name: node for node in graph.node for name in node.output}
    node = makers.get(graph.output[0].name)
    while node is not None and node.op_type in ("Identity", "Cast"):
        node = makers.get(node.input[0])
    return "" if node is None else str(node.op_type)


def count_classes(graph: Any) -> int:
    """The width of the last matrix of weights."""
    widths = {tensor.name: tensor.dims[-1] for tensor in graph.initializer if len(tensor.dims) == 2}
    for node in graph.node:
        if node.op_type == "Constant" and len(node.attribute[0].t.dims) == 2:
            widths[node.output[0]] = node.attribute[0].t.dims[-1]
    name_copies(graph, widths)
    used = [width for node in graph.node if node.op_type == "MatMul" for width in read_operands(node, widths)]
    return int(used[-1]) if used else 0


def read_characters(file: OnnxFile, path: Path | str, dictionary: Path | str | None = None) -> list[str]:
    """The text of each class of a recognizer: the blank, the characters, and mostly a space.

    dictionary: a file with a character on each line; without it, the characters are in the file's metadata, as in
    rapidocr's files. Raises WeightsError if their number is not that of the classes.
    """
    characters = file.metadata.get("character", "").split("\n")
    if dictionary is not None:
        characters = read_dictionary(dictionary)
    elif "character" not in file.metadata:
        raise WeightsError(
            f"{path} has no \"character\" entry in its metadata, as rapidocr's text recognizers have. Put the model's "
            "dictionary beside it: a .txt file with a character on each line."
        )
    classes = count_classes(file.graph)
    if classes not in (len(characters) + 1, len(characters) + 2):
        raise WeightsError(
            f"{path} has {classes} classes, but {dictionary or 'its metadata'} has {len(characters)} characters; there "
            "should be one or two fewer than classes. Put the dictionary of this model beside it."
        )
    return ["", *characters, " "][:classes]


def read_dictionary(path: Path | str) -> list[str]:
    """The characters of a dictionary, one on each line. Some are spaces of other widths, so lines are not stripped."""
    try:
        lines = Path(path).read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} cannot be read as a dictionary in UTF-8: {error}") from error
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def walk_layers(graph: Any) -> Iterator[Layer]:
    from onnx import numpy_helper

    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    name_copies(graph, constants)
    nodes = [node for node in graph.node if node.op_type != "Identity"]
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        operands, following = read_operands(node, constants), read_operands(after, constants)
        if node.op_type in ("Conv", "ConvTranspose", "MatMul") and operands:
            yield fold(node.op_type, operands[0], after, following)
        elif node.op_type == "Mul" and following and is_scale_and_shift(operands, after, following):
            yield Layer("LayerNorm", operands[0], following[0])


def name_copies(graph: Any, constants: dict[str, Any]) -> None:
    """Add the constants' other names: an Identity only copies its input."""
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in constants:
            constants[node.output[0]] = constants[node.input[0]]


def read_operands(node: Any, constants: Mapping[str, Any]) -> list[Any]:
    """The inputs of an operation that are constants; of None, none."""
    return [constants[name] for name in node.input if name in constants] if node else []


def is_scale_and_shift(operands: list[Any], after: Any, following: list[Any]) -> bool:
    """Whether a Mul and an Add are the last two nodes of a layer norm that was exported as single operations."""
    shapes = [array.shape for array in (*operands, *following)]
    return (
        after.op_type == "Add"
        and len(shapes) == 2
        and shapes[0] == shapes[1]
        and len(shapes[0]) == 1 < shapes[0][0]
    )


def fold(kind: str, weight: Any, after: Any, following: list[Any]) -> Layer:
    """The layer with the bias or batch norm (epsilon 1e-5) that follows it folded in."""
    weight = weight.T if kind == "MatMul" else weight
    if after is not None and after.op_type == "BatchNormalization" and len(following) == 4:
        scale, shift, mean, variance = following
        epsilon = next((attribute.f for attribute in after.attribute if attribute.name == "epsilon"), 1e-5)
        gain = scale / np.sqrt(variance + epsilon)
        return Layer(kind, weight * gain[:, None, None, None], shift - mean * gain)
    has_bias = after is not None and after.op_type == "Add" and following
    return Layer(kind, weight, following[0].reshape(-1) if has_bias else None)
