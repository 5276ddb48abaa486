"""Florence-2: a caption for each image, short or detailed, by the prompt that the model was trained with.

Reference: Xiao et al., "Florence-2: Advancing a Unified Representation for a Variety of Vision Tasks", 2024, and
transformers' Florence2ForConditionalGeneration with its processor, with whose tokens the tests compare these.
"""

from __future__ import annotations

import torch
from transformers import AutoProcessor

from stages.blip.descriptor import FLORENCE, FlorenceOptions
from stages.blip.generation import PromptStage
from stages.contract.options import read_options
from stages.images.devices import hold_device
from stages.pretrained.checkpoints import load_part

TASKS = {"caption": "<CAPTION>", "detailed": "<DETAILED_CAPTION>", "more detailed": "<MORE_DETAILED_CAPTION>"}


def make_prompt(folder: str, task: str) -> torch.Tensor:
    """Token ids [1, tokens], the same for all images. task: of TASKS. Raises StageUnusable."""
    processor = load_part("processor", AutoProcessor, folder, trust_remote_code=False)
    blank = torch.zeros(3, 32, 32, dtype=torch.uint8)
    ids: torch.Tensor = processor(images=[blank], text=[TASKS[task]], return_tensors="pt")["input_ids"]
    return ids


class FlorenceStage(PromptStage):
    models = FLORENCE

    def load(self) -> None:
        options = read_options(self.spec, FlorenceOptions)
        self.load_captioner(options.max_new_tokens, options.force_tokens)
        self.check_length(1)
        self.prompt = make_prompt(self.spec.files["model"], options.task).to(self.device)
        with hold_device(self.lock):
            self.warm_up()
