"""Runs ONNX models with ONNX Runtime, which the tests compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime


def run_onnx(model: str | bytes, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first output of a model whose input is called x. model: a path, or the bytes of a file."""
    options = onnxruntime.SessionOptions()
    # Of several threads, those that wait use as much CPU time as those that compute.
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    output: np.ndarray[Any, Any] = session.run(None, {"x": x})[0]
    return output
