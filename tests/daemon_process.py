"""A daemon as a real process in its own folder: configured, waited for on a real notify socket, queried,
killed, judged.

A `Place` is the folder: it writes daemon.toml, remembers what is dropped, and lets the checker judge the
outcome. A `Daemon` is one process at work there, as a context. At its end none of its processes may be left.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import http.client
import itertools
import json
import os
import random
import secrets
import signal
import socket
import sqlite3
import ssl
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, TypeVar

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import checker
from tests.forked import ENVIRONMENT, TOKEN, TOKEN_BYTES, Forked, run_forked
from tests.forking import CHILDREN_PATH, PAUSES

T = TypeVar("T")

STAGES = ("ocr", "yolo", "clip", "blip")
PATIENCE = float(os.environ.get("VISIOND_PATIENCE") or 60.0)  # seconds after which a test gives up
GLANCE = 0.04  # between two polls
# By how much a promised time may be exceeded if other tests share cores and disk; `make faults` runs alone.
SLACK_SECONDS = 0.0 if os.environ.get("VISIOND_ALONE") else 20.0

DEFAULTS: dict[str, Any] = {
    "pipeline": {
        "slab_bytes": 16 << 20,
        "retry_seconds": 0.05,
        "rescan_seconds": 1.0,
        "workers_per_device": 1,
    },
    "http": {"listen": ""},
    "page": {"listen": ""},
    "log": {"format": "json"},
    "stages": {name: {"backend": "fake"} for name in STAGES},
}


def picture(number: int, mark: bytes = b"") -> bytes:
    """A complete image of 8 × 8 pixels, with different bytes for each number; `mark` follows its pixels."""
    return b"P6\n8 8\n255\n" + hashlib.shake_256(b"%d" % number).digest(192) + mark


def caption_of(data: bytes) -> str:
    """The fake captioner's answer for an image: it shows when an answer went to the wrong image."""
    return f"a picture of {zlib.crc32(data[:4096]) % 64} things"


def seeded(seed: int | None = None) -> random.Random:
    """A random generator whose seed is printed, so that pytest shows it when a test fails.
    VISIOND_SEED=… replays."""
    chosen = seed if seed is not None else int(os.environ.get("VISIOND_SEED") or secrets.randbits(32))
    print(f"VISIOND_SEED={chosen}")
    return random.Random(chosen)


def wait_for(
    condition: Callable[..., T | Literal[False] | None],
    what: str,
    timeout: float = PATIENCE,
    *,
    process: Forked | None = None,
) -> T:
    """Poll until the condition is true; returns its value. For changes that nothing signals.
    condition: it gets no arguments; one in a loop keeps the loop's variables as default values.
    process: one without which it cannot become true."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        status = process.poll() if process else None
        if value := condition():
            return value
        assert status is None, f"the command ended with {status} before {what}"
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain for {what}"
        pause.wait(GLANCE)


@contextlib.contextmanager
def meanwhile(step: Callable[[], object]) -> Iterator[None]:
    """Call this every few milliseconds, in a thread."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.005):
            step()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


async def until(condition: Callable[..., bool]) -> None:
    """As wait_for, without blocking the event loop."""
    with anyio.fail_after(PATIENCE):
        while not condition():  # noqa: ASYNC110 - it sends no word
            await anyio.sleep(GLANCE)


def free_port() -> int:
    """A port that nobody uses, and that the kernel gives to nobody else until it is used."""
    least = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(least, 20_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def make_certificate(folder: Path, names: str = "IP:127.0.0.1") -> dict[str, str]:
    """A certificate of this machine's own and its key, in certificate.pem and key.pem;
    returns the settings that name them."""
    request = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=visiond"
    )
    request += f" -addext subjectAltName={names} -keyout key.pem -out certificate.pem"
    try:
        subprocess.run(request.split(), cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: make tools")
    return {"tls_certificate": "certificate.pem", "tls_key": "key.pem"}


class Place:
    """A folder with an inbox (or several), a configuration, and room for everything a daemon writes."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.token = secrets.token_hex(TOKEN_BYTES)
        self.config = folder / "daemon.toml"
        self.settings = _merge(DEFAULTS, settings or {})
        self.settings.setdefault("inbox", [{"settle_seconds": 0.1}])
        self.dropped: dict[str, dict[bytes, list[str]]] = {}  # inbox's name → path → digests
        self.captions: dict[str, str] = {}  # what the fake captioner must say, by digest
        self._numbers = itertools.count()
        for table in [table for table in self.settings["inbox"] if "url" not in table]:
            table.setdefault("path", f"inbox-{table['name']}" if table.get("name") else "inbox")
            self.dropped[table.get("name", "")] = {}
            self.inbox(table.get("name", "")).mkdir(parents=True, exist_ok=True)
        self.staging = folder / "staging"
        self.staging.mkdir(exist_ok=True)
        self.configure()

    def configure(self, settings: Mapping[str, Any] | None = None) -> None:
        """Write daemon.toml, with further settings if there are any."""
        self.settings = _merge(self.settings, settings or {})
        self.config.write_text(to_toml(self.settings))

    def inbox(self, name: str = "") -> Path:
        table = next(table for table in self.settings["inbox"] if table.get("name", "") == name)
        return Path(self.folder, table["path"])

    @property
    def site(self) -> checker.Site:
        output = {
            "results": "results",
            "failed": "failed",
            "done": "done",
            "bins_folder": "bins",
            "bins": "none",
        }
        output |= self.settings.get("output", {})
        results, failed, done, bins = (
            self.folder / output[key] for key in ("results", "failed", "done", "bins_folder")
        )
        ledger = self.folder / "state" / "ledger.sqlite"
        return checker.Site(ledger, results, failed, done, bins, bins_mode=output["bins"])

    def drop(self, path: str | bytes, data: bytes, inbox: str = "") -> Path:
        """Add a file that appears whole, by rename, as a good uploader does."""
        name = os.fsencode(path)
        target = os.path.join(os.fsencode(self.inbox(inbox)), name)
        staged = self.staging / f"{next(self._numbers)}"
        staged.write_bytes(data)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(staged, target)
        self.expect_contents(path, data, inbox)
        return Path(os.fsdecode(target))

    def expect_contents(self, path: str | bytes, data: bytes, inbox: str = "") -> None:
        """Let the checker expect a version of a file with these bytes."""
        digest = hashlib.sha256(data).hexdigest()
        self.captions[digest] = caption_of(data)
        self.expect(path, digest, inbox)

    def drop_many(self, numbers: range, inbox: str = "") -> None:
        for number in numbers:
            self.drop(f"{number:05d}.ppm", picture(number), inbox)

    def expect(self, path: str | bytes, digest: str = "", inbox: str = "") -> None:
        """Let the checker expect a version of a file; without a digest it is not a regular file."""
        self.dropped[inbox].setdefault(os.fsencode(path), []).append(digest)

    def sidecar(self, path: str, inbox: str = "") -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.site.results / inbox / f"{path}.json").read_bytes())
        return document

    def command(
        self,
        *arguments: str | Path,
        prefix: Sequence[str] = (),
        modules: str | Path = "",
        plugins: str | Path = "",
        supervisor: str | Path = "",
        stdout: IO[bytes] | None = None,
        timeout: float = 2 * PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """Run `visiond` with these arguments and this place's configuration until it ends.
        prefix: a command that runs it. modules: a folder with the user's own, which are imported once a configuration
        names them. plugins: a folder in which some are installed.
        supervisor: the path of one that is asked about its system calls.
        stdout: where its standard output goes, if the test does not read it.

        With a prefix, or a terminal as its output, the command imports all that it needs. Otherwise it is forked from the
        tests' server, which has imported everything.
        """
        told = [*map(str, arguments)]
        environment = {**os.environ, TOKEN: self.token, "VISIOND_CONFIG": str(self.config)}
        environment |= {"PYTHONPATH": str(modules or plugins)} if modules or plugins else {}
        on_terminal = stdout is not None and stdout.isatty()  # whose size rich reads while it is imported
        if not prefix and not on_terminal:
            return run_forked(
                told,
                self.folder,
                environment,
                self.folder / secrets.token_hex(8),
                timeout,
                stdout,
                supervisor,
                plugins,
            )
        assert not supervisor, "only a forked command is put under a supervisor without its prefix"
        return subprocess.run(
            [*prefix, sys.executable, "-P", "-m", "daemon", *told],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE if stdout is None else stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout,
            check=False,
        )

    def run_once(
        self, prefix: Sequence[str] = (), modules: str | Path = "", supervisor: str | Path = ""
    ) -> subprocess.CompletedProcess[str]:
        return self.command("run", "--once", prefix=prefix, modules=modules, supervisor=supervisor)

    def judge(self, *, finished: bool = True, deleted: frozenset[bytes] = frozenset()) -> checker.Verdict:
        """The independent checker's verdict and, as the models are fakes,
        whether each answer went to its image."""
        inboxes = [
            checker.Inbox(self.inbox(name), dropped, name, self._on_success(name))
            for name, dropped in self.dropped.items()
        ]
        verdict = checker.judge(self.site, inboxes, finished=finished, deleted=deleted)
        verdict.wrong += self._misdirected_answers(verdict)
        return verdict

    def assert_kept(self, **counts: int) -> checker.Verdict:
        """The promise is kept, and this number of images ended in each state."""
        verdict = self.judge()
        assert not verdict.problems, "\n".join(verdict.problems[:20])
        assert verdict.counts == counts
        return verdict

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """A read-only SQL query."""
        with contextlib.closing(_connect(self.site.ledger)) as connection:
            return connection.execute(query, parameters).fetchall()

    def has_ledger(self) -> bool:
        """Whether a daemon has created its tables."""
        return self.site.ledger.exists() and bool(
            self.rows("SELECT 1 FROM sqlite_schema WHERE name = 'image'")
        )

    def processes(self) -> list[int]:
        """Every living process that was started for this place, by the token in its environment."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"{TOKEN}={self.token}".encode() in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def orphans(self, timeout: float = 5.0 + SLACK_SECONDS) -> list[int]:
        """The processes that are still there after this time."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.processes(), "the end of all processes", timeout)
        return self.processes()

    def _on_success(self, name: str) -> str:
        return str(
            next(t.get("on_success", "keep") for t in self.settings["inbox"] if t.get("name", "") == name)
        )

    def _misdirected_answers(self, verdict: checker.Verdict) -> list[str]:
        said = {
            key: document["caption"]["text"]
            for key, document in verdict.results.items()
            if "caption" in document
        }
        true = {(name, path): self.captions.get(self.dropped[name][path][-1]) for name, path in said}
        return [
            f"{key} is called {said[key]}, which is another image"
            for key in said
            if true[key] not in (said[key], None)
        ]


SO_TIMESTAMPNS = 35  # of asm-generic/socket.h; Python has no name for it
SENT_AT = struct.Struct("@ll")  # a timespec


@dataclass(frozen=True)
class Notice:
    """A message to systemd, and when it was sent (Unix seconds)."""

    text: str
    at: float


class NotifySocket:
    """The receiving end of sd_notify(3). A separate thread reads, so that the daemon never waits for a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notices: list[Notice] = []
        self._changed = threading.Condition()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # The kernel's time: the thread may read a message late.
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._read, name="notify", daemon=True)
        self._thread.start()

    def wait(
        self, condition: Callable[[list[Notice]], Any], timeout: float, alive: Callable[[], bool]
    ) -> Any:
        """Block until the condition is true of the notices so far;
        returns its last value when time is up or the process has ended."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while (
                not (value := condition(self.notices))
                and alive()
                and (left := deadline - time.monotonic()) > 0
            ):
                self._changed.wait(min(left, 0.2))
            return value

    def catch_up(self) -> int:
        """Wait until all that were sent by now have been read; returns the number of notices."""
        self._send(mark := secrets.token_hex(8))
        assert self.wait(
            lambda notices: any(notice.text == mark for notice in notices), PATIENCE, lambda: True
        )
        return len(self.notices)

    def close(self) -> None:
        self._send("")
        self._thread.join()
        self._socket.close()
        self.path.unlink()

    def _send(self, text: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(text.encode(), str(self.path))

    def _read(self) -> None:
        while (received := self._socket.recvmsg(4096, socket.CMSG_SPACE(SENT_AT.size)))[0]:
            message, [(_, _, sent_at)], *_ = received
            seconds, nanoseconds = SENT_AT.unpack(sent_at)
            with self._changed:
                self.notices.append(Notice(message.decode(), seconds + nanoseconds / 1e9))
                self._changed.notify_all()


GATE = """
import os, sys, time
parent = os.getppid()
while "daemon.workers.child" in sys.orig_argv:
    try:
        os.unlink(os.path.join(FOLDER, min(os.listdir(FOLDER))))
        break
    except (ValueError, FileNotFoundError):
        time.sleep(0.02)
    if os.getppid() != parent:
        os._exit(1)
"""


class Gate:
    """Workers of a daemon that is run in this `environment` start when a test lets them,
    so that the test misses none: each takes one of the tickets."""

    def __init__(self, folder: Path, tickets: int = 0) -> None:
        self._tickets = folder / "tickets"
        self._tickets.mkdir()
        self._sold = itertools.count()
        (folder / "gate").mkdir()
        (folder / "gate" / "sitecustomize.py").write_text(GATE.replace("FOLDER", repr(str(self._tickets))))
        self.environment = {CHILDREN_PATH: str(folder / "gate")}
        self.let_in(tickets)

    def let_in(self, workers: int = 1) -> None:
        for _ in range(workers):
            (self._tickets / f"{next(self._sold):04d}").touch()


def with_pauses(seconds: Mapping[str, float]) -> dict[str, str]:
    """An environment in which pauses of a forked daemon have another length; those of its children stay.
    seconds: by module and name, for example "daemon.pipeline.schedule.REST_SECONDS". Other numbers can be set too."""
    return {PAUSES: json.dumps(seconds)}


# A command that replaces itself by its arguments, with a terminal of its own as the controlling one.
ON_A_TERMINAL = [
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios\n"
    "os.getsid(0) == os.getpid() or os.setsid()\n"
    "ours, its = os.openpty()\n"
    "os.set_inheritable(ours, True)\n"
    "fcntl.ioctl(its, termios.TIOCSCTTY, 0)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])",
]


class Daemon:
    """`visiond run` at a place, from its start to its end. At
    the end of the context none of its processes may be left."""

    def __init__(
        self,
        place: Place,
        *options: str,
        ready: bool = True,
        prefix: Sequence[str] = (),
        stderr: int | None = None,
        supervisor: str | Path = "",
        environment: Mapping[str, str] = {},
    ) -> None:
        """prefix: a command that replaces itself by the daemon.
        supervisor: the path of one that is asked about its system calls. stderr: a descriptor in place of the log's file.

        A daemon is forked from the tests' server, which has imported everything. It is a new Python instead where
        the start itself matters: with a prefix or stderr, with another PYTHONPATH than the tests have, or if the
        test does not wait until it is ready, unless that is because of its children.
        """
        self.place = place
        self.notify = NotifySocket(place.folder / "notify")
        self._log = place.folder / f"log-{secrets.token_hex(4)}.jsonl"
        told = ["run", *options, "--config", str(place.config)]
        changes = {TOKEN: place.token, "NOTIFY_SOCKET": str(self.notify.path), **environment}
        paths = [each.get("PYTHONPATH") for each in (ENVIRONMENT, {**os.environ, **environment})]
        waits = ready or CHILDREN_PATH in environment
        starts = not waits or prefix or stderr is not None or paths[0] != paths[1]
        self.process: subprocess.Popen[bytes] | Forked
        with self._log.open("wb") as log:
            if starts:
                assert not supervisor, "only a forked daemon is put under one"
                assert not environment.keys() & {PAUSES, CHILDREN_PATH}, "only a forked daemon has them"
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, "-P", "-m", "daemon", *told],
                    env={**os.environ, **changes},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log if stderr is None else stderr,
                    start_new_session=True,
                )
            else:
                self.process = Forked(
                    told, Path.cwd(), {**os.environ, **changes}, log, log, session=True, supervisor=supervisor
                )
        self._ready = ready

    def __enter__(self) -> Daemon:
        if self._ready:
            try:
                self.wait_ready()
            except BaseException:
                self.__exit__(*sys.exc_info())
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.notify.close()
        orphans = self.place.orphans()
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        if error:
            print(f"the daemon's log:\n{self.log_text()[-6000:]}")
        else:
            assert not orphans, f"processes {orphans} outlived the daemon"

    # Waiting for it

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, timeout: float = PATIENCE) -> Notice:
        """Block on the notify socket until it says READY."""
        return self.wait_notice("READY=1", timeout)

    def wait_notice(self, text: str, timeout: float = PATIENCE) -> Notice:
        notice: Notice | None = self.notify.wait(
            lambda notices: next((n for n in notices if n.text == text), None), timeout, self.alive
        )
        assert notice, f"no {text} from the daemon; its log:\n{self.log_text()[-6000:]}"
        return notice

    def wait_until(
        self, condition: Callable[..., Any], what: str, timeout: float = PATIENCE
    ) -> dict[str, Any]:
        """Ask for its status until the condition is true of it; returns that status."""
        status: dict[str, Any] = {}

        def is_true() -> Any:
            nonlocal status
            status = self.status()
            return condition(status)

        try:
            wait_for(is_true, what, timeout)
        except AssertionError as error:
            error.add_note(f"its last status: {json.dumps(status)}")
            raise
        return status

    def wait_idle(self, ended: int, timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait until this number of images have ended in this run and none is in flight."""
        return self.wait_until(
            lambda s: s["ended_in_this_run"] >= ended and not s["pending"] and not s["in_flight"],
            f"{ended} endings",
            timeout,
        )

    def wait_event(self, event: str, timeout: float = PATIENCE, **fields: object) -> dict[str, Any]:
        """Wait until a line of its log has this event with these fields."""
        return wait_for(
            lambda: next(self.events(event, **fields), None), f'"{event}" {fields} in the log', timeout
        )

    def wait_end(self, timeout: float = PATIENCE) -> int:
        """Wait until it ends; returns its exit status."""
        return self.process.wait(timeout)

    # Asking it

    @property
    def port(self) -> int:
        """The port of [http]."""
        return int(self.wait_event("ready")["metrics"].rpartition(":")[2])

    def dial(self, certificate: Path | None = None) -> http.client.HTTPConnection:
        """A connection to its pages; by HTTPS, if its certificate is given."""
        if certificate is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        context = ssl.create_default_context(cafile=certificate)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=context)

    def get(self, path: str) -> tuple[int, Any]:
        status, body = self.fetch(path)
        return status, json.loads(body)

    def fetch(self, path: str) -> tuple[int, bytes]:
        """A request over the control socket."""
        connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(str(self.place.folder / "state" / "control.sock"))
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/api/status")[1]
        return status

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 when there is none."""
        # Only its own lines, as to parse all takes as long as the daemon takes to write them.
        lines = [line for line in self.fetch("/metrics")[1].decode().splitlines() if name in line]
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                if (sample.name, sample.labels) == (name, labels):
                    return float(sample.value)
        return 0.0

    def workers(self) -> list[int]:
        """Process ids of its workers."""
        return running("daemon.workers.child", self.place.processes())

    def ready_workers(self) -> list[int]:
        """Process ids of those that have loaded."""
        return [pid for pid in self.workers() if any(self.events("worker ready", pid=pid))]

    def events(self, event: str, **fields: object) -> Iterator[dict[str, Any]]:
        """Lines of its log. A thread of the daemon writes them, so a line may come after what it tells of: see
        `wait_event`."""
        for line in self._log.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("event") == event and fields.items() <= entry.items():
                    yield entry

    def events_of_pid(self, pid: int) -> dict[str, Any]:
        """The log line about the worker with this process id."""
        return next(self.events("worker ready", pid=pid))

    def log_text(self) -> str:
        return self._log.read_text()

    # Ending it

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def stop(self, timeout: float = PATIENCE) -> int:
        """SIGTERM; returns its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait_end(timeout)

    def pause(self) -> None:
        """SIGSTOP; returns when all its threads stand still."""
        self.signal(signal.SIGSTOP)
        wait_for(lambda: state_of(self.process.pid) == "T", "a daemon that stands still")

    def kill(self, *, group: bool = False) -> None:
        """kill -9, the daemon alone or with all its children."""
        if self.alive():
            if group:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.wait(PATIENCE)


def counts_of(place: Place) -> collections.Counter[str]:
    """Rows by state, straight from the ledger."""
    rows = place.rows("SELECT status, COUNT(*) FROM image GROUP BY status")
    return collections.Counter({checker.STATUS_NAMES[status]: count for status, count in rows})


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def to_toml(document: Mapping[str, Any], prefix: str = "") -> str:
    """TOML of strings, numbers, booleans, lists, tables and lists of tables.
    JSON writes its values as TOML does."""
    plain, tables = "", ""
    for key, value in document.items():
        name = f"{prefix}{json.dumps(key)}"
        if isinstance(value, Mapping):
            tables += f"[{name}]\n{to_toml(value, f'{name}.')}"
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables += "".join(f"[[{name}]]\n{to_toml(item, f'{name}.')}" for item in value)
        else:
            plain += f"{json.dumps(key)} = {json.dumps(value, ensure_ascii=False)}\n"
    return plain + tables


def _merge(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: _merge(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in more.items():
        held = merged.get(key)
        merged[key] = (
            _merge(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def running(module: str, processes: Iterable[int]) -> list[int]:
    """Those of these processes that run a module, in order, without what one of them is just starting: until a new
    process has its own program, it looks like its parent."""
    found = {pid for pid in processes if module.encode() in command_of(pid)}
    return sorted(pid for pid in found if _parent_of(pid) not in found)


def state_of(pid: int) -> str:
    """As in proc(5), for example "T" if a signal has stopped it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _parent_of(pid: int) -> int:
    """0 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
