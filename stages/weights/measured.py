"""Rates of models of the catalog alone on one H100, from `python -m benchmarks.models`. Imports no torch."""

from __future__ import annotations

import msgspec


class MeasuredRate(msgspec.Struct, frozen=True):
    """Images/s at a batch size, in half precision, of images of 1280×960 pixels; captions of 20 tokens,
    pages of up to 256. memory_bytes: the most that PyTorch reserved on the GPU during the measurement, perhaps for a
    larger batch that was not faster."""

    images_per_second: float
    batch_size: int
    memory_bytes: int


GPU = "H100"
RATES = {
    name: MeasuredRate(rate, batch, round(gigabytes * 1e9))
    for name, rate, batch, gigabytes in (
        ("yolov8n", 5154, 128, 4.6),
        ("yolo26m", 1964, 32, 3.7),
        ("rt-detrv2-r50", 708, 128, 10.3),
        ("d-fine-large", 772, 128, 10.9),
        ("rf-detr-small", 1891, 128, 4.5),
        ("clip-b32", 11720, 128, 0.8),
        ("clip-l14", 2001, 128, 2.7),
        ("siglip2-b16-224", 7194, 128, 1.6),
        ("siglip2-so400m-384", 813, 128, 6.5),
        ("blip-base", 1661, 128, 6.3),
        ("blip-large", 925, 128, 7.2),
        ("florence2-base", 212, 128, 33.1),
        ("blip2-opt-2.7b", 368, 128, 18.4),
        ("smolvlm2-500m", 86.2, 32, 15.3),
        ("qwen3-vl-2b", 46.6, 64, 36.7),
        ("lighton-ocr-1b", 12.2, 32, 17.1),
    )
}
