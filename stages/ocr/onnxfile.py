"""The ONNX files with the PP-OCRv6 weights: where they are, and their layers in order. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WHEEL = "rapidocr"
WHEEL_FILES = {"det": "PP-OCRv6_det_small.onnx", "rec": "PP-OCRv6_rec_small.onnx"}


class WeightsError(Exception):
    """A file of weights is missing, or has the weights of another network."""


def weight_files() -> dict[str, Path]:
    """The detection ("det") and recognition ("rec") files inside the installed rapidocr package,
    which is not imported."""
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


@dataclass(frozen=True, slots=True)
class Layer:
    """An operation with weights: "Conv", "ConvTranspose", "MatMul" or "LayerNorm".
    Batch norms are folded into convolutions."""

    kind: str
    weight: NDArray[np.float32]  # in torch's layout: a linear layer's is [out, in]
    bias: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class OnnxFile:
    layers: list[Layer]  # in the order of the file's nodes
    metadata: dict[str, str]


def read_onnx(path: Path | str) -> OnnxFile:
    """The layers of an ONNX file in file order. Their order identifies them,
    because exporters change the names."""
    import onnx

    try:
        model = onnx.load(str(path))
    except Exception as error:  # the type of protobuf's error depends on its version
        raise WeightsError(f"{path} cannot be read as ONNX: {error}") from error
    return OnnxFile(
        list(walk_layers(model.graph)), {entry.key: entry.value for entry in model.metadata_props}
    )


def walk_layers(graph: Any) -> Iterator[Layer]:
    from onnx import numpy_helper

    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type != "Identity"]
    for node, after in zip(nodes, [*nodes[1:], None], strict=True):
        operands = [constants[name] for name in node.input if name in constants]
        following = [constants[name] for name in after.input if name in constants] if after else []
        if node.op_type in ("Conv", "ConvTranspose", "MatMul") and operands:
            yield fold(node.op_type, operands[0], after, following)
        elif node.op_type == "Mul" and following and is_scale_and_shift(operands, after, following):
            yield Layer("LayerNorm", operands[0], following[0])


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
    if after is not None and after.op_type == "BatchNormalization":
        scale, shift, mean, variance = following
        epsilon = next((attribute.f for attribute in after.attribute if attribute.name == "epsilon"), 1e-5)
        gain = scale / np.sqrt(variance + epsilon)
        return Layer(kind, weight * gain[:, None, None, None], shift - mean * gain)
    has_bias = after is not None and after.op_type == "Add" and following
    return Layer(kind, weight, following[0].reshape(-1) if has_bias else None)
