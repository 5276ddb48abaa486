"""Runs the graph of an ONNX file with torch, operation by operation.

PP-OCR's networks are published as ONNX files in many sizes and versions. PP-OCRv6 small has modules of its own
(ppocr.py); this runs all others, and only the operations that such networks have. Values of shapes stay on the
CPU, so that nothing waits for a GPU. In half precision, means of squares and softmax are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.contract.manifest import WeightsError

Operation = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class GraphStep:
    """An operation, its inputs by name ("" for one that is left out), its output, and the values that are not
    needed after it."""

    run: Operation
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    output: str
    last: tuple[str, ...] = ()


class Graph(nn.Module):
    """A graph with one input and one output. Its weights are buffers, so `to` moves them."""

    def __init__(self, graph: Any, place: str) -> None:
        """graph: of an ONNX model. place: of the file, for errors. Raises WeightsError if it has an operation
        that is not known."""
        super().__init__()
        from onnx import numpy_helper

        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.output = graph.output[0].name
        self.input = next(value.name for value in graph.input if value.name not in constants)
        self.constants: dict[str, Any] = {}
        self.weights: dict[str, str] = {}  # names of buffers by names of values
        for name, array in constants.items():
            self._keep(name, array)
        steps: list[GraphStep] = []
        for node in graph.node:
            step = read_step(node, place)
            if set(step.inputs) <= self._known():
                self._keep(step.output, self._run({}, step))
            else:
                steps.append(step)
        self.steps = note_last_uses(steps, self.output)

    def forward(self, pixels: Tensor) -> Tensor:
        values: dict[str, Any] = {self.input: pixels}
        for step in self.steps:
            values[step.output] = self._run(values, step)
            for name in step.last:
                values.pop(name, None)
        answer: Tensor = values[self.output]
        return answer

    def _run(self, values: Mapping[str, Any], step: GraphStep) -> Any:
        return step.run(step.attributes, *[self._find(values, name) for name in step.inputs])

    def _find(self, values: Mapping[str, Any], name: str) -> Any:
        if not name:
            return None
        if name in values:
            return values[name]
        return getattr(self, self.weights[name]) if name in self.weights else self.constants[name]

    def _known(self) -> set[str]:
        return {"", *self.constants, *self.weights}

    def _keep(self, name: str, value: Any) -> None:
        """A weight becomes a buffer. A single number becomes a number, because half precision would round it."""
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.copy())
        if isinstance(value, Tensor) and value.is_floating_point():
            if value.numel() == 1 and value.ndim <= 1:
                self.constants[name] = value.item()
                return
            self.weights[name] = f"weight{len(self.weights)}"
            self.register_buffer(self.weights[name], value.float())
        else:
            self.constants[name] = value


def read_step(node: Any, place: str) -> GraphStep:
    from onnx import helper, numpy_helper

    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    if node.op_type == "Constant":
        attributes["value"] = numpy_helper.to_array(attributes["value"])
    if node.op_type not in OPERATIONS or len([name for name in node.output if name]) != 1:
        raise WeightsError(
            f"{place} has the ONNX operation {node.op_type}, which visiond does not support. "
            "visiond reads PP-OCR's text detectors and text recognizers."
        )
    return GraphStep(OPERATIONS[node.op_type], attributes, tuple(node.input), node.output[0])


def note_last_uses(steps: Sequence[GraphStep], output: str) -> list[GraphStep]:
    """The steps with the values that may be freed after each."""
    seen, noted = {output}, []
    for step in reversed(steps):
        last = tuple(set(step.inputs) - seen)
        seen.update(step.inputs)
        noted.append(GraphStep(step.run, step.attributes, step.inputs, step.output, last))
    return noted[::-1]


def pad_same(pixels: Tensor, kernel: Sequence[int], strides: Sequence[int], value: float) -> Tensor:
    """ONNX's SAME_UPPER: an output of size / stride, rounded up; an odd row or column of padding is at the end."""
    pads: list[int] = []
    for size, length, stride in zip(
        reversed(pixels.shape[2:]), reversed(kernel), reversed(strides), strict=True
    ):
        total = max((math.ceil(size / stride) - 1) * stride + length - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(pixels, pads, value=value) if any(pads) else pixels


def pad_edges(
    attributes: Mapping[str, Any], pixels: Tensor, kernel: Sequence[int], value: float = 0.0
) -> Tensor:
    strides = attributes.get("strides", [1, 1])
    if attributes.get("auto_pad", b"NOTSET") == b"SAME_UPPER":
        return pad_same(pixels, kernel, strides, value)
    pads = attributes.get("pads", [0, 0, 0, 0])
    top, left, bottom, right = pads
    return F.pad(pixels, (left, right, top, bottom), value=value) if any(pads) else pixels


def convolve(
    attributes: Mapping[str, Any], pixels: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    pixels = pad_edges(attributes, pixels.to(weight.dtype), weight.shape[2:])
    return F.conv2d(
        pixels,
        weight,
        bias,
        attributes.get("strides", [1, 1]),
        0,
        attributes.get("dilations", [1, 1]),
        attributes.get("group", 1),
    )


def deconvolve(
    attributes: Mapping[str, Any], pixels: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    strides, groups = attributes.get("strides", [1, 1]), attributes.get("group", 1)
    return F.conv_transpose2d(pixels.to(weight.dtype), weight, bias, strides, 0, 0, groups)


def pool_most(attributes: Mapping[str, Any], pixels: Tensor) -> Tensor:
    kernel = attributes["kernel_shape"]
    padded = pad_edges(attributes, pixels, kernel, float("-inf"))
    return F.max_pool2d(padded, kernel, attributes.get("strides", [1, 1]))


def normalize_batch(
    attributes: Mapping[str, Any],
    pixels: Tensor,
    scale: Tensor,
    shift: Tensor,
    mean: Tensor,
    variance: Tensor,
) -> Tensor:
    gain = scale.float() / torch.sqrt(variance.float() + attributes.get("epsilon", 1e-5))
    offset = shift.float() - mean.float() * gain
    shape = (1, -1, *[1] * (pixels.ndim - 2))
    return (pixels * gain.reshape(shape) + offset.reshape(shape)).to(pixels.dtype)


def resize(attributes: Mapping[str, Any], pixels: Tensor, *rest: Any) -> Tensor:
    """rest: a region of interest, scales and sizes. Only whole factors and the nearest pixel."""
    factors = [float(scale) for scale in rest[1][2:]]
    if attributes.get("mode") != b"nearest" or any(factor != int(factor) for factor in factors):
        raise WeightsError("an ONNX graph resizes in a way that visiond does not support.")
    return F.interpolate(pixels, scale_factor=factors)


def reshape(attributes: Mapping[str, Any], values: Tensor, shape: Tensor) -> Tensor:
    """A 0 in the shape keeps the size."""
    return values.reshape([values.shape[i] if size == 0 else size for i, size in enumerate(shape.tolist())])


def cut(
    attributes: Mapping[str, Any],
    values: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    """Slice. The bounds are inputs, or attributes in old files. Steps are 1 in these networks."""
    if steps is not None and steps.ne(1).any():
        raise WeightsError("an ONNX graph leaves out values in a way that visiond does not support.")
    first, end, along = (
        attributes[name] if given is None else given.tolist()
        for name, given in (("starts", starts), ("ends", ends), ("axes", axes))
    )
    for axis, begin, stop in zip(along, first, end, strict=True):
        values = values[(slice(None),) * (axis % values.ndim) + (slice(begin, stop),)]
    return values


def squeeze(attributes: Mapping[str, Any], values: Tensor, axes: Tensor | None = None) -> Tensor:
    return values.squeeze(tuple(attributes["axes"] if axes is None else axes.tolist()))


def unsqueeze(attributes: Mapping[str, Any], values: Tensor, axes: Tensor | None = None) -> Tensor:
    for axis in sorted(attributes["axes"] if axes is None else axes.tolist()):
        values = values.unsqueeze(axis)
    return values


def clip(attributes: Mapping[str, Any], values: Tensor, low: Any = None, high: Any = None) -> Tensor:
    low, high = (attributes.get(name, given) for name, given in (("min", low), ("max", high)))
    return values.clamp(low, high)


def cast(attributes: Mapping[str, Any], values: Any) -> Any:
    """Between kinds of numbers; the precision of weights and maps is that of the network."""
    whole = attributes["to"] in (6, 7)  # int32, int64
    if not isinstance(values, Tensor):
        return int(values) if whole else float(values)
    return values.long() if whole else values.float() if not values.is_floating_point() else values


def take_mean(attributes: Mapping[str, Any], values: Tensor, axes: Tensor | None = None) -> Tensor:
    along = attributes["axes"] if axes is None else axes.tolist()
    return values.mean(along, keepdim=bool(attributes.get("keepdims", 1)))


OPERATIONS: dict[str, Operation] = {
    "Add": lambda _, left, right: left + right,
    "AveragePool": lambda attributes, pixels: F.avg_pool2d(
        pixels, attributes["kernel_shape"], attributes.get("strides", [1, 1])
    ),
    "BatchNormalization": normalize_batch,
    "Cast": cast,
    "Clip": clip,
    "Concat": lambda attributes, *parts: torch.cat(parts, attributes["axis"]),
    "Constant": lambda attributes: attributes["value"],
    "Conv": convolve,
    "ConvTranspose": deconvolve,
    "Div": lambda _, left, right: left / right,
    "Erf": lambda _, values: torch.erf(values),
    "GlobalAveragePool": lambda _, pixels: pixels.mean((2, 3), keepdim=True),
    "HardSigmoid": lambda attributes, values: (
        values * attributes.get("alpha", 0.2) + attributes.get("beta", 0.5)
    ).clamp(0, 1),
    "HardSwish": lambda _, values: F.hardswish(values),
    "Identity": lambda _, values: values,
    "MatMul": lambda _, left, right: left.to(right.dtype) @ right,
    "MaxPool": pool_most,
    "Mul": lambda _, left, right: left * right,
    "Pow": lambda _, values, power: values.float() ** power,
    "ReduceMean": take_mean,
    "Relu": lambda _, values: torch.relu(values),
    "Reshape": reshape,
    "Resize": resize,
    "Shape": lambda _, values: torch.tensor(values.shape),
    "Sigmoid": lambda _, values: torch.sigmoid(values),
    "Slice": cut,
    "Softmax": lambda attributes, values: values.softmax(attributes.get("axis", -1), dtype=torch.float32),
    "Sqrt": lambda _, values: torch.sqrt(values),
    "Squeeze": squeeze,
    "Sub": lambda _, left, right: left - right,
    "Transpose": lambda attributes, values: values.permute(attributes["perm"]),
    "Unsqueeze": unsqueeze,
}
