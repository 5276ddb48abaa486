"""cv2's bilinear resize, perspective crop and mask of text: by cv2 on the CPU, by Triton kernels or torch on a GPU.

Pages and lines are uint8 [height, width, 3]. So that answers do not depend on the device, the resize is bit for bit the same
everywhere, and the crop differs by 1 of 255 in one pixel of several thousand. This is why the GPU uses cv2's integer
arithmetic, and crops before it resizes where a single sampling step would be enough.
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

from stages.images.devices import has_kernels_for
from stages.ocr.dbpost import level_of
from stages.ocr.descriptor import VERTICAL_RATIO

WEIGHT_UNIT = 2048  # a weight of 1 in cv2's integer arithmetic
SQUARE = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], dtype=np.float32)  # corners, clockwise from top left

BLOCK_M, INTERLEAVE_BLOCK_M = 128, 1024  # pixels that one program of a kernel computes
MASK_BITS, MASK_BLOCK_M = 32, 64  # pixels in a word of a packed mask, and words that one program computes

# The two inputs of each output and their weights, each [N, outputs].
Taps = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class TextLines:
    """Where text lines are in their pages, and how wide their crops become: arrays over the lines."""

    page: NDArray[np.int64]  # which page of the batch
    corners: NDArray[np.float32]  # [N, 4, 2], pixels of the page, clockwise from top left
    width: NDArray[np.int64]  # pixels of the page, before any turn
    height: NDArray[np.int64]
    resized: NDArray[np.int64]  # columns of the crop at the recognizer's height, after the turn
    padded: NDArray[np.int64]  # columns with the padding that the network sees

    def __len__(self) -> int:
        return len(self.page)

    def __getitem__(self, chosen: Sequence[int]) -> TextLines:
        return TextLines(*(getattr(self, field.name)[chosen] for field in fields(self)))


def concatenate(parts: Sequence[TextLines]) -> TextLines:
    return TextLines(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(TextLines))
    )


def interleave(pixels: Tensor) -> Tensor:
    """uint8 [3, height, width] to [height, width, 3]. On a GPU torch takes four times as long as the kernel."""
    return interleave_with_kernel(pixels) if has_kernels_for(pixels) else pixels.permute(1, 2, 0).contiguous()


def interleave_with_kernel(pixels: Tensor) -> Tensor:
    from stages.ocr.warpkernel import interleave_kernel

    _, height, width = pixels.shape
    out = pixels.new_empty(height, width, 3)
    planar = pixels.contiguous()
    interleave_kernel[(-(-height * width // INTERLEAVE_BLOCK_M),)](
        planar, out, height * width, BLOCK_M=INTERLEAVE_BLOCK_M
    )
    return out


def mask_with_kernel(maps: Tensor, threshold: float) -> Tensor:
    """The masks of dbpost.mask_text, from float32 or uint8 maps, packed as dbpost.unpack_masks takes them."""
    from stages.ocr.warpkernel import mask_text_kernel, pack_mask_kernel

    count, height, width = maps.shape
    words = -(-width // MASK_BITS)
    bits = torch.empty(count, height, words, dtype=torch.int32, device=maps.device)
    out = torch.empty_like(bits)
    grid = (-(-height * words // MASK_BLOCK_M), count)
    level = float(level_of(threshold, maps.element_size()))
    pack_mask_kernel[grid](maps, bits, level, height, width, words, BITS=MASK_BITS, BLOCK_M=MASK_BLOCK_M)
    mask_text_kernel[grid](bits, out, height, width, words, BITS=MASK_BITS, BLOCK_M=MASK_BLOCK_M)
    return out


def resize(pages: Sequence[Tensor], width: int, height: int) -> Tensor:
    """cv2.resize with its default interpolation: bilinear without antialiasing. pages: of any sizes, in any memory layout.
    Returns uint8 [N, height, width, 3]."""
    if all(page.shape[:2] == (height, width) for page in pages):
        return torch.stack(list(pages))
    if has_kernels_for(pages[0]):
        return resize_with_kernel(pages, width, height)
    one = resize_with_cv2 if pages[0].device.type == "cpu" else resize_in_torch
    return torch.stack([one(page, width, height) for page in pages])


def resize_with_cv2(page: Tensor, width: int, height: int) -> Tensor:
    return torch.from_numpy(cv2.resize(np.ascontiguousarray(page.numpy()), (width, height)))


def resize_with_kernel(pages: Sequence[Tensor], width: int, height: int) -> Tensor:
    # Each page as a line that is the whole of it, and not turned.
    rows = [(*find_page(page), 0, 0, page.shape[1], page.shape[0], 0) for page in pages]
    table = np.array(rows, dtype=np.int64).T
    scales = 1 / (np.array([[width], [height]]) / table[[8, 9]])
    return crop_upright(table, scales, height, width, pages[0].device)


def crop_lines(pages: Sequence[Tensor], lines: TextLines, height: int, columns: int) -> Tensor:
    """The lines, turned upright and resized to `height` rows and their own columns: uint8 [N, height, columns, 3].

    The content beyond a line's own columns is undefined. Lines of one page must follow each other.
    """
    if pages[0].device.type == "cpu":
        return crop_with_cv2(pages, lines, height, columns)
    if has_kernels_for(pages[0]):
        return crop_with_kernel(pages, lines, height, columns)
    return crop_in_torch(pages, lines, height, columns)


def crop_with_cv2(pages: Sequence[Tensor], lines: TextLines, height: int, columns: int) -> Tensor:
    crops = np.zeros((len(lines), height, columns, 3), dtype=np.uint8)
    for i, width in enumerate(lines.resized.tolist()):
        crop = crop_quad(
            pages[lines.page[i]].numpy(), lines.corners[i], int(lines.width[i]), int(lines.height[i])
        )
        if lines.height[i] >= VERTICAL_RATIO * lines.width[i]:
            crop = cv2.rotate(crop, cv2.ROTATE_90_COUNTERCLOCKWISE)
        crops[i, :, :width] = cv2.resize(crop, (width, height))
    return torch.from_numpy(crops)


def crop_quad(
    page: NDArray[np.uint8], corners: NDArray[np.float32], width: int, height: int
) -> NDArray[np.uint8]:
    (left, top), (right, bottom) = corners[0].astype(int), corners[2].astype(int)
    upright = [[left, top], [right, top], [right, bottom], [left, bottom]]
    if left < right and top < bottom and np.array_equal(corners, upright):
        # For an axis-aligned box the warp is a copy.
        return np.ascontiguousarray(page[top:bottom, left:right])
    warp = cv2.getPerspectiveTransform(corners, frame(width, height))
    crop: NDArray[np.uint8] = cv2.warpPerspective(
        page, warp, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    return crop


def frame(width: int, height: int) -> NDArray[np.float32]:
    return SQUARE * np.array([width, height], dtype=np.float32)


def resize_in_torch(page: Tensor, width: int, height: int) -> Tensor:
    sizes = torch.tensor([*page.shape[:2], height, width], dtype=torch.float64, device=page.device)[:, None]
    left, right, left_weight, right_weight = (
        tap[0] for tap in bilinear_taps(sizes[1], sizes[3], width, clamp=True)
    )
    upper, lower, upper_weight, lower_weight = (tap[0] for tap in bilinear_taps(sizes[0], sizes[2], height))
    wide = page[:, left].int() * left_weight[:, None] + page[:, right].int() * right_weight[:, None]
    return blend(wide[upper], wide[lower], upper_weight[:, None, None], lower_weight[:, None, None])


def bilinear_taps(source: Tensor, target: Tensor, outputs: int, clamp: bool = False) -> Taps:
    """The two inputs that each output of a bilinear resize blends, in cv2's arithmetic, from `source` to `target` [N] pixels.

    clamp: outputs beyond the outermost centers take one input alone, as cv2 does horizontally.
    Otherwise they blend that input with itself, as cv2 does vertically. The two round differently.
    """
    scale = 1 / (target / source)[:, None]
    position = (
        (torch.arange(outputs, dtype=torch.float64, device=source.device) + 0.5) * scale - 0.5
    ).float()
    first, last = position.floor(), source[:, None] - 1
    fraction = position - first
    if clamp:
        fraction = fraction.masked_fill((first < 0) | (first >= last), 0)
    weights = [(weight * WEIGHT_UNIT).round().int() for weight in (1 - fraction, fraction)]
    taps = [tap.clamp(torch.zeros_like(last), last).long() for tap in (first, first + 1)]
    return taps[0], taps[1], weights[0], weights[1]


def blend(upper: Tensor, lower: Tensor, upper_weight: Tensor, lower_weight: Tensor) -> Tensor:
    """cv2's second pass: from int32 rows of WEIGHT_UNIT times the pixel value, to bytes."""
    total = ((upper >> 4) * upper_weight >> 16) + ((lower >> 4) * lower_weight >> 16)
    return (total + 2 >> 2).byte()


def crop_with_kernel(pages: Sequence[Tensor], lines: TextLines, height: int, columns: int) -> Tensor:
    """Axis-aligned lines are read from their pages. Slanted ones, half of those in the standard job, are cropped first."""
    slanted = (lines.corners != lines.corners[:, :1] + frames(lines)).any(axis=(1, 2))
    crops, starts = warp_with_kernel(pages, lines[np.flatnonzero(slanted).tolist()])
    table = np.stack(
        [*find_pages(pages, lines), *lines.corners[:, 0].T.astype(np.int64), lines.width, lines.height]
    )
    table[:, slanted] = [
        crops.data_ptr() + 3 * starts,
        lines.height[slanted],
        lines.width[slanted],
        3 * lines.width[slanted],
        *np.broadcast_to([[3], [1], [0], [0]], (4, len(starts))),
        lines.width[slanted],
        lines.height[slanted],
    ]
    vertical = lines.height >= VERTICAL_RATIO * lines.width
    source_width, source_height = np.where(vertical, (lines.height, lines.width), (lines.width, lines.height))
    scales = np.stack([1 / (lines.resized / source_width), 1 / (height / source_height)])
    return crop_upright(np.concatenate([table, [vertical]]), scales, height, columns, pages[0].device)


def crop_upright(
    table: NDArray[np.int64], scales: NDArray[np.float64], height: int, columns: int, device: torch.device
) -> Tensor:
    """Run the kernel with these tables, as it describes them. Returns uint8 [N, height, columns, 3]."""
    from stages.ocr.warpkernel import crop_lines_kernel

    count = table.shape[1]
    out = torch.empty(count, height, columns, 3, dtype=torch.uint8, device=device)
    crop_lines_kernel[-(-height * columns // BLOCK_M), count](
        *(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (table, scales)),
        out,
        count,
        height,
        columns,
        WEIGHT_UNIT=WEIGHT_UNIT,
        BLOCK_M=BLOCK_M,
    )
    return out


def warp_with_kernel(pages: Sequence[Tensor], lines: TextLines) -> tuple[Tensor, NDArray[np.int64]]:
    """The lines' pixels [pixels, 3], one line after the other, and the first pixel of each."""
    from stages.ocr.warpkernel import warp_kernel

    areas, device = lines.width * lines.height, pages[0].device
    ends = np.cumsum(areas)
    crops = torch.empty(int(areas.sum()), 3, dtype=torch.uint8, device=device)
    if len(lines):
        table = np.stack([*find_pages(pages, lines)[:3], lines.width, lines.height, ends - areas])
        tables = (
            torch.from_numpy(table).to(device),
            torch.from_numpy(np.ascontiguousarray(find_transforms(lines))).to(device),
        )
        warp_kernel[-(-int(np.max(areas)) // BLOCK_M), len(lines)](
            *tables, crops, len(lines), BLOCK_M=BLOCK_M
        )
    return crops, ends - areas


def find_pages(pages: Sequence[Tensor], lines: TextLines) -> NDArray[np.int64]:
    """Where each line's page is, [6, N]."""
    return np.array([find_page(page) for page in pages], dtype=np.int64)[lines.page].T


def find_page(page: Tensor) -> tuple[int, ...]:
    """Its address, height, width, and the three strides."""
    return page.data_ptr(), *page.shape[:2], *page.stride()


def frames(lines: TextLines) -> NDArray[np.float32]:
    """The corners of each line's crop, [N, 4, 2]."""
    sizes = np.stack([lines.width, lines.height], axis=1).astype(np.float32)
    return SQUARE * sizes[:, None]


def find_transforms(lines: TextLines) -> NDArray[np.float64]:
    """The perspective transform from each crop's pixels to its page's, [9, N]."""
    transforms = [
        cv2.getPerspectiveTransform(*pair) for pair in zip(frames(lines), lines.corners, strict=True)
    ]
    return np.reshape(transforms, (-1, 9)).T


def crop_in_torch(pages: Sequence[Tensor], lines: TextLines, height: int, columns: int) -> Tensor:
    """Crops have all sizes, so their pixels are in one tensor, one crop after the other, until they are resized."""
    ends = np.cumsum(lines.width * lines.height)
    sizes = np.stack([lines.width, lines.height, lines.resized, ends - lines.width * lines.height])
    table = torch.from_numpy(np.concatenate([sizes, find_transforms(lines)])).to(pages[0].device)
    x, y = locate(table, int(ends[-1]))
    parts, start = [], 0
    for last in np.flatnonzero(np.append(np.diff(lines.page), 1)):
        parts.append(sample(pages[lines.page[last]], x[start : ends[last]], y[start : ends[last]]))
        start = ends[last]
    return resize_packed(torch.cat(parts), table[:4], height, columns)


def locate(table: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The position in its page of each of the `total` pixels of all crops: x and y, float64.

    table: float64 [13, N]; a line's width, height, resized width, first pixel, and its perspective transform.
    """
    width, height, _, start = table[:4].long()
    owner = torch.repeat_interleave(
        torch.arange(len(width), device=table.device), width * height, output_size=total
    )
    offset = torch.arange(total, device=table.device) - start[owner]
    y = offset // width[owner]
    x = offset - y * width[owner]
    page_x, page_y, w = (a[owner] * x + b[owner] * y + c[owner] for a, b, c in table[4:].reshape(3, 3, -1))
    return page_x / w, page_y / w


def sample(page: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The page at fractional positions: bicubic (a = -0.75), edges replicated. Returns uint8 [points, 3]."""
    height, width = page.shape[:2]
    grid = torch.stack([x * (2 / (width - 1)) - 1, y * (2 / (height - 1)) - 1], dim=-1).float()
    image = page.permute(2, 0, 1)[None].float()
    pixels = F.grid_sample(image, grid[None, None], mode="bicubic", padding_mode="border", align_corners=True)
    return pixels[0, :, 0].T.round().clamp(0, 255).byte()


def resize_packed(pixels: Tensor, sizes: Tensor, height: int, columns: int) -> Tensor:
    """Bilinear resize of consecutive crops; the tall ones are turned a quarter counterclockwise at the same time."""
    width, crop_height, resized, start = sizes
    vertical = crop_height >= VERTICAL_RATIO * width
    left, right, *column_weights = bilinear_taps(
        torch.where(vertical, crop_height, width), resized, columns, clamp=True
    )
    upper, lower, *row_weights = bilinear_taps(
        torch.where(vertical, width, crop_height), torch.full_like(width, height), height
    )
    origin = (start + vertical * (width - 1)).int()[:, None]
    row_step = torch.where(vertical, -1, width).int()[:, None]
    column_step = torch.where(vertical, width, 1).int()[:, None]
    whole = F.pad(pixels, (0, 1)).view(torch.int32)[:, 0]  # one gather of 4 bytes is faster than three of 1
    first_weight, second_weight = (weight[:, None, :, None] for weight in column_weights)

    def blend_columns(rows: Tensor) -> Tensor:
        starts = (origin + rows.int() * row_step)[:, :, None]
        indices = (starts + (tap.int() * column_step)[:, None] for tap in (left, right))
        near, far = (whole[index].unsqueeze(-1).view(torch.uint8).int() for index in indices)
        return near * first_weight + far * second_weight

    return blend(
        blend_columns(upper), blend_columns(lower), *(weight[:, :, None, None] for weight in row_weights)
    )[..., :3]
