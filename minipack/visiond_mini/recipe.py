"""Makes the mini pack: scenes, three trainings in parallel, scores, and the pack with its card.

    python -m visiond_mini.recipe --out stages/mini

`visiond train mini` is the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stages.contract.folders import replace_folder, restore_folder
from stages.contract.manifest import Manifest, PackError
from stages.contract.processes import environment, python
from stages.yolo.structure import has_library
from visiond.training.children import Child, InUse, end_children, locked, start_child, stopped_in_order
from visiond.training.log import draw_curves, read_log
from visiond.training.settings import LOG, TrainerSettings
from visiond_mini.cache import CachePlan, write_cache
from visiond_mini.card import Card, read_card, read_training, write_card
from visiond_mini.job import FINAL, DetectorJob, TrainingJob, forget_training
from visiond_mini.options import KINDS, Options, check_place, parse_options

NOTICE = "mini pack: a demonstration that knows only the toy scenes of `visiond samples`"
DESCRIPTION = "Small models trained on synthetic scenes by `visiond train mini`."
DETECTOR_SCENES = 40_000  # the first ones; they also train the detector
POLL_SECONDS = 5.0


class TrainingFailed(Exception):
    """A training ended with an error; the message says where its output is."""


Say = Callable[[str], None]


def train_mini(options: Options, say: Say = print) -> dict[str, Any]:
    """Make the mini pack. Returns its scores; empty if it is not scored.

    Raises TrainingFailed; InUse if another training uses the workdir; PackError
    if only some models are trained and `out` has no pack with the others.
    """
    with locked(options.workdir) as lock, stopped_in_order():
        return make_pack(options, say, lock)


def make_pack(options: Options, say: Say, lock: int) -> dict[str, Any]:
    from visiond_mini.familiarity import COUNT, add_familiarity

    if not has_library():
        raise PackError("training and scoring use ultralytics: pip install 'visiond[train,ultralytics]'.")
    started = time.monotonic()
    restore_folder(options.out)
    known = read_card(options.out).trainings if set(options.only) != set(KINDS) else {}

    def report(text: str) -> None:
        say(f"[{time.monotonic() - started:5.0f} s] {text}")

    if not options.resume:
        # Before the scenes, so that a run that is killed while it makes them cannot resume older trainings.
        for kind in options.only:
            forget_training(options.workdir / kind)
    data = options.workdir / "scenes"
    if not (options.resume and (data / "examples.jsonl").is_file()):
        make_scenes(options, data, report)
    train_all(options, data, report, lock)
    pack_models(options)
    add_familiarity(options.out, options.workdir / "familiarity", min(COUNT, options.scenes), report)
    report(f"the pack is in {options.out}")
    trainings = known | {
        kind: read_training(log, count_scenes(data), options.seed) for kind, log in list_logs(options).items()
    }
    finish_pack(options, Card(trainings), {})  # so that nothing is lost if the scoring fails
    scores = score(options, report) if options.score else {}
    finish_pack(options, Card(trainings, scores), scores)
    report("done")
    return scores


def count_scenes(folder: Path) -> int:
    return (folder / "examples.jsonl").read_bytes().count(b"\n")


def make_scenes(options: Options, folder: Path, report: Say) -> None:
    from visiond_mini.mini import Sizes

    sizes = Sizes()
    detected = DETECTOR_SCENES if "yolo" in options.only else 0
    plan = CachePlan(
        folder,
        options.seed,
        options.scenes,
        sizes.image_size,
        detected,
        sizes.yolo_size,
        options.data_seconds,
    )
    marked = 0

    def show(done: int) -> None:
        nonlocal marked
        if done >= marked + 5000:
            marked = done
            report(f"{done} scenes")

    report(f"{write_cache(plan, show)} scenes in {folder}")


# Trainings.


def list_jobs(options: Options, data: Path) -> dict[str, Any]:
    sizes = {kind: min(size, count_scenes(data)) for kind, size in options.batch_sizes.items()}
    jobs: dict[str, Any] = {
        kind: TrainingJob(
            kind=kind,  # type: ignore[arg-type]
            folder=str(options.workdir / kind),
            examples=str(data),
            settings=TrainerSettings(
                seed=options.seed,
                batch_size=sizes[kind],
                epochs=options.epochs,
                seconds=options.seconds[kind],
                learning_rate=rate,
            ),
            resume=options.resume,
        )
        for kind, rate in (("clip", 1.5e-3), ("blip", 1e-3))
    }
    jobs["yolo"] = DetectorJob(
        folder=str(options.workdir / "yolo"),
        dataset=str(data / "detector" / "data.yaml"),
        seed=options.seed,
        batch_size=sizes["yolo"],
        seconds=options.seconds["yolo"],
        epochs=round(options.epochs),
        workers=options.workers,
        resume=options.resume,
    )
    return {kind: jobs[kind] for kind in options.only}


def train_all(options: Options, data: Path, report: Say, lock: int) -> None:
    """Run the trainings in parallel, each in a process with its output in a file. Raises TrainingFailed."""
    running: dict[str, Child] = {}
    try:
        for kind, job in list_jobs(options, data).items():
            running[kind] = start_job(options, kind, job, lock)
        report(f"training {', '.join(running)}")
        watch(options, running, report)
    finally:
        end_children(running.values())


def start_job(options: Options, kind: str, job: Any, lock: int) -> Child:
    folder = options.workdir / kind
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(job), indent=1))
    module = ["-m", "visiond_mini.detector" if kind == "yolo" else "visiond_mini.job", str(file)]
    command = python(*module)
    if options.processes > 1 and kind != "yolo":
        launch = [
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            str(options.processes),
        ]
        port = 29500 + KINDS.index(kind)
        command = python(*launch, "--main_process_port", str(port), *module)
    settings = {"YOLO_CONFIG_DIR": str(options.workdir), "TOKENIZERS_PARALLELISM": "true"}
    return start_child(command, folder / "output.txt", environment(settings), lock)


def watch(options: Options, running: Mapping[str, Child], report: Say) -> None:
    """Report their progress until all have ended. Raises TrainingFailed as soon as one has failed."""
    reported_at = time.monotonic()
    while True:
        for kind, process in running.items():
            if process.poll():
                raise TrainingFailed(describe_failure(options.workdir / kind / "output.txt", kind))
        alive = [process for process in running.values() if process.returncode is None]
        if not alive:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            alive[0].wait(POLL_SECONDS)
        if time.monotonic() - reported_at > 4 * POLL_SECONDS:
            reported_at = time.monotonic()
            report(" · ".join(describe_progress(kind, options.workdir / kind / LOG) for kind in running))


def describe_failure(output: Path, kind: str) -> str:
    end = output.read_text(errors="replace")[-3000:]
    return f"the training of {kind} failed; {output} ends with:\n{end}"


def describe_progress(kind: str, log: Path) -> str:
    entries = read_log(log)
    if not entries:
        return f"{kind} starts"
    last = entries[-1]
    return f"{kind} {min(last['progress'], 1):.0%} loss {last['loss']:.3f} at {last['images_per_second']:.0f} images/s"


# The pack.


def pack_models(options: Options) -> None:
    """Replace the pack by one with the trained weights, and the old weights of models that were not trained."""
    import torch
    from transformers import BlipForConditionalGeneration, CLIPModel

    from stages.pretrained.checkpoints import load_model
    from stages.weights import published
    from stages.yolo import library, weights
    from stages.yolo.descriptor import FILES
    from visiond_mini.detector import LAST
    from visiond_mini.mini import Sizes, make_models

    def find(kind: str) -> str:
        return str(options.workdir / kind / FINAL if kind in options.only else options.out / kind)

    models = make_models(options.seed, published.Vocabulary.of_scenes(), Sizes())
    models.clip = load_model(CLIPModel, find("clip"), torch.float32, "cpu")
    models.blip = load_model(BlipForConditionalGeneration, find("blip"), torch.float32, "cpu")
    if "yolo" in options.only:
        state, _ = library.read_checkpoint(options.workdir / "yolo" / LAST)
        models.yolo.load_state_dict(state)
    else:
        models.yolo, _ = weights.load_network({role: str(options.out / file) for role, file in FILES.items()})
    part = options.out.with_name(f".{options.out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    published.save_models(
        models, part, Manifest(name="mini", description=DESCRIPTION, trained=True, notice=NOTICE)
    )
    check_place(options.out)
    replace_folder(options.out, part)


def score(options: Options, report: Say) -> dict[str, Any]:
    from stages.scenes.photographs import find_photographs
    from visiond_mini.score import score_pack

    os.environ["YOLO_CONFIG_DIR"] = str(options.workdir)
    workdir = options.workdir / "unseen"
    scores = score_pack(
        options.out,
        options.score,
        read=options.read,
        workdir=workdir,
        photographs=find_photographs(),
        say=report,
    )
    figures: dict[str, Any] = msgspec.to_builtins(scores)
    for name, value in figures.items():
        if isinstance(value, int | float):
            report(f"{name:>26} {round(value, 4)}")
    return figures


def list_logs(options: Options) -> dict[str, Path]:
    return {kind: options.workdir / kind / LOG for kind in options.only}


def finish_pack(options: Options, card: Card, scores: Mapping[str, Any]) -> None:
    write_card(options.out, card)
    if options.report:
        write_report(options, options.report, scores, list_logs(options))


def write_report(options: Options, folder: Path, scores: Mapping[str, Any], logs: Mapping[str, Path]) -> None:
    """Write mini.tar.gz, log.jsonl, curves.png and scores.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "mini.tar.gz", "w:gz") as archive:
        archive.add(options.out, "mini")
    (folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    lines = [json.dumps({"model": kind} | entry) for kind, log in logs.items() for entry in read_log(log)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    draw_curves(logs, folder / "curves.png")


def main() -> None:
    try:
        train_mini(parse_options(), lambda text: print(text, flush=True))
    except (TrainingFailed, InUse, PackError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
