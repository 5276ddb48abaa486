"""What parts say of the list: `list`, `row`, and what --keep takes over. The lists have forms that others have published."""

from __future__ import annotations

import base64
import datetime
import decimal
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from daemon.config.loading import load, parse
from daemon.core.errors import WrongArgument
from daemon.exports.parquet import FURTHER
from stages.registry.registry import ORDER
from tests.daemon.unpacking.containers import make_zip
from tests.daemon_process import Place, picture
from visiond.cluster.actor import ActorChain
from visiond.cluster.places import ClusterFolder
from visiond.cluster.planning import Planner, to_table
from visiond.cluster.plans import Plans
from visiond.cluster.reading import joining
from visiond.cluster.reading.inputs import InputListing
from visiond.cluster.reading.keeping import Kept, choose_kept
from visiond.engine.rows import ResultRows

PARTS = "part-*.parquet"
COLUMNS = [*ResultRows(ORDER).kinds, *FURTHER]


class Run:
    """A run by an actor in this process: Ray takes long to start."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.rows = place.folder / "rows"

    def __call__(
        self, source: Path | str, *keep: str, every: bool = False, column: str = "", size: int = 4
    ) -> pa.Table:
        """The rows, in the order of the list. Raises VisiondError if a unit has a problem."""
        config = load(self._place.config)
        listing = InputListing(str(source), config, column=column)
        kept = choose_kept(listing, keep, COLUMNS, every=every)
        plans = Plans.open(ClusterFolder(str(self.rows)), config, resume=True, kept=kept)
        units = [*Planner(plans, listing.inputs(), size).units()]
        plans.write([unit.ids for unit in units if unit.fresh])
        settings = config.model_dump_json().encode()
        with closing(ActorChain(settings, str(self.rows), listing.root, kept=kept)) as chain:
            for unit in units:
                assert not (problem := chain(to_table(unit)).column("problem")[0].as_py()), problem
        table = pa.concat_tables(map(pyarrow.parquet.read_table, sorted(self.rows.glob(PARTS))))
        return table.sort_by([("list", "ascending"), ("row", "ascending")])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    for number in range(12):
        (tmp_path / f"{number:04d}.ppm").write_bytes(picture(number))
    return made


@pytest.fixture
def run(place: Place) -> Run:
    return Run(place)


def write(file: Path, table: pa.Table, **options: Any) -> Path:
    pyarrow.parquet.write_table(table, file, **options)
    return file


def write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file


def write_tar(file: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file


NAMES = {"sha256:" + hashlib.sha256(picture(number)).hexdigest(): f"{number:04d}.ppm" for number in range(12)}


def names_of(table: pa.Table) -> list[str]:
    """Of the pictures, by their bytes."""
    return [NAMES.get(digest, "") for digest in table.column("digest").to_pylist()]


def values(table: pa.Table, *names: str) -> list[tuple[Any, ...]]:
    """Of each picture its name, and what these columns say."""
    columns = [table.column(name).to_pylist() for name in names]
    return sorted(zip(names_of(table), *columns, strict=True))


def laion(rows: int) -> pa.Table:
    """The columns and types of the Parquet files of LAION-400M."""
    return pa.table(
        {
            "SAMPLE_ID": pa.array([float(1_581_282_014_547 + n) for n in range(rows)], pa.float64()),
            "URL": [f"{n:04d}.ppm" for n in range(rows)],
            "TEXT": [None if n == 5 else f"Café no. {n} – 写真" for n in range(rows)],
            "HEIGHT": pa.array([100 + n for n in range(rows)], pa.int32()),
            "WIDTH": pa.array([200 + n for n in range(rows)], pa.int32()),
            "LICENSE": ["?"] * rows,
            "NSFW": ["UNLIKELY"] * rows,
            "similarity": pa.array([0.3 + n / 7 for n in range(rows)], pa.float64()),
        }
    )


def test_all_columns_of_a_list_like_those_of_laion_are_kept_with_their_types(
    run: Run, tmp_path: Path
) -> None:
    listed = laion(12)
    source = write(tmp_path / "laion.parquet", listed, row_group_size=5)
    rows = run(source, every=True, column="URL")
    assert rows.column("row").to_pylist() == [*range(12)]
    assert set(rows.column("list").to_pylist()) == {str(source)}
    assert names_of(rows) == listed.column("URL").to_pylist()
    # Names of columns that differ only in capitals are one name in SQL.
    renamed = {"TEXT": "list_TEXT", "HEIGHT": "list_HEIGHT", "WIDTH": "list_WIDTH"}
    for name in set(listed.column_names) - {"URL"}:
        assert rows.column(renamed.get(name, name)).equals(listed.column(name)), name
    assert "URL" not in rows.column_names
    assert rows.column("width").to_pylist() == [8] * 12, "that of the image"


def test_four_captions_of_one_image_are_four_rows(run: Run, tmp_path: Path) -> None:
    """As in the list of MS COCO: each image stands there once for each of its captions."""
    listed = pa.table({"URL": ["0001.ppm", "0002.ppm"] * 4, "TEXT": [f"caption {n}" for n in range(8)]})
    source = write(tmp_path / "mscoco.parquet", listed)
    rows = run(source, "TEXT=said", column="URL", size=3)
    assert rows.column("row").to_pylist() == [*range(8)]
    assert names_of(rows) == listed.column("URL").to_pylist()
    assert rows.column("said").equals(listed.column("TEXT"))
    assert len(set(rows.column("id").to_pylist())) == 8


def test_lines_like_those_of_imagefolder_are_kept_as_texts(run: Run, tmp_path: Path) -> None:
    """metadata.jsonl of Hugging Face's ImageFolder. What is no string is its JSON."""
    lines: list[dict[str, Any]] = [
        {
            "file_name": "0001.ppm",
            "text": "a “quoted” é",
            "objects": {"bbox": [[302.0, 109.0]], "categories": [0]},
        },
        {"file_name": "0002.ppm", "text": None, "year": 1900},
        {"file_name": "0001.ppm", "text": "once more", "score": 0.30000000000000004},
        {"text": "of no image"},
    ]
    source = write_lines(tmp_path / "metadata.jsonl", lines)
    source.write_text("\n" + source.read_text().replace("\n", "\n\n", 1))  # empty lines are no rows
    rows = run(source, every=True)
    assert rows.column("row").to_pylist() == [0, 1, 2, 3]
    assert names_of(rows) == ["0001.ppm", "0002.ppm", "0001.ppm", ""]
    assert rows.column("status").to_pylist() == ["DONE"] * 3 + ["FAILED"]
    assert rows.column("list_text").to_pylist() == ["a “quoted” é", None, "once more", "of no image"]
    assert rows.column("year").to_pylist() == [None, "1900", None, None]
    assert rows.column("score").to_pylist() == [None, None, "0.30000000000000004", None]
    found = rows.column("list_objects").to_pylist()
    assert (json.loads(found[0]), found[1:]) == (lines[0]["objects"], [None] * 3)


def test_what_stands_beside_bytes_is_kept_too(run: Run, tmp_path: Path) -> None:
    lines = [{"bytes": base64.b64encode(picture(n)).decode(), "text": f"no. {n}"} for n in range(5)]
    rows = run(write_lines(tmp_path / "bytes.jsonl", lines), "text=said")
    assert (names_of(rows), rows.column("said").to_pylist()) == (
        [f"{n:04d}.ppm" for n in range(5)],
        [f"no. {n}" for n in range(5)],
    )


def test_rows_of_bytes_with_one_name_can_be_told_apart(run: Run, tmp_path: Path) -> None:
    """Images as Hugging Face's datasets write them to Parquet, here all with the same path."""
    images = [{"bytes": picture(n), "path": "image.ppm"} for n in range(7)]
    listed = pa.table({"image": images, "label": pa.array([n % 3 for n in range(7)], pa.int64())})
    rows = run(write(tmp_path / "train.parquet", listed, row_group_size=3), every=True)
    assert set(rows.column("path").to_pylist()) == {"image.ppm"}
    assert rows.column("row").to_pylist() == [*range(7)]
    assert names_of(rows) == [f"{n:04d}.ppm" for n in range(7)]
    assert rows.column("label").equals(listed.column("label"))


IMG2DATASET = ("url", "caption", "key", "status", "error_message", "width", "height", "exif")


def write_shards(folder: Path) -> list[dict[str, Any]]:
    """As img2dataset writes them: 00000.tar with 000000000.jpg, .json and .txt. Returns the JSON of each sample."""
    described = []
    for shard in range(2):
        members = dict[str, bytes]()
        for number in range(3):
            key = f"{shard:05d}{number:04d}"
            about = dict.fromkeys(IMG2DATASET, "") | {"key": key, "caption": f"caption of {key}, é"}
            described.append(about)
            image = {} if (shard, number) == (0, 1) else {f"{key}.ppm": picture(3 * shard + number)}
            texts = {f"{key}.json": json.dumps(about).encode(), f"{key}.TXT": about["caption"].encode()}
            members |= image | texts
        write_tar(folder / f"{shard:05d}.tar", members)
    return described


def test_texts_of_samples_like_those_of_img2dataset_are_kept(run: Run, tmp_path: Path) -> None:
    described = write_shards(tmp_path)
    del described[1]  # it has no image, and yet a number
    rows = run(tmp_path / "0*.tar", every=True)
    assert rows.column("list").to_pylist() == ["00000.tar"] * 2 + ["00001.tar"] * 3
    assert rows.column("row").to_pylist() == [0, 2, 0, 1, 2]
    assert names_of(rows) == [f"{n:04d}.ppm" for n in (0, 2, 3, 4, 5)]
    assert [json.loads(text) for text in rows.column("json").to_pylist()] == described
    assert rows.column("txt").to_pylist() == [about["caption"] for about in described]


def test_texts_before_and_behind_the_images_of_a_sample_belong_to_all_of_them(
    run: Run, tmp_path: Path
) -> None:
    members = {
        "__about__/0.json": b"{}",
        "a/1.cls": b"7",
        "a/1.left.ppm": picture(0),
        "a/1.right.ppm": picture(1),
        "a/1.npy": b"\x93NUMPY\0",
        "a/1.txt": b"Latin-1: \xe9",
        "README": b"no sample",
        "b/1.ppm": picture(2),
    }
    rows = run(write_tar(tmp_path / "0.tar", members), "cls", "txt")
    assert values(rows, "row", "cls", "txt") == [
        ("0000.ppm", 0, "7", "Latin-1: \ufffd"),
        ("0001.ppm", 0, "7", "Latin-1: \ufffd"),
        ("0002.ppm", 1, None, None),
    ]
    kept = choose_kept(InputListing(str(tmp_path / "0.tar"), parse({}, tmp_path)), (), COLUMNS, every=True)
    assert kept.names == ("cls",), "the others are no texts"


def test_images_before_the_end_of_a_cut_tar_have_their_texts(run: Run, tmp_path: Path) -> None:
    file = write_tar(tmp_path / "cut.tar", {"1.txt": b"first", "1.ppm": picture(1), "2.ppm": picture(2)})
    file.write_bytes(file.read_bytes()[:2660])
    rows = run(file, "txt")
    found = {name: rows.column(name).to_pylist() for name in ("status", "row", "txt")}
    assert found == {"status": ["DONE", "FAILED"], "row": [0, None], "txt": ["first", None]}


def test_members_of_an_archive_in_a_list_have_its_row(run: Run, place: Place, tmp_path: Path) -> None:
    place.configure({"inbox": [{**place.settings["inbox"][0], "unpack": ["zip"]}]})
    (tmp_path / "a.zip").write_bytes(make_zip({"1.ppm": picture(1), "2.ppm": picture(2)}))
    source = write(tmp_path / "list.parquet", pa.table({"url": ["0000.ppm", "a.zip"], "owner": ["x", "y"]}))
    rows = run(source, "owner")
    assert values(rows, "row", "owner") == [
        ("", 1, "y"),
        ("0000.ppm", 0, "x"),
        ("0001.ppm", 1, "y"),
        ("0002.ppm", 1, "y"),
    ]


def test_files_of_a_folder_stand_in_no_list(run: Run, tmp_path: Path) -> None:
    rows = run(tmp_path / "*.ppm")
    assert [rows.column(name).null_count for name in ("list", "row")] == [12, 12]


def typed(rows: int) -> pa.Table:
    return pa.table(
        {
            "url": [f"{n:04d}.ppm" for n in range(rows)],
            "when": pa.array([n * 10**9 + n for n in range(rows)], pa.timestamp("ns", "UTC")),
            "price": pa.array([decimal.Decimal(n) / 8 for n in range(rows)], pa.decimal128(9, 3)),
            "kind": pa.array(["a", None, "b"] * (rows // 3)).dictionary_encode(),
            "boxes": pa.array(
                [[{"x": n}] * (n % 3) for n in range(rows)], pa.list_(pa.struct({"x": pa.int16()}))
            ),
            "day": pa.array([datetime.date(2026, 1, 1 + n) for n in range(rows)]),
            "vector": pa.array([[n, 0.5] for n in range(rows)], pa.list_(pa.float16(), 2)),
            "view": pa.array([f"{n}" for n in range(rows)], pa.string_view()),
            "pairs": pa.array([[("a", n)] for n in range(rows)], pa.map_(pa.string(), pa.int32())),
            "raw": pa.array([b"\0%d" % n for n in range(rows)], pa.binary()),
        }
    )


@pytest.mark.parametrize("held", [0, 1 << 20])
def test_rows_are_read_wherever_they_stand(
    held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "HELD_BYTES", held)
    monkeypatch.setattr(joining, "BATCH_ROWS", 2)
    listed = typed(12)
    source = write(tmp_path / "typed.parquet", listed, row_group_size=5)
    listing = InputListing(str(source), parse({}, tmp_path))
    columns = joining.ParquetColumns(choose_kept(listing, (), COLUMNS, every=True))
    view = listed.column_names.index("view")
    listed = listed.set_column(view, "view", listed.column("view").cast(pa.string()))
    for wanted in ([11, 3, 3, 0, 7], [4], [5, 4], [*range(12)]):
        rows = columns.read([], np_array(wanted))
        for name in set(listed.column_names) - {"url"}:
            assert (
                rows.column(name).combine_chunks().equals(listed.column(name).take(wanted).combine_chunks())
            ), name


def np_array(numbers: Sequence[int]) -> Any:
    return pa.array(numbers, pa.int64()).to_numpy()


@pytest.mark.parametrize("gap", [0, 1 << 20])
def test_lines_are_read_wherever_they_stand(
    gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "GAP_BYTES", gap)
    lines = [{"url": f"{n}", "said": "x" * n} for n in range(9)]
    listing = InputListing(str(write_lines(tmp_path / "a.jsonl", lines)), parse({}, tmp_path))
    listed = [*listing.inputs()]
    columns = joining.LineColumns(choose_kept(listing, ("said",), COLUMNS, every=False))
    wanted = [listed[n] for n in (8, 2, 2, 3, 0)]
    found = columns.read(wanted, np_array([0] * 5)).column("said").to_pylist()
    assert found == ["x" * n for n in (8, 2, 2, 3, 0)]


def test_a_list_that_changes_while_the_run_reads_it_ends_the_run(
    run: Run, place: Place, tmp_path: Path
) -> None:
    source = write(tmp_path / "list.parquet", laion(4))
    listing = InputListing(str(source), load(place.config), column="URL")
    kept = choose_kept(listing, ("NSFW",), COLUMNS, every=False)
    plans = Plans.open(ClusterFolder(str(run.rows)), load(place.config), resume=True, kept=kept)
    [unit] = Planner(plans, listing.inputs(), 10).units()
    write(source, laion(12).slice(8))
    settings = load(place.config).model_dump_json().encode()
    with closing(ActorChain(settings, str(run.rows), listing.root, kept=kept)) as chain:
        ended = chain(to_table(unit))
    assert "--resume" in ended.column("problem")[0].as_py()
    assert not [*run.rows.glob(PARTS)]


@pytest.fixture
def choose(tmp_path: Path) -> Callable[..., Kept]:
    source = write(tmp_path / "00000.parquet", pa.table({name: ["x"] for name in IMG2DATASET}))

    def choose(*keep: str, every: bool = False, where: Path = source) -> Kept:
        return choose_kept(InputListing(str(where), parse({}, tmp_path)), keep, COLUMNS, every=every)

    return choose


def test_a_column_whose_name_a_part_has_gets_another(choose: Callable[..., Kept]) -> None:
    """The metadata that img2dataset writes beside each tar."""
    expected = ["list_caption", "key", "list_status", "error_message", "list_width", "list_height", "exif"]
    assert [name for name, _ in choose(every=True).fields] == expected
    named = choose("caption=said,key", "exif").fields
    assert [name for name, _ in named] == ["said", "key", "exif"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("captoin", 'has no "captoin". It has caption, key'),
        ("url", 'has no "url"'),  # `path` and `location` have it
        ("caption=Text", 'two columns "Text"'),
        ("caption=a,key=a", 'two columns "a"'),
        ("key,", "--keep NAME"),
    ],
)
def test_what_cannot_be_kept_is_refused(words: str, said: str, choose: Callable[..., Kept]) -> None:
    with pytest.raises(WrongArgument, match=said):
        choose(words)


def test_what_has_no_columns_is_no_list(choose: Callable[..., Kept], tmp_path: Path, place: Place) -> None:
    with pytest.raises(WrongArgument, match="is no list and no tar"):
        choose("a", where=tmp_path / "*.ppm")
    write_tar(tmp_path / "0.tar", {"1.txt": b"x", "1.ppm": picture(1)})
    with pytest.raises(WrongArgument, match="of its first tar have txt"):
        choose("text", where=tmp_path / "0.tar")
