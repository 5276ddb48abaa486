"""From a file's bytes to pixels on the device: a check of the header, then the decoding of a batch.

`inspect` reads the header alone, in plain Python, and needs neither torch nor Pillow. `decode` sends the JPEGs of a batch to
the GPU's decoder in one call. Everything else, and every JPEG that the GPU cannot decode, goes to disposable child processes.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from stages.contract.base import Header, Image, ImageError, Limits, Reason, advise
from stages.contract.processes import count_cores
from stages.images.formats import DEEP_PNM, HEAD, bmp_masks, identify
from stages.images.headers import READERS, png_properties, png_significant_bits, read_jpeg_frame
from stages.images.pages import count_pages
from stages.images.profiles import apply, hide_exif, jpeg_profile, read_conversion
from stages.images.scans import find_zeros
from stages.images.tiff import find_picture

if TYPE_CHECKING:
    import numpy as np
    import torch

    from stages.images.decoder import Decoders

Encoded = tuple[memoryview, Header]  # a file's bytes and header


class DecodeJpegs(Protocol):
    """Files as uint8 tensors in host memory → uint8 [3, h, w] on the device, as stored."""

    def __call__(
        self, files: list[torch.Tensor], /, *, mode: str, device: torch.device
    ) -> list[torch.Tensor]: ...


MAX_SIDE = 2**31 - 1  # the largest side that a PNG can have; more is a damaged header
# An EXIF orientation → the sides of the picture that are mirrored; above 4 it is transposed before.
FLIPS = {2: [-1], 3: [-2, -1], 4: [-2], 6: [-1], 7: [-2, -1], 8: [-2]}
TURNED = range(2, 9)
TURN_TILE = {"BLOCK_H": 32, "BLOCK_W": 128}  # pixels that a program of the kernel turns
# The most that a byte can hold of a picture: in a TIFF of a fax (G4), where a blank row has one bit, and at most 62,500 pixels
# here. A PNG has 8,256. WebP, AVIF and JPEG XL hold more, but only of a picture that is blank.
BYTE_PIXELS = 500_000
CALL_PIXELS = (
    200_000_000  # in a call of a GPU's decoder; with half of it, 12 megapixels each take an eighth longer
)
# Most memory for a pixel, of a decoder alone and with its worker. Measured with 108 million pixels,
# JPEG and PNG, all orientations.
DECODER_PIXEL_BYTES, PIXEL_BYTES = 12, 20


def inspect(data: memoryview, limits: Limits) -> Header:
    """Read an image's header, and check it against the limits.

    data: all of the file. Raises ImageError: EMPTY, NOT_AN_IMAGE, FORMAT, HEADER (cannot be parsed, or
    dimensions that are impossible, or too large for the file's bytes), PIXELS, ASPECT, and TRUNCATED if the
    header alone shows that bytes are missing.
    """
    name = identify(data)
    try:
        width, height, orientation = READERS[name](data)
    except (struct.error, IndexError, OverflowError) as error:
        raise ImageError(
            Reason.TRUNCATED, f"the {name} ends inside its header, or points past its end"
        ) from error
    if orientation > 4:
        width, height = height, width
    _check_size(width, height, len(data), limits)
    is_deep = name in DEEP and DEEP[name](data)
    return Header(name, width, height, orientation, count_pages(name, data), is_deep)


def _is_deep_png(data: memoryview) -> bool:
    kind = data[25]
    if data[24] < 16 or kind == 0:
        return data[24] == 16
    return png_significant_bits(data) < 16 or (kind == 2 and b"tRNS" in png_properties(data))


# Whether a picture needs samples.py: gray with more than 8 bits, much of TIFF, and a PNG of which the lower bits say what is
# white or transparent. Or scans.py: a JPEG with long rows of zeros.
DEEP: dict[str, Callable[[memoryview], bool]] = {
    "JPEG": lambda data: find_zeros(data) is not None,
    "PNG": _is_deep_png,
    "TIFF": lambda data: find_picture(data).is_deep,
    "BMP": lambda data: bool(bmp_masks(data)),
    "PPM": lambda data: (found := DEEP_PNM.match(data[:HEAD])) is not None and int(found[1]) > 255,
}


def _check_size(width: int, height: int, file_bytes: int, limits: Limits) -> None:
    size = f"{width}×{height}"
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise ImageError(Reason.HEADER, f"the header states an impossible size of {size} pixels")
    if width * height > limits.max_pixels:
        # A larger limit would only give memory to whoever made the header.
        if width * height > BYTE_PIXELS * file_bytes:
            claim = f"the header states {size} pixels, but the file has {file_bytes:,} bytes"
            raise ImageError(
                Reason.HEADER, f"{claim}, too few for a picture of that size, unless it is blank"
            )
        problem = f"{size} is {width * height:,} pixels, max_pixels is {limits.max_pixels:,}"
        raise ImageError(Reason.PIXELS, f"{problem}. {_how_to_allow(width * height, limits)}")
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        ratio = math.ceil(max(width, height) / min(width, height))
        problem = f"{size} is longer than max_aspect_ratio = {limits.max_aspect_ratio:g} allows"
        raise ImageError(Reason.ASPECT, f"{problem}. {advise(f'max_aspect_ratio = {ratio}')}")


def _how_to_allow(pixels: int, limits: Limits) -> str:
    settings = f"max_pixels = {pixels}"
    # In units of 256 MiB, one of them for the decoder itself.
    needed = -(-pixels * DECODER_PIXEL_BYTES >> 28) + 1
    if needed << 28 > limits.decode_bytes:
        settings += f' and decode_bytes = "{needed * 256} MiB"'
    memory = pixels * PIXEL_BYTES / 1e9
    return f"{advise(settings)}; such an image needs {memory:.2g} GB of memory"


def read_batches(paths: Sequence[Path], size: int, device: str) -> Iterator[list[Image]]:
    """Batches of at most `size` images. Raises ImageError."""
    from stages.images.decoder import Decoders
    from stages.images.devices import split_batches

    limits = Limits()
    with closing(Decoders(count_cores(), limits)) as decoders:
        for batch in split_batches(paths, size):
            yield read_images(batch, device, decoders, limits)


def read_images(
    paths: Sequence[Path], device: str | torch.device, decoders: Decoders, limits: Limits
) -> list[Image]:
    """Images from files, decoded as in a worker. Raises ImageError for the first that cannot be."""
    data = [memoryview(path.read_bytes()) for path in paths]
    entries = [(part, inspect(part, limits)) for part in data]
    images = []
    for (part, header), pixels in zip(entries, decode(entries, device, decoders), strict=True):
        if isinstance(pixels, ImageError):
            raise pixels
        images.append(Image(part, header.width, header.height, pixels))
    return images


def decode(
    entries: Sequence[Encoded], device: str | torch.device, decoders: Decoders
) -> list[torch.Tensor | ImageError]:
    """Decode a batch: a tensor or an error for each (bytes, header from `inspect`), in order.

    A tensor is uint8 [3, height, width] on `device`, contiguous, RGB, upright; transparent pixels are blended with white,
    black or gray, see grounds.py. On a GPU, one call decodes at most CALL_PIXELS pixels. Raises OutOfMemory and DeviceLost.
    """
    import torch

    from stages.images.devices import device_errors

    device = torch.device(device)
    places = _find_jpegs_for(device, entries)
    answers: dict[int, torch.Tensor | ImageError] = {}
    with device_errors(), decoders.decoding() as begin:
        on_host = {place: begin(entries[place]) for place in sorted({*range(len(entries))} - {*places})}
        if places:  # while the children are at work
            answers.update(_decode_on_own_stream(entries, places, device))
            on_host |= {place: begin(entries[place]) for place in places if place not in answers}
        for place in list(on_host):
            answer = on_host.pop(place).result()  # which the next ones need not wait for
            answers[place] = answer if isinstance(answer, ImageError) else _to_device(answer, device)
    return [answers[place] for place in range(len(entries))]


def _find_jpegs_for(device: torch.device, entries: Sequence[Encoded]) -> list[int]:
    """The places of those that this device decodes itself."""
    return [place for place, entry in enumerate(entries) if device.type == "cuda" and _suits_device(entry)]


def _suits_device(entry: Encoded) -> bool:
    data, header = entry
    if header.format != "JPEG" or header.is_deep or not read_jpeg_frame(data).is_plain:
        return False
    try:
        read_conversion(jpeg_profile(data))
    except (struct.error, ArithmeticError, LookupError, ValueError, TypeError):
        return False  # of another kind, or broken: LittleCMS decides
    return True


def _decode_on_own_stream(
    entries: Sequence[Encoded], places: Sequence[int], device: torch.device
) -> dict[int, torch.Tensor]:
    """Those at these places that the device can decode: on a separate stream, one call at a time. nvJPEG does not wait for
    earlier work on the device, so it may only get memory that no kernel of another thread still has to read."""
    import torch

    # A call ends with its slowest image, so images of one size share one.
    places = sorted(places, key=lambda place: _pixels_of(entries[place]), reverse=True)
    stream, lock = _decoding_stream(device)
    user = torch.cuda.current_stream(device)
    with lock, torch.cuda.stream(stream):
        pixels = list(_decode_on_device([entries[place] for place in places], device))
    user.wait_stream(stream)
    decoded = {place: tensor for place, tensor in zip(places, pixels, strict=True) if tensor is not None}
    for tensor in decoded.values():
        tensor.record_stream(user)  # its memory is reused only when the user's stream has finished with it
    return decoded


@functools.cache
def _decoding_stream(device: torch.device) -> tuple[torch.cuda.Stream, threading.Lock]:
    import torch

    return torch.cuda.Stream(device), threading.Lock()  # type: ignore[no-untyped-call]


def _decode_on_device(entries: Sequence[Encoded], device: torch.device) -> Iterator[torch.Tensor | None]:
    """Each JPEG's upright pixels, or None if the device could not decode it."""
    for group in _group_by_pixels(entries, CALL_PIXELS):
        pixels = _try_jpegs(group, device)
        if pixels is None:  # one bad file makes the whole call fail
            pixels = [tensor for entry in group for tensor in _try_jpegs([entry], device) or [None]]
        for tensor, (data, header) in zip(pixels, group, strict=True):
            yield None if tensor is None else _finish(tensor, data, header)


def _finish(pixels: torch.Tensor, data: memoryview, header: Header) -> torch.Tensor | None:
    """In sRGB and upright; None if the size is not that of the header."""
    if conversion := read_conversion(jpeg_profile(data)):
        apply(conversion, pixels)
    upright = _turn(pixels, header.orientation)
    return upright if upright.shape == (3, header.height, header.width) else None


def _pixels_of(entry: Encoded) -> int:
    return entry[1].width * entry[1].height


def _group_by_pixels(entries: Sequence[Encoded], most: int) -> Iterator[list[Encoded]]:
    """Consecutive entries with at most `most` pixels together, or a single larger one."""
    group: list[Encoded] = []
    room = most
    for entry in entries:
        size = _pixels_of(entry)
        if group and size > room:
            yield group
            group, room = [], most
        group.append(entry)
        room -= size
    if group:
        yield group


def _try_jpegs(entries: Sequence[Encoded], device: torch.device) -> Sequence[torch.Tensor | None] | None:
    """One call of the device's decoder: pixels as stored, or None if it refuses the batch."""
    import torch

    from stages.images.devices import device_errors, synchronize

    # Some of the GPU's decoders turn pixels as EXIF says, and others do not: so none does.
    copies = (hide_exif(data) if header.orientation > 1 else bytearray(data) for data, header in entries)
    sources = [torch.frombuffer(copy, dtype=torch.uint8) for copy in copies]
    with device_errors():
        torch.empty(
            3 * sum(header.width * header.height for _, header in entries), dtype=torch.uint8, device=device
        )
        if device.type == "cuda":
            # The decoder does not wait for the kernels that turned the last images.
            torch.cuda.current_stream(device).synchronize()
    try:
        with device_errors():
            return find_jpeg_decoder()(sources, mode="RGB", device=device)
    except RuntimeError:  # a file that it cannot read; or out of memory, but that was tried above
        with device_errors():
            synchronize(str(device))  # it may still be writing the others, into memory that is already free
        return None


def open_jpeg_decoder(page: bytes, device: str) -> None:
    """Decode a JPEG on a GPU that loads models. Raises torch's errors.

    Unlike `decode`, it never waits for the whole device: that would spoil a CUDA graph that another thread records.
    """
    import torch

    gpu = torch.device(device)
    stream, lock = _decoding_stream(gpu)
    source = torch.frombuffer(bytearray(page), dtype=torch.uint8)
    with lock, torch.cuda.stream(stream):
        find_jpeg_decoder()([source], mode="RGB", device=gpu)
        stream.synchronize()


@functools.cache
def find_jpeg_decoder() -> DecodeJpegs:
    """The decoder of torchvision or of its successor torchcodec. Both use nvJPEG; the latter applies EXIF's orientation."""
    try:
        from torchvision.io import decode_jpeg
    except ImportError:
        from torchcodec.decoders import decode_jpeg
    warnings.filterwarnings(
        "ignore", "The image decoding and encoding capabilities of TorchVision", DeprecationWarning
    )
    return cast("DecodeJpegs", decode_jpeg)


def _turn(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """Apply an EXIF orientation to [3, h, w] pixels as stored; the result is contiguous."""
    from stages.images.devices import has_kernels_for

    if orientation in TURNED and has_kernels_for(pixels):
        return turn_with_kernel(pixels.contiguous(), orientation)
    if orientation > 4:
        pixels = pixels.transpose(-2, -1)
    return pixels.flip(FLIPS.get(orientation, [])).contiguous()


def turn_with_kernel(pixels: torch.Tensor, orientation: int) -> torch.Tensor:
    """In a fifth of the time that torch takes: 12 megapixels in 38 µs on an H200, instead of 183 on average."""
    from stages.kernels.resize import turn_kernel

    is_transposed, flips = orientation > 4, FLIPS.get(orientation, [])
    height, width = pixels.shape[:0:-1] if is_transposed else pixels.shape[1:]
    out = pixels.new_empty(3, height, width)
    block = TURN_TILE["BLOCK_H"], TURN_TILE["BLOCK_W"]
    turn_kernel[-(-width // block[1]), -(-height // block[0]), 3](
        pixels, out, height, width, is_transposed, -2 in flips, -1 in flips, **TURN_TILE
    )
    return out


def _to_device(pixels: np.ndarray, device: torch.device) -> torch.Tensor:
    """[h, w, 3] in memory → [3, h, w] on the device. One byte of a gray pixel is copied there, and three are made of it."""
    import torch

    is_gray = pixels.strides[2] == 0
    tensor = torch.from_numpy(pixels[..., :1] if is_gray else pixels)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.permute(2, 0, 1).expand(3, -1, -1).contiguous()
