"""What can be done with many images at once."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from playwright.sync_api import Browser, expect
from playwright.sync_api import Page as Tab
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message

from daemon.config.loading import parse
from daemon.core.jobs import Version
from daemon.ledger.record import Record
from daemon.server.page import ticked
from daemon.server.page.rendering import Renderer
from daemon.server.page.ticked import (
    LATE_SECONDS,
    LEAST_BYTES_PER_SECOND,
    MISSING,
    MOST_ARCHIVES,
    Originals,
    PacedSend,
    TakenTooSlowly,
    pack,
)
from tests.daemon.server.browser import needs_chromium, opened
from tests.daemon.server.site import Site
from tests.daemon.server.test_exif import encode
from tests.daemon_process import PATIENCE, Daemon, Place, free_port, wait_for
from tests.makers import make_record

STATE = {"has_token": True}


def unpack(*records: Record, absent: Sequence[int] = ()) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(b"".join(pack(records, absent)))) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_archive_has_the_files_as_they_are_below_the_names_of_their_inbox(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    record = make_record(tmp_path, "a/grüße 1.jpg".encode(), data)
    assert unpack(record) == {"a/grüße 1.jpg": data}
    [entry] = zipfile.ZipFile(io.BytesIO(b"".join(pack([record])))).infolist()
    assert abs(entry.date_time[0] - 2026) < 50
    assert entry.external_attr >> 16 == 0o644


def test_one_file_at_a_time_is_in_memory(tmp_path: Path) -> None:
    records = [make_record(tmp_path, b"%d.jpg" % number, bytes(16 << 20)) for number in range(3)]
    tracemalloc.start()
    try:
        assert sum(map(len, pack(records))) > 48 << 20
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_equal_names_of_two_inboxes_are_kept_apart(tmp_path: Path) -> None:
    one = make_record(tmp_path / "one", b"b/a.jpg", b"1", id=1)
    two = make_record(tmp_path / "two", b"b/A.JPG", b"2", id=2)
    three = make_record(tmp_path / "three", b"2 b A.JPG", b"3", id=3)
    assert unpack(one, three, two) == {"b/a.jpg": b"1", "2 b A.JPG": b"3", "2 2 b A.JPG": b"2"}


def test_no_name_leads_out_of_the_folder_or_is_refused_by_a_file_system(tmp_path: Path) -> None:
    for key in (b"../../etc/passwd", b"/a//b/.", b"c\\..\\d:e.jpg", b"line\nend\xff.jpg"):
        record = replace(make_record(tmp_path, b"a.jpg", b"1"), path=key)
        [name] = unpack(record)
        assert not {"", ".", ".."} & set(name.split("/"))
        assert not set(name) & set('\\:*?"<>|\n')


def test_names_that_windows_refuses_are_changed_and_others_are_not(tmp_path: Path) -> None:
    expected = {
        "CON": "_CON",
        "aux.txt": "_aux.txt",
        "Nul .a.b": "_Nul .a.b",
        "com1/lpt9.jpg": "_com1/_lpt9.jpg",
        "a. /b..jpg. .": "a__/b..jpg___",
        "conan.jpg": "conan.jpg",
        "aux2/com10.jpg": "aux2/com10.jpg",
        ".hidden": ".hidden",
    }
    source = make_record(tmp_path, b"a.jpg", b"1")
    records = [replace(source, id=number, path=key.encode()) for number, key in enumerate(expected)]
    assert list(unpack(*records)) == list(expected.values())


def test_a_file_and_a_folder_of_one_name_are_kept_apart_whichever_comes_first(tmp_path: Path) -> None:
    source = make_record(tmp_path, b"a.jpg", b"1")
    file, inside, deep = (
        replace(source, id=number, path=path) for number, path in enumerate((b"d", b"D/e/f", b"d/e"))
    )
    assert list(unpack(file, inside, deep)) == ["d", "1 D e f", "2 d e"]
    assert list(unpack(inside, deep, file)) == ["D/e/f", "2 d e", "0 d"]


class Reader:
    """Somebody who asks for an archive. seconds: that each part takes to be taken, by the clock; None: nothing is taken."""

    def __init__(self, seconds: float | None = 0.0) -> None:
        self.messages: list[Message] = []
        self.now = 0.0
        self.has_begun = anyio.Event()
        self._seconds = seconds

    async def take(self, message: Message) -> None:
        self.messages.append(message)
        self.has_begun.set()
        if self._seconds is None:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        self.now += self._seconds or 0.0

    async def ask(self, answer: Originals, method: str = "GET") -> None:
        scope = {"type": "http", "method": method, "path": "/images/originals.zip"}
        await answer(scope, self.stay, self.take)

    async def stay(self) -> Message:
        await anyio.sleep_forever()
        return {}


@pytest.mark.anyio
async def test_while_two_archives_are_sent_another_one_is_refused_with_a_sentence(tmp_path: Path) -> None:
    limiter = anyio.CapacityLimiter(MOST_ARCHIVES)
    records = [make_record(tmp_path, b"a.jpg", b"1")]
    async with anyio.create_task_group() as tasks:
        for reader in [Reader(None) for _ in range(MOST_ARCHIVES)]:
            tasks.start_soon(reader.ask, Originals(records, limiter))
            await reader.has_begun.wait()
        with pytest.raises(HTTPException, match="2 downloads of files are being sent already") as refused:
            await Reader().ask(Originals(records, limiter))
        tasks.cancel_scope.cancel()
    request = Request({"type": "http", "path": "/", "headers": [], "query_string": b"", "state": STATE})
    answer = await Renderer(parse({}, tmp_path)).explain(request, refused.value)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    await (again := Reader()).ask(Originals(records, limiter))
    assert again.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.anyio
async def test_a_reader_that_takes_nothing_does_not_keep_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticked, "LATE_SECONDS", 0.05)
    limiter = anyio.CapacityLimiter(MOST_ARCHIVES)
    with anyio.fail_after(PATIENCE):
        await Reader(None).ask(Originals([make_record(tmp_path, b"a.jpg", b"1")], limiter))
    assert limiter.borrowed_tokens == 0


@pytest.mark.anyio
async def test_a_reader_may_take_any_time_if_it_takes_enough_in_it() -> None:
    part: Message = {"type": "http.response.body", "body": bytes(10 * LEAST_BYTES_PER_SECOND)}
    steady, slow = Reader(10.0), Reader(20.0)
    for reader in (steady, slow):
        patience = PacedSend(reader.take, lambda reader=reader: reader.now)  # type: ignore[misc]
        with contextlib.suppress(TakenTooSlowly):
            while len(reader.messages) < 1000:
                await patience.send(part)
    assert len(steady.messages) == 1000
    assert len(slow.messages) == 1 + LATE_SECONDS / 10, "it falls behind by ten seconds with each part"


@pytest.mark.anyio
async def test_to_ask_only_for_the_head_of_an_archive_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, read = [make_record(tmp_path, b"a.jpg", b"1")], list[Record]()
    monkeypatch.setattr(ticked, "read_source", lambda record: read.append(record) or b"1")
    for method, expected in (("HEAD", []), ("GET", records)):
        await (reader := Reader()).ask(Originals(records, anyio.CapacityLimiter(1)), method)
        assert dict(reader.messages[0]["headers"])[b"content-type"] == b"application/zip"
        assert read == expected


def test_files_that_are_gone_or_have_changed_and_numbers_of_no_image_are_listed_in_the_archive(
    tmp_path: Path,
) -> None:
    gone, changed = make_record(tmp_path, b"gone.jpg", b"1"), make_record(tmp_path, b"changed.jpg", b"1")
    here = make_record(tmp_path, b"here.jpg", b"1")
    (tmp_path / "gone.jpg").unlink()
    (tmp_path / "changed.jpg").write_bytes(b"22")
    listed = "There is no image 9999.\ngone.jpg: the file is no longer there\nchanged.jpg: the file has changed since\n"
    assert unpack(gone, changed, here, absent=[9999]) == {MISSING: listed.encode(), "here.jpg": b"1"}


@pytest.mark.parametrize("seconds", [-1e9, 0, 9e9])
def test_a_time_that_a_zip_file_cannot_have_becomes_the_nearest_one(tmp_path: Path, seconds: float) -> None:
    record = make_record(tmp_path, b"a.jpg", b"1")
    os.utime(tmp_path / "a.jpg", (seconds, seconds))
    assert unpack(replace(record, version=Version.of(os.stat(tmp_path / "a.jpg")))) == {"a.jpg": b"1"}


def test_ticked_images_are_processed_again_whatever_their_state_and_the_list_stays(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        site.place.add("done.jpg", "ticked")
        site.place.add("ticked.jpg")
        site.place.add("other.jpg", "other")
        form = "id=1&id=2"
        assert site.ask("/images/again?q=ticked", "POST", form, Origin=site.origin)[0] == 401
        wait_for(lambda: "Tick ticked.jpg" in site.read("/?q=ticked"), "the index")
        assert "Process again" not in site.read("/?q=ticked")
        cookie = site.log_in()
        assert "Process again" in site.read("/?q=ticked", Cookie=cookie)
        _, _, headers = site.ask("/images/again?q=ticked", "POST", form, Cookie=cookie, Origin=site.origin)
        assert headers["location"] == "/?q=ticked&queued=2"
        _, _, headers = site.ask("/images/again", "POST", "all=1&id=3", Cookie=cookie, Origin=site.origin)
        assert headers["location"] == "/?queued=0", "none has failed"
        assert site.ask("/images/again?cursor=x", "POST", "id=3", Cookie=cookie, Origin=site.origin)[0] == 503
        _, _, headers = site.ask("/images/again", "POST", "id=3", Cookie=cookie, Origin=site.origin)
        assert headers["location"] == "/?queued=1", "a refused request changes nothing"


def test_a_download_without_a_tick_or_with_too_many_is_explained(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        for ticks in (0, 501):
            query = "&".join(f"id={number + 1}" for number in range(ticks))
            status, content, _ = site.ask(f"/images/originals.zip?{query}")
            assert status == 400
            assert f"Tick 1 to 500 images to download them; {ticks} are ticked." in content
        site.place.add("done.jpg", "word")
        assert site.ask("/images/results.exe?id=1")[0] == 404
        assert 'data-most="500"' in site.read("/")
        assert "500" not in site.read("/static/page.js")
        assert site.ask(f"/images/results.csv?{501 * 'id=1&'}")[0] == 200, "a file is sent once"


def test_numbers_that_no_image_has_are_refused_unless_another_one_has_a_result(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        site.place.add("done.jpg", "word")
        site.place.add("failed.jpg")
        for name in ("originals.zip", "results.csv"):
            assert "There is no image 9999." in (answer := site.ask(f"/images/{name}?id=9999"))[1]
            assert answer[0] == 404
            assert "is none" in (answer := site.ask(f"/images/{name}?id=1&id=abc"))[1]
            assert answer[0] == 400
        assert site.ask("/images/results.csv?id=2")[0] == 409, "it has no result"
        assert site.ask("/images/results.csv?id=1&id=2&id=9999")[0] == 200


def test_an_archive_that_would_have_no_file_is_refused_with_the_reason_of_the_first(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        for name in ("gone.jpg", "also.jpg"):
            site.place.add(name, "word")
        for _ in range(MOST_ARCHIVES + 1):  # and keeps no place
            status, content, _ = site.ask("/images/originals.zip?id=1&id=2")
            assert status == 404
            assert "None of these images has a file to download. gone.jpg: the file is no longer" in content


def test_a_parameter_that_a_download_does_not_have_is_named(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        for name in ("originals.zip", "results.csv", "results.jsonl"):
            status, content, _ = site.ask(f"/images/{name}?ids=1")
            assert status == 400
            assert "has no parameter ids: those that it takes are id." in content


@needs_chromium
def test_enter_on_a_box_does_not_retry_all_that_failed_even_without_scripts(
    browser: Browser, tmp_path: Path
) -> None:
    with closing(Site(tmp_path)) as site:
        for name in ("one.jpg", "two.jpg"):
            site.place.add(name)
        wait_for(lambda: "Tick one.jpg" in site.read("/?state=failed"), "the index")
        assert "Retry" not in site.read("/?state=failed")
        cookie = site.log_in()
        context = browser.new_context(java_script_enabled=False, extra_http_headers={"cookie": cookie})
        with closing(context):
            tab = context.new_page()
            tab.goto(f"{site.origin}/?state=failed")
            tab.get_by_label("Tick one.jpg").check()
            tab.get_by_label("Tick one.jpg").press("Enter")
            expect(tab.get_by_text("1 queued again.")).to_be_visible()


@needs_chromium
def test_files_and_results_of_all_that_are_shown_are_downloaded(browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{port}"}})
    place.configure({})
    pictures = {f"{name}.jpg": encode("JPEG") for name in ("a", "b/c")}
    for name, data in pictures.items():
        place.drop(name, data)
    place.drop("page.jpg", b"no picture")

    def take(tab: Tab, button: str) -> bytes:
        with tab.expect_download() as download:
            tab.get_by_role("button", name=button).click()
        return Path(download.value.path()).read_bytes()

    with Daemon(place) as daemon, opened(browser, f"http://127.0.0.1:{port}") as tab:
        daemon.wait_idle(3)
        wait_for(lambda: tab.goto("/?state=done") and tab.locator(".card").count() == 2, "both in the index")
        expect(tab.get_by_role("button", name="Download the files")).not_to_be_visible()
        tab.get_by_label("All that are shown").check()
        expect(tab.get_by_text("2 ticked:")).to_be_visible()
        with zipfile.ZipFile(io.BytesIO(take(tab, "Download the files"))) as archive:
            assert {name: archive.read(name) for name in archive.namelist()} == pictures
        rows = list(csv.DictReader(io.StringIO(take(tab, "Results as CSV").decode("utf-8-sig"))))
        assert sorted(row["path"] for row in rows) == sorted(pictures)
        tab.get_by_label("Tick a.jpg").uncheck()
        expect(tab.get_by_label("All that are shown")).not_to_be_checked()
        [line] = take(tab, "Results as JSON").splitlines()
        assert json.loads(line)["source"]["path"] == "b/c.jpg"
