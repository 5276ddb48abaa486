"""Programs upload images to a real daemon, over real sockets."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

from daemon.config.loading import parse
from daemon.monitoring.series import Series
from daemon.server.guard import COOKIE, cookie_of
from daemon.server.incoming import started_at
from daemon.server.uploads import Uploads
from tests.daemon.server.client import (
    BOUNDARY,
    Client,
    form_of,
    list_hidden,
    open_place,
    page_process,
    read_answer,
    sleeping,
)
from tests.daemon.server.site import Site
from tests.daemon.server.test_exif import encode
from tests.daemon_process import PATIENCE, Daemon, Place, caption_of, picture, wait_for, with_pauses

MOST = 1 << 20  # bytes of an upload


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    inboxes = [
        {"name": "in", "settle_seconds": 0.1, "uploads": True, "unpack": ["zip"], "ignore": ["draft*"]},
        {"name": "gone", "uploads": True, "on_success": "delete"},
        {"name": "closed"},
    ]
    opened = open_place(
        tmp_path_factory.mktemp("uploads"), {"inbox": inboxes, "page": {"upload_bytes": MOST}}
    )
    with Daemon(opened):
        yield opened


@pytest.fixture
def client(place: Place) -> Client:
    return Client(place)


def test_an_upload_is_a_file_of_the_inbox_before_the_answer_and_has_an_address_for_its_result(
    place: Place, client: Client
) -> None:
    answer = client.post(picture(1), "inbox=in&name=a.ppm")
    assert answer.status == 202
    assert (place.inbox("in") / answer.image["path"]).read_bytes() == picture(1)
    assert answer.image["path"].startswith("a~")
    assert answer.headers["location"] == answer.image["result"]
    image = client.get(answer.image["result"] + "?wait=30")
    assert image["status"] == "DONE"
    written = place.site.results / "in" / f"{image['path']}.json"
    wait_for(written.exists, "the sidecar, which follows what the ledger has")
    assert image["record"] == place.sidecar(image["path"], "in")
    assert client.get(f"/api/images/{image['id']}")["record"] == image["record"]


def test_who_waits_gets_the_record(client: Client) -> None:
    answer = client.post(picture(2), "inbox=in&wait=30")
    assert answer.status == 200
    assert answer.image["record"]["caption"]["text"] == caption_of(picture(2))


@pytest.mark.parametrize("inbox", ["in", "gone"])
def test_a_request_that_is_repeated_makes_no_second_image_and_other_bytes_make_one(
    place: Place, client: Client, inbox: str
) -> None:
    """Also where the daemon has deleted the file by then."""
    first = client.post(picture(3), f"inbox={inbox}&name=b.ppm&wait=30").image
    wait_for(lambda: inbox == "in" or not any(place.inbox(inbox).glob("b*")), "the end of the file")
    assert client.post(picture(3), f"inbox={inbox}&name=b.ppm&wait=30").image == first
    other = client.post(picture(4), f"inbox={inbox}&name=b.ppm&wait=30").image
    assert (other["id"] != first["id"], other["status"]) == (True, "DONE")
    assert client.get(first["result"])["digest"] == f"sha256:{hashlib.sha256(picture(3)).hexdigest()}"
    rows = "SELECT 1 FROM image JOIN inbox ON inbox.id = inbox WHERE inbox.path = ? AND CAST(image.path AS TEXT) GLOB 'b~*'"
    assert len(place.rows(rows, os.fsencode(place.inbox(inbox)))) == 2


def test_a_file_that_went_away_before_it_was_read_is_taken_again(tmp_path: Path) -> None:
    """Where the daemon moves files away, too: it knows this one, but has not moved it."""
    place = open_place(tmp_path, {"inbox": [{"settle_seconds": 0.1, "uploads": True, "on_success": "move"}]})
    with Daemon(place) as daemon:
        [worker] = daemon.workers()
        os.kill(worker, signal.SIGSTOP)
        client = Client(place)
        image = client.post(picture(3)).image
        wait_for(lambda: client.get(image["result"])["id"], "the image in the ledger")
        (place.inbox() / image["path"]).unlink()
        assert client.post(picture(3)).status == 202
        assert (place.inbox() / image["path"]).exists()
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: client.get(image["result"])["status"] == "DONE", "the result")


def test_a_file_that_somebody_has_changed_since_is_not_taken_for_the_same(
    place: Place, client: Client
) -> None:
    image = client.post(picture(5), "inbox=in&name=c.ppm&wait=30").image
    (place.inbox("in") / image["path"]).write_bytes(picture(6))
    assert client.post(picture(5), "inbox=in&name=c.ppm").status == 409


def test_a_form_has_several_files_and_all_of_them_are_taken_or_none(place: Place, client: Client) -> None:
    files = {"one.ppm": picture(6), "two.ppm": picture(7, bytes(200_000))}
    images = client.post_form(files, "inbox=in&wait=30").content["images"]
    assert [image["record"]["caption"]["text"] for image in images] == [*map(caption_of, files.values())]
    assert [image["path"].partition("~")[0] for image in images] == ["one", "two"]
    files = {"three.ppm": picture(8), "text.txt": b"text"}
    refused = client.post_form(files, "inbox=in")
    assert (refused.status, refused.content["problem"]) == (415, "text.txt: the bytes are plain text.")
    huge = client.post_form({"four.ppm": picture(8), "huge.ppm": picture(8, bytes(MOST))}, "inbox=in")
    assert (huge.status, huge.content["problem"].partition(":")[0]) == (413, "huge.ppm")
    assert not any(place.inbox("in").glob("three*"))
    assert client.post_form({}, "inbox=in").status == 400
    assert (
        client.post(b"--x\r\nContent", "inbox=in", Content_Type="multipart/form-data; boundary=x").status
        == 400
    )
    assert client.post(b"", "inbox=in", Content_Type="multipart/form-data").status == 400
    assert list_hidden(place, "in") == []


def test_a_form_keeps_one_of_its_files_open(tmp_path: Path) -> None:
    """128 such forms would otherwise have thousands of descriptors."""
    place = open_place(tmp_path)
    body = form_of({f"{number}.ppm": picture(number, bytes(20_000)) for number in range(40)})
    with Daemon(place) as daemon, closing((client := Client(place)).connect()) as connection:
        descriptors = Path(f"/proc/{page_process(daemon.process.pid)}/fd")
        connection.putrequest("POST", "/api/images")
        kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        for name, value in {**client.token, **kind, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body[:-100])
        wait_for(lambda: len(list_hidden(place)) >= 25, "most of the files")
        links = [os.readlink(each) for each in descriptors.iterdir() if each.is_symlink()]
        assert sum("/.visiond-uploads/" in link for link in links) <= 1
        connection.send(body[-100:])
        assert read_answer(connection).status == 202
    assert list_hidden(place) == []


def test_what_a_file_is_is_seen_by_its_first_bytes(client: Client, place: Place) -> None:
    answer = client.post(b"hello " * 9, "inbox=in&name=a.jpg", Content_Type="image/jpeg")
    assert answer.status == 415
    assert answer.content == {"problem": "a.jpg: the bytes are plain text."}
    assert client.post(b"", "inbox=in").status == 400
    named = client.post(picture(9), "inbox=in&name=wrong.txt", Content_Type="text/plain").image
    assert named["path"].endswith(".ppm")
    assert list_hidden(place, "in") == []


def test_an_archive_is_taken_where_it_is_unpacked(place: Place, client: Client) -> None:
    with zipfile.ZipFile(archive := io.BytesIO(), "w") as file:
        file.writestr("inside.ppm", picture(10))
    assert client.post(archive.getvalue(), "inbox=gone&name=a.zip").status == 415
    image = client.post(archive.getvalue(), "inbox=in").image
    assert image["path"].endswith(".zip")
    member = f"/api/images/by-path/in/{image['path']}.unpacked/inside.ppm"
    wait_for(lambda: client.ask("GET", member).status == 200, "the member")
    assert client.get(f"{member}?wait=30")["record"]["caption"]["text"] == caption_of(picture(10))


def test_a_file_that_curl_has_spoiled_is_not_taken_and_the_answer_says_what_to_type(
    place: Place, client: Client
) -> None:
    """Both options of curl name the same type."""
    whole = encode("JPEG")
    spoiled = bytes(byte for byte in whole if byte not in b"\0\r\n")
    form = "application/x-www-form-urlencoded"
    for body in (spoiled, b"name=photo.jpg", b"text " * 999):
        refused = client.post(body, "inbox=in&name=curl.jpg", Content_Type=form)
        assert (refused.status, "`curl --data-binary @photo.jpg`" in refused.content["problem"]) == (
            415,
            True,
        )
    assert not any(place.inbox("in").glob("curl*"))
    assert client.post(whole, "inbox=in&name=curl.jpg", Content_Type=form).status == 202
    assert client.post(b"", "inbox=in", Content_Type=form).status == 400


def test_a_name_that_the_inbox_ignores_is_refused(place: Place, client: Client) -> None:
    assert client.post(picture(11), "inbox=in&name=draft.ppm").status == 400
    assert not any(place.inbox("in").glob("draft*"))


def test_a_body_that_is_too_large_is_refused_before_it_is_read(place: Place, client: Client) -> None:
    with closing(client.connect()) as connection:
        connection.putrequest("POST", "/api/images?inbox=in")
        for name, value in {
            **client.token,
            "Content-Length": str(MOST + 1),
            "Expect": "100-continue",
        }.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert read_answer(connection).status == 413
    parts = [picture(12), *[bytes(MOST // 4)] * 5]
    answer = client.ask("POST", "/api/images?inbox=in", iter(parts), client.token, encode_chunked=True)
    assert answer.status == 413
    assert list_hidden(place, "in") == []


def test_a_body_may_come_in_pieces_and_when_the_server_has_said_that_it_takes_it(client: Client) -> None:
    data = picture(13, bytes(1000))
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    chunked = client.ask(
        "POST", "/api/images?inbox=in&wait=30", iter(pieces), client.token, encode_chunked=True
    )
    assert chunked.image["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        head = "POST /api/images?inbox=in HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        head += f"Content-Length: {len(data)}\r\nAuthorization: {client.token['Authorization']}\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(data)
        assert connection.recv(100).startswith(b"HTTP/1.1 202 ")


def test_of_half_a_body_nothing_is_left(place: Place, client: Client) -> None:
    with closing(client.connect()) as connection:
        connection.putrequest("POST", "/api/images?inbox=in&name=half.ppm")
        for name, value in {**client.token, "Content-Length": "300000"}.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(picture(14, bytes(280_000)))
        wait_for(lambda: list_hidden(place, "in"), "the beginning of the file")
    wait_for(lambda: not list_hidden(place, "in"), "its removal")
    assert not any(place.inbox("in").glob("half*"))


def test_uploads_need_the_token_and_an_inbox_that_takes_them(place: Place, client: Client) -> None:
    target = "/api/images?inbox=in"
    refused = client.ask("POST", target, picture(15), {})
    assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    wrong = client.ask("POST", target, picture(15), {"Authorization": "Bearer wrong"})
    assert (wrong.status, wrong.headers["www-authenticate"]) == (401, 'Bearer error="invalid_token"')
    place_of_token = (
        "It is in the file page.token in the folder that [state] path in daemon.toml names. Send:"
    )
    for answer, problem in ((refused, "This needs the token."), (wrong, "That is not the token.")):
        assert answer.content["problem"].startswith(f"{problem} {place_of_token}")
    assert client.post(picture(15), "inbox=closed").status == 404
    assert client.post(picture(15)).content == {
        "problem": "Several inboxes take uploads; name one with ?inbox=: in, gone."
    }
    assert client.ask("GET", "/api/images/999999", headers={}).status == 404, (
        "reading needs none on this machine"
    )


def test_a_page_of_somebody_else_cannot_upload_by_the_cookie_of_a_browser(client: Client) -> None:
    token = client.token["Authorization"].removeprefix("Bearer ").encode()
    cookie = {"Cookie": f"{COOKIE}={cookie_of(token)}"}
    for origin, status in (("http://evil.example", 403), (f"http://127.0.0.1:{client.port}", 202)):
        answer = client.ask("POST", "/api/images?inbox=in", picture(17), cookie | {"Origin": origin})
        assert answer.status == status, origin


def test_a_file_is_found_by_its_path_and_nothing_else_is(place: Place, client: Client) -> None:
    place.drop("deep/d.ppm", picture(16), "closed")
    wait_for(lambda: client.ask("GET", "/api/images/by-path/closed/deep/d.ppm").status == 200, "the file")
    for path in (
        "in/nothing.ppm",
        "in",
        "in/",
        "in/../daemon.toml",
        "in/.visiond-uploads",
        "other/a",
        "in/a%00b",
        "x/%FF",
    ):
        assert client.ask("GET", f"/api/images/by-path/{path}").status == 404, path


def test_an_inbox_in_which_too_much_waits_takes_no_more(tmp_path: Path) -> None:
    settings = {
        "page": {"uploads_waiting": 1},
        "stages": {"ocr": {"options": {"latency_per_image_seconds": 1.0}}},
    }
    place = open_place(tmp_path, settings)
    with Daemon(place) as daemon:
        client = Client(place)
        image = client.post(picture(1)).image
        answer = client.post(picture(2))
        assert (answer.status, answer.headers["retry-after"]) == (429, "5")
        assert client.get(f"{image['result']}?wait=60")["status"] == "DONE"
        wait_for(lambda: client.post(picture(2)).status == 202, "room for the next one")
        assert daemon.stop() == 0
    assert list_hidden(place) == []


def test_uploads_are_counted_by_what_became_of_them_also_when_the_page_has_ended(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    pauses = with_pauses({"daemon.server.keeper.PAUSE_SECONDS": 0.05})
    with Daemon(place, environment=pauses) as daemon:

        def count(outcome: str, reason: str = "") -> float:
            return daemon.metric("visiond_uploads_total", outcome=outcome, reason=reason)

        client = Client(place)
        assert client.post(picture(1), "inbox=inbox").content == {
            "problem": "No inbox inbox takes uploads: the one that does has no `name` in daemon.toml, so leave ?inbox= out."
        }
        answers = [client.post(picture(1), "name=a") for _ in range(2)] + [client.post(b"no image")]
        assert [answer.status for answer in answers] == [202, 202, 415]
        wait_for(lambda: count("refused", "format") == 1, "the report of the page")
        assert (count("accepted"), count("repeated"), count("refused", "size")) == (1, 1, 0)
        assert daemon.metric("visiond_upload_bytes_total") == len(picture(1))
        os.kill(page_process(daemon.process.pid), signal.SIGKILL)
        assert client.post(picture(2)).status == 202  # by the next process: the listener stays open
        wait_for(lambda: count("accepted") == 2, "the report of the next page")
        assert count("repeated") == count("refused", "format") == 1


def test_a_disk_without_room_takes_no_uploads(tmp_path: Path) -> None:
    place = open_place(tmp_path, {"page": {"upload_bytes": 1 << 50}})
    with Daemon(place) as daemon:
        client = Client(place)
        with closing(client.connect()) as connection:
            connection.putrequest("POST", "/api/images")
            for name, value in {**client.token, "Content-Length": str(1 << 50)}.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = read_answer(connection)
        assert (answer.status, answer.headers["retry-after"]) == (429, "60")
        place.inbox().rename(tmp_path / "elsewhere")
        place.inbox().mkdir()
        answer = client.post(picture(1))
        assert answer.status == 503, "what is there now is not the inbox"
        assert "is not the folder that it was" in answer.content["problem"]
        assert daemon.stop() == 0
    assert not any(place.inbox().iterdir())


def test_what_a_killed_server_left_is_removed_as_soon_as_nobody_writes_it(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    hidden = place.inbox() / ".visiond-uploads"
    hidden.mkdir()
    with sleeping() as another:
        theirs = f"{another.pid}-{started_at(another.pid)}-0"
        for name in (theirs, "999999999-7", "nonsense"):
            (hidden / name).write_bytes(b"half")
        with Daemon(place):
            Client(place)
            wait_for(lambda: list_hidden(place) == [theirs], "the removal of the others")
            another.kill()
            wait_for(lambda: not list_hidden(place), "the removal of the last one")


def test_without_an_inbox_for_uploads_a_program_is_told_what_to_set(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        file = tmp_path / "state" / "page.token"
        wait_for(file.exists, "the token")
        token = file.read_text().strip()
        status, content, _ = site.ask("/api/images", "POST", "x", Authorization=f"Bearer {token}")
        assert status == 403
        assert "Set uploads = true" in content


def test_what_waits_is_counted_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that takes long, as with millions of images that wait."""
    monkeypatch.setattr("daemon.server.uploads.COUNT_SECONDS", 0.0)
    begun, ended = threading.Event(), threading.Event()
    counts: list[None] = []

    class SlowReader:
        def inboxes(self) -> dict[int, bytes]:
            return {}

        def count_waiting(self) -> dict[int, Any]:
            counts.append(begun.set())
            ended.wait(1.0 if len(counts) > 1 else PATIENCE)
            return {}

    config = parse({"inbox": [{"uploads": True}]}, tmp_path)
    uploads = Uploads(config, cast(Any, SlowReader()), Series())

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(uploads._count, config.inbox[0])
            await anyio.to_thread.run_sync(begun.wait)
            await uploads._count(config.inbox[0])
            ended.set()

    anyio.run(run)
    assert len(counts) == 1


DOCUMENT = Path(__file__).parents[3] / "docs" / "http.md"


def example(beginning: str) -> str:
    """An indented block of the documentation."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", DOCUMENT.read_text(), re.MULTILINE)
    [block] = [block for block in map(textwrap.dedent, blocks) if block.strip().startswith(beginning)]
    return block


def test_the_examples_of_the_documentation_work(tmp_path: Path) -> None:
    place = open_place(tmp_path)
    (tmp_path / "photos").mkdir()
    names = ["0.jpg", "1 ü&100%.jpg", "2;type=a,b.jpg"]
    for number, name in enumerate(names):
        (tmp_path / "photos" / name).write_bytes(picture(number))
    (tmp_path / "photo.jpg").write_bytes(picture(3))
    with Daemon(place):
        client = Client(place)

        def run(*command: str) -> str:
            program = [word.replace("9465", str(client.port)) for word in command]
            return subprocess.run(
                program, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=100
            ).stdout

        printed = run(sys.executable, "-c", example("import json"))
        assert printed.splitlines() == [
            f"photos/{name} DONE {caption_of(picture(number))}" for number, name in enumerate(names)
        ]
        if not shutil.which("curl"):
            pytest.skip("curl is not installed")
        first = example("TOKEN=")
        assert json.loads(run("sh", "-c", first))["images"][0]["path"].startswith("photo~")
        run("sh", "-c", first + example("for file in"))
        for number, name in enumerate(names):
            [image] = json.loads((tmp_path / "photos" / f"{name}.json").read_text())["images"]
            assert image["path"].partition("~")[0] == name.removesuffix(".jpg")
            assert image["record"]["caption"]["text"] == caption_of(picture(number))
    assert len(place.rows("SELECT 1 FROM image")) == 4
