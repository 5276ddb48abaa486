"""The stages run exactly what was trained: the same pixels, the same tokens, the same weights."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip
from stages.contract.base import Image
from stages.contract.manifest import MANIFEST, Manifest, PackError, read_manifest
from stages.registry import registry
from stages.scenes.composition import compose_crowded
from stages.scenes.generator import TOTALS, choose_recipe
from stages.scenes.truth import Truth
from stages.weights import published
from stages.weights.packs import Pack, open_pack, resolve_all, verify
from stages.yolo.descriptor import Objects
from tests.minipack.blank import make_blank_pack
from tests.minipack.test_learners import NAMES, TINY
from visiond.training.log import draw_curves
from visiond.training.settings import LOG, TrainerSettings
from visiond.training.trainer import Trainer
from visiond_mini import mini
from visiond_mini.cache import LESSON_TOTALS, CachePlan, draw, fit_square, tell_example, write_cache
from visiond_mini.card import Card, Training, read_card, read_training, write_card
from visiond_mini.dataset import Examples
from visiond_mini.examples import EXAMPLES, Example, write_examples, write_lines
from visiond_mini.job import FINAL
from visiond_mini.learners import BlipBatches, BlipLearner, ClipBatches, ClipLearner
from visiond_mini.options import Options, parse_options
from visiond_mini.recipe import (
    TrainingFailed,
    describe_progress,
    list_jobs,
    pack_models,
    train_mini,
    watch,
)

COUNT = 12
STAGES = ("yolo", "clip", "blip")


@pytest.fixture(scope="module")
def scenes() -> list[tuple[np.ndarray, Truth]]:
    """Scenes with different captions and first tags."""
    found: dict[str, tuple[np.ndarray, Truth]] = {}
    for index in range(300):
        pixels, truth = draw(5, index, ((160, 1.0),))
        found.setdefault(truth.tags[0], (pixels, truth))
        if len(found) == COUNT:
            break
    return list(found.values())


@pytest.fixture(scope="module")
def pack(scenes: list[tuple[np.ndarray, Truth]], tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """CLIP and BLIP that know twelve scenes by heart."""
    folder = tmp_path_factory.mktemp("recipe")
    told = [tell_example(truth, Random(0)) for _, truth in scenes]
    write_examples(folder / "examples", [pixels for pixels, _ in scenes], told, TINY.image_size)
    examples = Examples(folder / "examples", torch.device("cpu"))
    models = mini.make_models(1, published.Vocabulary.of_scenes(), TINY)
    settings = TrainerSettings(
        batch_size=COUNT, steps=100, learning_rate=5e-3, checkpoint_every=0, weight_decay=0
    )
    blip = BlipLearner(models.blip, NAMES)
    Trainer(blip, BlipBatches(examples, models.blip_tokenizer), settings, folder / "blip").run()
    batches = ClipBatches(examples, models.clip_tokenizer, models.vocabulary.labels)
    clip = ClipLearner(models.clip, batches.prompts, NAMES)
    Trainer(clip, batches, settings, folder / "clip").run()
    for learner in (blip, clip):
        learner.eval()
    published.save_models(models, folder / "pack", Manifest(name="learned", trained=True, notice="a notice"))
    return open_pack(folder / "pack", folder)


@pytest.fixture(scope="module")
def images(pack: Pack, scenes: list[tuple[np.ndarray, Truth]]) -> list[Image]:
    """The same scenes with the stages' results."""
    tensors = [torch.from_numpy(pixels).permute(2, 0, 1).contiguous() for pixels, _ in scenes]
    images = [Image(memoryview(b""), part.shape[2], part.shape[1], part) for part in tensors]
    for spec in resolve_all(pack, STAGES, {}):
        stage = registry.build(spec, "cpu")
        stage.load()
        for image, result in zip(images, stage.run(images), strict=True):
            assert isinstance(result, Objects | Clip | Caption)
            image.results[stage.name] = result
    return images


def test_a_pack_is_written_whole(pack: Pack) -> None:
    verify(pack)
    assert pack.manifest.trained
    assert pack.notice == "a notice"


def test_the_stages_say_what_was_learned(images: list[Image], scenes: list[tuple[np.ndarray, Truth]]) -> None:
    captions = [cast(Caption, image.results["blip"]) for image in images]
    tags = [cast(Clip, image.results["clip"]) for image in images]
    pairs = [(caption.text, truth.captions[0]) for caption, (_, truth) in zip(captions, scenes, strict=True)]
    assert sum(said == true for said, true in pairs) >= 0.8 * COUNT, pairs
    assert (
        sum(clip.tags[0].label == truth.tags[0] for clip, (_, truth) in zip(tags, scenes, strict=True))
        >= 0.8 * COUNT
    )


def test_a_caption_is_like_its_own_image(images: list[Image]) -> None:
    likeness = [cast(Any, image.results["blip"]).similarity for image in images]
    assert np.mean(likeness) > 0.4
    assert max(likeness) <= 1


# The cache.


def test_models_learn_from_more_crowded_scenes_than_samples_have() -> None:
    shares = [
        sum(choose_recipe(5, index, totals).compose is compose_crowded for index in range(1000))
        for totals in (TOTALS, LESSON_TOTALS)
    ]
    assert shares == pytest.approx([161, 400], abs=5)


def test_the_cache_holds_the_scenes_of_its_seed(tmp_path: Path) -> None:
    plan = CachePlan(tmp_path, seed=3, scenes=24, edge=48, detector_scenes=12, detector_edge=64)
    assert write_cache(plan) == 24
    lines = (tmp_path / EXAMPLES).read_bytes().splitlines()
    examples = [msgspec.json.decode(line, type=Example) for line in lines]
    assert [example.captions[0] for example in examples] == [draw_caption(plan, index) for index in range(24)]
    pixels = np.load(tmp_path / "pixels.npy", mmap_mode="r")
    assert pixels.shape == (24, 48, 48, 3)
    assert all(pixels[place].std() > 0 for place in range(24))
    images = sorted(path.stem for path in tmp_path.glob("detector/images/*/*.jpg"))
    assert images == sorted(path.stem for path in tmp_path.glob("detector/labels/*/*.txt"))
    assert 5 <= len(images) <= 12


def test_a_cache_that_is_made_again_is_unfinished_until_it_is_complete(tmp_path: Path) -> None:
    plan = CachePlan(tmp_path, seed=3, scenes=4, edge=16, detector_scenes=0, detector_edge=64)
    write_cache(plan)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_cache(plan, interrupt)
    with pytest.raises(FileNotFoundError, match="no finished examples"):
        Examples(tmp_path, torch.device("cpu"))


def draw_caption(plan: CachePlan, index: int) -> str:
    from visiond_mini.cache import DETECTOR_SIDES, SIDES

    return draw(plan.seed, index, DETECTOR_SIDES if index < plan.detector_scenes else SIDES)[1].captions[0]


def test_a_cache_that_runs_out_of_time_holds_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # each process makes two parts
    plan = CachePlan(
        tmp_path, seed=3, scenes=100_000, edge=16, detector_scenes=0, detector_edge=64, seconds=0.01
    )
    count = write_cache(plan)
    assert 64 <= count < 1_000
    assert len(Examples(tmp_path, torch.device("cpu"))) == count


def test_a_box_stays_on_its_object_in_the_detectors_square() -> None:
    scene = np.zeros((100, 200, 3), np.uint8)
    scene[40:60, 100:140] = 255
    canvas, ratio, left, top = fit_square(scene, 100)
    rows, columns = np.where(canvas.min(axis=2) > 200)
    assert (columns.min(), columns.max() + 1) == (left + 100 * ratio, left + 140 * ratio)
    assert (rows.min(), rows.max() + 1) == (top + 40 * ratio, top + 60 * ratio)


# The recipe.


def test_the_command_line_fills_the_options(tmp_path: Path) -> None:
    options = parse_options(
        ["--out", "/tmp/x/pack", "--only", "clip", "--clip-seconds", "5", "--clip-batch", "32", "--resume"],
    )
    assert (options.only, options.seconds["clip"], options.resume) == (("clip",), 5, True)
    assert options.workdir == Path("/tmp/x/pack-work")
    write_lines(tmp_path, [b""] * 100)
    jobs = list_jobs(options, tmp_path)
    assert list(jobs) == ["clip"]
    assert (jobs["clip"].settings.batch_size, jobs["clip"].settings.seconds) == (32, 5)
    assert jobs["clip"].resume


def test_a_batch_is_no_larger_than_the_scenes_that_there_are(tmp_path: Path) -> None:
    write_lines(tmp_path, [b""] * 10)
    jobs = list_jobs(Options(out=tmp_path, workdir=tmp_path), tmp_path)
    assert {jobs["clip"].settings.batch_size, jobs["blip"].settings.batch_size, jobs["yolo"].batch_size} == {
        10
    }


@pytest.mark.parametrize("option", ["--scenes", "--processes", "--workers", "--blip-batch"])
def test_a_number_of_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--out", str(tmp_path), option, "0"])
    assert f"argument {option}: it must be 1 or more" in capsys.readouterr().err


def test_a_failed_training_is_reported_with_the_end_of_its_output(tmp_path: Path) -> None:
    import subprocess
    import sys

    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "output.txt").write_text("out of paper")
    failed = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    options = Options(out=tmp_path / "out", workdir=tmp_path)
    with pytest.raises(TrainingFailed, match="out of paper"):
        watch(options, {"clip": failed}, lambda _: None)


def test_the_progress_is_that_of_the_last_whole_line_of_the_log(tmp_path: Path) -> None:
    assert describe_progress("clip", tmp_path / LOG) == "clip starts"
    whole = msgspec.json.encode({"step": 4, "progress": 0.5, "loss": 1.25, "images_per_second": 310.4})
    (tmp_path / LOG).write_bytes(whole + b'\n{"step":5,"epo')
    assert describe_progress("clip", tmp_path / LOG) == "clip 50% loss 1.250 at 310 images/s"


SCORES = {
    "scenes": 20,
    "seed": 7,
    "read": 4,
    "map50": 0.876,
    "bins": None,
    "scenes_known": 0.995,
    "photographs": 5,
    "photographs_unknown": 0.8,
    "by_kind": {"photo of 1 group": {"captions_true": 0.95}, "receipt": {"captions_true": 1.0}},
}


def test_the_card_states_scores_sizes_and_limits(pack: Pack, tmp_path: Path) -> None:
    log = pack.folder.parent / "blip" / "log.jsonl"
    write_card(pack.folder, Card({"blip": read_training(log, 1234, 1)}, SCORES))
    text = (pack.folder / "README.md").read_text()
    assert "| YOLO mAP50 | 0.876 | ≥ 0.90 |" in text
    assert "knows only its toy world" in text
    assert "| blip | 1,234 | 1 | 100 | 12 | 1,200 |" in text
    assert "alike in kind and color: 0.95 of 1 group." in text
    assert "; 5 photographs from Python packages" in text
    assert "| scenes that no stage calls unfamiliar | 0.995 | ≥ 0.99 |" in text
    assert "| photographs that every stage calls unfamiliar | 0.800 | ≥ 0.95 |" in text
    verify(pack)
    draw_curves({"blip": log}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_pack_keeps_what_its_card_is_made_of(pack: Pack) -> None:
    told = Card({"clip": Training(scenes=5, seed=1, steps=6, batch_size=7, seconds=8.0, loss=0.5)}, SCORES)
    write_card(pack.folder, told)
    first = (pack.folder / "README.md").read_text()
    assert read_card(pack.folder) == told
    write_card(pack.folder, read_card(pack.folder))
    assert (pack.folder / "README.md").read_text() == first


def test_one_model_is_put_into_a_pack_and_the_others_stay(tmp_path: Path) -> None:
    out, trained = tmp_path / "pack", tmp_path / "work" / "blip" / FINAL
    make_blank_pack(out, seed=1, sizes=TINY)
    before = read_manifest(out / MANIFEST).digests
    mini.make_models(2, published.Vocabulary.of_scenes(), TINY).blip.save_pretrained(trained)
    pack_models(Options(out=out, workdir=tmp_path / "work", only=("blip",)))
    after = read_manifest(out / MANIFEST).digests
    weights = [name for name in before if name.endswith(".safetensors")]
    assert [name for name in weights if after[name] != before[name]] == ["blip/model.safetensors"]


def test_a_folder_that_is_no_pack_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parse_options(["--out", str(tmp_path.parent)])
    assert ending.value.code == 2
    assert f"{tmp_path.parent} is not a pack" in capsys.readouterr().err
    assert parse_options(["--out", str(tmp_path)]).out == tmp_path  # which is empty


def test_training_one_model_needs_a_pack_with_the_others(tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"manifest\.json cannot be read"):
        train_mini(Options(out=tmp_path, workdir=tmp_path, only=("blip",)))
