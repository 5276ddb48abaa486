"""CLIP: an embedding of each image, and the labels nearest to it.

Reference: Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, and
transformers' CLIPModel and CLIPImageProcessor, which the tests hold this stage against.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPModel

from stages.base import Image, ImageError, Result, Stage
from stages.checkpoints import load_model, load_part, load_tokenizer
from stages.clip.descriptor import Clip, ClipOptions, Embedding, Tag
from stages.clip.towers import speed_up_patches
from stages.devices import dtype_of, hold_device, pixels_of, settle, split_batches
from stages.options import read_options
from stages.resizing.resize import ImageProcessor

TEXTS_AT_ONCE = 256
TOKENS_ALIGNED_TO = 16  # lengths of texts: a GPU plans its attention anew for each, which takes it 50 ms


class ClipStage(Stage):
    def load(self) -> None:
        self.options = read_options(self.spec, ClipOptions)
        folder, dtype = self.spec.files["model"], dtype_of(self.spec)
        model = load_model(CLIPModel, folder, dtype, self.device)
        settings = load_part("image processor", CLIPImageProcessor, folder)
        self.prepare = ImageProcessor(settings, self.device, dtype)
        self.vision, self.projection = model.vision_model, model.visual_projection
        speed_up_patches(self.vision)
        self.labels = self._read_labels()
        with hold_device(self.lock):
            self.label_logits = self._embed_labels(model, folder) * model.logit_scale.exp().float()
            blank = torch.zeros(3, self.prepare.height, self.prepare.width, dtype=torch.uint8, device=self.device)
            self._forward([blank] * self.spec.batch_size)
            settle(self.device)

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for batch in split_batches(images, self.spec.batch_size):
            with hold_device(self.lock):
                embeddings, scores, places = self._forward(pixels_of(batch))
            for embedding, row, indices in zip(embeddings, scores.tolist(), places.tolist(), strict=True):
                tags = [Tag(self.labels[index], round(score, 6)) for score, index in zip(row, indices, strict=True)]
                results.append(Clip(encode_embedding(embedding), tags))
        return results

    def _forward(self, pixels: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """On the host: unit embeddings [images, dim], and the scores and places of the likeliest labels [images, k]."""
        features = self.projection(self.vision(pixel_values=self.prepare(pixels)).pooler_output)
        embeddings = F.normalize(features.float(), dim=-1)
        likelihoods = (embeddings @ self.label_logits.T).softmax(dim=-1)
        scores, places = likelihoods.topk(min(self.options.top_k, len(self.labels)))
        return embeddings.cpu(), scores.cpu(), places.cpu()

    def _read_labels(self) -> list[str]:
        labels = self.options.labels
        if labels is None and "labels" in self.spec.files:
            labels = Path(self.spec.files["labels"]).read_text(encoding="utf-8").splitlines()
        return [label.strip() for label in labels or [] if label.strip()]

    def _embed_labels(self, model: CLIPModel, folder: str) -> Tensor:
        """Unit text embeddings of the labels, [labels, dim]."""
        texts = [self.options.template.replace("{}", label) for label in self.labels]
        return TextTower(model, folder).embed_texts(texts)


class TextTower:
    """CLIP's other half: texts to embeddings that can be held against those of images."""

    def __init__(self, model: CLIPModel, folder: str) -> None:
        self.model, self.projection = model.text_model, model.text_projection
        self.tokenizer = load_tokenizer(folder)
        self.longest = model.config.text_config.max_position_embeddings

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids [texts, longest text] on the host. A text too long for the model loses its end."""
        tokens: Tensor = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
        )["input_ids"]
        wide = min(-(-tokens.shape[1] // TOKENS_ALIGNED_TO) * TOKENS_ALIGNED_TO, self.longest)
        return F.pad(tokens, (0, wide - tokens.shape[1]), value=self.tokenizer.pad_token_id)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Any number of texts, also none."""
        parts = [self.embed(self.tokenize(part)) for part in split_batches(texts, TEXTS_AT_ONCE)]
        return torch.cat(parts) if parts else self.projection.weight.new_empty(0, len(self.projection.weight)).float()

    def embed(self, tokens: Tensor) -> Tensor:
        """Unit embeddings [texts, dim] in float32. The tower is causal, so padding behind a text changes nothing."""
        features = self.model(input_ids=tokens.to(self.projection.weight.device)).pooler_output
        return F.normalize(self.projection(features).float(), dim=-1)


def encode_embedding(embedding: Tensor) -> Embedding:
    """A vector on the host as its little-endian float16 values."""
    values = embedding.numpy().astype("<f2")
    return Embedding(len(values), "float16", base64.b64encode(values.tobytes()).decode())


def decode_embedding(embedding: Embedding) -> Tensor:
    """The vector in float32, on the host."""
    raw = bytearray(base64.b64decode(embedding.base64))
    dtype = torch.float16 if embedding.dtype == "float16" else torch.float32
    return torch.frombuffer(raw, dtype=dtype).float()
