"""BLIP: a caption for each image.

Reference: Li et al., "BLIP: Bootstrapping Language-Image Pre-training", 2022, and transformers'
BlipForConditionalGeneration.generate: the tests check that its greedy captions are the same, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import BlipConfig, BlipForConditionalGeneration

from stages.blip.captioner import Captioner
from stages.blip.captions import CaptionStage
from stages.blip.descriptor import MODELS, BlipOptions
from stages.blip.vision import embed_image, speed_up_attention, speed_up_mlp
from stages.contract.base import StageSpec
from stages.contract.options import read_options
from stages.images.devices import dtype_of, hold_device, pad_batch
from stages.pretrained.checkpoints import load_part, load_tokenizer
from stages.pretrained.recording import Recorded
from stages.pretrained.vision import speed_up_patches


class BlipStage(CaptionStage):
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
        is_half = self.device.startswith("cuda") and dtype != torch.float32
        if is_half and model.config.vision_config.hidden_act == "gelu":
            speed_up_mlp(self.vision)
        self.embed = Recorded(partial(embed_image, self.vision))
        self.text_encoder = self.load_text_encoder()
        with hold_device(self.lock):
            self.captioner = self._make_captioner(model)
            self.captioner.step.capture()
            self.warm_up()

    def forward(self, pixels: Sequence[Tensor]) -> Tensor:
        """Token ids of the captions on the host, without the beginning-of-text token, which is the same for all."""
        embedded = self.embed(pad_batch(self.prepare(pixels), self.spec.batch_size, self.name))
        return self.captioner(embedded[: len(pixels)])[:, 1:]

    def _make_captioner(self, model: BlipForConditionalGeneration) -> Captioner:
        prompt = self.tokenizer(self.options.prompt, add_special_tokens=False)["input_ids"]
        return Captioner(
            model,
            prompt=[model.config.text_config.bos_token_id, *prompt],
            max_new_tokens=self.options.force_tokens or self.options.max_new_tokens,
            min_new_tokens=self.options.force_tokens,
            batch_size=self.spec.batch_size,
        )
