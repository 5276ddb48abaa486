"""The trainer learns, resumes exactly, accumulates as one large batch, and backs off when memory is full."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stages.training import mini
from stages.training.cache import draw, share_tags, tell_example
from stages.training.dataset import MOST_SPOTS, NO_SPOT, Examples, change, pack_spots
from stages.training.examples import Example, Spot, write_examples
from stages.training.hardware import probe_batch
from stages.training.job import FINAL, WEIGHTS, forget_training
from stages.training.learners import BlipBatches, BlipLearner, ClipBatches, ClipLearner, Grounding
from stages.training.recipe import describe_progress
from stages.training.schedule import LearningRates
from stages.training.trainer import (
    CHECKPOINTS,
    LOG,
    ResumeError,
    Trainer,
    TrainerSettings,
    find_checkpoint,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

COUNT = 64
NAMES = (16, 11)
TINY = mini.Sizes(
    image_size=32,
    clip_patch=8,
    clip_vision=mini.layers(2, 32, 64, 2),
    clip_text=mini.layers(1, 32, 64, 2),
    embedding=32,
    blip_patch=8,
    blip_vision=mini.layers(2, 32, 64, 2),
    blip_text=mini.layers(1, 32, 64, 2),
)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    """64 scenes at 32 pixels."""
    folder = tmp_path_factory.mktemp("examples")
    drawn = [draw(11, index, ((64, 1.0),)) for index in range(COUNT)]
    told = [tell_example(truth, Random(0)) for _, truth in drawn]
    write_examples(folder, [pixels for pixels, _ in drawn], told, TINY.image_size)
    return Examples(folder, torch.device("cpu"))


def make_blip(examples: Examples) -> tuple[BlipLearner, BlipBatches]:
    torch.manual_seed(0)
    models = mini.make_models(1, mini.Vocabulary.of_scenes(), TINY)
    return BlipLearner(models.blip, NAMES), BlipBatches(examples, models.blip_tokenizer)


def make_clip(examples: Examples) -> tuple[ClipLearner, ClipBatches]:
    torch.manual_seed(0)
    models = mini.make_models(1, mini.Vocabulary.of_scenes(), TINY)
    batches = ClipBatches(examples, models.clip_tokenizer, models.vocabulary.labels)
    return ClipLearner(models.clip, batches.prompts, NAMES), batches


def read_losses(folder: Path) -> list[float]:
    return [msgspec.json.decode(line)["loss"] for line in (folder / LOG).read_bytes().splitlines()]


SETTINGS = TrainerSettings(batch_size=16, steps=8, log_every=1, checkpoint_every=3, learning_rate=3e-3)


# Learning.


@pytest.mark.parametrize("make", [make_blip, make_clip])
def test_the_loss_falls_on_a_few_scenes(make, examples: Examples, tmp_path: Path) -> None:
    trainer = Trainer(
        *make(examples), msgspec.structs.replace(SETTINGS, steps=40, checkpoint_every=0), tmp_path
    )
    trainer.run()
    losses = read_losses(tmp_path)
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@pytest.mark.parametrize("make", [make_blip, make_clip])
def test_every_weight_is_learned(make, examples: Examples) -> None:
    """A weight without a gradient would stop data parallel training."""
    learner, batches = make(examples)
    learner.train()(batches.take(np.arange(8), np.random.default_rng(0)))["loss"].backward()
    assert [name for name, weight in learner.named_parameters() if weight.grad is None] == []


# Resuming.


@pytest.mark.parametrize("make", [make_blip, make_clip])
def test_a_run_that_was_killed_and_resumed_has_the_curve_of_one_that_was_not(
    make, examples: Examples, tmp_path: Path
) -> None:
    Trainer(*make(examples), SETTINGS, tmp_path / "whole").run()
    # two steps after its last checkpoint
    Trainer(*make(examples), SETTINGS, tmp_path / "killed").run(stop_after=5)
    resumed = Trainer(*make(examples), SETTINGS, tmp_path / "killed")
    resumed.run(resume=True)
    assert read_losses(tmp_path / "killed") == read_losses(tmp_path / "whole")
    assert len(read_losses(tmp_path / "whole")) == SETTINGS.steps


class Dropped(nn.Module):
    """Draws from torch's own random numbers at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": (nn.functional.dropout(batch["values"], 0.5) @ self.weight).pow(2).mean()}


@dataclass
class Values:
    count: int = 32

    def __len__(self) -> int:
        return self.count

    def take(self, places: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        return {"values": torch.from_numpy(places[:, None] / 32 + rng.random((len(places), 4))).float()}


def test_torchs_random_numbers_are_resumed_too(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path / "whole").run()
    Trainer(Dropped(), Values(), SETTINGS, tmp_path / "killed").run(stop_after=4)
    torch.rand(100)
    Trainer(Dropped(), Values(), SETTINGS, tmp_path / "killed").run(resume=True)
    assert read_losses(tmp_path / "killed") == read_losses(tmp_path / "whole")


def test_a_line_of_the_log_that_was_torn_is_passed_over(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=4)
    with (tmp_path / LOG).open("ab") as log:
        log.write(b'{"step":5,"epo')
    assert describe_progress("clip", tmp_path / LOG).startswith("clip 50% loss")
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(resume=True)
    assert len(read_losses(tmp_path)) == SETTINGS.steps


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[str](), os.fsync

    def record(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", record)
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=3)
    whole, folder = find_checkpoint(tmp_path), tmp_path / CHECKPOINTS
    assert whole is not None
    part = folder / f".{whole.name}"
    files = {str(part / path.relative_to(whole)) for path in whole.rglob("*")}
    assert len(files) > 3
    assert set(synced[:-2]) == files
    assert synced[-2:] == [str(part), str(folder)]


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=3)
    whole = find_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "step-00000006").mkdir()
    assert whole is not None
    assert whole.name == "step-00000003"
    assert find_checkpoint(tmp_path) == whole


def test_another_seed_does_not_resume_a_run(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=3)
    with pytest.raises(ResumeError, match="seed 1"):
        Trainer(Dropped(), Values(), msgspec.structs.replace(SETTINGS, seed=2), tmp_path).run(resume=True)


def test_after_a_new_start_the_new_run_is_resumed_and_not_the_earlier_one(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run()
    Trainer(Dropped(), Values(), SETTINGS, tmp_path).run(stop_after=5)
    last = find_checkpoint(tmp_path)
    assert last is not None
    assert last.name == "step-00000003"


def test_a_new_training_removes_the_weights_of_the_earlier_one(tmp_path: Path) -> None:
    for name in (FINAL, WEIGHTS, CHECKPOINTS):
        (tmp_path / name / "deep").mkdir(parents=True)
    forget_training(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    Trainer(Dropped(), Values(), msgspec.structs.replace(SETTINGS, checkpoint_every=1), tmp_path).run()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000007",
        "step-00000008",
    ]


def test_slow_steps_are_kept_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = msgspec.structs.replace(SETTINGS, checkpoint_every=1000)
    Trainer(Dropped(), Values(), settings, tmp_path / "quick").run(stop_after=5)
    assert not (tmp_path / "quick" / "checkpoints").exists()
    monkeypatch.setattr("stages.training.trainer.CHECKPOINT_SECONDS", 0.0)
    Trainer(Dropped(), Values(), settings, tmp_path / "slow").run(stop_after=5)
    assert sorted(path.name for path in (tmp_path / "slow" / "checkpoints").iterdir())[-1] == "step-00000005"


# Batches.


def test_accumulated_gradients_are_those_of_the_large_batch(examples: Examples, tmp_path: Path) -> None:
    weights = []
    for micro in (16, 4):
        learner, batches = make_blip(examples)
        batches.examples.mirrors[:] = False
        settings = msgspec.structs.replace(SETTINGS, steps=3, micro_batch=micro, learning_rate=1e-3)
        Trainer(learner, Unchanged(batches), settings, tmp_path / str(micro)).run()
        weights.append(torch.cat([weight.detach().flatten() for weight in learner.parameters()]))
    assert torch.allclose(*weights, atol=2e-4)
    assert read_losses(tmp_path / "16") == pytest.approx(read_losses(tmp_path / "4"), rel=1e-4)


@dataclass
class Unchanged:
    """An example has the same random changes in whichever pass it is."""

    batches: BlipBatches

    def __len__(self) -> int:
        return len(self.batches)

    def take(self, places: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
        parts = [
            self.batches.take(places[i : i + 1], np.random.default_rng(int(places[i])))
            for i in range(len(places))
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_a_pass_divides_its_share_of_the_batch(tmp_path: Path) -> None:
    trainer = Trainer(
        Dropped(), Values(), msgspec.structs.replace(SETTINGS, batch_size=12, micro_batch=5), tmp_path
    )
    trainer.run()
    assert (trainer.batch_size, trainer.micro_batch, trainer.accumulation) == (12, 4, 3)


def test_more_examples_in_a_batch_than_there_are_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lower batch_size"):
        Trainer(Dropped(), Values(8), SETTINGS, tmp_path).run()


def test_a_batch_of_less_than_an_example_for_each_process_is_an_error_that_says_so(tmp_path: Path) -> None:
    trainer = Trainer(Dropped(), Values(), msgspec.structs.replace(SETTINGS, batch_size=4), tmp_path)
    trainer.processes = 8
    with pytest.raises(ValueError, match=r"batch_size 4 .* each of 8 processes"):
        trainer.run()


@pytest.mark.parametrize(
    ("room", "most", "least_found"), [(100, 1000, 88), (1000, 64, 64), (5, 64, 4), (8, 64, 8)]
)
def test_the_probe_fills_the_memory_and_backs_off(room: int, most: int, least_found: int) -> None:
    asked: list[int] = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count <= room

    found = probe_batch(fits, 8, most)
    assert least_found <= found <= min(room, most)
    assert len(asked) < 12


def test_the_probe_says_when_nothing_fits() -> None:
    with pytest.raises(MemoryError, match="batch of one"):
        probe_batch(lambda _: False, 8, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_batch_too_large_for_the_gpu_does_not_fit(tmp_path: Path) -> None:
    class Greedy(Dropped):
        def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            torch.empty(len(batch["values"]) << 33, dtype=torch.uint8, device=self.weight.device)
            return super().forward(batch)

    class OnGpu(Values):
        def take(self, places: np.ndarray, rng: np.random.Generator) -> dict[str, Tensor]:
            return {name: tensor.cuda() for name, tensor in super().take(places, rng).items()}

    trainer = Trainer(Greedy(), OnGpu(), SETTINGS, tmp_path)
    assert trainer._fits(1)
    assert not trainer._fits(1000)


# The schedule.


def test_a_schedule_warms_up_and_ends_at_nothing() -> None:
    schedule, factors = LearningRates(100, 0, 0.1), []
    while not schedule.done:
        factors.append(schedule.factor)
        schedule.advance()
    assert len(factors) == 100
    assert factors.index(max(factors)) == 10
    assert 0 < factors[0] < 0.2
    assert schedule.factor == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("steps", [0, 100_000])
def test_a_budget_of_seconds_ends_a_training_that_would_take_longer(steps: int) -> None:
    schedule = LearningRates(steps, 10.0, 0.1)
    while not schedule.done:
        schedule.advance()
        schedule.keep_time(elapsed=0.05 * schedule.step)
    assert schedule.step * 0.05 == pytest.approx(10.0, rel=0.05)


def test_a_training_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        LearningRates(0, 0, 0.1)


# Examples.


def test_a_spot_follows_its_pixel_when_the_image_is_changed() -> None:
    pixels, spots = torch.zeros(40, 3, 64, 64), torch.zeros(40, MOST_SPOTS, 5)
    spots[..., :3] = NO_SPOT
    for place in range(40):
        x, y = 8 + place, 50 - place
        pixels[place, :, y - 1 : y + 2, x - 1 : x + 2] = 1
        spots[place, 0] = torch.tensor([1, 2, 0, (x + 0.5) / 64, (y + 0.5) / 64])
    changed = change(pixels, spots, np.ones(40, bool), np.random.default_rng(3))
    moved = 0
    for image, spot in zip(changed["pixels"], changed["spots"][:, 0], strict=True):
        y, x = divmod(int(image[0].flatten().argmax()), 64)
        assert abs((x + 0.5) / 64 - spot[3]) < 2.5 / 64
        assert abs((y + 0.5) / 64 - spot[4]) < 2.5 / 64
        moved += 1
    assert moved == 40
    assert (changed["spots"][:, 0, 3] - spots[:, 0, 3]).abs().max() > 0.2  # some are mirrored


def test_no_more_spots_are_passed_than_a_model_can_take() -> None:
    packed = pack_spots([Example("", [""], {}, [Spot(1, 2, 12, 0.5, 0.5)] * 12), Example("", [""])])
    assert packed.shape == (2, MOST_SPOTS, 5)
    assert (packed[0, :, 0] == 1).all()
    assert (packed[1, :, :3] == NO_SPOT).all()


def test_the_main_tag_has_the_largest_share() -> None:
    for index in range(60):
        truth = draw(5, index, ((96, 1.0),))[1]
        shares = share_tags(truth)
        assert max(shares, key=lambda tag: shares[tag]) == truth.tags[0], truth.file
        assert set(shares) == set(truth.tags)
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)


def test_images_of_the_same_captions_have_the_same_key() -> None:
    truths = [draw(5, index, ((96, 1.0),))[1] for index in range(80)]
    told = [tell_example(truth, Random(0)) for truth in truths]
    for truth, example in zip(truths, told, strict=True):
        assert set(example.captions) <= set(truth.captions)
        assert example.captions[0] == truth.captions[0]
        for other, another in zip(truths, told, strict=True):
            assert (example.key == another.key) == (set(truth.captions) == set(other.captions))


# Learners.


def test_grounding_has_no_loss_if_every_patch_is_right() -> None:
    head = Grounding(hidden=37, labels=16, colors=11)
    head.head = nn.Identity()  # type: ignore[assignment]
    patches, spots = torch.full((1, 16, 37), -20.0), torch.zeros(1, MOST_SPOTS, 5)
    spots[..., :3] = NO_SPOT
    spots[0, 0] = torch.tensor([3, 4, 1, 0.3, 0.9])  # the patch in row 3, column 1
    right = patches.clone()
    right[0, 13, [0, 1 + 3, 17 + 4, 28 + 1]] = 20
    assert head(right, spots) < 1e-3
    assert head(patches, spots) > 5


def test_images_that_share_their_captions_are_no_negatives(examples: Examples) -> None:
    learner, _ = make_clip(examples)
    same = torch.eye(4)[[0, 0, 1, 2]]
    assert learner.contrast(same, same, torch.tensor([7, 7, 8, 9]), torch.tensor(50.0)) < 1
    assert learner.contrast(same, same, torch.tensor([7, 7, 8, 9]), torch.tensor(50.0)) == pytest.approx(
        float(torch.tensor(2.0).log()) / 2, abs=1e-3
    )


def test_blip_learns_the_tokens_its_stage_says(examples: Examples) -> None:
    """From [DEC] to [SEP], as the captioner begins and ends."""
    _, batches = make_blip(examples)
    models = mini.make_models(1, mini.Vocabulary.of_scenes(), TINY)
    text = models.blip.config.text_config
    for row, truth in zip(batches.tokens, examples.truths, strict=True):
        ids = row[row != text.pad_token_id]
        assert (int(ids[0]), int(ids[-1])) == (text.bos_token_id, text.sep_token_id)
        assert models.blip_tokenizer.decode(ids[1:-1]) == truth.captions[0]
        assert len(ids) - 1 <= 20  # what the BLIP stage generates at most
