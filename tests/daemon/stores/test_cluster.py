"""`visiond ray run` with a real store: what INPUT may be, and the parts in OUTPUT."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from daemon.config.loading import load, parse
from daemon.core import stores as opening
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
from tests.daemon.unpacking.containers import make_pages, make_tar, make_zip
from tests.daemon_process import PATIENCE, Place, picture
from visiond.cluster.actor import ActorChain
from visiond.cluster.places import open_place
from visiond.cluster.planning import Planner, to_table
from visiond.cluster.plans import OtherDriver, Plans
from visiond.cluster.reading.fetching import fetch, opened_threads
from visiond.cluster.reading.inputs import InputListing
from visiond.cluster.reading.keeping import choose_kept
from visiond.cluster.reading.objects import StoreAway

UNLIKE = {"stage_seconds", "id", "seconds", "finished_at"}


def read(source: str, folder: Path, **inbox: Any) -> dict[str, bytes | str]:
    """What an actor gets, by name: the bytes, or the text of the error."""
    listing = InputListing(source, parse({"inbox": [inbox]}, folder))
    with opened_threads() as threads:
        return {
            os.fsdecode(each.name): each.data if isinstance(each.data, bytes) else str(each.data)
            for each in fetch(listing.inputs(), threads)
        }


def write_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=2)
    return file.getvalue()


def put(bucket: Bucket, prefix: str, objects: dict[str, bytes]) -> str:
    """Returns their URL."""
    bucket.put({f"{prefix}/{name}": data for name, data in objects.items()})
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture
def faulty(proxy: FaultyProxy) -> FaultyProxy:
    """Each request fails once or twice."""
    faults = itertools.cycle([BUSY, None, CUT, None, BROKEN, REFUSED, None])
    proxy.fault = lambda asked: next(faults)
    return proxy


@pytest.mark.usefixtures("faulty")
def test_a_prefix_and_a_pattern_have_the_objects_that_an_inbox_would_take(
    bucket: Bucket, prefix: str, tmp_path: Path
) -> None:
    names = ["a b%20+#?&=.jpg", "\u00fc/\u6f22\u5b57.jpg", "x/y/z.ppm"]
    ignored = [".hidden/x.jpg", "x.tmp", "folder"]
    url = put(bucket, prefix, {name: name.encode() for name in names} | dict.fromkeys(ignored, b""))
    assert read(url, tmp_path) == {name: name.encode() for name in names}
    assert read(f"{url}/**/*.ppm", tmp_path).keys() == {"x/y/z.ppm"}
    assert read(url, tmp_path, recursive=False).keys() == {names[0]}


@pytest.mark.usefixtures("faulty")
def test_lists_in_a_store_name_objects_or_have_their_bytes(
    bucket: Bucket, prefix: str, tmp_path: Path
) -> None:
    data = [picture(number) for number in range(5)]
    url = put(bucket, f"{prefix}/lists", {"0.ppm": data[0]})
    put(bucket, f"{prefix}/x y", {"1.ppm": data[1]})
    named = [{"url": f"{url}/0.ppm"}, {"url": "../lists/../x y/1.ppm"}, {"url": f"{url}/gone.ppm"}]
    whole: list[dict[str, Any]] = [
        {"name": f"{number}.ppm", "bytes": each} for number, each in enumerate(data)
    ]
    lines = [row | {"bytes": base64.b64encode(row["bytes"]).decode()} for row in whole]
    for name, rows in {"named": named, "lines": lines}.items():
        put(
            bucket,
            f"{prefix}/lists",
            {f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()},
        )
    put(
        bucket,
        f"{prefix}/lists",
        {"named.parquet": write_parquet(named), "whole.parquet": write_parquet(whole)},
    )
    for kind in ("jsonl", "parquet"):
        found = read(f"{url}/named.{kind}", tmp_path)
        assert [found[f"{url}/0.ppm"], found[f"s3://{BUCKET}/{prefix}/x y/1.ppm"]] == data[:2]
        assert "it does not exist" in str(found[f"{url}/gone.ppm"])
    expected = {f"{number}.ppm": each for number, each in enumerate(data)}
    assert read(f"{url}/lines.jsonl", tmp_path) == read(f"{url}/whole.parquet", tmp_path) == expected


@pytest.mark.usefixtures("faulty")
def test_the_images_in_tars_of_a_store_are_read(bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    large = picture(9, os.urandom(3 << 20))  # several pieces of an answer
    shards = {
        "shards/0.tar": make_tar({"a.ppm": picture(1), "a.json": b"{}", "b.ppm": large}, mode="w"),
        "shards/1.tar.gz": make_tar({"c.ppm": picture(2)}),
    }
    url = put(bucket, prefix, shards)
    expected = {"0.tar/a.ppm": picture(1), "0.tar/b.ppm": large}
    assert read(f"{url}/shards/0.tar", tmp_path) == expected
    assert read(f"{url}/shards/*.tar", tmp_path) == expected
    assert read(f"{url}/shards/*.tar.gz", tmp_path) == {"1.tar.gz/c.ppm": picture(2)}


def units(place: Place, source: str, output: str) -> list[Any]:
    config = load(place.config)
    plans = Plans.open(open_place(output), config, resume=True)
    planned = [*Planner(plans, InputListing(source, config).inputs(), 10).units()]
    plans.write([unit.ids for unit in planned if unit.fresh])
    return [to_table(unit) for unit in planned]


def rows_of(bucket: Bucket, prefix: str) -> dict[str, dict[str, Any]]:
    found = dict[str, dict[str, Any]]()
    for name in bucket.names(prefix):
        if name.endswith(".parquet"):
            for row in pyarrow.parquet.read_table(io.BytesIO(bucket.get(name))).to_pylist():
                assert found.setdefault(row["path"], row) is row
    return found


def test_rows_of_a_bucket_equal_those_of_the_daemon_and_each_part_is_created_once(
    bucket: Bucket, prefix: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    objects = {f"{number % 3}/{number:03d}.ppm": picture(number) for number in range(25)}
    source = put(bucket, f"{prefix}/in", objects | {"bad.jpg": b"not an image", "notes": b"text"})
    output = f"s3://{BUCKET}/{prefix}/rows"
    place = Place(tmp_path, {"inbox": [{"url": source}]})
    faults = itertools.cycle([BUSY, None, CUT, None, BROKEN, None])
    proxy.fault = lambda asked: next(faults)
    with contextlib.closing(
        ActorChain(load(place.config).model_dump_json().encode(), output, source)
    ) as chain:
        tables = units(place, source, output)
        results = [chain(table) for table in tables]
        assert [result.column("problem")[0].as_py() for result in results] == [""] * 3
        parts = {name: bucket.get(name) for name in bucket.names(f"{prefix}/rows")}
        assert [chain(table) for table in tables] == results  # as a second driver would
        assert {name: bucket.get(name) for name in bucket.names(f"{prefix}/rows")} == parts
    assert not units(place, source, output)
    proxy.fault = lambda asked: None
    assert place.run_once().returncode == 1
    assert place.command("export", "rows.parquet").returncode == 0
    ours, exported = rows_of(bucket, f"{prefix}/rows"), pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    for theirs in exported.to_pylist():
        row = ours.pop(theirs["path"])
        assert {key: row[key] for key in theirs.keys() - UNLIKE} == {
            key: theirs[key] for key in theirs.keys() - UNLIKE
        }
    assert {path: (row["status"], row["reason"]) for path, row in ours.items()} == {
        "bad.jpg": ("FAILED", "not-an-image"),
        "notes": ("SKIPPED", "not-an-image"),
    }


def test_a_put_whose_answer_was_lost_counts_as_written_and_a_file_of_others_does_not(
    bucket: Bucket, prefix: str, proxy: FaultyProxy
) -> None:
    place = open_place(f"s3://{BUCKET}/{prefix}")

    def lose_the_answer(asked: Asked) -> Fault:
        if asked.method == "PUT" and not proxy.made:
            bucket.put({f"{prefix}/plan": b"ours"})
            return CUT
        return None

    proxy.fault = lose_the_answer
    assert place.write_whole("plan", b"ours")
    assert not place.write_whole("plan", b"theirs")
    assert place.read("plan") == b"ours"


def test_a_second_driver_cannot_plan_into_the_same_store_even_with_the_same_inputs(
    bucket: Bucket, prefix: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    source = put(bucket, f"{prefix}/in", {"a.ppm": picture(1), "b.ppm": picture(2)})
    output, config = f"s3://{BUCKET}/{prefix}/rows", parse({}, tmp_path)
    drivers = [Plans.open(open_place(output), config, resume=False) for _ in range(2)]
    planned = [
        [unit.ids for unit in Planner(each, InputListing(source, config).inputs(), 10).units()]
        for each in drivers
    ]
    drivers[0].write(planned[0])
    with pytest.raises(OtherDriver, match="--resume"):
        drivers[1].write(planned[1])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """When called, a store that is away is soon given up."""

    def hurry() -> None:
        monkeypatch.setattr("visiond.cluster.reading.objects.PAUSE_SECONDS", 0.0)
        monkeypatch.setattr("visiond.cluster.reading.objects.PATIENCE_SECONDS", 0.1)
        monkeypatch.setattr("daemon.core.stores.RETRIES", 1)
        monkeypatch.setattr(
            "visiond.cluster.reading.objects.store_of", lambda root: opening.store_of(root, impatient=True)
        )

    return hurry


def put_lists(bucket: Bucket, prefix: str) -> str:
    """Lists of five images with a class each, and a tar of samples. Returns the URL of their folder."""
    rows = [{"url": f"{number}.ppm", "cls": f"class {number}"} for number in range(5)]
    images = {row["url"]: picture(number) for number, row in enumerate(rows)}
    members = dict[str, bytes]()  # in a tar the files of a sample are neighbors
    for row in rows:
        members |= {row["url"]: images[row["url"]], row["url"].replace("ppm", "cls"): row["cls"].encode()}
    lists = {
        "list.parquet": write_parquet(rows),
        "list.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows).encode(),
        "0.tar": make_tar(members, mode="w"),
    }
    return put(bucket, f"{prefix}/in", images | lists)


@contextlib.contextmanager
def keeping_classes(source: str, output: str, place: Place) -> Iterator[Callable[[], Any]]:
    """A call that annotates all of INPUT as one unit, with the classes of its images, and returns what the actor says."""
    listing = InputListing(source, load(place.config))
    kept = choose_kept(listing, ("cls",), (), every=False)
    [unit] = units(place, source, output)
    config = load(place.config).model_dump_json().encode()
    with contextlib.closing(ActorChain(config, output, listing.root, kept=kept)) as chain:
        yield lambda: chain(unit)


@pytest.mark.usefixtures("faulty")
@pytest.mark.parametrize("name", ["list.parquet", "list.jsonl", "0.tar"])
def test_what_a_list_in_a_store_says_is_kept(name: str, bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    source, output = f"{put_lists(bucket, prefix)}/{name}", f"s3://{BUCKET}/{prefix}/rows"
    with keeping_classes(source, output, Place(tmp_path)) as annotate:
        assert not annotate().column("problem")[0].as_py()
    found = rows_of(bucket, f"{prefix}/rows").values()
    assert {(row["row"], row["cls"]) for row in found} == {(n, f"class {n}") for n in range(5)}
    assert {row["list"] for row in found} == {source if "list" in name else name}


@pytest.mark.parametrize("name", ["list.parquet", "list.jsonl"])
def test_no_row_is_written_without_what_its_list_says(
    name: str, bucket: Bucket, prefix: str, proxy: FaultyProxy, tmp_path: Path, hasty: Callable[[], None]
) -> None:
    source, output = f"{put_lists(bucket, prefix)}/{name}", f"s3://{BUCKET}/{prefix}/rows"
    with keeping_classes(source, output, Place(tmp_path)) as annotate:
        hasty()
        proxy.fault = lambda asked: BUSY if name in asked.path else None
        problem, status = (annotate().column(each)[0].as_py() for each in ("problem", "status"))
        assert (status, "--resume" in problem) == (os.EX_IOERR, True)
        assert not rows_of(bucket, f"{prefix}/rows")


@pytest.mark.parametrize("kind", ["objects", "parquet"])
@pytest.mark.parametrize("trouble", [BUSY, EXPIRED, CUT])
def test_a_store_that_is_away_ends_the_run_and_fails_no_image(
    trouble: Fault,
    kind: str,
    bucket: Bucket,
    prefix: str,
    proxy: FaultyProxy,
    tmp_path: Path,
    hasty: Callable[[], None],
) -> None:
    images = {f"{number}.ppm": picture(number) for number in range(10)}
    whole = {"whole.parquet": write_parquet([{"name": each, "bytes": images[each]} for each in images])}
    source = put(bucket, f"{prefix}/in", images if kind == "objects" else whole)
    source += "/whole.parquet" if kind == "parquet" else ""
    output, place = f"s3://{BUCKET}/{prefix}/rows", Place(tmp_path)
    # Expired credentials are refused for every object; other faults may also affect a single object.
    broken = (403, "AccessDenied") if trouble == EXPIRED else BROKEN
    with contextlib.closing(
        ActorChain(load(place.config).model_dump_json().encode(), output, source)
    ) as chain:
        [unit] = units(place, source, output)
        hasty()
        proxy.fault = lambda asked: None if "rows" in asked.path else trouble
        problem, status = (chain(unit).column(name)[0].as_py() for name in ("problem", "status"))
        assert (status, "--resume" in problem) == (os.EX_IOERR, True)
        assert not rows_of(bucket, f"{prefix}/rows")
        proxy.fault = lambda asked: broken if "/in/7.ppm" in asked.path else None
        assert not chain(unit).column("problem")[0].as_py()
    rows = rows_of(bucket, f"{prefix}/rows")
    failed = {path: row["reason"] for path, row in rows.items() if row["reason"]}
    assert (len(rows), failed) == (10, {"7.ppm": "unreadable"} if kind == "objects" else {})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("trouble", [BUSY, EXPIRED])
def test_a_list_whose_store_is_away_is_no_wrong_argument(
    trouble: Fault,
    kind: str,
    bucket: Bucket,
    prefix: str,
    proxy: FaultyProxy,
    tmp_path: Path,
    hasty: Callable[[], None],
) -> None:
    url = put(
        bucket,
        prefix,
        {"list.jsonl": b'{"url": "a.ppm"}\n', "list.parquet": write_parquet([{"url": "a.ppm"}])},
    )
    hasty()
    proxy.fault = lambda asked: trouble
    with pytest.raises(StoreAway) as error:
        read(f"{url}/list.{kind}", tmp_path)
    assert error.value.exit_status == os.EX_IOERR


@pytest.mark.usefixtures("faulty")
def test_archives_in_a_store_are_unpacked(bucket: Bucket, prefix: str, tmp_path: Path) -> None:
    objects = {"a.zip": make_zip({"1.ppm": picture(1)}), "b.pdf": make_pages("PDF", 2), "c.ppm": picture(3)}
    source, output = put(bucket, f"{prefix}/in", objects), f"s3://{BUCKET}/{prefix}/rows"
    place = Place(tmp_path)
    [inbox] = place.settings["inbox"]
    place.configure({"inbox": [{**inbox, "unpack": ["zip", "pdf"]}]})
    with contextlib.closing(
        ActorChain(load(place.config).model_dump_json().encode(), output, source)
    ) as chain:
        for unit in units(place, source, output):
            chain(unit)
    found = {path: (row["status"], row["detail"]) for path, row in rows_of(bucket, f"{prefix}/rows").items()}
    assert found == {
        "a.zip": ("SKIPPED", "1 file in a.zip.unpacked"),
        "a.zip.unpacked/1.ppm": ("DONE", None),
        "b.pdf": ("SKIPPED", "2 files in b.pdf.unpacked"),
        "b.pdf.unpacked/page-0001.png": ("DONE", None),
        "b.pdf.unpacked/page-0002.png": ("DONE", None),
        "c.ppm": ("DONE", None),
    }


@pytest.mark.timeout(900)  # on a busy machine Ray needs a minute for each start
def test_the_command_reads_from_a_store_and_writes_to_it_and_goes_on(
    bucket: Bucket, prefix: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """An actor in this process stands for the earlier run: Ray takes long to start."""
    pytest.importorskip("ray", reason="Ray is not installed: make tools")
    source = put(bucket, f"{prefix}/in", {f"{number}.ppm": picture(number) for number in range(30)})
    output = f"s3://{BUCKET}/{prefix}/rows"
    place = Place(tmp_path)
    with contextlib.closing(
        ActorChain(load(place.config).model_dump_json().encode(), output, source)
    ) as chain:
        for unit in units(place, source, output):
            chain(unit)
    assert len(rows_of(bucket, f"{prefix}/rows")) == 30
    [part, *others] = [name for name in bucket.names(f"{prefix}/rows") if name.endswith(".parquet")]
    kept = {name: bucket.get(name) for name in others}
    bucket.delete(part)
    put(bucket, f"{prefix}/in", {"new.ppm": picture(77)})
    words = ("ray", "run", source, output, "--part-images", "10", "--resume")
    prefixes = ("env", *(f"{key}={value}" for key, value in proxy.environment.items()))
    again = place.command(*words, prefix=prefixes, timeout=6 * PATIENCE)
    assert again.returncode == 0, again.stderr
    assert "20 inputs finished by an earlier run" in again.stdout
    assert len(rows_of(bucket, f"{prefix}/rows")) == 31
    assert {name: bucket.get(name) for name in others} == kept
