from __future__ import annotations

import base64
import collections
import contextlib
import csv
import errno
import io
import json
import os
import re
import sqlite3
import struct
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

import daemon.exports.lance
from daemon.config.loading import parse
from daemon.core.errors import MissingLibrary, NotWritable, WrongArgument
from daemon.core.jobs import Job, Placed, Version
from daemon.core.messages import Output
from daemon.exports import conditions, parquet
from daemon.exports.choice import ExportChoice, parse_ratio, pick
from daemon.exports.columns import COLUMNS, ExportColumns
from daemon.exports.datasets import check_target, keep_files, name_images
from daemon.exports.export import export_records, write_parquet
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader
from stages.contract.base import Provenance
from stages.registry.registry import ORDER
from tests.makers import MODELS, admit, complete, done, failed, make_file, make_outputs, make_record

pytestmark = pytest.mark.anyio

INBOX = Path("/inbox")
DOCS = Path(__file__).parents[3] / "docs" / "results.md"
ALL = ExportColumns(ORDER)
row_of = ALL.row_of
BINS = {"A": 12, "B": 6, "C": 3}  # images in each bin of the reader below
VARIANTS = {"A": 3, "B": 6, "C": 0}


async def add_version(ledger: Ledger, path: bytes, mtime_ns: int) -> Job:
    await ledger.admit([make_file(path, mtime_ns=mtime_ns)])
    [job] = await ledger.next_jobs(1, ())
    return job


@pytest.fixture
async def reader(ledger: Ledger) -> AsyncIterator[Reader]:
    """A ledger with 21 images that are DONE and one that FAILED."""
    wanted = [name for name, count in BINS.items() for _ in range(count)]
    jobs = await admit(ledger, *(b"%d.jpg" % number for number in range(len(wanted) + 1)))
    await complete(
        ledger,
        *(done(job, VARIANTS[name]) for job, name in zip(jobs, wanted, strict=False)),
        failed(jobs[-1]),
    )
    opened = Reader(ledger.path)
    yield opened
    opened.close()


def write(
    reader: Reader,
    file: Path,
    format: str = "jsonl",
    bin_name: str = "",
    *,
    columns: ExportColumns = ALL,
    force: bool = False,
    half: bool = False,
    mark: bool = False,
    **ratio: float,
) -> int:
    step = lambda done, total: None  # noqa: E731
    choice = ExportChoice((bin_name,) if bin_name else (), ratio)
    return export_records(reader, file, format, choice, columns, step, force=force, half=half, mark=mark)


def read_rows(file: Path) -> list[dict[str, Any]]:
    match file.suffix:
        case ".csv":
            with file.open(newline="") as lines:
                return list(csv.DictReader(lines))
        case ".parquet":
            return list(pyarrow.parquet.read_table(file).to_pylist(maps_as_pydicts="strict"))
    return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]


def cell(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value


def bins_of(file: Path) -> collections.Counter[str]:
    return collections.Counter(document["bin"]["name"] for document in read_rows(file))


# Rows


def test_a_row_has_a_column_for_each_figure() -> None:
    row = row_of(make_record(INBOX, b"sub/a.jpg"))
    assert list(row) == list(COLUMNS)
    assert row["text"] == "line 3.0\nline 3.1\nline 3.2"
    assert row["objects"] == ["tree", "cat", "dog"]
    assert row["tags"] == ["tree", "cup"]
    figures = ("text_boxes", "object_count", "unique_objects", "caption", "clip_similarity", "seconds")
    assert [row[name] for name in figures] == [3, 3, 3, "a picture of 3 things", 3 / 64, 1.0]
    assert row["digest"] == "sha256:" + "00" * 32


def test_columns_of_a_stage_that_did_not_run_are_empty() -> None:
    row = row_of(make_record(INBOX, outputs=make_outputs(stages=["clip"]), models=[MODELS[2]]))
    empty = ("text", "text_boxes", "text_area_ratio", "objects", "object_count", "caption", "clip_similarity")
    assert {row[name] for name in empty} == {None}
    assert row_of(make_record(INBOX, outputs=make_outputs(stages=["ocr"])))["tags"] is None


def test_a_stage_without_findings_is_distinguished_from_one_that_did_not_run() -> None:
    row = row_of(make_record(INBOX, outputs=make_outputs(0)))
    assert (row["text"], row["text_boxes"], row["objects"], row["object_count"]) == ("", 0, [], 0)


def test_text_is_measured_as_for_the_bin_and_written_whole() -> None:
    corners = [[0, 0], [64, 0], [64, 48], [0, 48]]
    lines = [
        {"text": text, "score": score, "box": corners}
        for text, score in (("Total", 0.9), ("Tqtcl", 0.6), ("O", 0.9))
    ]
    payload = msgspec.json.encode({"lines": lines, "count": 3, "area_ratio": 0.03})
    row = row_of(make_record(INBOX, outputs=make_outputs() | {"ocr": Output(payload, 0.25)}))
    assert (row["text_boxes"], row["text_area_ratio"]) == (1, pytest.approx(0.01))
    assert row["text"] == "Total\nTqtcl"  # a sign is no text, as for the bin


def test_a_page_readers_text_is_in_the_column_of_text() -> None:
    payload = b'{"lines":[],"count":0,"area_ratio":0.0,"text":"# Bill\\n\\nTotal 5","cut":true}'
    row = row_of(make_record(INBOX, outputs=make_outputs() | {"ocr": Output(payload, 0.25)}))
    assert (row["text"], row["text_boxes"], row["text_area_ratio"]) == ("# Bill\n\nTotal 5", 2, None)


def test_a_name_that_is_not_utf_8_also_has_its_bytes() -> None:
    row = row_of(make_record(INBOX, b"latin\xe9.jpg"))
    assert (row["path"], base64.b64decode(row["path_base64"])) == ("latin\ufffd.jpg", b"latin\xe9.jpg")
    assert row_of(make_record(INBOX, "ä.jpg".encode()))["path_base64"] == ""


def test_the_docs_list_every_column_in_its_order() -> None:
    text = DOCS.read_text().partition("## Export")[2].partition("### Which images")[0]
    reported = [re.findall(r"`(\w+)`", first) for first in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)]
    assert [name for names in reported for name in names] == [*COLUMNS, *parquet.FURTHER]


# Files


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
async def test_labels_with_commas_and_quotes_come_apart_again(
    ledger: Ledger, tmp_path: Path, suffix: str
) -> None:
    [job] = await admit(ledger, b"a.jpg")
    labels = ["cat, black", 'the "best"; [dog]', "=cup"]
    tags = [{"label": label, "score": 0.25} for label in labels]
    embedding = {"dim": 1, "dtype": "float16", "base64": "ADw="}
    clip = Output(msgspec.json.encode({"embedding": embedding, "tags": tags}), 0.0)
    await complete(ledger, done(job, outputs=make_outputs() | {"clip": clip}))
    with contextlib.closing(Reader(ledger.path)) as reader:
        write(reader, tmp_path / f"a.{suffix}", suffix)
    [row] = read_rows(tmp_path / f"a.{suffix}")
    assert (msgspec.json.decode(row["tags"]) if suffix == "csv" else row["tags"]) == labels


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
async def test_every_image_that_is_done_is_written_and_counted(
    reader: Reader, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"all.{suffix}"
    assert write(reader, file, suffix) == 21
    rows = read_rows(file)
    assert [int(row["id"]) for row in rows] == list(range(1, 22))


async def test_columns_and_types_are_those_that_are_published(reader: Reader, tmp_path: Path) -> None:
    write(reader, tmp_path / "all.csv", "csv")
    write(reader, tmp_path / "all.parquet", "parquet")
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet")
    assert list(read_rows(tmp_path / "all.csv")[0]) == list(COLUMNS)
    assert table.column_names == [*COLUMNS, *parquet.FURTHER]
    kinds = {
        "int64": int,
        "double": float,
        "string": str,
        "list<element: string>": list,
        "bool": bool,
        "map<string, double ('stage_seconds')>": dict,
        "timestamp[ms, tz=UTC]": datetime,
    }
    assert {name: kinds[str(table.schema.field(name).type)] for name in COLUMNS} == COLUMNS
    line = "list<element: struct<text: string, score: double, box: list<element: list<element: double>>, guessed: bool>>"
    detection = "list<element: struct<label: string, score: double, box: list<element: double>>>"
    caption = "list<element: struct<stage: string, model: string, prompt: string, text: string, similarity: double>>"
    vector = "fixed_size_list<element: float>[16]"
    assert [str(table.schema.field(name).type) for name in parquet.FURTHER] == [
        line,
        detection,
        "list<element: double>",
        caption,
        vector,
    ]


async def test_all_formats_contain_the_same_results(reader: Reader, tmp_path: Path) -> None:
    for suffix in ("csv", "jsonl", "parquet"):
        write(reader, tmp_path / f"all.{suffix}", suffix)
    expected = [row_of(record) for record in reader.finished()]
    moments = [row | {"finished_at": datetime.fromisoformat(row["finished_at"])} for row in expected]
    assert [{name: row[name] for name in COLUMNS} for row in read_rows(tmp_path / "all.parquet")] == moments
    assert read_rows(tmp_path / "all.csv") == [
        {key: "" if value is None else str(cell(value)) for key, value in row.items()} for row in expected
    ]
    assert (tmp_path / "all.jsonl").read_bytes() == b"".join(record.sidecar for record in reader.finished())


@pytest.mark.parametrize("half", [False, True])
async def test_lance_reads_what_parquet_has(
    reader: Reader, tmp_path: Path, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lance = pytest.importorskip("lance", reason="pylance is not installed: make tools")
    for module in (parquet, daemon.exports.lance):
        monkeypatch.setattr(module, "CHUNK", 4)
    monkeypatch.setattr(daemon.exports.lance, "ROWS", 8)  # of a file
    models = ExportColumns(ORDER, models=True)
    for format in ("parquet", "lance"):
        assert write(reader, tmp_path / f"all.{format}", format, columns=models, half=half) == 21
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet").replace_schema_metadata(None)
    found = lance.dataset(tmp_path / "all.lance")
    assert found.to_table() == table
    assert found.schema == table.schema
    assert (found.version, len(found.get_fragments())) == (1, 3)
    assert json.loads((tmp_path / "all.lance" / "visiond.json").read_bytes())["models"]


async def test_lance_without_its_library_says_what_to_type(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(MissingLibrary, match=r"pip install 'visiond\[lance\]', or use --format parquet"):
        write(reader, tmp_path / "all.lance", "lance")
    assert not (tmp_path / "all.lance").exists()


async def test_a_table_of_many_row_groups_is_whole(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "CHUNK", 4)
    assert write(reader, tmp_path / "all.parquet", "parquet") == 21
    assert pyarrow.parquet.ParquetFile(tmp_path / "all.parquet").num_row_groups == 6
    assert len(read_rows(tmp_path / "all.parquet")) == 21


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
async def test_a_file_is_one_row_and_that_is_its_newest_version(
    ledger: Ledger, tmp_path: Path, suffix: str
) -> None:
    for time in (1, 2):
        # each file twice, as after `touch *`; of the fixed and the broken one only one version is DONE
        jobs = {
            path: await add_version(ledger, path, time) for path in (b"kept.jpg", b"fixed.jpg", b"broken.jpg")
        }
        unlucky = b"fixed.jpg" if time == 1 else b"broken.jpg"
        await complete(
            ledger, *(failed(job) if path == unlucky else done(job, variant=0) for path, job in jobs.items())
        )
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert reader.bin_counts() == {"C": 2}
        for ratio in (dict[str, Any](), {"C": 1.0}):
            assert write(reader, tmp_path / f"all.{suffix}", suffix, force=True, **ratio) == 2
            assert [int(row["id"]) for row in read_rows(tmp_path / f"all.{suffix}")] == [4, 5]


async def test_images_that_were_moved_are_a_row_each_though_they_came_under_one_name(
    ledger: Ledger, tmp_path: Path
) -> None:
    for time, name in ((1, b"/done/a.jpg"), (2, b"/done/a~2.jpg")):
        job = await add_version(ledger, b"a.jpg", time)
        await complete(ledger, done(job, variant=0, data=name))
        await ledger.mark_emitted([Placed(job.id, name, job.version)])
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert write(reader, tmp_path / "all.csv", "csv") == sum(reader.bin_counts().values()) == 2
    assert [row["location"] for row in read_rows(tmp_path / "all.csv")] == ["/done/a.jpg", "/done/a~2.jpg"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
async def test_without_an_image_the_file_is_empty_and_valid(
    ledger: Ledger, tmp_path: Path, suffix: str
) -> None:
    reader = Reader(ledger.path)
    assert write(reader, tmp_path / f"none.{suffix}", suffix) == 0
    assert read_rows(tmp_path / f"none.{suffix}") == []
    reader.close()


async def test_one_bin_can_be_written_alone(reader: Reader, tmp_path: Path) -> None:
    assert write(reader, tmp_path / "b.jsonl", bin_name="B") == 6
    assert bins_of(tmp_path / "b.jsonl") == {"B": 6}


async def test_progress_is_reported_with_the_total(reader: Reader, tmp_path: Path) -> None:
    reported: list[tuple[int, int | None]] = []
    step = lambda done, total: reported.append((done, total))  # noqa: E731
    export_records(reader, tmp_path / "c.jsonl", "jsonl", ExportChoice(("C",)), ALL, step)
    assert reported == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    "start",
    [
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "\n=1",
        " =1",
        "＝1",
        "\ufeff=1",
        "\u200b+1",
        "\U0001bca0=1",
        "\u2060\u00ad-1",
        "\x01@1",
        "\u3164\ufe0f=1",
        "﹣1",
    ],
)
async def test_a_cell_that_looks_like_a_formula_is_made_harmless_in_csv(
    ledger: Ledger, tmp_path: Path, start: str
) -> None:
    [job] = await admit(ledger, start.encode() + b".jpg")
    caption = Output(msgspec.json.encode({"text": start, "similarity": -0.5}), 0.0)
    await complete(ledger, done(job, outputs=make_outputs() | {"blip": caption}))
    reader = Reader(ledger.path)
    write(reader, tmp_path / "a.csv", "csv")
    reader.close()
    [row] = read_rows(tmp_path / "a.csv")
    assert (row["path"], row["caption"]) == (f"'{start}.jpg", f"'{start}")
    assert row["clip_similarity"] == "-0.5"  # a number stays one


# Columns that only Parquet has


def embed(*values: float) -> Output:
    """CLIP's answer with such an embedding."""
    raw = base64.b64encode(struct.pack(f"<{len(values)}e", *values)).decode()
    answer = {
        "embedding": {"dim": len(values), "dtype": "float16", "base64": raw},
        "tags": [{"label": "cup", "score": 0.25}],
    }
    return Output(msgspec.json.encode(answer), 0.0)


async def test_the_docs_example_reads_every_embedding(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await export_embeddings(ledger, tmp_path / "results.parquet", embed(0.5, -1), None, embed(2, 0.25))
    text = (Path(__file__).parents[3] / "docs" / "results.md").read_text().partition("## Export")[2]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(text.partition("```python")[2].partition("```")[0], names)
    assert names["vectors"].tolist() == [[0.5, -1], [2, 0.25]]


async def export_embeddings(
    ledger: Ledger, file: Path, *answers: Output | None
) -> tuple[str, list[Any], list[str]]:
    """The type of the column, its values, and the warnings. Each answer is of a different model and file."""
    for number, answer in enumerate(answers):
        models = [Model("clip", f"clip-{number}", "") if model.stage == "clip" else model for model in MODELS]
        await ledger.register([(INBOX, 0)], models)
        await ledger.admit([make_file(b"%d.jpg" % number, inbox=2)])
        [job] = await ledger.next_jobs(1, ())
        outputs = make_outputs(stages=["ocr"]) | ({"clip": answer} if answer else {})
        await complete(ledger, msgspec.structs.replace(done(job, outputs=outputs), bin="A"))
    said: list[str] = []
    with contextlib.closing(Reader(ledger.path)) as reader:
        export_records(
            reader, file, "parquet", ExportChoice(), ALL, lambda done, total: None, warn=said.append
        )
    table = pyarrow.parquet.read_table(file)
    return str(table.schema.field("embedding").type), table.column("embedding").to_pylist(), said


async def test_embeddings_of_one_length_are_lists_of_that_size_and_null_without_the_stage(
    ledger: Ledger, tmp_path: Path
) -> None:
    kind, values, said = await export_embeddings(
        ledger, tmp_path / "a.parquet", embed(0.5, -1), None, embed(2, 0.25)
    )
    assert (kind, values, said) == (
        "fixed_size_list<element: float>[2]",
        [[0.5, -1.0], None, [2.0, 0.25]],
        [],
    )


async def test_embeddings_of_several_lengths_are_plain_lists_and_are_reported(
    ledger: Ledger, tmp_path: Path
) -> None:
    kind, values, said = await export_embeddings(
        ledger, tmp_path / "a.parquet", embed(0.5, -1), None, embed(2)
    )
    assert (kind, values) == ("list<element: float>", [[0.5, -1.0], None, [2.0]])
    assert said[0].startswith("Embeddings have several lengths (1, 2): the column embedding has plain lists")


async def test_a_model_that_no_exported_image_has_any_more_makes_no_other_length(
    ledger: Ledger, tmp_path: Path
) -> None:
    await export_embeddings(ledger, tmp_path / "a.parquet", embed(0.5, -1), embed(2))
    with contextlib.closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("UPDATE image SET status = 4 WHERE id = 2")
    kind, values, said = await export_embeddings(ledger, tmp_path / "b.parquet")
    assert (kind, values, said) == ("fixed_size_list<element: float>[2]", [[0.5, -1.0]], [])


def test_an_embedding_of_a_model_that_came_during_the_export_is_null(tmp_path: Path) -> None:
    record = make_record(INBOX, outputs=make_outputs() | {"clip": embed(1, 2, 3)})
    with (tmp_path / "a.parquet").open("wb") as out:
        write_parquet(out, iter([record]), ALL, sizes=[2])
    assert read_rows(tmp_path / "a.parquet")[0]["embedding"] is None


async def test_boxes_and_scores_are_those_of_the_sidecars(reader: Reader, tmp_path: Path) -> None:
    for suffix in ("jsonl", "parquet"):
        write(reader, tmp_path / f"all.{suffix}", suffix)
    sidecars, rows = read_rows(tmp_path / "all.jsonl"), read_rows(tmp_path / "all.parquet")
    lines = [[{"guessed": False, **line} for line in sidecar["ocr"]["lines"]] for sidecar in sidecars]
    assert [row["text_lines"] for row in rows] == lines
    assert [row["detections"] for row in rows] == [sidecar["objects"]["detections"] for sidecar in sidecars]
    assert [row["tag_scores"] for row in rows] == [
        [tag["score"] for tag in sidecar["clip"]["tags"]] for sidecar in sidecars
    ]
    assert any(row["text_lines"] for row in rows)
    assert any(row["detections"] for row in rows)


async def test_all_captions_of_an_image_are_a_list_with_their_models_and_prompts(tmp_path: Path) -> None:
    about = Provenance(name="qwen3-vl-2b", options={"prompt": "Describe this image."})
    long = Model("blip_long", "sha256:1", "", about)
    outputs = make_outputs() | {"blip_long": Output(b'{"text": "three things", "similarity": null}', 0.0)}
    with (tmp_path / "a.parquet").open("wb") as out:
        columns = ExportColumns([*ORDER, "blip_long"])
        write_parquet(
            out, iter([make_record(INBOX, outputs=outputs, models=[*MODELS, long])]), columns, sizes=[]
        )
    [row] = read_rows(tmp_path / "a.parquet")
    first, second = row["captions"]
    assert (first["stage"], first["model"], first["prompt"]) == ("blip", MODELS[3].provenance.name, None)
    assert (first["text"], first["similarity"]) == (row["caption"], row["clip_similarity"])
    assert second == {
        "stage": "blip_long",
        "model": "qwen3-vl-2b",
        "prompt": "Describe this image.",
        "text": row["blip_long_text"],
        "similarity": None,
    }


async def test_without_its_stage_each_of_these_is_null(tmp_path: Path) -> None:
    record = make_record(INBOX, outputs=make_outputs(stages=["hash"]), models=[])
    with (tmp_path / "a.parquet").open("wb") as out:
        write_parquet(out, iter([record]), ALL, sizes=[])
    [row] = read_rows(tmp_path / "a.parquet")
    assert {row[name] for name in parquet.FURTHER} == {None}


async def test_text_that_ocr_guessed_is_left_out_of_sure_text(tmp_path: Path) -> None:
    lines = [
        {"text": text, "score": 0.95, "box": [[0, 0]] * 4} | guessed
        for text, guessed in (("Total 12.50", {}), ("oıɓʞ mɐɹ", {"guessed": True}))
    ]
    ocr = Output(msgspec.json.encode({"lines": lines, "count": 2, "area_ratio": 0.1}), 0.0)
    row = row_of(make_record(INBOX, outputs=make_outputs() | {"ocr": ocr}))
    assert row["text"] == "Total 12.50\noıɓʞ mɐɹ"
    assert row["sure_text"] == "Total 12.50"


def test_a_text_that_ended_at_the_limit_of_its_page_reader_is_marked() -> None:
    payloads = (
        b'{"lines":[],"count":0,"area_ratio":0.0,"text":"Dear Sir","cut":true}',
        b'{"lines":[],"count":0,"area_ratio":0.0,"text":"Dear Sir"}',
    )
    records = [make_record(INBOX, outputs=make_outputs() | {"ocr": Output(p, 0.0)}) for p in payloads]
    assert [row_of(record)["text_cut"] for record in records] == [True, False]


async def test_embeddings_in_half_precision_are_those_of_the_ledger(reader: Reader, tmp_path: Path) -> None:
    write(reader, tmp_path / "whole.parquet", "parquet")
    write(reader, tmp_path / "half.parquet", "parquet", half=True)
    whole, half = (pyarrow.parquet.read_table(tmp_path / f"{name}.parquet") for name in ("whole", "half"))
    assert str(half.schema.field("embedding").type) == "fixed_size_list<element: halffloat>[16]"
    assert [list(map(float, row)) for row in half["embedding"].to_pylist()] == whole["embedding"].to_pylist()
    with pytest.raises(WrongArgument, match="--float16 is for the embeddings of Parquet"):
        write(reader, tmp_path / "a.csv", "csv", half=True)


# Which images


def numbers_of(reader: Reader, file: Path, **choice: Any) -> list[int]:
    export_records(reader, file, "jsonl", ExportChoice(**choice), ALL, lambda done, total: None, force=True)
    return [row["id"] for row in read_rows(file)]


async def test_a_condition_of_sql_on_the_columns_chooses_images(reader: Reader, tmp_path: Path) -> None:
    everything = [row_of(record) for record in reader.finished()]
    for where, expected in (
        ("bin = 'B'", [row["id"] for row in everything if row["bin"] == "B"]),
        (
            "object_count > 2 OR bin = 'C'",
            [r["id"] for r in everything if r["object_count"] > 2 or r["bin"] == "C"],
        ),
        (
            "EXISTS (SELECT 1 FROM json_each(objects) WHERE value = 'cat')",
            [r["id"] for r in everything if "cat" in r["objects"]],
        ),
        ("json_extract(stage_seconds, '$.ocr') > 0 -- all", [row["id"] for row in everything]),
        ("width IS NULL", []),
        ('"object_count" >= 0 AND "bin" = \'C\'', [row["id"] for row in everything if row["bin"] == "C"]),
    ):
        assert numbers_of(reader, tmp_path / "a.jsonl", where=[where]) == expected, where


FOUND = [
    [("dog", 0.93), ("dog", 0.41), ("traffic light", 0.5)],
    [("dog", 0.8), ("cat", 0.95)],
    [("cat", 0.99)],
    [],
    [("it's a dog", 0.9)],
]


@pytest.fixture
async def scored(ledger: Ledger) -> AsyncIterator[Reader]:
    """A ledger with an image for each of FOUND, and one without stage yolo."""
    jobs = await admit(ledger, *(b"%d.jpg" % number for number in range(len(FOUND) + 1)))
    box = [10.0, 20.0, 110.0, 220.0]
    answers = [
        {"detections": [{"label": label, "score": score, "box": box} for label, score in found]}
        | {"count": len(found), "unique": len({label for label, _ in found}), "dispersion": 0.0}
        for found in FOUND
    ]
    outputs = [make_outputs() | {"yolo": Output(msgspec.json.encode(answer), 0.1)} for answer in answers]
    outputs.append(make_outputs(stages=["ocr", "clip"]))
    await complete(ledger, *(done(job, outputs=each) for job, each in zip(jobs, outputs, strict=True)))
    with contextlib.closing(Reader(ledger.path)) as opened:
        yield opened


def best_of(document: dict[str, Any], label: str) -> float:
    found = document.get("objects", {}).get("detections", [])
    return max((each["score"] for each in found if each["label"] == label), default=0.0)


@pytest.mark.parametrize(
    "where",
    [
        "object_score('dog') > 0.8",
        "OBJECT_SCORE ( 'dog' ) > 0.8 /* not object_score('dog') */ -- nor object_score('dog')",
        "(SELECT object_score('dog') FROM json_each('[1]')) > 0.8 AND 'object_score(''x'')' <> ''",
        "EXISTS (SELECT 1 FROM json_each(detections) WHERE json_extract(value, '$.label') = 'dog' "
        "AND json_extract(value, '$.score') > 0.8)",
    ],
)
async def test_a_condition_on_a_score_chooses_what_a_loop_over_sidecars_does(
    scored: Reader, tmp_path: Path, where: str
) -> None:
    documents = [msgspec.json.decode(record.sidecar) for record in scored.finished()]
    expected = [each["id"] for each in documents if best_of(each, "dog") > 0.8]
    assert numbers_of(scored, tmp_path / "a.jsonl", where=[where]) == expected == [1]


async def test_conditions_have_boxes_lines_and_scores_of_tags(scored: Reader, tmp_path: Path) -> None:
    documents = {(d := msgspec.json.decode(record.sidecar))["id"]: d for record in scored.finished()}
    tags = documents[1]["clip"]["tags"]
    for where, expected in (
        (
            "json_extract(detections, '$[0].box[3]') - json_extract(detections, '$[0].box[1]') = 200",
            [1, 2, 3, 5],
        ),
        ("object_score('dog') IS NULL", [3, 4, 5, 6]),
        ("detections IS NULL", [6]),
        ("object_score('it''s a dog') = 0.9", [5]),
        ("object_score(json_extract(objects, '$[0]')) > 0.9", [1, 3]),
        (f"tag_score('{tags[0]['label']}') = json_extract(tag_scores, '$[0]')", [1, 2, 3, 4, 5, 6]),
        ("json_array_length(text_lines) = 3", [*documents]),
        ("json_extract(text_lines, '$[0].guessed')", []),
        ("json_extract(captions, '$[0].text') = caption", [1, 2, 3, 4, 5]),
    ):
        assert numbers_of(scored, tmp_path / "a.jsonl", where=[where]) == expected, where


async def test_a_label_that_no_image_has_is_refused_with_the_nearest_one_if_it_chooses_none(
    scored: Reader, tmp_path: Path
) -> None:
    for where, hint in (
        ("object_score('dgo') > 0.8", r"object_score\('dgo'\), and none .* did you mean 'dog'\?"),
        ("tag_score('unheard of') > 0.5", "they have for example "),
        ("object_scor('dog') > 0.8", r"no such function: object_scor\b.* did you mean object_score\?"),
        ("near_duplicate_of IS NULL", "near_duplicate_of needs --near"),
        ("text_line IS NULL", r"did you mean text_lines\?"),
    ):
        with pytest.raises(WrongArgument, match=hint):
            numbers_of(scored, tmp_path / "a.jsonl", where=[where])
    for wheres, expected in (
        (["detections IS NULL", "object_score('dgo') > 0"], []),  # of one image, which has no objects
        (["object_score('zebra') IS NULL"], [*range(1, 7)]),
    ):
        assert numbers_of(scored, tmp_path / "a.jsonl", where=wheres) == expected


def test_the_conditions_of_the_docs_are_conditions() -> None:
    text = DOCS.read_text().partition("### Conditions")[2].partition("\n##")[0]
    shown = re.findall(r"^\| (?:with|that) .*? \| `([^`]+)`.* \|$", text, re.MULTILINE)
    columns = ExportColumns([*ORDER, "classifier_safety"]).with_near({})
    for where in shown:
        with conditions.open_condition(where, columns) as condition:
            assert len(condition.read) > 1, where
    assert len(shown) >= 7


async def test_only_columns_that_a_condition_names_are_computed(
    scored: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for name in ("lists_of", "scores_of"):
        original = getattr(conditions, name)
        monkeypatch.setattr(conditions, name, lambda d, n=name, f=original: made.append(n) or f(d))
    with conditions.open_condition("bin = 'A' AND width > 2", ALL) as condition:
        assert sorted(condition.read) == ["bin", "id", "width"]
    numbers_of(scored, tmp_path / "a.jsonl", where=["objects LIKE '%dog%' AND bin <> 'B'"])
    assert made == []
    numbers_of(scored, tmp_path / "a.jsonl", where=["object_score('dog') > 0.8"])
    assert made


async def test_several_conditions_must_all_be_true(reader: Reader, tmp_path: Path) -> None:
    both = numbers_of(reader, tmp_path / "a.jsonl", where=["bin <> 'C'", "object_count > 3"])
    assert both == numbers_of(reader, tmp_path / "a.jsonl", where=["bin <> 'C' AND object_count > 3"]) != []


@pytest.mark.parametrize(
    "where",
    [
        "colour = 1",
        "bin = ",
        "1); DROP TABLE image; --",
        "count(*) > 1",
        "width = (SELECT MAX(width) FROM image)",
        "\"captoin\" = 'x'",
        "path = '\udcff'",
        "",
    ],
)
async def test_a_condition_that_is_none_is_refused_before_anything_is_written(
    reader: Reader, tmp_path: Path, where: str
) -> None:
    with pytest.raises(WrongArgument, match="--where"):
        numbers_of(reader, tmp_path / "a.jsonl", where=[where])
    assert "a.jsonl" not in os.listdir(tmp_path)


async def test_a_column_that_is_none_is_refused_with_the_nearest_one(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(WrongArgument, match=r"no such column: Captoin.* did you mean caption"):
        numbers_of(reader, tmp_path / "a.jsonl", where=["Captoin = 'x'"])


async def test_who_asks_for_a_cluster_learns_what_the_column_is_called(
    reader: Reader, tmp_path: Path
) -> None:
    with pytest.raises(
        WrongArgument, match=r"no such column: cluster.* --near 0.95 the column near_duplicate_of"
    ):
        numbers_of(reader, tmp_path / "a.jsonl", where=["cluster = 3"])


async def test_a_sample_is_the_same_for_a_seed_and_takes_each_image_as_often(
    reader: Reader, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    taken = collections.Counter(
        number for seed in range(300) for number in numbers_of(reader, file, sample=7, seed=seed)
    )
    assert numbers_of(reader, file, sample=7, seed=3) == numbers_of(reader, file, sample=7, seed=3)
    assert len(numbers_of(reader, file, sample=7)) == 7
    assert len(numbers_of(reader, file, sample=100)) == 21
    assert all(60 <= taken[number] <= 140 for number in range(1, 22)), (
        taken
    )  # 100 each; five standard deviations are 41
    assert len(numbers_of(reader, file, sample=5, where=["bin = 'B'"])) == 5


async def test_of_equal_files_the_oldest_is_exported_once(ledger: Ledger, tmp_path: Path) -> None:
    jobs = await admit(ledger, b"a.jpg", b"copy.jpg", b"b.jpg")
    await complete(
        ledger, *(done(job, data=data) for job, data in zip(jobs, (b"1", b"1", b"2"), strict=True))
    )
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert numbers_of(reader, tmp_path / "all.jsonl") == [1, 2, 3]
        assert numbers_of(reader, tmp_path / "once.jsonl", unique=True) == [1, 3]


def near_first(images: Sequence[int]) -> dict[int, tuple[int, float]]:
    """As if all others were near the first image."""
    return dict.fromkeys(images[1:], (images[0], 0.96))


async def test_of_near_duplicates_among_the_chosen_images_the_best_is_exported(
    reader: Reader, tmp_path: Path
) -> None:
    in_b = [record.id for record in reader.finished(["B"])]
    found = partial(numbers_of, reader, tmp_path / "a.jsonl", unique=True, near=near_first)
    assert found() == [1]
    assert found(where=["bin = 'B'"]) == in_b[:1]
    assert found(where=["bin = 'B'"], near=lambda images: {}) == in_b
    assert len(found(sample=5)) == 1


async def test_conditions_on_near_duplicates_look_at_what_the_other_options_choose(
    reader: Reader, tmp_path: Path
) -> None:
    in_b = [record.id for record in reader.finished(["B"])]
    found = partial(numbers_of, reader, tmp_path / "a.jsonl", near=near_first)
    assert found(where=["near_duplicate_of IS NULL"]) == [1]
    assert found(where=["near_duplicate_of IS NULL", "bin = 'B'"]) == in_b[:1]
    assert found(where=["bin = 'B'", "nearness > 0.95"]) == in_b[1:]
    assert found(where=["bin = 'B'", f"near_duplicate_of = {in_b[3]}", f"id > {in_b[2]}"]) == in_b[4:]
    assert found(where=["bin = 'B'", "nearness > 0.97"]) == []
    assert len(found(where=["nearness > 0.95"], sample=5)) == 5
    assert found(where=["near_duplicate_of IS NOT NULL"], unique=True) == []


@pytest.mark.parametrize("format", ["csv", "parquet"])
async def test_a_near_duplicate_names_the_best_one_of_its_group(
    reader: Reader, tmp_path: Path, format: str
) -> None:
    file, choice = tmp_path / f"a.{format}", ExportChoice(near=near_first)
    written = export_records(reader, file, format, choice, ALL, lambda done, total: None)
    rows = read_rows(file)
    assert written == len(rows) == len([*reader.finished()])
    best, *others = [(row["near_duplicate_of"], row["nearness"]) for row in rows]
    assert best in (("", ""), (None, None))
    assert {(int(image), float(nearness)) for image, nearness in others} == {(1, 0.96)}


async def test_a_format_without_columns_has_no_near_duplicates_to_name(
    reader: Reader, tmp_path: Path
) -> None:
    with pytest.raises(WrongArgument, match="Add --unique"):
        numbers_of(reader, tmp_path / "a.jsonl", near=near_first)
    with pytest.raises(WrongArgument, match="--ratio mixes"):
        numbers_of(reader, tmp_path / "a.jsonl", near=near_first, unique=True, ratio={"A": 1.0})


# Models


async def test_each_row_names_its_models_and_the_file_says_what_these_are(
    reader: Reader, tmp_path: Path
) -> None:
    file = tmp_path / "all.parquet"
    write(reader, file, "parquet", columns=ExportColumns(ORDER, models=True))
    known = msgspec.json.decode(pyarrow.parquet.read_metadata(file).metadata[b"visiond.models"])
    named = {model["fingerprint"]: (model["name"], model["commit"]) for model in known}
    assert named == {m.fingerprint: (m.provenance.name, m.provenance.commit) for m in MODELS}
    assert {row["yolo_fingerprint"] for row in read_rows(file)} == {"yolo-1"}


async def test_beside_csv_a_second_file_says_what_the_models_are(reader: Reader, tmp_path: Path) -> None:
    write(reader, tmp_path / "all.csv", "csv", columns=ExportColumns(ORDER, models=True))
    known = {row["fingerprint"]: row["name"] for row in read_rows(tmp_path / "all.models.csv")}
    assert known == {model.fingerprint: model.provenance.name for model in MODELS}
    assert {known[row["ocr_fingerprint"]] for row in read_rows(tmp_path / "all.csv")} == {"ocr-small"}
    with pytest.raises(NotWritable, match=r"all\.csv already exists"):
        write(reader, tmp_path / "all.csv", "csv", columns=ExportColumns(ORDER, models=True))
    with pytest.raises(WrongArgument, match="name a file instead of -"):
        write(reader, Path("-"), "csv", columns=ExportColumns(ORDER, models=True))


def test_the_columns_are_those_of_the_configured_stages_not_of_all_that_are_installed() -> None:
    assert not any(name.startswith("quality") for name in ExportColumns(["ocr"]).kinds)
    assert [*ExportColumns(["ocr", "yolo"], models=True).kinds][-2:] == [
        "ocr_fingerprint",
        "yolo_fingerprint",
    ]


# Mixes


@pytest.mark.parametrize(
    ("ratio", "counts"),
    [
        ({"A": 0.4, "B": 0.4, "C": 0.2}, {"A": 6, "B": 6, "C": 3}),
        ({"A": 0.5, "B": 0.25, "C": 0.25}, {"A": 6, "B": 3, "C": 3}),
        ({"A": 2 / 3, "B": 1 / 3}, {"A": 12, "B": 6}),
        ({"C": 1.0}, {"C": 3}),
    ],
)
async def test_a_mix_has_exactly_its_shares_as_large_as_the_scarcest_bin_allows(
    reader: Reader, tmp_path: Path, ratio: dict[str, Any], counts: dict[str, int]
) -> None:
    assert write(reader, tmp_path / "mix.jsonl", **ratio) == sum(counts.values())
    assert bins_of(tmp_path / "mix.jsonl") == counts


async def test_a_mix_is_the_same_every_time(reader: Reader, tmp_path: Path) -> None:
    for name in ("1.jsonl", "2.jsonl"):
        write(reader, tmp_path / name, A=0.5, C=0.5)
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


def test_a_mix_takes_any_image_of_a_bin_as_likely_as_any_other() -> None:
    records = [make_record(INBOX, id=number) for number in range(10)]
    taken: collections.Counter[int] = collections.Counter()
    for seed in range(2000):
        chosen = [record.id for record in pick(records, {"A": 10}, {"A": 3}, seed)]
        assert len(chosen) == 3
        taken.update(chosen)
    assert min(taken.values()) > 500  # 600 each but for chance, whose deviation is 20
    assert max(taken.values()) < 700


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        ("A=0.4,B=0.4,C=0.2", {"A": 0.4, "B": 0.4, "C": 0.2}),
        (" A=2, B=6,", {"A": 0.25, "B": 0.75}),
        ("Receipts=1", {"Receipts": 1.0}),
    ],
)
def test_shares_add_up_to_one(text: str, ratio: dict[str, float]) -> None:
    assert parse_ratio(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["A", "A=", "A=x", "A=1=2", "A=0", "A=0.5,B=-1", "A=nan", "A=inf"])
def test_an_invalid_mix_is_refused(text: str) -> None:
    with pytest.raises(WrongArgument, match="--ratio"):
        parse_ratio(text)


async def test_a_bin_that_is_not_there_is_refused_with_those_that_are(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(WrongArgument, match="There is no bin Z; bins are A, B, C"):
        write(reader, tmp_path / "z.jsonl", bin_name="Z")
    with pytest.raises(WrongArgument, match="There is no bin Y, Z"):
        write(reader, tmp_path / "z.jsonl", A=0.5, Y=0.2, Z=0.3)
    with pytest.raises(WrongArgument, match="cannot be combined with --bin"):
        write(reader, tmp_path / "z.jsonl", bin_name="A", A=1.0)
    assert not (tmp_path / "z.jsonl").exists()


async def test_a_bin_of_a_users_rule_can_be_exported(ledger: Ledger, tmp_path: Path) -> None:
    [job] = await admit(ledger, b"a.jpg")
    await complete(ledger, msgspec.structs.replace(done(job), bin="Receipts"))
    with contextlib.closing(Reader(ledger.path)) as reader:
        assert write(reader, tmp_path / "a.jsonl", bin_name="Receipts") == 1
        assert write(reader, tmp_path / "b.jsonl", bin_name="B") == 0


# Complete or not at all


class Interrupted(Reader):
    """A ledger whose third record cannot be read."""

    error: Exception

    def finished(self, bins: Collection[str] = (), chunk: int = 256) -> Iterator[Record]:
        for number, record in enumerate(super().finished(bins, chunk)):
            if number == 2:
                raise self.error
            yield record


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(28, "No space left on device"), NotWritable, r"cannot be written: No space"),
        (KeyError("x"), KeyError, "x"),
    ],
)
async def test_an_error_leaves_the_old_file_and_no_part_of_a_new_one(
    reader: Reader, tmp_path: Path, suffix: str, error: Exception, raised: type[Exception], message: str
) -> None:
    file = tmp_path / f"all.{suffix}"
    old = b"id,inbox,path,"
    file.write_bytes(old)
    before = set(os.listdir(tmp_path))
    broken = Interrupted(tmp_path / "state" / "ledger.sqlite")
    broken.error = error
    with pytest.raises(raised, match=message):
        export_records(broken, file, suffix, ExportChoice(), ALL, lambda done, total: None, force=True)
    broken.close()
    assert file.read_bytes() == old
    assert set(os.listdir(tmp_path)) == before


async def test_a_file_that_cannot_be_written_is_named(reader: Reader, tmp_path: Path) -> None:
    with pytest.raises(NotWritable, match=r"missing/all.csv cannot be written: No such file or directory"):
        write(reader, tmp_path / "missing" / "all.csv", "csv")


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
async def test_force_replaces_an_export_but_no_file_that_is_none(
    reader: Reader, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"all.{suffix}"
    models = ExportColumns(ORDER, models=suffix != "jsonl")
    for mark in (True, False) if suffix == "csv" else (False, False):
        assert write(reader, file, suffix, columns=models, mark=mark, force=True) == 21
    foreign = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2]}), foreign)
    for theirs in (b"\xff\xd8\xff\xe0 a photograph", foreign.getvalue(), foreign.getvalue()[:9], b"PAR1"):
        for other in (file, tmp_path / "all.models.csv") if suffix == "csv" else (file,):
            kept = other.read_bytes()
            other.write_bytes(theirs)
            with pytest.raises(
                NotWritable, match=f"{other} is no file of this command, so .*first: rm {other}$"
            ):
                write(reader, file, suffix, columns=models, force=True)
            assert other.read_bytes() == theirs
            other.write_bytes(kept)


# Folders


async def test_a_folder_is_replaced_only_if_an_export_made_it(reader: Reader, tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "coco"
    mine.mkdir()
    (mine / "holiday.jpg").touch()
    with pytest.raises(NotWritable, match="mine already exists, and no export of visiond made it"):
        write(reader, mine, "coco", force=True)
    assert write(reader, folder, "coco") == 21
    with pytest.raises(NotWritable, match=r"coco already exists.*--force"):
        write(reader, folder, "coco")
    assert write(reader, folder, "coco", "B", force=True) == 6
    assert len(json.loads((folder / "instances.json").read_bytes())["images"]) == 6
    known = json.loads((folder / "visiond.json").read_bytes())["models"]
    assert {model["fingerprint"]: model["name"] for model in known} == {
        model.fingerprint: model.provenance.name for model in MODELS
    }
    assert set(os.listdir(tmp_path)) == {"inbox", "state", "mine", "coco"}
    assert os.listdir(mine) == ["holiday.jpg"]
    (folder / "runs").mkdir()
    with pytest.raises(NotWritable, match="coco already exists and has runs, which no export made"):
        write(reader, folder, "coco", force=True)


async def test_an_error_leaves_the_old_folder_and_no_part_of_a_new_one(
    reader: Reader, tmp_path: Path
) -> None:
    folder = tmp_path / "coco"
    write(reader, folder, "coco")
    before, broken = set(os.listdir(tmp_path)), Interrupted(tmp_path / "state" / "ledger.sqlite")
    broken.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(NotWritable, match="No space left on device"):
        write(broken, folder, "coco", force=True)
    broken.close()
    assert len(json.loads((folder / "instances.json").read_bytes())["images"]) == 21
    assert set(os.listdir(tmp_path)) == before


async def test_images_whose_files_are_gone_or_have_changed_are_left_out_of_data_sets_with_images(
    ledger: Ledger, tmp_path: Path
) -> None:
    inbox = tmp_path / "inbox"
    files = {}
    for name in ("a.jpg", "changed.jpg", "gone.jpg"):
        (inbox / name).write_bytes(name.encode() + b"\xff\xd9")
        files[name] = Version.of((inbox / name).stat())
    await ledger.admit([make_file(name.encode(), **version._asdict()) for name, version in files.items()])
    jobs = await ledger.next_jobs(3, ())
    await complete(ledger, *(done(job, data=(inbox / os.fsdecode(job.path)).read_bytes()) for job in jobs))
    (inbox / "changed.jpg").write_bytes(b"other bytes")
    (inbox / "gone.jpg").unlink()
    step, said = lambda done, total: None, list[str]()
    with contextlib.closing(Reader(ledger.path)) as reader:
        for format in ("yolo", "webdataset"):
            file = tmp_path / format
            assert export_records(reader, file, format, ExportChoice(), ALL, step, warn=said.append) == 1
    assert [file.name for file in (tmp_path / "yolo" / "images").rglob("*.jpg")] == ["a-1.jpg"]
    assert said[0].startswith(
        "2 images left out, as their files are gone, have changed since, or cannot be read"
    )
    assert len(said) == 2


@pytest.mark.parametrize(
    ("file", "holder"),
    [
        ("in/a.csv", "the inbox {}/in, where the daemon takes every file"),
        ("in/new/deep/a.csv", "the inbox {}/in"),
        ("link/a.csv", "the inbox {}/in"),
        ("flat/a.csv", "the inbox {}/flat"),
        ("flat/new/a.csv", ""),
        ("results/sub/a.csv", "{}/results, a folder of the daemon (output.results)"),
        ("failed/coco", "{}/failed, a folder of the daemon (output.failed)"),
        ("done/a.csv", "{}/done, a folder of the daemon (output.done)"),
        ("bins/a.csv", "{}/bins, a folder of the daemon (output.bins_folder)"),
        ("state/files.sqlite", "{}/state, a folder of the daemon (state.path)"),
        ("results.xmp/coco", '{}/results.xmp, a folder of the daemon (output.sinks "xmp")'),
        ("models/a.csv", "{}/models, a folder of the daemon (models.folder)"),
        ("backups/a.csv", "{}/backups, a folder of the daemon (upkeep.backup_folder)"),
        ("results.hocr/coco", ""),
        ("in.csv", ""),
        ("-", ""),
    ],
)
def test_an_export_into_a_folder_of_the_daemon_is_refused_and_the_folder_named(
    tmp_path: Path, file: str, holder: str
) -> None:
    for name in (
        "in",
        "flat/new",
        "results",
        "failed",
        "done",
        "bins",
        "state",
        "results.xmp",
        "results.hocr",
        "models",
        "backups",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("in")
    inboxes = [{"path": "in", "name": "in"}, {"path": "flat", "name": "flat", "recursive": False}]
    config = parse(
        {
            "inbox": inboxes,
            "output": {"sinks": ["xmp"]},
            "models": {"folder": "models"},
            "upkeep": {"backup_folder": "backups"},
        },
        tmp_path,
    )
    target = Path(file) if file == "-" else tmp_path / file
    expected = f"{target} is inside {holder.format(tmp_path)}"
    with pytest.raises(WrongArgument, match=re.escape(expected)) if holder else contextlib.nullcontext():
        check_target(config, target)


def test_an_export_in_the_place_of_the_file_of_the_sink_jsonl_is_refused(tmp_path: Path) -> None:
    without, config = (
        parse({"inbox": [{"path": "in"}], "output": {"sinks": sinks}}, tmp_path) for sinks in ([], ["jsonl"])
    )
    check_target(without, tmp_path / "results.jsonl")
    with pytest.raises(WrongArgument, match="appends the records of the sink jsonl to"):
        check_target(config, tmp_path / "results.jsonl")


async def test_an_export_says_which_models_are_a_demonstration_and_that_a_list_of_models_beside_it_is_older(
    tmp_path: Path,
) -> None:
    notice, file, said = "trained for a demonstration", tmp_path / "a.csv", list[str]()
    models = [Model(m.stage, m.fingerprint, notice * (m.stage in ("yolo", "blip"))) for m in MODELS]
    ledger = Ledger(tmp_path / "ledger.sqlite")
    await ledger.register([(INBOX, 0)], models)
    await complete(ledger, *map(done, await admit(ledger, b"a.jpg", b"b.jpg")))
    with contextlib.closing(ledger), contextlib.closing(Reader(ledger.path)) as reader:
        for columns in (ExportColumns(ORDER, models=True), ALL):
            step = lambda done, total: None  # noqa: E731
            export_records(reader, file, "csv", ExportChoice(), columns, step, force=True, warn=said.append)
    assert len(said) == 3
    for line in (said[0], said[2]):
        assert line.startswith(f"Note: yolo and blip: {notice}; for real images: `visiond setup")
    assert said[1].startswith(f"{tmp_path / 'a.models.csv'} is of another export")


def test_an_image_in_a_store_is_refused_for_a_data_set_with_images() -> None:
    images = name_images([make_record(INBOX, location=b"s3://bucket/a.jpg")], {}, [])
    with pytest.raises(
        WrongArgument, match=r"s3://bucket/a\.jpg is in an object store, and yolo needs files"
    ):
        next(keep_files(images, "yolo"))


class Growing(Reader):
    counted: dict[str, int]

    def bin_counts(self) -> dict[str, int]:
        return self.counted


@pytest.mark.parametrize("counted", [{"A": 2, "C": 2}, {"C": 2}])
async def test_a_mix_is_exact_though_images_are_added_meanwhile(
    ledger: Ledger, tmp_path: Path, counted: dict[str, int]
) -> None:
    jobs = await admit(ledger, *(b"%d.jpg" % number for number in range(40)))
    await complete(ledger, *(done(job, variant=3 * (job.id % 2)) for job in jobs))
    reader = Growing(ledger.path)
    reader.counted = counted
    assert (
        export_records(
            reader,
            tmp_path / "mix.jsonl",
            "jsonl",
            ExportChoice(ratio={"C": 1.0}),
            ALL,
            lambda done, total: None,
        )
        == 2
    )
    reader.close()


async def test_csv_begins_with_a_byte_order_mark_on_wish(reader: Reader, tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.csv", tmp_path / "marked.csv"
    for file, mark in ((plain, False), (marked, True)):
        export_records(reader, file, "csv", ExportChoice(), ALL, lambda done, total: None, mark=mark)
    assert marked.read_bytes() == b"\xef\xbb\xbf" + plain.read_bytes()
    with pytest.raises(WrongArgument, match="--bom is for CSV"):
        export_records(
            reader, tmp_path / "a.jsonl", "jsonl", ExportChoice(), ALL, lambda done, total: None, mark=True
        )
