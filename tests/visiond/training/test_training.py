"""Training on one's own labels, with small models on the CPU: from a file of labels to a folder that a stage takes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn, cast

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from daemon.config.loading import parse
from daemon.core.errors import WrongArgument
from daemon.core.labels import Kind
from stages.blip.descriptor import Caption
from stages.clip.descriptor import Clip
from stages.contract.base import Limits
from stages.contract.manifest import PackError
from stages.contract.processes import environment, python
from stages.images.decoder import Decoders
from stages.images.images import read_batches
from stages.weights.packs import open_pack, resolve
from stages.yolo.candidates import corners_of
from stages.yolo.descriptor import Objects
from tests.daemon_process import wait_for
from tests.stages.captioners import make_blip, make_florence
from tests.stages.checkpoints import DETECTORS, TOWERS, Make, made_once
from tests.visiond.training.labelled import (
    CAPTIONS,
    COLORS,
    END,
    ONE,
    PATIENCE,
    draw_labelled,
    load_stage,
    make_job,
    start_forked,
    train_now,
)
from visiond.training import run
from visiond.training.command import forget
from visiond.training.data import Data, read_file
from visiond.training.detector import DetectorLearner
from visiond.training.job import Task, check_base, write_job
from visiond.training.launch import TrainingFailed, train
from visiond.training.learning import TrainingImages
from visiond.training.log import read_log
from visiond.training.settings import CHECKPOINTS, LOG, TrainingPlace

pytestmark = pytest.mark.timeout(3 * PATIENCE)  # up to three trainings, each in processes of its own
SMALL = DETECTORS | TOWERS | {"blip": make_blip, "florence": make_florence}


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw the curves takes as long as a small training. Trainings in processes of their own do it."""
    monkeypatch.setattr("visiond.training.card.draw_curves", lambda *_: None)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """How a process of a training is started is the matter of tests/visiond/training/test_children.py."""
    monkeypatch.setattr("visiond.training.launch.start_child", start_forked)


def losses_of(work: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(work / LOG) if "loss" in entry]


def copy_without_dropout(base: Path, to: Path) -> Path:
    config = shutil.copytree(base, to) / "config.json"
    config.write_text(re.sub(r'"(dropout|drop_path_rate)": [\d.]+', r'"\1": 0.0', config.read_text()))
    return to


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_labelled(tmp_path_factory.mktemp("labelled"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return made_once(tmp_path_factory.mktemp("bases"), lambda kind, at: SMALL[kind](at))


@pytest.fixture
def data(folder: Path) -> Data:
    return read_file(folder / "coco.json", folder, Kind.OBJECTS, 0.1)


def detects_colors(model: Path, folder: Path) -> bool:
    """Whether the stage takes a trained model, and answers with its names."""
    stage = load_stage(model, "detector", conf=0.0)
    [[image]] = read_batches([folder / "0.png"], 1, "cpu")
    [found] = stage.run([image])
    assert isinstance(found, Objects)
    return {each.label for each in found.detections} == set(COLORS)


def test_a_detector_learns_labels_and_the_stage_takes_the_result(
    folder: Path, base: Make, tmp_path: Path
) -> None:
    options = ["--epochs", "1", "--batch", "8", "--learning-rate", "0.001", "--out", "mine"]
    words = python("-m", "daemon", "train", "detector", *options)
    told = subprocess.run(
        [*words, "--base", base("d_fine"), "--labels", folder / "coco.json"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert told.returncode == 0, told.stderr + told.stdout
    assert "on held-out images mAP" in told.stdout
    out = tmp_path / "mine"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"`visiond compare --stage yolo --model {out}` shows" in told.stdout
    assert json.loads((out / "config.json").read_text())["id2label"] == {"0": "circle", "1": "tree"}
    card = (out / "README.md").read_text()
    assert f'model = "{out}"' in card
    assert "| epoch | mAP | AP50 |" in card
    assert "but not in `visiond score`" in card
    assert detects_colors(out, folder)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_model_learns_tags_and_the_stage_gives_them(
    folder: Path, base: Make, tmp_path: Path, kind: str
) -> None:
    data = read_file(folder / "tags.csv", folder, Kind.TAGS, 0.1)
    train_now(
        make_job(base(kind), tmp_path / "work", "tags", batch_size=8, steps=30, learning_rate=3e-3), data
    )
    stage = load_stage(tmp_path / "work-out", "tags")
    [images] = read_batches([folder / "0.png", folder / "1.png"], 2, "cpu")
    assert [cast(Clip, result).tags[0].label for result in stage.run(images)] == ["circle", "tree"]
    scores = [entry["scores"] for entry in read_log(tmp_path / "work" / LOG) if "scores" in entry]
    assert scores[-1]["recall"] == 1.0


@pytest.mark.parametrize(("kind", "steps", "held_out"), [("blip", 40, 0.1), ("florence", 60, 0.0)])
def test_a_model_learns_captions_and_the_stage_writes_them(
    folder: Path, base: Make, tmp_path: Path, kind: str, steps: int, held_out: float
) -> None:
    data = read_file(folder / "captions.csv", folder, Kind.CAPTION, held_out)
    settings = {"batch_size": 8, "steps": steps, "learning_rate": 3e-3, "checkpoint_every": 0}
    sober = copy_without_dropout(base(kind), tmp_path / "base")
    train_now(make_job(sober, tmp_path / "work", "captions", **settings), data)
    stage = load_stage(tmp_path / "work-out", "captions", max_new_tokens=20)
    [images] = read_batches([folder / "0.png", folder / "1.png"], 2, "cpu")
    texts = [cast(Caption, result).text.removesuffix(END) for result in stage.run(images)]
    assert texts == [*CAPTIONS.values()]


def test_what_a_detector_is_shown_of_a_box_is_what_it_answers_with(
    folder: Path, base: Make, data: Data, tmp_path: Path
) -> None:
    """Also in a processor that pads, and of an image that is mirrored or was stored turned."""
    padded = Path(shutil.copytree(base("rf_detr"), tmp_path / "base"))
    settings = json.loads((padded / "preprocessor_config.json").read_text())
    pad = {
        "size": {"max_height": 112, "max_width": 112},
        "do_pad": True,
        "pad_size": {"height": 112, "width": 112},
    }
    (padded / "preprocessor_config.json").write_text(json.dumps(settings | pad))
    learner = DetectorLearner(padded, data.names, torch.device("cpu"))
    with closing(Decoders(1, Limits())) as decoders:
        batches = learner.batches(TrainingImages(data.learnt, torch.device("cpu"), decoders), flip=True)
        batch = batches.take(np.arange(len(batches)), np.random.default_rng(1))
        images = batches.pictures.read(range(len(batches)))
    assert "pixel_mask" in batch
    mirrored = 0
    for target, sample, image in zip(batch["labels"], data.learnt, images, strict=True):
        corners, [truth] = corners_of(target["boxes"]), sample.objects
        [found] = learner.detr.choose(torch.ones(1), target["class_labels"], corners, image).detections
        assert found.label == truth.label
        x0, y0, x1, y1 = truth.box
        turned = (image.width - x1, y0, image.width - x0, y1)
        assert found.box == pytest.approx(truth.box, abs=0.01) or found.box == pytest.approx(turned, abs=0.01)
        mirrored += found.box != pytest.approx(truth.box, abs=0.01)
        down, across = learner.detr.filled(image)
        assert (down < 1, across) == (True, 1.0)
    assert 0 < mirrored < len(images)


def test_a_training_that_is_stopped_says_what_continues_it(folder: Path, base: Make, tmp_path: Path) -> None:
    words = python("-m", "daemon", "train", "tags", "--out", "mine")
    with subprocess.Popen(
        [*words, "--base", base("clip"), "--labels", folder / "tags.csv"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert any(line.startswith("Training on") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    assert f"Stopped. `visiond train tags --out {tmp_path / 'mine'} --resume` continues" in " ".join(
        said.split()
    )


def test_a_killed_training_that_is_resumed_ends_with_the_same_weights(
    base: Make, data: Data, tmp_path: Path
) -> None:
    whole = train_now(make_job(base("d_fine"), tmp_path / "whole"), data)
    job = make_job(base("d_fine"), tmp_path / "killed")
    file = write_job(job, data)
    command = python("-c", "from visiond.training import run; run.main()", str(file))
    checkpoints = tmp_path / "killed" / CHECKPOINTS
    with start_forked(command, tmp_path / "output", environment({"ACCELERATE_USE_CPU": "true"})) as process:
        wait_for(lambda: len([*checkpoints.glob("step-*")]) > 1, "checkpoints", PATIENCE, process=process)
        process.kill()
    assert not Path(job.out).exists()
    # It begins with what is in the checkpoint, whatever its base would now say.
    other = Path(shutil.copytree(base("d_fine"), tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: np.asarray(weight * 0) for name, weight in weights.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    again = train_now(msgspec.structs.replace(job, resume=True, base=str(other)), data)
    assert whole.keys() == again.keys()
    assert all(np.array_equal(whole[name], again[name]) for name in whole)
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "whole")


def test_a_detector_whose_images_keep_their_shape_is_refused_as_base(base: Make, tmp_path: Path) -> None:
    config = parse({"inbox": [{"path": "in"}]}, tmp_path)
    check_base("detector", str(base("lw_detr")), config.models.folder)
    with pytest.raises(
        WrongArgument, match=r'cannot be trained: .* model_type, "yolos", take images of any shape\.'
    ):
        check_base("detector", str(base("yolos")), config.models.folder)


@pytest.mark.parametrize(
    ("kind", "task", "heads"),
    [("rf_detr", "detector", ("bbox", "class")), ("florence", "captions", ("language_model.decoder",))],
)
def test_the_head_alone_learns_and_the_rest_stays(
    folder: Path, base: Make, data: Data, tmp_path: Path, kind: str, task: Task, heads: tuple[str, ...]
) -> None:
    if task == "captions":
        data = read_file(folder / "captions.csv", folder, Kind.CAPTION, 0.1)
    job = make_job(base(kind), tmp_path / "work", task, learning_rate=1e-2)
    after = train_now(msgspec.structs.replace(job, head_only=True), data)
    before = load_file(base(kind) / "model.safetensors")
    shared = [name for name in after if name in before and after[name].shape == before[name].shape]
    changed = [name for name in shared if not np.array_equal(after[name], before[name])]
    assert changed
    assert all(any(part in name for part in heads) for name in changed)


def test_gradient_checkpointing_computes_layers_again_for_the_same_gradient(base: Make, data: Data) -> None:
    device, gradients, calls = torch.device("cpu"), list[torch.Tensor](), list[int]()
    for saving in (False, True):
        torch.manual_seed(1)
        learner = DetectorLearner(base("d_fine"), data.names, device).train()
        layer = learner.model.model.decoder.layers[0]
        calls.append(0)

        def count(*given: Any, forward: Any = layer.forward, **named: Any) -> Any:
            calls[-1] += 1
            return forward(*given, **named)

        layer.forward = count
        if saving:
            learner.save_memory()
        with closing(Decoders(1, Limits())) as decoders:
            batches = learner.batches(TrainingImages(data.learnt, device, decoders), flip=False)
            batch = batches.take(np.arange(2), np.random.default_rng(1))
        torch.manual_seed(1)
        learner(batch)["loss"].backward()
        linear = next(part for part in layer.modules() if isinstance(part, torch.nn.Linear))
        assert linear.weight.grad is not None
        gradients.append(linear.weight.grad)
    assert calls == [1, 2]
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4)


@pytest.mark.usefixtures("forked")
def test_two_processes_learn_what_one_does_with_as_many_images_at_once_as_both_can_have(
    folder: Path, base: Make, data: Data, tmp_path: Path
) -> None:
    program = """
import os
from visiond.training import run
run._find_micro_batch = lambda *_: 1 + int(os.environ["RANK"])
run.main()
"""
    sober = copy_without_dropout(base("rf_detr"), tmp_path / "base")  # processes draw dropouts of their own
    short: dict[str, Any] = {"steps": 2, "checkpoint_every": 0}
    one = train_now(make_job(sober, tmp_path / "one", "detector", **short), data)
    job = make_job(sober, tmp_path / "two", "detector", **short)
    train(job, data, ONE * 2, lambda _: None, python("-c", program))
    two = load_file(tmp_path / "two-out" / "model.safetensors")
    # Adam makes noise of gradients that are nearly nothing as large as others, so all weights together are compared.
    began = load_file(sober / "model.safetensors")
    shared = [name for name in one if name in began and one[name].shape == began[name].shape]
    moved = sum(float(np.abs(one[name] - began[name]).sum()) for name in shared)
    apart = sum(float(np.abs(one[name] - two[name]).sum()) for name in shared)
    assert apart < 0.1 * moved
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-3)
    entries = read_log(tmp_path / "two" / LOG)
    assert [(each["processes"], each["micro_batch"]) for each in entries if "loss" in each] == [(2, 1)] * 2
    assert detects_colors(tmp_path / "two-out", folder)


# The processes of a training, with programs in their place.


@pytest.mark.usefixtures("forked")
def test_memory_that_runs_out_halves_the_batch_and_resumes(
    folder: Path, base: Make, data: Data, tmp_path: Path
) -> None:
    job = make_job(base("d_fine"), tmp_path / "work", batch_size=8)
    said = list[str]()
    program = """
import sys, torch
from visiond.training import run
from visiond.training.detector import DetectorLearner
forward = DetectorLearner.forward
def forward_two(learner, batch):
    if len(batch["labels"]) > 2:
        raise torch.OutOfMemoryError("no room")
    return forward(learner, batch)
DetectorLearner.forward = forward_two
run.main()
"""
    train(job, data, ONE, said.append, python("-c", program))
    assert [line for line in said if "Memory ran out" in line] == [
        "Memory ran out: the training goes on with 4 images at once.",
        "Memory ran out: the training goes on with 2 images at once.",
    ]
    entries = [entry for entry in read_log(tmp_path / "work" / LOG) if "loss" in entry]
    assert [(entry["batch_size"], entry["micro_batch"]) for entry in entries] == [(8, 2)] * 4
    assert detects_colors(tmp_path / "work-out", folder)


def test_a_training_that_is_resumed_before_its_first_checkpoint_says_that_it_begins(
    data: Data, tmp_path: Path
) -> None:
    job, said = make_job(tmp_path, tmp_path / "work"), list[str]()
    for resume in (False, True):
        train(msgspec.structs.replace(job, resume=resume), data, ONE, said.append, python("-c", ""))
    assert said == ["There is no checkpoint yet, so the training begins with its first step."]


def test_a_gpu_that_is_too_small_is_left_out_by_its_name(data: Data, tmp_path: Path) -> None:
    job, said = make_job(tmp_path, tmp_path / "work"), list[str]()
    program = """
import os, pathlib, sys, time
if os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ.get("LOCAL_RANK", 0))] == "small":
    sys.exit(71)
if "WORLD_SIZE" in os.environ:
    time.sleep(60)
pathlib.Path(sys.argv[1]).with_name("seen").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
"""
    places = [TrainingPlace("large", "GPU 0 (H200)"), TrainingPlace("small", "GPU 1 (T4)")]
    train(job, data, places, said.append, python("-c", program))
    assert said == ["GPU 1 (T4) is left out: its memory is too small for a batch of one."]
    assert (tmp_path / "work" / "seen").read_text() == "large"


def test_of_several_equal_places_only_the_one_that_is_too_small_is_left_out(
    data: Data, tmp_path: Path
) -> None:
    job = make_job(tmp_path, tmp_path / "work")
    program = """
import os, pathlib, sys, time
if os.environ["WORLD_SIZE"] == "3":
    sys.exit(71) if os.environ["RANK"] == "1" else time.sleep(60)
pathlib.Path(sys.argv[1]).with_name("seen").write_text(os.environ["WORLD_SIZE"])
"""
    train(job, data, ONE * 3, lambda _: None, python("-c", program))
    assert (tmp_path / "work" / "seen").read_text() == "2"


def test_the_process_that_fails_first_ends_the_training_with_its_words(data: Data, tmp_path: Path) -> None:
    """Not the others, which only miss it."""
    program = """
import os, sys
print("says", os.environ["RANK"])
sys.exit(73) if os.environ["RANK"] == "0" else os.kill(os.getpid(), 9) if "kill" in sys.argv[1] else sys.exit(1)
"""
    for work, how in (("ended", "exited with status 1"), ("killed", "was killed by SIGKILL")):
        job = make_job(tmp_path, tmp_path / work)
        with pytest.raises(TrainingFailed, match=rf"process 1 {how}, and .*/output-1\.txt ends with"):
            train(job, data, ONE * 2, lambda _: None, python("-c", program))


def test_a_model_whose_kernels_are_not_deterministic_is_refused_with_a_sentence(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(tmp_path, tmp_path / "work")
    settings = msgspec.structs.replace(job.settings, deterministic=True)
    write_job(msgspec.structs.replace(job, settings=settings), data)

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(
        run, "LEARNERS", {"detector": lambda *_: torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))}
    )
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("sys.argv", ["", job.work + "/job.json"])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # and as it was at the end
    try:
        with pytest.raises(SystemExit) as left:
            run.main()
    finally:
        torch.use_deterministic_algorithms(False)
    why = "put_ does not have a deterministic implementation: train this model without --deterministic.\n"
    assert (left.value.code, capsys.readouterr().err) == (1, why)


def test_a_gpu_that_is_too_small_is_named_with_its_host(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun, which can leave none out."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    def refuse(*_: object) -> NoReturn:
        raise MemoryError("no room")

    job = make_job(tmp_path, tmp_path / "work")
    monkeypatch.setattr(run, "LEARNERS", {"detector": refuse})
    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("sys.argv", ["", str(write_job(job, data))])
    monkeypatch.setattr("socket.gethostname", lambda: "second")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit) as left:
        run.main()
    assert (left.value.code, capsys.readouterr().err) == (71, "second, GPU 3: no room\n")


def test_a_folder_that_a_training_has_replaced_is_not_called_altered(tmp_path: Path) -> None:
    out, models = Path(shutil.copytree("stages/mini/clip", tmp_path / "mine")), tmp_path / "models"

    def use() -> str:
        return resolve(open_pack(out, models), "clip").fingerprint

    before = use()
    with (out / "config.json").open("a") as config:
        config.write("\n")
    with pytest.raises(PackError, match=r"config\.json is altered"):
        use()
    forget(out, models)
    assert use() != before
