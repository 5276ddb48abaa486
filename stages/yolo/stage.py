"""YOLO with ultralytics: the objects in an image, and where they are.

Each image is letterboxed as ultralytics' predict does for a single image. Images with the same canvas size
go through the network together. The tests compare boxes, classes and scores with ultralytics' own predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor

from stages.base import Image, ImageError, Result, Stage, StageSpec, StageUnusable
from stages.devices import (
    device_errors,
    dtype_of,
    group_places,
    has_kernels,
    hold_device,
    pixels_of,
    split_batches,
    synchronize,
)
from stages.options import read_options
from stages.pretrained.familiarity import load_familiarity
from stages.yolo.descriptor import Objects, YoloOptions
from stages.yolo.letterbox import Letterbox, fill_canvases, fill_with_kernel
from stages.yolo.network import (
    convolutions_with_silu,
    decode_in_float32,
    load_network,
    non_max_suppression,
    scale_boxes,
    speed_up_convolutions,
)
from stages.yolo.objects import describe

# With a last dimension of 6, ultralytics' non_max_suppression
# takes predictions for those of an end-to-end network.
FEWEST_CANDIDATES = 8


class YoloStage(Stage):
    @classmethod
    def launch_kernels(cls, spec: StageSpec) -> None:
        dtype, blank = dtype_of(spec), torch.zeros(3, 32, 32, dtype=torch.uint8)
        fill_with_kernel([blank], [Letterbox.fit(32, 32, 32, 32)], dtype)
        if dtype == torch.float32:
            return
        from stages.kernels.launch import add_bias_silu

        model, _ = load_network(spec.files, allow_pickle=read_options(spec, YoloOptions).allow_pickle)
        for module in convolutions_with_silu(model):
            channels = module.conv.out_channels
            add_bias_silu(torch.zeros(1, channels, 1, 1, dtype=dtype), torch.zeros(channels, dtype=dtype))

    def load(self) -> None:
        self.options, dtype = read_options(self.spec, YoloOptions), dtype_of(self.spec)
        model, config = load_network(self.spec.files, allow_pickle=self.options.allow_pickle)
        self.names = [str(name) for name in config["names"]]
        self.size = self.options.imgsz or int(config["imgsz"])
        self.stride = int(model.stride.max())
        if self.size % self.stride:
            raise StageUnusable(f"yolo: imgsz is {self.size}; choose a multiple of {self.stride}.")
        with device_errors():
            self.model = model.fuse(verbose=False).to(self.device, dtype, memory_format=torch.channels_last)
        self.dtype, self.end2end = dtype, bool(model.end2end)
        self.familiarity = load_familiarity(self.spec, self.device, self.lock)
        if dtype != torch.float32:
            decode_in_float32(model.model[-1])
            if self.device.startswith("cuda") and has_kernels(torch.device(self.device)):
                speed_up_convolutions(self.model)
        blank = torch.zeros(3, self.size, self.size, dtype=torch.uint8, device=self.device)
        count = self.spec.batch_size
        with hold_device(self.lock):
            self._forward(
                [blank] * count, [Letterbox.fit(self.size, self.size, self.size, self.stride)] * count
            )
            synchronize(self.device)

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        boxes = [Letterbox.fit(image.height, image.width, self.size, self.stride) for image in images]
        results: dict[int, Result | ImageError] = {}
        for canvas, places in group_places(box.canvas for box in boxes).items():
            for batch in split_batches(places, self.spec.batch_size):
                pixels = pixels_of([images[place] for place in batch])
                with hold_device(self.lock):
                    candidates = self._forward(pixels, [boxes[place] for place in batch])
                for place, found in zip(batch, self._suppress(candidates), strict=True):
                    results[place] = self._describe(found, canvas, images[place])
        for place, unknown in enumerate(self.familiarity.find_unfamiliar(images)):
            if unknown:
                results[place] = describe([], [], [], images[place])
        return [results[place] for place in range(len(images))]

    def _forward(self, pixels: Sequence[Tensor], boxes: Sequence[Letterbox]) -> Tensor:
        """The network's predictions on the host, for non_max_suppression,
        without most of those that it would drop."""
        predictions: Tensor = self.model(fill_canvases(pixels, boxes, self.dtype))[0].float()
        return (predictions if self.end2end else keep_confident(predictions, self.options.conf)).cpu()

    def _suppress(self, candidates: Tensor) -> list[Tensor]:
        """One [boxes, 6] for each image: corners on the canvas, score, class; highest score first."""
        found: list[Tensor] = non_max_suppression(
            candidates,
            self.options.conf,
            self.options.iou,
            max_det=self.options.max_det,
            max_time_img=inf,  # by default it gives up in the middle of a slow batch
            end2end=self.end2end,
        )
        return found

    def _describe(self, found: Tensor, canvas: tuple[int, int], image: Image) -> Objects:
        rows = found.numpy().astype(np.float64)
        corners = scale_boxes(canvas, rows[:, :4], (image.height, image.width)).tolist()
        labels = [self.names[number] for number in rows[:, 5].astype(int).tolist()]
        return describe(labels, rows[:, 4].tolist(), corners, image)


def keep_confident(predictions: Tensor, confidence: float) -> Tensor:
    """The anchors of [images, 4 + classes, anchors] that any image may need, the highest score first.

    non_max_suppression waits for the device several times for each image. It is faster to process
    the few hundred boxes above the threshold on the host, while the device runs the next batch.
    """
    scores = predictions[:, 4:].amax(dim=1)
    most = int((scores > confidence).sum(dim=1).max())
    kept = scores.topk(min(max(most, FEWEST_CANDIDATES), scores.shape[1]), dim=1).indices
    return predictions.gather(2, kept[:, None].expand(-1, predictions.shape[1], -1))
