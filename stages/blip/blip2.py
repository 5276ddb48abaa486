"""BLIP-2: a caption for each image by a large language model that sees it as a few query tokens.

Reference: Li et al., "BLIP-2: Bootstrapping Language-Image Pre-training with Frozen Image Encoders and Large
Language Models", 2023, and transformers' Blip2ForConditionalGeneration.generate, with whose tokens the tests compare
these.
"""

from __future__ import annotations

import torch

from stages.blip.descriptor import BLIP2, Blip2Options
from stages.blip.generation import PromptStage
from stages.contract.options import read_options
from stages.images.devices import hold_device


class Blip2Stage(PromptStage):
    models = BLIP2

    def load(self) -> None:
        options = read_options(self.spec, Blip2Options)
        self.load_captioner(options.max_new_tokens, options.force_tokens)
        config = self.model.config
        # As Blip2Processor writes it; it leaves the images out if its folder does not name the number of queries.
        words = (
            self.tokenizer(options.prompt)["input_ids"]
            if options.prompt
            else [config.text_config.bos_token_id]
        )
        ids = [config.image_token_index] * config.num_query_tokens + words
        self.prompt = torch.tensor([ids], device=self.device)
        self.check_length(1 if config.is_encoder_decoder else len(ids))
        with hold_device(self.lock):
            self.warm_up()
            self.record_steps()
