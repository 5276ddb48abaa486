"""The scenes' truth is exact, their bins are safe from a few pixels, and the same seed gives the same bytes."""

from __future__ import annotations

import io
import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from stages.scenes.composition import Arranger, Draft, choose_members
from stages.scenes.drawing import COLORS
from stages.scenes.generator import (
    Scene,
    encode_scene,
    make_scene,
    make_standard,
    standard_job,
    write_samples,
)
from stages.scenes.shapes import LABELS, Finish, Sprite, draw_object
from stages.scenes.truth import (
    TAGS,
    TEXT_KINDS,
    TRUTH,
    VOCABULARY,
    Truth,
    read_truth,
)

COUNT = 300


@pytest.fixture(scope="module")
def miniatures() -> list[Scene]:
    return [make_scene(3, index, max_side=160) for index in range(COUNT)]


@pytest.fixture(scope="module")
def truths(miniatures: list[Scene]) -> list[Truth]:
    return [scene.truth for scene in miniatures]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    """Full-size scenes of every kind."""
    return [make_scene(4, index) for index in range(40)]


# Determinism.


def test_the_same_seed_and_index_give_the_same_bytes() -> None:
    for index in range(12):
        assert encode_scene(make_scene(7, index)) == encode_scene(make_scene(7, index))


def test_a_scene_does_not_depend_on_those_made_before() -> None:
    alone = encode_scene(make_scene(7, 30))
    for index in (3, 29, 31):
        make_scene(7, index)
    assert encode_scene(make_scene(7, 30)) == alone


def test_other_seeds_and_indices_give_other_scenes() -> None:
    files = {
        encode_scene(make_scene(seed, index))[1] for seed, index in itertools.product(range(3), range(8))
    }
    assert len(files) == 24


# Truth against pixels.


PLAIN = Finish(outline=0, shadow=0, shadow_angle=0, gloss=0, round_gloss=False)


def find_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    x, y, width, height = cv2.boundingRect(mask.astype(np.uint8))
    return x, y, x + width, y + height


@pytest.mark.parametrize("label", LABELS)
def test_only_the_pixels_of_the_mask_are_drawn(label: str) -> None:
    canvas, owners = np.full((300, 400, 3), 255, np.uint8), np.zeros((300, 400), np.uint8)
    draw_object(canvas, owners, 5, Sprite(label, "blue", 180, 140, 90, 12, 1), COLORS["blue"], PLAIN)
    changed = canvas.min(axis=2) < 200
    assert np.abs(np.subtract(find_box(changed), find_box(owners == 5))).max() <= 1
    assert np.count_nonzero(changed != (owners == 5)) < 0.05 * np.count_nonzero(changed)


@pytest.mark.parametrize("label", LABELS)
def test_a_box_is_tight_round_its_object(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels that painting the object changed are those in its box, to one pixel."""
    monkeypatch.setattr("stages.scenes.composition.choose_finish", lambda _: PLAIN)
    draft = Draft(random.Random(label), 640, 480, scale=0.75)
    draft.paint_backdrop(("yellow",))
    before = draft.pixels.copy()
    draft.paint_objects([Sprite(label, "yellow", 300, 210, 80, 20, -0.95)])
    changed = np.abs(draft.pixels.astype(int) - before).max(axis=2) > 8
    assert np.abs(np.subtract(find_box(changed), draft.objects[0].box)).max() <= 1


def test_a_box_holds_only_what_is_seen_of_a_covered_object() -> None:
    draft = Draft(random.Random(1), 640, 480)
    draft.paint_backdrop()
    square = Sprite("square", "red", 300, 200, 100, 0, 1)
    draft.paint_objects([square, replace(square, x=420, color="blue", radius=120)])
    assert draft.objects[0].box[0] == pytest.approx(220, abs=9)  # an outline may add to it
    assert draft.objects[0].box[2] == draft.objects[1].box[0] == pytest.approx(324, abs=9)


def test_boxes_lie_inside_the_image(truths: list[Truth], scenes: list[Scene]) -> None:
    for truth in truths + [scene.truth for scene in scenes]:
        for thing in truth.objects:
            x0, y0, x1, y1 = thing.box
            assert 0 <= x0 < x1 <= truth.width, truth.file
            assert 0 <= y0 < y1 <= truth.height, truth.file
        for line in truth.lines:
            assert all(0 <= x <= truth.width and 0 <= y <= truth.height for x, y in line.box), truth.file


def test_there_is_ink_in_every_line_and_it_is_high_enough_to_read(scenes: list[Scene]) -> None:
    seen = 0
    for scene in scenes:
        shrunk = max(1.0, min(scene.pixels.shape[:2]) / 736)
        for line in scene.truth.lines:
            (x0, y0), (x1, y1) = np.min(line.box, axis=0), np.max(line.box, axis=0)
            window = scene.pixels[int(y0) : int(y1) + 1, int(x0) : int(x1) + 1].astype(int)
            assert np.percentile(window, 99) - np.percentile(window, 1) > 90, line
            if any(letter.isupper() or letter.isdigit() for letter in line.text):
                assert np.linalg.norm(np.subtract(line.box[3], line.box[0])) / shrunk >= 14, line
            seen += 1
    assert seen > 100


def test_no_object_is_hidden_more_than_a_quarter() -> None:
    overlaps = 0
    for seed in range(60):
        rng = random.Random(seed)
        sprites = Arranger(rng, 800, 600, (0, 0, 800, 600)).arrange(choose_members(rng, 8, 4), (0.17, 0.23))
        masks = [draw_mask(sprite) for sprite in sprites]
        for number, mask in enumerate(masks):
            covers = np.any(masks[number + 1 :], axis=0) if number + 1 < len(masks) else np.zeros_like(mask)
            hidden = np.count_nonzero(mask & covers) / np.count_nonzero(mask)
            overlaps += bool(hidden > 0)
            assert hidden <= 0.25, (seed, sprites[number])
    assert overlaps > 0


def draw_mask(sprite: Sprite) -> np.ndarray:
    mask = np.zeros((600, 800), np.uint8)
    for _, parts in sprite.layers():
        cv2.fillPoly(mask, [part.round().astype(np.int32) for part in parts], 1)
    return mask.astype(bool)


# Bins.


def measure_dispersion(truth: Truth) -> float:
    centers = np.array(
        [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in (thing.box for thing in truth.objects)]
    )
    return float(np.prod(np.ptp(centers, axis=0))) / (truth.width * truth.height) if len(centers) else 0.0


def measure_text(truth: Truth) -> float:
    area = sum(cv2.contourArea(np.array(line.box, np.float32)) for line in truth.lines)
    return area / (truth.width * truth.height)


def test_the_bin_follows_the_rule(truths: list[Truth]) -> None:
    for truth in truths:
        many_words = len(truth.lines) > 2 or measure_text(truth) > 0.2
        classes = {thing.label for thing in truth.objects}
        rich = len(classes) > 3 or len(truth.objects) > 5 or measure_dispersion(truth) > 0.3
        assert truth.bin == ("A" if many_words else "B" if rich else "C"), truth.file


def test_a_few_pixels_never_decide_a_bin(truths: list[Truth]) -> None:
    for truth in truths:
        assert len(truth.lines) <= 1 or len(truth.lines) >= 5, truth.file
        if len(truth.lines) <= 1:
            assert measure_text(truth) < 0.12, truth.file
            assert not 0.26 < measure_dispersion(truth) < 0.34, truth.file


def test_bins_and_kinds_are_well_represented(truths: list[Truth]) -> None:
    bins = Counter(truth.bin for truth in truths)
    assert min(bins["A"], bins["B"], bins["C"]) >= COUNT / 4
    kinds = Counter(truth.kind for truth in truths)
    assert set(kinds) == {"photo", "empty", *TEXT_KINDS}
    assert min(kinds.values()) >= 0.03 * COUNT


def test_labels_and_colors_are_balanced(truths: list[Truth]) -> None:
    for names, known in (
        (Counter(thing.label for truth in truths for thing in truth.objects), LABELS),
        (Counter(thing.color for truth in truths for thing in truth.objects), COLORS),
    ):
        fair = sum(names.values()) / len(known)
        assert set(names) == set(known)
        assert 0.6 * fair < min(names.values()) <= max(names.values()) < 1.5 * fair


# Captions and tags.


def count_groups(truth: Truth) -> set[tuple[int, str, str]]:
    counts = Counter((thing.color, thing.label) for thing in truth.objects)
    return {(count, color, label) for (color, label), count in counts.items()}


def test_the_captions_are_all_true_captions_of_the_grammar(truths: list[Truth]) -> None:
    expected = {0: 1, 1: 1, 2: 2, 3: 6, 4: 24, 5: 60}
    for truth in truths:
        groups = len(count_groups(truth)) if truth.kind == "photo" else 0
        assert len(set(truth.captions)) == len(truth.captions) == expected[groups]


def test_the_vocabulary_holds_every_word_of_every_caption(truths: list[Truth]) -> None:
    said = {word.strip(",") for truth in truths for caption in truth.captions for word in caption.split()}
    assert said <= set(VOCABULARY)
    assert len(VOCABULARY) < 150


def test_tags_are_known_and_the_main_one_is_first(truths: list[Truth]) -> None:
    for truth in truths:
        assert set(truth.tags) <= set(TAGS)
        assert len(truth.tags) == len(set(truth.tags))
        if truth.kind in TEXT_KINDS:
            assert truth.tags[0] == truth.kind
        elif truth.objects:
            areas: Counter[str] = Counter()
            for thing in truth.objects:
                areas[thing.label] += (thing.box[2] - thing.box[0]) * (thing.box[3] - thing.box[1])
            assert areas[truth.tags[0]] == max(areas.values())


# Files.


def test_a_viewer_that_applies_exif_shows_the_truth(miniatures: list[Scene], scenes: list[Scene]) -> None:
    seen = set()
    for scene in scenes[:8] + miniatures[:60]:
        name, data = encode_scene(scene)
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert image.size == (scene.truth.width, scene.truth.height)
        assert scene.pixels.shape == (scene.truth.height, scene.truth.width, 3)
        assert np.abs(np.asarray(image.convert("RGB")).astype(int) - scene.pixels).mean() < 12, name
        seen.add(scene.truth.orientation)
    assert seen == set(range(1, 9))


def test_sizes_and_formats_vary_within_their_bounds(miniatures: list[Scene], scenes: list[Scene]) -> None:
    sides = [side for scene in scenes for side in scene.pixels.shape[:2]]
    assert min(sides) >= 320
    assert max(sides) <= 2000
    assert any(scene.truth.width > scene.truth.height for scene in scenes)
    assert any(scene.truth.width < scene.truth.height for scene in scenes)
    formats = Counter(scene.format for scene in miniatures)
    assert set(formats) == {"JPEG", "PNG", "WEBP"}
    assert formats["JPEG"] > 0.75 * COUNT


def test_a_miniature_shows_the_same_objects() -> None:
    for index in range(20):
        large, small = make_scene(2, index).truth, make_scene(2, index, max_side=320).truth
        assert max(small.width, small.height) <= 320
        assert (small.captions[:1], small.bin) == (large.captions[:1], large.bin)
        ratio = large.width / small.width
        for one, two in zip(large.objects, small.objects, strict=True):
            assert np.allclose(one.box, np.array(two.box) * ratio, atol=2 * ratio)


def test_samples_are_written_with_their_truth_in_order(tmp_path: Path) -> None:
    progress: list[int] = []
    write_samples(tmp_path, 12, seed=8, progress=progress.append)
    truths = read_truth(tmp_path / TRUTH)
    assert progress == list(range(1, 13))
    assert {path.name for path in tmp_path.iterdir()} == {TRUTH, *(truth.file for truth in truths)}
    for index, truth in enumerate(truths):
        assert (truth.file, (tmp_path / truth.file).read_bytes()) == encode_scene(make_scene(8, index))


def test_a_second_run_adds_to_the_truth_and_repeats_nothing(tmp_path: Path) -> None:
    write_samples(tmp_path, 3, seed=1)
    write_samples(tmp_path, 5, seed=1)
    write_samples(tmp_path, 2, seed=2)
    files = [truth.file for truth in read_truth(tmp_path / TRUTH)]
    assert len(files) == len(set(files)) == 7


def test_several_processes_write_what_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path / "one", 6, seed=5)
    monkeypatch.setattr("stages.scenes.generator.WORTH_A_PROCESS", 3)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    write_samples(tmp_path / "two", 6, seed=5)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_standard_job_has_the_promised_images(tmp_path: Path) -> None:
    standard_job(tmp_path, 8, seed=1)
    files = [tmp_path / truth.file for truth in read_truth(tmp_path / TRUTH)]
    assert len({file.read_bytes() for file in files}) == 8
    assert 220_000 < np.mean([file.stat().st_size for file in files]) < 300_000
    for file in files:
        with Image.open(file) as image:
            assert (image.format, image.size) == ("JPEG", (1280, 960))


def test_every_image_of_the_standard_job_has_twelve_lines_and_some_objects() -> None:
    for truth in [make_standard(4, index).truth for index in range(12)]:
        assert len(truth.lines) == 12
        assert 1 <= len(truth.objects) <= 3
        assert truth.bin == "A"
