"""The sink lance: one row for each image, with its last answer, and versions that are whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import daemon.exports.lance
from daemon.config.loading import parse
from daemon.config.state import IDENTITY, LEDGER
from daemon.core.errors import ConfigError, MissingLibrary, NotWritable
from daemon.core.jobs import JobStatus
from daemon.core.messages import Output
from daemon.exports.lance import LanceSink
from daemon.ledger.identity import open_ledger
from daemon.ledger.record import Record
from stages.contract.processes import environment, python
from tests.daemon.exports.test_export import embed
from tests.daemon_process import seeded
from tests.makers import make_outputs, make_record

lance = pytest.importorskip("lance", reason="pylance is not installed: make tools")
pytestmark = pytest.mark.anyio

GROUP = 16
# Appends groups of rows until it is killed. Argument: the folder, and the number of its first group.
ENDLESS = f"""
import itertools, sys
from pathlib import Path
import anyio
import daemon.exports.lance
from tests.daemon.exports.test_lance import GROUP, make_all, make_sink
daemon.exports.lance.FRAGMENTS, daemon.exports.lance.ROWS = 3, {GROUP} * 3
folder, first = Path(sys.argv[1]), int(sys.argv[2])
sink = make_sink(folder)
for group in itertools.count(first):
    anyio.run(sink.append, make_all(folder, range(group * GROUP, group * GROUP + GROUP), f"group {{group}}"))
    print(group, flush=True)
"""


def make_sink(folder: Path, **pipeline: Any) -> LanceSink:
    config = parse({"inbox": [{"path": "in"}], "pipeline": pipeline}, folder)
    config.state.path.mkdir(exist_ok=True)
    open_ledger(config.state.path / LEDGER)[0].close()
    return LanceSink(config)


def make(folder: Path, number: int, text: str, **fields: Any) -> Record:
    outputs = make_outputs() | {"blip": Output(b'{"text":"%s","similarity":0.3}' % text.encode(), 0.25)}
    return make_record(
        folder / "in", **dict[str, Any](id=number, path=b"%d.jpg" % number, outputs=outputs) | fields
    )


def make_all(folder: Path, numbers: Sequence[int], text: str = "picture") -> list[Record]:
    return [make(folder, number, text) for number in numbers]


def open_dataset(folder: Path, version: int | str | None = None) -> Any:
    return lance.dataset(folder / "results.lance", version=version)


def captions(folder: Path) -> dict[int, str]:
    rows = open_dataset(folder).to_table(["id", "caption"]).to_pylist()
    found = {row["id"]: row["caption"] for row in rows}
    assert len(found) == len(rows)  # no image has two
    return found


async def test_records_that_come_again_leave_one_row_for_each_image(tmp_path: Path) -> None:
    await make_sink(tmp_path).append(make_all(tmp_path, [1, 2, 3], "old"))
    sink = make_sink(tmp_path)  # the next start
    for _ in range(2):
        await sink.append(make_all(tmp_path, [2, 3, 4], "new"))
    assert captions(tmp_path) == {1: "old", 2: "new", 3: "new", 4: "new"}
    await sink.append([make(tmp_path, 1, "one"), make(tmp_path, 1, "two")])
    await sink.append([make(tmp_path, 2, "", status=JobStatus.FAILED)])  # as its sidecar, its row stays
    assert captions(tmp_path) == {1: "two", 2: "new", 3: "new", 4: "new"}


async def test_rows_of_another_ledger_are_kept_and_the_sink_says_what_to_type(tmp_path: Path) -> None:
    await make_sink(tmp_path).append(make_all(tmp_path, [1, 2], "old"))
    state = make_sink(tmp_path)._config.state.path
    for name in (IDENTITY, LEDGER):  # to start with an empty ledger
        (state / name).unlink()
    sink = make_sink(tmp_path)
    why = "results.lance has rows of another ledger, .* move that folder away and restart .* `visiond redo --all`"
    with pytest.raises(NotWritable, match=why):
        await sink.append(make_all(tmp_path, [1], "new"))
    assert re.search(why, sink.problem())
    assert captions(tmp_path) == {1: "old", 2: "old"}
    (tmp_path / "results.lance").rename(tmp_path / "old.lance")
    sink = make_sink(tmp_path)
    assert not sink.problem()
    await sink.append(make_all(tmp_path, [1], "new"))
    assert captions(tmp_path) == {1: "new"}


async def test_a_ledger_whose_identity_is_gone_is_not_believed_until_the_next_start(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    (sink._config.state.path / IDENTITY).unlink()
    with pytest.raises(NotWritable, match=r"identity, .* is lost\. Restart the daemon"):
        await sink.append(make_all(tmp_path, [1]))
    assert not (tmp_path / "results.lance").exists()
    await make_sink(tmp_path).append(make_all(tmp_path, [1]))
    assert [*captions(tmp_path)] == [1]


async def test_a_file_that_was_renamed_has_its_row_under_the_new_name(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    for path in (b"a.jpg", b"b.jpg"):
        await sink.append([make(tmp_path, 1, "picture", path=path)])
    assert open_dataset(tmp_path).to_table(["id", "path"]).to_pylist() == [{"id": 1, "path": "b.jpg"}]


async def test_rows_are_those_of_an_export_with_the_models(tmp_path: Path) -> None:
    records, sink = make_all(tmp_path, [1, 2]), make_sink(tmp_path)
    await sink.append(records)
    size = open_dataset(tmp_path).schema.field("embedding").type.list_size
    daemon.exports.lance.write_lance(tmp_path / "export", records, sink._columns, [size])
    exported = lance.dataset(tmp_path / "export").to_table()
    assert open_dataset(tmp_path).to_table().sort_by("id") == exported
    assert exported["clip_fingerprint"].to_pylist()[0]


async def test_columns_and_embeddings_that_come_later_are_empty_in_earlier_rows(tmp_path: Path) -> None:
    outputs = make_outputs(stages=["ocr"])
    few = make_sink(tmp_path, stages=["ocr"])
    await few.append([make(tmp_path, 1, "", outputs=outputs)])
    assert not {"embedding", "clip_fingerprint"} & {*open_dataset(tmp_path).schema.names}
    await make_sink(tmp_path).append([make(tmp_path, 2, "", outputs=outputs | {"clip": embed(1, 0)})])
    await few.append([make(tmp_path, 3, "", outputs=outputs)])
    rows = open_dataset(tmp_path).to_table().sort_by("id").to_pylist()
    assert [row["embedding"] for row in rows] == [None, [1, 0], None]
    assert [bool(row["clip_fingerprint"]) for row in rows] == [False, True, False]


async def test_embeddings_of_another_length_are_refused_with_what_to_do(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    await sink.append([make(tmp_path, 1, "", outputs=make_outputs() | {"clip": embed(1, 0)})])
    with pytest.raises(
        NotWritable, match=r"embeddings of 2 numbers, and those of the model have 3. To go on, move"
    ):
        await sink.append([make(tmp_path, 2, "", outputs=make_outputs() | {"clip": embed(1, 0, 0)})])
    assert [*captions(tmp_path)] == [1]


@pytest.mark.parametrize("torn", [b"", b"half", bytes(500)])
async def test_a_version_that_a_power_failure_has_torn_is_written_again(tmp_path: Path, torn: bytes) -> None:
    for numbers in ([1], [2]):
        await make_sink(tmp_path).append(make_all(tmp_path, numbers))
    newest = min((tmp_path / "results.lance" / "_versions").glob("*.manifest"))
    newest.write_bytes(torn)
    await make_sink(tmp_path).append(make_all(tmp_path, [2, 3]))
    assert [*captions(tmp_path)] == [1, 2, 3]


async def test_a_damaged_data_set_is_left_alone_and_named(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    await sink.append(make_all(tmp_path, [1]))
    for file in (tmp_path / "results.lance" / "data").iterdir():
        file.write_bytes(b"not rows")
    with pytest.raises(
        NotWritable, match=r"results.lance does not take the records: .*If that stays so, move .*redo --all"
    ) as caught:
        await sink.append(make_all(tmp_path, [1]))
    assert "/rust/" not in str(caught.value)


async def test_small_files_become_one_and_old_versions_go_but_for_those_with_a_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FRAGMENTS", 4), ("ROWS", 4), ("KEPT", timedelta(0))):
        monkeypatch.setattr(daemon.exports.lance, name, value)
    sink = make_sink(tmp_path)
    await sink.append(make_all(tmp_path, [0]))
    open_dataset(tmp_path).tags.create("first", 2)
    for number in range(1, 11):
        await sink.append(make_all(tmp_path, [number]))
        assert len(open_dataset(tmp_path).get_fragments()) < 7
    assert [*captions(tmp_path)] == [*range(11)]
    assert len(open_dataset(tmp_path).versions()) < 7
    assert open_dataset(tmp_path, "first").count_rows() == 1


async def test_rows_are_on_the_disk_before_their_version_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = tmp_path / "results.lance", list[tuple[int, int]]()

    def note(folders: list[bytes]) -> None:
        seen.append((len([*folder.glob("data/*")]), len([*folder.glob("_versions/*.manifest")])))

    sink = make_sink(tmp_path)
    await sink.append(make_all(tmp_path, [1]))
    monkeypatch.setattr(daemon.exports.lance, "sync_folders", note)
    await sink.append(make_all(tmp_path, [2]))
    assert seen == [(2, 2), (2, 3)]
    monkeypatch.setattr(daemon.exports.lance, "FRAGMENTS", 3)  # these become one
    await sink.append(make_all(tmp_path, [3]))
    assert seen[2:] == [(3, 3), (3, 4), (4, 4), (4, 6)]  # it reserves numbers of files first


def test_kill_9_at_any_instant_leaves_whole_groups_and_what_is_taken_is_kept(tmp_path: Path) -> None:
    chance, taken, first, rounds = seeded(), set[int](), 0, 0
    while rounds < 5 or first <= 5:  # a busy machine may take one group a round
        rounds += 1
        command = [*python("-c", ENDLESS), str(tmp_path), str(first)]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            taken.add(int(process.stdout.readline()))  # it is at work
            time.sleep(chance.uniform(0, 0.3))
            os.kill(process.pid, signal.SIGKILL)
            taken |= {int(line) for line in process.stdout.read().splitlines()}
        found = captions(tmp_path)
        groups = {number // GROUP for number in found}
        assert groups >= taken
        assert found == {
            n: f"group {group}" for group in groups for n in range(group * GROUP, (group + 1) * GROUP)
        }
        assert groups - taken <= {max(taken) + 1}  # written, and killed before it could say so
        first = max(taken) + 1


async def test_without_its_library_the_sink_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    why = "Lance needs pylance: pip install 'visiond[lance]'"
    assert make_sink(tmp_path).problem() == why
    with pytest.raises(MissingLibrary, match=re.escape(why)):
        await make_sink(tmp_path).append(make_all(tmp_path, [1]))


def test_the_folder_of_the_sink_cannot_be_in_the_way_of_an_inbox(tmp_path: Path) -> None:
    tables = {"inbox": [{"path": "results.lance/in"}], "output": {"sinks": ["lance"]}}
    with pytest.raises(ConfigError, match=r'results\.lance, the folder of output\.sinks "lance"'):
        parse(tables, tmp_path)
