"""What the stages of models that write text about images share: limits, greedy generation by transformers' own
`generate` for a whole batch at once, and questions in the form of a model's own chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoImageProcessor, AutoProcessor
from transformers.models.smolvlm import processing_smolvlm

from stages.base import StageUnusable
from stages.devices import dtype_of
from stages.pretrained.checkpoints import first_line, load_part
from stages.pretrained.vision import VisionStage
from stages.resizing.lanczos import make_exact


class LanguageStage(VisionStage[Tensor]):
    """A stage whose model writes a text for each image. `forward` returns the token ids of the texts,
    [images, tokens], on the host."""

    text_name: ClassVar[str] = "text"  # what the model writes, in errors
    limits: dict[str, int]  # of new tokens, as `generate` names them
    model: Any

    def check_length(self, before: int) -> None:
        """before: the tokens before the first new one. Raises StageUnusable if the model has too few positions: a
        GPU would be lost at the first token without one."""
        text = self.model.config.get_text_config(decoder=True)
        positions, new = getattr(text, "max_position_embeddings", None), self.limits["max_new_tokens"]
        if positions and before + new > positions:
            raise StageUnusable(
                f"{self.name}: a {self.text_name} of {new} tokens after {before} others does not fit into the model's "
                f"{positions} positions; lower max_new_tokens."
            )

    def generate(self, inputs: Mapping[str, Any], before: int) -> Tensor:
        """New tokens on the host, [images, tokens]. before: the number of tokens that `generate` repeats first."""
        tokens: Tensor = self.model.generate(**inputs, **self.limits, do_sample=False, num_beams=1)
        return tokens[:, before:].cpu()

    def answer(self, question: str, pixels: Sequence[Tensor]) -> Tensor:
        """New tokens on the host: the model's answers to one question about each image."""
        inputs = self.prepare(
            images=[[image] for image in pixels],
            text=[question] * len(pixels),
            padding=True,
            padding_side="left",  # so that the first new token of all texts is at the same place
            input_data_format="channels_first",
            device=self.device,
            return_tensors="pt",
        ).to(self.device, dtype_of(self.spec))
        return self.generate(inputs, before=inputs["input_ids"].shape[1])


def load_processor(folder: str, kind: Any = AutoProcessor) -> Any:
    """A model's processor for images and text, which works on any device. kind: its class. Raises StageUnusable."""
    # SmolVLM's processor refuses to start without the package num2words, which only videos need.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    processor = load_part("processor", kind, folder, trust_remote_code=False)
    if processor.image_processor.backend == "pil":  # it takes images on the host only
        processor.image_processor = load_part(
            "image processor", AutoImageProcessor, folder, trust_remote_code=False, backend="torchvision"
        )
    make_exact(processor.image_processor)
    return processor


def load_chat_processor(folder: str, kind: Any = AutoProcessor) -> Any:
    """As load_processor. Raises StageUnusable if it has no chat template."""
    processor = load_processor(folder, kind)
    if not processor.chat_template:
        raise StageUnusable(
            f"{folder} has no chat template (chat_template.jinja), so the model cannot be asked about an image. "
            "Copy the whole folder again, or take the model's version for instructions (-Instruct)."
        )
    return processor


def ask(processor: Any, prompt: str, folder: str) -> str:
    """The text of a chat with one image and the prompt, if it is not empty, up to the model's answer.
    Raises StageUnusable."""
    words = [{"type": "text", "text": prompt}] if prompt else []
    content = [{"type": "image"}, *words]
    try:
        question: str = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # the template is a program
        raise StageUnusable(f"the chat template in {folder} cannot be used: {first_line(error)}") from error
    return question
