"""Every kernel compiles, as each layer starts it, which takes no GPU: in a process without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import gc, math, sys
gc.disable()  # a collection of garbage would make the imports a second slower
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from stages.kernels import convolution, language, launch, pointwise
from stages.yolo import letterbox
from stages.resizing import resize, kernel as resizekernel
from stages.ocr import warp, warpkernel
from stages.ocr.fused import FusedDetector, FusedRecognizer
from stages.yolo.letterbox import Letterbox
from stages.ocr.stage import plan_lines
from stages.ocr.onnxfile import weight_files
from stages.ocr.ppocr import load_detector, load_recognizer

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
        types = {name: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32" for name, value in given.items()}
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
FusedDetector(load_detector(files["det"])).infer(torch.zeros(1, 64, 64, 3, dtype=torch.uint8))
widths = torch.tensor([40, 64])
FusedRecognizer(load_recognizer(files["rec"])[0]).infer(torch.zeros(2, 48, 64, 3, dtype=torch.uint8), widths, widths)
page = warp.interleave(torch.zeros(3, 300, 400, dtype=torch.uint8))
warp.crop_with_kernel([page], plan_lines(0, torch.tensor(lines, dtype=torch.float32).numpy()), 48, 320)
hidden = torch.zeros(4, 768, dtype=torch.bfloat16)
launch.add_layer_norm(hidden, hidden, torch.nn.LayerNorm(768, dtype=torch.bfloat16))
launch.add_bias_silu(torch.zeros(1, 16, 8, 8, dtype=torch.bfloat16), hidden[0, :16])
planes, axes = torch.zeros(3, 300, 400, dtype=torch.uint8), [2 * (resize.prepare_axis(300, 384, 0, 384),)]
letterbox.fill_with_kernel([planes], [Letterbox.fit(300, 400, 640, 32)], torch.float16)
resize.resize_with_kernels([planes], axes, torch.zeros(3), torch.ones(3), torch.bfloat16)
resize.resize_to_bytes_with_kernels([planes], axes)
language.rms_norm(hidden, hidden[0], 1e-6)
language.layer_norm(hidden, hidden[0], hidden[0], 1e-6)
language.rotate(hidden.view(1, 4, 6, 128), hidden[None, :, :128], hidden[None, :, :128])
language.gate(hidden, hidden)
target = GPUTarget("cuda", int(sys.argv[1]), 32)
shared = [compile(source, target=target, options=options).metadata.shared for _, source, options in calls.values()]
print(*sorted({name for _, name in found} - {key[0] for key in calls}), max(shared))
"""


LEAST_SHARED_BYTES = 99 << 10  # that a block may have: on the smaller GPUs from Ampere on
HOPPER = "90"  # its kernels take more of that than Ampere's


def test_every_kernel_compiles_and_fits_into_shared_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, HOPPER]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    *not_compiled, shared_bytes = ended.stdout.split()
    assert not not_compiled
    assert 0 < int(shared_bytes) <= LEAST_SHARED_BYTES
