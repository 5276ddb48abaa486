"""The documentation as a site: `make site`. Every page has its place in it, and nothing of it needs a network."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The theme keeps its search results in a closed shadow root, where a test cannot see them.
OPEN_SHADOWS = """
const attach = Element.prototype.attachShadow;
Element.prototype.attachShadow = function () { return attach.call(this, {mode: "open"}); };
"""
needs_zensical = pytest.mark.skipif(
    importlib.util.find_spec("zensical") is None, reason="Zensical is not installed: make tools"
)


@pytest.fixture(scope="module")
def building() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_build", ROOT / "docs" / "site" / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(building: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built: Path = building.build(tmp_path_factory.mktemp("site"))
    return built


def test_every_page_is_in_the_navigation_once(building: ModuleType) -> None:
    assert sorted(building.listed()) == sorted(building.pages().values())


def test_the_list_of_pages_for_programs_is_current_and_names_each_page(building: ModuleType) -> None:
    text = (ROOT / "docs" / "llms.txt").read_text()
    assert text == building.write_llms(), "run: make docs"
    links = re.findall(r"^- \[.+\]\((.+?)\): .{20}", text, re.MULTILINE)
    assert sorted((ROOT / "docs" / link).resolve() for link in links) == sorted(building.pages())


@needs_zensical
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img|source|iframe|video|audio)\b[^>]*(?:src|href|srcset)=[\"']?(?:https?:)?//[^>]*>",
            page.read_text(),
        )
        assert loaded == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet.name


@needs_zensical
def test_a_link_to_code_leads_to_its_text(site: Path) -> None:
    assert "source/daemon/pipeline/coordinator.py.html" in (site / "design.html").read_text()
    assert "class" in (site / "source/daemon/pipeline/coordinator.py.html").read_text()


@needs_zensical
def test_each_alert_leads_to_its_section(site: Path) -> None:
    rules = (ROOT / "deploy" / "prometheus" / "rules" / "visiond.yml").read_text()
    addresses = re.findall(r'runbook_url: "{{ externalURL }}/user/([\w.]+)#(\w+)"', rules)
    assert len(addresses) == rules.count("- alert: ")
    for page, anchor in addresses:
        assert f'id="{anchor}"' in (site / page).read_text()


@needs_zensical
@pytest.mark.parametrize("link", ["nowhere.md", "design.md#nowhere"])
def test_a_link_that_leads_nowhere_fails_the_build(building: ModuleType, link: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    building.lay_out(tmp_path / "source")
    with (tmp_path / "source" / "glossary.md").open("a") as page:
        page.write(f"\n[wrong]({link})\n")
    with pytest.raises(subprocess.CalledProcessError):
        building.run_zensical(tmp_path)


@needs_zensical
@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed: make tools")
def test_pages_and_search_work_from_the_disk_without_a_network(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.context.set_offline(True)
        page.add_init_script(OPEN_SHADOWS)
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.get_by_role("combobox", name="Search").fill("VisiondEventsLost")
        page.get_by_role("listbox").get_by_text("When an alert fires").first.click()
        page.wait_for_url("**/alerts.html*")
        assert page.get_by_role("heading", level=1).inner_text().startswith("What to do when an alert fires")
        browser.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
