"""Runs ONNX models with ONNX Runtime, which the tests compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from stages.ocr.loading import open_detector, open_recognizer
from stages.ocr.onnxfile import weight_files
from stages.ocr.ppocr import Detector, Recognizer


def run_onnx(model: str | bytes, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first output of a model whose input is called x. model: a path, or the bytes of a file."""
    options = onnxruntime.SessionOptions()
    # Of several threads, those that wait use as much CPU time as those that compute.
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    output: np.ndarray[Any, Any] = session.run(None, {"x": x})[0]
    return output


def open_small_detector() -> Detector:
    """PP-OCRv6 small, from the installed file."""
    network = open_detector(str(weight_files()["det"]))
    assert isinstance(network, Detector)
    return network


def open_small_recognizer() -> tuple[Recognizer, list[str]]:
    """PP-OCRv6 small, from the installed file, and its characters."""
    network, characters = open_recognizer(str(weight_files()["rec"]))
    assert isinstance(network, Recognizer)
    return network, characters
