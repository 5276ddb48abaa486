"""The model card of the mini pack, and the picture of how it learned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TARGETS = (
    ("map50", "YOLO mAP50", 0.90),
    ("map50_95", "YOLO mAP50-95", 0.70),
    ("caption_picked", "CLIP picks the true caption among 100", 0.90),
    ("tag_first", "CLIP's first tag is true", 0.95),
    ("main_tag_first", "CLIP's first tag is the main one", None),
    ("captions_true", "BLIP's caption is true in every word", 0.90),
    ("captions_true_of_objects", "… of scenes with objects alone", None),
    ("groups_true_of_objects", "… objects, colours and counts alone", None),
    ("words_read", "OCR words read", 0.95),
    ("bins", "bins equal to the truth", 0.97),
)

CARD = """\
# The mini pack

Small models of the four families that visiond runs, so that `visiond demo`, the tests and a first try need no download.

**It knows only its toy world:** the synthetic scenes of `visiond samples`. On real photographs its boxes, tags and
captions mean nothing; take the standard pack for those (`visiond models pull`). Text is read by PP-OCRv6 small,
which is no toy and is not part of this folder.

## What is in it

| stage | architecture | file | size |
|---|---|---|---|
{files}

All weights are safetensors in float16. The tokenizers are WordPiece over the words of the scenes' captions.

## Data

Scenes drawn by `stages/training/scenes.py`: sixteen kinds of objects in eleven colours, up to nine at a time, on
eighteen backdrops; pages, receipts, slides, signs, posters and charts with text. {scenes} of them were
made with seed {seed}; nothing else was seen in training, no picture of the real world and no other model's weights or answers.

## Recipe

`visiond train mini` (`stages/training/recipe.py`): ultralytics' trainer for YOLO; for CLIP (contrastive, plus tags) and BLIP
(captioning) a trainer on Hugging Face Accelerate, AdamW, warm-up and cosine, bfloat16. Besides their own losses both
vision towers had to say which object, of which colour and how many alike is centred in which patch; that head is not kept.

| model | steps | batch | images seen | minutes | last loss |
|---|---|---|---|---|---|
{trainings}

## Scores

{scored}

| what | measured | wanted |
|---|---|---|
{scores}

## Limits

Nine objects at most, and captions that name at most three groups of them; objects smaller than about a tenth of the
image's short side are not in the data; a caption is one of a closed grammar, whatever the picture shows.
"""


def write_card(pack: Path, scores: Mapping[str, Any], logs: Mapping[str, Path], scenes: int, seed: int) -> None:
    """README.md in the pack's folder."""
    text = CARD.format(
        files="\n".join(list_files(pack)),
        scenes=f"{scenes:,}",
        seed=seed,
        trainings="\n".join(list_trainings(logs)),
        scored=describe_scoring(scores),
        scores="\n".join(list_scores(scores)),
    )
    (pack / "README.md").write_text(text)


def list_files(pack: Path) -> list[str]:
    rows = (
        ("yolo", "YOLOv8, an eighth of the width", "yolo.safetensors"),
        ("clip", "CLIPModel", "clip/model.safetensors"),
        ("blip", "BlipForConditionalGeneration", "blip/model.safetensors"),
    )
    return [f"| {name} | {kind} | {file} | {(pack / file).stat().st_size / 1e6:.1f} MB |" for name, kind, file in rows]


def list_trainings(logs: Mapping[str, Path]) -> list[str]:
    lines = []
    for model, log in logs.items():
        last = read_log(log)[-1]
        batch, minutes = last["batch_size"], last["elapsed"] / 60
        steps = last.get("batches", last["step"])
        lines.append(f"| {model} | {steps:,} | {batch} | {steps * batch:,} | {minutes:.1f} | {last['loss']:.3f} |")
    return lines


def describe_scoring(scores: Mapping[str, Any]) -> str:
    if not scores:
        return "Not scored."
    return (
        f"On {scores['scenes']:,} scenes of a seed never trained on, in full size, as files; OCR and bins on "
        f"{scores['read']:,} of them (`python -m stages.training.score`)."
    )


def list_scores(scores: Mapping[str, Any]) -> list[str]:
    return [
        f"| {text} | {scores[name]:.3f} | {'' if target is None else f'≥ {target:.2f}'} |"
        for name, text, target in TARGETS
        if scores.get(name) is not None
    ]


def read_log(log: Path) -> list[dict[str, Any]]:
    with log.open() as lines:
        return [json.loads(line) for line in lines]


def draw_curves(logs: Mapping[str, Path], picture: Path) -> None:
    """Each training's losses over its seconds, side by side, as a PNG. Needs matplotlib, which ultralytics brings."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(logs), 4), layout="tight")
    for axes, (model, log) in zip(figure.subplots(1, len(logs), squeeze=False)[0], logs.items(), strict=True):
        entries = read_log(log)
        for name in entries[0]:
            if name in ("loss", "caption", "tag", "grounding") or name.startswith("train/"):
                axes.plot([entry["elapsed"] for entry in entries], [entry[name] for entry in entries], label=name)
        axes.set(title=model, xlabel="seconds", yscale="log")
        axes.legend()
    figure.savefig(picture)
