"""What the stages of models that write text about images share: limits, greedy generation by transformers' own `generate` for
a whole batch at once, with recorded steps on a GPU, and questions in the form of a model's own chat template.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoProcessor, LightOnOcrProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import PROCESSOR_NAME

from stages.contract.base import OutOfMemory, StageSpec, StageUnusable
from stages.contract.recognition import read_config
from stages.images.devices import device_errors, dtype_of, synchronize
from stages.pretrained import fusing
from stages.pretrained.checkpoints import load_part, outline_known
from stages.pretrained.lanczos import make_exact, resize_by_lanczos, uses_lanczos
from stages.pretrained.packing import pack_images
from stages.pretrained.questions import Questions
from stages.pretrained.recording import Recorder, choose_recorder
from stages.pretrained.soundness import first_line
from stages.pretrained.spreading import measure_free
from stages.pretrained.steps import DRY_RUN_TOKENS, RecordedSteps, is_steady
from stages.pretrained.vision import BLANK_SIZE, VisionStage

# Of the device's free memory, for the keys and values of all its workers; batches and other stages have the rest.
CACHE_SHARE = 1 / 3
LARGE_SIZE = 1536, 1536  # images up to this height and width have recorded steps, if there is memory


class LanguageStage(VisionStage[Tensor]):
    """A stage whose model writes a text for each image. `forward` returns the token ids of the texts,
    [images, tokens], on the host."""

    text_name: ClassVar[str] = "text"  # what the model writes, in errors
    limits: dict[str, int]  # of new tokens, as `generate` names them
    model: Any
    questions: Questions  # about each image, of a model with a chat template
    steps: RecordedSteps | None = None  # of `generate`, if they are recorded

    @classmethod
    def launch_kernels(cls, spec: StageSpec) -> None:
        super().launch_kernels(spec)
        if not spec.spread:
            fusing.launch_kernels(outline_known(cls.models, spec.files["model"]), dtype_of(spec))

    @classmethod
    def launch_resize(cls, prepare: Any) -> None:
        super().launch_resize(prepare)
        if uses_lanczos(getattr(prepare, "image_processor", None)):
            resize_by_lanczos(
                torch.zeros(1, 3, *BLANK_SIZE, dtype=torch.uint8), *BLANK_SIZE, with_kernels=True
            )

    def load_vision_model(self) -> Any:
        """As of VisionStage, and its parts become faster ones, if it is on one device: their kernels run on one."""
        model = super().load_vision_model()
        if not self.spec.spread:
            fusing.speed_up(model)
        pack_images(model)
        return model

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

    def forward(self, pixels: Sequence[Tensor]) -> Tensor:
        """Raises OutOfMemory. Then there are no recorded steps any more, so that a smaller batch has their memory."""
        try:
            with device_errors():
                return self.generate(self.prepare_inputs(pixels))
        except OutOfMemory as error:
            if not self.steps:
                raise
            problem = first_line(error)
        # Outside of `except`: an error keeps the calls that failed, and these keep the cache.
        self.release_steps(problem)
        raise OutOfMemory(problem)

    def prepare_inputs(self, pixels: Sequence[Tensor]) -> Mapping[str, Any]:
        """What the model's `generate` gets for a batch of images: input_ids, [images, tokens], and more. By default,
        the question about each image."""
        try:
            inputs = self.questions(pixels)
        except RuntimeError as error:
            if "shared memory" not in str(error):
                raise
            # On a GPU torch cannot resize an image to about a fortieth of its size or less.
            inputs = self.questions([image.cpu() for image in pixels])
        return inputs.to(self.device, dtype_of(self.spec))  # type: ignore[no-any-return]

    def generate(self, inputs: Mapping[str, Any]) -> Tensor:
        """New tokens on the host, [images, tokens]."""
        texts, prompt = inputs["input_ids"].shape
        cache = self.steps.begin(texts, prompt, self.limits["max_new_tokens"]) if self.steps else None
        return self._generate(inputs, cache, **self.limits)

    def record_steps(self) -> None:
        """Record the steps of `generate` if that is possible on this device with this model; else nothing changes.
        Call it at the end of load, while the device is held. Raises DeviceLost."""
        recorder = choose_recorder(self.device)
        if not recorder or not is_steady(self.model):
            return
        self.steps = RecordedSteps(self.model, self.spec.batch_size)
        try:
            self._record_steps(self.steps, recorder)
            return
        except Exception as error:  # noqa: BLE001 - whatever cannot be recorded can be computed as before
            problem = first_line(error)
        with device_errors():
            synchronize(self.device)
        self.release_steps(problem)

    def release_steps(self, problem: str = "") -> None:
        """Give back all memory of the recorded steps, and go on without them. problem: why, for the log."""
        if self.steps:
            self.steps.release()
        self.steps = None
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()  # other processes may need it
            # Before the daemon starts such a worker again, as much as its peak must be free; now it needs less.
            torch.cuda.reset_peak_memory_stats(self.device)
        if problem:
            warnings.warn(
                f"{self.name}: the steps of the model cannot be recorded as CUDA graphs, so "
                f"{self.text_name}s take longer until visiond is restarted: {problem}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _record_steps(self, steps: RecordedSteps, recorder: Recorder) -> None:
        small, large = (
            self.prepare_inputs([torch.zeros(3, *size, dtype=torch.uint8, device=self.device)])
            for size in (BLANK_SIZE, LARGE_SIZE)
        )
        prompts = [inputs["input_ids"].shape[1] for inputs in (small, large)]
        dry_run = {"max_new_tokens": DRY_RUN_TOKENS, "min_new_tokens": DRY_RUN_TOKENS}
        steps.record(
            recorder,
            lambda cache: self._generate(small, cache, **dry_run),
            prompt=prompts[0],
            # Not always the large one's: some models cut images of other proportions into more tiles.
            longest=max(prompts) + self.limits["max_new_tokens"],
            budget=int(CACHE_SHARE * measure_free([self.device])[0] / self.spec.workers),
        )

    def _generate(self, inputs: Mapping[str, Any], cache: Any, **limits: int) -> Tensor:
        """As `generate`. cache: transformers' own if None."""
        options = {"past_key_values": cache} if cache is not None else {}
        tokens: Tensor = self.model.generate(**inputs, **limits, **options, do_sample=False, num_beams=1)
        # What `generate` repeats first: the prompt, or the token with which a decoder starts that has an encoder.
        before = 1 if self.model.config.is_encoder_decoder else inputs["input_ids"].shape[1]
        return tokens[:, before:].cpu()


def load_processor(folder: str, kind: Any = AutoProcessor) -> Any:
    """A model's processor for images and text, which works on any device. kind: its class. Raises StageUnusable."""
    do_without_num2words()
    is_lighton = kind is LightOnOcrProcessor
    tokens = name_tokens(folder) if is_lighton else {}
    processor = load_part("processor", kind, folder, trust_remote_code=False, **tokens)
    if processor.image_processor.backend == "pil":  # it takes images on the host only
        processor.image_processor = load_part(
            "image processor", AutoImageProcessor, folder, trust_remote_code=False, backend="torchvision"
        )
    if is_lighton:  # its authors' files have the size of a patch before patches are merged
        processor.image_processor.patch_size = processor.effective_patch_size
    make_exact(processor.image_processor)
    return processor


def name_tokens(folder: str) -> dict[str, dict[str, str]]:
    """The tokens that stand for an image, as an option of the tokenizer, if processor_config.json names them: so its
    authors published LightOnOCR in 2025, and transformers looks for them in tokenizer_config.json alone."""
    file = Path(folder) / PROCESSOR_NAME
    named = read_config(file) if file.is_file() else {}
    tokens = {name: str(token) for name, token in named.items() if name.endswith("_token")}
    return {"extra_special_tokens": tokens} if tokens else {}


def do_without_num2words() -> None:
    """Let SmolVLM's processor start without the package num2words, which only videos need."""
    processing_smolvlm.num2words = processing_smolvlm.num2words or str


def load_chat_processor(folder: str, kind: Any = AutoProcessor) -> Any:
    """As load_processor. Raises StageUnusable if it has no chat template."""
    processor = load_processor(folder, kind)
    processor.chat_template = find_template(processor, folder)
    return processor


def find_template(processor: Any, folder: str) -> str:
    """The chat template in one of the places where models have it: a file of its own, processor_config.json or
    tokenizer_config.json; alone or as one of several. Raises StageUnusable."""
    template = processor.chat_template or processor.tokenizer.chat_template
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    if isinstance(template, dict):
        if len(template) > 1 and "default" not in template:
            raise StageUnusable(
                f"{folder} has several chat templates, {', '.join(template)}, and none is the default; save the one to use as "
                "chat_template.jinja."
            )
        template = template.get("default") or next(iter(template.values()), "")
    if not template:
        raise StageUnusable(
            f"{folder} has no chat template (chat_template.jinja), so the model cannot be asked about an image. "
            "Copy the whole folder again, or take the model's version for instructions (-Instruct)."
        )
    return str(template)


def ask(processor: Any, prompt: str, folder: str, instruction: str = "") -> str:
    """The text of a chat with one image and the prompt, if it is not empty, up to the model's answer. instruction: what the
    system says first, if anything. Raises StageUnusable."""
    system = [{"role": "system", "content": [{"type": "text", "text": instruction}]}] if instruction else []
    words = [{"type": "text", "text": prompt}] if prompt else []
    content = [{"type": "image"}, *words]
    try:
        question: str = processor.apply_chat_template(
            [*system, {"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # the template is a program
        raise StageUnusable(f"the chat template in {folder} cannot be used: {first_line(error)}") from error
    if processor.image_token not in question:
        raise StageUnusable(f"the chat template in {folder} cannot be used: it has no place for an image.")
    return question
