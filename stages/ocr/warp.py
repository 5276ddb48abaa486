"""cv2's bilinear resize and perspective crop: by cv2 itself on the CPU, restated in torch on any other device.

Pages and lines are uint8 [height, width, 3]. The two ways agree bit for bit in the resize, and in the crop but for one
level in one pixel of several thousand, so that an answer does not depend on the device. That is why the torch way goes
through cv2's integers, and cuts before it resizes where a single sampling would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stages.devices import has_kernels_for

WEIGHT_UNIT = 2048  # cv2 resizes bytes with integers; this stands for a weight of 1
SQUARE = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=np.float32)  # corners, clockwise from top left
TALL = 1.5  # a crop this much taller than wide is text that runs down: it is turned upright

PIXELS, INTERLEAVED_PIXELS = 128, 1024  # that one program of a kernel makes

Taps = tuple[Tensor, Tensor, Tensor, Tensor]  # two inputs of each output and their weights, each [N, outputs]


@dataclass(frozen=True, slots=True)
class Lines:
    """Where lines of text lie in their pages and how wide they become: arrays over the lines."""

    page: NDArray[np.int64]  # which page of the batch
    corners: NDArray[np.float32]  # [N, 4, 2], pixels of the page, clockwise from top left
    width: NDArray[np.int64]  # pixels of the page, as the line lies there
    height: NDArray[np.int64]
    resized: NDArray[np.int64]  # columns at the recogniser's height, once upright
    padded: NDArray[np.int64]  # columns with the padding that the line's answer is to see

    def __len__(self) -> int:
        return len(self.page)

    def __getitem__(self, chosen: Sequence[int]) -> Lines:
        return Lines(*(getattr(self, field.name)[chosen] for field in fields(self)))


def join(parts: Sequence[Lines]) -> Lines:
    return Lines(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Lines)))


def interleave(pixels: Tensor) -> Tensor:
    """[3, height, width] to [height, width, 3], bytes. On a GPU torch takes four times as long as the kernel."""
    if not has_kernels_for(pixels):
        return pixels.permute(1, 2, 0).contiguous()
    from stages.ocr.warpkernel import interleave_kernel

    _, height, width = pixels.shape
    out = pixels.new_empty(height, width, 3)
    planes = pixels.contiguous()
    interleave_kernel[(-(-height * width // INTERLEAVED_PIXELS),)](planes, out, height * width, PIXELS=INTERLEAVED_PIXELS)
    return out


def resize(page: Tensor, width: int, height: int) -> Tensor:
    """cv2.resize with its default interpolation, bilinear without antialias."""
    if page.shape[:2] == (height, width):
        return page
    if page.device.type == "cpu":
        return torch.from_numpy(cv2.resize(page.numpy(), (width, height)))
    return resize_in_torch(page, width, height)


def cut(pages: Sequence[Tensor], lines: Lines, height: int, columns: int) -> Tensor:
    """The lines upright, each resized to `height` rows and its own columns: uint8 [N, height, columns, 3].

    What lies right of a line's own columns means nothing. Lines of one page must follow each other.
    """
    if pages[0].device.type == "cpu":
        return cut_with_cv2(pages, lines, height, columns)
    if has_kernels_for(pages[0]):
        return cut_with_kernel(pages, lines, height, columns)
    return cut_in_torch(pages, lines, height, columns)


def cut_with_cv2(pages: Sequence[Tensor], lines: Lines, height: int, columns: int) -> Tensor:
    cuts = np.zeros((len(lines), height, columns, 3), dtype=np.uint8)
    for i, wide in enumerate(lines.resized.tolist()):
        crop = crop_quad(pages[lines.page[i]].numpy(), lines.corners[i], int(lines.width[i]), int(lines.height[i]))
        if lines.height[i] >= TALL * lines.width[i]:
            crop = cv2.rotate(crop, cv2.ROTATE_90_COUNTERCLOCKWISE)
        cuts[i, :, :wide] = cv2.resize(crop, (wide, height))
    return torch.from_numpy(cuts)


def crop_quad(page: NDArray[np.uint8], corners: NDArray[np.float32], width: int, height: int) -> NDArray[np.uint8]:
    (left, top), (right, bottom) = corners[0].astype(int), corners[2].astype(int)
    if left < right and top < bottom and np.array_equal(corners, [[left, top], [right, top], [right, bottom], [left, bottom]]):
        return np.ascontiguousarray(page[top:bottom, left:right])  # the warp of an upright box copies its pixels
    warp = cv2.getPerspectiveTransform(corners, frame(width, height))
    crop: NDArray[np.uint8] = cv2.warpPerspective(
        page, warp, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    return crop


def frame(width: int, height: int) -> NDArray[np.float32]:
    return SQUARE * np.array([width, height], dtype=np.float32)


def resize_in_torch(page: Tensor, width: int, height: int) -> Tensor:
    sizes = torch.tensor([*page.shape[:2], height, width], dtype=torch.float64, device=page.device)[:, None]
    left, right, left_weight, right_weight = (tap[0] for tap in find_taps(sizes[1], sizes[3], width, clamp=True))
    upper, lower, upper_weight, lower_weight = (tap[0] for tap in find_taps(sizes[0], sizes[2], height))
    wide = page[:, left].int() * left_weight[:, None] + page[:, right].int() * right_weight[:, None]
    return blend(wide[upper], wide[lower], upper_weight[:, None, None], lower_weight[:, None, None])


def find_taps(source: Tensor, target: Tensor, outputs: int, clamp: bool = False) -> Taps:
    """Which two inputs each output of a bilinear resize blends, in cv2's arithmetic, from `source` to `target` [N] pixels.

    clamp: whether outputs beyond the outermost centres take one input alone, as cv2 has it across, or blend it with
    itself, as it has it down; the roundings differ.
    """
    scale = 1 / (target / source)[:, None]
    position = ((torch.arange(outputs, dtype=torch.float64, device=source.device) + 0.5) * scale - 0.5).float()
    first, last = position.floor(), source[:, None] - 1
    fraction = position - first
    if clamp:
        fraction = fraction.masked_fill((first < 0) | (first >= last), 0)
    weights = [(weight * WEIGHT_UNIT).round().int() for weight in (1 - fraction, fraction)]
    taps = [tap.clamp(torch.zeros_like(last), last).long() for tap in (first, first + 1)]
    return taps[0], taps[1], weights[0], weights[1]


def blend(upper: Tensor, lower: Tensor, upper_weight: Tensor, lower_weight: Tensor) -> Tensor:
    """cv2's second pass: from rows that are WEIGHT_UNIT times too bright, int32, to bytes."""
    total = ((upper >> 4) * upper_weight >> 16) + ((lower >> 4) * lower_weight >> 16)
    return (total + 2 >> 2).byte()


def cut_with_kernel(pages: Sequence[Tensor], lines: Lines, height: int, columns: int) -> Tensor:
    """An upright line is read off its page; one that is not, as half of the standard job's, is cropped first."""
    from stages.ocr.warpkernel import cut_kernel

    device, count = pages[0].device, len(lines)
    slanting = (lines.corners != lines.corners[:, :1] + frames(lines)).any(axis=(1, 2))
    crops, starts = warp_with_kernel(pages, lines[np.flatnonzero(slanting).tolist()])
    places = np.stack([*locate_pages(pages, lines), *lines.corners[:, 0].T.astype(np.int64), lines.width, lines.height])
    places[:, slanting] = [
        crops.data_ptr() + 3 * starts,
        lines.height[slanting],
        lines.width[slanting],
        *np.zeros((2, len(starts)), dtype=np.int64),
        lines.width[slanting],
        lines.height[slanting],
    ]
    turned = lines.height >= TALL * lines.width
    across, down = np.where(turned, (lines.height, lines.width), (lines.width, lines.height))
    scales = np.stack([1 / (lines.resized / across), 1 / (height / down)])
    out = torch.empty(count, height, columns, 3, dtype=torch.uint8, device=device)
    cut_kernel[-(-height * columns // PIXELS), count](
        torch.from_numpy(np.concatenate([places, [turned]])).to(device),
        torch.from_numpy(scales).to(device),
        out,
        count,
        height,
        columns,
        UNIT=WEIGHT_UNIT,
        PIXELS=PIXELS,
    )
    return out


def warp_with_kernel(pages: Sequence[Tensor], lines: Lines) -> tuple[Tensor, NDArray[np.int64]]:
    """The lines' pixels [pixels, 3], one line behind the other, and where each begins."""
    from stages.ocr.warpkernel import warp_kernel

    areas, device = lines.width * lines.height, pages[0].device
    ends = np.cumsum(areas)
    crops = torch.empty(int(areas.sum()), 3, dtype=torch.uint8, device=device)
    if len(lines):
        places = np.stack([*locate_pages(pages, lines), lines.width, lines.height, ends - areas])
        tables = torch.from_numpy(places).to(device), torch.from_numpy(np.ascontiguousarray(find_maps(lines))).to(device)
        warp_kernel[-(-int(areas.max()) // PIXELS), len(lines)](*tables, crops, len(lines), PIXELS=PIXELS)
    return crops, ends - areas


def locate_pages(pages: Sequence[Tensor], lines: Lines) -> NDArray[np.int64]:
    """The address, height and width of each line's page, [3, N]."""
    return np.array([[page.data_ptr(), *page.shape[:2]] for page in pages], dtype=np.int64)[lines.page].T


def frames(lines: Lines) -> NDArray[np.float32]:
    """Each line's own corners, [N, 4, 2]."""
    sizes = np.stack([lines.width, lines.height], axis=1).astype(np.float32)
    return SQUARE * sizes[:, None]


def find_maps(lines: Lines) -> NDArray[np.float64]:
    """The nine numbers that take each line's pixels to its page's, [9, N]."""
    maps = [cv2.getPerspectiveTransform(*pair) for pair in zip(frames(lines), lines.corners, strict=True)]
    return np.reshape(maps, (-1, 9)).T


def cut_in_torch(pages: Sequence[Tensor], lines: Lines, height: int, columns: int) -> Tensor:
    """Crops are of all sizes, so their pixels lie one behind the other in one tensor until they are resized."""
    ends = np.cumsum(lines.width * lines.height)
    sizes = np.stack([lines.width, lines.height, lines.resized, ends - lines.width * lines.height])
    table = torch.from_numpy(np.concatenate([sizes, find_maps(lines)])).to(pages[0].device)
    across, down = locate(table, int(ends[-1]))
    parts, start = [], 0
    for last in np.flatnonzero(np.append(np.diff(lines.page), 1)):
        parts.append(sample(pages[lines.page[last]], across[start : ends[last]], down[start : ends[last]]))
        start = ends[last]
    return resize_packed(torch.cat(parts), table[:4], height, columns)


def locate(table: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Where each of the `total` pixels of all crops lies in its page: x and y, float64.

    table: float64 [13, N]; a line's width, height, resized width, first pixel, and the nine numbers of its perspective.
    """
    width, height, _, start = table[:4].long()
    owner = torch.repeat_interleave(torch.arange(len(width), device=table.device), width * height, output_size=total)
    offset = torch.arange(total, device=table.device) - start[owner]
    y = offset // width[owner]
    x = offset - y * width[owner]
    across, down, depth = (a[owner] * x + b[owner] * y + c[owner] for a, b, c in table[4:].reshape(3, 3, -1))
    return across / depth, down / depth


def sample(page: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """The page between its pixels, bicubic (a = -0.75), its edge repeated without end: uint8 [points, 3]."""
    height, width = page.shape[:2]
    grid = torch.stack([across * (2 / (width - 1)) - 1, down * (2 / (height - 1)) - 1], dim=-1).float()
    image = page.permute(2, 0, 1)[None].float()
    pixels = F.grid_sample(image, grid[None, None], mode="bicubic", padding_mode="border", align_corners=True)
    return pixels[0, :, 0].T.round().clamp(0, 255).byte()


def resize_packed(pixels: Tensor, sizes: Tensor, height: int, columns: int) -> Tensor:
    """Bilinear, from crops one behind the other; the tall ones are turned a quarter counterclockwise on the way."""
    width, tall, resized, start = sizes
    turned = tall >= TALL * width
    left, right, *across_weights = find_taps(torch.where(turned, tall, width), resized, columns, clamp=True)
    upper, lower, *down_weights = find_taps(torch.where(turned, width, tall), torch.full_like(width, height), height)
    origin = (start + turned * (width - 1)).int()[:, None]
    row, column = torch.where(turned, -1, width).int()[:, None], torch.where(turned, width, 1).int()[:, None]
    whole = F.pad(pixels, (0, 1)).view(torch.int32)[:, 0]  # a gather of 4 bytes costs less than three of 1
    first_weight, second_weight = (weight[:, None, :, None] for weight in across_weights)

    def widen(rows: Tensor) -> Tensor:
        starts = (origin + rows.int() * row)[:, :, None]
        places = (starts + (tap.int() * column)[:, None] for tap in (left, right))
        near, far = (whole[place].unsqueeze(-1).view(torch.uint8).int() for place in places)
        return near * first_weight + far * second_weight

    return blend(widen(upper), widen(lower), *(weight[:, :, None, None] for weight in down_weights))[..., :3]
