from __future__ import annotations

import functools
import io
import time
import warnings
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from daemon.workers import known_images
from stages.contract.base import Image, Limits, StageSpec
from stages.contract.binning import text_of
from stages.contract.manifest import WeightsError
from stages.images.devices import pixels_of
from stages.ocr.descriptor import Line, Ocr, OcrOptions
from stages.ocr.onnxfile import weight_files
from stages.ocr.pieces import LONGEST_MAP, PiecePlan, plan_pieces
from stages.ocr.stage import (
    LINES_IN_GROUP,
    WIDEST_LINE,
    OcrStage,
    bucket,
    decode,
    plan_lines,
)
from tests.stages.ocr.textpages import (
    FONT,
    HALF,
    PAGES,
    READ,
    SHORT,
    UNREAD,
    draw_half,
    draw_lines,
    draw_page,
    draw_turned,
)
from tests.stages.pictures import read_photo, wrap_pixels

PHOTO = Path(str(distribution("ultralytics").locate_file("ultralytics/assets/bus.jpg")))


def build_stage(device: str = "cpu", dtype: str = "float32", **options: Any) -> OcrStage:
    built = OcrStage(StageSpec("ocr", "ppocr", dtype=dtype, options=options), device)
    built.load()
    return built


@pytest.fixture(scope="module")
def stage() -> OcrStage:
    return build_stage()


@pytest.fixture(scope="module")
def half() -> OcrStage:
    return build_stage(**HALF)


def build_rapid(**params: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # third-party deprecations on import
        from rapidocr import RapidOCR

    # Of several threads, those that wait use as much CPU time as those that compute.
    alone = {"Global.log_level": "critical", "EngineConfig.onnxruntime.intra_op_num_threads": 1}
    return RapidOCR(params=alone | params)


@pytest.fixture(scope="module")
def rapid() -> Any:
    return build_rapid()


@pytest.fixture(scope="module")
def half_rapid() -> Any:
    return build_rapid(**{"Det.limit_side_len": HALF["map_side"], "Global.max_side_len": HALF["max_side"]})


def read(stage: OcrStage, *images: Image) -> list[Ocr]:
    answers = [answer for answer in stage.run(images) if isinstance(answer, Ocr)]
    assert len(answers) == len(images)
    return answers


@pytest.fixture(scope="module")
def read_alone(half: OcrStage) -> Callable[[int], Ocr]:
    """What the stage reads on the page of a seed."""
    return functools.cache(lambda seed: read(half, draw_half(seed))[0])


def compare(ours: Ocr, rapid: Any, image: Image) -> None:
    """The same lines, in any order: rapidocr mixes the rows of a slanted page."""
    [pixels] = pixels_of([image])
    theirs = rapid(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()[:, :, ::-1]))
    boxes = theirs.boxes.tolist() if theirs.boxes is not None else []
    expected = sorted(zip(boxes, theirs.txts or (), theirs.scores or (), strict=True))
    lines = sorted(ours.lines, key=lambda line: [list(corner) for corner in line.box])
    assert [line.text for line in lines] == [text for _, text, _ in expected]
    assert [line.score for line in lines] == pytest.approx([score for *_, score in expected], abs=1e-3)
    assert np.array_equal([line.box for line in lines], [box for box, *_ in expected])


@pytest.mark.parametrize("seed", PAGES)
def test_a_page_is_read_as_rapidocr_reads_it(
    seed: int, read_alone: Callable[[int], Ocr], half_rapid: Any
) -> None:
    compare(read_alone(seed), half_rapid, draw_half(seed))


def test_a_photograph_is_read_as_rapidocr_reads_it(stage: OcrStage, rapid: Any) -> None:
    photo = read_photo(PHOTO)
    compare(read(stage, photo)[0], rapid, photo)


def test_the_defaults_are_rapidocrs(rapid: Any) -> None:
    options, pages, detector = OcrOptions(), rapid.cfg.Global, rapid.cfg.Det
    assert (options.text_score, options.max_side, options.min_side) == (
        pages.text_score,
        pages.max_side_len,
        pages.min_side_len,
    )
    assert (options.mask_threshold, options.box_threshold, options.unclip_ratio, options.map_side) == (
        detector.thresh,
        detector.box_thresh,
        detector.unclip_ratio,
        detector.limit_side_len,
    )


def test_pages_hold_text(read_alone: Callable[[int], Ocr]) -> None:
    answer = read_alone(PAGES[4])
    assert answer.count == len(answer.lines) > LINES_IN_GROUP
    assert 0.05 < answer.area_ratio < 1
    assert all(0 <= x <= 640 and 0 <= y <= 480 for line in answer.lines for x, y in line.box)


def test_the_page_that_a_worker_warms_up_with_has_lines(stage: OcrStage) -> None:
    page = wrap_pixels(np.array(Pillow.open(io.BytesIO(known_images.draw_page(Limits())))))
    assert [line.text for line in read(stage, page)[0].lines] == [
        "A page to rehearse on",
        "and a second line",
    ]


def test_batch_mates_change_no_answer(half: OcrStage, read_alone: Callable[[int], Ocr]) -> None:
    seeds = [PAGES[place] for place in (1, 5, 6, 9)]
    for together, alone in zip(read(half, *map(draw_half, seeds)), map(read_alone, seeds), strict=True):
        assert [(line.text, line.box) for line in together.lines] == [
            (line.text, line.box) for line in alone.lines
        ]


def test_lines_in_a_gpus_buckets_read_the_same(
    half: OcrStage, read_alone: Callable[[int], Ocr], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = PAGES[:4]
    exact = [read_alone(seed) for seed in seeds]
    monkeypatch.setattr(half, "on_cpu", False)  # batches, widths and masks as on a GPU
    for ours, theirs in zip(read(half, *map(draw_half, seeds)), exact, strict=True):
        assert [(line.text, line.box) for line in ours.lines] == [
            (line.text, line.box) for line in theirs.lines
        ]
        assert [line.score for line in ours.lines] == pytest.approx(
            [line.score for line in theirs.lines], abs=1e-4
        )


def test_a_blank_page_gives_no_lines_and_no_nan(half: OcrStage) -> None:
    blank, text = read(half, wrap_pixels(np.full((150, 200, 3), 255, np.uint8)), draw_half(1))
    assert msgspec.json.encode(blank) == b'{"lines":[],"count":0,"area_ratio":0.0}'
    assert text.count


LONG = [f"Line {number} of a long page" for number in range(40)]


def draw_long() -> Image:
    """At half of all limits it is read in pieces; lines are drawn across each place where a piece begins or ends."""
    return draw_lines(LONG, width=600)


def test_a_long_image_is_read_in_pieces_without_lost_or_doubled_lines(half: OcrStage) -> None:
    page = draw_long()
    assert len(plan_pieces(page.width, page.height, half.options)) > 3
    assert [line.text for line in read(half, page)[0].lines] == LONG


def test_letters_too_large_for_the_detector_are_read_at_a_smaller_scale(stage: OcrStage) -> None:
    page = Pillow.new("RGB", (1540, 645), "white")
    ImageDraw.Draw(page).text((40, 30), "STOP", "black", ImageFont.truetype(str(FONT), 500))
    assert [line.text for line in read(stage, wrap_pixels(np.array(page)))[0].lines] == ["STOP"]


def test_letters_that_the_detector_splits_are_read_whole_beside_a_small_line(stage: OcrStage) -> None:
    """At the first scale: OPE, EI, EN and the small line."""
    page = Pillow.new("RGB", (1841, 832), "white")
    draw = ImageDraw.Draw(page)
    draw.text((60, 0), "OPEN", "black", ImageFont.truetype(str(FONT.with_stem("DejaVuSerif")), 640))
    draw.text((60, 750), "open daily", "black", ImageFont.truetype(str(FONT), 44))
    assert [line.text for line in read(stage, wrap_pixels(np.array(page)))[0].lines] == ["OPEN", "open daily"]


def test_three_wheels_are_lines_but_no_text_and_a_price_beside_them_is(stage: OcrStage) -> None:
    scene = Pillow.new("RGB", (640, 480), (150, 170, 190))
    draw = ImageDraw.Draw(scene)
    for x in (120, 195, 270):
        draw.ellipse((x, 200, x + 60, 260), outline=(40, 40, 40), width=10)
    wheels = msgspec.to_builtins(read(stage, wrap_pixels(np.array(scene)))[0])
    for x, text in ((60, "5.00"), (250, "No 3"), (440, "10")):
        draw.text((x, 320), text, "black", ImageFont.truetype(str(FONT), 40))
    signs = msgspec.to_builtins(read(stage, wrap_pixels(np.array(scene)))[0])
    assert [len(wheels["lines"]), text_of(wheels)] == [1, ""]
    assert [len(signs["lines"]), text_of(signs)] == [4, "5.00\nNo 3\n10"]


def test_a_result_says_that_its_image_was_shrunk(half: OcrStage) -> None:
    assert read(half, wrap_pixels(np.full((1000, 2000, 3), 255, np.uint8)))[0].scale == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_reads_a_long_image_as_the_cpu_does(half: OcrStage) -> None:
    page = draw_long()
    [theirs], [ours] = read(half, page), read(build_stage("cuda", **HALF), to_cuda(page))
    assert [line.text for line in ours.lines] == [line.text for line in theirs.lines]
    assert (
        np.abs(np.subtract([line.box for line in ours.lines], [line.box for line in theirs.lines])).max() <= 1
    )


@pytest.mark.parametrize("size", [(1, 1), (500, 10), (1, 50)])
def test_an_extreme_shape_costs_seconds_at_most(size: tuple[int, int], stage: OcrStage) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    started = time.process_time()
    read(stage, wrap_pixels(noise))
    # of CPU time, on any machine; rapidocr takes 29 s and 7.5 GB for 500×1
    assert time.process_time() - started < 30


@given(st.integers(1, 12_000), st.integers(1, 12_000))
@example(500, 10)
@example(10, 500)
@example(200, 10_000)
@example(12_000, 1)
def test_the_detectors_input_is_bounded(width: int, height: int) -> None:
    plan = PiecePlan.fit(width, height, OcrOptions())
    assert max(plan.map) <= LONGEST_MAP
    assert plan.map[0] * plan.map[1] <= 736 * LONGEST_MAP
    assert all(side > 0 and side % 32 == 0 for side in plan.map)


@given(st.lists(st.tuples(st.integers(5, 2000), st.integers(5, 2000)), max_size=20))
def test_a_lines_width_is_bounded_and_is_at_least_what_it_needs(sizes: list[tuple[int, int]]) -> None:
    quads = [[[0, 0], [width, 0], [width, height], [0, height]] for width, height in sizes]
    lines = plan_lines(3, np.array(quads, dtype=np.float32).reshape(-1, 4, 2))
    assert ((lines.padded >= 320) & (lines.padded <= WIDEST_LINE)).all()
    assert ((lines.resized > 0) & (lines.resized <= lines.padded)).all()
    assert ((lines.padded <= bucket(lines.padded)) & (bucket(lines.padded) < lines.padded + 256)).all()


def test_the_lock_is_free_while_boxes_are_found(half: OcrStage, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    nothing = [np.empty((0, 4, 2), np.float32)]
    monkeypatch.setattr("stages.ocr.stage.find_boxes", lambda *_: held.append(half.lock.locked()) or nothing)
    read(half, draw_half(1))
    assert held == [False, False]  # nothing was found, so the page is read at a second scale too


def test_repeats_and_blanks_are_left_out() -> None:
    classes = np.array([[0, 1, 1, 0, 1, 2], [0, 0, 0, 0, 0, 0]])
    probabilities = np.array([[0.9, 0.8, 0.9, 0.9, 0.9, 1.0], [0.9] * 6], dtype=np.float32)
    assert list(decode(classes, probabilities, ["", "a", "b"])) == [("aab", 0.9, False), ("", 0.0, False)]


@pytest.mark.parametrize(
    ("classes", "probabilities", "guessed"),
    [
        ([1, 0, 2, 0, 0], [0.9, 1.0, 0.9, 1.0, 1.0], False),
        ([1, 0, 2, 0, 0], [0.7, 1.0, 0.8, 1.0, 1.0], True),  # characters that are not sure
        ([1, 0, 2, 0, 0], [0.9, 0.4, 0.9, 1.0, 1.0], True),  # there was something between them
        ([1, 0, 2, 0, 0], [0.9, 1.0, 0.9, 0.1, 0.1], False),  # right of a line a GPU's steps mean nothing
        ([1, 3, 2, 0, 0], [0.9, 0.9, 0.9, 1.0, 1.0], False),
        ([3, 1, 3, 0, 3], [0.9, 0.9, 0.9, 1.0, 0.9], True),  # spaces around words that were left out
    ],
)
def test_a_line_is_guessed_by_its_doubts(
    classes: list[int], probabilities: list[float], guessed: bool
) -> None:
    rows = np.array([classes, classes]), np.array([probabilities, probabilities], dtype=np.float32)
    assert [reading.guessed for reading in decode(*rows, ["", "a", "b", " "])] == [guessed] * 2


def test_lines_of_a_script_that_is_not_read_are_marked_as_guessed_and_no_others(half: OcrStage) -> None:
    lines = read(half, draw_lines(READ))[0].lines
    assert [(line.text, line.guessed) for line in lines] == [(text, False) for text in READ]
    assert b"guessed" not in msgspec.json.encode(lines)  # as the results that were stored before
    guesses = read(half, draw_lines(UNREAD))[0].lines
    assert guesses
    assert all(line.guessed for line in guesses)
    assert msgspec.json.decode(msgspec.json.encode(guesses), type=list[Line]) == guesses


@pytest.fixture(scope="module")
def turning() -> OcrStage:
    return build_stage(orientation=True, **HALF)


@pytest.fixture(scope="module")
def read_upright(half: OcrStage) -> Ocr:
    return read(half, draw_turned(0))[0]


@pytest.mark.parametrize("turns", range(4))
def test_a_turned_page_has_the_same_text_in_the_same_order(
    turns: int, turning: OcrStage, read_upright: Ocr
) -> None:
    upright, page = draw_turned(0), draw_turned(turns)
    answer = read(turning, page)[0]
    assert [line.text for line in answer.lines] == SHORT
    centers = np.mean([line.box for line in read_upright.lines], axis=1)
    height, width = upright.height, upright.width
    for _ in range(turns):
        centers = np.stack([height - centers[:, 1], centers[:, 0]], axis=1)
        height, width = width, height
    # pixels of the image as it is
    assert np.abs(np.mean([line.box for line in answer.lines], axis=1) - centers).max() < 5


def test_pages_of_all_orientations_do_not_affect_each_other(turning: OcrStage) -> None:
    together = read(
        turning, *map(draw_turned, (2, 0, 3, 1)), wrap_pixels(np.full((99, 99, 3), 255, np.uint8))
    )
    assert [[line.text for line in answer.lines] for answer in together] == [SHORT] * 4 + [[]]


def test_orientation_does_not_change_how_an_upright_page_is_read(
    read_alone: Callable[[int], Ocr], turning: OcrStage
) -> None:
    seeds = [PAGES[place] for place in (1, 3)]
    assert read(turning, *map(draw_half, seeds)) == [*map(read_alone, seeds)]


def test_lines_below_the_text_score_are_dropped(
    half: OcrStage, read_alone: Callable[[int], Ocr], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = read_alone(PAGES[2]).lines
    least = sorted(line.score for line in lines)[2]
    monkeypatch.setattr(half, "options", OcrOptions(text_score=least, **HALF))
    assert read(half, draw_half(PAGES[2]))[0].lines == [line for line in lines if line.score >= least]


def test_the_error_for_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r'box_tresh: unknown key; did you mean "box_threshold"'):
        build_stage(box_tresh=0.5)


def test_weights_for_other_roles_are_refused() -> None:
    stage = OcrStage(StageSpec("ocr", "ppocr", files={"detection": str(weight_files()["det"])}), "cpu")
    with pytest.raises(WeightsError, match="must be det and rec, but these are given: detection"):
        stage.load()


def to_cuda(image: Image) -> Image:
    return Image(image.data, image.width, image.height, pixels_of([image])[0].cuda())


@pytest.fixture(scope="module")
def cpu_pairs(stage: OcrStage) -> list[tuple[Image, Ocr]]:
    """Pages, and what the CPU reads on them. On page 19, of 90×60 pixels, bfloat16 finds one more box."""
    images = [draw_page(seed) for seed in range(19)]
    return list(zip(images, read(stage, *images), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("dtype", "equal", "pixels"),
    # Of bfloat16's 8 bits boxes lose a pixel more.
    [("float32", 1.0, 1), ("float16", 0.99, 2), ("bfloat16", 0.98, 3)],
)
def test_a_gpu_reads_what_the_cpu_reads(
    dtype: str, equal: float, pixels: int, cpu_pairs: list[tuple[Image, Ocr]]
) -> None:
    answers = read(build_stage("cuda", dtype), *[to_cuda(image) for image, _ in cpu_pairs])
    pairs = [(ours, theirs) for ours, (_, theirs) in zip(answers, cpu_pairs, strict=True)]
    lines = [pair for ours, theirs in pairs for pair in zip(ours.lines, theirs.lines, strict=True)]
    assert sum(ours.text == theirs.text for ours, theirs in lines) >= equal * len(lines)
    assert (
        np.abs(np.array([ours.box for ours, _ in lines]) - [theirs.box for _, theirs in lines]).max()
        <= pixels
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batch_mates_change_no_answer_on_a_gpu() -> None:
    stage, images = build_stage("cuda"), [to_cuda(draw_page(seed)) for seed in range(8)]
    for together, image in zip(read(stage, *images), images, strict=True):
        alone = read(stage, image)[0]
        assert [(line.text, line.box) for line in together.lines] == [
            (line.text, line.box) for line in alone.lines
        ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gpu_marks_the_lines_that_the_cpu_marks_and_reads_turned_pages(dtype: str, stage: OcrStage) -> None:
    pages = [draw_lines(READ), draw_lines(UNREAD), draw_page(3)]
    marks = [[line.guessed for line in answer.lines] for answer in read(stage, *pages)]
    upright, turning = build_stage("cuda", dtype), build_stage("cuda", dtype, orientation=True)
    for answers in (read(upright, *map(to_cuda, pages)), [read(upright, to_cuda(page))[0] for page in pages]):
        assert [[line.guessed for line in answer.lines] for answer in answers] == marks
    turned = read(turning, *[to_cuda(draw_lines(READ, turns)) for turns in range(4)])
    assert [[line.text for line in answer.lines] for answer in turned] == [READ] * 4
