"""OCR: the lines of text in an image, by PP-OCRv6 small.

The answers are rapidocr's: the tests check that boxes and texts are the same, and scores within 1e-3. Three
things differ. There is no classifier that turns single lines by 180°: of 312 upright lines it turned one the
wrong way. The option `orientation` turns whole pages instead. Limits that rapidocr lacks keep thin images
and lines from taking minutes: LONGEST_MAP, WIDEST_LINE, and pages between 32 pixels and max_side. And specks
are not counted among the 1,000 outlines that are looked at, so noise hides no text.

rapidocr recognizes an image's lines in groups of six of similar shape, and pads a group to its widest line.
The network sees the padding, so texts depend on it. Here each line keeps the padded width of its group, which
depends on its own image alone, but it is recognized together with lines of any image: on the CPU in a tensor of exactly that
width, on a GPU in one of a few widths, where ppocr.Recognizer masks what is beyond each line's own width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stages.contract.base import FULL_BATCH, Image, ImageError, Result, Stage, StageSpec
from stages.contract.binning import Thresholds, has_text
from stages.contract.manifest import WeightsError
from stages.contract.options import read_options
from stages.images.devices import (
    dtype_of,
    group_places,
    has_kernels_for,
    hold_device,
    pixels_of,
    split_batches,
)
from stages.images.images import TURNED, turn_with_kernel
from stages.ocr.dbpost import Quads, TextMaps, area, find_boxes, mask_text, unpack_masks
from stages.ocr.descriptor import VERTICAL_RATIO, Line, Ocr, OcrOptions, Point
from stages.ocr.direction import guess_turns, is_sure, put_in_order, score_reading, turn_corners
from stages.ocr.layout import order_lines
from stages.ocr.networks import NetworkLoader, Networks
from stages.ocr.onnxfile import weight_files
from stages.ocr.pieces import (
    PiecePlan,
    has_large,
    join_pieces,
    plan_pieces,
    replace_parts,
    shrink,
    smaller_map,
)
from stages.ocr.ppocr import BLANK, LINE_HEIGHT
from stages.ocr.warp import (
    TextLines,
    concatenate,
    crop_lines,
    crop_with_kernel,
    interleave,
    interleave_with_kernel,
    mask_with_kernel,
    resize,
)

WARM_WIDTHS = (320, 640, 1024)
LINES_IN_GROUP = 6
NARROWEST_LINE, WIDEST_LINE = 320, 3200  # columns

# Batch sizes on a GPU, in pixels and columns. On the CPU one image or a few lines at a time are fastest. A quarter of
# the pixels takes 1.8 GB instead of 3.9, and 3 % more time.
MAP_PIXELS, FEW_MAP_PIXELS, LINE_COLUMNS = 1 << 26, 1 << 24, 1 << 18
LINE_COLUMNS_CPU = 1 << 12

# Of 1,123 rendered lines that were read correctly this marks 5, each without one of its letters; of 813 read wrongly, 650.
SURE_SHARE = 0.8

SURE_LARGE = 0.9  # score of a line from which one of large letters is in the result
TEXT_SCORE = Thresholds().text_score

Box = tuple[Point, Point, Point, Point]


class Reading(NamedTuple):
    """A line's text, its score, and whether the text is mostly guessed."""

    text: str
    score: float
    guessed: bool


class OcrStage(Stage):
    @classmethod
    def launch_kernels(cls, spec: StageSpec) -> None:
        from stages.ocr import fused

        if dtype_of(spec) == torch.float16:
            fused.launch_kernels(find_files(spec))
        slanted = np.array([[[8, 4], [40, 8], [40, 16], [8, 12]]], dtype=np.float32)
        page = interleave_with_kernel(torch.zeros(3, 32, 64, dtype=torch.uint8))
        crop_with_kernel([page], plan_lines(0, slanted), LINE_HEIGHT, NARROWEST_LINE)
        for dtype in (torch.uint8, torch.float32):
            mask_with_kernel(torch.zeros(1, 32, 64, dtype=dtype), 0.5)
        for orientation in TURNED:  # as the decoder does, which has no list of its own
            turn_with_kernel(torch.zeros(3, 32, 64, dtype=torch.uint8), orientation)

    def load(self) -> None:
        self.options = read_options(self.spec, OcrOptions)
        self.dtype, self.on_cpu = dtype_of(self.spec), torch.device(self.device).type == "cpu"
        self.networks = NetworkLoader(self.spec, find_files(self.spec), self.device, self._try_out)
        self.networks.load()

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        networks = self.networks.latest()
        pieces = [plan_pieces(image.width, image.height, self.options) for image in images]
        pages, quads = self._find(networks, images, pieces)
        turns = [guess_turns(boxes) if self.options.orientation else 0 for boxes in quads]
        readings = self._read_turned(networks, pages, quads, turns)
        self._read_large(networks, pages, pieces, quads, readings)
        return [self._describe(*page) for page in zip(pieces, quads, readings, turns, strict=True)]

    def _find(
        self, networks: Networks, images: Sequence[Image], pieces: Sequence[Sequence[PiecePlan]]
    ) -> tuple[list[Tensor], list[Quads]]:
        """Each image's page, on the device, and the boxes of its lines in pixels of the padded page. The page of an
        image in several pieces is the image itself."""
        pixels = pixels_of(images)
        cuts = [(i, plan) for i, plans in enumerate(pieces) for plan in plans]
        pages: dict[int, Tensor] = {}
        found: dict[int, Quads] = {}
        for places in self._batch_maps([plan.map for _, plan in cuts]):
            batch = [cuts[k] for k in places]
            with hold_device(self.lock):
                made = make_pages([(pixels[i], plan) for i, plan in batch])
                maps = self._detect(networks, made, batch[0][1].map)
            found.update(zip(places, self._find_boxes(maps, made), strict=True))
            pages |= {i: page for (i, _), page in zip(batch, made, strict=True)}
        pages |= self._keep_whole(pixels, pieces)
        return [pages[i] for i in range(len(images))], join_all(pieces, [found[k] for k in range(len(cuts))])

    def _keep_whole(
        self, pixels: Sequence[Tensor], pieces: Sequence[Sequence[PiecePlan]]
    ) -> dict[int, Tensor]:
        """The pages of the images in several pieces."""
        several = [i for i, plans in enumerate(pieces) if len(plans) > 1]
        if not several:  # the lock costs a wait for the other thread
            return {}
        with hold_device(self.lock):
            return {i: interleave(pixels[i]) for i in several}

    def _find_boxes(self, maps: TextMaps, pages: Sequence[Tensor]) -> list[Quads]:
        sizes = [(page.shape[1], page.shape[0]) for page in pages]
        return find_boxes(*maps, sizes, self.options.box_threshold, self.options.unclip_ratio)

    def _read_large(
        self,
        networks: Networks,
        pages: Sequence[Tensor],
        pieces: Sequence[Sequence[PiecePlan]],
        quads: list[Quads],
        readings: list[list[Reading]],
    ) -> None:
        """Read pages without any text, or with parts of large letters, at a smaller scale, at which the detector finds
        letters of 450 pixels and more. Only what is certain is added: in a photograph without text shapes look like
        letters. Changes quads and readings."""
        chosen = [
            i
            for i, texts in enumerate(readings)
            if len(pieces[i]) == 1 and (has_large(quads[i], pieces[i][0]) or not any(map(is_text, texts)))
        ]
        sizes = [smaller_map(pieces[i][0]) for i in chosen]
        for places in self._batch_maps(sizes):
            batch = [chosen[k] for k in places]
            tried = [pages[i] for i in batch]
            with hold_device(self.lock):
                maps = self._detect(networks, tried, sizes[places[0]])
            found = self._find_boxes(maps, tried)
            texts = self._read_pages(networks, tried, found)
            for i, boxes, read in zip(batch, found, texts, strict=True):
                quads[i], readings[i] = add_large(quads[i], readings[i], boxes, read)

    def _batch_maps(self, sizes: Sequence[tuple[int, int]]) -> Iterator[Sequence[int]]:
        """Batches for the detector: indices of maps of one size."""
        for (width, height), places in group_places(sizes).items():
            pixels = MAP_PIXELS if self.spec.batch_size >= FULL_BATCH else FEW_MAP_PIXELS
            most = 1 if self.on_cpu else min(self.spec.batch_size, pixels // (width * height))
            parts = -(-len(places) // max(most, 1))
            yield from split_batches(places, -(-len(places) // parts))

    def _detect(self, networks: Networks, pages: Sequence[Tensor], size: tuple[int, int]) -> TextMaps:
        """Where there is text in pages whose maps have one size; from a GPU as bytes, so that less is copied."""
        threshold, maps = self.options.mask_threshold, networks.detector.infer(resize(pages, *size))
        if maps.dtype != torch.uint8:
            maps = maps.float()
            if not self.on_cpu and self.dtype != torch.float32:
                maps = (maps * 255).round().byte()
        if not has_kernels_for(maps):
            probabilities = to_host(maps)
            return TextMaps(probabilities, mask_text(probabilities, threshold))
        packed = to_host(mask_with_kernel(maps, threshold))
        return TextMaps(to_host(maps), unpack_masks(packed, maps.shape[2]))

    def _read_turned(
        self, networks: Networks, pages: Sequence[Tensor], quads: list[Quads], turns: list[int]
    ) -> list[list[Reading]]:
        """The readings of each page's boxes. With the option `orientation`, pages of any orientation; then turns
        are corrected."""
        readings = self._read_pages(networks, pages, list(map(turn_corners, quads, turns)))
        if not self.options.orientation:
            return readings
        doubtful = [i for i, texts in enumerate(readings) if not is_sure(texts)]
        turned = [turn_corners(quads[i], turns[i] + 2) for i in doubtful]
        again = self._read_pages(networks, [pages[i] for i in doubtful], turned)
        for i, texts in zip(doubtful, again, strict=True):
            if score_reading(texts) > score_reading(readings[i]):
                turns[i], readings[i] = turns[i] + 2, texts
        return readings

    def _read_pages(
        self, networks: Networks, pages: Sequence[Tensor], quads: Sequence[Quads]
    ) -> list[list[Reading]]:
        """The reading of each page's boxes. Text begins at a box's first corner."""
        if not pages:
            return []
        texts = iter(
            self._read(networks, pages, concatenate([plan_lines(i, boxes) for i, boxes in enumerate(quads)]))
        )
        return [list(islice(texts, len(boxes))) for boxes in quads]

    def _read(self, networks: Networks, pages: Sequence[Tensor], lines: TextLines) -> list[Reading]:
        readings = [Reading("", 0.0, False)] * len(lines)
        for places, columns in self._batch_lines(networks, lines):
            with hold_device(self.lock):
                classes, probabilities = self._recognize(networks, pages, lines[places], columns)
            for i, reading in zip(places, decode(classes, probabilities, networks.characters), strict=True):
                readings[i] = (
                    reading._replace(text=put_in_order(reading.text)) if networks.leftwards else reading
                )
        return readings

    def _batch_lines(self, networks: Networks, lines: TextLines) -> Iterator[tuple[Sequence[int], int]]:
        """Batches for the recognizer: indices of lines, and the width of their tensor."""
        shares = networks.recognizer.shares_tensors and not self.on_cpu
        columns = bucket(lines.padded) if shares else lines.padded
        for width in np.unique(columns).tolist():
            most = max((LINE_COLUMNS_CPU if self.on_cpu else LINE_COLUMNS) // width, 1)
            for places in split_batches(np.flatnonzero(columns == width).tolist(), most):
                yield places, width

    def _recognize(
        self, networks: Networks, pages: Sequence[Tensor], lines: TextLines, columns: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The most likely class of each step and its probability, [N, steps] on the host."""
        resized = torch.from_numpy(lines.resized).to(self.device)
        padded = None if self.on_cpu else torch.from_numpy(lines.padded).to(self.device)
        crops = crop_lines(pages, lines, LINE_HEIGHT, columns)
        answers = networks.recognizer.infer(crops, resized, padded)
        classes, probabilities = to_host(torch.stack([answer.float() for answer in answers]))
        return classes.astype(np.int64), probabilities

    def _describe(
        self, pieces: Sequence[PiecePlan], quads: Quads, readings: Sequence[Reading], turns: int
    ) -> Ocr:
        kept = [
            i
            for i, (text, score, _) in enumerate(readings)
            if text.strip() and score >= self.options.text_score
        ]
        kept = [kept[i] for i in order_lines(quads[kept], [readings[i].text for i in kept], turns)]
        boxes = pieces[0].to_image(quads[kept]) if len(pieces) == 1 else quads[kept]
        corners = [cast(Box, tuple(map(tuple, box))) for box in boxes.tolist()]
        lines = [
            Line(*readings[i][:2], box, readings[i].guessed) for i, box in zip(kept, corners, strict=True)
        ]
        width, height = (a + b for a, b in zip(pieces[-1].origin, pieces[-1].image, strict=True))
        ratio = float(area(boxes).sum()) / (width * height)
        return Ocr(lines, len(lines), min(ratio, 1.0), scale=shrink(pieces, self.options))

    def _try_out(self, networks: Networks) -> None:
        """Run a page of the most common size, and a line of each of a few widths. On a CPU, which compiles nothing,
        a small page and one line show that the networks run."""
        width, height = (320, 96) if self.on_cpu else (1280, 960)
        page = torch.zeros(height, width, 3, dtype=torch.uint8, device=self.device)
        self._detect(networks, [page], (width, height))
        for width in WARM_WIDTHS[:1] if self.on_cpu else WARM_WIDTHS:
            line = np.array([[[0, 0], [width, 0], [width, LINE_HEIGHT], [0, LINE_HEIGHT]]], dtype=np.float32)
            self._recognize(networks, [page], plan_lines(0, line), width)


def find_files(spec: StageSpec) -> dict[str, str]:
    """The paths of det and rec, and of rec's dictionary if it is a separate file. Raises WeightsError."""
    files = spec.files or {role: str(path) for role, path in weight_files().items()}
    if set(files) - {"dict"} != {"det", "rec"}:
        raise WeightsError(f"ocr: the weights must be det and rec, but these are given: {', '.join(files)}.")
    return files


def join_all(pieces: Sequence[Sequence[PiecePlan]], found: Iterable[Quads]) -> list[Quads]:
    """The boxes of each image. found: of each piece."""
    boxes = iter(found)
    return [
        next(boxes) if len(plans) == 1 else join_pieces(plans, islice(boxes, len(plans))) for plans in pieces
    ]


def make_pages(cuts: Sequence[tuple[Tensor, PiecePlan]]) -> list[Tensor]:
    """uint8 [height, width, 3] of each piece, from its image's [3, height, width], on its device."""
    pages: dict[int, Tensor] = {}
    for (whole, wanted), places in group_places((plan.image, plan.page) for _, plan in cuts).items():
        pieces = [cut(*cuts[k]) for k in places]
        made: Iterable[Tensor] = map(interleave, pieces)
        if whole != wanted:
            made = resize([piece.permute(1, 2, 0) for piece in pieces], *wanted)
        pages |= dict(zip(places, made, strict=True))
    paddings = [plan.padding for _, plan in cuts]
    return [
        F.pad(pages[k], (0, 0, 0, 0, rows, rows)) if rows else pages[k] for k, rows in enumerate(paddings)
    ]


def cut(pixels: Tensor, plan: PiecePlan) -> Tensor:
    (left, top), (width, height) = plan.origin, plan.image
    return pixels[:, top : top + height, left : left + width]


def is_text(reading: Reading) -> bool:
    """Whether a line counts as text, by the rule of stages/contract/binning.py, and was not guessed."""
    return reading.score > TEXT_SCORE and not reading.guessed and has_text(reading.text, reading.score)


def add_large(
    quads: Quads, readings: Sequence[Reading], boxes: Quads, read: Sequence[Reading]
) -> tuple[Quads, list[Reading]]:
    """A page's lines, with the certain ones of its second scale in place of their parts."""
    sure = [k for k, reading in enumerate(read) if is_text(reading) and reading.score >= SURE_LARGE]
    kept, added = replace_parts(quads, [is_text(reading) for reading in readings], boxes[sure])
    lines = [readings[k] for k in kept] + [read[sure[k]] for k in added]
    return np.concatenate([quads[kept], boxes[sure][added]]), lines


def plan_lines(page: int, quads: Quads) -> TextLines:
    """The crops of one page's lines, with rapidocr's sizes and padding."""
    edges = np.linalg.norm(quads - quads[:, [1, 2, 3, 0]], axis=2)  # top, right, bottom, left
    width = np.maximum(edges[:, 0], edges[:, 2]).astype(np.int64)
    height = np.maximum(edges[:, 1], edges[:, 3]).astype(np.int64)
    ratio = np.where(height >= VERTICAL_RATIO * width, height / width, width / height)
    padded = np.empty(len(quads), dtype=np.int64)
    for group in split_batches(np.argsort(ratio).tolist(), LINES_IN_GROUP):
        padded[group] = min(max(int(LINE_HEIGHT * ratio[group].max()), NARROWEST_LINE), WIDEST_LINE)
    resized = np.minimum(np.ceil(LINE_HEIGHT * ratio).astype(np.int64), padded)
    return TextLines(np.full(len(quads), page), quads, width, height, resized, padded)


def bucket(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Widths rounded up to the few that are used on a GPU: multiples of 64, above 1024 of 256."""
    step = np.where(columns > 1024, 256, 64)
    return -(-columns // step) * step


def decode(
    classes: NDArray[np.int64], probabilities: NDArray[np.float32], characters: Sequence[str]
) -> Iterator[Reading]:
    """Each row's text by greedy CTC (without repeats and blanks), and the mean probability of its characters, or 0.

    A row counts as guessed if the sum of its characters' probabilities is small, compared with the number of
    characters, plus the doubt at the steps between them (a letter that is not among the classes is left out
    there), plus surplus spaces (a word of such letters leaves only the spaces around it).
    """
    kept = classes != BLANK
    kept[:, 1:] &= classes[:, 1:] != classes[:, :-1]
    counts = kept.sum(axis=1).tolist()
    sums = np.where(kept, probabilities, 0.0).sum(axis=1, dtype=np.float64).tolist()
    # The step after the last character. On a GPU the steps after it can contain anything.
    ends = kept.shape[1] - kept[:, ::-1].argmax(axis=1)
    between = ~kept & (np.arange(kept.shape[1]) < ends[:, None])
    doubts = np.where(between, 1 - probabilities, 0.0).sum(axis=1, dtype=np.float64).tolist()
    read = iter([characters[place] for place in classes[kept].tolist()])
    for count, total, doubt in zip(counts, sums, doubts, strict=True):
        text = "".join(islice(read, count))
        surplus_spaces = len(text) - len(" ".join(text.split()))
        guessed = count > 0 and total < SURE_SHARE * (count + doubt + surplus_spaces)
        yield Reading(text, round(total / max(count, 1), 5), guessed)


def to_host(tensor: Tensor) -> NDArray[Any]:
    """A tensor's values on the host; from a GPU through page-locked memory, which is several times faster."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host.numpy()
