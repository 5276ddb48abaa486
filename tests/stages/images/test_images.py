from __future__ import annotations

import gzip
import io
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from daemon.unpacking.kinds import SUFFIXES
from stages.contract.base import Header, ImageError, Limits, OutOfMemory, Reason
from stages.images import formats, images
from stages.images.decoder import Decoders
from stages.images.devices import run_in_background
from stages.images.images import Encoded, decode, inspect
from tests.inputs import (
    CATALOGUE,
    COLORS,
    Input,
    avif_named_heic,
    encode,
    huge_png,
    jpeg,
    oriented,
    picture,
    png,
    ycck_jpeg,
)

LIMITS = Limits()
ROOT = Path(__file__).parents[3]
torchvision_is_deprecated = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding:DeprecationWarning"
)


def entry(data: bytes) -> Encoded:
    return memoryview(data), inspect(memoryview(data), LIMITS)


def spoil(data: bytes) -> bytes:
    """A JPEG with a valid header and invalid Huffman tables."""
    at = data.index(b"\xff\xc4") + 5
    return data[:at] + b"\xff" * 16 + data[at + 16 :]


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    pool = Decoders(2, LIMITS)
    yield pool
    pool.close()


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    return torch.device("cuda:0")


@pytest.mark.parametrize("given", CATALOGUE, ids=lambda given: given.name)
def test_inspect_finds_every_fault_that_shows_in_the_header_and_no_other(given: Input) -> None:
    reason = None
    try:
        inspect(memoryview(given.make()), LIMITS)
    except ImageError as error:
        reason = error.reason
    assert reason == (given.reason if given.shows_in_header else None)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("JPEG XR", b"II\xbc\1"),
        ("ICNS", b"icns"),
        ("SGI", b"\1\xda\1\1"),
        ("PCX", b"\n\5\1\x08"),
        ("FLIF", b"FLIF"),
        ("BPG", b"BPG\xfb"),
        ("WMF", b"\xd7\xcd\xc6\x9a"),
        ("EMF", b"\1" + bytes(39) + b" EMF"),
        ("DICOM", bytes(128) + b"DICM"),
        ("PICT", bytes(522) + b"\0\x11\2\xff"),
        ("JPEG XS", b"\xff\x10\xff\x50"),
        ("KTX", b"\xabKTX 11\xbb\r\n\x1a\n"),
        ("KTX2", b"\xabKTX 20\xbb\r\n\x1a\n"),
        ("CUR", b"\0\0\2\0\1\0\x20\x20"),
        ("PCX", b"\n\3\1\1"),
        ("WMF", b"\1\0\x09\0\0\3"),
        ("Cineon", b"\x80\x2a\x5f\xd7"),
        ("Radiance HDR", b"#?RGBE\n"),
        ("PFM", b"Pf\n3 2\n-1.0\n"),
        ("XPM", b"/* XPM */\nstatic char *"),
        ("IFF .ILBM", b"FORM\0\0\1\0ILBMBMHD"),
        ("OpenRaster", b"PK\3\4" + bytes(26) + b"mimetypeimage/openraster"),
        ("JPEG-LS", b"\xff\xd8\xff\xe8\0\4AB\xff\xf7\0\x0b\x08\0\4\0\4\1\1\x11\0"),
        ("TGA", bytes(2) + b"\2" + bytes(9) + b"\x40\1\xc8\0\x18\0"),
        ("TGA", bytes((0, 1, 9, 0, 0, 0, 1, 24)) + bytes(4) + b"\x40\1\xc8\0\x08\x20"),
        ("DIB", b"(\0\0\0\x40\1\0\0\xc8\0\0\0\1\0\x18\0"),
        ("BMP of OS/2", b"BM\x1e\x24\0\0\0\0\0\0\x1e\4\0\0\x10\0\0\0"),
        ("XBM", b"#define logo_width 16\n#define logo_height 16\n"),
        ("Sixel", b'\x1bP0;1;8q"1;1;32;32'),
        ("MIFF", b"id=ImageMagick version=1.0\n"),
        ("SVG", gzip.compress(b"<svg xmlns='http://www.w3.org/2000/svg'/>", mtime=0)),
    ],
)
def test_an_image_of_a_format_that_is_not_read_is_refused_by_its_name(name: str, head: bytes) -> None:
    with pytest.raises(ImageError, match=rf"{name}\)? is not supported: save it as") as refused:
        inspect(memoryview(head + bytes(600)), LIMITS)
    assert refused.value.reason is Reason.FORMAT


@pytest.mark.parametrize(
    "head",
    [b"(\0\0\0\x40\1\0\0\xc8\0\0\0\2\0\x18\0", bytes(2) + b"\2" + bytes(15), b"\x1bP1|", bytes((0, 1, 9))],
)
def test_bytes_that_only_begin_like_such_a_format_are_no_image(head: bytes) -> None:
    with pytest.raises(ImageError) as refused:
        inspect(memoryview(head + bytes(600)), LIMITS)
    assert refused.value.reason is Reason.NOT_AN_IMAGE


def test_a_tga_that_says_so_at_its_end_is_refused_by_its_name() -> None:
    data = encode(Image.new("RGB", (20, 10)), "TGA")
    assert data[:6] == b"\0\0\2\0\0\0"  # nearly that of a CUR
    with pytest.raises(ImageError, match="TGA is not supported") as refused:
        inspect(memoryview(data), LIMITS)
    assert refused.value.reason is Reason.FORMAT


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"%PDF-1.7", "pdf"),
        (b"PK\3\4", "zip"),
        (b"\0\0\0\x18ftypisom", "video"),
        (b"\x1a\x45\xdf\xa3", "video"),
    ],
)
def test_a_file_that_could_be_unpacked_is_refused_with_how_to_turn_that_on(head: bytes, kind: str) -> None:
    assert kind in SUFFIXES
    with pytest.raises(ImageError, match=rf'set unpack = \["{kind}"\] in its \[\[inbox\]\]') as refused:
        inspect(memoryview(head + bytes(40)), LIMITS)
    assert refused.value.reason is Reason.NOT_AN_IMAGE


@pytest.mark.parametrize("text", [b"Pfad;Datei\n1;a.png\n", b"PFAND\n", b"DDS is a format\n"])
def test_a_text_that_begins_like_a_picture_is_no_picture(text: bytes) -> None:
    with pytest.raises(ImageError, match="plain text") as refused:
        inspect(memoryview(text), LIMITS)
    assert refused.value.reason is Reason.NOT_AN_IMAGE


def test_inspect_needs_neither_torch_nor_pillow_nor_numpy() -> None:
    script = "import sys, stages.images.images; print([name for name in ('torch', 'PIL', 'numpy') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_limits_are_inclusive() -> None:
    data = memoryview(png(Image.new("L", (60, 40))))
    assert inspect(data, Limits(max_pixels=2400, max_aspect_ratio=1.5)).width == 60
    for limits, reason in (
        (Limits(max_pixels=2399), Reason.PIXELS),
        (Limits(max_aspect_ratio=1.49), Reason.ASPECT),
    ):
        with pytest.raises(ImageError) as refused:
            inspect(data, limits)
        assert refused.value.reason is reason


def test_a_refusal_names_the_size_and_the_setting() -> None:
    with pytest.raises(
        ImageError, match=r"30000×30000 is 900,000,000 pixels, max_pixels is 100,000,000\."
    ) as refused:
        inspect(memoryview(huge_png()), LIMITS)
    assert (
        'set max_pixels = 900000000 and decode_bytes = "10752 MiB" under [pipeline]' in refused.value.detail
    )
    with pytest.raises(
        ImageError, match=r"max_aspect_ratio = 50 allows. To allow it, set max_aspect_ratio = 67 under"
    ):
        inspect(memoryview(png(Image.new("L", (3, 200)))), LIMITS)


@pytest.mark.parametrize("size", [(90, 70), (100, 1)])
def test_an_image_is_allowed_after_the_change_that_its_refusal_names(size: tuple[int, int]) -> None:
    data = memoryview(png(Image.new("L", size)))
    limits = Limits(max_pixels=50, max_aspect_ratio=1.2)
    for _ in range(2):
        with pytest.raises(ImageError) as refused:
            inspect(data, limits)
        (name, value), *_ = re.findall(r"set (max_\w+) = (\d+)", refused.value.detail)
        limits = msgspec.structs.replace(limits, **{name: int(value)})
    assert (inspect(data, limits).width, inspect(data, limits).height) == size


def test_the_refusal_of_heic_names_the_plug_in_and_heic_is_read_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formats, "heif_is_readable", lambda: False)
    with pytest.raises(ImageError, match=r"pip install 'visiond\[heic\]'"):
        inspect(memoryview(avif_named_heic()), LIMITS)
    monkeypatch.setattr(formats, "heif_is_readable", lambda: True)
    assert inspect(memoryview(avif_named_heic()), LIMITS) == Header("HEIF", 96, 64, 1)


def test_a_batch_keeps_its_order_when_an_image_is_broken(decoders: Decoders) -> None:
    broken = jpeg(picture(32, 32)).replace(b"\xff\xdb", b"\xff\xfe")  # no quantization tables
    batch = [entry(png(picture(20, 10))), entry(broken), entry(jpeg(picture(30, 40)))]
    first, second, third = decode(batch, "cpu", decoders)
    assert isinstance(second, ImageError)
    assert second.reason is Reason.DECODER
    assert isinstance(first, torch.Tensor)
    assert isinstance(third, torch.Tensor)
    assert (first.shape, third.shape) == ((3, 10, 20), (3, 40, 30))
    assert first.dtype is torch.uint8
    assert first.is_contiguous()


class PacedDecoders(Decoders):
    """One, which decodes nothing before it may."""

    def __init__(self) -> None:
        super().__init__(1, LIMITS)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.begun = self.ended = 0

    def _decode(self, entry: tuple[memoryview, Header]) -> np.ndarray | ImageError:
        self.begun += 1
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        answer = super()._decode(entry)
        self.ended += 1
        return answer


@pytest.fixture
def paced() -> Iterator[PacedDecoders]:
    pool = PacedDecoders()
    yield pool
    pool.may_go_on.set()
    pool.close()


def let_a_gpu_do_jpegs(monkeypatch: pytest.MonkeyPatch, call: Callable[[], dict[int, torch.Tensor]]) -> None:
    """A fake one; call: what its decoder does."""

    def find(_: object, batch: Sequence[Encoded]) -> list[int]:
        return [place for place, (_, header) in enumerate(batch) if header.format == "JPEG"]

    monkeypatch.setattr(images, "_find_jpegs_for", find)
    monkeypatch.setattr(images, "_decode_on_own_stream", lambda *_: call())


def test_the_hosts_decoders_are_at_work_while_the_gpus_decoder_is(
    paced: PacedDecoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> dict[int, torch.Tensor]:
        assert paced.has_begun.wait(30), "the host waits for the GPU"
        paced.may_go_on.set()
        return {0: torch.zeros(3, 5, 6)}  # and the other JPEG is refused

    let_a_gpu_do_jpegs(monkeypatch, call)
    batch = [entry(jpeg(picture(6, 5))), entry(png(picture(20, 10))), entry(jpeg(picture(30, 40)))]
    sizes = [pixels.shape for pixels in decode(batch, "cpu", paced) if isinstance(pixels, torch.Tensor)]
    assert sizes == [(3, 5, 6), (3, 10, 20), (3, 40, 30)]


def test_when_the_gpu_has_no_memory_the_host_soon_reads_no_bytes_any_more(
    paced: PacedDecoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> dict[int, torch.Tensor]:
        assert paced.has_begun.wait(30)
        paced.may_go_on.set()  # it starts a child first, which takes a while
        raise OutOfMemory("the GPU is full")

    let_a_gpu_do_jpegs(monkeypatch, call)
    with pytest.raises(OutOfMemory):
        decode([entry(jpeg()), *[entry(png(picture(20, 10)))] * 3], "cpu", paced)
    assert (paced.begun, paced.ended) == (1, 1)


def test_an_empty_batch_decodes_to_nothing(decoders: Decoders) -> None:
    assert decode([], "cpu", decoders) == []


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_decodes_to_the_same_upright_picture(decoders: Decoders, orientation: int) -> None:
    (pixels,) = decode([entry(oriented(orientation))], "cpu", decoders)
    assert_is_the_picture(pixels)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_the_device_turns_as_pillow_does(orientation: int) -> None:
    stored = Image.open(io.BytesIO(oriented(orientation, "PNG")))
    turned = images._turn(torch.from_numpy(np.array(stored)).permute(2, 0, 1), orientation)
    assert torch.equal(turned, torch.from_numpy(np.array(picture())).permute(2, 0, 1))


# torchvision's decoder takes the CPU as its device too, so its path is tested here without a GPU.


@torchvision_is_deprecated
def test_a_file_that_the_device_cannot_decode_does_not_affect_the_others() -> None:
    batch = [entry(oriented(6)), entry(spoil(jpeg())), entry(jpeg(progressive=True))]
    first, second, third = images._decode_on_device(batch, torch.device("cpu"))
    assert second is None
    assert_is_the_picture(first)
    assert_is_the_picture(third)


@torchvision_is_deprecated
def test_pixels_with_another_size_than_the_header_are_refused() -> None:
    data, header = entry(jpeg())
    lied = Header("JPEG", header.width - 1, header.height, 1)
    assert list(images._decode_on_device([(data, lied)], torch.device("cpu"))) == [None]


def test_one_device_call_decodes_no_more_pixels_than_the_limit() -> None:
    sizes = [40, 40, 40, 150, 10, 90, 60, 41]
    batch = [(memoryview(b""), Header("JPEG", size, 1, 1)) for size in sizes]
    groups = [[header.width for _, header in group] for group in images._group_by_pixels(batch, 100)]
    assert groups == [[40, 40], [40], [150], [10, 90], [60], [41]]


def test_the_gpu_decoder_prints_no_deprecation_warning() -> None:
    images.find_jpeg_decoder.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        files = [torch.frombuffer(bytearray(jpeg()), dtype=torch.uint8)]
        images.find_jpeg_decoder()(files, mode="RGB", device=torch.device("cpu"))
    assert caught == []


def assert_is_the_picture(pixels: torch.Tensor | ImageError | None, tolerance: int = 4) -> None:
    assert isinstance(pixels, torch.Tensor)
    assert pixels.shape == (3, 64, 96)
    corners = [pixels[:, y, x].tolist() for y in (3, -4) for x in (3, -4)]
    assert np.abs(np.array(corners) - np.array(list(COLORS.values()))).max() <= tolerance


def photo() -> Image.Image:
    """Like a photograph of print: detail in the brightness, soft colors, sharp dark strokes."""
    random = np.random.default_rng(1)

    def blotches(width: int, height: int, spread: float) -> Image.Image:
        cells = random.normal(128, spread, (height, width)).clip(0, 255).astype(np.uint8)
        return Image.fromarray(cells).resize((1280, 960), Image.Resampling.BICUBIC)

    image = Image.merge(
        "YCbCr", (blotches(160, 120, 60), blotches(16, 12, 15), blotches(16, 12, 15))
    ).convert("RGB")
    for left in range(40, 1240, 11):
        image.paste((20, 20, 20), (left, 300 + left % 7, left + 4, 330))
    return image


@pytest.mark.gpu
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(("subsampling", "most"), [("4:4:4", 0.1), ("4:2:2", 2.0), ("4:2:0", 2.0)])
def test_the_gpu_and_pillow_agree(
    cuda: torch.device, decoders: Decoders, subsampling: str, most: float, progressive: bool
) -> None:
    """In gray levels, mean. nvJPEG does not smooth between subsampled colors as libjpeg does;
    full ones are equal."""
    batch = [entry(jpeg(photo(), subsampling=subsampling, progressive=progressive))]
    (on_gpu,) = decode(batch, cuda, decoders)
    (on_cpu,) = decode(batch, "cpu", decoders)
    assert isinstance(on_gpu, torch.Tensor)
    assert isinstance(on_cpu, torch.Tensor)
    assert on_gpu.device == cuda
    assert (on_gpu.cpu().float() - on_cpu.float()).abs().mean() < most


@pytest.mark.gpu
def test_the_gpu_itself_decodes_every_plain_jpeg(cuda: torch.device) -> None:
    files = [jpeg(), jpeg(subsampling=2), jpeg(progressive=True), jpeg(picture().convert("L")), oriented(6)]
    for pixels in images._decode_on_device([entry(data) for data in files], cuda):
        assert pixels is not None
        assert pixels.device == cuda
        assert pixels.shape == (3, 64, 96)


@pytest.mark.gpu
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_gpu_applies_the_orientation(cuda: torch.device, decoders: Decoders, orientation: int) -> None:
    (pixels,) = decode([entry(oriented(orientation))], cuda, decoders)
    assert_is_the_picture(pixels)


@pytest.mark.gpu
def test_a_bad_jpeg_does_not_affect_the_others_of_its_gpu_batch(
    cuda: torch.device, decoders: Decoders
) -> None:
    files = [
        jpeg(),
        spoil(jpeg()),
        ycck_jpeg(),
        encode(picture(), "WEBP", quality=95),
        jpeg(progressive=True),
    ]
    first, bad, *others = decode([entry(data) for data in files], cuda, decoders)
    assert isinstance(bad, ImageError)
    assert bad.reason is Reason.DECODER
    for pixels in (first, *others):
        assert_is_the_picture(pixels)
        assert isinstance(pixels, torch.Tensor)
        assert pixels.device == cuda


@pytest.mark.gpu
@torchvision_is_deprecated
def test_the_gpus_decoder_can_be_opened_while_another_thread_records_a_graph(cuda: torch.device) -> None:
    images.find_jpeg_decoder()
    value, graph = torch.zeros(8, device=cuda), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        value += 1
        run_in_background(lambda: images.open_jpeg_decoder(jpeg(), str(cuda))).result(60)
        value += 1
    graph.replay()
    assert value.tolist() == [2.0] * 8
