"""The text encoders of CLIP, MetaCLIP 2 and SigLIP, and embeddings as they are stored in results."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.clip.descriptor import CHATTING, TOWERS, Embedding
from stages.contract.base import StageUnusable
from stages.images.devices import split_batches
from stages.pretrained.checkpoints import load_known, load_tokenizer
from stages.pretrained.recording import Recorded

TEXTS_AT_ONCE = 256
LONGEST = 8192  # tokens of a text, of a chat model
INSTRUCTION = "Represent the user's input."  # to a chat model
TOKENS_ALIGNED_TO = 16  # a GPU plans its attention again for each length of text, which takes 50 ms


class TextEncoder:
    """The text half of a model with two towers: texts to embeddings that can be compared with those of images."""

    def __init__(self, model: Any, folder: str) -> None:
        """model: one of transformers' classes in the descriptor's MODELS."""
        self.model = model.text_model
        # SigLIP's text encoder ends with its projection.
        self.projection = getattr(model, "text_projection", nn.Identity())
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.pad_token is None:
            raise StageUnusable(
                f"the tokenizer in {folder} has no pad_token, with which shorter texts are filled up. Set it in "
                "tokenizer_config.json as the model was trained, for CLIP to its eos_token."
            )
        self.longest = model.config.text_config.max_position_embeddings
        self.full_length = is_sigmoid(model)
        # exp(t) and b of Zhai et al., "Sigmoid Loss for Language Image Pre-Training", 2023
        self.scale = model.logit_scale.exp().item()
        self.bias = model.logit_bias.item() if self.full_length else None
        self.device = model.device
        self._features = Recorded(lambda tokens: self.model(input_ids=tokens).pooler_output)

    def run_single(self) -> None:
        """Embed one text of each length that `tokenize` makes of token ids alone."""
        widths = range(TOKENS_ALIGNED_TO, self.longest + TOKENS_ALIGNED_TO, TOKENS_ALIGNED_TO)
        for width in () if self.full_length else widths:
            self.embed({"input_ids": torch.zeros(1, min(width, self.longest), dtype=torch.long)})

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Token ids [texts, tokens] on the host. A text that is too long for the model is truncated."""
        options = {"truncation": True, "max_length": self.longest, "return_tensors": "pt"}
        if self.full_length:  # SigLIP was trained so, and reads its embedding from the last place
            return dict(self.tokenizer(list(texts), padding="max_length", **options))
        tokens: Tensor = self.tokenizer(list(texts), padding=True, padding_side="right", **options)[
            "input_ids"
        ]
        width = min(-(-tokens.shape[1] // TOKENS_ALIGNED_TO) * TOKENS_ALIGNED_TO, self.longest)
        return {"input_ids": F.pad(tokens, (0, width - tokens.shape[1]), value=self.tokenizer.pad_token_id)}

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Unit embeddings [texts, dim] of any number of texts; [0, 0] of none."""
        parts = [self.embed(self.tokenize(part)) for part in split_batches(texts, TEXTS_AT_ONCE)]
        return torch.cat(parts) if parts else torch.empty(0, 0, device=self.device)

    def find_probabilities(self, cosines: Tensor) -> Tensor | None:
        """Of each cosine of a text and an image, the probability that they match; None if the model was not trained to give
        one: the scores of CLIP only order images."""
        return None if self.bias is None else (cosines * self.scale + self.bias).sigmoid()

    def embed(self, tokens: Mapping[str, Tensor]) -> Tensor:
        """Unit embeddings [texts, dim] in float32. CLIP's text encoder is causal, so padding after a text changes nothing."""
        given = {name: part.to(self.device) for name, part in tokens.items()}
        alone = given.keys() == {"input_ids"}
        features = self._features(given["input_ids"]) if alone else self.model(**given).pooler_output
        return F.normalize(self.projection(features).float(), dim=-1)


class ChatTextEncoder(TextEncoder):
    """A whole chat model that reads an instruction and a text: its answer at the last token. What follows a token changes
    nothing, as the model is causal."""

    def __init__(self, model: Any, folder: str) -> None:
        self.model, self.device, self.tokenizer = model, model.device, load_tokenizer(folder)
        self.bias = None
        if not self.tokenizer.chat_template:
            raise StageUnusable(
                f"{folder} has no chat template (chat_template.jinja). Copy the whole folder again."
            )

    def tokenize(self, texts: Sequence[str]) -> dict[str, Tensor]:
        system = {"role": "system", "content": [{"type": "text", "text": INSTRUCTION}]}
        chats = [[system, {"role": "user", "content": [{"type": "text", "text": text}]}] for text in texts]
        asked = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        options = {"truncation": True, "max_length": LONGEST, "padding": True, "padding_side": "right"}
        return dict(self.tokenizer(asked, **options, return_tensors="pt"))

    def run_single(self) -> None:
        """None of its lengths is usual."""

    def embed(self, tokens: Mapping[str, Tensor]) -> Tensor:
        given = {name: part.to(self.device) for name, part in tokens.items()}
        hidden = self.model(**given, use_cache=False).last_hidden_state
        last = given["attention_mask"].sum(dim=1) - 1
        return F.normalize(hidden[torch.arange(len(last)), last].float(), dim=-1)


def load_text_encoder(folder: str, dtype: torch.dtype, device: str) -> TextEncoder:
    """The part of a model of the stage CLIP that embeds texts. Raises StageUnusable."""
    model = load_known(TOWERS, folder, dtype, device)
    is_chat = model.config.model_type in {known.type for known in CHATTING}
    return (ChatTextEncoder if is_chat else TextEncoder)(model, folder)


def is_sigmoid(model: Any) -> bool:
    """Whether a model was trained to score each label by itself, as SigLIP, and not all labels together."""
    return hasattr(model, "logit_bias")


def encode_embedding(embedding: Tensor) -> Embedding:
    """A vector on the host as its little-endian float16 values."""
    values = embedding.numpy().astype("<f2")
    return Embedding(len(values), "float16", base64.b64encode(values.tobytes()).decode())


def decode_embedding(embedding: Embedding) -> Tensor:
    """The vector in float32, on the host."""
    raw = bytearray(base64.b64decode(embedding.base64))
    dtype = torch.float16 if embedding.dtype == "float16" else torch.float32
    return torch.frombuffer(raw, dtype=dtype).float()
