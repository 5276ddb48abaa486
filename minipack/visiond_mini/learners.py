"""The training of CLIP and BLIP: for each a module that computes losses from a batch, and its batches.

CLIP: Radford et al., 2021, contrastive, image against caption in both directions; besides, image against tag, so that the
main tag ranks first. BLIP: Li et al., 2022, the language modeling loss alone. Both learn sooner when every patch that holds
an object's center also has to predict which object it is (`Grounding`); that head is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BlipForConditionalGeneration, CLIPModel, PreTrainedModel, PreTrainedTokenizerFast

from stages.blip.vision import speed_up_attention
from stages.clip.stage import TEMPLATE
from visiond_mini.dataset import MOST_SPOTS, NO_SPOT, Examples
from visiond_mini.examples import Example

Batch = dict[str, Tensor]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # BLIP's processor uses the same
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
LARGEST_SCALE = 100.0  # of CLIP's logits, as in its paper
GROUNDING_WEIGHT = 0.5
CENTER_WEIGHT = 20.0  # of a patch with a center, against one without: there are far fewer


class Learner(nn.Module):
    """Computes losses from a batch; "loss" is minimized. Only `model` is saved."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, model: PreTrainedModel, names: tuple[int, int] | None) -> None:
        """names: the numbers of labels and colors of the examples' objects; None if they have no spots."""
        super().__init__()
        self.model = model
        self.grounding = Grounding(model.config.vision_config.hidden_size, *names) if names else None
        # Over all processes; set by the trainer.
        self.gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.register_buffer("mean", torch.tensor(CLIP_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(CLIP_DEVIATION).view(3, 1, 1), persistent=False)

    def normalize(self, pixels: Tensor) -> Tensor:
        return (pixels - self.mean) / self.deviation

    def add_grounding(self, losses: dict[str, Tensor], patches: Tensor, spots: Tensor) -> dict[str, Tensor]:
        """patches: [images, patches, dim], in rows from the top left."""
        if self.grounding is not None:
            losses["grounding"] = self.grounding(patches, spots)
            losses["loss"] = losses["loss"] + GROUNDING_WEIGHT * losses["grounding"]
        return losses

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class Grounding(nn.Module):
    """Predicts for every patch whether an object's center is in it, and then its label,
    its color and the size of its group."""

    def __init__(self, hidden: int, labels: int, colors: int) -> None:
        super().__init__()
        self.parts = (1, labels, colors, MOST_SPOTS)
        self.head = nn.Linear(hidden, sum(self.parts))

    def forward(self, patches: Tensor, spots: Tensor) -> Tensor:
        """patches: [images, patches, dim] of a square grid. spots: [images, MOST_SPOTS, 5]. Returns a mean over images."""
        scores = self.head(patches).float()
        side = int(scores.shape[1] ** 0.5)
        cells = (spots[..., 3:] * side).long().clamp_(0, side - 1)
        places = cells[..., 1] * side + cells[..., 0]
        present = spots[..., 0] != NO_SPOT
        center, *_ = scores.split(self.parts, dim=-1)
        wanted = (F.one_hot(places, scores.shape[1]) * present[..., None]).amax(1).float()
        loss = F.binary_cross_entropy_with_logits(
            center[..., 0], wanted, pos_weight=wanted.new_tensor(CENTER_WEIGHT)
        )
        found = scores.gather(1, places[..., None].expand(-1, -1, scores.shape[-1])).split(
            self.parts, dim=-1
        )[1:]
        for part, answers in enumerate(found):
            targets = spots[..., part].long()
            errors = F.cross_entropy(answers.transpose(1, 2), targets, ignore_index=NO_SPOT, reduction="none")
            loss = loss + (errors.sum(1) / present.sum(1).clamp(min=1)).mean()
        return loss


class BlipLearner(Learner):
    """Learns to predict the first caption, each word from those before it."""

    model: BlipForConditionalGeneration

    def __init__(
        self,
        model: BlipForConditionalGeneration,
        names: tuple[int, int] | None = None,
        smoothing: float = 0.0,
    ) -> None:
        super().__init__(model, names)
        self.smoothing = smoothing
        self.padding = model.config.text_config.pad_token_id
        speed_up_attention(model.vision_model)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """batch: pixels, spots, tokens [images, words] from the beginning of text to its end, padded."""
        tokens = batch["tokens"]
        states = self.model.vision_model(pixel_values=self.normalize(batch["pixels"])).last_hidden_state
        scores = self.model.text_decoder(
            input_ids=tokens[:, :-1], encoder_hidden_states=states
        ).logits.float()
        targets = tokens[:, 1:]
        errors = F.cross_entropy(
            scores.transpose(1, 2),
            targets,
            ignore_index=self.padding,
            label_smoothing=self.smoothing,
            reduction="none",
        )
        # First a mean over each caption, so that two half batches count as much as the whole.
        loss = (errors.sum(1) / (targets != self.padding).sum(1)).mean()
        return self.add_grounding({"loss": loss, "caption": loss}, states[:, 1:], batch["spots"])


class ClipLearner(Learner):
    """Learns which caption and which tags belong to an image, compared with those of the other images in its batch.

    These are the images of one forward pass in all processes, so accumulated gradients are not quite those of a large batch.
    """

    model: CLIPModel
    prompts: Tensor

    def __init__(self, model: CLIPModel, prompts: Tensor, names: tuple[int, int] | None = None) -> None:
        """prompts: token ids [tags, words] of the texts for the tags."""
        super().__init__(model, names)
        self.register_buffer("prompts", prompts, persistent=False)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """batch: pixels, spots, tokens [images, words], tags [images, tags] that sum up to 1, keys [images]."""
        model, count = self.model, len(batch["tokens"])
        seen = model.vision_model(pixel_values=self.normalize(batch["pixels"]))
        read = model.text_model(input_ids=torch.cat([batch["tokens"], self.prompts])).pooler_output
        images, texts = model.visual_projection(seen.pooler_output), model.text_projection(read)
        with torch.autocast(images.device.type, enabled=False):
            images, texts = F.normalize(images.float(), dim=-1), F.normalize(texts.float(), dim=-1)
            scale = model.logit_scale.exp().clamp(max=LARGEST_SCALE)
            caption = self.contrast(images, texts[:count], batch["keys"], scale)
            tag = F.cross_entropy(scale * images @ texts[count:].T, batch["tags"])
        losses = {"loss": caption + tag, "caption": caption, "tag": tag}
        return self.add_grounding(losses, seen.last_hidden_state[:, 1:], batch["spots"])

    def contrast(self, images: Tensor, texts: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
        """Cross entropy in both directions. Images with the same key have the same captions, which are equally true."""
        images, texts, keys = self.gather(images), self.gather(texts), self.gather(keys)
        same = (keys[:, None] == keys[None]).float()
        wanted = same / same.sum(1, keepdim=True)
        scores = scale * images @ texts.T
        return (F.cross_entropy(scores, wanted) + F.cross_entropy(scores.T, wanted)) / 2


# Batches.


class BlipBatches:
    """The examples with their first captions as token ids."""

    def __init__(self, examples: Examples, tokenizer: PreTrainedTokenizerFast) -> None:
        self.examples = examples
        ids = encode_captions([truth.captions[0] for truth in examples.truths], tokenizer)
        ids[:, 0] = tokenizer.bos_token_id  # [DEC] instead of [CLS], as in BLIP
        self.tokens = ids.to(examples.device)

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, places: npt.NDArray[np.int64], rng: np.random.Generator) -> Batch:
        batch = self.examples.cut(places, rng)
        return batch | {"tokens": self.tokens[torch.from_numpy(places).to(self.examples.device)]}


class ClipBatches:
    """The examples, each with one of its captions, chosen again every time."""

    def __init__(self, examples: Examples, tokenizer: PreTrainedTokenizerFast, labels: Sequence[str]) -> None:
        self.examples = examples
        self.counts = np.array([len(truth.captions) for truth in examples.truths])
        self.starts = np.cumsum(self.counts) - self.counts
        captions = [caption for truth in examples.truths for caption in truth.captions]
        ids = encode_captions([*prompt_tags(labels), *captions], tokenizer)
        self.prompts, self.tokens = ids[: len(labels)], ids[len(labels) :].to(examples.device)
        self.tags = torch.from_numpy(spread_tags(examples.truths, labels)).to(examples.device)
        numbers = {
            key: number for number, key in enumerate(dict.fromkeys(truth.key for truth in examples.truths))
        }
        self.keys = torch.tensor([numbers[truth.key] for truth in examples.truths], device=examples.device)

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, places: npt.NDArray[np.int64], rng: np.random.Generator) -> Batch:
        device = self.examples.device
        batch = self.examples.cut(places, rng)
        chosen = self.starts[places] + rng.integers(self.counts[places])
        rows = torch.from_numpy(places).to(device)
        tokens = self.tokens[torch.from_numpy(chosen).to(device)]
        return batch | {"tokens": tokens, "tags": self.tags[rows], "keys": self.keys[rows]}


def encode_captions(captions: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Token ids [captions, words], padded. Raises ValueError for a caption that is too long for the model."""
    rows = tokenizer(list(captions))["input_ids"]
    for caption, row in zip(captions, rows, strict=True):
        if len(row) > tokenizer.model_max_length:
            raise ValueError(
                f"the caption {caption!r} takes {len(row)} tokens, and the model reads {tokenizer.model_max_length}: a word "
                "that it does not know takes one for each character, so use the words of stages.scenes.truth.VOCABULARY."
            )
    return tokenizer.pad({"input_ids": rows}, return_tensors="pt")["input_ids"]  # type: ignore[no-any-return]


def prompt_tags(labels: Sequence[str]) -> list[str]:
    """The text of each label in the CLIP stage."""
    return [TEMPLATE.replace("{}", label) for label in labels]


def spread_tags(truths: Sequence[Example], labels: Sequence[str]) -> npt.NDArray[np.float32]:
    """[images, labels]: the shares of each image's tags. Raises ValueError for a tag that is not a label."""
    columns = {label: column for column, label in enumerate(labels)}
    shares = np.zeros((len(truths), len(labels)), np.float32)
    for row, truth in enumerate(truths):
        for tag, share in truth.tags.items():
            if tag not in columns:
                raise ValueError(
                    f"the tag {tag!r} is not one that CLIP knows; choose one of {', '.join(labels)}."
                )
            shares[row, columns[tag]] = share
    return shares
