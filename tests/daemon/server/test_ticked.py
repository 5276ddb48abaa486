"""What can be done with many images at once."""

from __future__ import annotations

import csv
import io
import json
import os
import tracemalloc
import zipfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from playwright.sync_api import Page as Tab

from daemon.core.jobs import Version
from daemon.ledger.record import Record
from daemon.server.page.ticked import MISSING, pack
from tests.daemon.server.browser import needs_chromium, opened
from tests.daemon.server.site import Site
from tests.daemon.server.test_exif import encode
from tests.daemon_process import Daemon, Place, free_port, wait_for
from tests.makers import make_record


def unpack(*records: Record) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(b"".join(pack(records)))) as archive:
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


def test_files_that_are_gone_or_have_changed_are_listed_in_the_archive(tmp_path: Path) -> None:
    gone, changed = make_record(tmp_path, b"gone.jpg", b"1"), make_record(tmp_path, b"changed.jpg", b"1")
    (tmp_path / "gone.jpg").unlink()
    (tmp_path / "changed.jpg").write_bytes(b"22")
    listed = "gone.jpg: the file is no longer there\nchanged.jpg: the file has changed since\n"
    assert unpack(gone, changed) == {MISSING: listed.encode()}


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
        assert site.ask("/images/results.exe?id=1")[0] == 404
        assert site.ask(f"/images/results.csv?{501 * 'id=1&'}")[0] == 200, "a file is sent once"


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
