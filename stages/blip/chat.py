"""Image-text-to-text models: the answer to a question about each image, in the form of the model's own chat template.

Reference: transformers' AutoProcessor and `generate` for each of the models, with whose tokens the tests compare these.
The processor resizes and cuts the images on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

from stages.base import StageSpec, StageUnusable
from stages.blip.descriptor import CHAT, ChatOptions
from stages.blip.generation import GenerateStage
from stages.checkpoints import first_line, load_part
from stages.devices import dtype_of, hold_device
from stages.options import read_options


class ChatStage(GenerateStage):
    models = CHAT

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        return load_chat_processor(spec.files["model"])

    def load(self) -> None:
        options = read_options(self.spec, ChatOptions)
        self.load_captioner(options.max_new_tokens, options.force_tokens)
        self.check_length(0)
        self.question = ask(self.prepare, options.prompt, self.spec.files["model"])
        with hold_device(self.lock):
            self.warm_up()

    def forward(self, pixels: Sequence[Tensor]) -> Tensor:
        inputs = self.prepare(
            images=[[image] for image in pixels],
            text=[self.question] * len(pixels),
            padding=True,
            padding_side="left",  # so that the first new token of all captions is at the same place
            input_data_format="channels_first",
            device=self.device,
            return_tensors="pt",
        ).to(self.device, dtype_of(self.spec))
        return self.generate(inputs, before=inputs["input_ids"].shape[1])


def load_chat_processor(folder: str) -> Any:
    """Raises StageUnusable if it has no chat template."""
    # SmolVLM's processor refuses to start without the package num2words, which only videos need.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    processor = load_part("processor", AutoProcessor, folder, trust_remote_code=False)
    if not processor.chat_template:
        raise StageUnusable(
            f"{folder} has no chat template (chat_template.jinja), so the model cannot be asked about an image. "
            "Copy the whole folder again, or take the model's version for instructions (-Instruct)."
        )
    return processor


def ask(processor: Any, prompt: str, folder: str) -> str:
    """The text of a chat with one image and the prompt, up to the model's answer."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    try:
        question: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # the template is a program
        raise StageUnusable(f"the chat template in {folder} cannot be used: {first_line(error)}") from error
    return question
