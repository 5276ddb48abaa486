"""Who may read and change something."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from structlog.testing import capture_logs

from daemon.config.loading import parse
from daemon.core.errors import ConfigError
from daemon.server import guard
from daemon.server.app import TOKEN_SECONDS, PageToken, own_token
from daemon.server.guard import COOKIE, Guard, PageGuard, cookie_of, own_path


def test_a_token_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    first = own_token(tmp_path / "page.token")
    assert len(first) == 32
    assert own_token(tmp_path / "page.token") == first
    assert (tmp_path / "page.token").stat().st_mode & 0o077 == 0
    assert [file.name for file in tmp_path.iterdir()] == ["page.token"]


def test_an_exchanged_token_counts_within_a_second(tmp_path: Path) -> None:
    now = 1000.0
    token = PageToken(parse({}, tmp_path), lambda: now)
    file = tmp_path / "state" / "page.token"
    file.parent.mkdir()
    first = token.read()
    file.write_text("the second one\n")
    assert token.read() == first  # without a look at the file for each request
    now += TOKEN_SECONDS
    assert token.read() == b"the second one"
    file.write_text("")
    now += TOKEN_SECONDS
    for _ in range(2):
        with pytest.raises(ConfigError, match="is empty"):
            token.read()


def test_an_empty_token_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "page.token").touch()
    with pytest.raises(ConfigError, match="is empty"):
        own_token(tmp_path / "page.token")


@pytest.mark.parametrize(
    "given", ["//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil.example", ""]
)
def test_a_login_leads_to_no_other_site(given: str) -> None:
    assert own_path(given) == ""
    assert own_path("/images/7?q=a%20b") == "/images/7?q=a%20b"


NOBODY: Any = None  # is asked


def ask(name: bytes, value: bytes) -> Request:
    return Request({"type": "http", "method": "GET", "path": "/", "headers": [(name, value)]})


def test_the_pages_cookie_opens_only_the_page() -> None:
    request = ask(b"cookie", f"{COOKIE}={cookie_of(b'right')}".encode())
    assert PageGuard(NOBODY, lambda: b"right", reading_is_free=False).has_token(request)
    assert not Guard(NOBODY, lambda: b"right").has_token(request)


def test_the_cookie_of_another_daemon_whose_page_is_above_this_one_does_not_hide_ours() -> None:
    """A browser sends both, the one with the longer path first."""
    both = f"{COOKIE}={cookie_of(b'right')}; {COOKIE}={cookie_of(b'other')}".encode()
    for right, known in ((b"right", True), (b"other", True), (b"third", False)):
        page = PageGuard(NOBODY, partial(bytes, right), reading_is_free=False)
        assert page.has_token(ask(b"cookie", both)) == known


@pytest.mark.anyio
async def test_a_token_that_cannot_be_read_is_logged_once_until_it_can() -> None:
    reasons: list[str] = ["it is empty", "it is empty", "it is gone", "", "it is gone"]

    def read() -> bytes:
        if why := reasons.pop(0):
            raise ConfigError([why])
        return b"right"

    async def ignore(*_: Any) -> None:
        pass

    whoever = {"type": "http", "method": "GET", "path": "/static/page.css", "headers": []}
    known = whoever | {"headers": [(b"authorization", b"Bearer right")]}
    guarded = PageGuard(ignore, read, reading_is_free=True)
    with capture_logs() as lines:
        for _ in range(5):
            await guarded(known, NOBODY, ignore)
            await guarded(whoever, NOBODY, ignore)  # needs no look at the token
    assert [line["error"] for line in lines] == ["it is empty", "it is gone", "it is gone"]


def test_a_token_may_have_any_bytes() -> None:
    for token in (b"right", b"\xc3\xa9", b"\xe9"):
        assert Guard(NOBODY, partial(bytes, token)).has_token(ask(b"authorization", b"Bearer " + token))


@pytest.mark.anyio
async def test_wrong_tokens_are_logged_and_a_missing_one_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "WRONG_TOKEN_SECONDS", 0.0)
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    async def receive() -> Any:
        raise NotImplementedError

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        statuses.append(200)

    for header in (b"Bearer wrong", b"bearer \xe9", b"Basic cmlnaHQ=", b"", b"bearer right"):
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/metrics",
            "client": ("198.51.100.7", 4711),
            "headers": [(b"authorization", header)],
        }
        await Guard(answer, lambda: b"right")(scope, receive, send)
    assert [status for status in statuses if status] == [401, 401, 401, 401, 200]
    said = capsys.readouterr().out
    assert said.count("a request had a wrong token") == said.count("198.51.100.7") == 2
    assert "right" not in said


@pytest.mark.anyio
@pytest.mark.parametrize("problem", [OSError(5, "Input/output error"), ConfigError(["token is empty."])])
async def test_while_the_token_cannot_be_read_nobody_passes_and_the_answer_is_503(
    problem: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    def refuse() -> bytes:
        raise problem

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/uploads",
        "headers": [(b"authorization", b"Bearer a")],
    }
    for guarded in (Guard(NOBODY, refuse), PageGuard(NOBODY, refuse, reading_is_free=True)):
        await guarded(scope, NOBODY, send)
    assert [status for status in statuses if status] == [503, 503]
    assert str(problem) in capsys.readouterr().out
