"""The standard job through the real daemon: full-size models, 1280×960 JPEGs of 12 text lines, folder to durable results.

Real PP-OCRv6 small; YOLOv8n at 640, CLIP ViT-B/32 and BLIP-base at 384 with 12 new tokens forced, with random weights
of the published shapes, as the arithmetic is the same. Run: python -m benchmarks.standard [--count 500] [--folder F]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOKENS = 12

CONFIG = """\
[[inbox]]
settle_seconds = 0
[http]
listen = ""
[models]
pack = "./pack"
[stages.blip]
options = {{ max_new_tokens = {tokens}, force_tokens = {tokens} }}
[pipeline]
slab_bytes = "1 GiB"
{pipeline}
"""


def make_pack(folder: Path) -> None:
    """The published architectures with random weights, as a pack."""
    import torch
    from transformers import BlipConfig, BlipForConditionalGeneration, CLIPConfig, CLIPModel

    from stages.manifest import Manifest
    from stages.training import mini

    words = mini.Vocabulary.of_scenes()
    sizes = mini.Sizes(yolo_width=0.25, yolo_size=640, clip_tokens=77, blip_tokens=512)
    torch.manual_seed(0)
    yolo, yolo_config = mini.make_yolo(words, sizes)
    clip_words, blip_words = mini.make_clip_tokenizer(words, sizes), mini.make_blip_tokenizer(words, sizes)
    clip = CLIPModel(CLIPConfig(text_config=_specials(clip_words, clip_words.eos_token_id, 49408))).eval()
    vision = {"initializer_range": 0.02}
    blip_text = _specials(blip_words, blip_words.sep_token_id, 30524) | {"sep_token_id": blip_words.sep_token_id}
    blip = BlipForConditionalGeneration(BlipConfig(text_config=blip_text, vision_config=vision)).eval()
    models = mini.Models(yolo, yolo_config, clip, clip_words, blip, blip_words, words)
    mini.save_models(models, folder, Manifest(name="random", trained=False, notice=mini.BLANK_NOTICE))


def _specials(tokenizer: Any, end: int, size: int) -> dict[str, int]:
    """The tokenizer's special tokens in a vocabulary of the published size, so that the last layer has its full cost."""
    return {
        "vocab_size": size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
    }


def run_job(folder: Path, pipeline: str) -> dict[str, Any]:
    """One `visiond run --once`; figures by its own ledger."""
    for name in ("state", "results", "failed"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "daemon.toml").write_text(CONFIG.format(tokens=TOKENS, pipeline=pipeline))
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "daemon", "run", "--once", "--config", folder / "daemon.toml"], check=True)
    wall = time.perf_counter() - started
    ledger = sqlite3.connect(f"file:{folder}/state/ledger.sqlite?mode=ro", uri=True)
    ends = [row[0] for row in ledger.execute("SELECT finished_at FROM image WHERE status = 1 ORDER BY finished_at")]
    stages = dict(ledger.execute("SELECT stage, AVG(seconds) FROM result JOIN model ON model.id = model GROUP BY stage"))
    ledger.close()
    steady = ends[len(ends) // 10 :]  # the first batches meet models that are still warming up
    return {
        "images": len(ends),
        "wall_seconds": round(wall, 2),
        "images_per_second": _rate(ends),
        "steady_images_per_second": _rate(steady),
        "stage_milliseconds_per_image": {stage: round(1000 * seconds, 3) for stage, seconds in stages.items()},
    }


def _rate(ends: list[float]) -> float | None:
    """Images a second between the first commit and the last; None when one commit held them all."""
    return round(sum(end > ends[0] for end in ends) / (ends[-1] - ends[0]), 1) if ends[-1] > ends[0] else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="kept and used again; by default a temporary one")
    parser.add_argument(
        "--pipeline", action="append", default=[], help='lines for [pipeline], e.g. "workers_per_device = 2"; may be repeated'
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="visiond-standard-"))
    from stages.training import scenes

    if not (folder / "pack").exists():
        make_pack(folder / "pack")
    if not (folder / "inbox").exists():
        scenes.standard_job(folder / "samples", options.count, 0)
        (folder / "samples").rename(folder / "inbox")
    for pipeline in options.pipeline or [""]:
        print(json.dumps({"pipeline": pipeline, **run_job(folder, pipeline)}))


if __name__ == "__main__":
    main()
