"""Programs ask a real daemon for images, over real sockets; its description is held against it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.server.client import Client, open_place
from tests.daemon.server.site import Site
from tests.daemon_process import Daemon, Place, picture, wait_for

EXAMPLES = 15  # of each address


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    opened = open_place(tmp_path_factory.mktemp("api"))
    with Daemon(opened) as daemon:
        opened.drop_many(range(7))
        opened.drop("bad.jpg", b"\xff\xd8\xff")
        daemon.wait_idle(8)
        yield opened


@pytest.fixture
def client(place: Place) -> Client:
    return Client(place)


def test_a_program_that_goes_on_where_it_was_gets_each_image_once_in_the_order_of_publication(
    place: Place, client: Client
) -> None:
    after, seen = 0, list[dict[str, Any]]()
    while (answer := client.get(f"/api/images?after={after}&limit=3"))["images"]:
        assert len(answer["images"]) <= 3
        assert answer["more"] == (len(seen) + len(answer["images"]) < 8)
        seen += answer["images"]
        after = answer["after"]
    assert len({image["id"] for image in seen}) == len(seen) == 8
    assert [image["number"] for image in seen] == sorted(image["number"] for image in seen)
    assert {image["status"] for image in seen} == {"DONE", "FAILED"}
    assert [image["record"] for image in seen if image["status"] == "DONE"] == [
        place.sidecar(image["path"]) for image in seen if image["status"] == "DONE"
    ]
    [bad] = [image for image in seen if image["status"] == "FAILED"]
    assert (bad["path"], bad["record"], bad["reason"]) == ("bad.jpg", None, "truncated")
    assert client.get(f"/api/images?after={after}")["after"] == after
    client.post(picture(7), "wait=30")
    wait_for(lambda: len(client.get(f"/api/images?after={after}")["images"]) == 1, "the new one")


def test_records_may_be_left_out(client: Client) -> None:
    for address in ("/api/images?records=false&limit=2", "/api/search?records=false&limit=2"):
        images = client.get(address)["images"]
        assert len(images) == 2
        assert not any("record" in image for image in images)


def test_a_search_finds_what_the_page_finds_and_names_what_follows(client: Client) -> None:
    found = client.get("/api/search?q=state:done&limit=4")
    rest = client.get(found["following"])
    assert len(found["images"]) == 4
    assert rest["following"] is None
    ids = [image["id"] for image in found["images"] + rest["images"]]
    assert sorted(ids, reverse=True) == ids, "the newest first"
    [bad] = client.get("/api/search?state=failed")["images"]
    assert bad["path"] == "bad.jpg"
    assert bad["found_by"] is None
    assert client.get("/api/search?q=name:bad.jpg")["images"] == [bad | {"found_by": "words"}]


def test_what_disagrees_is_with_each_image_in_that_order(client: Client) -> None:
    images = client.get("/api/search?by=disagreement:scores:ocr&limit=2")["images"]
    assert [{**each["disagreement"], "score": 0} for each in images] == [
        {"signal": "scores", "stage": "ocr", "score": 0}
    ] * 2
    assert images[0]["disagreement"]["score"] >= images[1]["disagreement"]["score"] > 0
    assert client.get("/api/search?limit=1")["images"][0]["disagreement"] is None


def test_the_status_names_no_files(client: Client) -> None:
    status = client.get("/api/status")
    assert status["running"]
    assert (status["unread"], status["log"]) == ([], [])


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/api/images?after=x", 400),
        ("/api/images?state=failed", 400),
        ("/api/images/1?wait=1", 400),
        ("/api/images/by-path/bad.jpg?limit=1", 400),
        ("/api/status?json=1", 400),
        ("/api/openapi.json?x", 400),
        ("/api/search?state=broken", 400),
        ("/api/images?after=99999", 409),
        ("/api/images?limit=0", 400),
        ("/api/images?limit=257", 400),
        ("/api/images?records=1", 400),
        ("/api/images/999", 404),
        ("/api/images/x", 404),
        ("/api/images/by-path/x?wait=61", 400),
        ("/api/images/by-path/x?wait=nan", 400),
        ("/api/search?q=foo:bar", 400),
        ("/api/search?cursor=x", 400),
        ("/api/search?by=disagreement:dogs", 400),
        (f"/api/search?q={'w+' * 99}", 400),
        ("/api/nothing", 404),
        ("/api", 404),
    ],
)
def test_what_cannot_be_answered_is_a_problem_as_json(client: Client, address: str, status: int) -> None:
    answer = client.ask("GET", address)
    assert (answer.status, list(answer.content)) == (status, ["problem"])


def test_a_parameter_that_is_misspelled_is_refused_with_the_names_that_there_are(client: Client) -> None:
    names = "q, by, bin, inbox, tag, object, state, after, before, group, cursor, limit, records"
    assert client.ask("GET", "/api/search?stat=FAILED").content == {
        "problem": f"/api/search has no parameter stat: those that it takes are {names}."
    }
    refused = client.post(picture(1), "filename=a.jpg")
    assert (refused.status, refused.content["problem"].partition(": ")[2]) == (
        400,
        "those that it takes are name, inbox, wait.",
    )
    assert client.ask("GET", "/api/status?json=1").content["problem"].endswith("json: it takes none.")


def test_a_search_in_a_bin_that_there_is_not_is_refused_with_those_that_there_are(client: Client) -> None:
    refused = client.ask("GET", "/api/search?bin=Z")
    assert (refused.status, refused.content["problem"]) == (404, "There is no bin Z; bins are A, B, C.")
    for known in ("B", "C"):  # also an empty one
        assert client.ask("GET", f"/api/search?bin={known}&q=no+such+words&by=words").status == 200


def test_a_state_may_be_written_as_in_the_ledger(client: Client) -> None:
    for state in ("FAILED", "Failed", "failed"):
        [bad] = client.get(f"/api/search?state={state}")["images"]
        assert bad["path"] == "bad.jpg"


def test_another_method_is_answered_with_those_that_there_are_and_with_how_to_upload(client: Client) -> None:
    refused = client.ask("PUT", "/api/images", picture(1))
    assert (refused.status, {*refused.headers["allow"].split(", ")}) == (405, {"GET", "HEAD", "POST"})
    assert refused.content["problem"].startswith(
        "/api/images takes GET or HEAD or POST, not PUT. Upload by `curl"
    )
    assert "Upload by" in client.ask("PUT", "/api/images/photo.jpg", picture(1)).content["problem"]
    assert client.ask("DELETE", "/api/images/1").content == {
        "problem": "/api/images/1 takes GET or HEAD, not DELETE."
    }
    assert client.ask("GET", "/api/nothing").content == {"problem": "There is no address /api/nothing."}


def test_a_damaged_image_has_no_record_and_hides_no_other_one(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        for number in range(3):
            site.place.add(f"{number}.jpg", "word")
        site.place.damage(2)
        assert json.loads(site.read("/api/images/2"))["record"] is None
        listed = json.loads(site.read("/api/images"))
        assert [image["id"] for image in listed["images"]] == [1, 3]


def test_the_description_is_true_of_the_server(place: Place, client: Client, tmp_path: Path) -> None:
    """Requests that it allows, and others, are made up from it. Of bytes it cannot say whether they are an image."""
    accepted = ["2xx", "401", "403", "404", "409", "415", "429"]
    (tmp_path / "schemathesis.toml").write_text(
        f"[checks.positive_data_acceptance]\nexpected-statuses = {json.dumps(accepted)}\n"
    )
    found = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "schemathesis.cli",
                "run",
                f"http://127.0.0.1:{client.port}/api/openapi.json",
            ),
            *("--header", f"Authorization: {client.token['Authorization']}", "--checks", "all"),
            *("--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
