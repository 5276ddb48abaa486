"""What all captioners share: from tokens to captions, and their CLIP similarity to the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip
from stages.clip.embeddings import TextEncoder, decode_embedding, load_text_encoder
from stages.contract.base import UNFAMILIAR, Image, ImageError, Reason, Result
from stages.images.devices import dtype_of, hold_device
from stages.pretrained.recording import recording_single
from stages.pretrained.vision import VisionStage


class CaptionStage(VisionStage[Tensor]):
    """A captioner. `forward` returns the token ids of captions, [images, tokens], on the host.

    load() sets the tokenizer, and the text encoder: the text half of the CLIP stage's model, or None without one.
    """

    tokenizer: Any
    text_encoder: TextEncoder | None

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for batch, tokens in self.forward_batches(images):
            captions = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            compared = self._compare([caption.strip() for caption in captions], batch)
            unfamiliar = self.familiarity.find_unfamiliar(batch)
            results += [
                Caption(UNFAMILIAR, None) if unknown else result
                for result, unknown in zip(compared, unfamiliar, strict=True)
            ]
        return results

    def load_text_encoder(self) -> TextEncoder | None:
        folder = self.spec.files.get("clip")
        if folder is None:
            return None
        encoder = load_text_encoder(folder, dtype_of(self.spec), self.device)
        with hold_device(self.lock), recording_single(self.spec, self.device) as records:
            if records:
                encoder.run_single()
        return encoder

    def _compare(self, captions: list[str], images: Sequence[Image]) -> list[Caption | ImageError]:
        """Each caption with its cosine similarity to the image, if the CLIP stage has embedded the image."""
        clips = [image.results.get("clip") for image in images]
        if self.text_encoder is None or not any(isinstance(clip, Clip) for clip in clips):
            return [Caption(caption, None) for caption in captions]
        tokens = self.text_encoder.tokenize(captions)
        with hold_device(self.lock):
            texts = self.text_encoder.embed(tokens).cpu()
        return [compare_caption(*pair) for pair in zip(captions, texts, clips, strict=True)]


def compare_caption(caption: str, text: Tensor, clip: Result | None) -> Caption | ImageError:
    """text: the caption's unit embedding, on the host."""
    if not isinstance(clip, Clip):
        return Caption(caption, None)
    image = decode_embedding(clip.embedding)
    if image.shape != text.shape:
        return ImageError(
            Reason.STAGE,
            f"the embedding of the clip stage has {len(image)} values, that of the caption {len(text)}: "
            "both stages must use the same CLIP model.",
        )
    return Caption(caption, round(float(F.cosine_similarity(image, text, dim=0)), 6))
