"""What is written beside a trained model: its card, its curves, and what it was made of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from daemon import __version__
from stages.contract.folders import replace_folder
from visiond.training.data import AS_SAID, Data
from visiond.training.job import FINAL, RANGES, STAGES, Task, TrainingJob
from visiond.training.log import draw_curves, read_log
from visiond.training.settings import LOG

MARK = "training.json"  # in a folder that a training has made
MOST_NAMES = 100  # in a card
Range = tuple[float | None, float | None]  # None: no image has anything that can be scored
CARD = """\
---
library_name: transformers
base_model: {base}
---

# {title}

Trained by visiond {version} (`visiond train {task}`) from {base}, whose license holds for this model too. To use it:

    [stages.{stage}]
    model = "{out}"

## Data

{learnt:,} images to learn from, and {held_out:,} held out for the scores, {chosen}. SHA-256 of all
digests and labels: `{digest}`.
{left_out}
{names}

## How

| | |
|---|---|
{options}

![Curves](curves.png)

## Scores

{scores}
"""


def publish(job: TrainingJob, data: Data) -> None:
    """Put the trained model, its card, log and curves into the place of the result."""
    work, out = Path(job.work), Path(job.out)
    new = work / FINAL
    entries = read_log(work / LOG)
    draw_curves({job.task: work / LOG}, new / "curves.png")
    shutil.copy(work / LOG, new)
    (new / MARK).write_bytes(msgspec.json.format(msgspec.json.encode(_facts(job, data, entries)), indent=1))
    (new / "README.md").write_text(write_card(job, data, entries))
    out.parent.mkdir(parents=True, exist_ok=True)
    if new.stat().st_dev != out.parent.stat().st_dev:
        new = Path(shutil.move(new, out.with_name(f".{out.name}.new")))
    replace_folder(out, new)


def is_made_by_training(folder: Path) -> bool:
    return (folder / MARK).is_file()


def write_card(job: TrainingJob, data: Data, entries: Sequence[Mapping[str, Any]]) -> str:
    names = data.names if job.task != "captions" else []
    shown = ", ".join(names[:MOST_NAMES]) + f" and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES)
    ranges = msgspec.json.decode((Path(job.work) / RANGES).read_bytes(), type=dict[str, Range])
    return CARD.format(
        base=job.base_name,
        title=Path(job.out).name,
        version=__version__,
        task=job.task,
        stage=STAGES[job.task],
        out=job.out,
        learnt=len(data.learnt),
        held_out=len(data.held_out),
        chosen=_say_who_chose(data),
        digest=data.digest,
        left_out="".join(f"Left out: {why} ({number:,}). " for why, number in data.left_out.items()),
        names=f"\nNames: {shown}." if names else "",
        options="\n".join(f"| {name} | {value} |" for name, value in _options(job, entries)),
        scores="\n".join(_scores(job.task, entries, ranges)),
    )


def _say_who_chose(data: Data) -> str:
    others = "chosen by their digests"
    if not data.said:
        return others
    return f"{data.said:,} of which are {AS_SAID}" + f"; the others {others}" * (
        data.said < len(data.held_out)
    )


def _facts(job: TrainingJob, data: Data, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = [entry for entry in entries if "scores" in entry]
    return {
        "visiond": __version__,
        "job": job,
        "labels": data.digest,
        "learnt": len(data.learnt),
        "held_out": len(data.held_out),
        "scores": scores[-1]["scores"] if scores else {},
    }


def _options(job: TrainingJob, entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    last, settings = [entry for entry in entries if "loss" in entry][-1], job.settings
    yield "weights", "the head alone" if job.head_only else "all"
    yield "epochs", f"{last['epoch']:g} in {last['step']:,} steps of {last['batch_size']} images"
    yield "learning rate", f"{settings.learning_rate:g} (AdamW, weight decay {settings.weight_decay:g})"
    yield "precision, seed", f"{settings.precision}, {settings.seed}"
    yield "processes", f"{last['processes']}, each with {last['micro_batch']} images at once"
    yield "mirrored", "half of the images" if job.flip else "none"
    memory = f"{last['memory_bytes'] / 2**30:.1f} GiB of each GPU" if last["memory_bytes"] else "on a CPU"
    yield "time, memory", f"{last['elapsed'] / 60:.1f} minutes, {memory}"


def _scores(task: Task, entries: Sequence[Mapping[str, Any]], ranges: Mapping[str, Range]) -> Iterator[str]:
    """A table by epochs; of the last one with the range that holds 95 of 100 resamples of the images."""
    scored = [entry for entry in entries if "scores" in entry]
    if not scored:
        yield "No image was held out."
        return
    names = list(scored[0]["scores"])
    yield "On the held-out images, as `visiond score` defines them. The last line has the range that holds 95 of 100 resamples."
    if task == "detector":
        yield "Objects with a lower score than `conf` under `[stages.yolo.options]` count here, but not in `visiond score`."
    yield ""
    yield "| epoch | " + " | ".join(names) + " |"
    yield "|---|" + "---|" * len(names)
    for entry in scored:
        figures = [_figure(entry["scores"][name]) for name in names]
        if entry is scored[-1]:
            figures = [
                f"{each} ({_figure(ranges[name][0])} to {_figure(ranges[name][1])})"
                if None not in ranges.get(name, (None, None))
                else each
                for name, each in zip(names, figures, strict=True)
            ]
        yield f"| {entry['epoch']:.2f} | " + " | ".join(figures) + " |"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
