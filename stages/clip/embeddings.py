"""CLIP's text tower, and embeddings as they are stored in results."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPModel

from stages.checkpoints import load_tokenizer
from stages.clip.descriptor import Embedding
from stages.devices import split_batches

TEXTS_AT_ONCE = 256
TOKENS_ALIGNED_TO = 16  # a GPU plans its attention again for each length of text, which takes 50 ms


class TextTower:
    """CLIP's text half: texts to embeddings that can be compared with those of images."""

    def __init__(self, model: CLIPModel, folder: str) -> None:
        self.model, self.projection = model.text_model, model.text_projection
        self.tokenizer = load_tokenizer(folder)
        self.longest = model.config.text_config.max_position_embeddings

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids [texts, longest text] on the host. A text that is too long for the model is truncated."""
        tokens: Tensor = self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
        )["input_ids"]
        width = min(-(-tokens.shape[1] // TOKENS_ALIGNED_TO) * TOKENS_ALIGNED_TO, self.longest)
        return F.pad(tokens, (0, width - tokens.shape[1]), value=self.tokenizer.pad_token_id)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit embeddings [texts, dim] of any number of texts, also of none."""
        parts = [self.embed(self.tokenize(part)) for part in split_batches(texts, TEXTS_AT_ONCE)]
        return (
            torch.cat(parts)
            if parts
            else self.projection.weight.new_empty(0, len(self.projection.weight)).float()
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Unit embeddings [texts, dim] in float32. The tower is causal,
        so padding after a text changes nothing."""
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
