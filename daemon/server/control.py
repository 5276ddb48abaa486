"""What the commands do with the daemon: send a request to the running one, or read its ledger if none is running.

What only some commands need is imported where they need it, so that `status` and error messages come at once.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from daemon.config.loading import Config
from daemon.config.reloading import Reloaded
from daemon.config.state import CONTROL, LEDGER, find_holder, lock_state, socket_address
from daemon.core.errors import (
    LedgerDamaged,
    LedgerUnusable,
    NotAnswering,
    NothingFound,
    NotPermitted,
    NotRunning,
    WrongArgument,
)
from daemon.core.hints import command
from daemon.core.jobs import JobStatus
from daemon.ledger.record import Record, describe_models
from daemon.ledger.records import Reader, open_reader
from daemon.monitoring.snapshot import LookState, SinkState, Snapshot, describe_behind
from daemon.monitoring.upkeep import read_upkeep
from stages.contract.base import Reason

if TYPE_CHECKING:
    from daemon.ledger.ledger import Ledger
    from daemon.maintenance.keeping import ModelAnswers
    from daemon.maintenance.pruning import Amounts

T = TypeVar("T")  # what is sent in one request
POLL_SECONDS = 0.1  # while the daemon carries out a request
PATIENCE_SECONDS = 30.0  # for an answer of the daemon
HEALTH_SECONDS = 8.0  # the same for a health check, less than the time that a container gives it
FINGERPRINT = re.compile("sha256:[0-9a-f]{4,16}", re.I)  # or its beginning; digests of images are longer
CHUNK = 10_000  # images named in one request


def find_snapshot(config: Config) -> Snapshot | None:
    """The snapshot of the running daemon; None if no daemon answers."""
    try:
        return ask_status(config)
    except NotRunning:
        return None


def ask_status(config: Config, patience_seconds: float = PATIENCE_SECONDS) -> Snapshot:
    """The snapshot of the running daemon. Raises NotRunning, NotAnswering."""
    answer = ask(config.state.path / CONTROL, "GET", "/api/status", patience_seconds=patience_seconds)
    return msgspec.convert(answer, Snapshot)


class Health(msgspec.Struct, frozen=True):
    """state: ok, degraded (some worker is not ready) or dead (no image can be processed any more); or, of whether images get
    through, ready or not ready."""

    state: str
    problems: list[str]


def ask_health(config: Config, *, ready: bool) -> Health:
    """What /healthz of the running daemon says, or with `ready` what /readyz says. Raises NotRunning, NotAnswering."""
    page = "/readyz" if ready else "/healthz"
    answer = ask(config.state.path / CONTROL, "GET", page, patience_seconds=HEALTH_SECONDS)
    state = ("ready" if answer["ready"] else "not ready") if ready else answer["status"]
    return Health(state, answer["problems"])


def find_status(config: Config) -> Snapshot:
    """The snapshot of the running daemon or, if none is running, one with the counts of the ledger."""
    return find_snapshot(config) or read_status(config)


def read_status(config: Config) -> Snapshot:
    """The state as the ledger shows it, without a daemon. Raises NothingFound, LedgerDamaged."""
    with open_reader(config) as reader:
        counts = reader.counts()
        newest = next(iter(reader.newest(JobStatus.DONE, 1)), None)
        sinks = describe_sinks(config, reader, counts[JobStatus.DONE])
        looks = describe_looks(config, reader)
        outdated = reader.count_outdated(config.kept_inboxes, every_stage=config.pipeline.mode == "full")
    return Snapshot(
        running=False,
        pending=counts[JobStatus.PENDING],
        done=counts[JobStatus.DONE],
        failed=counts[JobStatus.FAILED],
        skipped=counts[JobStatus.SKIPPED],
        gone=counts[JobStatus.GONE],
        obstacles=[sink.problem for sink in sinks if sink.problem],
        sinks=sinks,
        second_looks=looks,
        upkeep=read_upkeep(config.state.path),
        outdated=outdated,
        notices={model.stage: model.notice for model in newest.models if model.notice} if newest else {},
        held_by=find_holder(config.state.path),
    )


def describe_sinks(config: Config, reader: Reader, done: int) -> list[SinkState]:
    """The sinks of the configuration, and those of the ledger that lack records. done: images that a new one lacks."""
    known, configured = reader.sinks(), config.output.sinks
    sinks = [
        SinkState(
            name=name,
            behind=behind,
            succeeded_at=at,
            problem=describe_behind(name, behind, find_cause(config, name)) if behind else "",
            configured=name in configured,
        )
        for name, (behind, at) in known.items()
        if behind or name in configured
    ]
    return sinks + [SinkState(name=name, behind=0, earlier=done) for name in configured if name not in known]


def describe_looks(config: Config, reader: Reader) -> list[LookState]:
    """The second looks of the configuration and of the ledger."""
    tables = {table.name: table for table in config.second_look}
    return [
        LookState(
            name=name,
            stage=tables[name].stage if name in tables else "",
            model=tables[name].model or tables[name].backend if name in tables else "",
            **reader.count_looks(name)._asdict(),
        )
        for name in dict.fromkeys([*tables, *reader.look_names()])
    ]


def find_cause(config: Config, sink: str) -> str:
    """Why a sink is behind while no daemon is running, as far as a look at its output shows; otherwise empty."""
    from daemon.results.sinks import open_sinks
    from daemon.system import mounts

    opened = open_sinks(config)
    if sink not in opened:
        return "it is no longer in output.sinks, so the next start forgets it"

    def look() -> str:
        try:
            return opened[sink].problem()
        except OSError as error:
            return str(error)

    why = mounts.ask(look)
    return "its file system does not answer; its mount may be dead" if why is None else why


def find_image(reader: Reader, name: str) -> Record:
    """The one image with this path, name or number. Raises NothingFound; WrongArgument if there are several."""
    found = reader.find(name)
    if not found:
        raise NothingFound(
            f"There is no image {name} in the ledger. Use its path, or its number as `{command('list')}` prints it. What the "
            "inbox ignores is not in the ledger."
        )
    if len(found) > 1:
        lines = [
            f"{record.id}  {record.status.name}  {os.fsdecode(os.path.join(record.inbox_path, record.path))}"
            for record in found
        ]
        raise WrongArgument(
            "\n".join([f"Several images match {name}; use the complete path or the number:", *lines])
        )
    return found[0]


def describe_model(reader: Reader, name: str) -> dict[str, Any]:
    """What a fingerprint stands for, or the first of its digits. versions: those of visiond that have used it. Raises
    NothingFound; WrongArgument if it can be several."""
    found = {n: model for n, model in reader.models.items() if model.fingerprint.startswith(name.lower())}
    if not found:
        raise NothingFound(
            f"No model in the ledger has the fingerprint {name}. `show` of an image has those of its models."
        )
    if len(found) > 1:
        known = ", ".join(sorted(model.fingerprint for model in found.values()))
        raise WrongArgument(f"Several fingerprints begin with {name}: {known}. Type more digits.")
    [(number, model)] = found.items()
    versions = dict.fromkeys(each.visiond for each in (*model.former, model.provenance) if each.visiond)
    return describe_models([model])[0] | {
        "versions": [*versions],
        "results": reader.count_results(number),
        "is_current": number in reader.current_models(),
    }


def find_whole(reader: Reader, name: str) -> Record:
    """As find_image; raises LedgerDamaged if the image's data in the ledger is damaged."""
    record = find_image(reader, name)
    if record.damage:
        redo, repair = command("redo", str(record.id)), command("repair")
        raise LedgerDamaged(
            f"The ledger's data of {name} is damaged ({record.damage}). Stop the daemon and run `{repair}`, which restores "
            f"it from the sidecar, or process the image again: `{redo}`."
        )
    return record


def find_ended(reader: Reader, name: str, status: JobStatus, verb: str = "redo") -> Record:
    """The one image with this name and status. verb: the command that needs it. Raises NothingFound, WrongArgument."""
    record = find_image(reader, name)
    if record.reason == Reason.UNPACKED:
        again = f"each image in that folder has a result of its own: `{command(verb, 'FOLDER/IMAGE')}`"
        raise NothingFound(
            f"{name} was unpacked ({record.detail}), and {again}. To unpack it again, remove the folder and "
            f"`touch` {name}."
        )
    if record.status is not status:
        show = command("show", str(record.id))
        raise NothingFound(f"{name} is {record.status.name}, not {status.name}; `{show}` shows the details.")
    return record


def put_back(
    config: Config,
    status: JobStatus,
    ids: list[int],
    step: Callable[[int], None] = lambda done: None,
    *,
    distrust: bool = False,
) -> int:
    """Set images of this status to PENDING: by the daemon, as only it may write its ledger,
    or here if none is running. step: called with the number of images that were named so far. distrust: their results may
    be wrong, and are not used again."""

    async def here(ledger: Ledger, chunk: list[int]) -> int:
        return await ledger.put_back(status, chunk, distrust=distrust)

    path = f"/put-back/{status.name}{'?distrust=1' if distrust else ''}"
    return _change(config, path, partial(_chunks, ids, step), here)


def note_lost(config: Config, ids: list[int]) -> None:
    """The files of these images that are DONE cannot be read: as `put_back`."""

    async def here(ledger: Ledger, chunk: list[int]) -> int:
        return await ledger.note_lost(chunk)

    _change(config, "/lost", partial(_chunks, ids), here)


def keep_answers(config: Config, group: ModelAnswers) -> int:
    """Keep what a model says that is not in use yet: as `put_back`. Returns how many answers are new."""
    from daemon.maintenance import keeping

    return _change(config, "/answers", lambda: [[group]], keeping.keep_answers)


def _chunks(ids: list[int], step: Callable[[int], None] = lambda done: None) -> Iterator[list[int]]:
    for start in range(0, len(ids), CHUNK):
        yield ids[start : start + CHUNK]
        step(min(start + CHUNK, len(ids)))


def _change(
    config: Config, path: str, bodies: Callable[[], Iterable[T]], here: Callable[[Ledger, T], Awaitable[int]]
) -> int:
    """Send each of these to the daemon; if none is running, call `here` with the ledger and each. Returns how many images have
    changed."""
    try:
        return sum(_count(ask(config.state.path / CONTROL, "POST", path, body)) for body in bodies())
    except NotAnswering:
        raise
    except NotRunning:
        import anyio

        from daemon.ledger.ledger import Ledger

        with lock_state(config.state.path), contextlib.closing(Ledger(config.state.path / LEDGER)) as ledger:
            return sum(anyio.run(here, ledger, body) for body in bodies())


def _count(answer: dict[str, Any]) -> int:
    if "images" not in answer:
        raise NotAnswering(f"The daemon refuses the request: {answer.get('problem')}")
    return int(answer["images"])


def prune(
    config: Config, before: float, step: Callable[[Amounts, float], None] = lambda removed, share: None
) -> Amounts:
    """Remove rows that nothing needs any more: by the daemon while it works, or here if none is running.

    before: only rows that ended before, in Unix seconds. step: as of `pruning.prune`.
    Raises NothingFound without a ledger, LedgerDamaged,
    LedgerUnusable.
    """
    from daemon.maintenance import pruning

    control = config.state.path / CONTROL
    with open_reader(config):  # raises if there is no ledger; opening it for writing would create one
        pass
    try:
        answer = ask(control, "POST", "/prune", before)
        while answer["running"]:
            time.sleep(POLL_SECONDS)
            answer = ask(control, "GET", "/prune")
            step(msgspec.convert(answer["amounts"], pruning.Amounts), answer["share"])
        if answer["trouble"]:
            raise LedgerUnusable(answer["trouble"])
        return msgspec.convert(answer["amounts"], pruning.Amounts)
    except NotRunning:
        import anyio

        from daemon.ledger.ledger import Ledger

        with lock_state(config.state.path), contextlib.closing(Ledger(config.state.path / LEDGER)) as ledger:
            return anyio.run(partial(pruning.prune, ledger, before, step=step))


def reload(config: Config) -> Reloaded:
    """Let the running daemon read its configuration again. Raises NotRunning."""
    control = config.state.path / CONTROL
    return msgspec.convert(ask(control, "POST", "/reload"), Reloaded)


def ask(
    control: Path, method: str, path: str, body: object = None, *, patience_seconds: float = PATIENCE_SECONDS
) -> Any:
    """Send a request to the running daemon by its control socket; returns the decoded JSON.
    Raises NotRunning, NotAnswering."""
    return msgspec.json.decode(fetch(control, method, path, body, patience_seconds=patience_seconds))


def fetch(
    control: Path, method: str, path: str, body: object = None, *, patience_seconds: float = PATIENCE_SECONDS
) -> bytes:
    """As `ask`, for pages that are not JSON."""
    with contextlib.closing(http.client.HTTPConnection("localhost")) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(patience_seconds)
        try:
            with socket_address(control) as address:
                connection.sock.connect(address)
        except PermissionError as error:
            raise NotPermitted(control) from error
        except BlockingIOError as error:  # its queue of connections is full
            raise NotAnswering("The daemon takes no more requests now. Try again in a minute.") from error
        except OSError as error:
            raise NotRunning(f"No daemon answers at {control}: {error.strerror}.") from error
        try:
            connection.request(method, path, msgspec.json.encode(body) if body is not None else None)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            busy = "The daemon did not answer in time; it may be compacting its ledger"
            raise NotAnswering(f"{busy}. Try again in a minute; the request may be done by then.") from error
        if answer.status == http.HTTPStatus.INTERNAL_SERVER_ERROR:  # it is stopping: requests are cancelled
            raise NotAnswering(
                "The daemon stopped before it could answer, or failed to; its log has the reason."
            )
        return content
