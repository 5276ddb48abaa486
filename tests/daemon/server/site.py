"""A page that is served by its real process, over a real ledger."""

from __future__ import annotations

import http.client
import os
import re
import signal
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from tests.daemon.search.place import Place
from tests.daemon_process import wait_for
from tests.forked import Forked

CONFIG = """
[[inbox]]
path = "/srv/inbox"
[state]
path = "state"
[stages]
ocr.backend = "fake"
yolo.backend = "fake"
clip.backend = "fake"
blip.backend = "fake"
"""


class Site:
    """A page that is served, and its ledger."""

    def __init__(self, folder: Path, *options: str, settings: str = "") -> None:
        """settings: more of daemon.toml."""
        (folder / "state").mkdir()
        self.place = Place(folder / "state")
        config = folder / "daemon.toml"
        config.write_text(CONFIG + settings)
        command = ["page", "--config", str(config), "--listen", "127.0.0.1:0", *options]
        said = folder / "said"
        with ExitStack() as stack:
            stack.enter_context(closing(self.place))
            with said.open("wb") as output, (folder / "errors").open("wb") as errors:
                self.process = stack.enter_context(Forked(command, Path.cwd(), os.environ, output, errors))
            address = re.compile(r"http://[\d.]+:(\d+)")
            found = wait_for(
                lambda: address.match(said.read_text()), "the page's address", process=self.process
            )
            self._opened = stack.pop_all()
        self.port = int(found[1])
        self.token = ""

    def close(self) -> None:
        with self._opened:
            self.process.send_signal(signal.SIGINT)
            assert self.process.wait(30) == 0

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, str, Mapping[str, str]]:
        """The status, the content and the headers of an answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            if body is not None:
                named["Content-Type"] = "application/x-www-form-urlencoded"
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace"), dict(answer.headers.items())

    def read(self, path: str, **headers: str) -> str:
        status, content, _ = self.ask(path, **headers)
        assert status == 200, content
        return content

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_in(self, home: str = "/") -> str:
        """The cookie."""
        token = (self.place.state / "page.token").read_text().strip()
        status, _, headers = self.ask("/login", "POST", f"token={token}", Origin=self.origin)
        assert (status, headers["location"]) == (303, home)
        assert "HttpOnly" in headers["set-cookie"]
        assert "SameSite=strict" in headers["set-cookie"]
        return headers["set-cookie"].partition(";")[0]
