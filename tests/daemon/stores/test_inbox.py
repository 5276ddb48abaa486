"""An inbox that is a prefix of an object store: with a real store, and a proxy before it that makes faults."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from daemon.config.ignored import Ignored
from daemon.core.jobs import GONE, Extent, JobStatus, Read, Version
from daemon.core.slab import Slab
from daemon.inbox.bucket import BucketOrigin, is_version, version_of
from daemon.inbox.origin import origin_of
from daemon.inbox.walk import Unread, Walk
from daemon.server.page.pictures import NoPicture, read_source
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
from tests.daemon_process import PATIENCE, Daemon, Place, picture, wait_for, with_pauses
from tests.makers import make_job, make_record

SHORT = {"daemon.pipeline.schedule.REST_SECONDS": 0.1, "daemon.core.stores.RETRIES": 1}  # pauses
META = {"size": 3, "e_tag": '"x"', "version": None, "last_modified": datetime.now(UTC)}
IGNORED = Ignored([".*", "*.tmp"])


@pytest.fixture
def slab() -> Iterator[Slab]:
    opened = Slab(1 << 20)
    yield opened
    opened.close()


@pytest.fixture
def origin(proxy: FaultyProxy, prefix: str) -> BucketOrigin:
    return BucketOrigin(f"s3://{BUCKET}/{prefix}")


def images(count: int) -> dict[str, bytes]:
    return {f"{number % 3}/{number:05d}.ppm": picture(number) for number in range(count)}


def put(bucket: Bucket, prefix: str, objects: dict[str, bytes]) -> None:
    bucket.put({f"{prefix}/{name}": data for name, data in objects.items()})


def make_place(folder: Path, prefix: str, *others: dict[str, object]) -> Place:
    url = f"s3://{BUCKET}/{prefix}"
    return Place(folder, {"inbox": [{"url": url, "name": "store"} if others else {"url": url}, *others]})


def assert_kept(place: Place, objects: dict[str, bytes], name: str = "") -> None:
    """Each object has exactly one row, which is DONE and published, and one sidecar, of its own bytes."""
    rows = place.rows(
        "SELECT image.path, status, digest, emitted FROM image JOIN inbox ON inbox.id = image.inbox "
        "WHERE substr(inbox.path, 1, 5) = ?",
        b"s3://",
    )
    done = {(path.encode(), 1, hashlib.sha256(data).digest(), 1) for path, data in objects.items()}
    assert sorted(rows) == sorted(done)
    for path, data in objects.items():
        source = place.sidecar(path, name)["source"]
        assert source["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert len([*(place.folder / "results" / name).rglob("*.json")]) == len(objects)


def listed(
    origin: BucketOrigin, after: bytes = b"", longest: int = 4000
) -> tuple[dict[bytes, Version], list[object]]:
    """What a listing finds, and its answers about the inbox."""
    answers: list[object] = []
    unread = Unread(b"", logs=False)
    walk = Walk(b"", IGNORED, True, unread, longest, answer=answers.append, after=after)
    found = {entry[0]: entry[1] for entry in origin.files(walk) if entry}
    return found, answers


def read(origin: BucketOrigin, slab: Slab, found: dict[bytes, Version]) -> dict[bytes, Read]:
    """By path, what came of reading it."""
    jobs = [
        make_job(path, id=number, version=version) for number, (path, version) in enumerate(found.items())
    ]
    read = origin.read([(job, slab.try_reserve(job.version.size) or Extent(0, 0)) for job in jobs], slab)
    return {job.path: read[job.id] for job in jobs}


def digest_of(data: bytes) -> Read:
    return Read(hashlib.sha256(data).digest())


# Listing and reading


def test_keys_with_odd_characters_are_found_and_read_and_ignored_names_are_not(
    origin: BucketOrigin, bucket: Bucket, prefix: str, slab: Slab
) -> None:
    names = ["a b%20+#?&=.jpg", "ü/漢字.jpg", "empty.jpg", ".hidden/x.jpg", "x.tmp", "folder"]
    put(bucket, prefix, {name: b"" if name in ("empty.jpg", "folder") else name.encode() for name in names})
    found, answers = listed(origin)
    assert {path.decode() for path in found} == {*names[:3]}
    expected = {path: digest_of(b"" if path == b"empty.jpg" else path) for path in found}
    assert read(origin, slab, found) == expected
    assert answers == [None]


def test_an_object_that_was_replaced_or_deleted_after_the_listing_is_gone_and_the_new_one_is_found(
    origin: BucketOrigin, bucket: Bucket, prefix: str, slab: Slab
) -> None:
    put(bucket, prefix, {"same.jpg": b"same", "new.jpg": b"one", "gone.jpg": b"gone"})
    found, _ = listed(origin)
    put(bucket, prefix, {"new.jpg": b"two", "same.jpg": b"same"})
    bucket.delete(f"{prefix}/gone.jpg")
    assert read(origin, slab, found) == {
        b"same.jpg": digest_of(b"same"),
        b"new.jpg": GONE,
        b"gone.jpg": GONE,
    }
    again, _ = listed(origin)
    assert again.keys() == {b"same.jpg", b"new.jpg"}
    assert again[b"same.jpg"] == found[b"same.jpg"]
    assert again[b"new.jpg"] != found[b"new.jpg"]
    assert read(origin, slab, {b"new.jpg": again[b"new.jpg"]}) == {b"new.jpg": digest_of(b"two")}


def test_a_read_that_fails_leaves_nothing_open(
    origin: BucketOrigin, bucket: Bucket, prefix: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the garbage collection, that is; else the slab could not be closed at the end."""
    monkeypatch.setattr("daemon.core.stores.LONGEST_BACKOFF_SECONDS", 0.1)
    put(bucket, prefix, {"a.jpg": b"x" * 100_000})
    found, _ = listed(origin)
    proxy.fault = lambda asked: CUT if not asked.is_list else None
    slab = Slab(1 << 20)
    gc.disable()
    try:
        assert read(origin, slab, found)[b"a.jpg"].failure
        slab.close()
    finally:
        gc.enable()


def test_the_page_gets_an_object_only_in_the_version_that_has_the_result(
    origin: BucketOrigin, bucket: Bucket, prefix: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    put(bucket, prefix, {"a.jpg": b"one"})
    [version] = listed(origin)[0].values()
    root = f"s3://{BUCKET}/{prefix}".encode()
    record = make_record(tmp_path, inbox_path=root, location=root + b"/a.jpg", version=version)
    assert read_source(record) == b"one"
    put(bucket, prefix, {"a.jpg": b"two"})
    with pytest.raises(NoPicture, match="the file has changed since"):
        read_source(record)
    bucket.delete(f"{prefix}/a.jpg")
    with pytest.raises(NoPicture, match="the file is no longer there"):
        read_source(record)
    proxy.fault = lambda asked: (403, "AccessDenied")
    with pytest.raises(NoPicture, match="the store answers 403 AccessDenied"):
        read_source(record)


def test_a_pattern_with_a_path_is_compared_with_the_key_behind_the_prefix() -> None:
    origin, walk = (
        BucketOrigin("s3://bucket/in"),
        Walk(b"", Ignored(["private/*"]), True, Unread(b"", logs=False)),
    )
    keys = ["in/private/a.jpg", "in/private/b/c.jpg", "in/x/private/a.jpg", "in/private.jpg"]
    listed = [origin._judge(META | {"path": key}, walk) for key in keys]
    assert [found[0] for found in listed if found] == [b"x/private/a.jpg", b"private.jpg"]


def test_a_key_that_would_lead_out_of_the_results_folder_is_left_out(prefix: str) -> None:
    origin, unread = BucketOrigin("s3://bucket/in"), Unread(b"", logs=False)
    walk = Walk(b"", Ignored([]), True, unread, 20)
    keys = ["in/../../etc/x.jpg", "in/a//x.jpg", "in/./x.jpg", f"in/{'x' * 20}.jpg", "in/fine.jpg"]
    listed = [origin._judge(META | {"path": key}, walk) for key in keys]
    assert [entry and entry[0] for entry in listed] == [None, None, None, None, b"fine.jpg"]
    assert len(unread) == 4


def test_the_version_of_an_object_is_its_etag_and_size_and_a_number_where_the_listing_has_one() -> None:
    assert version_of(META | {"e_tag": 'W/"x"'}) == version_of(META)
    assert version_of(META | {"e_tag": "W/x="}) == version_of(
        META | {"e_tag": '"W/x="'}
    )  # base64, not a weak one
    others = [META | {"size": 4}, META | {"e_tag": '"y"'}, META | {"version": "1"}]
    assert len({version_of(each) for each in [META, *others]}) == 4
    assert is_version(version_of(META), META | {"version": "1"})  # S3 lists none
    assert not any(is_version(version_of(each), META) for each in others)


def test_a_listing_is_read_by_page_and_goes_on_behind_a_path(
    origin: BucketOrigin, bucket: Bucket, prefix: str, proxy: FaultyProxy
) -> None:
    names = [f"{number:05d}.jpg" for number in range(1100)]
    put(bucket, prefix, dict.fromkeys(names, b"x"))
    walk = Walk(b"", IGNORED, True, Unread(b"", logs=False))
    first = next(origin.files(walk))
    assert first
    assert first[0] == b"00000.jpg"
    assert len(proxy.asked) == 1
    found, _ = listed(origin, after=b"01050.jpg")
    assert [path.decode() for path in found] == names[1051:]


# The daemon


def test_each_object_gets_one_result_and_a_changed_one_another(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    objects = images(70)
    put(bucket, prefix, objects)
    place = make_place(tmp_path, prefix)
    assert place.run_once().returncode == 0
    assert_kept(place, objects)
    requests = len(proxy.asked)
    assert place.run_once().returncode == 0
    assert len(proxy.asked) == requests + 1  # the listing
    put(bucket, prefix, {"0/00000.ppm": picture(1000)})
    assert place.run_once().returncode == 0
    assert (
        place.sidecar("0/00000.ppm")["source"]["digest"]
        == f"sha256:{hashlib.sha256(picture(1000)).hexdigest()}"
    )
    assert place.rows("SELECT COUNT(*) FROM image WHERE status = 1") == [(71,)]
    shown = place.command("show", f"s3://{BUCKET}/{prefix}/0/00000.ppm").stdout
    assert "id 71" in shown
    queued = place.command("redo", "71")
    assert queued.returncode == 0, queued.stderr
    bucket.delete(f"{prefix}/0/00000.ppm")  # it keeps its result
    assert place.run_once().returncode == 0
    assert place.rows("SELECT COUNT(*) FROM image WHERE status = 1") == [(71,)]


def test_throttling_errors_and_cuts_lose_and_double_nothing(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    objects = images(150)
    put(bucket, prefix, objects)
    faults = itertools.cycle([BUSY, None, CUT, BROKEN, None, REFUSED, None])
    proxy.fault = lambda asked: next(faults)
    place = make_place(tmp_path, prefix)
    environment = with_pauses({"daemon.pipeline.schedule.REST_SECONDS": 0.1})
    with Daemon(place, environment=proxy.environment | environment) as daemon:
        daemon.wait_until(lambda status: status["done"] == len(objects), "all results")
        assert daemon.stop() == 0
    assert {*proxy.made} == {BUSY, CUT, BROKEN, REFUSED}
    assert_kept(place, objects)


def test_a_store_that_is_away_is_reported_once_and_holds_up_no_other_inbox(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    objects = images(30)
    put(bucket, prefix, objects)
    place = make_place(tmp_path, prefix, {"name": "folder", "settle_seconds": 0})
    proxy.fault = lambda asked: None if asked.is_list else REFUSED
    environment = with_pauses(SHORT)
    with Daemon(place, environment=proxy.environment | environment) as daemon:
        daemon.wait_until(
            lambda status: status["pending"] == len(objects) and status["obstacles"], "the outage"
        )
        for number, fault in enumerate((BUSY, EXPIRED, REFUSED)):
            made = len(proxy.made)
            # Credentials that have expired refuse everything, and throttling perhaps only reading.
            proxy.fault = lambda asked, fault=fault: None if asked.is_list and fault == BUSY else fault  # type: ignore[misc]
            place.drop_many(range(10 * number, 10 * number + 10), "folder")
            daemon.wait_until(
                lambda status, ended=10 * (number + 1): status["done"] == ended, "the other inbox"
            )
            wait_for(lambda made=made: len(proxy.made) > made + 3, "further tries")
        status = daemon.status()
        assert all(BUCKET in obstacle for obstacle in status["obstacles"])
        assert status["failed"] == 0
        assert daemon.metric("visiond_inbox_away", inbox="store") == 1
        assert daemon.metric("visiond_inbox_away", inbox="folder") == 0
        daemon.wait_event("images of an inbox cannot be read; they wait")
        assert len([*daemon.events("images of an inbox cannot be read; they wait")]) == 1
        proxy.fault = lambda asked: None
        daemon.wait_until(lambda s: s["done"] == len(objects) + 30 and not s["obstacles"], "the objects")
        assert not [*daemon.events("image not done")]
        assert daemon.stop() == 0
    assert_kept(place, objects, "store")
    assert place.rows("SELECT MAX(attempts) FROM image") == [(1,)]
    assert not [
        file for file in tmp_path.rglob("*") if file.is_file() and b"only-for-tests" in file.read_bytes()
    ]


def test_only_the_origin_that_waits_for_a_store_counts_its_silence(
    bucket: Bucket, proxy: FaultyProxy, prefix: str, slab: Slab
) -> None:
    put(bucket, prefix, {"a.jpg": b"bytes"})
    first, second = [origin_of(f"s3://{BUCKET}/{prefix}".encode()) for _ in range(2)]
    assert isinstance(first, BucketOrigin)
    (found, _), silences = listed(first), list[tuple[float, float]]()
    proxy.fault = lambda asked: silences.append((first.silent_seconds(), second.silent_seconds()))
    assert read(first, slab, found) == {b"a.jpg": digest_of(b"bytes")}
    [(of_first, of_second)] = silences
    assert of_first > 0 == of_second


def test_a_store_that_does_not_answer_holds_up_no_other_inbox(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    objects, answers = images(350), threading.Event()  # more than all groups that are read at once
    put(bucket, prefix, objects)
    place = make_place(tmp_path, prefix, {"name": "folder", "settle_seconds": 0})

    def hang(asked: Asked) -> Fault:
        if not asked.is_list:
            answers.wait(PATIENCE)
        return None

    proxy.fault = hang
    with Daemon(
        place, environment=proxy.environment | with_pauses({"daemon.pipeline.executor.SILENT_SECONDS": 0.5})
    ) as daemon:
        daemon.wait_until(
            lambda status: status["pending"] == len(objects) and status["obstacles"], "the outage"
        )
        [obstacle] = daemon.status()["obstacles"]
        assert "the store has not answered for" in obstacle
        place.drop_many(range(20), "folder")
        daemon.wait_until(lambda status: status["done"] == 20, "the other inbox", PATIENCE / 4)
        answers.set()
        daemon.wait_until(lambda status: status["done"] == len(objects) + 20, "the objects")
        assert daemon.stop() == 0
    assert_kept(place, objects, "store")
    assert place.rows("SELECT MAX(attempts) FROM image") == [(1,)]


def test_credentials_of_a_container_are_renewed_and_waited_for(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = images(10)
    put(bucket, prefix, objects)
    place = make_place(tmp_path, prefix)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with Daemon(place, environment=proxy.give_credentials(tmp_path) | with_pauses(SHORT)) as daemon:
        daemon.wait_idle(len(objects))
        proxy.grants = False
        daemon.wait_until(lambda status: status["obstacles"], "the outage")
        put(bucket, prefix, {"new.ppm": picture(77)})
        proxy.grants = True
        daemon.wait_idle(len(objects) + 1)
        assert not daemon.status()["obstacles"]
        assert daemon.stop() == 0
    assert_kept(place, objects | {"new.ppm": picture(77)})


def test_an_object_that_cannot_be_read_fails_alone(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    objects = images(20)
    put(bucket, prefix, objects)
    proxy.fault = lambda asked: (403, "AccessDenied") if "/00007.ppm" in asked.path else None
    place = make_place(tmp_path, prefix)
    assert place.run_once().returncode == 1
    assert place.rows("SELECT path, reason FROM image WHERE status = ?", JobStatus.FAILED) == [
        (b"1/00007.ppm", "unreadable")
    ]
    reason = (tmp_path / "failed" / "1" / "00007.ppm.json").read_text()
    assert "403 AccessDenied" in reason
    proxy.fault = lambda asked: None
    assert place.command("retry", "--all").returncode == 0
    assert place.run_once().returncode == 0
    assert_kept(place, objects)


def test_a_scan_that_was_stopped_goes_on_where_it_was_also_after_a_restart(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    ignored = {f"{number:05d}.tmp": b"x" for number in range(990)}
    objects = {f"x{number:02d}.ppm": picture(number) for number in range(20)}
    put(bucket, prefix, ignored | objects)  # half of the images are on the second page
    proxy.fault = lambda asked: BROKEN if "continuation-token" in asked.path else None
    place = make_place(tmp_path, prefix)
    pauses = {"daemon.inbox.watcher.MARKER_SECONDS": -1.0}
    environment = proxy.environment | with_pauses(pauses)
    # The next scan would go on there in the same daemon, perhaps before its worker is ready.
    place.configure({"pipeline": {"rescan_seconds": 3600.0}})
    with Daemon(place, environment=environment) as daemon:
        daemon.wait_until(lambda status: status["done"] == 10 and status["obstacles"], "the first page")
        daemon.kill()
    assert place.rows("SELECT marker FROM inbox") == [(b"x09.ppm",)]
    place.configure({"pipeline": {"rescan_seconds": 1.0}})
    proxy.fault = lambda asked: None
    proxy.asked.clear()
    with Daemon(place, environment=environment) as daemon:
        daemon.wait_until(lambda status: status["done"] == 20, "the second page")
        lists = [asked.path for asked in proxy.asked if asked.is_list]
        assert "start-after" in lists[0]
        assert "x09.ppm" in lists[0]
        # New objects may be before the marker.
        put(bucket, prefix, {"a.ppm": picture(7)})
        daemon.wait_until(lambda status: status["done"] == 21, "the new object")
        assert daemon.stop() == 0
    assert_kept(place, objects | {"a.ppm": picture(7)})
    assert place.rows("SELECT marker FROM inbox") == [(b"",)]


def test_a_listing_that_changes_while_it_is_read_loses_and_doubles_nothing(
    tmp_path: Path, bucket: Bucket, proxy: FaultyProxy, prefix: str
) -> None:
    fillers = {f"m{number:05d}.tmp": b"x" for number in range(990)}  # so that there is a second page
    first = {f"a{number}.ppm": picture(number) for number in range(5)}
    second = {f"x{number}.ppm": picture(10 + number) for number in range(20)}
    put(bucket, prefix, fillers | first | second)
    new = {"a0.ppm": picture(50), "x19.ppm": picture(51), "a00.ppm": picture(52), "z.ppm": picture(53)}
    changed = threading.Event()

    def change(asked: Asked) -> Fault:
        if "continuation-token" in asked.path and not changed.is_set():
            changed.set()
            put(bucket, prefix, new)  # on both pages: replaced and new ones
            bucket.delete(f"{prefix}/a4.ppm", f"{prefix}/x18.ppm")
        return None

    proxy.fault = change
    place = make_place(tmp_path, prefix)
    with Daemon(place, environment=proxy.environment) as daemon:
        daemon.wait_until(lambda status: changed.is_set() and status["done"] >= 20, "the first listing")
        proxy.asked.clear()
        wait_for(lambda: sum(asked.is_list for asked in proxy.asked) >= 4, "two complete listings")
        daemon.wait_until(lambda status: not status["pending"], "all images")
        assert daemon.stop() == 0
    expected = first | second | new
    for gone in ("a4.ppm", "x18.ppm"):
        del expected[gone]
    done = place.rows("SELECT path, digest FROM image WHERE status = 1 AND emitted = 1 ORDER BY id")
    assert len({*done}) == len(done)
    latest = {path.decode(): digest for path, digest in done if path not in (b"a4.ppm", b"x18.ppm")}
    assert latest == {name: hashlib.sha256(data).digest() for name, data in expected.items()}
    assert not place.rows("SELECT path FROM image WHERE status IN (0, 2, 3)")
    for name, data in expected.items():
        assert place.sidecar(name)["source"]["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_run_once_does_not_wait_for_ever_for_a_store_that_is_away(
    tmp_path: Path, proxy: FaultyProxy, prefix: str
) -> None:
    proxy.fault = lambda asked: (403, "InvalidAccessKeyId")
    place = make_place(tmp_path, prefix)
    ended = place.run_once()
    assert ended.returncode == os.EX_IOERR
    assert "403 InvalidAccessKeyId" in ended.stderr
    checked = place.command("check", "--quick")
    assert f"s3://{BUCKET}/{prefix}: the store answers 403 InvalidAccessKeyId" in checked.stdout
