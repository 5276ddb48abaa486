"""Image-text-to-text models: the answer to a question about each image, in the form of the model's own chat template.

Reference: transformers' AutoProcessor and `generate` for each of the models, with whose tokens the tests compare these.
The processor resizes and cuts the images on the device.
"""

from __future__ import annotations

from typing import Any

from stages.blip.descriptor import CHAT, ChatOptions
from stages.blip.generation import GenerateStage
from stages.contract.base import StageSpec
from stages.contract.options import read_options
from stages.images.devices import hold_device
from stages.pretrained.language import ask, load_chat_processor
from stages.pretrained.questions import Questions


class ChatStage(GenerateStage):
    models = CHAT

    @classmethod
    def load_processor(cls, spec: StageSpec, device: str) -> Any:
        return load_chat_processor(spec.files["model"])

    def load(self) -> None:
        options = read_options(self.spec, ChatOptions)
        self.load_captioner(options.max_new_tokens, options.force_tokens)
        self.check_length(0)
        question = ask(self.prepare, options.prompt, self.spec.files["model"])
        self.questions = Questions(self.prepare, question)
        with hold_device(self.lock):
            self.warm_up()
            self.record_steps()
