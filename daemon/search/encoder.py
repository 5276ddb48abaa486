"""Compares a sentence, or an image, with the embeddings of all images. A child process does it, on the CPU: it is
started when first asked, and this process never imports torch."""

from __future__ import annotations

import contextlib
import subprocess
import threading

import msgspec

from daemon.core.errors import SearchUnusable
from daemon.core.messages import read_frame, write_frame
from stages.contract import processes
from stages.contract.base import StageSpec

ANSWER_SECONDS = 180.0  # also for loading the model; then the process is killed


class Ask(msgspec.Struct, frozen=True):
    """text: to be embedded; empty: take the embedding of the publication `like`. folder, rows, dim: of the matrix.
    allowed: a bit for each publication that may be found, as in `masks`; None: all may. least: images that match the text
    with a lower probability are left out, if the model gives probabilities."""

    folder: str
    rows: int
    dim: int
    count: int
    text: str = ""
    like: int = 0
    allowed: bytes | None = None
    least: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """Numbers of publications and their cosines, the nearest first; or why there are none. probabilities: that each matches
    the text; None: there was no text, or the model gives none."""

    numbers: list[int] = []
    scores: list[float] = []
    probabilities: list[float] | None = None
    problem: str = ""


class EncoderProcess:
    """The child process, and one question at a time. Any thread may ask."""

    def __init__(self, spec: StageSpec) -> None:
        """spec: of the stage that made the embeddings."""
        self.spec = spec
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self.is_warm = False  # whether it has loaded its model, or failed to
        self._warming = False

    def ask(self, question: Ask) -> Answer:
        """Blocks: some seconds for the first question. Raises SearchUnusable."""
        with self._lock:
            try:
                answer = self._ask_child(question)
            except (OSError, EOFError, msgspec.DecodeError):
                self._end()  # it was killed, perhaps as memory was short: another try
                try:
                    answer = self._ask_child(question)
                except (OSError, EOFError, msgspec.DecodeError) as error:
                    status = self._end()
                    raise SearchUnusable(
                        f"the process that compares sentences with images {processes.describe_end(status)}; "
                        "its output is above, or in the daemon's log."
                    ) from error
        if answer.problem:
            raise SearchUnusable(answer.problem)
        self.is_warm = self.is_warm or bool(question.text)
        return answer

    def warm_up(self) -> None:
        """Load the model, in the background. Errors show at the next question."""
        if not self._warming:
            self._warming = True
            threading.Thread(target=self._load, name="text encoder", daemon=True).start()

    def _load(self) -> None:
        try:
            with contextlib.suppress(SearchUnusable):
                self.ask(Ask("", 0, 0, 0, text=" "))
        finally:
            self.is_warm, self._warming = True, False

    def close(self) -> None:
        """A question that is being answered ends with an error."""
        if child := self._child:
            child.kill()
        with self._lock:
            self._end()

    def _ask_child(self, question: Ask) -> Answer:
        child = self._child or self._start()
        assert child.stdin
        assert child.stdout
        late = threading.Timer(ANSWER_SECONDS, child.kill)
        late.start()
        try:
            write_frame(child.stdin, question)
            return msgspec.msgpack.decode(read_frame(child.stdout), type=Answer)
        finally:
            late.cancel()

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            processes.python("-m", "daemon.search.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=processes.environment({"CUDA_VISIBLE_DEVICES": ""}),
        )
        assert self._child.stdin
        write_frame(self._child.stdin, self.spec)
        return self._child

    def _end(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        self.is_warm = False
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                try:
                    pipe.close()
                except BrokenPipeError:  # of what it has not read
                    continue
        return child.wait()
