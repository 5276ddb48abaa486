"""OCR: the lines of text in an image, by PP-OCRv6 small.

The answers are rapidocr's, which the tests hold this stage against: the same boxes and texts, scores within 1e-3. What
differs: there is no classifier that turns lines round by 180° (on upright pages it turned lines the wrong way), and
three bounds that rapidocr lacks keep thin images and lines from taking minutes: LONGEST_MAP, WIDEST_LINE, and pages of
less than 32 pixels a side after shrinking.

rapidocr recognises an image's lines in groups of six of similar shape and pads a group to its widest line; the network
sees the padding, so texts depend on it. Here each line keeps the padded width of its group, which only its own image
decides, but is recognised beside lines of any image: in a tensor of just that width on the CPU, and on a GPU in one of
a few widths, where ppocr.Recognizer keeps apart what lies right of each line's own.

Options: text_score (0.5), mask_threshold (0.3), box_threshold (0.5), unclip_ratio (1.6), max_side (2000),
min_side (30), map_side (736): rapidocr's text_score, thresh, box_thresh, unclip_ratio, max_side_len, min_side_len and
limit_side_len.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from stages.base import Image, ImageError, Line, Ocr, Result, Stage
from stages.dbpost import Quads, area, find_boxes
from stages.devices import dtype_of, hold_device, settle
from stages.onnxfile import WeightsError, weight_files
from stages.ppocr import BLANK, LINE_HEIGHT, load_detector, load_recognizer
from stages.warp import TALL, Lines, cut, resize

STRIDE = 32  # the detector's; the sides of its maps are multiples
FLATTEST = 8  # width / height above which a page is padded
LONGEST_MAP = 8 * 736  # pixels: what rapidocr's rule makes of the flattest page without padding
LINES_PADDED_ALIKE = 6
NARROWEST_LINE, WIDEST_LINE = 320, 3200  # columns

# What goes through a network at once on a GPU. On the CPU an image or a few lines at a time are fastest.
MAP_PIXELS, LINE_COLUMNS = 1 << 24, 1 << 17
LINE_COLUMNS_CPU = 1 << 12

Fraction = Annotated[float, Meta(ge=0, le=1)]
Side = Annotated[int, Meta(ge=32, le=4096)]


class OcrOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text_score: Fraction = 0.5
    mask_threshold: Fraction = 0.3
    box_threshold: Fraction = 0.5
    unclip_ratio: Annotated[float, Meta(gt=0, le=10)] = 1.6
    max_side: Side = 2000
    min_side: Annotated[int, Meta(ge=1, le=736)] = 30
    map_side: Side = 736


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes that an image takes on its way to the detector: rapidocr's rules. Width before height, in pixels."""

    image: tuple[int, int]
    page: tuple[int, int]  # without the padding
    padding: int  # black rows above, and as many below
    map: tuple[int, int]

    @classmethod
    def fit(cls, width: int, height: int, options: OcrOptions) -> Plan:
        page = (width, height)
        if max(page) > options.max_side:
            page = scale(page, options.max_side / max(page))
        if min(page) < options.min_side:
            page = scale(page, options.min_side / min(page))
        padding = 0
        if page[1] <= options.min_side or page[0] / page[1] > FLATTEST:
            padding = abs(2 * max(page[0] // FLATTEST, options.min_side) - page[1]) // 2
        padded = (page[0], page[1] + 2 * padding)
        ratio = max(options.map_side / min(padded), 1.0)
        return cls((width, height), page, padding, scale(padded, min(ratio, LONGEST_MAP / max(padded))))

    def to_image(self, quads: Quads) -> Quads:
        """Boxes of the padded page as boxes of the image, in rapidocr's float32 arithmetic."""
        image, page = (np.array(size, dtype=np.float64) for size in (self.image, self.page))
        moved = (quads - np.array([0, self.padding], dtype=np.float32)) * (image / page).astype(np.float32)
        return np.clip(moved, 0, image.astype(np.float32))


def scale(size: tuple[int, int], ratio: float) -> tuple[int, int]:
    """Both sides by a ratio, cut off, then to the nearest multiple of the stride."""
    width, height = (max(round(int(side * ratio) / STRIDE), 1) * STRIDE for side in size)
    return width, height


class OcrStage(Stage):
    name = "ocr"

    def load(self) -> None:
        files = self.spec.files or {role: str(path) for role, path in weight_files().items()}
        if set(files) != {"det", "rec"}:
            raise WeightsError(f"ocr: the weights are to be det and rec, but {', '.join(sorted(files))} are given.")
        try:
            self.options = msgspec.convert(dict(self.spec.options), OcrOptions)
        except msgspec.ValidationError as error:
            raise ValueError(f"[stages.ocr] options: {error}") from error
        self.dtype, self.on_cpu = dtype_of(self.spec), torch.device(self.device).type == "cpu"
        if self.dtype == torch.float32 and not self.on_cpu:
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # or cuDNN rounds the products to TF32's 10 bits
        recognizer, self.characters = load_recognizer(files["rec"])
        place = {"dtype": self.dtype, "memory_format": torch.channels_last}
        self.detector = load_detector(files["det"]).to(self.device, **place)
        self.recognizer = recognizer.to(self.device, **place)
        self._warm_up()
        settle(self.device)

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        plans = [Plan.fit(image.pixels.shape[2], image.pixels.shape[1], self.options) for image in images]
        pages: dict[int, Tensor] = {}
        boxes: dict[int, Quads] = {}
        for batch in self._batch_maps(plans):
            with hold_device(self.lock):
                pages.update((i, make_page(images[i].pixels, plans[i])) for i in batch)
                masks, maps = self._detect([pages[i] for i in batch], plans[batch[0]])
            ...
