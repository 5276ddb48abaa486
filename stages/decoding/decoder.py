"""The disposable decoder: a child process that turns one image after another into pixels, and its handle.

Image libraries crash, hang and bloat on bad bytes. Here they do so in a child that has limits on memory, time and
system calls, and nothing to lose; the parent answers with ImageError(DECODER) and starts another. Bytes go in and
pixels come out through a shared memfd; a socketpair carries a small message each way.

`Decoder` handles one child, `Decoders` a pool of them, and `python -m stages.decoding.decoder` is the child's own main.
It imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stages.base import Header, ImageError, Limits, Reason, advise
from stages.decoding.seccomp import keep_system_calls
from stages.processes import die_with, environment, python

if TYPE_CHECKING:
    import numpy as np

COMMAND = tuple(python("-m", "stages.decoding.decoder"))
MESSAGE_BYTES = 4096
DETAIL_CHARACTERS = 300
KEPT_BYTES = 32 << 20  # shared memory that a decoder holds on to between images
LIFETIME = 2000  # images after which a child is replaced, lest a library's leak grow
START_SECONDS = 30.0
DEATH_SECONDS = 10.0
WALL_PER_CPU_SECOND = 2.0  # a child may wait for the processor as long as it uses it


class Request(msgspec.Struct, frozen=True):
    """Asks for one image: its bytes lie at the start of the shared memory, its pixels go to `pixels_at`."""

    data_bytes: int
    pixels_at: int
    header: Header


class Reply(msgspec.Struct, frozen=True):
    """`reason` None: the pixels are there. `last`: the child leaves after this answer."""

    reason: Reason | None = None
    detail: str = ""
    last: bool = False


# The child ------------------------------------------------------------------------------------------------------------

PR_SET_NO_NEW_PRIVS = 38
OPEN_FILES = 32


def main(arguments: Sequence[str]) -> None:
    """Decode until the parent closes its end. Arguments: parent's pid, socket, memory, limits (JSON)."""
    parent, channel_fd, memory_fd = map(int, arguments[:3])
    limits = msgspec.json.decode(arguments[3], type=Limits)
    confine(parent, limits)
    from stages.decoding import pixels

    pixels.prepare()
    with socket.socket(fileno=channel_fd) as channel:
        channel.send(b"ready")
        seal()
        serve(channel, memory_fd, limits)


def confine(parent: int, limits: Limits) -> None:
    """Give up what decoding does not need, and die with the parent."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the parent decides when; a terminal tells the whole group
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a read-only /proc
        Path("/proc/self/oom_score_adj").write_text("1000")  # short of memory, the kernel should take this one first
    die_with(parent)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES)
    lower_limit(resource.RLIMIT_AS, limits.decode_bytes)


def seal() -> None:
    """From here on the libraries' warnings go nowhere, no file can be written, and where the kernel lets us, none opened."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    lower_limit(resource.RLIMIT_FSIZE, 0)
    keep_system_calls()


def lower_limit(which: int, most: int) -> None:
    """Set a resource limit for good, unless a tighter one is in force."""
    _, hard = resource.getrlimit(which)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (limit, limit))


def serve(channel: socket.socket, memory_fd: int, limits: Limits) -> None:
    memory: mmap.mmap | None = None  # kept from image to image: mapping anew costs a fault for every page
    while message := channel.recv(MESSAGE_BYTES):
        allow_cpu_seconds(limits.decode_seconds)
        try:
            if memory is not None and len(memory) != os.fstat(memory_fd).st_size:
                memory.close()
                memory = None
            memory = memory or mmap.mmap(memory_fd, 0)
            reply = answer(msgspec.json.decode(message, type=Request), memory)
        except (MemoryError, OSError):  # OSError: no address space for the mapping
            told = f"needs more than the {limits.decode_bytes >> 20} MiB of decode_bytes"
            more = f'decode_bytes = "{limits.decode_bytes >> 19} MiB"'
            reply = Reply(Reason.DECODER, f"{told}. {advise(more)}", last=True)
        channel.send(msgspec.json.encode(reply))
        if reply.last:
            return


def allow_cpu_seconds(seconds: float) -> None:
    """SIGXCPU strikes when this process has used so much more processor time (the kernel counts whole seconds)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = ceil(used.ru_utime + used.ru_stime + seconds)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def answer(request: Request, memory: mmap.mmap) -> Reply:
    """Decode one image. Whatever a library raises is that image's fault; MemoryError passes."""
    from stages.decoding import pixels

    try:
        with memoryview(memory) as view, view[: request.data_bytes] as data, view[request.pixels_at :] as out:
            pixels.write_rgb(data, request.header, out)
    except ImageError as error:
        return Reply(error.reason, error.detail)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 – libraries raise anything on bad bytes
        said = str(error) if isinstance(error, OSError | SyntaxError | ValueError) else repr(error)
        return Reply(Reason.DECODER, f"{request.header.format}: {said}"[:DETAIL_CHARACTERS])
    return Reply()


# The parent's side ----------------------------------------------------------------------------------------------------


class Decoder:
    """One child, started at its first image and again whenever it died. For one thread at a time.

    The kernel ends a child together with the thread that started it, so `decode` belongs in a thread that lives
    as long as the decoder.
    """

    def __init__(self, limits: Limits, command: Sequence[str] = COMMAND) -> None:
        self.limits = limits
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._served = 0
        self._memory_fd = os.memfd_create("visiond-decoder", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, KEPT_BYTES)
        self._memory = mmap.mmap(self._memory_fd, KEPT_BYTES)

    @property
    def pid(self) -> int | None:
        """The child's process id, while there is one."""
        return self._process.pid if self._process else None

    def decode(self, data: memoryview, header: Header) -> np.ndarray:
        """Decode one image to uint8 [height, width, 3], RGB, upright; the array is the caller's own.

        header: what `inspect` said of the same bytes. Raises ImageError: HEADER, TRUNCATED, DECODER.
        """
        import numpy as np

        count = 3 * header.width * header.height
        start = -(-len(data) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._resize(max(start + count, KEPT_BYTES))
        try:
            self._memory[: len(data)] = data
            reply = self._ask(Request(len(data), start, header))
            if reply.reason is not None:
                raise ImageError(reply.reason, reply.detail)
            shape = (header.height, header.width, 3)
            return np.frombuffer(self._memory, np.uint8, count, start).reshape(shape).copy()
        finally:
            self._resize(KEPT_BYTES)

    def close(self) -> None:
        self._stop()
        self._memory.close()
        os.close(self._memory_fd)

    def _resize(self, size: int) -> None:
        if size != len(self._memory):
            self._memory.resize(size)

    def _ask(self, request: Request) -> Reply:
        channel = self._ready_channel()
        try:
            channel.send(msgspec.json.encode(request))
            message = channel.recv(MESSAGE_BYTES)
            reply = msgspec.json.decode(message, type=Reply) if message else None
        except TimeoutError:
            self._stop()
            raise ImageError(Reason.DECODER, self._tell_slow(f"{self._wall_seconds:g} s in all, with ")) from None
        except msgspec.DecodeError:
            self._stop()
            raise ImageError(Reason.DECODER, "the decoder's memory was overwritten: its answer is garbled") from None
        except ConnectionError:
            reply = None
        if reply is None:
            raise self._bury()
        self._served += 1
        if reply.last or self._served >= LIFETIME:
            self._stop()
        return reply

    def _tell_slow(self, all_of_it: str = "") -> str:
        seconds = self.limits.decode_seconds
        return f"took longer than {all_of_it}decode_seconds = {seconds:g}. {advise(f'decode_seconds = {2 * seconds:g}')}"

    @property
    def _wall_seconds(self) -> float:
        return self.limits.decode_seconds * WALL_PER_CPU_SECOND

    def _ready_channel(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:  # died idle: no image's fault
            self._stop()
        if self._channel is None:
            self._start()
        assert self._channel is not None
        return self._channel

    def _start(self) -> None:
        """Raises ImageError, transient: it is not the image's fault."""
        try:
            channel = self._spawn()
            channel.settimeout(START_SECONDS)
            is_ready, problem = channel.recv(MESSAGE_BYTES) == b"ready", ""
            channel.settimeout(self._wall_seconds)
        except OSError as error:  # no process, no descriptor, or no answer in time
            is_ready, problem = False, str(error)
        if not is_ready:
            code = self._stop()
            detail = f"no decoder could be started: {problem or f'exit status {code}, see the log'}"
            raise ImageError(Reason.DECODER, detail, transient=True)
        self._served = 0

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        with theirs:
            handed = (theirs.fileno(), self._memory_fd)
            arguments = (str(os.getpid()), *map(str, handed), msgspec.json.encode(self.limits).decode())
            self._process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=handed,
                env=environment({"MALLOC_ARENA_MAX": "1"}),  # one malloc arena keeps its address space small
            )
        return ours

    def _bury(self) -> ImageError:
        """Make sure that the child is dead, and say what it died of."""
        assert self._process is not None
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._stop()
            return ImageError(Reason.DECODER, "the decoder stopped answering")
        code = self._stop()
        if code == -signal.SIGXCPU:
            return ImageError(Reason.DECODER, self._tell_slow())
        if code == -signal.SIGKILL:  # perhaps by the kernel, for want of memory
            return ImageError(Reason.DECODER, "the decoder was killed", transient=True)
        cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return ImageError(Reason.DECODER, f"the decoder crashed ({cause})")

    def _stop(self) -> int:
        """End the child if there is one; its exit status."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is None:
            return 0
        self._process.kill()
        code = self._process.wait(DEATH_SECONDS)
        self._process = None
        return code


class Decoders:
    """A pool of decoders that works on a batch in parallel. Any thread may use it; children start when needed."""

    def __init__(self, count: int, limits: Limits, command: Sequence[str] = COMMAND) -> None:
        self._decoders = [Decoder(limits, command) for _ in range(count)]
        self._idle: queue.LifoQueue[Decoder] = queue.LifoQueue()  # the last used is the warmest
        for decoder in self._decoders:
            self._idle.put(decoder)
        self._threads = ThreadPoolExecutor(count, "decoder")  # they live as long as the children they start

    def decode_all(self, entries: Sequence[tuple[memoryview, Header]]) -> list[np.ndarray | ImageError]:
        """For each (bytes, header) an array as `Decoder.decode` gives it, or its error, in order."""
        return list(self._threads.map(self._decode, entries))

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()

    def _decode(self, entry: tuple[memoryview, Header]) -> np.ndarray | ImageError:
        decoder = self._idle.get()
        try:
            return decoder.decode(*entry)
        except ImageError as error:  # a copy, whose traceback does not hold on to the bytes
            return ImageError(error.reason, error.detail, transient=error.transient)
        finally:
            self._idle.put(decoder)


if __name__ == "__main__":
    main(sys.argv[1:])
