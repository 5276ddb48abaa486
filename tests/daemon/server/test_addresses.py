"""The page under another name and below a path, as a reverse proxy asks for it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from daemon.config.loading import parse
from daemon.config.values import PAGE_PATHS
from daemon.core.errors import ConfigError
from daemon.server.addresses import is_from_page
from daemon.server.api import Api
from daemon.server.page.page import Page
from tests.daemon.server.site import Site

NAMES = ["photos.example.org", "photos.example.org:8443", "[2001:db8::7]:8443"]
FORMS = r"/again(\?|$)|/logout$"
LINK = re.compile(r'(?:href|src|(?<!form)action|hx-get)="(/[^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    settings = f'[http]\nnames = {json.dumps(NAMES)}\n[page]\nroot_path = "/a/visiond"\n'
    with closing(Site(tmp_path_factory.mktemp("page"), settings=settings)) as opened:
        for number in range(60):
            opened.place.add(f"{number}.jpg", "word")
        opened.place.add("bad.jpg")
        yield opened


@pytest.fixture(scope="module")
def cookie(site: Site) -> str:
    return site.log_in("/a/visiond/")


def test_all_links_lead_below_the_path_whether_the_proxy_takes_it_away_or_not(
    site: Site, cookie: str
) -> None:
    seen, todo = set[str](), {"/", "/?q=word", "/?state=failed", "/images/8", "/login", "/live", "/nothing"}
    while len(seen) < 40 and (path := min(todo - seen, default="")):
        seen.add(path)
        status, content, _ = site.ask(path, Cookie=cookie)
        assert status == site.ask(f"/a/visiond{path}", Cookie=cookie)[0]
        # The ledger of this site has no files.
        assert status == (404 if path == "/nothing" or "/original" in path else 200), path
        links = [html.unescape(link) for link in LINK.findall(content)]
        assert all(link.startswith("/a/visiond/") for link in links), path
        # Forms change something.
        todo |= {link.removeprefix("/a/visiond") for link in links if not re.search(FORMS, link)}
    assert len(seen) == 40


@pytest.mark.parametrize("path", ["/a/visiond", "/a/visiond/", "/", "/a/visiond/state/", "/state/"])
def test_a_slash_at_the_end_makes_no_difference(site: Site, cookie: str, path: str) -> None:
    """A redirect would need a scheme and a host, which the proxy knows."""
    assert site.ask(path, Cookie=cookie)[0] == 200


def test_a_path_that_only_begins_like_ours_is_not_ours(site: Site, cookie: str) -> None:
    assert site.ask("/a/visionder/state", Cookie=cookie)[0] == 404


def test_redirects_name_neither_a_scheme_nor_a_host(site: Site, cookie: str) -> None:
    origin = {"Cookie": cookie, "Origin": "https://photos.example.org"}
    found = [
        site.ask("/a/visiond/state", Accept="text/html")[2],
        site.ask("/a/visiond/images/8/again", "POST", "", **origin)[2],
        site.ask("/a/visiond/images/again?state=failed", "POST", "all=1", **origin)[2],
        site.ask("/a/visiond/login", "POST", "token=wrong", **origin)[2],
        site.ask("/a/visiond/logout", "POST", "", **origin)[2],
    ]
    assert [each["location"] for each in found] == [
        "/a/visiond/login",
        "/a/visiond/images/8",
        "/a/visiond/?state=failed&queued=1",
        "/a/visiond/login?wrong=1&to=%2Fa%2Fvisiond%2F",
        "/a/visiond/",
    ]
    assert "Path=/a/visiond;" in found[-1]["set-cookie"]


def test_a_login_leads_back_to_where_somebody_was(site: Site) -> None:
    for came, to in (("images/8?q=a", "images/8?q=a"), ("login", ""), ("login?wrong=1", "")):
        content = site.read("/a/visiond/login", Referer=f"https://photos.example.org/a/visiond/{came}")
        assert f'name="to" value="/a/visiond/{to}"' in content


def test_programs_get_addresses_below_the_path(site: Site) -> None:
    token = {"Authorization": f"Bearer {(site.place.state / 'page.token').read_text().strip()}"}
    found = json.loads(site.read("/api/search?q=word&by=newest&limit=2", **token))
    assert found["following"].startswith("/a/visiond/api/search?q=word&by=newest&")
    for image in (*found["images"], *json.loads(site.read(found["following"], **token))["images"]):
        assert json.loads(site.read(image["result"], **token))["id"] == image["id"]
        assert image["result"].startswith("/a/visiond/api/images/")
    assert json.loads(site.read("/api/openapi.json", **token))["servers"] == [{"url": "/a/visiond"}]


def test_a_page_that_a_proxy_serves_is_read_only_with_the_token(site: Site) -> None:
    assert site.ask("/a/visiond/images/8")[0] == 401
    assert site.ask("/a/visiond/api/images")[0] == 401
    assert site.ask("/a/visiond/static/page.css")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("photos.example.org", 200), ("Photos.Example.org:1234", 200), ("[2001:db8::7]", 200)),
        *(("[::1]:9465", 200), ("localhost", 200), ("evil.example", 400), ("[2001:db8::8]", 400)),
        *(("photos.example.org.evil.example", 400), ("[", 400), ("", 400)),
    ],
)
def test_only_names_of_the_page_are_answered(site: Site, host: str, status: int) -> None:
    found, content, _ = site.ask("/a/visiond/login", Host=host)
    assert found == status
    assert ("[http] names" in content) == (status == 400)


@pytest.mark.parametrize(
    ("scheme", "settings", "is_secure"),
    [("https", "", True), ("http", "", False), ("https", 'proxies = ["192.0.2.0/24"]', False)],
)
def test_the_cookie_is_sent_only_by_tls_if_a_proxy_that_counts_says_that_it_came_so(
    tmp_path: Path, scheme: str, settings: str, is_secure: bool
) -> None:
    with closing(Site(tmp_path, settings=f"[http]\n{settings}")) as site:
        site.read("/login")  # it has begun
        token = (site.place.state / "page.token").read_text().strip()
        told = {"X-Forwarded-Proto": scheme, "Origin": site.origin}
        assert (
            "Secure" in site.ask("/login", "POST", f"token={token}", **told)[2]["set-cookie"]
        ) == is_secure


@pytest.mark.parametrize(
    ("headers", "is_ours"),
    [
        ({"origin": "http://page:1"}, True),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "http://evil.example", "sec-fetch-site": "same-origin"}, False),
        ({"origin": "http://page:1.evil.example"}, False),
        ({"origin": "http://["}, False),
        ({"origin": "null"}, False),
        ({"origin": "null", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "null", "sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({}, False),
        ({"origin": "https://photos.example.org"}, True),
        ({"origin": "https://photos.example.org:8443"}, True),
        ({"origin": "https://photos.example.org:9000"}, False),
        ({"origin": "https://[2001:db8::7]:8443"}, True),
        ({"origin": "https://other.example.org"}, False),
    ],
)
def test_a_form_counts_only_if_the_browser_says_that_a_page_of_ours_sent_it(
    headers: dict[str, str], is_ours: bool
) -> None:
    assert is_from_page(Headers({"host": "page:1"} | headers), NAMES) == is_ours


def test_names_are_as_browsers_show_them(tmp_path: Path) -> None:
    config = parse({"http": {"names": ["Photos.example.org:443"]}, "page": {"root_path": "a/b/"}}, tmp_path)
    assert (config.http.names, config.page.root_path) == (["photos.example.org"], "/a/b")
    assert parse({"page": {"root_path": "/"}}, tmp_path).page.root_path == ""


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        *(
            ("http", "names", [name])
            for name in ("https://a.example", "a.example/b", "*", "", "bücher.example")
        ),
        *(("http", "proxies", [name]) for name in ("nginx", "*", "10.0.0.7/8", "")),
        *(
            ("page", "root_path", path)
            for path in ("/a b", "/../a", "/a//b", "/ä", "/a?b", "/state", "/api/x")
        ),
    ],
)
def test_what_can_be_no_name_or_path_is_refused(tmp_path: Path, table: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{table}.{key}.*for example"):
        parse({table: {key: value}}, tmp_path)


def test_no_path_is_taken_for_an_address_of_the_page(tmp_path: Path) -> None:
    nobody: Any = None
    page = Page(parse({}, tmp_path), nobody, nobody, nobody)
    routes: list[Any] = [*page.routes(), *object.__new__(Api).routes()]
    assert {route.path.split("/")[1] for route in routes} == {"", *PAGE_PATHS.split("|")}
