"""The page behind a real nginx and a real Caddy, as docs/page.md says: by TLS, below a path or not."""

from __future__ import annotations

import getpass
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import pytest
from playwright.sync_api import Browser, expect

from daemon.config.state import PAGE_TOKEN
from tests.daemon.server.browser import needs_chromium, opened
from tests.daemon.server.client import open_place
from tests.daemon_process import PATIENCE, Daemon, Place, free_port, make_certificate, picture, wait_for

DOCUMENT = Path(__file__).parents[3] / "docs" / "page.md"
NAME = "photos.localhost"  # which browsers look for on this machine
PROGRAMS = {name: shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("nginx", "caddy")}
ADDRESS = "http://127.0.0.1:9465"
LOADED = "[...document.images].slice(0, 3).every(image => image.complete && image.naturalWidth > 0)"

NGINX = """
daemon off;
user {user};
pid {folder}/nginx.pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  scgi_temp_path {folder}/scgi;
  uwsgi_temp_path {folder}/uwsgi;
{block}
}}
"""
CADDY = """
{{
  admin off
  auto_https off
  storage file_system {folder}
}}
{block}
"""


def read_block(start: str) -> str:
    """An example of the document."""
    found = re.search(
        rf"^    {re.escape(start)} {{\n.*?^    }}\n", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found
    return textwrap.dedent(found[0])


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


class Public(NamedTuple):
    """The page as the world sees it."""

    place: Place
    folder: Path  # with the certificate
    port: int
    root_path: str

    @property
    def token(self) -> str:
        file = self.place.folder / "state" / PAGE_TOKEN
        wait_for(file.exists, "the token")
        return file.read_text().strip()

    @property
    def origin(self) -> str:
        return f"https://{NAME}:{self.port}"

    @contextmanager
    def asked(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """path: with the root path, as of a link."""
        context = ssl.create_default_context(cafile=str(self.folder / "certificate.pem"))
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE, context=context)
        with closing(connection):
            named = {"Host": f"{NAME}:{self.port}", "Accept": "text/html"}
            named |= {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            yield connection.getresponse()

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        with self.asked(path, method, body, **headers) as answer:
            return answer.status, answer.read(), answer.headers

    def log_in(self) -> str:
        """The cookie, as it was set."""
        form = urlencode({"token": self.token}).encode()
        status, content, headers = self.ask(f"{self.root_path}/login", "POST", form, Origin=self.origin)
        assert (status, headers.get("location")) == (303, f"{self.root_path}/"), content
        return headers["set-cookie"]


@contextmanager
def proxied(program: str, folder: Path, port: int, page: str, changes: dict[str, str]) -> Iterator[None]:
    """The program as docs/page.md says, with these changes, in front of the page at that address."""
    if not PROGRAMS[program]:
        pytest.skip(f"{program} is not installed: make tools")
    if program == "nginx":
        listen = {"listen 443 ssl": f"listen 127.0.0.1:{port} ssl", "photos.example.org": NAME}
        files = {
            "/etc/ssl/photos.pem": f"{folder}/certificate.pem",
            "/etc/ssl/photos.key": f"{folder}/key.pem",
        }
        block = replaced(read_block("server"), changes | listen | files | {ADDRESS: f"http://{page}"})
        text = NGINX.format(user=getpass.getuser(), folder=folder, block=block)
        command = ["-e", "stderr", "-p", str(folder), "-c", str(folder / "proxy.conf")]
    else:
        site = (
            f"https://{NAME}:{port} {{\n    tls {folder}/certificate.pem {folder}/key.pem\n    bind 127.0.0.1"
        )
        block = replaced(
            read_block("photos.example.org"),
            changes | {"photos.example.org {": site, ADDRESS.removeprefix("http://"): page},
        )
        text = CADDY.format(folder=folder, block=block)
        command = ["run", "--adapter", "caddyfile", "--config", str(folder / "proxy.conf")]
    (folder / "proxy.conf").write_text(text)
    with (folder / "proxy.log").open("wb") as log:
        process = subprocess.Popen([PROGRAMS[program] or "", *command], stdout=log, stderr=log)
    try:
        wait_for(lambda: process.poll() is not None or _listens(port), program)
        assert process.poll() is None, (folder / "proxy.log").read_text()
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


# nginx sends the Host that it asks, unless it is told otherwise; its $host has no port.
VARIANTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "nginx": ("nginx", "/visiond", {}),
    "nginx, a name of its own": ("nginx", "", {"location /visiond/": "location /"}),
    "caddy": ("caddy", "/visiond", {}),
    "caddy, a name of its own": (
        "caddy",
        "",
        {"    @visiond path /visiond /visiond/*\n": "", " @visiond": ""},
    ),
    "nginx, which takes the path away": ("nginx", "/visiond", {f"{ADDRESS};": f"{ADDRESS}/;"}),
    "nginx, its own Host": ("nginx", "/visiond", {"proxy_set_header Host $http_host;": ""}),
    "nginx, Host without the port": ("nginx", "/visiond", {"$http_host": "$host"}),
}
# A browser sees nothing of the others that requests do not show: which links lead where, and whether a change is refused.
BY_BROWSER = list(VARIANTS)[:4]


@pytest.fixture(scope="module", params=VARIANTS)
def public(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Public]:
    program, root_path, changes = VARIANTS[request.param]
    folder, port = tmp_path_factory.mktemp("public"), free_port()
    make_certificate(folder, f"IP:127.0.0.1,DNS:{NAME}")
    settings = {"http": {"names": [f"{NAME}:{port}"]}, "page": {"root_path": root_path}}
    place = open_place(tmp_path_factory.mktemp("place"), settings)
    with (
        proxied(program, folder, port, place.settings["page"]["listen"], changes),
        Daemon(place) as daemon,
    ):
        place.drop_many(range(60))
        place.drop("bad.jpg", b"\xff\xd8\xff")
        daemon.wait_idle(61)
        yield Public(place, folder, port, root_path)


@needs_chromium
@pytest.mark.parametrize("public", BY_BROWSER, indirect=True)
def test_people_log_in_look_search_and_change_something(browser: Browser, public: Public) -> None:
    home = f"{public.origin}{public.root_path}/"
    with opened(browser, public.origin, ignore_https_errors=True) as tab:
        tab.goto(f"{home}images/7")
        tab.get_by_label("Token").fill(public.token)
        tab.get_by_role("button", name="Log in").click()
        expect(tab.locator(".card")).to_have_count(48)
        assert tab.url == home
        wait_for(lambda: tab.evaluate(LOADED), "the thumbnails")
        tab.locator(".more").scroll_into_view_if_needed()
        expect(tab.locator(".card")).to_have_count(61)
        expect(tab.locator(".live")).to_contain_text("60 done")
        tab.get_by_role("searchbox").fill("name:00007")
        tab.get_by_role("button", name="Search").click()
        expect(tab.locator(".card")).to_have_count(1)
        assert tab.url.startswith(f"{home}?q=name")
        tab.locator(".card .name a").click()
        expect(tab.get_by_text("Why bin")).to_be_visible()
        tab.get_by_role("link", name="State").click()
        expect(tab.locator("h2").first).to_have_text("The last hour")
        tab.get_by_role("link", name="truncated").click()
        expect(tab.locator(".card .name")).to_have_text(["bad.jpg"])
        tab.get_by_role("link", name="Failed", exact=True).click()
        tab.get_by_label("Tick bad.jpg").check()
        tab.get_by_role("button", name="Retry the ticked ones").click()
        expect(tab.get_by_text("1 queued again.")).to_be_visible()
        tab.get_by_role("button", name="Log out").click()
        expect(tab.get_by_label("Token")).to_be_visible()


def test_the_cookie_of_a_login_is_for_this_page_by_tls_and_changes_it(public: Public) -> None:
    cookie = public.log_in()
    assert f"; Path={public.root_path or '/'};" in cookie
    assert "; Secure" in cookie
    pair = cookie.partition(";")[0]
    assert public.ask(f"{public.root_path}/", Cookie=pair)[0] == 200
    again = f"{public.root_path}/images/again"
    assert public.ask(again, "POST", b"id=1", Cookie=pair, Origin="https://evil.example")[0] == 403
    status, _, headers = public.ask(again, "POST", b"id=1", Cookie=pair, Origin=public.origin)
    assert (status, headers["location"]) == (303, f"{public.root_path}/?queued=1")
    status, _, headers = public.ask(f"{public.root_path}/")
    assert (status, headers["location"]) == (303, f"{public.root_path}/login")


def test_programs_upload_much_and_get_addresses_that_lead_back(public: Public) -> None:
    bearer = f"Bearer {public.token}"
    name, data = quote("50% ü #1 ?.ppm"), b"P6\n1400 1400\n255\n" + bytes(3 * 1400**2)
    status, content, headers = public.ask(
        f"{public.root_path}/api/images?wait=30&name={name}", "POST", data, Authorization=bearer
    )
    assert status == 200, content
    assert headers["location"].startswith(f"{public.root_path}/api/images/by-path/50%25")
    found = json.loads(public.ask(headers["location"], Authorization=bearer)[1])
    assert found == json.loads(content)["images"][0]
    assert found["status"] == "DONE"


def test_events_are_not_held_back(public: Public) -> None:
    """They are fewer than the bytes that a proxy would gather."""
    bearer = f"Bearer {public.token}"
    with public.asked(f"{public.root_path}/events", Authorization=bearer) as answer:
        assert answer.readline().startswith(b":")
        public.place.drop("event.ppm", picture(1000))
        assert any(b"event.ppm" in line for line in answer)
