"""Scores a pack on scenes that it has never seen. Every stage runs as in the daemon, from a file's bytes.

python -m visiond_mini.score PACK [--count 2000] [--seed 90001] [--photographs FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip
from stages.contract import binning
from stages.contract.base import UNFAMILIAR, Image, ImageError, Result, Stage
from stages.images.images import read_batches
from stages.ocr.descriptor import Ocr
from stages.registry.registry import BUILT_IN, STAGES, build
from stages.scenes.generator import write_samples
from stages.scenes.photographs import find_photographs
from stages.scenes.truth import TRUTH, Truth, read_truth
from stages.weights.packs import Pack, open_pack, resolve_all
from stages.yolo.descriptor import Objects
from visiond_mini.captions import caption_is_true, group_objects, groups_are_true

UNSEEN_SEED = 90_001
CHOICES = 100  # captions from which CLIP picks one
BATCH = 64
MISSES_KEPT = 40

Results = Mapping[str, Result | ImageError]
Kind = TypeVar("Kind", Objects, Clip, Caption)


class Scores(msgspec.Struct, kw_only=True):
    """Scores are shares, 0..1, of all scenes or, "of_objects", of those with objects;
    None if the stage did not run."""

    scenes: int
    seed: int
    read: int  # scenes that OCR and bins were scored on
    map50: float
    map50_95: float
    caption_picked: float | None  # CLIP: the true caption is the most likely among a hundred
    tag_first: float | None  # CLIP: the first tag is true
    main_tag_first: float | None  # CLIP: the first tag is that of the largest share
    captions_true: float | None  # BLIP: every word of the caption is true
    captions_true_of_objects: float | None  # the same, only of scenes with objects
    groups_true_of_objects: float | None  # the same, without the place in the caption
    words_read: float | None
    bins: float | None
    scenes_known: float | None  # no stage says that they are unfamiliar
    photographs: int
    photographs_unknown: float | None  # every stage says so, and YOLO finds nothing in them
    seconds: dict[str, float] = {}  # of each stage, for one image
    by_kind: dict[str, dict[str, float | None]] = {}
    misses: list[dict[str, str]] = []


def score_pack(
    pack: Path,
    count: int,
    *,
    workdir: Path,
    read: int | None = None,
    seed: int = UNSEEN_SEED,
    photographs: Sequence[Path] = (),
    say: Callable[[str], None] = print,
) -> Scores:
    """Score on `count` scenes of full size, as files; OCR and bins on the first `read` of them (None: all).
    photographs: image files that the pack should not know."""
    files, dataset = workdir / f"files-{seed}-{count}", workdir / f"detector-{seed}-{count}"
    if not (files / TRUTH).is_file():
        write_samples(files, count, seed)
    truths = read_truth(files / TRUTH)
    # It imports ultralytics, which not every caller needs.
    from visiond_mini.detector import validate_detector, write_dataset

    write_dataset(files, truths, dataset)
    figures = validate_detector(pack, dataset / "data.yaml", workdir)
    say(f"scored the detector on {count} unseen scenes")
    results, seconds = run_stages(pack, files, truths, count if read is None else read)
    say("ran all stages")
    refused = refuse_photographs(pack, photographs)
    return judge(pack, truths, results, figures, seconds, seed, refused)


def refuse_photographs(pack: Path, files: Sequence[Path]) -> list[bool]:
    """Whether each image is unfamiliar to every stage."""
    device = find_device()
    overrides = {name: {"batch_size": BATCH} for name in ("yolo", "clip", "blip")}
    stages = load_stages(open_pack(pack, pack.parent), overrides, device) if files else []
    answers = [
        answer
        for images in read_batches(files, BATCH, device)
        for answer in run_batch(stages, images, Counter())
    ]
    return [is_unknown(answer) == {True} for answer in answers]


def is_unknown(answers: Results) -> set[bool]:
    """What the stages say: whether an image is unfamiliar."""
    objects, tags = expect(answers, "yolo", Objects), expect(answers, "clip", Clip).tags
    caption = expect(answers, "blip", Caption).text
    unknown = {[tag.label for tag in tags] == [UNFAMILIAR], caption == UNFAMILIAR}
    return unknown | {False} if objects.count else unknown


# The stages.


def run_stages(
    pack: Path, files: Path, truths: Sequence[Truth], read: int
) -> tuple[list[Results], dict[str, float]]:
    """Each file's results by stage name (OCR's only for the first `read`),
    and each stage's seconds for an image."""
    device = find_device()
    names = [name for name in (stage.name for stage in BUILT_IN) if name != "ocr" or read]
    overrides: dict[str, dict[str, Any]] = {name: {"batch_size": BATCH} for name in names}
    if device != "cpu" and "ocr" in overrides:
        # As in the daemon: its kernels are not slowed by the many sizes of the scenes.
        overrides["ocr"]["dtype"] = STAGES["ocr"].half
    stages = load_stages(open_pack(pack, pack.parent), overrides, device)
    others = [stage for stage in stages if stage.name != "ocr"]
    results: list[Results] = []
    spent = Counter[str]()
    for part, wanted in ((truths[:read], stages), (truths[read:], others)):
        for images in read_batches([files / truth.file for truth in part], BATCH, device):
            results += run_batch(wanted, images, spent)
    seen = {"ocr": min(read, len(truths))}
    return results, {name: total / seen.get(name, len(truths)) for name, total in spent.items()}


def find_device() -> str:
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def load_stages(pack: Pack, overrides: Mapping[str, Mapping[str, Any]], device: str) -> list[Stage]:
    """A pack's stages as a worker runs them. overrides: as for resolve_all, for each wanted stage, in order."""
    stages = [build(spec, device) for spec in resolve_all(pack, overrides, overrides)]
    for stage in stages:
        stage.load()
    return stages


def run_batch(stages: Sequence[Stage], images: Sequence[Image], spent: Counter[str]) -> list[Results]:
    answers: list[dict[str, Result | ImageError]] = [{} for _ in images]
    for stage in stages:
        started = time.monotonic()
        for image, answer, known in zip(images, stage.run(images), answers, strict=True):
            known[stage.name] = answer
            if not isinstance(answer, ImageError):
                image.results[stage.name] = answer
        spent[stage.name] += time.monotonic() - started  # type: ignore[assignment]
    return list(answers)


# Judging.


def judge(
    pack: Path,
    truths: Sequence[Truth],
    results: Sequence[Results],
    detector: Mapping[str, float],
    seconds: Mapping[str, float],
    seed: int,
    refused: Sequence[bool],
) -> Scores:
    """refused: whether each photograph is unfamiliar to every stage."""
    from stages.clip.embeddings import decode_embedding

    pairs = list(zip(truths, results, strict=True))
    marks: dict[str, list[bool]] = defaultdict(list)
    kinds: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    misses: list[dict[str, str]] = []
    words, right = 0, 0
    for truth, answers in pairs:
        marked, missed = mark(truth, answers)
        for name, value in marked.items():
            marks[name].append(value)
            kinds[sort_of(truth)][name].append(value)
        misses += missed
        if isinstance(answers.get("ocr"), Ocr):
            words += sum(count_words(line.text for line in truth.lines).values())
            right += count_read(truth, answers["ocr"])
    embeddings = torch.stack(
        [decode_embedding(expect(answers, "clip", Clip).embedding) for _, answers in pairs]
    )
    picked = pick_captions(embeddings, embed_captions(pack, truths), truths)
    for (truth, _), value in zip(pairs, picked, strict=True):
        kinds[sort_of(truth)]["caption_picked"].append(value)
    return Scores(
        scenes=len(truths),
        seed=seed,
        read=len(marks["bins"]),
        map50=detector["map50"],
        map50_95=detector["map50_95"],
        caption_picked=mean(picked),
        **{name: mean(marks[name]) for name in MARKS},
        words_read=right / words if words else None,
        scenes_known=mean([is_unknown(answers) == {False} for _, answers in pairs]),
        photographs=len(refused),
        photographs_unknown=mean(refused),
        seconds=dict(seconds),
        by_kind={
            kind: {name: mean(values) for name, values in columns.items()}
            for kind, columns in sorted(kinds.items())
        },
        misses=misses[:MISSES_KEPT],
    )


MARKS = (
    "tag_first",
    "main_tag_first",
    "captions_true",
    "captions_true_of_objects",
    "groups_true_of_objects",
    "bins",
)


def mark(truth: Truth, answers: Results) -> tuple[dict[str, bool], list[dict[str, str]]]:
    """Which scores one image's results reach, and a description of each miss."""
    said = expect(answers, "blip", Caption).text
    tags = [tag.label for tag in expect(answers, "clip", Clip).tags]
    marks = {
        "tag_first": tags[0] in truth.tags,
        "main_tag_first": tags[0] == truth.tags[0],
        "captions_true": caption_is_true(said, truth),
    }
    if truth.kind == "photo":
        marks["captions_true_of_objects"] = marks["captions_true"]
        marks["groups_true_of_objects"] = groups_are_true(said, truth)
    if "ocr" in answers:
        marks["bins"] = choose_bin(answers) == truth.bin
    wrong = []
    for name, answer, wanted in (
        ("tag_first", tags[0], ", ".join(truth.tags)),
        ("captions_true", said, truth.captions[0]),
        ("bins", choose_bin(answers) if "ocr" in answers else "", truth.bin),
    ):
        if not marks.get(name, True):
            wrong.append({"file": truth.file, "miss": name, "said": answer, "true": wanted})
    return marks, wrong


def sort_of(truth: Truth) -> str:
    """The kind of a scene by which scores are grouped."""
    if truth.kind != "photo":
        return truth.kind
    groups = len(group_objects(truth))
    return "photo of 1 group" if groups == 1 else f"photo of {groups} groups"


def choose_bin(answers: Results) -> str:
    """The bin by the daemon's rule, from the results as it stores them."""
    payloads = {
        name: msgspec.json.encode(answer)
        for name, answer in answers.items()
        if not isinstance(answer, ImageError)
    }
    return binning.judge(payloads, binning.Thresholds()).name


def count_words(lines: Iterable[str]) -> Counter[str]:
    return Counter(word for line in lines for word in line.split())


def count_read(truth: Truth, ocr: Result | ImageError) -> int:
    """The number of true words that were read, each counted as often as it occurs."""
    read = count_words(line.text for line in ocr.lines) if isinstance(ocr, Ocr) else Counter[str]()
    return sum((count_words(line.text for line in truth.lines) & read).values())


def embed_captions(pack: Path, truths: Sequence[Truth]) -> dict[str, Tensor]:
    """The first caption of each scene, and its unit embedding by the pack's CLIP."""
    from transformers import CLIPModel

    from stages.clip.embeddings import TextEncoder
    from stages.pretrained.checkpoints import load_model

    encoder = TextEncoder(load_model(CLIPModel, str(pack / "clip"), torch.float32, "cpu"), str(pack / "clip"))
    captions = list(dict.fromkeys(truth.captions[0] for truth in truths))
    with torch.inference_mode():
        return dict(zip(captions, encoder.embed_texts(captions), strict=True))


def pick_captions(images: Tensor, texts: Mapping[str, Tensor], truths: Sequence[Truth]) -> list[bool]:
    """Whether each image is nearest to its true caption among a hundred;
    the others are random untrue captions.

    images: unit embeddings [scenes, dim].
    """
    captions, table = list(texts), torch.stack(list(texts.values()))
    picked = []
    for number, (image, truth) in enumerate(zip(images, truths, strict=True)):
        rng = Random(f"choices {number}")
        true = set(truth.captions)
        untrue = [place for place, caption in enumerate(captions) if caption not in true]
        others = rng.sample(untrue, min(CHOICES - 1, len(untrue)))
        likeness = table[[captions.index(truth.captions[0]), *others]] @ image
        picked.append(int(likeness.argmax()) == 0)
    return picked


def expect(answers: Results, stage: str, kind: type[Kind]) -> Kind:
    answer = answers[stage]
    if not isinstance(answer, kind):
        raise TypeError(f"the {stage} stage failed: {answer}")
    return answer


def mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--read", type=int, help="scenes for OCR and bins; all if not given")
    parser.add_argument("--seed", type=int, default=UNSEEN_SEED)
    parser.add_argument(
        "--photographs", type=Path, help="folder of photographs; if not given, those in installed packages"
    )
    parser.add_argument("--workdir", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scores = score_pack(
            options.pack,
            options.count,
            read=options.read,
            seed=options.seed,
            photographs=find_photographs(options.photographs),
            workdir=options.workdir or Path(folder),
        )
    print(msgspec.json.format(msgspec.json.encode(scores), indent=1).decode())


if __name__ == "__main__":
    main()
