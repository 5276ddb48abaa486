"""The page of one image, in a real browser and without one. The browser's tests are skipped without Chromium."""

from __future__ import annotations

import hashlib
import html
import io
import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image
from playwright.sync_api import Browser, expect
from playwright.sync_api import Page as Tab
from starlette.requests import Request

from daemon.config.loading import parse
from daemon.ledger.record import Record
from daemon.search.searcher import UNCUT, Found, Hit
from daemon.server.page.images import Images
from daemon.server.page.rendering import Renderer
from daemon.server.page.views import compare_looks, milliseconds
from tests.daemon.server.browser import needs_chromium, opened
from tests.daemon.server.site import Site
from tests.daemon.server.test_exif import encode
from tests.daemon_process import Daemon, Place, free_port, wait_for
from tests.makers import make_record

WIDE = "document.getElementById('zoom').scrollWidth / document.getElementById('zoom').clientWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with closing(Site(tmp_path_factory.mktemp("site"))) as opened:
        for number in range(1, 10):
            opened.place.add(
                f"{number}.jpg", f"number{number} {'odd' if number % 2 else 'even'}\nsecond line"
            )
        wait_for(lambda: "number9" in opened.read("/?q=number9&by=words"), "all images in the index")
        yield opened


@pytest.fixture(scope="module")
def origin(site: Site) -> str:
    return site.origin


def beside(content: str) -> list[str]:
    """Where the links to the images before and after lead; "" if there is none."""
    links = dict(re.findall(r'<a id="(before|after)" href="([^"]+)"', content))
    return [html.unescape(links.get(name, "")) for name in ("before", "after")]


def test_an_image_leads_to_those_beside_it_in_the_list_from_which_somebody_comes(site: Site) -> None:
    assert beside(site.read("/images/5")) == ["/images/6", "/images/4"]
    assert beside(site.read("/images/9")) == ["", "/images/8"]
    assert beside(site.read("/images/1")) == ["/images/2", ""]
    came = f"{site.origin}/?q=odd&by=newest&cursor=99"
    assert beside(site.read("/images/5", Referer=came)) == [
        "/images/7?q=odd&by=newest",
        "/images/3?q=odd&by=newest",
    ]
    assert beside(site.read("/images/7?q=odd&by=newest", Referer=f"{site.origin}/images/5")) == [
        "/images/9?q=odd&by=newest",
        "/images/5?q=odd&by=newest",
    ]
    assert 'href="/?q=odd&amp;by=newest"' in site.read("/images/5", Referer=came)


def test_a_list_that_cannot_be_understood_is_that_of_all_images(site: Site) -> None:
    for address in ("?q=foo:bar", "?cursor=x", "?after=never", "?unknown=1"):
        assert beside(site.read(f"/images/5{address}")) == ["/images/6", "/images/4"]
    assert beside(site.read("/images/5", Referer="http://[")) == ["/images/6", "/images/4"]


def test_the_best_first_are_beside_each_other_as_in_the_gallery(site: Site) -> None:
    listed = re.findall(r'<h2 class="name"><a href="/images/(\d+)', site.read("/?q=odd&by=words"))
    assert len(listed) == 5
    for place, number in enumerate(listed):
        around = ["", *listed, ""][place], ["", *listed, ""][place + 2]
        found = beside(site.read(f"/images/{number}?q=odd&by=words"))
        assert found == [each and f"/images/{each}?q=odd&by=words" for each in around]
    assert beside(site.read("/images/2?q=odd&by=words")) == ["", ""], "it is not in this list"


def test_criteria_are_sentences_and_times_are_rounded(site: Site) -> None:
    content = site.read("/images/5")
    assert "text boxes 3, more than 2 needed" in content
    assert "<td>250</td>" in content, "milliseconds"
    assert (
        '<span title="clip-small@0123456789ab, fingerprint clip-1">clip-small@0123456789ab</span>' in content
    )
    assert [milliseconds(seconds) for seconds in (0.0004, 0.0126, 1.5)] == ["under 1", "13", "1,500"]


def test_a_second_look_stands_beside_the_first_answer_of_its_stage() -> None:
    looks: dict[str, Any] = {
        "detailed": {"stage": "blip", "model": "m", "result": {"text": "two cats", "similarity": 0.3}},
        "large": {"stage": "yolo", "model": "m", "result": None, "reason": "killed", "detail": "no memory"},
    }
    first = {
        "caption": {"text": "cats", "similarity": 0.2},
        "objects": {"detections": [{"label": "cat"}] * 2},
    }
    caption, objects = compare_looks(first | {"second_looks": looks})
    assert (caption.first, caption.second, caption.problem) == ("cats", "two cats", "")
    assert (objects.first, objects.problem) == ("2 × cat", "killed: no memory")


def test_the_original_of_a_file_that_is_gone_is_explained(site: Site) -> None:
    status, content, _ = site.ask("/images/5/original")
    assert (status, content) == (404, "There is no original: the file is no longer there.\n")


def ask(query: str = "", **parts: Any) -> Request:
    shared = {"type": "http", "method": "GET", "path": "/", "server": ("a", 1), "scheme": "http"}
    headers = [(b"hx-request", b"true")]
    state = {"has_token": True}
    return Request({**shared, "headers": headers, "query_string": query.encode(), "state": state, **parts})


async def read_cards(folder: Path, query: str, found: Found) -> str:
    """What the gallery shows of an answer of the search."""
    searcher = SimpleNamespace(
        catch_up=lambda: 0,
        best=lambda *_, **__: found,
        behind=lambda: 0,
        index=SimpleNamespace(about=lambda: SimpleNamespace(place=1)),
    )
    records = [make_record(folder, b"a.jpg", id=hit.image) for hit in found.hits]
    reader, config = SimpleNamespace(find_numbers=lambda numbers: records), parse({}, folder)
    images = Images(config, cast(Any, reader), cast(Any, searcher), cast(Any, None), Renderer(config))
    return bytes((await images.gallery(ask(query))).body).decode()


@pytest.mark.anyio
async def test_while_the_model_of_the_search_is_loaded_the_same_part_of_the_list_is_asked_for_again(
    tmp_path: Path,
) -> None:
    content = await read_cards(tmp_path, "q=cars&cursor=48", Found(is_warming=True, problem="wait"))
    assert 'hx-get="/?q=cars&amp;cursor=48"' in content


@pytest.mark.anyio
@pytest.mark.parametrize("is_uncut", [True, False])
async def test_a_search_that_ranks_all_images_says_so(is_uncut: bool, tmp_path: Path) -> None:
    content = await read_cards(tmp_path, "q=cars", Found([Hit(1, 1, 0.9)], is_uncut=is_uncut))
    assert "1 image, best first" in content
    assert (UNCUT in content) == is_uncut


@pytest.mark.anyio
async def test_files_with_the_same_bytes_come_before_images_that_are_alike(tmp_path: Path) -> None:
    def make(number: int, data: bytes) -> Record:
        return make_record(tmp_path, b"%d.jpg" % number, id=number, digest=hashlib.sha256(data).digest())

    records = {1: make(1, b"one"), 2: make(2, b"two"), 3: make(3, b"one")}
    found = Found([Hit(1, 2, 0.9), Hit(2, 3, 1.0)])
    reader = SimpleNamespace(find_numbers=lambda numbers: [records[each] for each in numbers])
    searcher = SimpleNamespace(catch_up=lambda: 0, like=lambda number: found)
    config = parse({"inbox": [{"path": "/srv/inbox"}]}, tmp_path)
    images = Images(config, cast(Any, reader), cast(Any, searcher), cast(Any, None), Renderer(config))
    content = bytes((await images.like(ask(path_params={"id": 1}))).body).decode()
    marks = ["Another file has the same bytes:", "/images/3", "Alike:", "/images/2"]
    assert sorted(marks, key=content.index) == marks


@needs_chromium
def test_arrow_keys_lead_through_a_search_and_back_to_it(tab: Tab) -> None:
    tab.goto("/?q=even&by=newest")
    tab.get_by_role("link", name="6.jpg").first.click()
    expect(tab.locator("h1")).to_contain_text("6.jpg")
    tab.wait_for_load_state()  # with the scripts
    tab.keyboard.press("ArrowRight")
    expect(tab.locator("h1")).to_contain_text("4.jpg")
    tab.wait_for_load_state()  # a key before the scripts are there is lost
    tab.keyboard.press("ArrowLeft")
    expect(tab.locator("h1")).to_contain_text("6.jpg")
    tab.get_by_role("link", name="Back to “even”").click()
    expect(tab.locator(".card")).to_have_count(4)
    expect(tab.get_by_role("searchbox")).to_have_value("even")


@needs_chromium
def test_the_text_is_copied_line_by_line(browser: Browser, site: Site) -> None:
    with closing(
        browser.new_context(base_url=site.origin, permissions=["clipboard-read", "clipboard-write"])
    ) as context:
        tab = context.new_page()
        tab.goto("/images/5")
        tab.get_by_role("button", name="Copy text").click()
        expect(tab.get_by_text("Copied.")).to_be_visible()
        assert tab.evaluate("navigator.clipboard.readText()") == "number5 odd\nsecond line"


@needs_chromium
def test_the_picture_grows_with_its_boxes_and_where_one_points(tab: Tab) -> None:
    tab.goto("/images/5")
    tab.keyboard.press("b")
    tab.keyboard.press("+")
    assert tab.evaluate(WIDE) == pytest.approx(1.5, abs=0.02)
    tab.get_by_role("button", name="Whole picture").click()
    assert tab.evaluate(WIDE) == 1
    frame = tab.locator("#zoom")
    box = frame.bounding_box()
    assert box
    frame.dblclick(position={"x": box["width"] * 0.75, "y": box["height"] / 2})
    assert tab.evaluate(WIDE) == pytest.approx(3, abs=0.02)
    left = tab.evaluate("document.getElementById('zoom').scrollLeft")
    assert left == pytest.approx(box["width"] * 0.75 * 2, abs=3), "what one points at stays under the pointer"
    picture, overlay = tab.locator(".shown img").bounding_box(), tab.locator(".shown .overlay").bounding_box()
    assert picture == overlay
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + 200, middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 260, middle)
    tab.mouse.up()
    assert tab.evaluate("document.getElementById('zoom').scrollLeft") == pytest.approx(left - 60, abs=3)


@needs_chromium
def test_a_swipe_leads_to_the_next_image_and_two_fingers_zoom(browser: Browser, site: Site) -> None:
    phone: Any = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
    with closing(browser.new_context(base_url=site.origin, **phone)) as context:
        tab = context.new_page()
        tab.goto("/images/5")
        box = tab.locator("#zoom").bounding_box()
        assert box
        fingers, middle = context.new_cdp_session(tab), box["y"] + box["height"] / 2

        def touch(kind: str, *places: float) -> None:
            points = [{"x": x, "y": middle, "id": number} for number, x in enumerate(places)]
            fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", 150, 250)
        for apart in range(20, 101, 20):
            touch("touchMove", 150 - apart / 2, 250 + apart / 2)
        touch("touchEnd")
        assert tab.evaluate(WIDE) == pytest.approx(2, abs=0.05)
        touch("touchStart", 300)
        touch("touchMove", 100)
        touch("touchEnd")
        expect(tab.locator("h1")).to_contain_text("5.jpg")
        tab.get_by_role("button", name="Whole picture").click()
        touch("touchStart", 300)
        touch("touchMove", 100)
        touch("touchEnd")
        expect(tab.locator("h1")).to_contain_text("4.jpg")


@needs_chromium
def test_the_original_is_shown_or_downloaded_and_a_page_with_scripts_never_shown(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{port}"}})
    place.configure({})
    out = io.BytesIO()
    Image.new("RGB", (3000, 100), "red").save(out, "JPEG")
    place.drop("grüße 1.jpg", out.getvalue())
    place.drop("copy.jpg", out.getvalue())
    place.drop("page.jpg", b"<html><script>document.title = 'run'</script></html>")
    with Daemon(place) as daemon, opened(browser, f"http://127.0.0.1:{port}") as tab:
        daemon.wait_idle(2)
        tab.goto("/")
        tab.get_by_role("link", name="grüße 1.jpg").first.click()
        one = tab.url
        with tab.expect_download() as download:
            tab.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "grüße 1.jpg"
        assert Path(download.value.path()).read_bytes() == out.getvalue()
        tab.keyboard.press("+")
        expect(tab.locator(".shown img")).not_to_have_attribute("src", re.compile("fine$"))
        tab.keyboard.press("+")
        expect(tab.locator(".shown img")).to_have_attribute("src", re.compile("fine$"))
        assert tab.evaluate("document.querySelector('.shown img').naturalWidth") == 3000
        beside = tab.context.new_page()  # where the browser's own styles may meet the content policy
        beside.goto(f"{one}/original")
        assert beside.evaluate("document.images[0].naturalWidth") == 3000
        tab.goto("/?state=failed")
        tab.get_by_role("link", name="page.jpg").first.click()
        answer = tab.request.get(f"{tab.url.partition('?')[0]}/original")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"].startswith("attachment")
        assert "sandbox" in answer.headers["content-security-policy"]


def test_an_image_that_failed_says_why_once(tmp_path: Path) -> None:
    port = free_port()
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{port}"}})
    file = place.drop("a.jpg", b"no picture")

    def read(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            content: str = answer.read().decode()
        return content

    with Daemon(place) as daemon:
        daemon.wait_idle(1)
        content = read("/images/1")
        assert "Failed after 1 attempt. not-an-image: the bytes are plain text" in content
        [picture] = re.findall(r'src="(/pictures/[^"]+)"', content)
        assert ">No picture<" in read(picture)
        file.unlink()
        assert "No picture: the file is no" in read(picture.replace("large", "small"))


@needs_chromium
def test_a_picture_says_when_it_was_made_with_and_without_scripts(browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{port}"}})
    place.configure({})
    place.drop("taken.jpg", encode("JPEG"))
    with Daemon(place) as daemon:
        daemon.wait_idle(1)
        origin = f"http://127.0.0.1:{port}"
        with opened(browser, origin) as tab:
            tab.goto("/images/1")
            expect(tab.get_by_role("row", name="Taken")).to_contain_text("2024-05-01 12:30:59 +02:00")
        with closing(browser.new_context(base_url=origin, java_script_enabled=False)) as context:
            tab = context.new_page()
            tab.goto("/images/1")
            tab.get_by_role("link", name="When and with which camera it was made").click()
            expect(tab.get_by_role("row", name="Camera")).to_contain_text("Canon EOS 5D")
            tab.get_by_role("link", name="Back to the image").click()
            expect(tab.locator("h1")).to_contain_text("taken.jpg")


@needs_chromium
def test_the_page_of_an_image_that_waits_shows_its_result_when_it_is_there(
    browser: Browser, tmp_path: Path
) -> None:
    port = free_port()
    place = Place(tmp_path, {"page": {"listen": f"127.0.0.1:{port}"}})
    with Daemon(place) as daemon, opened(browser, f"http://127.0.0.1:{port}") as tab:
        [worker] = daemon.workers()
        os.kill(worker, signal.SIGSTOP)
        place.drop("late.jpg", encode("JPEG"))
        wait_for(lambda: place.rows("SELECT 1 FROM image"), "the image in the ledger")
        with tab.expect_response("**/images/1/waits") as asked:
            tab.goto("/images/1")
        assert asked.value.headers.get("hx-refresh") is None
        expect(tab.get_by_text("Pending: it waits to be processed.")).to_be_visible()
        os.kill(worker, signal.SIGCONT)
        expect(tab.get_by_role("heading", name="Time of each stage")).to_be_visible()
        expect(tab.get_by_text("Pending:")).to_have_count(0)
