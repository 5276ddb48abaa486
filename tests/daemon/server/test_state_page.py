"""State and settings in a real browser, beside a real daemon. Without Chromium on this machine these tests are skipped."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import closing

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect
from playwright.sync_api import Page as Tab

from tests.daemon.server.browser import needs_chromium
from tests.daemon_process import Daemon, Place, free_port

pytestmark = needs_chromium
PHONE = {"width": 390, "height": 844}
RULES = "wcag2a wcag2aa wcag21a wcag21aa wcag22aa best-practice"


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a daemon with 12 images done, 3 failed, one skipped, and some that wait."""
    port = free_port()
    place = Place(tmp_path_factory.mktemp("state"), {"page": {"listen": f"127.0.0.1:{port}"}})
    device = place.folder / "device"
    slow = {"backend": "fake", "options": {"latency_seconds": 0.001, "device_file": str(device)}}
    place.configure({"upkeep": {"verify_days": 3}, "stages": {"ocr": slow}})
    place.drop_many(range(12))
    for name in ("notes.txt", "one.jpg", "two.jpg"):
        place.drop(name, name.encode())
    place.drop("nothing.png", b"")
    with Daemon(place) as daemon, device.open("a") as held:
        daemon.wait_idle(16)
        fcntl.flock(held, fcntl.LOCK_EX)  # no worker gets the device any more
        place.drop_many(range(20, 150))
        daemon.wait_until(lambda status: status["pending"] == 130 and status["in_flight"], "work that lasts")
        yield f"http://127.0.0.1:{port}"
        daemon.kill()


def test_the_state_says_what_is_done_what_waits_and_where_there_is_room(tab: Tab) -> None:
    tab.goto("/state")
    for name, figure in (("Done", "12"), ("Failed", "3"), ("Skipped", "1")):
        expect(tab.locator(".figures div").filter(has_text=name).locator("dd")).to_have_text(figure)
    hour = tab.get_by_role("region", name="The last hour")
    expect(hour).to_contain_text("15 images since the daemon started")
    assert 1 <= hour.locator("rect").count() <= 60
    expect(tab.get_by_role("region", name="Queues")).to_contain_text("Waiting for ocr")
    expect(tab.get_by_role("region", name="Disks")).to_contain_text("results, failed, state, inbox")
    expect(tab.get_by_role("region", name="Disks")).to_contain_text("iB free")
    expect(tab.get_by_role("region", name="Upkeep")).to_contain_text("verify")
    expect(tab.locator(".log li").filter(has_text="image failed")).to_contain_text("(the last of 3)")


def test_failures_are_grouped_by_reason_and_each_group_is_a_list(tab: Tab) -> None:
    tab.goto("/state")
    rows = tab.get_by_role("region", name="Failures by reason").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("Deliver it again, or remove it.")
    rows.first.get_by_role("link", name="not-an-image").click()
    expect(tab.locator(".card .name")).to_contain_text(["two.jpg", "one.jpg"])
    expect(tab.locator(".card")).to_have_count(2)


def test_the_focus_stays_while_the_figures_change(tab: Tab) -> None:
    tab.goto("/state")
    tab.get_by_role("link", name="empty").focus()
    with tab.expect_response("**/state"):
        pass
    with tab.expect_response("**/state"):
        pass
    expect(tab.get_by_role("link", name="empty")).to_be_focused()


def test_skipped_and_pending_files_are_a_click_away_and_searched_by_name(tab: Tab) -> None:
    tab.goto("/state")
    tab.get_by_role("link", name="1 skipped: show them").click()
    expect(tab.locator(".card")).to_have_count(1)
    expect(tab.locator(".card")).to_contain_text("skipped: not-an-image: the bytes are plain text")
    expect(tab.get_by_label("All that are shown")).to_have_count(0)
    expect(tab.get_by_role("button", name="Results as CSV")).to_have_count(0)
    tab.get_by_label("State").select_option("pending")
    expect(tab.locator(".card")).to_have_count(48)
    tab.get_by_role("searchbox").fill("00077.ppm")
    tab.keyboard.press("Enter")
    expect(tab.locator(".card .name")).to_have_text(["00077.ppm"])
    tab.get_by_role("searchbox").fill("tag:dog")
    tab.keyboard.press("Enter")
    expect(tab.get_by_text("files that are pending have no result")).to_be_visible()


def test_a_file_that_is_no_image_has_no_size_no_camera_and_no_result_to_download(tab: Tab) -> None:
    tab.goto("/?state=skipped")
    tab.locator(".card .name a").click()
    expect(tab.locator("h1")).to_contain_text("notes.txt")
    expect(tab.get_by_role("row", name="File")).to_contain_text("9 bytes")
    expect(tab.get_by_role("row", name="Size")).to_have_count(0)
    expect(tab.get_by_text("skipped: not-an-image")).to_be_visible()
    tab.get_by_text("Raw JSON").click()
    for name in ("result.json", "Whole picture", "When and with which camera it was made"):
        expect(tab.get_by_text(name)).to_have_count(0)
    expect(tab.get_by_role("link", name="Download")).to_be_visible()


def test_settings_that_differ_come_first_and_the_others_are_folded(tab: Tab) -> None:
    tab.goto("/settings")
    upkeep = tab.get_by_role("region", name="upkeep")
    expect(upkeep).to_contain_text("verify_days")
    expect(upkeep).to_contain_text("3.0 default: 7.0")
    expect(upkeep).not_to_contain_text("backup_folder")
    expect(tab.get_by_text("backup_folder")).not_to_be_visible()
    tab.locator("summary").click()
    expect(tab.get_by_text("backup_folder")).to_be_visible()


def test_state_and_settings_fit_a_phone_and_shut_nobody_out(browser: Browser, origin: str) -> None:
    with closing(browser.new_context(base_url=origin, viewport=PHONE)) as context:  # type: ignore[arg-type]
        tab = context.new_page()
        for path in ("/state", "/settings", "/?state=skipped", "/no-such-page"):
            tab.goto(path)
            if path == "/settings":
                tab.locator("summary").click()
            for scheme in ("light", "dark"):
                tab.emulate_media(color_scheme=scheme)
                assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
                found = Axe().run(tab, options={"runOnly": RULES.split(), "resultTypes": ["violations"]})
                assert found.violations_count == 0, f"{path}, {scheme}: {found.generate_report()}"


def test_without_scripts_the_state_is_whole(browser: Browser, origin: str) -> None:
    with closing(browser.new_context(base_url=origin, java_script_enabled=False)) as context:
        tab = context.new_page()
        tab.goto("/state")
        expect(tab.get_by_role("region", name="Failures by reason")).to_be_visible()
        tab.get_by_role("link", name="1 skipped: show them").click()
        expect(tab.locator(".card")).to_have_count(1)
