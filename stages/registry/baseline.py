"""One image at a time, as a simple script would do it: `visiond bench` compares the daemon with this.

float32, batches of one; every stage opens the file again and uses its library's own functions: ultralytics'
predict, transformers' processors and generate. OCR is the plain network of stages/ocr/stage.py, because
rapidocr has no GPU runtime. So is YOLO where ultralytics is not installed.

It runs in a separate process, because it loads torch: it reads a Task from standard input,
and the last line of its standard output has the seconds of each stage.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from transformers import BlipForConditionalGeneration, BlipImageProcessor, CLIPImageProcessor, CLIPModel

from stages.clip.embeddings import TextEncoder
from stages.contract.base import Image, Stage, StageSpec
from stages.ocr.stage import OcrStage
from stages.pretrained.checkpoints import load_model, load_tokenizer
from stages.yolo.stage import YoloStage
from stages.yolo.structure import has_library
from stages.yolo.weights import read_weights


class Task(msgspec.Struct, frozen=True):
    stages: list[StageSpec]
    images: list[str]  # the first one is not timed: it warms up the models
    device: str
    new_tokens: int


class OneAtATime:
    """The models of the standard job. Each method takes a file and returns its answer on the host."""

    def __init__(self, task: Task) -> None:
        self.device, self.new_tokens = task.device, task.new_tokens
        self.encoder: TextEncoder | None = None
        loads = {
            "ocr": self._load_ocr,
            "yolo": self._load_yolo,
            "clip": self._load_clip,
            "blip": self._load_blip,
        }
        for spec in task.stages:
            loads[spec.name](msgspec.structs.replace(spec, dtype="float32", batch_size=1))
        torch.backends.cudnn.allow_tf32 = True  # torch's default; the stage turns it off

    def ocr(self, path: str) -> Any:
        return self.reader.run([self._read(path)])

    def yolo(self, path: str) -> Any:
        if isinstance(self.detector, YoloStage):
            return self.detector.run([self._read(path)])
        return self.detector.predict(path, imgsz=self.size, device=self.device, verbose=False)[0].boxes.cpu()

    def clip(self, path: str) -> Any:
        pixels = self.clip_processor(images=open_image(path), return_tensors="pt")["pixel_values"].to(
            self.device
        )
        features = self.clip_model.visual_projection(
            self.clip_model.vision_model(pixel_values=pixels).pooler_output
        )
        self.embedding = F.normalize(features, dim=-1)
        return (self.clip_model.logit_scale.exp() * self.embedding @ self.labels.T).softmax(dim=-1).cpu()

    def blip(self, path: str) -> Any:
        pixels = self.blip_processor(images=open_image(path), return_tensors="pt")["pixel_values"].to(
            self.device
        )
        tokens = self.blip_model.generate(
            pixel_values=pixels,
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.new_tokens,
            do_sample=False,
            num_beams=1,
        )
        captions = self.blip_tokenizer.batch_decode(tokens, skip_special_tokens=True)
        if not self.encoder:
            return captions
        return captions, (self.encoder.embed(self.encoder.tokenize(captions)) @ self.embedding.T).cpu()

    def _read(self, path: str) -> Image:
        pixels = torch.from_numpy(np.array(open_image(path))).permute(2, 0, 1).contiguous().to(self.device)
        height, width = pixels.shape[1:]
        return Image(memoryview(b""), width, height, pixels)

    def _load_ocr(self, spec: StageSpec) -> None:
        self.reader = load_stage(OcrStage(spec, self.device))

    def _load_yolo(self, spec: StageSpec) -> None:
        if not has_library():
            self.detector: Any = load_stage(YoloStage(spec, self.device))
            return
        from stages.yolo import library

        state, config = read_weights(spec.files)
        self.size, self.names = config["imgsz"], config["names"]
        self.detector = library.make_predictor(state, config)

    def _load_clip(self, spec: StageSpec) -> None:
        files = spec.files
        self.clip_model = load_model(CLIPModel, files["model"], torch.float32, self.device)
        self.clip_processor = CLIPImageProcessor.from_pretrained(files["model"], local_files_only=True)
        self.encoder = TextEncoder(self.clip_model, files["model"])
        texts = [f"a photo of a {label}" for label in Path(files["labels"]).read_text().splitlines()]
        self.labels = self.encoder.embed_texts(texts)

    def _load_blip(self, spec: StageSpec) -> None:
        files = spec.files
        self.blip_model = load_model(BlipForConditionalGeneration, files["model"], torch.float32, self.device)
        self.blip_processor = BlipImageProcessor.from_pretrained(files["model"], local_files_only=True)
        self.blip_tokenizer = load_tokenizer(files["model"])


def load_stage(stage: Stage) -> Stage:
    stage.load()
    return stage


def open_image(path: str) -> PIL.Image.Image:
    return PIL.Image.open(path).convert("RGB")


def run_task(task: Task) -> dict[str, float]:
    """The seconds of each stage for all images except the first."""
    with torch.inference_mode():
        models = OneAtATime(task)
        methods = {"ocr": models.ocr, "yolo": models.yolo, "clip": models.clip, "blip": models.blip}
        stages = {spec.name: methods[spec.name] for spec in task.stages}
        for stage in stages.values():
            stage(task.images[0])
        spent = dict.fromkeys(stages, 0.0)
        for path in task.images[1:]:
            for name, stage in stages.items():
                started = time.perf_counter()
                stage(path)
                spent[name] += time.perf_counter() - started
    return spent


if __name__ == "__main__":
    print(json.dumps(run_task(msgspec.json.decode(sys.stdin.buffer.read(), type=Task))))
