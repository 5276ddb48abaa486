"""Inboxes, uploads and backups in the stores of Azure and Google, with emulators of both."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.config.loading import parse
from daemon.core import stores as opening
from daemon.maintenance.backups import upload_backups
from daemon.results.uploads import StoreSink
from tests.daemon.stores.clouds import Azure, Cloud, Google, emulated
from tests.daemon.stores.server import BUCKET, BUSY, CUT, REFUSED, FaultyProxy, proxied
from tests.daemon_process import Daemon, Place, picture, with_pauses
from tests.makers import make_record
from visiond.cluster.places import open_place

SHORT = {"daemon.pipeline.schedule.REST_SECONDS": 0.1, "daemon.core.stores.RETRIES": 1}  # pauses
ODD = ("a b%20+#?&=.ppm", "ü/漢字.ppm")


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    yield from started(Azure, tmp_path_factory)


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    yield from started(Google, tmp_path_factory)


def started(kind: type[Cloud], folders: pytest.TempPathFactory) -> Iterator[Cloud]:
    pytest.importorskip("obstore", reason="obstore is not installed: make setup")
    if not kind.find():
        pytest.skip(f"the emulator of {kind.__name__} is not installed: make tools")
    with emulated(kind, folders.mktemp("cloud")) as cloud:
        yield cloud


@pytest.fixture(params=["azure", "google"])
def cloud(request: pytest.FixtureRequest) -> Cloud:
    opened: Cloud = request.getfixturevalue(request.param)
    return opened


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """This process's way to the store, with faults."""
    name = "cloud" if "cloud" in request.fixturenames else "azure"
    cloud: Cloud = request.getfixturevalue(name)
    with proxied(cloud.port) as proxy:
        for key, value in cloud.environment(proxy.server_port).items():
            monkeypatch.setenv(key, value)
        opening.store_of.cache_clear()
        yield proxy
        opening.store_of.cache_clear()


def put(cloud: Cloud, prefix: str, objects: dict[str, bytes]) -> None:
    for name, data in objects.items():
        cloud.put(f"{prefix}/{name}", data)


def assert_kept(place: Place, objects: dict[str, bytes]) -> None:
    rows = place.rows("SELECT path, digest FROM image WHERE status = 1")
    assert sorted(rows) == sorted(
        (name.encode(), hashlib.sha256(data).digest()) for name, data in objects.items()
    )


def test_each_object_gets_one_result_and_a_changed_one_another(
    tmp_path: Path, cloud: Cloud, way: FaultyProxy, prefix: str
) -> None:
    objects = {name: picture(number) for number, name in enumerate((*ODD, "c.ppm"))}
    put(cloud, prefix, objects)
    place = Place(tmp_path, {"inbox": [{"url": f"{cloud.scheme}://{BUCKET}/{prefix}"}]})
    assert place.run_once().returncode == 0
    assert_kept(place, objects)
    asked = len(way.asked)
    put(cloud, prefix, {"c.ppm": (changed := picture(9))})
    assert place.run_once().returncode == 0
    assert len(way.asked) == asked + 2  # the listing, and the object that has changed
    rows = place.rows("SELECT digest FROM image WHERE status = 1 AND path = ?", b"c.ppm")
    assert (hashlib.sha256(changed).digest(),) in rows


def test_an_outage_and_a_listing_that_begins_anew_lose_and_double_nothing(
    tmp_path: Path, cloud: Cloud, way: FaultyProxy, prefix: str
) -> None:
    objects = {f"{number % 3}/{number:03}.ppm": picture(number) for number in range(40)}
    put(cloud, prefix, objects)
    faults = itertools.cycle([BUSY, None, CUT, None, REFUSED, None, None])
    way.fault = lambda asked: next(faults)
    url = f"{cloud.scheme}://{BUCKET}/{prefix}"
    place = Place(tmp_path, {"inbox": [{"url": url}], "pipeline": {"rescan_seconds": 0.1}})
    with Daemon(place, environment=with_pauses(SHORT)) as daemon:
        daemon.wait_until(lambda status: status["done"] == len(objects), "all results")
        way.fault = lambda asked: REFUSED
        daemon.wait_until(lambda status: status["obstacles"], "the outage")
        way.fault = lambda asked: (403, "AuthenticationFailed")
        daemon.wait_until(lambda status: "403" in str(status["obstacles"]), "wrong credentials")
        way.fault = lambda asked: None
        daemon.wait_until(lambda status: not status["obstacles"], "the end of the outage")
        assert daemon.stop() == 0
    assert_kept(place, objects)
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and cloud.secret.encode() in f.read_bytes()]


@pytest.mark.anyio
async def test_azure_takes_results_images_and_backups(
    tmp_path: Path, azure: Cloud, way: FaultyProxy, prefix: str
) -> None:
    import obstore

    root = f"az://{BUCKET}"
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    settings = {"sinks": ["store"], "store": {"url": f"{root}/{prefix}", "images": True}}
    sink = StoreSink(parse({"output": settings}, tmp_path).output.store, {bytes(inbox): "in"})
    await sink.append([make_record(inbox, b"a.jpg", b"bytes", bin="A")])
    # a.jpg leaves a bin that b.jpg never was in: Azure calls that an error.
    await sink.append([make_record(inbox, name, b"bytes", bin="B") for name in (b"b.jpg", b"a.jpg")])
    backups = tmp_path / "backups"
    backups.mkdir()
    for day in (1, 2, 3):
        (backups / f"ledger-2026-01-0{day}T020000Z.sqlite").write_bytes(b"SQLite")
        upload_backups(backups, f"{root}/{prefix}/backups", 2, lambda: False)
    pages = obstore.list(opening.store_of(root), prefix)
    assert sorted(each["path"].removeprefix(f"{prefix}/") for page in pages for each in page) == [
        "backups/ledger-2026-01-02T020000Z.sqlite",
        "backups/ledger-2026-01-03T020000Z.sqlite",
        "bins/B/in/a.jpg",
        "bins/B/in/b.jpg",
        "results/in/a.jpg.json",
        "results/in/b.jpg.json",
    ]


def test_azure_creates_a_part_only_once(azure: Cloud, way: FaultyProxy, prefix: str) -> None:
    place = open_place(f"az://{BUCKET}/{prefix}")
    assert place.write_whole("part-1.parquet", b"first")
    assert not place.write_whole("part-1.parquet", b"second")
    assert place.read("part-1.parquet") == b"first"
    assert [*place.names("")] == ["part-1.parquet"]
