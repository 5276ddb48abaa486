"""The page's main ways in a real browser. Without Chromium on this machine these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect
from playwright.sync_api import Page as Tab

from tests.daemon.search.test_duplicates import at, keep
from tests.daemon.server.browser import needs_chromium, opened
from tests.daemon.server.site import Site
from tests.daemon_process import wait_for

pytestmark = needs_chromium
NARROW = {"width": 360, "height": 740}
DARK = "rgb(22, 24, 27)"  # the ground of a page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with closing(Site(folder)) as opened:
        for number in range(60):
            opened.place.add(f"{number}.jpg", f"word number{number}")
        opened.place.add("bad.jpg")
        yield opened


@pytest.fixture(scope="module")
def origin(site: Site) -> str:
    return site.origin


def test_scrolling_shows_the_rest_and_a_click_one_image(tab: Tab) -> None:
    tab.goto("/")
    expect(tab.locator(".card")).to_have_count(48)
    # Chromium ends the movement to the end too early if the page grows meanwhile, as when the line on top comes.
    wait_for(lambda: tab.keyboard.press("End") or tab.locator(".card").count() > 48, "the rest")
    expect(tab.locator(".card")).to_have_count(61)
    tab.locator(".card .name a").last.click()
    expect(tab.locator("h1")).to_contain_text("0.jpg")
    expect(tab.locator(".lines")).to_contain_text("number0")


def test_the_keyboard_searches_and_shows_boxes(tab: Tab) -> None:
    tab.goto("/")
    tab.keyboard.press("b")
    expect(tab.locator(".card .overlay").first).to_be_visible()
    tab.keyboard.press("/")
    tab.keyboard.type("number7")
    tab.keyboard.press("Enter")
    expect(tab.locator(".card")).to_have_count(1)
    expect(tab.locator(".card .overlay").first).to_be_visible()


def test_the_keys_can_be_turned_off(tab: Tab) -> None:
    tab.goto("/images/1")
    tab.get_by_label("Keys:").uncheck()
    tab.goto("/")
    tab.keyboard.press("b")
    tab.keyboard.press("/")
    expect(tab.get_by_label("Show boxes")).not_to_be_checked()
    expect(tab.get_by_role("searchbox")).not_to_be_focused()


def test_a_filter_narrows_the_search_as_soon_as_it_is_chosen(tab: Tab) -> None:
    tab.goto("/?q=word&by=newest")
    expect(tab.get_by_text("48 images or more, newest first")).to_be_visible()
    tab.get_by_label("State").select_option("failed")
    expect(tab.get_by_text("No image fits.")).to_be_visible()
    expect(tab.locator("#count")).to_be_empty()
    assert tab.url.endswith("/?q=word&by=newest&state=failed")
    tab.go_back()
    expect(tab.get_by_text("48 images or more, newest first")).to_be_visible()
    expect(tab.get_by_label("State")).to_have_value("")


def test_filters_are_folded_until_one_is_set_also_without_a_script(browser: Browser, site: Site) -> None:
    with closing(browser.new_context(base_url=site.origin, java_script_enabled=False)) as context:
        tab = context.new_page()
        tab.goto("/?q=word")
        expect(tab.get_by_label("Bin")).not_to_be_visible()
        tab.get_by_text("Filters and order").first.click()
        tab.get_by_label("State").select_option("done")
        tab.get_by_role("button", name="Search").click()
        expect(tab.get_by_label("State")).to_have_value("done")
        expect(tab.get_by_label("Bin")).to_be_visible()
        expect(tab.get_by_label("Size")).not_to_be_visible()


def test_the_size_of_the_cards_is_kept_and_comes_with_the_page(tab: Tab) -> None:
    tab.goto("/")
    tab.get_by_label("Size").select_option("small")
    small = tab.locator(".card img").first.bounding_box()
    tab.goto("/?q=word")
    expect(tab.get_by_label("Size")).to_have_value("small")
    assert "size-small" in tab.request.get("/", headers={"Cookie": "visiond-size=small"}).text()
    kept = tab.locator(".card img").first.bounding_box()
    tab.get_by_label("Size").select_option("large")
    large = tab.locator(".card img").first.bounding_box()
    assert small
    assert kept
    assert large
    assert small["height"] == kept["height"] < large["height"]


def test_nothing_moves_while_pictures_come_and_those_on_top_are_loaded_at_once(tab: Tab) -> None:
    tab.goto("/")
    assert tab.locator(".card img:not([loading])").count() == 12
    heights = {box["height"] for card in tab.locator(".card img").all() if (box := card.bounding_box())}
    assert len(heights) == 1


def test_on_a_phone_the_pages_are_at_the_foot_and_hide_nothing_at_the_end(
    browser: Browser, site: Site
) -> None:
    with closing(browser.new_context(base_url=site.origin, viewport=NARROW)) as context:  # type: ignore[arg-type]
        tab = context.new_page()
        tab.goto("/settings")
        tab.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        bar, foot = tab.get_by_role("navigation").bounding_box(), tab.locator("footer p").last.bounding_box()
        assert bar
        assert foot
        assert bar["y"] + bar["height"] == NARROW["height"]
        assert foot["y"] + foot["height"] <= bar["y"]


def test_a_tag_and_an_object_narrow_the_search_and_what_is_shown_suggests_them(tab: Tab) -> None:
    tab.goto("/?q=word&by=newest")
    for name in ("Tag", "Object"):
        label = tab.locator(f"#{name.lower()}s option").first.get_attribute("value") or ""
        tab.get_by_label(name).fill(label)
        tab.get_by_label(name).press("Enter")
        expect(tab.get_by_text("48 images or more, newest first")).to_be_visible()
        tab.get_by_label(name).fill("unheard")
        tab.get_by_label(name).press("Tab")
        expect(tab.get_by_text("No image fits.")).to_be_visible()
        tab.get_by_label(name).fill("")
        tab.get_by_label(name).press("Tab")
        expect(tab.get_by_text("48 images or more, newest first")).to_be_visible()


def test_what_is_new_is_told_while_one_looks(tab: Tab, site: Site) -> None:
    tab.goto("/")
    expect(tab.locator(".live")).to_contain_text("done")
    site.place.add("new.jpg", "fresh")
    tab.locator(".live .fresh").click()
    expect(tab.locator(".card .name").first).to_contain_text("new.jpg")


def test_all_that_are_shown_are_processed_again_at_once(tab: Tab, site: Site) -> None:
    for name in "ab":
        site.place.add(f"{name}.jpg", "manyatonce")
    tab.goto("/login")
    tab.get_by_label("Token").fill((site.place.state / "page.token").read_text().strip())
    tab.get_by_role("button", name="Log in").click()
    wait_for(lambda: site.read("/?q=manyatonce&by=words").count("Tick ") == 2, "both in the index")
    tab.goto("/?q=manyatonce&by=words")
    tab.get_by_label("All that are shown").check()
    tab.get_by_role("button", name="Process again").click()
    expect(tab.get_by_text("2 queued again.")).to_be_visible()
    assert "q=manyatonce" in tab.url


def test_enter_on_a_box_presses_no_button(tab: Tab) -> None:
    tab.goto("/?state=failed")
    tab.evaluate(
        "addEventListener('submit', (event) => { event.target.id = 'sent'; event.preventDefault(); })"
    )
    tab.get_by_label("Tick bad.jpg").press("Enter")
    expect(tab.locator("#sent")).to_have_count(0)


def test_whoever_has_the_token_retries_a_failed_image(tab: Tab, site: Site) -> None:
    tab.goto("/?state=failed")
    tab.get_by_role("link", name="Log in").first.click()
    for token in ("wrong", (site.place.state / "page.token").read_text().strip()):
        tab.get_by_label("Token").fill(token)
        tab.get_by_role("button", name="Log in").click()
    tab.get_by_label("Tick bad.jpg").check()
    tab.get_by_role("button", name="Retry the ticked ones").click()
    expect(tab.get_by_text("1 queued again.")).to_be_visible()
    expect(tab.get_by_text("No image has failed.")).to_be_visible()
    tab.get_by_role("button", name="Log out").click()
    expect(tab.get_by_role("link", name="Log in")).to_be_visible()


def test_no_more_are_downloaded_at_once_than_an_address_can_name(tab: Tab) -> None:
    tab.goto("/?q=word")
    boxes = "'<input type=checkbox name=id checked>'.repeat(500)"
    tab.evaluate(f"document.querySelector('.cards').insertAdjacentHTML('beforeend', {boxes})")
    expect(tab.get_by_role("button", name="Results as CSV")).to_be_enabled()
    tab.get_by_label("Tick 9.jpg").check()
    expect(tab.get_by_text("501 ticked, of which 500 can be downloaded at once:")).to_be_visible()
    expect(tab.get_by_role("button", name="Results as CSV")).to_be_disabled()


def test_ticks_stay_while_more_images_come(tab: Tab) -> None:
    tab.goto("/?q=word&by=newest")
    tab.get_by_label("All that are shown").check()
    expect(tab.get_by_text("48 ticked:")).to_be_visible()
    wait_for(lambda: tab.keyboard.press("End") or tab.locator(".card").count() > 48, "the rest")
    expect(tab.get_by_label("All that are shown")).not_to_be_checked()
    expect(tab.get_by_text("48 ticked:")).to_be_in_viewport()


def test_what_has_the_keyboards_focus_is_not_hidden_by_the_bar_of_what_is_ticked(tab: Tab) -> None:
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.goto("/?q=word&by=newest")
    tab.get_by_label("Tick ").nth(9).check()
    for _ in range(20):
        tab.keyboard.press("Shift+Tab")
        bottom = "document.{}.getBoundingClientRect().bottom"
        bar, focus = bottom.format('querySelector(".actions")'), bottom.format("activeElement")
        assert tab.evaluate(f"{focus} > {bar} || document.activeElement.closest('.actions')")


def test_whoever_is_logged_out_elsewhere_is_led_to_the_login(browser: Browser, tmp_path: Path) -> None:
    with closing(Site(tmp_path, "--listen", "0.0.0.0:0")) as site, opened(browser, site.origin) as tab:
        for path in ("/", "/state"):
            tab.goto("/login")
            tab.get_by_label("Token").fill((site.place.state / "page.token").read_text().strip())
            tab.get_by_role("button", name="Log in").click()
            expect(tab.locator(".live")).to_contain_text("done")
            tab.goto(path)
            tab.context.clear_cookies()
            expect(tab).to_have_url(f"{site.origin}/login")  # not the login within the page
            expect(tab.get_by_label("Token")).to_be_visible()


def test_nothing_is_wider_than_a_phone(browser: Browser, site: Site) -> None:
    for number in (1, 2):
        site.place.add(f"same{number}.jpg", "same", clip=at(number))
    keep(site.place)
    with closing(browser.new_context(base_url=site.origin, viewport=NARROW)) as context:  # type: ignore[arg-type]
        tab = context.new_page()
        for path in ("/", "/?by=disagreement", "/duplicates", "/images/1", "/state", "/settings", "/login"):
            tab.goto(path)
            for scheme in ("light", "dark"):
                tab.emulate_media(color_scheme=scheme)
                assert tab.evaluate("document.documentElement.scrollWidth") <= 360, (path, scheme)
                ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (ground == DARK) == (scheme == "dark"), path


def test_axe_finds_nothing_that_shuts_people_out(tab: Tab, site: Site) -> None:
    site.place.add("broken.jpg")
    tab.goto("/login")
    tab.get_by_label("Token").fill((site.place.state / "page.token").read_text().strip())
    tab.get_by_role("button", name="Log in").click()
    for path in (
        "/login",
        "/?q=number7",
        "/?by=disagreement&q=number7",
        "/duplicates",
        "/?state=failed",
        "/images/1",
        "/state",
        "/settings",
    ):
        tab.goto(path)
        expect(tab.locator(".live")).to_contain_text("waiting")
        for box in tab.get_by_label("Tick ").all()[:1]:
            box.check()
        for scheme, rules in (
            ("light", "wcag2a wcag2aa wcag21a wcag21aa wcag22aa best-practice"),
            ("dark", "cat.color"),
        ):
            tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            found = Axe().run(tab, options={"runOnly": rules.split(), "resultTypes": ["violations"]})
            assert found.violations_count == 0, f"{path}, {scheme}: {found.generate_report()}"
