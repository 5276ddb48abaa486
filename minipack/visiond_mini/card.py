"""The model card of the mini pack.

The card's content is stored in the pack's manifest, so that a pack
of which one model is trained again keeps the facts about the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stages.contract.manifest import MANIFEST, read_manifest, write_manifest
from visiond.training.log import read_log

TARGETS = (
    ("map50", "YOLO mAP50", 0.90),
    ("map50_95", "YOLO mAP50-95", 0.70),
    ("caption_picked", "CLIP picks the true caption among 100", 0.90),
    ("tag_first", "CLIP's first tag is true", 0.95),
    ("main_tag_first", "CLIP's first tag is the main one", None),
    ("captions_true", "BLIP's caption is true in every word", 0.90),
    ("captions_true_of_objects", "… of scenes with objects alone", 0.90),
    ("groups_true_of_objects", "… objects, colors and counts alone", None),
    ("words_read", "OCR words read", 0.95),
    ("bins", "bins equal to the truth", 0.97),
    ("scenes_known", "scenes that no stage calls unfamiliar", 0.99),
    ("photographs_unknown", "photographs that every stage calls unfamiliar", 0.95),
)


class Training(msgspec.Struct, frozen=True):
    """How a model was trained. scenes: different ones. seed: of the scenes. seconds: without making them."""

    scenes: int
    seed: int
    steps: int
    batch_size: int
    seconds: float
    loss: float


class Card(msgspec.Struct, frozen=True):
    """trainings: by model. scores: from score.py; empty if there are none."""

    trainings: dict[str, Training] = {}
    scores: dict[str, Any] = {}


CARD = """\
# The mini pack

Small models of the four families that visiond runs, so that `visiond demo`, the tests and a first try need no download.

**It knows only its toy world:** the synthetic scenes of `visiond samples`. To most other images it answers with no
objects, and with the tag and the caption "not a scene of the demonstration pack"; take other models for those
(docs/models.md). PP-OCRv6 small reads the text of any image; it has its real weights and is not part of this folder.

## What is in it

| stage | architecture | file | size |
|---|---|---|---|
{files}

All weights are safetensors in float16. The tokenizers are WordPiece over the words of the scenes' captions.

## Data

Scenes drawn by `stages/scenes/generator.py`: sixteen kinds of objects in eleven colors, up to nine at a time, on
eighteen backdrops; pages, receipts, slides, signs, posters and charts with text. Nothing else was seen in training, no
picture of the real world and no other model's weights or answers.

## Recipe

`visiond train mini` (`minipack/visiond_mini/recipe.py`): ultralytics' trainer for YOLO; for CLIP (contrastive, plus tags) and
BLIP (captioning) a trainer on Hugging Face Accelerate, AdamW, warm-up and cosine, bfloat16. Besides their own losses both
vision towers had to say which object, of which color and how many alike is centered in which patch; that head is not kept.

| model | scenes | of seed | steps | batch | images seen | minutes | last loss |
|---|---|---|---|---|---|---|---|
{trainings}

`familiarity.safetensors` is a linear classifier on BLIP's vision features, fitted at the end
(`minipack/visiond_mini/familiarity.py`) on scenes of another seed and on drawn pictures that are no scenes. No photograph
was used for it.

## Scores

{scored}

| what | measured | wanted |
|---|---|---|
{scores}

## Limits

Nine objects at most, and captions that name at most three groups of them; objects smaller than about a tenth of the
image's short side are not in the data; a caption is one of a closed grammar.{groups}{refused}
"""


def read_card(pack: Path) -> Card:
    """The card in the manifest of a pack. Raises PackError if there is no pack."""
    return msgspec.convert(read_manifest(pack / MANIFEST).card, Card)


def write_card(pack: Path, card: Card) -> None:
    """Write the card into the pack's manifest, and as README.md."""
    manifest = read_manifest(pack / MANIFEST)
    scores = {name: value for name, value in card.scores.items() if name not in ("seconds", "misses")}
    kept = msgspec.to_builtins(msgspec.structs.replace(card, scores=scores))
    write_manifest(pack / MANIFEST, msgspec.structs.replace(manifest, card=kept))
    text = CARD.format(
        files="\n".join(list_files(pack)),
        trainings="\n".join(list_trainings(card.trainings)),
        scored=describe_scoring(card.scores),
        scores="\n".join(list_scores(card.scores)),
        groups=describe_groups(card.scores),
        refused=describe_refused(card.scores),
    )
    (pack / "README.md").write_text(text)


def list_files(pack: Path) -> list[str]:
    rows = (
        ("yolo", "YOLOv8, an eighth of the width", "yolo.safetensors"),
        ("clip", "CLIPModel", "clip/model.safetensors"),
        ("blip", "BlipForConditionalGeneration", "blip/model.safetensors"),
        ("all", "linear classifier", "familiarity.safetensors"),
    )
    return [
        f"| {name} | {kind} | {file} | {(pack / file).stat().st_size / 1e6:.1f} MB |"
        for name, kind, file in rows
        if (pack / file).is_file()
    ]


def read_training(log: Path, scenes: int, seed: int) -> Training:
    """The facts in the last line of a training's log."""
    last = read_log(log)[-1]
    steps = last.get("batches", last["step"])
    return Training(scenes, seed, steps, last["batch_size"], last["elapsed"], last["loss"])


def list_trainings(trainings: Mapping[str, Training]) -> Iterator[str]:
    for model, training in trainings.items():
        seen, minutes = training.steps * training.batch_size, training.seconds / 60
        sizes = (
            f"{training.scenes:,} | {training.seed} | {training.steps:,} | {training.batch_size} | {seen:,}"
        )
        yield f"| {model} | {sizes} | {minutes:.1f} | {training.loss:.3f} |"


def describe_scoring(scores: Mapping[str, Any]) -> str:
    if not scores:
        return "Not scored."
    return (
        f"On {scores['scenes']:,} scenes of seed {scores['seed']}, never trained on, in full size, as files; OCR and bins on "
        f"{scores['read']:,} of them{describe_photographs(scores)} (`python -m visiond_mini.score`)."
    )


def describe_photographs(scores: Mapping[str, Any]) -> str:
    count = scores.get("photographs", 0)
    if not count:
        return ""
    return f"; {count} photographs from Python packages, which `visiond_mini/photographs.py` collects"


def describe_groups(scores: Mapping[str, Any]) -> str:
    """The share of true captions by number of groups."""
    marks = {
        kind.removeprefix("photo of "): marks
        for kind, marks in scores.get("by_kind", {}).items()
        if "group" in kind
    }
    shares = [f"{mark['captions_true']:.2f} of {groups}" for groups, mark in marks.items()]
    if not shares:
        return ""
    return f"\nTrue captions, by groups of objects alike in kind and color: {', '.join(shares)}."


def describe_refused(scores: Mapping[str, Any]) -> str:
    """The share of empty backdrops that the classifier takes for something else, by their captions."""
    empty = scores.get("by_kind", {}).get("empty", {}).get("captions_true")
    if empty is None or scores.get("scenes_known") is None:
        return ""
    often = "Backdrops without objects are the scenes that are called unfamiliar most often"
    return f"\n{often}: {empty:.2f} of them have a true caption."


def list_scores(scores: Mapping[str, Any]) -> list[str]:
    return [
        f"| {text} | {scores[name]:.3f} | {'' if target is None else f'≥ {target:.2f}'} |"
        for name, text, target in TARGETS
        if scores.get(name) is not None
    ]
