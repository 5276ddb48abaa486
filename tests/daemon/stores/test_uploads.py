"""The sink that uploads to an object store: with a real store, and a proxy before it that makes faults."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.cli.check import examine
from daemon.config.ignored import Ignored
from daemon.config.loading import parse
from daemon.config.output import StoreSection
from daemon.core.errors import ConfigError
from daemon.core.jobs import JobStatus
from daemon.core.stores import StoreFailed
from daemon.inbox.origin import origin_of
from daemon.inbox.walk import Unread, Walk
from daemon.results.uploads import LONGEST_KEY, StoreSink, fit_key
from daemon.server.control import find_cause
from daemon.system.mounts import FolderAway
from tests.daemon.stores.server import (
    BROKEN,
    BUCKET,
    BUSY,
    CUT,
    EXPIRED,
    REFUSED,
    Asked,
    Bucket,
    Fault,
    FaultyProxy,
)
from tests.daemon_process import Daemon, Place, with_pauses
from tests.makers import make_record

pytestmark = pytest.mark.anyio


def make_sink(inbox: Path, prefix: str, *, images: bool = False) -> StoreSink:
    settings = StoreSection(url=f"s3://{BUCKET}/{prefix}", images=images)
    return StoreSink(settings, {os.fsencode(inbox): "scans"})


async def test_each_image_has_one_key_with_its_last_state(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, inbox: Path
) -> None:
    sink = make_sink(inbox, prefix)
    failed = make_record(inbox, b"x/a.jpg", status=JobStatus.FAILED, reason="truncated", models=[], id=3)
    await sink.append([make_record(inbox, b"b.jpg"), failed, make_record(inbox, b"x/a.jpg", id=4)])
    await sink.append([done := make_record(inbox, b"b.jpg", id=9)])
    await sink.append([done])
    assert sorted(bucket.names(prefix)) == [
        f"{prefix}/results/scans/b.jpg.json",
        f"{prefix}/results/scans/x/a.jpg.json",
    ]
    assert json.loads(bucket.get(f"{prefix}/results/scans/x/a.jpg.json"))["id"] == 4
    assert bucket.get(f"{prefix}/results/scans/b.jpg.json") == done.sidecar


async def test_an_image_is_in_the_bin_that_it_has_now_and_in_no_other(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, inbox: Path
) -> None:
    first = make_record(inbox, b"a.jpg", b"bytes", bin="A")
    records = [first, replace(first, bin="B")]
    await make_sink(inbox, prefix, images=True).append(records[:1])
    assert bucket.get(f"{prefix}/bins/A/scans/a.jpg") == b"bytes"
    await make_sink(inbox, prefix, images=True).append(records[1:])  # of a later run
    assert bucket.names(f"{prefix}/bins") == [f"{prefix}/bins/B/scans/a.jpg"]
    (inbox / "a.jpg").unlink()
    await make_sink(inbox, prefix, images=True).append(records[1:])
    assert len(bucket.names(f"{prefix}/results")) == 1


async def test_an_image_that_comes_back_to_its_bin_is_uploaded_again(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, inbox: Path
) -> None:
    """Though its group has failed each time, with another image."""
    proxy.fault = lambda asked: (400, "Odd") if "results/scans/b.jpg" in asked.path else None
    first, other = (make_record(inbox, name, b"bytes", bin="A") for name in (b"a.jpg", b"b.jpg"))
    sink = make_sink(inbox, prefix, images=True)
    for record in (first, replace(first, bin="B"), first):
        with pytest.raises(StoreFailed):
            await sink.append([record, other])
    proxy.fault = lambda asked: None
    await sink.append([first, other])
    assert bucket.get(f"{prefix}/bins/A/scans/a.jpg") == b"bytes"


async def test_images_of_an_inbox_that_is_away_are_uploaded_when_it_is_back(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, inbox: Path
) -> None:
    """Or when the folder says that they were deleted. At a mount point there is an empty folder."""
    record = make_record(inbox, b"a.jpg", b"bytes", bin="A", seen_at=time.time() + 60)
    sink, away = make_sink(inbox, prefix, images=True), inbox.with_name("away")
    os.rename(inbox, away)
    for is_mount_point in (False, True):
        if is_mount_point:
            os.mkdir(inbox)
        with pytest.raises(FolderAway):
            await sink.append([record])
    assert not bucket.names(prefix)
    os.rmdir(inbox)
    os.rename(away, inbox)
    await sink.append([record])
    assert bucket.get(f"{prefix}/bins/A/scans/a.jpg") == b"bytes"
    os.unlink(record.location)
    await sink.append([replace(record, id=8, seen_at=time.time() - 1.0)])
    assert json.loads(bucket.get(f"{prefix}/results/scans/a.jpg.json"))["id"] == 8


async def test_an_object_of_another_store_is_uploaded_unless_it_has_changed(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, inbox: Path
) -> None:
    bucket.put({f"{prefix}/from/a.jpg": b"one"})
    root = f"s3://{BUCKET}/{prefix}/from".encode()
    origin = origin_of(root)
    [version] = [found[1] for found in origin.files(Walk(root, Ignored([]), True, Unread(root))) if found]
    record = make_record(inbox, inbox_path=root, location=root + b"/a.jpg", version=version, bin="A")
    sink = make_sink(inbox, f"{prefix}/to", images=True)
    await sink.append([record])
    assert bucket.get(f"{prefix}/to/bins/A/inbox-1/a.jpg") == b"one"
    bucket.put({f"{prefix}/from/a.jpg": b"two"})
    await sink.append([replace(record, id=8)])
    assert bucket.get(f"{prefix}/to/bins/A/inbox-1/a.jpg") == b"one"
    assert json.loads(bucket.get(f"{prefix}/to/results/inbox-1/a.jpg.json"))["id"] == 8


@pytest.mark.parametrize("path", [b"a\nb.jpg", b"\xff.jpg", b"x" * LONGEST_KEY + b".jpg", b"a b%+#?.jpg"])
async def test_any_name_of_a_file_can_be_uploaded(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, inbox: Path, path: bytes
) -> None:
    await make_sink(inbox, prefix).append([make_record(inbox, path)])
    [key] = bucket.names(prefix)
    assert key.endswith(".json")
    assert fit_key(path) != fit_key(path + b"x")


async def test_a_sink_fails_if_anything_is_not_uploaded_and_names_no_credentials(
    proxy: FaultyProxy, prefix: str, inbox: Path
) -> None:
    proxy.fault = lambda asked: (403, "AccessDenied") if "/b.jpg" in asked.path else None
    sink = make_sink(inbox, prefix)
    with pytest.raises(StoreFailed, match=r"the store answers 403 AccessDenied$"):
        await sink.append([make_record(inbox, name) for name in (b"a.jpg", b"b.jpg")])


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (None, ""),
        ((403, "AccessDenied"), ""),
        ((403, "AuthorizationPermissionMismatch"), ""),
        ((403, ""), ""),
        ((401, "AccessDenied"), "401"),
        (EXPIRED, "ExpiredToken"),
        ((403, "InvalidAccessKeyId"), "Invalid"),
    ],
)
def test_the_check_of_a_sink_asks_its_store(
    trouble: Fault, said: str, proxy: FaultyProxy, prefix: str, inbox: Path
) -> None:
    proxy.fault = lambda asked: trouble
    problem = make_sink(inbox, prefix).ask_store()
    assert said in problem
    assert bool(problem) == bool(said)


def test_the_check_of_a_sink_names_a_bucket_that_does_not_exist(proxy: FaultyProxy) -> None:
    sink = StoreSink(StoreSection(url="s3://no-such-bucket/out"), {})
    assert "NoSuchBucket" in sink.ask_store()


def test_only_the_check_waits_for_a_store(proxy: FaultyProxy, prefix: str, tmp_path: Path) -> None:
    """`visiond status` gives up after two seconds, and would call a slow store a dead mount."""
    asks: list[Asked] = []

    def note(asked: Asked) -> None:
        asks.append(asked)

    proxy.fault = note
    url = f"s3://{BUCKET}/{prefix}"
    config = parse({"output": {"sinks": ["store"], "store": {"url": url}}}, tmp_path)
    assert find_cause(config, "store") == ""
    assert asks == []
    assert [finding.text for finding in examine(config, None, quick=True) if "sink" in finding.text] == [
        "sink store: can take records."
    ]
    assert len(asks) == 1


async def test_a_store_that_takes_few_requests_at_a_time_gets_all_in_the_end(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, inbox: Path
) -> None:
    numbers, tries = itertools.count(), 0
    proxy.fault = lambda asked: None if next(numbers) % 8 == 7 else (400, "Odd")
    sink, records = make_sink(inbox, prefix), [make_record(inbox, b"%d.jpg" % number) for number in range(20)]
    while len(bucket.names(prefix)) < len(records):
        with contextlib.suppress(StoreFailed):
            await sink.append(records)
        assert (tries := tries + 1) < 100


def test_images_must_stay_where_they_are_to_be_uploaded(tmp_path: Path) -> None:
    output = {"sinks": ["store"], "store": {"images": True}}
    for more in ({"inbox": [{"on_success": "delete"}]}, {"output": output | {"bins": "move"}}):
        with pytest.raises(ConfigError, match=r"output\.store\.images: the sink uploads images after"):
            parse({"output": output} | more, tmp_path)


@pytest.mark.parametrize("trouble", [REFUSED, EXPIRED])
def test_an_outage_or_credentials_that_expire_hold_up_nothing_and_lose_nothing(
    trouble: Fault, tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    url = f"s3://{BUCKET}/{prefix}"
    output = {"sinks": ["store"], "store": {"url": url, "images": True}}
    place = Place(tmp_path, {"inbox": [{"settle_seconds": 0.0}], "output": output})
    proxy.fault = lambda asked: trouble
    environment = proxy.environment | with_pauses(
        {"daemon.results.outbox.PAUSE_SECONDS": 0.1, "daemon.results.outbox.LONGEST_PAUSE_SECONDS": 0.5},
    )
    with Daemon(place, environment=environment) as daemon:
        place.drop_many(range(40))
        daemon.wait_idle(40)
        status = daemon.wait_until(lambda status: status["sinks"][0]["problem"], "the outage")
        assert status["sinks"][0]["behind"] == 40
        assert daemon.metric("visiond_sink_records_behind", sink="store") == 40
        daemon.wait_event("sink does not accept records; they are kept and tried again")
        assert len([*daemon.events("sink does not accept records; they are kept and tried again")]) == 1
        daemon.kill()
    faults = itertools.cycle([BUSY, None, CUT, BROKEN, None, REFUSED, None, None])
    proxy.fault = lambda asked: next(faults)
    with Daemon(place, environment=environment) as daemon:
        place.drop_many(range(40, 60))
        daemon.wait_until(lambda s: s["done"] == 60 and not s["sinks"][0]["behind"], "the uploads")
        assert "only-for-tests" not in daemon.log_text()
        assert daemon.stop() == 0
    assert len(bucket.names(f"{prefix}/results")) == 60
    bins = dict(place.rows("SELECT path, bin FROM image"))
    keys = {key.rpartition("/")[2]: key for key in bucket.names(f"{prefix}/bins")}
    assert keys == {path.decode(): f"{prefix}/bins/{bins[path]}/{path.decode()}" for path in bins}
    for path, key in keys.items():
        assert bucket.get(key) == (tmp_path / "inbox" / path).read_bytes()
        assert bucket.get(f"{prefix}/results/{path}.json") == (tmp_path / f"results/{path}.json").read_bytes()
