"""The sink webhook, with a real receiver."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.config.output import WebhookSection
from daemon.core.errors import ConfigError
from daemon.core.jobs import JobStatus
from daemon.results import webhook
from daemon.results.webhook import Refused, WebhookSink
from tests.daemon_process import Place
from tests.makers import make_record

pytestmark = pytest.mark.anyio


class Receiver(ThreadingHTTPServer):
    """Takes requests, or answers with `status`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.most_bytes = 204, 1 << 30
        self.refusal = (b"nothing", 0)  # what is in a body that it never takes, and its answer
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/hook"

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for _, body in self.got for record in json.loads(body)["records"]]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = self.server.status if len(body) <= self.server.most_bytes else 413
        status = self.server.refusal[1] if self.server.refusal[0] in body else status
        if status < 300:
            self.server.got.append((dict(self.headers.items()), body))
        self.send_response(status)
        self.send_header("Location", "http://127.0.0.1:1/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


PLAIN = "swordfish and twenty-four"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as opened:
        thread = threading.Thread(target=opened.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


@pytest.mark.parametrize("secret", [PLAIN, f"whsec_{base64.b64encode(PLAIN.encode()).decode()}"])
async def test_requests_are_signed_and_repetitions_have_the_same_id(
    receiver: Receiver, tmp_path: Path, secret: str
) -> None:
    write_secret(tmp_path / "secret", f"\ufeff{secret}\r\n")
    sink = WebhookSink(WebhookSection(url=receiver.url, secret_file=str(tmp_path / "secret")))
    record = make_record(tmp_path)
    for _ in range(2):
        await sink.append([record])
    (first, body), (second, _) = receiver.got
    headers = {name.lower(): value for name, value in first.items()}
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signed = base64.b64encode(hmac.digest(PLAIN.encode(), content, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{signed}"
    assert headers["webhook-id"] in second.values()
    assert receiver.records[0]["bin"] == record.bin


async def test_whole_records_are_what_sidecars_have(receiver: Receiver, tmp_path: Path) -> None:
    record = make_record(tmp_path)
    await WebhookSink(WebhookSection(url=receiver.url, content="record")).append([record])
    assert receiver.records == [json.loads(record.sidecar)]


async def test_an_image_that_failed_comes_with_its_reason(receiver: Receiver, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"outputs": {}, "bin": "", "reason": "unreadable", "detail": "no permission"}
    failed = make_record(tmp_path, status=JobStatus.FAILED, digest=b"", **fields)
    sink = WebhookSink(WebhookSection(url=receiver.url))
    assert sink.problem() == ""
    await sink.append([failed, make_record(tmp_path)])
    record, other = receiver.records
    assert (record["status"], record["reason"], record["detail"]) == ("FAILED", "unreadable", "no permission")
    assert (record["digest"], other["digest"]) == ("", f"sha256:{bytes(32).hex()}")
    assert "bin" not in record


@pytest.mark.parametrize("status", [500, 302, 410])
async def test_only_a_status_from_200_to_299_counts(receiver: Receiver, tmp_path: Path, status: int) -> None:
    receiver.status = status
    with pytest.raises(Refused, match=str(status)):
        await WebhookSink(WebhookSection(url=receiver.url)).append([make_record(tmp_path)])


async def test_a_receiver_that_is_away_is_named_without_what_may_be_secret(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="http://127.0.0.1:9 does not answer") as error:  # noqa: RUF043
        await WebhookSink(WebhookSection(url="http://127.0.0.1:9/x?token=1")).append([make_record(tmp_path)])
    assert "token" not in str(error.value)


async def test_a_group_that_is_too_large_for_the_receiver_comes_in_parts(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.most_bytes = 900
    records = [make_record(tmp_path, id=number) for number in range(1, 9)]
    sink = WebhookSink(WebhookSection(url=receiver.url))
    await sink.append(records)
    assert [record["id"] for record in receiver.records] == list(range(1, 9))
    assert max(len(body) for _, body in receiver.got) <= 900
    receiver.got.clear()
    monkeypatch.setattr(webhook, "REQUEST_BYTES", 1)
    await sink.append(records)
    assert len(receiver.got) == 8


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_record_that_the_receiver_never_takes_is_named_and_those_before_it_come_once(
    receiver: Receiver, tmp_path: Path, status: int
) -> None:
    receiver.refusal = (b'"id":5', status)
    records = [make_record(tmp_path, id=number) for number in range(1, 9)]
    sink = WebhookSink(WebhookSection(url=receiver.url))
    for _ in range(3):
        with pytest.raises(
            Refused, match=rf"answers {status} .* to the record of image 5 \(.*/a.jpg\); the later"
        ):
            await sink.append(records)
    assert [record["id"] for record in receiver.records] == [1, 2, 3, 4]
    receiver.refusal = (b"nothing", 0)
    await sink.append(records)
    assert [record["id"] for record in receiver.records] == list(range(1, 9))
    await sink.append(records[:1])  # an image that was processed again, with the same result
    assert receiver.records[-1]["id"] == 1


def test_only_addresses_of_http_are_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an HTTP address"):
        parse({"output": {"webhook": {"url": "file:///etc/hostname"}}}, tmp_path)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://user:swordfish@host/hook", "has a user or a password"),
        ("https://:swordfish@host/hook", "has a user or a password"),
        ("https://host/a b?key=swordfish", "has the character ' '"),
        ("https://host/\u00fc?key=swordfish", r"has the character '\\xfc'"),
        ("https://host/hook\n?key=swordfish", "has the character"),
        (r"http://h\x?key=swordfish", "has the character"),
        ("http://h/%zz?key=swordfish", "has the character '%'"),
        ("http://[::1?key=swordfish", "a host or a port that cannot be read"),
        ("http://host:99999/?key=swordfish", "a host or a port that cannot be read"),
        ("http://host:swordfish/", "a host or a port that cannot be read"),
        ("http://:8080/swordfish", "not an HTTP address"),
        ("ftp://host/swordfish", "not an HTTP address"),
    ],
)
def test_an_address_that_cannot_be_posted_to_is_refused_without_its_secrets(
    tmp_path: Path, url: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"output\.webhook\.url: .*{why}") as refused:
        parse({"output": {"sinks": ["webhook"], "webhook": {"url": url}}}, tmp_path)
    assert "swordfish" not in str(refused.value)
    for fit in ("https://host/path?a=%20#x", "http://[::1]:8080/", "http://127.0.0.1:9"):
        assert parse({"output": {"webhook": {"url": fit}}}, tmp_path).output.webhook.url == fit


def test_what_is_missing_is_told_before_the_start(tmp_path: Path) -> None:
    assert "url is not set" in WebhookSink(WebhookSection()).problem()
    settings = WebhookSection(url="http://127.0.0.1:9/x", secret_file=str(tmp_path / "none"))
    assert "cannot be read" in WebhookSink(settings).problem()
    write_secret(tmp_path / "none", "\n")
    assert "openssl rand" in WebhookSink(settings).problem()
    for broken in (
        "whsec_a",
        "whsec_",
        "\ufeff",
        "\u200b" * 8,
        "swordfish\xa0",
        "\0" * 8,
        '"swordfish"',
        "a",
    ):
        write_secret(tmp_path / "none", broken)
        assert "openssl rand -hex 32 >" in WebhookSink(settings).problem()
    for broken in (
        "====" * 8,
        "not/base64!",
        "c3dvcmRmaXNo" * 2 + "=",
        "c3dvcmRmaXNo" * 8,
        "c3dvcmRmaXNo" * 2,
    ):
        write_secret(tmp_path / "none", f"whsec_{broken}")
        assert "must be base64 of 24 to 64 bytes" in WebhookSink(settings).problem()
    write_secret(tmp_path / "none", "WHSEC_" + "c3dvcmRmaXNo" * 4)
    assert "must be base64 of 24 to 64 bytes" in WebhookSink(settings).problem()


async def test_nothing_is_sent_unsigned_because_the_secret_broke(receiver: Receiver, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write_secret(secret, "whsec_")
    sink = WebhookSink(WebhookSection(url=receiver.url, secret_file=str(secret)))
    with pytest.raises(ConfigError, match="fewer than 8 characters"):
        await sink.append([make_record(tmp_path)])
    assert receiver.got == []


def test_a_secret_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", "plain", mode=0o644)
    config = parse(
        {"output": {"webhook": {"url": "http://127.0.0.1:9/x", "secret_file": "secret"}}}, tmp_path
    )
    assert f"chmod o= {tmp_path}/secret" in WebhookSink(config.output.webhook).problem()


def write_secret(file: Path, text: str, mode: int = 0o600) -> None:
    file.write_text(text)
    file.chmod(mode)


def test_a_daemon_does_not_start_with_a_broken_secret(receiver: Receiver, tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", "whsec_")
    webhook = {"url": receiver.url, "secret_file": str(tmp_path / "secret")}
    run = Place(tmp_path, {"output": {"sinks": ["webhook"], "webhook": webhook}}).run_once()
    assert run.returncode == os.EX_CONFIG
    assert (
        "fewer than 8 characters, which can be guessed. To make a new one: (umask 077; openssl rand"
        in run.stderr
    )


def test_a_run_posts_every_image_once(receiver: Receiver, tmp_path: Path) -> None:
    place = Place(tmp_path, {"output": {"sinks": ["webhook"], "webhook": {"url": receiver.url}}})
    place.drop_many(range(5))
    place.drop("bad.jpg", b"no picture")
    assert place.run_once().returncode == 1
    assert sorted(record["status"] for record in receiver.records) == ["DONE"] * 5 + ["FAILED"]
