"""Trains and scores the detector with ultralytics' own trainer and validator.

    python -m visiond_mini.detector JOB.json

It uses one process and one GPU. It resumes at the last complete epoch, so a resumed run is not exactly the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import msgspec
import torch

from stages.contract.processes import count_cores
from stages.scenes.truth import Truth
from stages.weights.published import Vocabulary, make_yolo

# Before ultralytics: it stops ultralytics from using the network and changing the process.
from stages.yolo import library
from stages.yolo.weights import read_weights
from visiond.training.log import cut_log
from visiond.training.settings import LOG
from visiond_mini.cache import label_line, open_dataset, read_upright
from visiond_mini.job import WEIGHTS, DetectorJob, forget_training
from visiond_mini.mini import Sizes

# isort: split
from ultralytics.models.yolo.detect import DetectionTrainer, DetectionValidator
from ultralytics.nn.tasks import torch_safe_load

LAST = Path(WEIGHTS, "last.pt")


class DetectorTrainer(DetectionTrainer):  # type: ignore[misc]
    """Ultralytics' trainer for the network of a config, with a line in the log for each epoch."""

    config: dict[str, Any]
    log: Path

    def get_model(
        self, cfg: object = None, weights: torch.nn.Module | None = None, verbose: bool = True
    ) -> torch.nn.Module:
        network = library.build(self.config)
        if weights:
            network.load(weights)
        return network  # type: ignore[no-any-return]

    def save_metrics(self, metrics: dict[str, Any]) -> None:
        super().save_metrics(metrics)
        elapsed = time.time() - self.train_time_start
        figures = {name: float(value) for name, value in metrics.items()}
        loss = sum(value for name, value in figures.items() if name.startswith("train/"))
        images = len(self.train_loader.dataset) * (self.epoch - self.start_epoch + 1)
        entry = {
            "step": self.epoch + 1,
            "batches": len(self.train_loader) * (self.epoch + 1),
            "progress": round(min(1.0, self._measure_progress(elapsed)), 6),
            "loss": loss,
            **figures,
            "images_per_second": round(images / elapsed, 1),
            "memory_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
            "elapsed": round(elapsed, 3),
            "batch_size": self.batch_size,
        }
        with self.log.open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")

    def read_results_csv(self) -> dict[str, Any]:
        """Used for the checkpoint, which does not need it: everything is in the log."""
        return {}

    def _measure_progress(self, elapsed: float) -> float:
        return float(elapsed / (self.args.time * 3600) if self.args.time else (self.epoch + 1) / self.epochs)


def train_detector(job: DetectorJob) -> Path:
    """Train the mini pack's detector. Returns ultralytics' last checkpoint."""
    folder = Path(job.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, sizes = Vocabulary.of_scenes(), Sizes()
    _, DetectorTrainer.config = make_yolo(vocabulary, sizes.yolo_width, sizes.yolo_size)
    DetectorTrainer.log = folder / LOG
    resumed = job.resume and (folder / LAST).is_file()
    done = count_epochs(folder / LAST) if resumed else 0
    if done is None:
        return folder / LAST
    if not resumed:
        forget_training(folder)
    cut_log(DetectorTrainer.log, done)
    trainer = DetectorTrainer(overrides=list_settings(job, folder, sizes.yolo_size, resumed=resumed))
    trainer.train()
    return folder / LAST


def count_epochs(checkpoint: Path) -> int | None:
    """The number of finished epochs; None if all are finished:
    ultralytics then removes the number from the checkpoint."""
    content, _ = torch_safe_load(str(checkpoint), safe_only=True)
    done: int = content["epoch"] + 1
    return done if 0 < done < content["train_args"]["epochs"] else None


def list_settings(job: DetectorJob, folder: Path, edge: int, *, resumed: bool) -> dict[str, Any]:
    """Ultralytics' settings. No mosaic: scenes have many objects already. Mirroring and other lighting keep labels true."""
    return {
        "model": str(folder / LAST) if resumed else "mini.yaml",  # Trainer.get_model replaces it
        # True would mean the newest in the working directory
        "resume": str(folder / LAST) if resumed else False,
        "data": job.dataset,
        "project": str(folder.parent),
        "name": folder.name,
        "exist_ok": True,
        "pretrained": False,
        "seed": job.seed,
        "deterministic": False,
        "imgsz": edge,
        "batch": job.batch_size,
        "nbs": job.batch_size,
        "epochs": job.epochs or 1000,
        "time": job.seconds / 3600 or None,
        "warmup_epochs": 0.5,
        "patience": 1000,
        "optimizer": "AdamW",
        "lr0": job.learning_rate,
        "momentum": 0.9,
        "cos_lr": True,
        "amp": "bf16" if torch.cuda.is_available() else False,  # the check for fp16 needs a download
        "workers": job.workers,
        "cache": "ram",
        "mosaic": 0.0,
        "close_mosaic": 0,
        "scale": 0.2,
        "translate": 0.05,
        "hsv_h": 0.01,
        "hsv_s": 0.4,
        "hsv_v": 0.3,
        "val": False,  # only at the end
        "plots": False,
        "verbose": False,
    }


def validate_detector(weights: Path, dataset: Path, workdir: Path) -> dict[str, float]:
    """mAP50 and mAP50-95 of a pack's detector. weights: the folder of yolo.safetensors. dataset: a data.yaml."""
    files = {"weights": str(weights / "yolo.safetensors"), "config": str(weights / "yolo.json")}
    state, config = read_weights(files)
    network = library.build(config)
    network.load_state_dict(state)
    network.names = dict(enumerate(config["names"]))
    settings = {
        "data": str(dataset),
        "imgsz": config["imgsz"],
        "batch": 64,
        "workers": 8,
        "project": str(workdir),
        "name": "validation",
        "exist_ok": True,
        "plots": False,
        "verbose": False,
        "device": "0" if torch.cuda.is_available() else "cpu",
    }
    validator = DetectionValidator(args=settings)
    figures = validator(model=network)
    return {"map50": float(figures["metrics/mAP50(B)"]), "map50_95": float(figures["metrics/mAP50-95(B)"])}


def write_dataset(files: Path, truths: Sequence[Truth], folder: Path) -> None:
    """Write the files for ultralytics' validator: upright, with label files."""
    open_dataset(folder, train="val")
    with ThreadPoolExecutor(count_cores()) as threads:
        list(threads.map(lambda truth: write_upright(files / truth.file, truth, folder), truths))


def write_upright(file: Path, truth: Truth, folder: Path) -> None:
    image = folder / "images" / "val" / file.name
    if not image.exists() and truth.orientation == 1:
        os.link(file, image)
    elif not image.exists():
        pixels = cv2.cvtColor(read_upright(file.read_bytes()), cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(image), pixels, [cv2.IMWRITE_JPEG_QUALITY, 95])
    lines = [label_line(thing.label, thing.box, truth.width, truth.height) for thing in truth.objects]
    (folder / "labels" / "val" / f"{file.stem}.txt").write_text("\n".join(lines))


def main() -> None:
    train_detector(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=DetectorJob))


if __name__ == "__main__":
    main()
