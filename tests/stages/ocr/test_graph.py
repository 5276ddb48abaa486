from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from stages.contract.manifest import WeightsError
from stages.ocr.graph import OPERATIONS, Graph
from stages.ocr.onnxfile import read_onnx, weight_files
from tests.stages.ocr.runtime import run_onnx

RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.standard_normal((2, 4, 7, 9)).astype(np.float32)


def make_model(nodes: list[Any], opset: int = 14, **constants: Any) -> onnx.ModelProto:
    """A model from "x" to "y"."""
    shape = [None] * 4
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def node(kind: str, *inputs: str, out: str = "y", **attributes: Any) -> Any:
    return helper.make_node(kind, ["x", *inputs], [out], **attributes)


def draw(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


VECTOR = {"a": draw(4), "b": draw(4), "c": draw(4), "d": np.abs(draw(4)) + 0.5}
WINDOW: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [1, 1]}
MODELS = {
    "padding at the end": make_model(
        [node("Conv", "w", auto_pad="SAME_UPPER", kernel_shape=[2, 2], strides=[1, 1])], w=draw(3, 4, 2, 2)
    ),
    "strides and groups": make_model(
        [node("Conv", "w", "b", pads=[1, 2, 1, 2], strides=[2, 1], group=2, kernel_shape=[3, 5])],
        w=draw(6, 2, 3, 5),
        b=draw(6),
    ),
    "deconvolution": make_model(
        [node("ConvTranspose", "w", strides=[2, 2], kernel_shape=[2, 2])], w=draw(4, 3, 2, 2)
    ),
    "batch norm": make_model([node("BatchNormalization", "a", "b", "c", "d", epsilon=1e-3)], **VECTOR),
    "greatest": make_model([node("MaxPool", auto_pad="SAME_UPPER", **WINDOW)]),
    "mean": make_model([node("AveragePool", kernel_shape=[3, 2], strides=[3, 2])]),
    "twice the size": make_model(
        [
            node(
                "Resize",
                "",
                "scales",
                mode="nearest",
                coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            )
        ],
        scales=np.array([1, 1, 2, 2], np.float32),
    ),
    "hard swish": make_model([node("HardSwish")]),
    "hard sigmoid": make_model([node("HardSigmoid", alpha=0.3, beta=0.4)]),
    "clip": make_model([node("Clip", "low", "high")], low=np.float32(0), high=np.float32(0.6)),
    "clip of old files": make_model([node("Clip", min=0.0, max=0.6)], opset=7),
    "slice of old files": make_model([node("Slice", starts=[1], ends=[5], axes=[2])], opset=7),
    "shapes": make_model(
        [
            node("Shape", out="shape"),
            helper.make_node("Slice", ["shape", "one", "two", "zero"], ["channels"]),
            helper.make_node("Concat", ["keep", "channels", "rest"], ["wanted"], axis=0),
            node("Reshape", "wanted"),
        ],
        zero=np.array([0]),
        one=np.array([1]),
        two=np.array([2]),
        keep=np.array([0]),
        rest=np.array([-1]),
    ),
    "constants": make_model(
        [
            helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(draw(12))),
            helper.make_node("Reshape", ["w", "shape"], ["weight"]),
            node("Conv", "weight", kernel_shape=[1, 1]),
        ],
        shape=np.array([3, 4, 1, 1]),
    ),
    "layer norm": make_model(
        [
            node("ReduceMean", out="mean", axes=[-1]),
            node("Sub", "mean", out="apart"),
            helper.make_node("Pow", ["apart", "two"], ["square"]),
            helper.make_node("ReduceMean", ["square"], ["variance"], axes=[-1]),
            helper.make_node("Add", ["variance", "epsilon"], ["sum"]),
            helper.make_node("Sqrt", ["sum"], ["root"]),
            helper.make_node("Div", ["apart", "root"], ["even"]),
            helper.make_node("MatMul", ["even", "w"], ["y"]),
        ],
        two=np.array([2], np.float32),
        epsilon=np.array([1e-6], np.float32),
        w=draw(9, 5),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_operation_gives_what_onnx_runtime_gives(name: str) -> None:
    model = MODELS[name]
    theirs = run_onnx(model.SerializeToString(), PIXELS)
    ours = Graph(model.graph, "test.onnx")(torch.from_numpy(PIXELS)).numpy()
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize(("role", "size"), [("det", (96, 160)), ("rec", (48, 333))])
def test_a_real_network_gives_what_onnx_runtime_gives(role: str, size: tuple[int, int]) -> None:
    path = str(weight_files()[role])
    pixels = torch.rand((2, 3, *size), generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.inference_mode():
        ours = Graph(read_onnx(path).graph, path)(pixels).numpy()
    assert np.abs(ours - run_onnx(path, pixels.numpy())).max() < 1e-4


def test_half_precision_keeps_the_classes() -> None:
    """Sums of squares and softmax stay in float32, and a small epsilon is not rounded to 0."""
    path = str(weight_files()["rec"])
    graph = Graph(read_onnx(path).graph, path)
    pixels = torch.rand((1, 3, 48, 160), generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.inference_mode():
        exact = graph(pixels)
        rounded = graph.half()(pixels.half())
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.05
    assert (rounded.argmax(-1) == exact.argmax(-1)).all()


def test_an_operation_that_is_not_known_is_named(tmp_path: Path) -> None:
    assert "Einsum" not in OPERATIONS
    with pytest.raises(WeightsError, match=r"net\.onnx has the ONNX operation Einsum"):
        Graph(make_model([node("Einsum", equation="abcd->abdc")]).graph, "net.onnx")
