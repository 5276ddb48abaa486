"""The real Watcher on real folders with real inotify: a file is found once it is whole, however it arrives."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import pytest
from structlog.testing import capture_logs

from daemon.config.loading import parse
from daemon.config.sections import Inbox
from daemon.core.errors import LedgerUnusable
from daemon.core.jobs import Admitted, File, JobStatus, Placed
from daemon.inbox import settle
from daemon.inbox import watcher as watching
from daemon.inbox.disk import FolderOrigin
from daemon.inbox.folder import Folder, open_folder
from daemon.inbox.settle import Patience, Settling
from daemon.inbox.unavailable import why_unavailable
from daemon.inbox.walk import Listed, Walk
from daemon.inbox.watcher import Watcher
from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Expected, Reader
from daemon.monitoring.metrics import Metrics
from daemon.service.lifecycle import Service
from daemon.system.mounts import ANSWER_SECONDS
from tests.daemon_process import GLANCE, PATIENCE, Daemon, Place, picture, until, wait_for
from tests.makers import MODELS, VERSION, admit, done, make_file

pytestmark = pytest.mark.anyio

NEVER = 3600.0  # between scans, so that only events can have found a file
SETTLE_SECONDS = 0.2  # where files have to wait
MANY = 9000  # each is created and closed: more events than the kernel's queue of 16,384 holds


class Found:
    """The files that the watcher has admitted and the ledger knows."""

    def __init__(self, inbox: Path, ledger: Ledger) -> None:
        self.inbox = inbox
        self.ledger = ledger
        self.metrics = Metrics()
        self.files: dict[File, None] = {}
        self._news = anyio.Event()

    async def admit(self, files: list[File]) -> None:
        await self.ledger.admit(files)
        # An event and a scan may find the same version at once: the ledger takes it once.
        self.files |= dict.fromkeys(files)
        self._news.set()

    @property
    def paths(self) -> list[bytes]:
        return [file.path for file in self.files if file.path != b"first"]

    async def until(self, paths: Iterable[str | bytes]) -> None:
        """Wait until exactly these have been found, each once."""
        wanted = sorted(map(os.fsencode, paths))
        try:
            with anyio.fail_after(PATIENCE):
                while len(self.paths) < len(wanted):
                    await self.news()
        except TimeoutError:
            pytest.fail(f"found {sorted(self.paths)[:20]}, wanted {wanted[:20]}")
        assert sorted(self.paths) == wanted

    async def news(self) -> None:
        news = self._news
        await news.wait()
        if self._news is news:  # nothing else has taken it
            self._news = anyio.Event()

    def write(self, path: str | bytes, data: bytes = b"data") -> Path:
        file = Path(os.fsdecode(os.path.join(os.fsencode(self.inbox), os.fsencode(path))))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return file


Watch = Callable[..., contextlib.AbstractAsyncContextManager[Found]]


@pytest.fixture
def watch(inbox: Path, ledger: Ledger) -> Watch:
    @contextlib.asynccontextmanager
    async def start(rescan_seconds: float = NEVER, **settings: Any) -> AsyncIterator[Found]:
        """A watcher at work, whose first scan is over."""
        found = Found(inbox, ledger)
        reader = Reader(ledger.path)
        settings = {"settle_seconds": 0.05, "watch": "inotify"} | settings
        watcher = Watcher({1: Inbox(path=inbox, **settings)}, reader, rescan_seconds, found.metrics)
        found.write("first")
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watcher.run, found.admit)
                with anyio.fail_after(PATIENCE):
                    await found.news()
                yield found
                tasks.cancel_scope.cancel()
        finally:
            reader.close()

    return start


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


async def create(found: Found, _outside: Path) -> list[str]:
    found.write("a.jpg")
    found.write("b.jpg")
    return ["a.jpg", "b.jpg"]


async def rename_in(found: Found, outside: Path) -> list[str]:
    (outside / "a.part").write_bytes(b"data")
    (outside / "a.part").rename(found.inbox / "a.jpg")
    return ["a.jpg"]


async def rename_from_an_ignored_name(found: Found, _outside: Path) -> list[str]:
    found.write("a.jpg.part").rename(found.inbox / "a.jpg")
    return ["a.jpg"]


async def hard_link(found: Found, outside: Path) -> list[str]:
    (outside / "a.jpg").write_bytes(b"data")
    os.link(outside / "a.jpg", found.inbox / "b.jpg")
    return ["b.jpg"]


async def make_folders_with_files_in_them(found: Found, _outside: Path) -> list[str]:
    paths = [f"{folder}/{number}.jpg" for folder in ("new", "new/deep", "new/deep/er") for number in range(3)]
    for path in paths:
        found.write(path)
    return paths


async def move_a_folder_in(found: Found, outside: Path) -> list[str]:
    (outside / "folder" / "sub").mkdir(parents=True)
    (outside / "folder" / "a.jpg").write_bytes(b"data")
    (outside / "folder" / "sub" / "b.jpg").write_bytes(b"data")
    (outside / "folder").rename(found.inbox / "moved")
    return ["moved/a.jpg", "moved/sub/b.jpg"]


async def rename_a_folder(found: Found, _outside: Path) -> list[str]:
    """Its files then have other paths, and files that are
    dropped into it later are found under the new path too."""
    found.write("old/sub/a.jpg")
    await found.until(["old/sub/a.jpg"])
    (found.inbox / "old").rename(found.inbox / "new")
    await found.until(["old/sub/a.jpg", "new/sub/a.jpg"])
    found.write("new/sub/b.jpg")
    return ["old/sub/a.jpg", "new/sub/a.jpg", "new/sub/b.jpg"]


async def replace(found: Found, outside: Path) -> list[str]:
    found.write("a.jpg")
    await found.until(["a.jpg"])
    (outside / "a.jpg").write_bytes(b"newer data")
    (outside / "a.jpg").rename(found.inbox / "a.jpg")
    return ["a.jpg", "a.jpg"]


async def use_odd_names(found: Found, _outside: Path) -> list[str]:
    names = [
        "new\nline.jpg",
        "quote'\".jpg",
        "\x1b[31mred.jpg",
        "\u202egpj.exe",
        "no-utf8-\udcff\udc80.jpg",
        "x" * 251 + ".jpg",
    ]
    for name in [*names, "Case.jpg", "case.jpg"]:
        found.write(os.fsencode(name))
    return [*names, "Case.jpg", "case.jpg"]


@pytest.mark.parametrize(
    "arrive",
    [
        create,
        rename_in,
        rename_from_an_ignored_name,
        hard_link,
        make_folders_with_files_in_them,
        move_a_folder_in,
        rename_a_folder,
        replace,
        use_odd_names,
    ],
)
async def test_a_file_is_found_by_events_alone(
    watch: Watch, outside: Path, arrive: Callable[[Found, Path], Awaitable[list[str]]]
) -> None:
    async with watch() as found:
        await found.until(await arrive(found, outside))
        assert found.metrics.value("visiond_reconcile_found_total") == 0


async def test_a_file_that_is_written_slowly_is_found_when_it_is_whole(
    watch: Watch, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is moved in is whole at once, so it shows that the events before it were processed."""
    seconds = NEVER
    async with watch() as found:
        monkeypatch.setattr(Folder, "patience", property(lambda _: Patience(seconds, trusts_clock=True)))
        with (found.inbox / "slow.jpg").open("wb", buffering=0) as file:
            for number in range(3):
                file.write(b"x" * 100)
                os.fchmod(file.fileno(), 0o600)  # which is an event
                (outside / "whole.jpg").touch()
                (outside / "whole.jpg").rename(found.inbox / f"{number}.jpg")
                await found.until([f"{earlier}.jpg" for earlier in range(number + 1)])
            seconds = 0.0
        await found.until(["0.jpg", "1.jpg", "2.jpg", "slow.jpg"])
        assert [file.version.size for file in found.files if file.path == b"slow.jpg"] == [300]


async def test_names_that_are_ignored_are_passed_over_and_so_are_folders_where_none_are_wanted(
    watch: Watch,
) -> None:
    passed_over = [".hidden.jpg", "a.jpg.part", "b.tmp", "c~", "d.crdownload", "sub/e.jpg"]
    async with watch(recursive=False) as found:
        for name in [*passed_over, "seen.jpg"]:
            found.write(name)
        await found.until(["seen.jpg"])
    async with watch(ignore=["*.png"]) as found:
        for name in ("f.png", "folder.png/g.jpg", "h.jpg"):
            found.write(name)
        await found.until(["sub/e.jpg", "h.jpg"])


async def test_patterns_with_a_path_are_asked_by_scans_and_events_alike(watch: Watch) -> None:
    ignored = ["private/a.jpg", "private/sub/b.jpg", "x/@EADIR/c.jpg", "d.PART"]
    taken = ["x/private/a.jpg", "e.jpg"]
    async with watch(ignore=["private/*"]) as found:
        for name in [*ignored, *taken]:  # events
            found.write(name)
        await found.until(taken)
        for name in ("private/later.jpg", "last.jpg"):  # the folder is known now
            found.write(name)
        await found.until([*taken, "last.jpg"])
    async with watch(ignore=["/PRIVATE/sub/"]) as found:  # a scan finds what was ignored
        await found.until(["private/a.jpg", "private/later.jpg"])


async def test_an_irregular_file_is_skipped_and_never_opened(watch: Watch, outside: Path) -> None:
    (outside / "secret.jpg").write_bytes(b"data")
    async with watch() as found:
        (found.inbox / "link.jpg").symlink_to(outside / "secret.jpg")
        (found.inbox / "loop.jpg").symlink_to("loop.jpg")
        (found.inbox / "folder.jpg").symlink_to(outside)
        os.mkfifo(found.inbox / "fifo.jpg")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(found.inbox / "socket.jpg"))
        await found.until(["link.jpg", "loop.jpg", "folder.jpg", "fifo.jpg", "socket.jpg"])
    with contextlib.closing(Reader(found.ledger.path)) as reader:
        assert reader.counts()[JobStatus.SKIPPED] == 5
        assert reader.counts()[JobStatus.PENDING] == 1  # "first"


def test_an_irregular_file_is_counted_and_listed_once_however_often_it_is_seen(tmp_path: Path) -> None:
    place = Place(tmp_path, {"pipeline": {"rescan_seconds": 0.1}})
    os.mkfifo(place.inbox() / "fifo.jpg")
    (place.inbox() / "folder.jpg").mkdir()
    with Daemon(place) as daemon:
        wait_for(lambda: daemon.metric("visiond_scan_duration_seconds_count") > 3, "several scans")
        assert daemon.metric("visiond_images_total", outcome="skipped", reason="not-regular") == 1
    [listed] = json.loads(place.command("list", "--status", "skipped", "--json").stdout)
    assert (listed["source"]["path"], listed["reason"]) == ("fifo.jpg", "not-regular")


@pytest.mark.parametrize(("by", "missed"), [("poll", 0), ("inotify", 1)])
async def test_files_count_as_missed_only_where_events_should_have_shown_them(
    by: str, missed: int, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watcher, "_take_event", lambda *event: None)
    async with watch(rescan_seconds=0.1, watch=by, settle_seconds=0) as found:
        found.write("a.jpg")
        await found.until(["a.jpg"])
        assert found.metrics.value("visiond_reconcile_found_total") == missed


async def test_files_of_a_scan_for_which_the_watches_run_out_do_not_count_as_missed(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watcher, "_take_event", lambda *event: None)

    def run_out(watcher: Watcher, folder: Folder, relative: bytes) -> None:
        if relative:
            watcher._fall_back(OSError(errno.ENOSPC, "No space left on device"))

    async with watch(rescan_seconds=0.1, settle_seconds=0) as found:
        monkeypatch.setattr(Watcher, "_watch", run_out)
        found.write("folder/a.jpg")
        await found.until(["folder/a.jpg"])
        assert found.metrics.value("visiond_reconcile_found_total") == 0


@pytest.mark.parametrize("first", ["scan", "event"])
async def test_a_file_that_a_scan_finds_while_its_event_is_handled_does_not_count_as_missed(
    first: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two admits it first. The other one has been asking for it since before."""
    read, ask = Folder.read_versions, Folder.find_unknown
    scan_goes_on, event_goes_on = threading.Event(), threading.Event()

    def read_late(*arguments: Any) -> list[File]:
        assert event_goes_on.wait(PATIENCE)
        return read(*arguments)

    def ask_slowly(folder: Folder, files: list[File], reader: Reader) -> tuple[dict[File, bool], Any]:
        unknown, names = ask(folder, files, reader)
        is_scan = b"first" in [file.path for file in files]
        if first == "event" and is_scan and b"a.jpg" in [file.path for file in unknown]:
            event_goes_on.set()
            assert scan_goes_on.wait(PATIENCE)
        return unknown, names

    async with watch(rescan_seconds=0.1, settle_seconds=0) as found:
        monkeypatch.setattr(Folder, "read_versions", read_late)
        monkeypatch.setattr(Folder, "find_unknown", ask_slowly)
        found.write("a.jpg")
        await found.until(["a.jpg"])
        event_goes_on.set()
        scan_goes_on.set()
        monkeypatch.setattr(Watcher, "_take_event", lambda *event: None)
        found.write("b.jpg")
        await found.until(["a.jpg", "b.jpg"])
        assert found.metrics.value("visiond_reconcile_found_total") == 1, "b.jpg alone"


async def test_an_overflow_of_the_kernels_queue_loses_no_file(watch: Watch) -> None:
    names = [f"{number}.jpg" for number in range(MANY)]
    async with watch() as found:
        for name in names:  # without a pause, so nobody reads events during it
            os.close(os.open(found.inbox / name, os.O_CREAT | os.O_WRONLY))
        await found.until(names)
        assert found.metrics.value("visiond_watch_overflows_total") >= 1


async def test_more_hints_than_there_is_room_for_lose_no_file(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.inbox.folder.HINTS", 3)
    names = [f"{number}.jpg" for number in range(300)]
    async with watch() as found:
        for name in names:
            found.write(name)
        await found.until(names)


@pytest.mark.parametrize(
    ("owner", "reads"), [(Watcher, "_walk"), (Folder, "read_versions")], ids=["by a scan", "by an event"]
)
async def test_a_file_that_has_grown_since_its_status_was_read_has_not_settled(
    watch: Watch, inbox: Path, monkeypatch: pytest.MonkeyPatch, owner: type, reads: str
) -> None:
    """However long it took until the status was used: the disk may be slow, and so may the ledger."""
    file, read, left = inbox / "a.jpg", getattr(owner, reads), [b"data", b"more data"]

    def read_slowly(*arguments: Any) -> Iterator[Any]:
        is_first = bool(left) and (reads == "_walk" or b"a.jpg" in arguments[-1])
        if is_first:
            file.write_bytes(left.pop(0))
        found = [*read(*arguments)]
        if is_first:
            file.write_bytes(left.pop(0))
            grown_at = time.monotonic()
            wait_for(lambda: time.monotonic() > grown_at + SETTLE_SECONDS, "the time in which files settle")
        yield from found

    slow = read_slowly if reads == "_walk" else lambda *arguments: [*read_slowly(*arguments)]
    monkeypatch.setattr(owner, reads, slow)
    async with watch(settle_seconds=SETTLE_SECONDS) as found:
        if reads == "read_versions":
            file.touch()
        await found.until(["a.jpg"])
        await until(lambda: found.metrics.value("visiond_scan_duration_seconds_count") >= 1)
    assert [file.version.size for file in found.files if file.path == b"a.jpg"] == [len(b"more data")]


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """More unsettled files than there is room for: all of them have to settle."""
    monkeypatch.setattr("daemon.inbox.folder.UNSETTLED", 4)
    monkeypatch.setattr(Folder, "patience", property(lambda _: Patience(SETTLE_SECONDS, trusts_clock=False)))
    return [f"{number}.jpg" for number in range(11)]


@pytest.mark.parametrize("watch_by", ["poll", "inotify"])
async def test_more_unsettled_files_than_there_is_room_for_are_found_in_a_few_scans(
    watch: Watch, inbox: Path, unsettled: list[str], watch_by: str
) -> None:
    for name in unsettled:
        (inbox / name).touch()
    started = time.monotonic()
    async with watch(settle_seconds=SETTLE_SECONDS, watch=watch_by) as found:
        await found.until(unsettled)
        scans = found.metrics.value("visiond_scan_duration_seconds_count")
    assert scans <= 1 + (time.monotonic() - started) / SETTLE_SECONDS


async def test_unsettled_files_that_do_not_fit_are_found_after_their_events(
    watch: Watch, unsettled: list[str]
) -> None:
    async with watch(settle_seconds=SETTLE_SECONDS) as found:
        for name in unsettled:
            found.write(name)
        await found.until(unsettled)


async def test_scans_for_what_had_no_room_end_when_all_is_found(
    watch: Watch, inbox: Path, unsettled: list[str]
) -> None:
    for name in unsettled:
        (inbox / name).touch()
    async with watch(settle_seconds=SETTLE_SECONDS) as found:
        await found.until(unsettled)
        scans = found.metrics.value("visiond_scan_duration_seconds_count")
        for number in range(6):  # each takes as long as it would be to a further scan
            found.write(f"later-{number}.jpg")
            await found.until(unsettled := [*unsettled, f"later-{number}.jpg"])
        # One was under way, one is for "first".
        assert found.metrics.value("visiond_scan_duration_seconds_count") <= scans + 2


@pytest.mark.parametrize("watch_by", ["poll", "inotify"])
async def test_more_unsettled_files_than_there_is_room_for_are_found_when_it_looks_only_once(
    inbox: Path, ledger: Ledger, unsettled: list[str], watch_by: Literal["poll", "inotify"]
) -> None:
    found = Found(inbox, ledger)
    for name in unsettled:
        found.write(name)
    with contextlib.closing(Reader(ledger.path)) as reader, anyio.fail_after(PATIENCE):
        await Watcher({1: Inbox(path=inbox, watch=watch_by)}, reader, NEVER, found.metrics).run(
            found.admit, once=True
        )
    assert sorted(found.paths) == sorted(map(os.fsencode, unsettled))


async def test_a_ledger_that_cannot_be_read_for_a_moment_is_read_again(
    inbox: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, failures = Found(inbox, ledger), iter([LedgerUnusable("too few file descriptors")])
    found.write("a.jpg")
    monkeypatch.setattr("daemon.system.retry.PAUSE_SECONDS", 0)
    with contextlib.closing(Reader(ledger.path)) as reader, anyio.fail_after(PATIENCE):
        lend = reader.lend

        def fail_once() -> Any:
            for failure in failures:
                raise failure
            return lend()

        monkeypatch.setattr(reader, "lend", fail_once)
        await Watcher({1: Inbox(path=inbox, settle_seconds=0)}, reader, NEVER, found.metrics).run(
            found.admit, once=True
        )
    assert found.paths == [b"a.jpg"]


async def test_a_file_that_never_settles_does_not_keep_those_out_that_had_no_room(
    inbox: Path, ledger: Ledger, unsettled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_whole, growing = Settling.is_whole, set[bytes]()

    def is_whole_but_one(
        settling: Settling, file: File, patience: Patience, now: float, clock: float, **how: bool
    ) -> bool:
        growing.update([file.path] if not growing else [])
        return is_whole(
            settling, file, Patience(NEVER, False) if file.path in growing else patience, now, clock, **how
        )

    monkeypatch.setattr(Settling, "is_whole", is_whole_but_one)
    found = Found(inbox, ledger)
    for name in unsettled:
        found.write(name)
    with contextlib.closing(Reader(ledger.path)) as reader:
        watcher = Watcher({1: Inbox(path=inbox)}, reader, NEVER, found.metrics)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(functools.partial(watcher.run, found.admit, once=True))
            await until(lambda: len(found.paths) == len(unsettled) - 1)
            tasks.cancel_scope.cancel()
    assert growing.isdisjoint(found.paths)


def test_run_once_ends_no_sooner_than_all_that_had_no_room_is_done(
    tmp_path: Path, unsettled: list[str]
) -> None:
    place = Place(tmp_path, {"inbox": [{"watch": "poll"}]})
    place.drop_many(range(len(unsettled)))
    service = Service(parse(place.settings, place.folder), once=True)
    anyio.run(service.run, backend_options={"use_uvloop": True})
    place.assert_kept(DONE=len(unsettled))


async def test_a_folder_that_appears_while_another_is_scanned_is_not_missed(
    watch: Watch, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watch(settle_seconds=0) as found:
        admit = found.ledger.admit

        async def admit_slowly(files: list[File]) -> Admitted:
            if files[0].path == b"a/1.jpg":
                found.write("b/2.jpg")
                found.write("marker.jpg")  # the events of b come before it
                while b"marker.jpg" not in found.paths:
                    await found.news()
            return await admit(files)

        monkeypatch.setattr(found.ledger, "admit", admit_slowly)
        (outside / "a").mkdir()
        (outside / "a" / "1.jpg").write_bytes(b"data")
        (outside / "a").rename(found.inbox / "a")
        await found.until(["a/1.jpg", "b/2.jpg", "marker.jpg"])


async def test_an_inbox_that_does_not_answer_delays_no_other_and_is_reported(
    tmp_path: Path, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / "dead"
    dead.mkdir()
    mount_fixed = threading.Event()
    scan = os.scandir

    def hang(path: bytes) -> Any:
        if path == os.path.join(os.fsencode(dead), b""):
            mount_fixed.wait(PATIENCE)
        return scan(path)

    monkeypatch.setattr(os, "scandir", hang)
    monkeypatch.setattr("daemon.inbox.disk.FolderOrigin.answer_seconds", (ANSWER_SECONDS, 0.2))
    async with contextlib.AsyncExitStack() as stack:
        ledger = Ledger(tmp_path / "ledger.sqlite")
        stack.callback(ledger.close)
        assert await ledger.register([(dead, 0), (inbox, 0)], MODELS) == [1, 2]
        reader = stack.enter_context(contextlib.closing(Reader(ledger.path)))
        found = Found(inbox, ledger)
        folders = {
            number: Inbox(path=path, settle_seconds=0, watch="poll")
            for number, path in ((1, dead), (2, inbox))
        }
        watcher = Watcher(folders, reader, 0.05, found.metrics)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(mount_fixed.set)
        tasks.start_soon(watcher.run, found.admit)
        for name in ("a.jpg", "b.jpg", "c.jpg"):  # one scan after another
            found.write(name)
            await found.until(os.listdir(inbox))
        with anyio.fail_after(PATIENCE):
            expected = f"inbox {dead} has not answered for "
            while not any(line.startswith(expected) for line in watcher.held_back()):  # noqa: ASYNC110 - time itself is waited for
                await anyio.sleep(GLANCE)
        tasks.cancel_scope.cancel()


async def test_an_inbox_is_not_given_up_when_the_whole_machine_stood_still(
    inbox: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the time to answer is over at one check, and the answer is there at the next."""
    silence, looked_again = iter([3.0, 0.0]), threading.Event()

    def silent_seconds(_folder: Folder) -> float:
        if (seconds := next(silence, None)) is None:
            looked_again.set()
        return seconds or 0.0

    monkeypatch.setattr(Folder, "silent_seconds", silent_seconds)
    monkeypatch.setattr("daemon.inbox.disk.is_network_mount", lambda _: not looked_again.wait(PATIENCE))
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.01)
    found = Found(inbox, ledger)
    found.write("a.jpg")
    with contextlib.closing(Reader(ledger.path)) as reader:
        watcher = Watcher({1: Inbox(path=inbox, settle_seconds=0)}, reader, NEVER, found.metrics)
        await watcher.run(found.admit, once=True)
    assert found.paths == [b"a.jpg"]
    assert watcher.held_back() == []


async def test_polling_finds_all_that_events_would_have_found(watch: Watch, outside: Path) -> None:
    async with watch(rescan_seconds=0.1, watch="poll") as found:
        found.write("a.jpg")
        (outside / "b.jpg").write_bytes(b"data")
        (outside / "b.jpg").rename(found.inbox / "b.jpg")
        found.write("sub/c.jpg")
        await found.until(["a.jpg", "b.jpg", "sub/c.jpg"])
        found.write("a.jpg", b"newer data")
        await found.until(["a.jpg", "a.jpg", "b.jpg", "sub/c.jpg"])


async def test_a_version_replaced_while_it_waits_in_the_queue_is_gone_and_the_new_one_pending(
    watch: Watch,
) -> None:
    async with watch() as found:
        found.write("a.jpg")
        await found.until(["a.jpg"])
        found.write("a.jpg", b"newer data")
        await found.until(["a.jpg", "a.jpg"])
    with contextlib.closing(Reader(found.ledger.path)) as reader:
        assert reader.counts()[JobStatus.GONE] == 1
        assert reader.counts()[JobStatus.PENDING] == 2  # with "first"
        [newest] = reader.find("a.jpg")
    assert (newest.status, newest.version.size) == (JobStatus.PENDING, 10)


async def test_a_scan_that_saw_a_file_just_before_the_daemon_moved_it_does_not_take_it_up_again(
    ledger: Ledger,
) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await ledger.end([done(job)])
    moved = VERSION._replace(ctime_ns=VERSION.ctime_ns + 1)  # as a rename does
    await ledger.mark_emitted([Placed(job.id, b"/done/a.jpg", moved)])
    assert await ledger.admit([make_file(b"a.jpg")]) == Admitted(0, 0, 0)
    moved_back = make_file(b"a.jpg", ctime_ns=VERSION.ctime_ns + 2)
    assert await ledger.admit([moved_back]) == Admitted(1, 0, 0)


def test_an_outage_of_an_inbox_is_in_the_log_once_and_so_is_its_end(inbox: Path) -> None:
    folder = open_folder(1, Inbox(path=inbox))
    with capture_logs() as logs:
        for error in (OSError(errno.EIO, "broken"), OSError(errno.EIO, "broken"), None, None):
            folder.note_answer(error)
    assert [entry["event"] for entry in logs] == [
        "inbox cannot be read; it is tried again at every scan",
        "inbox can be read again",
    ]


def test_an_inbox_stays_away_while_the_ledger_cannot_be_asked_what_is_in_it(inbox: Path) -> None:
    folder = open_folder(1, Inbox(path=inbox))
    reader: Any = SimpleNamespace(files_of=lambda _: [])
    assert why_unavailable(folder, reader) is None
    inbox.rename(inbox.with_name("elsewhere"))

    def refuse(_: int) -> list[Expected]:
        raise LedgerUnusable("the disk does not answer")

    reader.files_of = refuse
    assert "is gone" in str(why_unavailable(folder, reader))


async def test_an_inbox_that_vanishes_and_returns_is_watched_again(watch: Watch, outside: Path) -> None:
    """Like a mount that is lost for a while."""
    async with watch(rescan_seconds=0.1) as found:
        found.inbox.rename(outside / "gone")
        found.inbox.mkdir()
        found.inbox.rmdir()
        (outside / "gone").rename(found.inbox)
        (outside / "a.jpg").touch()
        (outside / "a.jpg").rename(found.inbox / "a.jpg")  # whole at every moment of a scan
        await found.until(["a.jpg"])


def test_without_watches_left_the_watcher_polls_warns_once_and_finds_all(tmp_path: Path) -> None:
    """The limit is that of a separate user namespace."""
    limited = ["unshare", "-Ur", "sh", "-c", 'echo 1 > /proc/sys/user/max_inotify_watches && exec "$@"', "sh"]
    if subprocess.run([*limited, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace with a limit of its own may be made here")
    place = Place(tmp_path, {"pipeline": {"rescan_seconds": 0.2}})
    with Daemon(place, prefix=limited) as daemon:
        for number in range(6):
            place.drop(f"folder-{number % 3}/{number}.ppm", picture(number))
        daemon.wait_idle(6)
        (line,) = [line for line in daemon.log_text().splitlines() if "inotify's limits are used up" in line]
    assert "fs.inotify.max_user_watches" in line
    place.assert_kept(DONE=6)


class OrderedOrigin(FolderOrigin):
    """A folder that is listed like a store: in the order of the paths, from where a listing was stopped."""

    is_ordered = True
    breaks_at = b"~"  # the listing fails at this path

    def __init__(self, root: bytes) -> None:
        super().__init__(root)
        self.began: list[bytes] = []  # where each listing went on

    def files(self, walk: Walk, subtree: bytes = b"") -> Iterator[Listed | None]:
        self.began.append(walk.after)
        for entry in sorted(filter(None, super().files(walk, subtree))):
            if entry[0] >= self.breaks_at:
                walk.answer(OSError(errno.EIO, "broken"))
                return
            if entry[0] > walk.after:
                yield entry


async def test_how_far_an_ordered_listing_came_is_in_the_ledger_until_one_reaches_the_end(
    inbox: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = OrderedOrigin(os.fsencode(inbox))
    monkeypatch.setattr("daemon.inbox.folder.origin_of", lambda root: origin)
    folder = {1: Inbox(path=inbox, settle_seconds=0, watch="poll")}
    with contextlib.closing(Reader(ledger.path)) as reader, anyio.fail_after(PATIENCE):
        kept = anyio.Event()

        async def keep(number: int, marker: bytes) -> None:
            await ledger.keep_marker(number, marker)
            kept.set()

        async def watch_until(*, once: bool = False) -> list[bytes]:
            """What is found until the marker in the ledger changes."""
            nonlocal kept
            kept, found = anyio.Event(), Found(inbox, ledger)
            async with anyio.create_task_group() as tasks:
                watcher = Watcher(folder, reader, NEVER, found.metrics, keep_marker=keep)
                tasks.start_soon(partial(watcher.run, found.admit, once=once))
                await kept.wait()
                tasks.cancel_scope.cancel()
            return [file.path for file in found.files]

        for name in ("a.jpg", "b.jpg", "c.jpg"):
            (inbox / name).write_bytes(b"data")
        origin.breaks_at = b"c"
        assert await watch_until() == [b"a.jpg", b"b.jpg"]
        assert reader.marker(1) == b"b.jpg"
        origin.breaks_at = b"~"
        assert await watch_until() == [b"c.jpg"]
        assert reader.marker(1) == b""
        await ledger.keep_marker(1, b"b.jpg")
        assert await watch_until(once=True) == []
        assert reader.marker(1) == b""
    assert [after for after, _ in groupby(origin.began)] == [b"", b"b.jpg", b""]


async def test_a_file_that_the_daemon_is_deleting_is_no_other_version(
    watch: Watch, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To delete a file, the daemon renames it. For a moment, its change time is then new and its name still there."""
    file, looks, read = inbox / "first", 0, Folder.read_versions

    def delete_after(folder: Folder, paths: Collection[bytes]) -> list[File]:
        nonlocal looks
        found = read(folder, paths)
        if b"first" in paths:
            looks += 1
            file.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(settle, "TOUCHED_SECONDS", 0.1)
    async with watch(settle_seconds=0) as found:
        monkeypatch.setattr(Folder, "read_versions", delete_after)
        before = file.stat().st_ctime_ns
        while file.stat().st_ctime_ns == before:  # the file system's clock has steps
            file.rename(tmp_path / "aside").rename(file)
        await until(lambda: looks > 1 or len(found.files) > 1)
        assert [file.path for file in found.files] == [b"first"]
