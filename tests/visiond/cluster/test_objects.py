"""How long a store is asked again, and what then counts as the cause."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemon.core import stores as opening
from daemon.core.stores import StoreFailed, store_of
from tests.daemon.stores.server import BROKEN, CUT, FaultyProxy, proxied
from visiond.cluster.reading import objects
from visiond.cluster.reading.fetching import fetch, opened_threads
from visiond.cluster.reading.inputs import ClusterInput
from visiond.cluster.reading.objects import NoStore, StoreAway, again, read_object

pytest.importorskip("obstore", reason="obstore is not installed: make setup")

URL = "s3://bucket/in/a.jpg"
BUSY = StoreFailed("the store answers 503", 503)
REFUSED = StoreFailed("the store answers 403 AccessDenied", 403, "AccessDenied")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the pauses between tries take; nothing else takes time."""
    made = Clock()
    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep))
    return made


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[StoreFailed | None], None]:
    """Sets how the store answers to a listing."""

    def answer(error: StoreFailed | None) -> None:
        def try_listing(url: str) -> None:
            if error:
                raise error

        monkeypatch.setattr(objects, "try_listing", try_listing)

    return answer


@pytest.fixture
def web(tmp_path: Path) -> Iterator[FaultyProxy]:
    """A web server with a.jpg."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    (tmp_path / "a.jpg").write_bytes(b"bytes of an image")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with proxied(server.server_port) as proxy:
            yield proxy
        server.shutdown()
    store_of.cache_clear()


def fail() -> None:
    raise BUSY


def test_a_bucket_is_asked_again_for_three_minutes_before_it_counts_as_away(
    clock: Clock, listing: Callable[[StoreFailed | None], None]
) -> None:
    listing(BUSY)
    with pytest.raises(StoreAway, match="--resume"):
        again(URL, fail)
    assert 180 <= clock.now <= 180 + objects.LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize("error", [None, REFUSED])
def test_if_the_store_answers_to_a_listing_or_refuses_only_that_the_object_is_the_cause(
    error: StoreFailed | None, clock: Clock, listing: Callable[[StoreFailed | None], None]
) -> None:
    listing(error)
    with pytest.raises(StoreFailed, match="503"):
        again(URL, fail)


def test_a_store_that_comes_back_at_the_last_moment_has_its_objects_read(
    clock: Clock, listing: Callable[[StoreFailed | None], None]
) -> None:
    listing(None)

    def work() -> int:
        if clock.now <= 180 + objects.LONGEST_PAUSE_SECONDS:
            raise BUSY
        return 1

    assert again(URL, work) == 1


def test_a_web_server_is_only_waited_for_if_it_has_begun_to_answer(clock: Clock) -> None:
    url = "https://example.com/a.jpg"
    with pytest.raises(StoreFailed):
        again(url, fail)
    assert not clock.now
    with pytest.raises(StoreFailed):
        again(url, fail, is_open=True)
    assert clock.now >= 180


def test_an_answer_of_a_web_server_that_was_cut_is_asked_for_again_and_an_error_is_left_to_obstore(
    web: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, faults = f"http://127.0.0.1:{web.server_port}/a.jpg", iter([CUT])
    web.fault = lambda asked: next(faults, None)
    assert read_object(url) == b"bytes of an image"
    monkeypatch.setattr(opening, "RETRIES", 1)
    monkeypatch.setattr(objects, "store_of", lambda root: store_of(root, impatient=True))
    web.fault = lambda asked: BROKEN
    web.asked.clear()
    with pytest.raises(StoreFailed, match="500"):
        read_object(url)
    assert len(web.asked) == 2


def test_an_environment_without_an_account_ends_the_run_at_once_and_a_wrong_url_is_a_row(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    store_of.cache_clear()
    with opened_threads() as threads:
        with pytest.raises(NoStore, match="Account must be specified; check AZURE_") as error:
            list(fetch([ClusterInput(b"a.jpg", b"az://bucket/a.jpg")], threads))
        assert (error.value.exit_status, clock.now) == (os.EX_CONFIG, 0)
        wrong = [b"http://[a/b.jpg?key=hidden", b"http://a b/c.jpg", b"s3:///a.jpg"]
        found = [image.data for image in fetch([ClusterInput(url, url) for url in wrong], threads)]
    assert all(isinstance(each, OSError) for each in found)
    assert "hidden" not in str(found)
