from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from imagecodecs import jpeg8_decode
from PIL import Image

from stages.contract.base import Header, ImageError, Limits, Reason
from stages.images import decoder as decoder_module
from stages.images import sandbox
from stages.images.decoder import Decoder, Decoders
from stages.images.images import inspect
from tests.daemon_process import PATIENCE, wait_for
from tests.inputs import (
    CATALOGUE,
    COLORS,
    ODD,
    Input,
    arithmetic_jpeg,
    encode,
    gray_16,
    jpeg,
    mutate,
    picture,
    png,
    tiff,
)

LIMITS = Limits()
QUICK = Limits(decode_seconds=0.5)  # of processor time
STALL = 8.0  # times that: a machine may stand still this long without failing a good picture
ROOT = Path(__file__).parents[3]

SABOTAGE = """
import fcntl, os, resource, signal, socket, sys, time
from stages.images import decoder, pixels, sandbox

def misbehave(data, header, out, honest=pixels.write_pixels):
    if header.width == 13:
        {deed}
    return honest(data, header, out)

pixels.write_pixels = misbehave
decoder.main(sys.argv[1:])
"""
DEEDS = {
    "is killed": "while True: pass",
    "crashes": "__import__('ctypes').string_at(0)",
    "leaves": "os._exit(3)",
    "hangs": "time.sleep(600)",
    "spins": "while True: pass",
    "eats memory": "bytearray(1 << 40)",
    "hangs up": "os.close(int(sys.argv[2])); time.sleep(600)",
    "babbles": "os.write(int(sys.argv[2]), b'no reply at all')",
}


def sabotaged(deed: str) -> list[str]:
    """A decoder child that runs `deed` when it gets a picture 13 pixels wide, and decodes all others."""
    return [sys.executable, "-P", "-c", SABOTAGE.format(deed=deed)]


def entry(data: bytes) -> tuple[memoryview, Header]:
    return memoryview(data), inspect(memoryview(data), LIMITS)


GOOD = jpeg()
TRAP = jpeg(picture(13, 13))


@pytest.fixture
def make() -> Iterator[Callable[..., Decoder]]:
    made: list[Decoder] = []

    def build(limits: Limits = LIMITS, **options: list[str]) -> Decoder:
        made.append(Decoder(limits, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoder]:
    decoder = Decoder(LIMITS)
    yield decoder
    decoder.close()


def wait_for_end(pid: int, seconds: float = PATIENCE) -> bool:
    """Whether the process has ended within that time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


# Results


@pytest.mark.parametrize("given", CATALOGUE, ids=lambda given: given.name)
def test_every_input_ends_in_its_state(shared: Decoder, given: Input) -> None:
    data, reason, pixels = given.make(), None, None
    try:
        header = inspect(memoryview(data), LIMITS)
        pixels = shared.decode(memoryview(data), header)
        assert pixels.shape == (header.height, header.width, 3)
    except ImageError as error:
        reason = error.reason
    assert reason == given.reason
    assert (pixels is None) == (reason is not None)


PICTURES = [
    given
    for given in ODD
    if not any(
        word in given.name
        for word in ("gray", "1-bit", "1 × 1", "float", "16-bit", "profile", "alpha", "rgba")
    )
    and given.name not in ("jpeg, arithmetic-coded", "png, palette with transparency", "pbm")
] + [Input("jpeg, broken color profile", lambda: jpeg(icc_profile=b"no profile" * 20), None)]


@pytest.mark.parametrize("given", PICTURES, ids=lambda given: given.name)
def test_colors_and_orientation_survive_every_format(shared: Decoder, given: Input) -> None:
    pixels = shared.decode(*entry(given.make()))
    corners = [pixels[y, x].tolist() for y in (3, -4) for x in (3, -4)]
    assert np.abs(np.array(corners) - np.array(list(COLORS.values()))).max() <= 6


@pytest.mark.parametrize("data", [png(gray_16()), tiff(gray_16())], ids=["png", "tiff"])
def test_16_bit_gray_keeps_its_mid_tones(shared: Decoder, data: bytes) -> None:
    pixels = shared.decode(*entry(data))
    assert pixels[0, :, 0].tolist() == list(range(256))
    assert (pixels == pixels[:1, :, :1]).all()


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_arithmetic_codes_are_read_wherever_they_are_in_the_file(
    shared: Decoder, mode: str, progressive: bool
) -> None:
    """Pillow reads a file in blocks of 64 KiB; the scans of these begin in the first and end in the second."""
    data = arithmetic_jpeg(mode, progressive=progressive, scans_at=(64 << 10) - 20)
    stored = jpeg8_decode(data)
    reference = Image.fromarray(255 - stored if mode == "CMYK" else stored, mode)
    assert np.array_equal(shared.decode(*entry(data)), np.asarray(reference.convert("RGB")))
    with pytest.raises(ImageError) as refused:
        shared.decode(*entry(data[:-1000]))
    assert refused.value.reason is Reason.TRUNCATED


def test_floats_are_stretched_between_their_own_extremes(shared: Decoder) -> None:
    ramp = Image.frombytes("F", (256, 8), np.tile(np.linspace(-3, 9, 256, dtype=np.float32), 8).tobytes())
    assert shared.decode(*entry(tiff(ramp)))[0, :, 0].tolist() == list(range(256))


@pytest.mark.parametrize(
    "name", ["png, rgba", "png, gray and alpha", "png, palette with transparency", "webp, rgba"]
)
def test_transparent_pixels_are_blended_with_white(shared: Decoder, name: str) -> None:
    (make,) = [given.make for given in ODD if given.name == name]
    pixels = shared.decode(*entry(make()))
    assert pixels[3, 3].tolist() == [255, 255, 255]
    assert pixels[-4, 3].max() < 200


def test_a_picture_that_is_wider_than_a_strip_is_complete(shared: Decoder) -> None:
    image = Image.effect_noise((3000, 2000), 90)
    pixels = shared.decode(*entry(encode(image, "PPM")))
    assert np.array_equal(pixels[:, :, 1], np.array(image))


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_a_picture_with_another_size_than_its_header_is_refused(shared: Decoder, name: str) -> None:
    data = encode(Image.new("RGB", (96, 64)), name)
    with pytest.raises(ImageError) as refused:
        shared.decode(memoryview(data), Header(name, 64, 96, 1))
    assert refused.value.reason is Reason.HEADER


def test_decoded_pixels_are_a_copy(shared: Decoder) -> None:
    first = shared.decode(*entry(GOOD))
    before = first.copy()
    shared.decode(*entry(png(Image.new("RGB", (96, 64), "black"))))
    assert np.array_equal(first, before)


# Faults


@pytest.mark.parametrize("deed", DEEDS)
def test_any_failure_of_the_child_fails_one_image_only(
    make: Callable[..., Decoder], deed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "WALL_PER_CPU_SECOND", STALL)
    limits = QUICK if deed in ("hangs", "spins") else LIMITS
    decoder = make(limits, command=sabotaged(DEEDS[deed]))
    decoder.decode(*entry(GOOD))
    first = decoder.pid
    assert first is not None
    if deed == "is killed":
        resource.prlimit(first, resource.RLIMIT_CPU, (1, 1))  # at the hard limit, the kernel sends SIGKILL
    with pytest.raises(ImageError) as failed:
        decoder.decode(*entry(TRAP))
    assert failed.value.reason is Reason.DECODER
    if deed != "spins":  # which is one of both on a busy machine
        assert failed.value.transient == (deed in ("is killed", "hangs"))
    assert decoder.decode(*entry(GOOD)).shape == (64, 96, 3)
    assert wait_for_end(first)
    assert decoder.pid != first


def test_a_picture_too_large_for_the_childs_memory_is_refused_and_the_next_decodes(
    make: Callable[..., Decoder],
) -> None:
    decoder = make(Limits(decode_bytes=256 << 20))
    with pytest.raises(
        ImageError, match=r'256 MiB of decode_bytes. To allow it, set decode_bytes = "512 MiB"'
    ):
        decoder.decode(*entry(png(Image.new("L", (9000, 9000)))))
    assert decoder.decode(*entry(GOOD)).shape == (64, 96, 3)


def test_a_child_that_died_while_idle_is_replaced_and_no_image_is_blamed(
    make: Callable[..., Decoder],
) -> None:
    decoder = make()
    decoder.decode(*entry(GOOD))
    assert decoder.pid is not None
    os.kill(decoder.pid, signal.SIGKILL)
    assert wait_for_end(decoder.pid)
    assert decoder.decode(*entry(GOOD)).shape == (64, 96, 3)


@pytest.mark.parametrize("command", [["/nonexistent"], ["false"]])
def test_a_decoder_that_cannot_start_is_not_the_images_fault(
    make: Callable[..., Decoder], command: list[str]
) -> None:
    with pytest.raises(ImageError, match="no decoder could be started") as failed:
        make(command=command).decode(*entry(GOOD))
    assert failed.value.transient


def test_a_child_is_replaced_after_its_lifetime(
    make: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "LIFETIME", 3)
    decoder, pids = make(), []
    for _ in range(5):
        decoder.decode(*entry(GOOD))
        pids.append(decoder.pid)
    assert pids[0] == pids[1] != pids[3] == pids[4]
    assert pids[2] is None


def test_memory_is_released_after_a_large_picture(make: Callable[..., Decoder]) -> None:
    decoder = make()
    decoder.decode(*entry(png(Image.new("L", (6000, 5000)))))
    assert os.fstat(decoder._memory_fd).st_size == decoder_module.KEPT_BYTES
    decoder.decode(*entry(GOOD))
    decoder.decode(*entry(png(Image.new("L", (6000, 5000), 200))))


def test_two_hundred_decodes_leave_no_open_files(make: Callable[..., Decoder]) -> None:
    decoder = make(command=sabotaged(DEEDS["leaves"]))
    decoder.decode(*entry(GOOD))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        for _ in range(39):
            decoder.decode(*entry(GOOD))
        with pytest.raises(ImageError):
            decoder.decode(*entry(TRAP))
    decoder.decode(*entry(GOOD))
    assert len(os.listdir("/proc/self/fd")) == before


PARENT = """
import sys
from stages.contract.base import Limits
from stages.images.decoder import Decoder
from stages.images.images import inspect

decoder = Decoder(Limits(), command=sys.argv[3:])
for path in sys.argv[1:3]:
    data = memoryview(open(path, "rb").read())
    header = inspect(data, Limits())
    print(decoder.pid, flush=True)
    decoder.decode(data, header)
print(decoder.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("second", [TRAP, GOOD], ids=["while decoding", "idle"])
def test_killing_the_parent_leaves_no_child(tmp_path: Path, second: bytes) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, data in zip(paths, (GOOD, second), strict=True):
        path.write_bytes(data)
    busy = "while time.process_time() < 2: pass\n        time.sleep(600)"
    command = [sys.executable, "-c", PARENT, *map(str, paths), *sabotaged(busy)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # before there is a child
        child = int(parent.stdout.readline())
        handle = os.pidfd_open(child)
        if second is TRAP:  # it has begun: an idle child would exit by itself
            wait_for(lambda: sum(psutil.Process(child).cpu_times()[:2]) > 1.5, "the second picture at work")
        parent.kill()
    assert select.select([handle], [], [], PATIENCE)[0]
    os.close(handle)


# The child process


def test_the_child_is_confined(make: Callable[..., Decoder]) -> None:
    decoder = make()
    decoder.decode(*entry(GOOD))
    child = Path(f"/proc/{decoder.pid}")
    status = dict(
        line.split(":\t", 1) for line in (child / "status").read_text().splitlines() if ":\t" in line
    )
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert int(status["VmRSS"].split()[0]) < 80_000
    limits = {
        line[:26].strip(): line[26:].split()[:2] for line in (child / "limits").read_text().splitlines()
    }
    assert limits["Max core file size"] == limits["Max file size"] == ["0", "0"]
    assert limits["Max open files"] == [str(sandbox.OPEN_FILES)] * 2
    assert limits["Max address space"] == [str(LIMITS.decode_bytes)] * 2
    assert int(limits["Max cpu time"][0]) <= LIMITS.decode_seconds + 2
    assert (child / "oom_score_adj").read_text() == "1000\n"
    libraries = (child / "maps").read_text()
    assert "_imaging" in libraries
    assert "libtorch" not in libraries


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd')",
        "os.listdir('/')",
        "os.unlink('/nonexistent')",
        "os.rename('/nonexistent', '/tmp/nonexistent')",
        "socket.socket()",
        "socket.socketpair()",
        "os.execv('/bin/true', ['true'])",
        "os.kill(os.getppid(), 0)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)",
        "resource.prlimit(0, resource.RLIMIT_CPU, (-1, -1))",
        "os.stat('/etc/passwd')",
        "os.stat('/etc/passwd', follow_symlinks=False)",
        "os.access('/etc/passwd', os.R_OK) or os.readlink('/proc/self/exe')",
        "fcntl.fcntl(int(sys.argv[2]), fcntl.F_SETOWN, os.getppid())",
        "fcntl.fcntl(int(sys.argv[2]), fcntl.F_SETFL, os.O_ASYNC)",
        "os.fork()",
        "os.memfd_create('room beside the limits')",
    ],
)
def test_code_that_runs_in_a_decoder_reaches_no_files_network_or_processes(
    make: Callable[..., Decoder], attempt: str
) -> None:
    decoder = make(command=sabotaged(attempt))
    decoder.decode(*entry(GOOD))
    with pytest.raises(ImageError, match="Operation not permitted"):
        decoder.decode(*entry(TRAP))


LATE_IMPORT = """
import os, sys
from stages.images import decoder

class Refusal:
    def find_spec(self, name, path=None, target=None):
        os._exit(77)

def seal(honest=decoder.seal):
    honest()
    sys.meta_path.insert(0, Refusal())

decoder.seal = seal
decoder.main(sys.argv[1:])
"""


def test_nothing_is_imported_after_the_seal(make: Callable[..., Decoder]) -> None:
    """It could not be read then, and the message would name a path of the installation."""
    decoder = make(command=[sys.executable, "-P", "-c", LATE_IMPORT])
    lab = tiff(Image.frombytes("LAB", (96, 64), bytes(3 * 96 * 64)))
    details = []
    for data in (*(given.make() for given in CATALOGUE), lab):
        try:
            decoder.decode(*entry(data))
        except ImageError as error:
            details.append(error.detail)
    assert details
    assert not [detail for detail in details if re.search(r"\b77\b", detail)]


def test_a_message_names_no_path_and_no_object_of_this_machine() -> None:
    describe = decoder_module._describe
    assert "/" not in describe(PermissionError(1, "Operation not permitted", "/opt/visiond/PIL/ImageCms.py"))
    assert describe(ValueError("no <_io.BytesIO object at 0x7f00> in /usr/lib/x.py")) == "no … in …"


def test_a_child_that_no_seccomp_fits_still_opens_no_file(make: Callable[..., Decoder]) -> None:
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("this kernel has no Landlock")
    command = sabotaged("open('/etc/passwd')")
    command[-1] = command[-1].replace(
        "decoder.main", "sandbox.keep_system_calls = lambda: None\ndecoder.main"
    )
    decoder = make(command=command)
    with pytest.raises(ImageError, match="Permission denied"):
        decoder.decode(*entry(TRAP))


def test_a_long_lived_child_may_use_its_time_for_every_image(
    make: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "WALL_PER_CPU_SECOND", PATIENCE)
    spend = "end = time.process_time() + 0.7\n        while time.process_time() < end: pass"
    decoder = make(Limits(decode_seconds=1), command=sabotaged(spend))
    for _ in range(3):  # 2.1 s in all; a new child may use 2 s for its first image
        decoder.decode(*entry(TRAP))


def test_code_in_the_working_directory_is_not_run(
    make: Callable[..., Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "PIL.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    assert make().decode(*entry(GOOD)).shape == (64, 96, 3)


PLUG_IN = """
from PIL import Image, PngImagePlugin

class HeifImageFile(PngImagePlugin.PngImageFile):
    def load(self):
        done = super().load()
        {deed}
        return done

def register_heif_opener(**options):
    Image.register_open('HEIF', HeifImageFile)
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives the children a fake pillow-heif that reads PNG, and then runs `deed`."""

    def install(deed: str = "pass") -> None:
        (tmp_path / "pillow_heif.py").write_text(PLUG_IN.format(deed=deed))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return install


def test_a_heif_plug_in_is_used_when_there_is_one(
    make: Callable[..., Decoder], plug_in: Callable[..., None]
) -> None:
    plug_in()
    assert make().decode(memoryview(png()), Header("HEIF", 96, 64, 1))[3, 3].tolist() == [200, 40, 40]


def test_a_picture_that_is_smaller_once_decoded_is_refused(
    make: Callable[..., Decoder], plug_in: Callable[..., None]
) -> None:
    plug_in("self.im, self._size = self.im.crop((0, 0, 95, 64)), (95, 64)")
    with pytest.raises(ImageError, match="the header says 96×64 pixels, but there are 95×64") as refused:
        make().decode(memoryview(png()), Header("HEIF", 96, 64, 1))
    assert refused.value.reason is Reason.HEADER


# The pool


def test_a_pool_answers_in_order_and_keeps_errors_in_place() -> None:
    pool = Decoders(2, LIMITS, command=sabotaged(DEEDS["crashes"]))
    sizes = [10, 13, 20, 30, 13, 40, 50]
    answers = pool.decode_all([entry(jpeg(picture(size, 13))) for size in sizes])
    pool.close()
    assert [answer.shape[1] if isinstance(answer, np.ndarray) else answer.reason for answer in answers] == [
        Reason.DECODER if size == 13 else size for size in sizes
    ]


def test_an_error_does_not_keep_its_image_in_memory() -> None:
    pool = Decoders(1, LIMITS)
    slab = bytearray(b"not a PNG")
    (error,) = pool.decode_all([(memoryview(slab), Header("PNG", 96, 64, 1))])
    pool.close()
    assert isinstance(error, ImageError)
    slab.clear()  # BufferError while anything still uses it


def test_two_threads_share_a_pool() -> None:
    pool = Decoders(2, LIMITS)
    shapes: dict[int, set[tuple[int, ...]]] = {}

    def work(size: int) -> None:
        answers = pool.decode_all([entry(png(picture(size, size)))] * 20)
        shapes[size] = {answer.shape for answer in answers if isinstance(answer, np.ndarray)}

    threads = [threading.Thread(target=work, args=(size,)) for size in (16, 32, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    pool.close()
    assert shapes == {size: {(size, size, 3)} for size in (16, 32, 64)}


def test_mutated_images_end_in_pixels_or_an_error(make: Callable[..., Decoder]) -> None:
    """`FUZZ_SEED` replays a run, `FUZZ_COUNT` lengthens it."""
    seed = int(os.environ.get("FUZZ_SEED", random.randrange(2**32)))
    count = int(os.environ.get("FUZZ_COUNT", "300"))
    print(f"FUZZ_SEED={seed} FUZZ_COUNT={count}")
    chance = random.Random(seed)
    limits = Limits(max_pixels=4_000_000, decode_seconds=5)
    formats = ("jpeg", "png", "webp", "gif", "tiff", "avif", "bmp", "ppm")
    made = [[given.make() for given in ODD if given.name.startswith(name)] for name in (*formats, "heic")]
    sources = [some for some in made if some]  # HEIC where its plug-in is installed
    decoder = make(limits)
    decoded = 0
    while decoded < count:  # mutants that the header's guard refuses cost nothing and count for nothing
        mutant = memoryview(mutate(chance.choice(chance.choice(sources)), chance))
        try:
            header = inspect(mutant, limits)
            decoded += 1
            assert decoder.decode(mutant, header).shape == (header.height, header.width, 3)
        except ImageError:
            continue
    assert decoder.decode(*entry(GOOD)).shape == (64, 96, 3)
