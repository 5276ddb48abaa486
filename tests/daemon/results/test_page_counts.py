"""Every result shows how many pages or frames the file has, as only one was read."""

from __future__ import annotations

import csv
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from daemon.ledger.ledger import Ledger
from daemon.ledger.records import Reader
from tests.daemon_process import Place
from tests.inputs import animation, png
from tests.makers import MODELS, admit, complete, done


def test_the_page_count_is_in_sidecar_export_and_show_and_survives_the_ledger(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop("pages.tif", animation("TIFF"))
    place.drop("one.png", png())
    assert place.run_once().returncode == 0
    place.drop("again.tif", animation("TIFF"))  # result from the ledger: its header is not read
    assert place.run_once().returncode == 0
    assert [place.sidecar(name)["source"].get("pages") for name in ("pages.tif", "again.tif", "one.png")] == [
        3,
        3,
        None,
    ]
    assert "one of 3 pages or frames" in " ".join(place.command("show", "again.tif").stdout.split())
    assert place.command("export", "set.csv").returncode == 0
    with (tmp_path / "set.csv").open(newline="") as file:
        pages = {row["path"]: row["pages"] for row in csv.DictReader(file)}
    assert pages == {"pages.tif": "3", "one.png": "1", "again.tif": "3"}
    place.site.ledger.unlink()
    assert place.command("repair").returncode == 0
    assert place.rows("SELECT pages FROM content ORDER BY pages") == [(1,), (3,)]
    assert place.command("verify").returncode == 0


@pytest.mark.anyio
async def test_when_bytes_are_read_differently_than_before_row_and_checksum_agree(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path)) as ledger:
        await ledger.register([(Path("/inbox"), 0)], MODELS)
        for name, pages, format in ((b"old", 1, "JPEG"), (b"new", 3, "MPO")):
            (job,) = await admit(ledger, name)
            ending = done(job, data=b"the same bytes")
            size = {"width": 10 * pages, "height": 20 * pages}
            content = replace(ending.content, pages=pages, format=format, **size)
            await complete(ledger, replace(ending, content=content))
    with closing(Reader(path)) as reader:
        reader.check()
        assert {(r.format, r.width, r.height, r.pages) for r in reader.finished()} == {("MPO", 30, 60, 3)}


@pytest.mark.anyio
async def test_pages_that_an_older_daemon_did_not_count_are_known_once_the_bytes_are_read_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path)) as ledger:
        await ledger.register([(Path("/inbox"), 0)], MODELS)
        for name, pages in ((b"old.tif", 1), (b"new.tif", 3), (b"last.tif", 1)):
            (job,) = await admit(ledger, name)
            ending = done(job, data=b"the same bytes")
            await complete(ledger, replace(ending, content=replace(ending.content, pages=pages)))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT pages FROM content").fetchall() == [(3,)]
    with closing(Reader(path)) as reader:
        assert {record.pages for record in reader.finished()} == {3}
