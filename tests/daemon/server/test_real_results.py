"""The page in a real browser, over what a running daemon has found on images with the mini pack: pictures, boxes, both
searches, an image that arrives, and one that failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from playwright.sync_api import FloatRect, Locator, expect
from playwright.sync_api import Page as Tab

from stages.scenes.generator import write_samples
from stages.scenes.truth import TEXT_KINDS, TRUTH, Truth, read_truth
from tests.daemon.server.browser import needs_chromium
from tests.daemon_process import PATIENCE, Daemon, Place, free_port

UNSEEN = 60_017  # a seed that no pack was trained on
COUNT = 7
NEAR = 12  # pixels
LOAD_SECONDS = 3 * PATIENCE  # the models, and all images, on a busy machine

pytestmark = needs_chromium


@dataclass(frozen=True)
class Served:
    """A daemon that has done all images and serves its page."""

    place: Place
    origin: str
    truths: list[Truth]

    @property
    def token(self) -> str:
        return (self.place.folder / "state" / "page.token").read_text().strip()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    place = Place(folder, {"page": {"listen": f"127.0.0.1:{port}"}})
    # The mini pack. The texts of its scenes can be read in smaller pages too, in less time.
    place.settings["stages"] = {"ocr": {"options": {"max_side": 640, "map_side": 320}}}
    place.configure({})
    write_samples(folder / "inbox", COUNT, UNSEEN)
    with Daemon(place, ready=False) as daemon:
        daemon.wait_ready(LOAD_SECONDS)
        daemon.wait_idle(COUNT, LOAD_SECONDS)
        yield Served(place, f"http://127.0.0.1:{port}", read_truth(folder / "inbox" / TRUTH))


@pytest.fixture(scope="module")
def origin(served: Served) -> str:
    return served.origin


def names(tab: Tab) -> list[str]:
    return tab.locator(".card .name a").all_inner_texts()


def find(tab: Tab, by: str, words: str) -> None:
    """Use the search box, and wait until the model that understands sentences is loaded."""
    tab.goto(f"/?by={by}")
    tab.get_by_role("searchbox").fill(words)
    tab.get_by_role("searchbox").press("Enter")
    tab.wait_for_url("**q=**")  # together with the answer
    expect(tab.locator(".card").first).to_be_visible(timeout=1000 * LOAD_SECONDS)


def test_each_card_shows_its_image(tab: Tab, served: Served) -> None:
    tab.goto("/")
    expect(tab.locator(".card")).to_have_count(COUNT)
    for card in tab.locator(".card img").all():
        card.scroll_into_view_if_needed()
        expect(card).to_have_js_property("complete", True)
        assert card.evaluate("it => it.decode().then(() => it.naturalWidth)") > 100
        kind = tab.request.get(f"{served.origin}{card.get_attribute('src')}").headers["content-type"]
        assert kind == "image/webp", "it is the picture that says why there is no other"


def test_boxes_lie_over_the_objects_of_the_picture(tab: Tab, served: Served) -> None:
    truth = max(served.truths, key=lambda truth: len(truth.objects))
    find(tab, "newest", f"name:{truth.file}")
    tab.locator(".card .name a").click()
    tab.get_by_label("Show boxes").check()
    image = tab.locator(".shown img")
    image.evaluate("it => it.decode()")
    picture = box_of(image)
    scale = picture["width"] / truth.width
    drawn = [box_of(shape) for shape in tab.locator(".overlay .object polygon").all()]
    wanted = [(picture["x"] + scale * it.box[0], picture["y"] + scale * it.box[1]) for it in truth.objects]
    met = [any(abs(each["x"] - x) < NEAR and abs(each["y"] - y) < NEAR for each in drawn) for x, y in wanted]
    assert sum(met) > len(met) / 2, f"boxes begin at {drawn}, and objects at {wanted}"


def box_of(shape: Locator) -> FloatRect:
    found = shape.bounding_box()
    assert found
    return found


def test_words_on_an_image_find_it(tab: Tab, served: Served) -> None:
    truth = next(truth for truth in served.truths if truth.kind in TEXT_KINDS and truth.lines)
    word = max(truth.lines[0].text.split(), key=len)
    find(tab, "words", f"text:{word}")
    assert truth.file in names(tab)
    assert len(names(tab)) < COUNT
    expect(tab.locator("#count")).not_to_contain_text("By meaning")


def test_a_sentence_finds_the_image_that_it_describes(tab: Tab, served: Served) -> None:
    truth = next(truth for truth in served.truths if truth.kind == "photo" and truth.objects)
    find(tab, "meaning", truth.captions[0])
    expect(tab.locator(".card .score").first).to_contain_text("near in meaning")
    assert truth.file in names(tab)[:2]
    expect(tab.locator("#count")).to_contain_text("By meaning all images are ranked")
    find(tab, "both", truth.captions[0])
    expect(tab.locator(".card .score").first).to_be_visible(timeout=1000 * LOAD_SECONDS)
    assert truth.file in names(tab)[:2]


def test_an_image_leads_to_those_that_are_like_it(tab: Tab, served: Served) -> None:
    tab.goto("/")
    tab.locator(".card .name a").first.click()
    for heading in ("Why bin", "Time of each stage", "More like this"):
        expect(tab.get_by_role("heading", name=heading)).to_be_visible()
    shown = tab.url
    tab.get_by_role("heading", name="More like this").scroll_into_view_if_needed()
    expect(tab.locator(".cards .card")).to_have_count(COUNT - 1)
    tab.locator(".cards .card .name a").first.click()
    expect(tab.get_by_role("heading", name="More like this")).to_be_visible()
    assert tab.url != shown


def test_what_arrives_and_what_fails_is_seen_without_a_reload(tab: Tab, served: Served) -> None:
    tab.goto("/")
    expect(tab.locator(".live")).to_contain_text(f"{COUNT} done")
    image = served.place.inbox() / served.truths[0].file
    served.place.drop("again.jpg", image.read_bytes())
    tab.locator(".live .fresh").click()
    expect(tab.locator(".card .name").first).to_contain_text("again.jpg")
    served.place.drop("broken.jpg", image.read_bytes()[:200])
    tab.locator(".live").get_by_role("link", name="1 failed").click()
    expect(tab.locator(".card .bad")).to_be_visible()
    tab.get_by_role("link", name="Log in").first.click()
    tab.get_by_label("Token").fill(served.token)
    tab.get_by_role("button", name="Log in").click()
    tab.goto("/?state=failed")
    tab.get_by_role("button", name="Retry all failed images").click()
    expect(tab.locator("#results")).to_contain_text("1 queued again.")
    # Only now: the daemon sees the new file by itself, and then no failed image and no button is left.
    (served.place.folder / "inbox" / "broken.jpg").write_bytes(image.read_bytes())
    expect(tab.locator(".live")).to_contain_text(f"{COUNT + 2} done")
    expect(tab.locator(".live")).not_to_contain_text("failed")
