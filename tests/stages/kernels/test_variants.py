"""All kernels that a stage starts are known before it starts one: in processes without Triton's interpreter,
where launches are noted and nothing runs. They are forks of one process that has imported the libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import stages
from daemon.cli.models import pretend_gpus
from daemon.config.loading import parse
from daemon.layout import resolve_models
from stages.base import StageSpec
from stages.weights.packs import open_pack, resolve
from tests.stages import captioners

# Imports what takes long, and none of our own modules: a program may change one before it imports the others.
SERVER = """
import gc, os, sys, traceback
gc.disable()  # a collection of garbage would make the imports a second slower
import cv2, msgspec, onnx, torch, torchvision, triton.language
from safetensors import torch as _
from transformers import AutoTokenizer, BlipForConditionalGeneration, BlipImageProcessor, CLIPImageProcessor, CLIPModel
from transformers import PPOCRV6SmallDetForObjectDetection
gc.freeze()
gc.enable()

for line in sys.stdin.buffer:
    program, task, folder = msgspec.json.decode(line)
    if not (child := os.fork()):
        os.environ["TRITON_CACHE_DIR"] = folder + "/kernels"
        os.dup2(os.open(folder + "/output", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(folder + "/errors", os.O_WRONLY | os.O_CREAT), 2)
        try:
            exec(program, {"task": task})
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
COMMON = """
import json, sys
import msgspec, torch
from stages import devices, registry
from stages.base import StageSpec
from stages.kernels.variants import find_variants

devices.has_kernels_for = lambda tensor: True  # before the modules below take it
spec = msgspec.convert(task, StageSpec)
kind = registry.find_class(spec)
planned = find_variants(lambda: kind.launch_kernels(spec), "9.0")

def same(launch):
    # `launch` needs no variant that is not planned
    with torch.inference_mode():
        started = find_variants(launch, "9.0")
    assert len(started) > 1, "it starts no kernel"
    for variant in started:
        assert variant in planned, f"not planned: {variant.kernel} {variant.data}"

def pictures(sizes):
    return [torch.zeros(3, *size, dtype=torch.uint8) for size in sizes]

SIZES = [[(300, 400)], [(33, 1001), (1, 40), (960, 1280)], 5 * [(211, 97)], [(2000, 50)] * 2]
"""
PROGRAMS = {
    "ocr": """
from stages.ocr import warp
from stages.ocr.descriptor import OcrOptions
from stages.ocr.fused import FusedDetector, FusedRecognizer
from stages.ocr.stage import Plan, find_files, plan_lines
from stages.ocr.ppocr import load_detector, load_recognizer

files = find_files(spec)
detector, recognizer = FusedDetector(load_detector(files["det"])), FusedRecognizer(load_recognizer(files["rec"])[0])
for count, size in (1, (64, 64)), (3, (96, 320)), (2, (736, 64)):
    same(lambda: detector.infer(torch.zeros(count, *size, 3, dtype=torch.uint8)))
for image in (50, 1), (5000, 100), (100, 5000), (30, 30), (8000, 8000):  # no map is flatter than those above
    assert min(Plan.fit(*image, OcrOptions()).map) >= 64, image
for count, columns in (1, 320), (5, 384), (2, 1280):
    widths = torch.full((count,), columns)
    same(lambda: recognizer.infer(torch.zeros(count, 48, columns, 3, dtype=torch.uint8), widths, widths))
straight, slanted = [[10, 5], [60, 5], [60, 25], [10, 25]], [[10, 5], [60, 9], [60, 29], [10, 25]]
for boxes in [straight], [slanted] * 3, [straight, slanted] * 2:
    lines = plan_lines(0, torch.tensor(boxes, dtype=torch.float32).numpy())
    same(lambda: warp.crop_with_kernel([warp.interleave(*pictures([(33, 77)]))], lines, 48, 320))
""",
    "yolo": """
from stages.yolo.network import speed_up_convolutions
from stages.yolo.letterbox import Letterbox

stage = registry.build(spec, "cpu")
same(stage.load)
speed_up_convolutions(stage.model)
for sizes in SIZES:
    for size in set(sizes):
        alike = [each for each in sizes if each == size]
        same(lambda: stage._forward(pictures(alike), [Letterbox.fit(*each, stage.size, stage.model.stride) for each in alike]))
""",
    "clip": """
stage = registry.build(spec, "cpu")
same(stage.load)
for sizes in SIZES:
    same(lambda: stage.forward(pictures(sizes)))
""",
}
PROGRAMS |= dict.fromkeys(["blip", *(CHATS := ["smolvlm", "qwen3_vl"])], PROGRAMS["clip"])
ALL = """
import importlib, json, sys
import msgspec
from triton.runtime.jit import JITFunction
from stages import registry
from stages.base import StageSpec
from stages.kernels.variants import find_variants

planned = set()
for spec in msgspec.convert(task["specs"], list[StageSpec]):
    kind = registry.find_class(spec)
    planned |= {variant.kernel for variant in find_variants(lambda: kind.launch_kernels(spec), "9.0")}
modules = map(importlib.import_module, task["modules"])
functions = {each._fn_name: each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)}
for function in functions.values():
    function.cache_key
print(json.dumps([sorted(planned),
                  sorted(f.__name__ for f in functions.values() if f.__name__.endswith("_kernel")),
                  sorted(f.__name__ for f in functions.values() if f.used_global_vals)]))
"""
STAGES = Path(stages.__file__).parent
MODULES = [
    "stages." + ".".join(file.relative_to(STAGES).with_suffix("").parts)
    for file in sorted(STAGES.rglob("*.py"))
    if "@triton.jit" in file.read_text()
]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StageSpec]:
    """Of the mini pack, and of chat models by their types, as on a GPU."""
    place = tmp_path_factory.mktemp("config")
    config = parse({"models": {"pack": "mini"}}, place)
    specs = dict(resolve_models(config, pretend_gpus("9.0")))
    for kind in CHATS:
        captioners.CAPTIONERS[kind](place / kind)
        settings = {"dtype": "bfloat16", "options": {"max_new_tokens": 2}}
        specs[kind] = resolve(open_pack(place / kind, place / "none"), "blip", settings)
    return {name: msgspec.structs.replace(spec, batch_size=3) for name, spec in specs.items()}


Run = Callable[[str, object], str]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        process.kill()  # to end by itself takes seconds


@pytest.fixture
def run(server: subprocess.Popen[bytes], tmp_path: Path) -> Run:
    """Runs a program with its task in its own process; returns what it prints. Its kernels are in `kernels`."""

    def run(program: str, task: object) -> str:
        assert server.stdin
        assert server.stdout
        server.stdin.write(msgspec.json.encode((program, task, str(tmp_path))) + b"\n")
        server.stdin.flush()
        assert server.stdout.readline() == b"0\n", (tmp_path / "errors").read_text()
        return (tmp_path / "output").read_text()

    return run


@pytest.mark.parametrize("stage", PROGRAMS)
def test_no_batch_needs_a_kernel_that_is_not_compiled_beforehand(
    stage: str, specs: dict[str, StageSpec], run: Run, tmp_path: Path
) -> None:
    run(COMMON + PROGRAMS[stage], specs[stage])
    assert not (tmp_path / "kernels").exists()  # nothing was compiled to find out


def test_every_kernel_is_planned_and_its_digest_is_the_same_in_every_process(
    specs: dict[str, StageSpec], run: Run
) -> None:
    task = {"specs": list(specs.values()), "modules": MODULES}
    planned, defined, with_globals = msgspec.json.decode(run(ALL, task))
    assert planned == defined
    assert (
        with_globals == []
    )  # Triton's digest of a kernel that calls such a function depends on the order of use


COMPILING = """
from triton import knobs
from stages.kernels import pointwise, variants

variant = next(each for each in planned if each.kernel == "scale_channels_kernel")
variants.compile_variant(variant, with_launcher=False)
channels = json.loads(variant.data)["constant_vals"][0]
pointwise.scale_channels_kernel.device_caches.clear()
hits = []
knobs.compilation.listener = lambda **times: hits.append(times["cache_hit"])
with variants._aimed_at("9.0"):
    pointwise.scale_channels_kernel.warmup(
        torch.zeros(1, 7, channels, dtype=torch.float16), torch.zeros(1, channels), 7, CHANNELS=channels,
        BLOCK_M=32, BLOCK_C=1 << (channels - 1).bit_length(), grid=(1, 1))
print(hits)
"""


def test_a_launch_finds_what_was_compiled_beforehand(
    specs: dict[str, StageSpec], run: Run, tmp_path: Path
) -> None:
    assert run(COMMON + COMPILING, specs["ocr"]).strip() == "[True]"
    assert list(tmp_path.glob("kernels/*/scale_channels_kernel.cubin"))
