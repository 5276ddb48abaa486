"""The disposable decoder: a child process that turns one image after another into pixels, and its handle.

Image libraries crash, hang and use too much memory on bad bytes. Here they do so in a child process with
limits on memory, time and system calls. The parent answers with ImageError(DECODER) and starts another child.
Bytes and pixels are passed through a shared memfd; a socketpair carries a small message each way.

`Decoder` handles one child, `Decoders` a pool of them, and `python -m stages.images.decoder` is the child's main. It does not
import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import msgspec

from stages.contract.base import Header, ImageError, Limits, Reason, advise
from stages.contract.processes import environment, python
from stages.images.sandbox import (
    DETAIL_CHARACTERS,
    START_SECONDS,
    WALL_PER_CPU_SECOND,
    allow_cpu_seconds,
    confine,
    seal,
)

if TYPE_CHECKING:
    import numpy as np

COMMAND = tuple(python("-m", "stages.images.decoder"))
MESSAGE_BYTES = 4096
KEPT_BYTES = 32 << 20  # shared memory that a decoder keeps between images
LIFETIME = 2000  # images after which a child is replaced, so that a library's leak cannot grow
DEATH_SECONDS = 10.0


class Request(msgspec.Struct, frozen=True):
    """Asks for one image: its bytes are at the start of the shared memory, its pixels go to `pixels_at`."""

    data_bytes: int
    pixels_at: int
    header: Header


class Decoded(msgspec.Struct, frozen=True):
    """reason: None if the pixels are in the shared memory. last: the child exits after this answer. is_gray: the pixels have
    one byte each, not three."""

    reason: Reason | None = None
    detail: str = ""
    last: bool = False
    is_gray: bool = False


# The child
# ------------------------------------------------------------------------------------------------------------

# imagecodecs imports these when they are first used.
CODECS = ("spng_decode", "png_decode", "webp_decode", "deflate_decode")
NOT_FOR_USERS = re.compile(r"<[^<>]* at 0x[0-9a-f]+>|(?<![\w.:])/[^\s'\",;:)]+/[^\s'\",;:)]*")


def main(arguments: Sequence[str]) -> None:
    """Decode until the parent closes its end. Arguments: parent's pid, socket, memory, and limits (JSON)."""
    parent, channel_fd, memory_fd = map(int, arguments[:3])
    limits = msgspec.json.decode(arguments[3], type=Limits)
    confine(parent, limits)
    from stages.images import pixels

    pixels.prepare()
    for name in ("stages.images.samples", "simplejpeg"):  # a sealed process can open no file to import them
        importlib.import_module(name)
    for name in CODECS:
        getattr(importlib.import_module("imagecodecs"), name)
    with socket.socket(fileno=channel_fd) as channel:
        channel.send(b"ready")
        seal()
        serve(channel, memory_fd, limits)


def serve(channel: socket.socket, memory_fd: int, limits: Limits) -> None:
    memory: mmap.mmap | None = None  # kept between images: a new mapping costs a page fault for every page
    while message := channel.recv(MESSAGE_BYTES):
        try:
            size = os.lseek(memory_fd, 0, os.SEEK_END)
            if memory is not None and len(memory) != size:
                memory.close()
                memory = None
            memory = memory or mmap.mmap(memory_fd, size)
            reply = answer(msgspec.json.decode(message, type=Request), memory)
        except (MemoryError, OSError):  # OSError: no address space for the mapping
            problem = f"needs more than the {limits.decode_bytes >> 20} MiB of decode_bytes"
            more = f'decode_bytes = "{limits.decode_bytes >> 19} MiB"'
            reply = Decoded(Reason.DECODER, f"{problem}. {advise(more)}", last=True)
        channel.send(msgspec.json.encode(reply))
        if reply.last:
            return


def answer(request: Request, memory: mmap.mmap) -> Decoded:
    """Decode one image. Any error of a library is blamed on the image, except MemoryError, which passes."""
    from stages.images import pixels

    try:
        with memoryview(memory) as view, view[: request.data_bytes] as data, view[request.pixels_at :] as out:
            is_gray = pixels.write_pixels(data, request.header, out)
    except ImageError as error:
        return Decoded(error.reason, error.detail)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 – libraries raise anything on bad bytes
        return Decoded(Reason.DECODER, f"{request.header.format}: {_describe(error)}"[:DETAIL_CHARACTERS])
    return Decoded(is_gray=is_gray)


def _describe(error: Exception) -> str:
    """A library's message without paths of this machine, numbers of errors and objects in memory."""
    if isinstance(error, OSError) and error.errno and error.strerror:
        return f"the library for it fails: {error.strerror}"
    what = str(error) if isinstance(error, OSError | SyntaxError | ValueError) else repr(error)
    return NOT_FOR_USERS.sub("…", what)


# The parent's side
# ----------------------------------------------------------------------------------------------------


class Decoder:
    """One child, started for its first image and again whenever it has died. For one thread at a time.

    The kernel ends a child together with the thread that started it,
    so call `decode` in a thread that lives as long as the decoder.
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
        """The child's process id; None if there is no child."""
        return self._process.pid if self._process else None

    def decode(self, data: memoryview, header: Header) -> np.ndarray:
        """Decode one image to uint8 [height, width, 3], RGB, upright; the array is a copy. That of a gray image has the stride
        0 for its last axis: red, green and blue of a pixel are one byte.

        header: from `inspect`, of the same bytes. Raises ImageError: HEADER, TRUNCATED, DECODER.
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
            strides = (header.width, 1, 0) if reply.is_gray else (3 * header.width, 3, 1)
            pixels = np.frombuffer(self._memory, np.uint8, strides[0] * header.height, start).copy()
            return np.ndarray((header.height, header.width, 3), np.uint8, pixels, strides=strides)
        finally:
            self._resize(KEPT_BYTES)

    def close(self) -> None:
        self._stop()
        self._memory.close()
        os.close(self._memory_fd)

    def _resize(self, size: int) -> None:
        if size != len(self._memory):
            self._memory.resize(size)

    def _ask(self, request: Request) -> Decoded:
        channel = self._ready_channel()
        assert self._process is not None
        allow_cpu_seconds(self._process.pid, self.limits.decode_seconds)
        try:
            channel.send(msgspec.json.encode(request))
            message = channel.recv(MESSAGE_BYTES)
            reply = msgspec.json.decode(message, type=Decoded) if message else None
        except TimeoutError:
            self._stop()
            # Without SIGXCPU: it had not enough of the processor.
            slow = self._explain_slow(f"{self._wall_seconds:g} s in all, with ")
            raise ImageError(Reason.DECODER, slow, transient=True) from None
        except msgspec.DecodeError:
            self._stop()
            raise ImageError(
                Reason.DECODER, "the decoder's memory was overwritten: its answer cannot be read"
            ) from None
        except ConnectionError:
            reply = None
        if reply is None:
            raise self._find_cause()
        self._served += 1
        if reply.last or self._served >= LIFETIME:
            self._stop()
        return reply

    def _explain_slow(self, in_all: str = "") -> str:
        seconds = self.limits.decode_seconds
        return f"took longer than {in_all}decode_seconds = {seconds:g}. {advise(f'decode_seconds = {2 * seconds:g}')}"

    @property
    def _wall_seconds(self) -> float:
        return self.limits.decode_seconds * WALL_PER_CPU_SECOND

    def _ready_channel(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            # It died while it was idle: no image is to blame.
            self._stop()
        if self._channel is None:
            self._start()
        assert self._channel is not None
        return self._channel

    def _start(self) -> None:
        """Raises a transient ImageError: the image is not to blame."""
        try:
            channel = self._spawn()
            channel.settimeout(START_SECONDS)
            is_ready, problem = channel.recv(MESSAGE_BYTES) == b"ready", ""
            channel.settimeout(self._wall_seconds)
        except OSError as error:  # no process or descriptor could be made, or no answer in time
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
                # One malloc arena keeps its address space small. The filter of system calls needs a single thread.
                env=environment({"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}),
            )
        return ours

    def _find_cause(self) -> ImageError:
        """Make sure that the child is dead; the error says what it died of."""
        assert self._process is not None
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._stop()
            return ImageError(Reason.DECODER, "the decoder stopped answering")
        code = self._stop()
        if code == -signal.SIGXCPU:
            return ImageError(Reason.DECODER, self._explain_slow())
        if code == -signal.SIGKILL:  # perhaps by the kernel, which was out of memory
            return ImageError(Reason.DECODER, "the decoder was killed", transient=True)
        cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return ImageError(Reason.DECODER, f"the decoder crashed ({cause})")

    def _stop(self) -> int:
        """Kill the child if there is one. Returns its exit status."""
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
    """A pool of decoders that work on a batch in parallel. Any thread may use it; children start when they are needed."""

    def __init__(self, count: int, limits: Limits, command: Sequence[str] = COMMAND) -> None:
        self._decoders = [Decoder(limits, command) for _ in range(count)]
        self._idle: queue.LifoQueue[Decoder] = queue.LifoQueue()  # reuse the one that was used last
        for decoder in self._decoders:
            self._idle.put(decoder)
        # Threads live as long as the children that they start.
        self._threads = ThreadPoolExecutor(count, "decoder")

    def decode_all(self, entries: Sequence[tuple[memoryview, Header]]) -> list[np.ndarray | ImageError]:
        """The result of `Decoder.decode` for each (bytes, header), or its error, in order."""
        return list(self._threads.map(self._decode, entries))

    @contextlib.contextmanager
    def decoding(self) -> Iterator[Callable[[tuple[memoryview, Header]], Future[np.ndarray | ImageError]]]:
        """A function that begins to decode one (bytes, header); its answer is as of `decode_all`. At the end of the context
        nobody reads the bytes any more: what has not begun by then never does."""
        # Weak: an answer that was taken needs no memory.
        begun: weakref.WeakSet[Future[np.ndarray | ImageError]] = weakref.WeakSet()

        def begin(entry: tuple[memoryview, Header]) -> Future[np.ndarray | ImageError]:
            future = self._threads.submit(self._decode, entry)
            begun.add(future)
            return future

        try:
            yield begin
        finally:
            left = [future for future in begun if not future.cancel()]
            wait(left)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for decoder in self._decoders:
            decoder.close()

    def _decode(self, entry: tuple[memoryview, Header]) -> np.ndarray | ImageError:
        decoder = self._idle.get()
        try:
            return decoder.decode(*entry)
        except ImageError as error:  # a copy without the traceback, which would keep the bytes in memory
            return ImageError(error.reason, error.detail, transient=error.transient)
        finally:
            self._idle.put(decoder)


if __name__ == "__main__":
    main(sys.argv[1:])
