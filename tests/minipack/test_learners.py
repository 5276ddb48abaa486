"""What CLIP and BLIP learn from scenes: examples become batches, and the trainer makes their losses fall."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stages.weights.published import Vocabulary
from tests.visiond.training.test_trainer import SETTINGS, read_losses
from visiond.training.hardware import TrainingBatches
from visiond.training.trainer import Trainer
from visiond_mini import mini
from visiond_mini.cache import draw, share_tags, tell_example
from visiond_mini.dataset import MOST_SPOTS, NO_SPOT, Examples, change, pack_spots
from visiond_mini.examples import Example, Spot, write_examples
from visiond_mini.learners import BlipBatches, BlipLearner, ClipBatches, ClipLearner, Grounding

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
    models = mini.make_models(1, Vocabulary.of_scenes(), TINY)
    return BlipLearner(models.blip, NAMES), BlipBatches(examples, models.blip_tokenizer)


def make_clip(examples: Examples) -> tuple[ClipLearner, ClipBatches]:
    torch.manual_seed(0)
    models = mini.make_models(1, Vocabulary.of_scenes(), TINY)
    batches = ClipBatches(examples, models.clip_tokenizer, models.vocabulary.labels)
    return ClipLearner(models.clip, batches.prompts, NAMES), batches


# Learning.

Make = Callable[[Examples], tuple[nn.Module, TrainingBatches]]


@pytest.mark.parametrize("make", [make_blip, make_clip])
def test_the_loss_falls_on_a_few_scenes(make: Make, examples: Examples, tmp_path: Path) -> None:
    trainer = Trainer(
        *make(examples), msgspec.structs.replace(SETTINGS, steps=40, checkpoint_every=0), tmp_path
    )
    trainer.run()
    losses = read_losses(tmp_path)
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@pytest.mark.parametrize("make", [make_blip, make_clip])
def test_every_weight_is_learned(make: Make, examples: Examples) -> None:
    """A weight without a gradient would stop data parallel training."""
    learner, batches = make(examples)
    learner.train()(batches.take(np.arange(8), np.random.default_rng(0)))["loss"].backward()
    assert [name for name, weight in learner.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("make", [make_blip, make_clip])
def test_a_run_that_was_killed_and_resumed_has_the_curve_of_one_that_was_not(
    make: Make, examples: Examples, tmp_path: Path
) -> None:
    Trainer(*make(examples), SETTINGS, tmp_path / "whole").run()
    # two steps after its last checkpoint
    Trainer(*make(examples), SETTINGS, tmp_path / "killed").run(stop_after=5)
    resumed = Trainer(*make(examples), SETTINGS, tmp_path / "killed")
    resumed.run(resume=True)
    assert read_losses(tmp_path / "killed") == read_losses(tmp_path / "whole")
    assert len(read_losses(tmp_path / "whole")) == SETTINGS.steps


# Batches.


def test_accumulated_gradients_are_those_of_the_large_batch(examples: Examples, tmp_path: Path) -> None:
    weights = []
    for micro in (16, 4):
        learner, batches = make_blip(examples)
        batches.examples.mirrors[:] = False
        settings = msgspec.structs.replace(SETTINGS, steps=3, micro_batch=micro, learning_rate=1e-3)
        Trainer(learner, Unchanged(batches), settings, tmp_path / str(micro)).run()
        weights.append(torch.cat([weight.detach().flatten() for weight in learner.parameters()]))
    assert torch.allclose(weights[0], weights[1], atol=2e-4)
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
    models = mini.make_models(1, Vocabulary.of_scenes(), TINY)
    text = models.blip.config.text_config
    for row, truth in zip(batches.tokens, examples.truths, strict=True):
        ids = row[row != text.pad_token_id]
        assert (int(ids[0]), int(ids[-1])) == (text.bos_token_id, text.sep_token_id)
        assert models.blip_tokenizer.decode(ids[1:-1]) == truth.captions[0]
        assert len(ids) - 1 <= 20  # what the BLIP stage generates at most
