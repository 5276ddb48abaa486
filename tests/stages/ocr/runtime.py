"""Runs ONNX models with ONNX Runtime, which the tests compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime


def run_onnx(model: str | bytes, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first output of a model, a path or its bytes, whose input is called x."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # of several, those that wait use as much CPU time as those that compute
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    output: np.ndarray[Any, Any] = session.run(None, {"x": x})[0]
    return output
