"""All kernels that a stage starts are known before it starts one, and each compiles as the layers start it, which takes no
GPU: in processes without Triton's interpreter, where launches are noted and nothing runs. They are forks of one process
that has imported the libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import stages
from daemon.cli.tuning import pretend_gpus
from daemon.config.loading import parse
from daemon.layout.models import resolve_models
from stages.contract.base import StageSpec
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
from stages.images import devices
from stages.registry import registry
from stages.contract.base import StageSpec
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
from stages.ocr.pieces import PiecePlan
from stages.ocr.stage import find_files, plan_lines
from stages.ocr.loading import open_detector, open_recognizer

files = find_files(spec)
detector, recognizer = FusedDetector(open_detector(files["det"])), FusedRecognizer(open_recognizer(files["rec"])[0])
for count, size in (1, (64, 64)), (3, (96, 320)), (2, (736, 64)):
    same(lambda: detector.infer(torch.zeros(count, *size, 3, dtype=torch.uint8)))
for image in (50, 1), (5000, 100), (100, 5000), (30, 30), (8000, 8000):  # no map is flatter than those above
    assert min(PiecePlan.fit(*image, OcrOptions()).map) >= 64, image
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
from stages.registry import registry
from stages.contract.base import StageSpec
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


FAILING = """
import os, pathlib
from stages.kernels.variants import compile_variant

ptxas = pathlib.Path(os.environ["TRITON_CACHE_DIR"]).with_name("ptxas")
ptxas.write_text("#!/bin/sh\\necho 'Cuda compilation tools, release 12.8, V12.8.93'\\n[ $# = 1 ]\\n")
ptxas.chmod(0o755)
os.environ |= dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), str(ptxas))
try:
    compile_variant(planned[0], with_launcher=False)
except Exception as error:
    print("raised", type(error).__name__)
"""


def test_an_error_of_the_compiler_is_raised(specs: dict[str, StageSpec], run: Run) -> None:
    assert "raised PTXASError" in run(COMMON + FAILING, specs["yolo"])


EVERY = """
import math, os
del os.environ["TRITON_CACHE_DIR"]  # to compile takes long; what is unchanged has been compiled by an earlier run
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from stages.kernels import convolution, language, launch, pointwise, resize as resizekernel
from stages.yolo import letterbox
from stages.images import images, resize
from stages.ocr import warp, warpkernel
from stages.ocr.fused import FusedDetector, FusedRecognizer
from stages.yolo.letterbox import Letterbox
from stages.ocr.stage import plan_lines
from stages.ocr.onnxfile import weight_files
from stages.ocr.loading import open_detector, open_recognizer

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
         torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
calls = {}

# In place of a kernel: notes what it is to be compiled for, and runs nothing. Where sizes alone differ, the largest is.
class Compiling:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.note

    def note(self, *arguments, **named):
        options = {name: named.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in named}
        given = dict(zip(self.kernel.arg_names, arguments)) | named
        constants = {p.name: given[p.name] for p in self.kernel.params if p.is_constexpr or given[p.name] is None}
        flags = {name: value for name, value in constants.items() if value is None or isinstance(value, bool)}
        size = math.prod(value + 1 for name, value in constants.items() if name not in flags)
        numbers = {float: "fp32", int: "i32"}
        types = {name: TYPES[value.dtype] if isinstance(value, torch.Tensor) else numbers.get(type(value), "i32")
                 for name, value in given.items()}
        # As at a launch: only loads of which Triton knows that they are aligned run ahead, into more of that memory.
        pointers = [place for place, name in enumerate(self.kernel.arg_names) if types[name].startswith("*")]
        aligned = {(place,): [["tt.divisibility", 16]] for place in pointers}
        source = ASTSource(self.kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
        widest = [constants.get(name) for name in ("IN_CHANNELS", "OUT_CHANNELS", "KERNEL_H", "K", "N")]
        key = self.kernel.__name__, *widest, *sorted(flags.items(), key=str)
        calls[key] = max(calls.get(key, (0, None, None)), (size, source, options), key=lambda call: call[0])

found = [(module, name) for module in (convolution, language, pointwise, warpkernel, resizekernel) for name in vars(module)
         if name.endswith("_kernel") and isinstance(vars(module)[name], JITFunction)]
for module, name in found:
    setattr(module, name, Compiling(getattr(module, name)))
warp.has_kernels_for = lambda pixels: True
files, lines = weight_files(), [[[30, 20], [230, 20], [230, 60], [30, 60]], [[30, 90], [230, 99], [229, 139], [29, 130]]]
FusedDetector(open_detector(files["det"])).infer(torch.zeros(1, 64, 64, 3, dtype=torch.uint8))
widths = torch.tensor([40, 64])
FusedRecognizer(open_recognizer(files["rec"])[0]).infer(torch.zeros(2, 48, 64, 3, dtype=torch.uint8), widths, widths)
page = warp.interleave(torch.zeros(3, 300, 400, dtype=torch.uint8))
warp.mask_with_kernel(torch.zeros(1, 64, 64, dtype=torch.uint8), 0.3)
warp.crop_with_kernel([page], plan_lines(0, torch.tensor(lines, dtype=torch.float32).numpy()), 48, 320)
hidden = torch.zeros(4, 768, dtype=torch.bfloat16)
launch.add_layer_norm(hidden, hidden, torch.nn.LayerNorm(768, dtype=torch.bfloat16))
launch.add_bias_silu(torch.zeros(1, 16, 8, 8, dtype=torch.bfloat16), hidden[0, :16])
planes, axes = torch.zeros(3, 300, 400, dtype=torch.uint8), [2 * (resize.prepare_axis(300, 384, 0, 384),)]
letterbox.fill_with_kernel([planes], [Letterbox.fit(300, 400, 640, 32)], torch.float16)
resize.resize_with_kernels([planes], axes, torch.zeros(3), torch.ones(3), torch.bfloat16)
resize.resize_to_bytes_with_kernels([planes], axes)
images.turn_with_kernel(planes, 6)
language.rms_norm(hidden, hidden[0], 1e-6)
language.layer_norm(hidden, hidden[0], hidden[0], 1e-6)
language.rotate(hidden.view(1, 4, 6, 128), hidden[None, :, :128], hidden[None, :, :128])
language.gate(hidden, hidden)
target = GPUTarget("cuda", task, 32)
shared = [compile(source, target=target, options=options).metadata.shared for _, source, options in calls.values()]
print(*sorted({name for _, name in found} - {key[0] for key in calls}), max(shared))
"""


LEAST_SHARED_BYTES = 99 << 10  # that a block may have: on the smaller GPUs from Ampere on
HOPPER = 90  # its kernels take more of that than Ampere's


def test_every_kernel_compiles_and_fits_into_shared_memory(run: Run) -> None:
    *not_compiled, shared_bytes = run(EVERY, HOPPER).split()
    assert not not_compiled
    assert 0 < int(shared_bytes) <= LEAST_SHARED_BYTES
