"""Loads OCR's two networks from whatever files have them: a checkpoint of transformers, or an ONNX file.

A network with the modules of PP-OCRv6 small gets ppocr.py's forward pass, which the GPU kernels know too. The
structure decides, not a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stages.contract.base import StageUnusable
from stages.contract.manifest import WeightsError
from stages.ocr.files import MODELS
from stages.ocr.generic import GenericDetector, GenericRecognizer, Levels
from stages.ocr.graph import Graph
from stages.ocr.onnxfile import read_characters, read_onnx
from stages.ocr.ppocr import (
    LINE_HEIGHT,
    Detector,
    OtherLayers,
    Recognizer,
    fill_detector,
    fill_recognizer,
    finish,
)
from stages.pretrained.convolutions import fold_norms
from stages.pretrained.soundness import refuse_nan

STEM_STRIDES = [2, 1, 1, 2, 1]
HEAD_KERNELS = [3, 2, 2]
SAME_COLORS = ("pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec")  # their processor does not turn RGB into BGR


def load_networks(
    files: Mapping[str, str],
) -> tuple[Detector | GenericDetector, Recognizer | GenericRecognizer, list[str]]:
    """The detector, the recognizer and the text of each of its classes, in float32 on the CPU.

    files: paths of "det" and "rec", and of the "dict" of a recognizer in an ONNX file that lacks it. Raises
    WeightsError or StageUnusable if they do not hold such networks.
    """
    detector = open_detector(files["det"])
    recognizer, characters = open_recognizer(files["rec"], files.get("dict"))
    refuse_nan(detector, files["det"])
    refuse_nan(recognizer, files["rec"])
    return detector, recognizer, characters


def open_detector(path: str) -> Detector | GenericDetector:
    if Path(path).is_dir():
        network, processor = open_checkpoint(path, "det")
        levels = read_levels(processor)
        if has_small_modules(network) and network.config.kernel_list == HEAD_KERNELS:
            detector = Detector(network, levels)
            take_rgb(detector)
            return detector
        return GenericDetector(network, levels)
    file = read_onnx(path)
    try:
        return fill_detector(file, path)
    except OtherLayers:
        if file.role != "det":
            raise WeightsError(f"{path} does not hold a text detector of PP-OCR.") from None
    return GenericDetector(Graph(file.graph, path))


def open_recognizer(
    path: str, dictionary: str | None = None
) -> tuple[Recognizer | GenericRecognizer, list[str]]:
    if Path(path).is_dir():
        return open_recognizer_checkpoint(path)
    file = read_onnx(path)
    if file.role != "rec":
        raise WeightsError(f"{path} does not hold a text recognizer of PP-OCR.")
    characters = read_characters(file, path, dictionary)
    try:
        return fill_recognizer(file, path, len(characters)), characters
    except OtherLayers:
        return GenericRecognizer(Graph(file.graph, path)), characters


def open_recognizer_checkpoint(path: str) -> tuple[Recognizer | GenericRecognizer, list[str]]:
    network, processor = open_checkpoint(path, "rec")
    characters, classes = list(processor.character_list), network.config.head_out_channels
    if len(characters) != classes:
        raise StageUnusable(
            f"the image processor in {path} has {len(characters)} characters, but the model has {classes} classes; copy the "
            "whole folder again."
        )
    if processor.size["height"] != LINE_HEIGHT:
        raise StageUnusable(
            f"the lines of {path} have {processor.size['height']} rows; visiond takes {LINE_HEIGHT}."
        )
    levels = read_levels(processor)
    if has_small_modules(network) and keeps_columns(network):
        recognizer = Recognizer(network, levels)
        take_rgb(recognizer)
        return recognizer, characters
    swaps = network.config.model_type not in SAME_COLORS
    return GenericRecognizer(network, levels, swaps=swaps), characters


def open_checkpoint(path: str, role: str) -> tuple[Any, Any]:
    """A model with its batch norms folded, and its image processor."""
    # Importing these takes a second, which the standard job's ONNX files do not need.
    from transformers import AutoImageProcessor

    from stages.pretrained.checkpoints import load_known, load_part

    network = load_known([model for model in MODELS if model.role == role], path, torch.float32, "cpu")
    network.requires_grad_(False)
    fold_norms(network)
    return network, load_part("image processor", AutoImageProcessor, path, trust_remote_code=False)


def read_levels(processor: Any) -> Levels:
    return Levels(tuple(processor.image_mean), tuple(processor.image_std))


def has_small_modules(network: Any) -> bool:
    """Whether ppocr.py's forward pass is that of the network, whatever its widths and depths."""
    config = network.config
    if config.model_type not in ("pp_ocrv6_small_det", "pp_ocrv6_small_rec"):
        return False
    backbone = config.backbone_config
    return (
        backbone.model_type == "pp_lcnet_v4"
        and backbone.stem_type == "large"
        and list(backbone.stem_strides) == STEM_STRIDES
        and backbone.hidden_act == "relu"
        and not backbone.use_learnable_affine_block
        and len(backbone.block_configs) == 4
        and getattr(config, "interpolate_mode", "nearest") == "nearest"
        and getattr(config, "hidden_act", "silu") == "silu"
    )


def keeps_columns(network: Any) -> bool:
    """Whether no stage of a recognizer makes a line narrower: then its steps are those of ppocr.count_steps."""
    strides = [stride for stage in network.config.backbone_config.block_configs for *_, stride, _ in stage]
    return all(stride == 1 or (isinstance(stride, list | tuple) and stride[1] == 1) for stride in strides)


def take_rgb(network: Detector | Recognizer) -> None:
    """Reverse the input channels of a network that takes BGR."""
    first: Any = next(iter(network.layers()))
    first.weight = torch.nn.Parameter(first.weight.detach().flip(1).contiguous(), requires_grad=False)
    finish(network)
