from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from stages.contract.base import Limits
from stages.images import images, profiles
from stages.images.decoder import Decoder, Decoders
from stages.images.images import Encoded, inspect
from stages.images.profiles import PRIMARIES, SRGB_CURVE, make_profile, read_conversion
from tests.inputs import UNDO, chunk, encode, jpeg, oriented, picture, png, raw_png, tiff
from tests.stages.images.layouts import png_of

LIMITS = Limits()
P3 = make_profile(PRIMARIES[12], SRGB_CURVE)
ADOBE = make_profile((0.64, 0.33, 0.21, 0.71, 0.15, 0.06, 0.3127, 0.329), 2.19921875)
WIDE = make_profile(PRIMARIES[9], 1.8)
SWAPPED = make_profile((0.30, 0.60, 0.64, 0.33, 0.15, 0.06, 0.3127, 0.329), SRGB_CURVE)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
PROFILES = {"p3": P3, "adobe": ADOBE, "wide": WIDE, "swapped": SWAPPED}
torchvision_is_deprecated = pytest.mark.filterwarnings(
    "ignore:The image decoding and encoding:DeprecationWarning"
)


def entry(data: bytes) -> Encoded:
    return memoryview(data), inspect(memoryview(data), LIMITS)


def stated(profile: bytes, image: Image.Image | None = None) -> np.ndarray:
    """What LittleCMS says that the picture is in sRGB."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    done = ImageCms.profileToProfile(
        image or picture(), source, ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert done is not None
    return np.array(done).astype(int)


def difference(pixels: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(pixels.astype(int) - expected).mean())


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_a_profile_in_any_format_becomes_srgb(decoder: Decoder, image_format: str, name: str) -> None:
    lossless: dict[str, dict[str, Any]] = {
        "JPEG": {"quality": 98, "subsampling": 0},
        "WEBP": {"lossless": True},
        "AVIF": {"quality": 100, "subsampling": "4:4:4"},
    }
    data = encode(picture(), image_format, icc_profile=PROFILES[name], **lossless.get(image_format, {}))
    plain = encode(picture(), image_format, **lossless.get(image_format, {}))
    assert difference(decoder.decode(*entry(data)), stated(PROFILES[name])) < 2
    assert difference(decoder.decode(*entry(plain)), stated(PROFILES[name])) > 2


def test_a_profile_of_srgb_changes_no_pixel(decoder: Decoder) -> None:
    for profile in (SRGB, make_profile(PRIMARIES[1], SRGB_CURVE)):
        with_it = decoder.decode(*entry(jpeg(icc_profile=profile)))
        assert np.array_equal(with_it, decoder.decode(*entry(jpeg())))
        assert read_conversion(profile) is None


@pytest.mark.parametrize(
    "profile", [b"", b"no profile" * 20, P3[:200], P3[:128] + b"\xff" * 400, b"\xff" * 60_000]
)
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_a_broken_profile_is_ignored(decoder: Decoder, profile: bytes, mode: str) -> None:
    image = picture().convert(mode)
    assert np.array_equal(
        decoder.decode(*entry(jpeg(image, icc_profile=profile))), decoder.decode(*entry(jpeg(image)))
    )


def test_a_profile_of_another_kind_of_pixels_is_ignored(decoder: Decoder) -> None:
    gray = picture().convert("L")
    assert np.array_equal(
        decoder.decode(*entry(jpeg(gray, icc_profile=P3))), decoder.decode(*entry(jpeg(gray)))
    )


@pytest.mark.parametrize("kind", [0, 4])
@pytest.mark.parametrize("bits", [8, 16])
def test_a_profile_of_gray_is_applied_with_and_without_alpha(decoder: Decoder, bits: int, kind: int) -> None:
    profile = make_profile((), 1.0, is_gray=True)
    gray = np.array(picture().convert("L"))
    values = (gray.astype(int) * (257 if bits == 16 else 1))[..., None]
    if kind == 4:
        values = np.concatenate([values, np.full_like(values, (1 << bits) - 1)], -1)
    data = png_of(values, bits, kind, chunk(b"iCCP", b"p\0\0" + zlib.compress(profile)))
    expected = stated(profile, Image.fromarray(gray))
    assert difference(decoder.decode(*entry(data)), expected) < 1
    assert difference(np.repeat(gray[..., None], 3, -1), expected) > 9


@pytest.mark.parametrize("kind", [0, 4])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("stated_by", ["cICP", "gAMA"])
def test_gray_is_converted_as_the_same_gray_in_colors(
    decoder: Decoder, stated_by: str, bits: int, kind: int
) -> None:
    chunks = {
        "cICP": chunk(b"cICP", bytes((12, 8, 0, 1))),
        "gAMA": chunk(b"gAMA", struct.pack(">I", 100000)) + chunk(b"cHRM", CHRM_P3),
    }[stated_by]
    values = np.array(picture().convert("L"))[..., None].astype(int) * (257 if bits == 16 else 1)
    colors = png_of(values.repeat(3, -1), bits, 2, chunks)
    alpha = np.full_like(values, (1 << bits) - 1)
    gray = png_of(values if kind == 0 else np.concatenate([values, alpha], -1), bits, kind, chunks)
    found, expected = decoder.decode(*entry(gray)).astype(int), decoder.decode(*entry(colors))
    assert np.abs(found - expected).max() <= 2
    assert difference(expected, values.repeat(3, -1) >> (bits - 8)) > 9


def test_a_profile_in_several_segments_is_joined(decoder: Decoder) -> None:
    long = P3[:-1] + P3[-1:] + bytes(100_000)
    long = struct.pack(">I", len(long)) + long[4:]
    data = jpeg(quality=98, icc_profile=long)
    assert profiles.jpeg_profile(memoryview(data)) == long
    assert difference(decoder.decode(*entry(data)), stated(P3)) < 2
    first = data.index(b"ICC_PROFILE\0")
    lost = data[:first] + b"?" + data[first + 1 :]  # its first part
    assert profiles.jpeg_profile(memoryview(lost)) == b""


def test_a_profile_between_the_header_and_the_pixels_of_a_jpeg_is_applied(decoder: Decoder) -> None:
    data = jpeg(quality=98, subsampling=0, icc_profile=WIDE)
    start = data.index(b"\xff\xe2")
    end = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    rest = data[:start] + data[end:]
    pixels_at = rest.index(b"\xff\xda")
    moved = rest[:pixels_at] + data[start:end] + rest[pixels_at:]
    assert difference(decoder.decode(*entry(rest)), stated(WIDE)) > 2
    assert difference(decoder.decode(*entry(moved)), stated(WIDE)) < 2


def test_alpha_is_kept_beside_a_profile(decoder: Decoder) -> None:
    image = picture().convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 48, 32))
    pixels = decoder.decode(*entry(png(image, icc_profile=P3)))
    assert pixels[3, 3].tolist() == [255, 255, 255]
    assert difference(pixels[:, 48:], stated(P3)[:, 48:]) < 2


def test_lab_is_read_in_the_sandbox(decoder: Decoder) -> None:
    lab = ImageCms.profileToProfile(
        picture(), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert difference(decoder.decode(*entry(tiff(lab))), np.array(picture())) < 2


def gray_png(*chunks: bytes) -> bytes:
    return raw_png(2, 1, zlib.compress(bytes((0, 200, 40, 40, 40, 180, 60))), b"".join(chunks), kind=(8, 2))


CHRM_P3 = struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)
CHRM_SRGB = struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)
ICCP = chunk(b"iCCP", b"p\0\0" + zlib.compress(SWAPPED))


@pytest.mark.parametrize(
    ("chunks", "changes"),
    [
        ([chunk(b"cICP", bytes((12, 13, 0, 1)))], True),
        ([chunk(b"cICP", bytes((1, 13, 0, 1))), ICCP], False),  # cICP is before a profile
        ([chunk(b"cICP", bytes((9, 16, 0, 1)))], False),  # brighter than sRGB: not converted
        ([ICCP, chunk(b"sRGB", b"\0")], True),
        ([chunk(b"sRGB", b"\0"), chunk(b"gAMA", struct.pack(">I", 100000)), chunk(b"cHRM", CHRM_P3)], False),
        ([chunk(b"gAMA", struct.pack(">I", 100000))], True),  # alone
        ([chunk(b"gAMA", struct.pack(">I", 45455))], False),
        ([chunk(b"gAMA", struct.pack(">I", 0))], False),
        ([chunk(b"cHRM", CHRM_P3)], False),  # alone
        ([chunk(b"gAMA", struct.pack(">I", 45455)), chunk(b"cHRM", CHRM_SRGB)], False),
        ([chunk(b"gAMA", struct.pack(">I", 45455)), chunk(b"cHRM", CHRM_P3)], True),
        ([chunk(b"gAMA", struct.pack(">I", 0)), chunk(b"cHRM", bytes(32))], False),  # nonsense
        ([chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(9 << 20)))], False),  # too large
    ],
)
def test_a_png_states_its_colors_in_the_order_of_the_standard(
    decoder: Decoder, chunks: list[bytes], changes: bool
) -> None:
    same = np.array_equal(decoder.decode(*entry(gray_png(*chunks))), decoder.decode(*entry(gray_png())))
    assert same != changes


# The device's path, with torchvision's decoder on the CPU


@pytest.mark.parametrize("name", PROFILES)
def test_the_device_converts_as_littlecms_does(name: str) -> None:
    conversion = read_conversion(PROFILES[name])
    assert conversion is not None
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 90, 70), dtype=np.uint8))
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    profiles.apply(conversion, pixels)
    assert difference(pixels.permute(1, 2, 0).numpy(), stated(PROFILES[name], image)) < 0.6


@torchvision_is_deprecated
@pytest.mark.parametrize("profile", [P3, SRGB, None])
def test_jpegs_with_a_profile_are_converted_where_they_are_decoded(
    decoder: Decoder, profile: bytes | None
) -> None:
    given = entry(jpeg(quality=98, icc_profile=profile))
    assert images._suits_device(given)
    [pixels] = images._decode_on_device([given], torch.device("cpu"))
    assert pixels is not None
    assert difference(pixels.permute(1, 2, 0).numpy(), decoder.decode(*given).astype(int)) < 1


@pytest.mark.parametrize(
    "profile", [P3[:200], b"no profile" * 20, P3.replace(b"para", b"what"), P3.replace(b"rXYZ", b"A2B0")]
)
def test_other_profiles_go_to_the_decoder_in_the_sandbox(profile: bytes) -> None:
    assert not images._suits_device(entry(jpeg(icc_profile=profile)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("side", [96, 64])
def test_pixels_are_turned_once_whether_or_not_the_devices_decoder_obeys_exif(
    monkeypatch: pytest.MonkeyPatch, orientation: int, obeys: bool, side: int
) -> None:
    upright = picture(side, 64)
    exif = Image.Exif()
    exif[0x112] = orientation
    stored = upright if orientation == 1 else upright.transpose(UNDO[orientation])
    data = encode(stored, "JPEG", exif=exif, quality=95, subsampling=0)

    def read(files: list[torch.Tensor], *, mode: str, device: torch.device) -> list[torch.Tensor]:
        answers = []
        for file in files:
            image = Image.open(io.BytesIO(file.numpy().tobytes()))
            turned = images_of_exif(image) if obeys else image
            answers.append(torch.from_numpy(np.array(turned)).permute(2, 0, 1))
        return answers

    monkeypatch.setattr(images, "find_jpeg_decoder", lambda: read)
    [pixels] = images._decode_on_device([entry(data)], torch.device("cpu"))
    assert pixels is not None
    assert difference(pixels.permute(1, 2, 0).numpy(), np.array(upright).astype(int)) < 4


def images_of_exif(image: Image.Image) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


@pytest.mark.gpu
@pytest.mark.parametrize("module", ["torchvision.io", "torchcodec.decoders"])
@pytest.mark.parametrize("side", [96, 64])
@pytest.mark.parametrize("orientation", range(1, 9))
@torchvision_is_deprecated
def test_each_decoder_of_the_gpu_turns_once_and_converts(
    monkeypatch: pytest.MonkeyPatch, module: str, side: int, orientation: int
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    library = pytest.importorskip(module, exc_type=ImportError)
    if not hasattr(library, "decode_jpeg"):
        pytest.skip(f"{module} decodes no JPEG")
    monkeypatch.setattr(images, "find_jpeg_decoder", lambda: library.decode_jpeg)
    upright = picture(side, 64)
    exif = Image.Exif()
    exif[0x112] = orientation
    stored = upright if orientation == 1 else upright.transpose(UNDO[orientation])
    for profile, expected in ((P3, stated(P3, upright)), (SRGB, np.array(upright).astype(int))):
        data = encode(stored, "JPEG", exif=exif, quality=95, subsampling=0, icc_profile=profile)
        [pixels] = images._decode_on_device([entry(data)], torch.device("cuda:0"))
        assert pixels is not None
        assert difference(pixels.permute(1, 2, 0).cpu().numpy(), expected) < 3


@pytest.mark.gpu
def test_a_profile_that_the_gpu_cannot_apply_is_applied_by_the_cpu(decoder: Decoder) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    pool = Decoders(1, LIMITS)
    batch = [entry(jpeg(icc_profile=profile)) for profile in (P3, b"no profile" * 20, None)]
    for given, pixels in zip(batch, images.decode(batch, "cuda:0", pool), strict=True):
        assert isinstance(pixels, torch.Tensor)
        assert difference(pixels.permute(1, 2, 0).cpu().numpy(), decoder.decode(*given).astype(int)) < 3
    pool.close()


def test_hidden_exif_leaves_the_rest_as_it_is() -> None:
    data = oriented(6)
    hidden = bytes(profiles.hide_exif(memoryview(data)))
    assert inspect(memoryview(hidden), LIMITS).orientation == 1
    assert sum(one != other for one, other in zip(data, hidden, strict=True)) == 1
