"""What INPUT may be, and how the images in it are read."""

from __future__ import annotations

import base64
import http.server
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from daemon.config.loading import parse
from daemon.core.errors import NothingFound, WrongArgument
from tests.daemon_process import picture
from visiond.cluster.reading.fetching import fetch, opened_threads
from visiond.cluster.reading.inputs import InputListing, compile_pattern


def read(source: str | Path, folder: Path, column: str = "") -> dict[str, bytes | str]:
    """What an actor gets, by name: the bytes, or the text of the error."""
    listing = InputListing(str(source), parse({}, folder), column=column)
    with opened_threads() as threads:
        return {
            os.fsdecode(each.name): each.data if isinstance(each.data, bytes) else str(each.data)
            for each in fetch(listing.inputs(), threads)
        }


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number, name in enumerate(("a.ppm", "b.jpg", "sub/c.ppm", "sub/deep/d.ppm", ".hidden", "e.tmp")):
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(picture(number))
    (tmp_path / "photos" / "link.ppm").symlink_to("a.ppm")
    return tmp_path / "photos"


def test_a_folder_has_the_files_that_an_inbox_would_take(photos: Path, tmp_path: Path) -> None:
    found = read(photos, tmp_path)
    assert found.keys() == {"a.ppm", "b.jpg", "sub/c.ppm", "sub/deep/d.ppm"}
    assert found["sub/c.ppm"] == picture(2)


def test_a_pattern_has_the_files_that_match_it(photos: Path, tmp_path: Path) -> None:
    assert read(photos / "*.ppm", tmp_path).keys() == {"a.ppm"}
    assert read(f"{photos}/**/*.ppm", tmp_path).keys() == {"a.ppm", "sub/c.ppm", "sub/deep/d.ppm"}
    assert read(f"{photos}/s?b/[a-c].ppm", tmp_path).keys() == {"s?b/[a-c].ppm".replace("s?b/[a-c]", "sub/c")}
    assert compile_pattern("[!a].jpg").fullmatch(b"b.jpg")


@pytest.mark.parametrize(
    "source", ["s3://*", "gs://photos-*/2024/*.jpg", "s3://photo?/a", "az://[ab]/a.parquet"]
)
def test_a_wildcard_in_the_name_of_a_bucket_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(WrongArgument, match=r"wildcard in the name of its bucket"):
        InputListing(source, parse({}, tmp_path))


def test_a_pattern_below_a_server_with_an_ipv6_address_begins_behind_the_address(tmp_path: Path) -> None:
    assert InputListing("http://[::1]:80/in/*.jpg", parse({}, tmp_path)).root == "http://[::1]:80/in"


def test_an_inbox_that_is_not_recursive_lists_no_files_in_folders(photos: Path, tmp_path: Path) -> None:
    config = parse({"inbox": [{"recursive": False}]}, tmp_path)
    assert {each.name for each in InputListing(str(photos), config).inputs()} == {b"a.ppm", b"b.jpg"}


@pytest.fixture
def unpacked(photos: Path) -> Path:
    """What the daemon leaves. The last one's archive is a link, which no inbox takes."""
    for container in ("there.zip", "moved.zip", "there.zip.unpacked/in.pdf", "link.zip"):
        (photos / f"{container}.unpacked").mkdir(parents=True)
        (photos / f"{container}.unpacked" / "x.ppm").write_bytes(picture(4))
    for container in ("there.zip", "there.zip.unpacked/in.pdf"):
        (photos / container).write_bytes(b"a container")
    (photos / "link.zip").symlink_to("there.zip")
    return photos


THERE, MOVED, LINKED = (f"{name}.zip.unpacked/x.ppm" for name in ("there", "moved", "link"))
INNER, DEEP = "there.zip.unpacked/in.pdf", "there.zip.unpacked/in.pdf.unpacked/x.ppm"


@pytest.mark.parametrize(
    ("pattern", "inbox", "taken"),
    [
        ("", {"unpack": ["zip", "pdf"]}, {MOVED, LINKED}),
        ("/**/*", {"unpack": ["zip", "pdf"]}, {MOVED, LINKED}),
        ("", {"unpack": []}, {THERE, MOVED, LINKED, INNER, DEEP}),
        ("", {"unpack": ["pdf"]}, {THERE, MOVED, LINKED, INNER}),
        ("/**/*.ppm", {"unpack": ["zip", "pdf"]}, {THERE, MOVED, LINKED, DEEP}),  # no archive matches
        ("", {"unpack": ["zip"], "ignore": ["*.zip"]}, {THERE, MOVED, LINKED, INNER, DEEP}),
    ],
)
def test_what_the_daemon_has_unpacked_is_dropped_only_if_its_archive_is_an_input(
    pattern: str, inbox: dict[str, list[str]], taken: set[str], unpacked: Path, tmp_path: Path
) -> None:
    listing = InputListing(f"{unpacked}{pattern}", parse({"inbox": [inbox]}, tmp_path))
    found = {each.name.decode() for each in listing.inputs()}
    assert {name for name in found if ".unpacked/" in name} == taken


def test_a_single_file_is_an_input(photos: Path, tmp_path: Path) -> None:
    assert read(photos / "b.jpg", tmp_path) == {"b.jpg": picture(1)}


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(WrongArgument, match="There is no"):
        read(tmp_path / "missing", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingFound, match="there is no file"):
        read(tmp_path / "empty", tmp_path)


def test_lines_name_files_beside_the_list_or_have_their_bytes(photos: Path, tmp_path: Path) -> None:
    named = tmp_path / "named.jsonl"
    named.write_text('{"url": "photos/a.ppm"}\n\n{"url": "photos/missing.ppm"}\n')
    found = read(named, tmp_path)
    assert found[str(photos / "a.ppm")] == picture(0)
    assert "No such file" in str(found[str(photos / "missing.ppm")])
    whole = tmp_path / "whole.jsonl"
    lines = [{"name": f"{n}.ppm", "bytes": base64.b64encode(picture(n)).decode()} for n in range(3)]
    whole.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"name": "bad", "bytes": "?"}]))
    found = read(whole, tmp_path)
    assert {name: found[name] for name in ("0.ppm", "1.ppm", "2.ppm")} == {
        f"{n}.ppm": picture(n) for n in range(3)
    }
    assert "base64" in str(found["bad"])


@pytest.mark.parametrize("good", ['{"url": "photos/a.ppm"}', '{"bytes": "eA=="}'])
def test_a_bad_line_is_an_image_with_the_reason_and_a_bad_first_line_no_list(
    good: str, photos: Path, tmp_path: Path
) -> None:
    file = tmp_path / "list.jsonl"
    column = good.split('"')[1]
    file.write_text(f'{good}\n{{"{column}": null}}\n{{"other": 1}}\nno JSON\n')
    found = read(file, tmp_path)
    assert len(found) == 4
    assert [str(found[f"list.jsonl/{line}"])[:20] for line in (2, 3)] == [
        f'the line has no "{column}"'[:20]
    ] * 2
    assert "no object of JSON" in str(found["list.jsonl/4"])
    file.write_text(f"no JSON\n{good}\n")
    with pytest.raises(WrongArgument, match="line 1"):
        read(file, tmp_path)


def test_parquet_names_files_or_has_their_bytes(photos: Path, tmp_path: Path) -> None:
    table = pyarrow.table({"where": ["photos/a.ppm", None, "photos/b.jpg"]})
    pyarrow.parquet.write_table(table, tmp_path / "named.parquet")
    with pytest.raises(WrongArgument, match="--column"):
        read(tmp_path / "named.parquet", tmp_path)
    found = read(tmp_path / "named.parquet", tmp_path, "where")
    assert found.pop("named.parquet/2") == 'the row has no "where"'
    assert [*found.values()] == [picture(0), picture(1)]
    rows = [{"image": {"bytes": picture(n), "path": f"{n}.ppm"}} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "hf.parquet", row_group_size=2)
    assert read(tmp_path / "hf.parquet", tmp_path) == {f"{n}.ppm": picture(n) for n in range(5)}


def test_a_tar_has_its_images_and_one_that_is_cut_says_so(tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"shard-{shard}.tar", "w") as archive:
            for name, data in ((f"{shard}.ppm", picture(shard)), (f"{shard}.json", b"{}")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    expected = {f"shard-{n}.tar/{n}.ppm": picture(n) for n in range(2)}
    assert read(f"{tmp_path}/*.tar", tmp_path) == expected
    cut = (tmp_path / "shard-1.tar").read_bytes()[:600]
    (tmp_path / "shard-1.tar").write_bytes(cut)
    found = read(f"{tmp_path}/*.tar", tmp_path)
    assert found["shard-0.tar/0.ppm"] == picture(0)
    assert "the tar cannot be read to its end" in str(found["shard-1.tar"])


@pytest.fixture
def served(photos: Path) -> Iterator[str]:
    pytest.importorskip("obstore", reason="obstore is not installed: make setup")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=photos)) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_web_server_is_listed_by_the_links_of_its_pages(served: str, photos: Path, tmp_path: Path) -> None:
    (photos / "white space.ppm").write_bytes(picture(9))
    found = read(f"{served}/", tmp_path)
    assert found["sub/deep/d.ppm"] == picture(3)
    assert found["white space.ppm"] == picture(9)
    assert read(f"{served}/sub/", tmp_path).keys() == {"c.ppm", "deep/d.ppm"}


def test_an_object_that_is_not_there_is_an_image_with_the_error(served: str, tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text(f'{{"url": "{served}/a.ppm"}}\n{{"url": "{served}/gone.ppm"}}\n')
    found = read(tmp_path / "list.jsonl", tmp_path)
    assert found[f"{served}/a.ppm"] == picture(0)
    assert "it does not exist" in str(found[f"{served}/gone.ppm"])
