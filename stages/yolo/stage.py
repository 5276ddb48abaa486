"""YOLO: the objects in an image, and where they are.

Each image is letterboxed as ultralytics' predict does for a single image. Images with the same canvas size
go through the network together. The tests compare boxes, classes and scores with ultralytics' own predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from stages.contract.base import Image, ImageError, Result, Stage, StageSpec, StageUnusable
from stages.contract.options import read_options
from stages.images.devices import (
    device_errors,
    dtype_of,
    group_places,
    has_kernels,
    hold_device,
    pad_batch,
    pixels_of,
    split_batches,
    synchronize,
    warm_up_size,
)
from stages.pretrained.familiarity import load_familiarity
from stages.pretrained.recording import Recorded, recording_single
from stages.yolo.descriptor import Objects, YoloOptions
from stages.yolo.letterbox import Letterbox, fill_canvases, fill_with_kernel
from stages.yolo.network import convolutions_with_silu, speed_up_convolutions
from stages.yolo.recognition import has_name
from stages.yolo.suppression import keep_confident, select, suppress
from stages.yolo.weights import load_network

PROPORTIONS = ((1, 1), (3, 4), (4, 3), (2, 3), (3, 2), (9, 16), (16, 9))  # height and width of usual images


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
        self.model, config = load_network(self.spec.files, allow_pickle=self.options.allow_pickle)
        self.names = [str(name) for name in config["names"]]
        self.size, stride = self.options.imgsz or int(config["imgsz"]), self.model.stride
        if self.size % stride:
            raise StageUnusable(f"yolo: imgsz is {self.size}; choose a multiple of {stride}.")
        self.model.fold_norms()
        self.network = Recorded(self.model)
        with device_errors():
            self.model.to(self.device, dtype).to(memory_format=torch.channels_last)
        self.dtype = dtype
        self.familiarity = load_familiarity(self.spec, self.device, self.lock)
        is_half = self.device.startswith("cuda") and dtype != torch.float32
        if is_half and has_kernels(torch.device(self.device)):
            speed_up_convolutions(self.model)
        blank = torch.zeros(3, self.size, self.size, dtype=torch.uint8, device=self.device)
        count = warm_up_size(self.device, self.spec.batch_size)
        with hold_device(self.lock):
            self._forward([blank] * count, [Letterbox.fit(self.size, self.size, self.size, stride)] * count)
            with recording_single(self.spec, self.device) as records:
                for height, width in PROPORTIONS if records else ():
                    box = Letterbox.fit(100 * height, 100 * width, self.size, stride)
                    self._forward([blank], [box])
            synchronize(self.device)

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        boxes = [Letterbox.fit(image.height, image.width, self.size, self.model.stride) for image in images]
        results: dict[int, Result | ImageError] = {}
        for places in group_places(box.canvas for box in boxes).values():
            for batch in split_batches(places, self.spec.batch_size):
                pixels = pixels_of([images[place] for place in batch])
                with hold_device(self.lock):
                    candidates = self._forward(pixels, [boxes[place] for place in batch])
                for place, found in zip(batch, self._suppress(candidates), strict=True):
                    results[place] = self._describe(found, boxes[place], images[place])
        for place in compress(range(len(images)), self.familiarity.find_unfamiliar(images)):
            results[place] = Objects.of([], [], [], images[place])
        return [results[place] for place in range(len(images))]

    def _forward(self, pixels: Sequence[Tensor], boxes: Sequence[Letterbox]) -> Tensor:
        """The network's predictions on the host, without most of those that suppression would drop."""
        canvases = pad_batch(fill_canvases(pixels, boxes, self.dtype), self.spec.batch_size, self.name)
        predictions = self.network(canvases)[: len(pixels)]
        return (
            predictions if self.model.is_end_to_end else keep_confident(predictions, self.options.conf)
        ).cpu()

    def _suppress(self, candidates: Tensor) -> list[Tensor]:
        """Of each image [boxes, 6]: corners on the canvas, score, class; the highest score first."""
        conf, most = self.options.conf, self.options.max_det
        if self.model.is_end_to_end:
            return select(candidates, conf, most)
        return suppress(candidates, conf, self.options.iou, most)

    def _describe(self, found: Tensor, box: Letterbox, image: Image) -> Objects:
        labels = [self.names[number] for number in found[:, 5].int().tolist()]
        rows = found.numpy().astype(np.float64)[[has_name(label) for label in labels]]
        corners = box.unplace(rows[:, :4], image.height, image.width).tolist()
        labels = [label for label in labels if has_name(label)]
        return Objects.of(labels, rows[:, 4].tolist(), corners, image)
