"""Qwen3-VL-Embedding: embeddings of images and texts by a chat model, which reads an instruction and then either of them.

Reference: Li et al., "Qwen3-VL-Embedding and Qwen3-VL-Reranker", 2026, and its authors' scripts/qwen3_vl_embedding.py. The
embedding is the last layer's answer at the last token. The tests compare this stage with what that script does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from stages.clip.descriptor import CHATTING, Clip
from stages.clip.embeddings import INSTRUCTION, encode_embedding
from stages.contract.base import Image, ImageError, Result, StageSpec
from stages.images.devices import hold_device, pixels_of
from stages.images.sharpness import measure_sharpness
from stages.pretrained.language import LanguageStage, ask, load_chat_processor
from stages.pretrained.questions import Questions

LEAST_PATCHES, MOST_PATCHES = 4, 1800  # of an image, after they are merged, as in the script


class ChatEmbeddingStage(LanguageStage):
    models = CHATTING

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        processor = load_chat_processor(spec.files["model"])
        images = processor.image_processor
        area = (images.patch_size * images.merge_size) ** 2
        images.size = {"shortest_edge": LEAST_PATCHES * area, "longest_edge": MOST_PATCHES * area}
        return processor

    def load(self) -> None:
        self.model = self.load_vision_model()
        self.questions = Questions(self.prepare, ask(self.prepare, "", self.spec.files["model"], INSTRUCTION))
        with hold_device(self.lock):
            self.warm_up()

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        embeddings = [each for _, some in self.forward_batches(images) for each in some]
        with hold_device(self.lock):
            sharpness = measure_sharpness(pixels_of(images))
        return [
            Clip(encode_embedding(embedding), [], figure)
            for embedding, figure in zip(embeddings, sharpness, strict=True)
        ]

    def generate(self, inputs: Mapping[str, Any]) -> Tensor:
        """Unit embeddings on the host, [images, dim]. All texts end at the last token, as they are padded on the left."""
        hidden = self.model(**inputs, use_cache=False).last_hidden_state[:, -1]
        return F.normalize(hidden.float(), dim=-1).cpu()
