"""The files that people drop, as `visiond bench --inputs` makes them."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageOps

from stages.scenes import inputs
from stages.scenes.inputs import DRAW, UNIFORM, copy_inputs, draw_phone, is_of, stamp, write_inputs


def draw(kind: str, index: int) -> tuple[str, bytes]:
    return DRAW[kind](Random(f"{kind} 0 {index}"), index)


def test_pictures_of_the_web_have_their_usual_sizes() -> None:
    drawn = [draw("web", index)[1] for index in range(6)]
    sizes = [Image.open(io.BytesIO(data)).size for data in drawn]
    assert all(0.28e6 < width * height < 1.95e6 for width, height in sizes)
    assert 80_000 < sum(map(len, drawn)) / len(drawn) < 300_000
    assert drawn[:2] == [draw("web", index)[1] for index in range(2)]


def test_photographs_of_a_phone_have_every_orientation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PHONE", (403, 302))
    monkeypatch.setattr(inputs, "LARGE_PHONE", (806, 604))
    images = [Image.open(io.BytesIO(draw("phone", index)[1])) for index in range(16)]
    assert {image.getexif()[0x0112] for image in images} == set(range(1, 9))
    assert [ImageOps.exif_transpose(image).size for image in images] == [(403, 302)] * 15 + [(806, 604)]


def test_photographs_of_48_megapixels_that_are_written_have_every_orientation_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only these are drawn here, and small, as the others take long."""
    monkeypatch.setattr(inputs, "LARGE_PHONE", (806, 604))
    monkeypatch.setitem(
        DRAW, "phone", lambda *which: draw_phone(*which) if is_of("phone-48", which[1]) else (".jpg", b"")
    )
    monkeypatch.setattr(inputs, "map_processes", lambda work, count, _: map(work, range(count)))
    write_inputs(tmp_path / "all", "phone", 0)
    copy_inputs(tmp_path / "all", tmp_path / "large", "phone-48", 8)
    found = [
        Image.open(io.BytesIO(file.read_bytes())).getexif()[0x0112] for file in (tmp_path / "large").iterdir()
    ]
    assert (len(list((tmp_path / "all").iterdir())), sorted(found)) == (128, list(range(1, 9)))


@pytest.mark.parametrize(
    ("kind", "format", "size"),
    [
        ("phone-12", "JPEG", (403, 302)),
        ("phone-48", "JPEG", (806, 604)),
        ("screen-photo", "PNG", (1920, 1080)),
        ("screen-window", "PNG", (1920, 1080)),
        ("scan-jpeg", "JPEG", (2480, 3508)),
        ("scan-tiff", "TIFF", (2480, 3508)),
    ],
)
def test_each_kind_of_one_format_and_size_has_no_other(
    monkeypatch: pytest.MonkeyPatch, kind: str, format: str, size: tuple[int, int]
) -> None:
    monkeypatch.setattr(inputs, "PHONE", (403, 302))
    monkeypatch.setattr(inputs, "LARGE_PHONE", (806, 604))
    _, turns = UNIFORM[kind]
    for index in {turns[0], turns[-1]}:
        _, data = draw(kind.partition("-")[0], index)
        image = Image.open(io.BytesIO(data))
        assert (image.format, ImageOps.exif_transpose(image).size) == (format, size)


def test_a_photograph_of_12_megapixels_has_about_three_megabytes() -> None:
    assert 2.3e6 < len(draw("phone", 1)[1]) < 3.5e6


def test_screenshots_are_large_photographs_and_small_windows() -> None:
    (_, photograph), (_, window), (suffix, webp) = (draw("screen", index) for index in (2, 1, 3))
    assert 2e6 < len(photograph) < 4e6
    assert len(window) < 400_000
    assert (suffix, Image.open(io.BytesIO(webp)).format) == (".webp", "WEBP")


def test_scans_are_a4_at_300_dpi() -> None:
    jpeg, tiff = (Image.open(io.BytesIO(draw("scan", index)[1])) for index in (0, 5))
    assert jpeg.size == tiff.size == (2480, 3508)
    assert (tiff.mode, tiff.info["compression"], round(tiff.info["dpi"][0])) == ("1", "group4", 300)


@pytest.mark.parametrize(
    ("kind", "size", "least"), [("letter", (762, 1000), 30), ("receipt", (864, 1296), 15)]
)
def test_pages_for_ocr_have_the_size_of_known_data_sets_and_many_rows_of_text(
    kind: str, size: tuple[int, int], least: int
) -> None:
    image = Image.open(io.BytesIO(draw(kind, 0)[1]))
    assert image.size == size
    has_ink = (np.asarray(image.convert("L")) < 110).any(axis=1)
    assert np.count_nonzero(np.diff(has_ink.astype(int)) == 1) >= least


@pytest.mark.parametrize(("format", "options"), [("JPEG", {}), ("PNG", {}), ("WEBP", {}), ("TIFF", {})])
def test_a_stamped_file_has_other_bytes_and_the_same_pixels(format: str, options: dict[str, int]) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((40, 30), 60).convert("RGB").save(buffer, format, **options)
    data = buffer.getvalue()
    one, two = stamp(data, 1), stamp(data, 2)
    assert len({data, one, two}) == 3
    pixels = [Image.open(io.BytesIO(each)).tobytes() for each in (data, one, two)]
    assert pixels[0] == pixels[1] == pixels[2]
    Image.open(io.BytesIO(one)).verify()


def test_copies_have_the_names_and_suffixes_of_their_originals(tmp_path: Path) -> None:
    (tmp_path / "originals").mkdir()
    for name in ("a.tif", "b.pdf"):
        (tmp_path / "originals" / name).write_bytes(b"II*\x00")
    copy_inputs(tmp_path / "originals", tmp_path / "copies", "scan", 3)
    names = sorted(file.name for file in (tmp_path / "copies").iterdir())
    assert names == ["000000-a.tif", "000001-b.pdf", "000002-a.tif"]
