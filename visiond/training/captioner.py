"""The training of BLIP or Florence-2 on captions: the language modeling loss of Li et al., 2022, or of Xiao et al., 2024, with
the prompt for one sentence, by transformers' own models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daemon.core.labels import Kind
from daemon.labels.metrics import Measure, measure_captions
from stages.blip.descriptor import FLORENCE, MODELS, BlipOptions, FlorenceOptions
from stages.blip.generation import make_prompt
from stages.blip.stage import BlipStage
from stages.contract.base import Image, StageSpec
from stages.images.devices import pixels_of
from stages.pretrained.checkpoints import load_tokenizer
from visiond.training.data import LabelledImage
from visiond.training.learning import Learner, TrainingImages, load_to_train

LEFT_OUT = -100  # a label of which transformers' losses take no notice


class CaptionLearner(Learner):
    kind: ClassVar[Kind] = Kind.CAPTION
    heads = ("text_decoder", "language_model.decoder")  # of BLIP, of Florence-2

    def __init__(self, base: Path, names: Sequence[str], device: torch.device) -> None:
        super().__init__()
        self.model = load_to_train((*MODELS, *FLORENCE), base).to(device)
        self.prompt: Tensor | None = None  # token ids [1, tokens]; BLIP needs none
        options: BlipOptions | FlorenceOptions = BlipOptions()
        if self.model.config.model_type == FLORENCE[0].type:
            options = FlorenceOptions()
            self.prompt = make_prompt(str(base), options.task).to(device)
        self.longest = self.model.config.text_config.max_position_embeddings - 2  # tokens of a caption
        self.new_tokens = min(options.max_new_tokens, self.longest)
        self.prepare = BlipStage.load_processor(
            StageSpec("blip", "transformers", {"model": str(base)}), str(device)
        )
        self.tokenizer = load_tokenizer(str(base))

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return {"loss": self.model(**batch).loss}

    @torch.no_grad()
    def answer(self, images: Sequence[Image]) -> list[Any]:
        """The caption of each image."""
        tokens = self.model.generate(
            **self.ask(self.prepare(pixels_of(images))),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            num_beams=1,
        )
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def ask(self, pixels: Tensor) -> dict[str, Tensor]:
        """What the model gets with these images, before it writes."""
        asked = {} if self.prompt is None else {"input_ids": self.prompt.expand(len(pixels), -1)}
        return {"pixel_values": pixels, **asked}

    def measure(self, samples: Sequence[LabelledImage], answers: Sequence[Any]) -> Measure:
        return measure_captions([each.words for each in samples], answers)

    def batches(self, pictures: TrainingImages, *, flip: bool) -> CaptionBatches:
        return CaptionBatches(self, pictures, flip=flip)


class CaptionBatches:
    """Images, each with one of its captions, chosen again every time."""

    def __init__(self, learner: CaptionLearner, pictures: TrainingImages, *, flip: bool) -> None:
        self.learner, self.pictures, self.flip = learner, pictures, flip

    def __len__(self) -> int:
        return len(self.pictures)

    def take(self, places: npt.NDArray[np.int64], rng: np.random.Generator) -> dict[str, Tensor]:
        learner = self.learner
        captions = [self.pictures.samples[place].words for place in places]
        ids, mask = self._encode([each[rng.integers(len(each))] for each in captions])
        pixels, _ = self.pictures.mirror(self.pictures.read(places), rng, flip=self.flip)
        device = self.pictures.device
        # BLIP reads the caption that it is to write; Florence-2 reads its prompt.
        read = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        return {
            **(read if learner.prompt is None else {}),
            **learner.ask(learner.prepare(pixels)),
            "labels": ids.masked_fill(mask == 0, LEFT_OUT).to(device),
        }

    def _encode(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids [captions, tokens], from the one that begins a caption ([DEC] for BLIP) to the one that ends it; and a mask
        with 0 for padding."""
        config = self.learner.model.config.text_config
        read = self.learner.tokenizer(list(captions), add_special_tokens=False)["input_ids"]
        last = config.sep_token_id if self.learner.prompt is None else config.eos_token_id
        rows = [[config.bos_token_id, *row[: self.learner.longest], last] for row in read]
        ids = torch.full((len(rows), max(map(len, rows))), config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        return ids, mask
