"""BLIP: a caption for each image, and its CLIP similarity to the image.

Reference: Li et al., "BLIP: Bootstrapping Language-Image Pre-training", 2022, and transformers'
BlipForConditionalGeneration.generate: the tests check that its greedy captions are the same, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BlipConfig, BlipForConditionalGeneration

from stages.base import Image, ImageError, Reason, Result, StageSpec
from stages.blip.captioner import Captioner
from stages.blip.descriptor import MODELS, BlipOptions, Caption
from stages.blip.vision import embed_image, speed_up_attention, speed_up_mlp
from stages.checkpoints import load_known, load_part, load_tokenizer
from stages.clip import descriptor as clip
from stages.clip.descriptor import Clip
from stages.clip.embeddings import TextTower, decode_embedding
from stages.devices import dtype_of, hold_device
from stages.options import read_options
from stages.vision import VisionStage, speed_up_patches


class BlipStage(VisionStage[Tensor]):
    models = MODELS

    @classmethod
    def launch_kernels(cls, spec: StageSpec) -> None:
        from stages.kernels.launch import add_layer_norm

        super().launch_kernels(spec)
        config = load_part("configuration", BlipConfig, spec.files["model"])
        for part in (config.vision_config, config.text_config):
            norm = nn.LayerNorm(part.hidden_size, part.layer_norm_eps, dtype=dtype_of(spec))
            add_layer_norm(torch.zeros_like(norm.weight), torch.zeros_like(norm.weight), norm)

    def load(self) -> None:
        self.options = read_options(self.spec, BlipOptions)
        dtype = dtype_of(self.spec)
        self.tokenizer = load_tokenizer(self.spec.files["model"])
        model = self.load_vision_model()
        self.vision = model.vision_model
        speed_up_patches(self.vision)
        speed_up_attention(self.vision)
        if (
            self.device.startswith("cuda")
            and dtype != torch.float32
            and model.config.vision_config.hidden_act == "gelu"
        ):
            speed_up_mlp(self.vision)
        self.tower = self._load_tower(dtype) if "clip" in self.spec.files else None
        with hold_device(self.lock):
            self.captioner = self._make_captioner(model)
            self.captioner.step.capture()
            self.warm_up()

    def run(self, images: Sequence[Image]) -> list[Result | ImageError]:
        results: list[Result | ImageError] = []
        for batch, tokens in self.forward_batches(images):
            captions = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
            results += self._compare([caption.strip() for caption in captions], batch)
        return results

    def forward(self, pixels: Sequence[Tensor]) -> Tensor:
        """Token ids of the captions on the host, without the beginning-of-text token,
        which is the same for all."""
        return self.captioner(embed_image(self.vision, self.prepare(pixels)))[:, 1:]

    def _compare(self, captions: list[str], images: Sequence[Image]) -> list[Caption | ImageError]:
        """Each caption with its cosine similarity to the image, if the CLIP stage has embedded the image."""
        clips = [image.results.get("clip") for image in images]
        if self.tower is None or not any(isinstance(clip, Clip) for clip in clips):
            return [Caption(caption, None) for caption in captions]
        tokens = self.tower.tokenize(captions)
        with hold_device(self.lock):
            texts = self.tower.embed(tokens).cpu()
        return [compare_caption(*pair) for pair in zip(captions, texts, clips, strict=True)]

    def _make_captioner(self, model: BlipForConditionalGeneration) -> Captioner:
        prompt = self.tokenizer(self.options.prompt, add_special_tokens=False)["input_ids"]
        return Captioner(
            model,
            prompt=[model.config.text_config.bos_token_id, *prompt],
            max_new_tokens=self.options.force_tokens or self.options.max_new_tokens,
            min_new_tokens=self.options.force_tokens,
            batch_size=self.spec.batch_size,
        )

    def _load_tower(self, dtype: torch.dtype) -> TextTower:
        folder = self.spec.files["clip"]
        return TextTower(load_known((*clip.MODELS, *clip.FLEXIBLE), folder, dtype, self.device), folder)


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
