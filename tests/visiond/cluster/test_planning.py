"""Which inputs are handed out, in which units, and what a later run knows of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.config.loading import parse
from visiond.cluster.job import Shards
from visiond.cluster.places import ClusterFolder, ClusterPlace
from visiond.cluster.planning import Planner, Unit, from_table, id_of, to_table
from visiond.cluster.plans import (
    FINISHED,
    FOLDER,
    FRESH,
    SETTINGS,
    DigestSet,
    OtherDriver,
    OutputTaken,
    Plans,
    part_of,
)
from visiond.cluster.reading.inputs import ClusterInput
from visiond.cluster.reading.keeping import Kept


def inputs(numbers: Iterable[int], version: bytes = b"1") -> list[ClusterInput]:
    return [ClusterInput(b"%d" % number, b"/in/%d" % number, version) for number in numbers]


def open_plans(folder: Path, *, resume: bool = True, **settings: Any) -> Plans:
    return Plans.open(ClusterFolder(str(folder)), parse(settings, folder), resume=resume)


def plan(folder: Path, listed: Sequence[ClusterInput], size: int = 10) -> tuple[Planner, list[Unit]]:
    """Form units as a driver does that is killed before any of them runs."""
    plans = open_plans(folder)
    planner = Planner(plans, listed, size)
    units = list(planner.units())
    plans.write([unit.ids for unit in units if unit.fresh])
    return planner, units


def finish(folder: Path, units: Iterable[Unit]) -> None:
    for unit in units:
        assert ClusterFolder(str(folder)).write_whole(part_of(unit.name), b"rows")


def members(units: Iterable[Unit]) -> list[bytes]:
    return [each.name for unit in units for kept in from_table(to_table(unit)) for each in kept.inputs()]


def test_units_have_a_fixed_size_and_each_input_once(tmp_path: Path) -> None:
    planner, units = plan(tmp_path, inputs([*range(25), *range(5)]))
    assert [len(unit.ids) for unit in units] == [10, 10, 5]
    assert members(units) == [b"%d" % number for number in range(25)]
    assert (planner.inputs, planner.duplicates, planner.finished) == (25, 5, 0)


def test_an_input_with_many_images_fills_a_unit(tmp_path: Path) -> None:
    tars = [ClusterInput(b"%d.tar" % n, b"/in/%d.tar" % n, kind="tar", images=1000) for n in range(3)]
    _, units = plan(tmp_path, tars, size=1000)
    assert [len(unit.ids) for unit in units] == [1, 1, 1]


def test_a_later_run_repeats_units_that_are_not_finished_as_they_were(tmp_path: Path) -> None:
    _, units = plan(tmp_path, inputs(range(30)))
    finish(tmp_path, units[:1])
    planner, again = plan(tmp_path, inputs(range(40)), size=7)
    assert {unit.name for unit in again if not unit.fresh} == {unit.name for unit in units[1:]}
    assert sorted(members(again), key=int) == [b"%d" % number for number in range(10, 40)]
    assert planner.finished == 10


def test_the_order_of_a_listing_does_not_matter(tmp_path: Path) -> None:
    _, units = plan(tmp_path, inputs(range(30)))
    _, again = plan(tmp_path, inputs(reversed(range(30))))
    assert {unit.name for unit in again} == {unit.name for unit in units}
    assert not any(unit.fresh for unit in again)


def test_a_unit_whose_input_is_gone_is_repeated_without_it(tmp_path: Path) -> None:
    _, units = plan(tmp_path, inputs(range(10)))
    _, again = plan(tmp_path, inputs(range(9)))
    assert [unit.name for unit in again] == [unit.name for unit in units]
    assert len(members(again)) == 9


def test_a_changed_file_is_another_input(tmp_path: Path) -> None:
    _, units = plan(tmp_path, inputs(range(10)))
    finish(tmp_path, units)
    _, again = plan(tmp_path, inputs(range(10), b"2"))
    assert [unit.fresh for unit in again] == [True]


def rows(numbers: Iterable[int], first: int = 0) -> list[ClusterInput]:
    """A list with these addresses."""
    return [each._replace(row=row, list_name=b"list") for row, each in enumerate(inputs(numbers), first)]


def test_each_row_of_a_list_is_an_input_however_often_its_address_stands_there(tmp_path: Path) -> None:
    listed = rows([0, 1, 0, 0, 2, 1])
    planner, units = plan(tmp_path, listed, size=4)
    assert members(units) == [each.name for each in listed]
    assert (planner.inputs, planner.duplicates) == (6, 0)
    ids = np.concatenate([unit.ids for unit in units])
    assert len(set(ids.tolist())) == 6
    assert [ids[row] for row in (0, 1, 4)] == [id_of(listed[row]) for row in (0, 1, 4)]
    finish(tmp_path, units[:1])
    planner, again = plan(tmp_path, [*listed, *rows([0, 3], first=6)])
    assert planner.finished == 4
    assert members(again) == [b"2", b"1", b"0", b"3"]
    assert [unit.name for unit in again if not unit.fresh] == [units[1].name]


def test_a_list_that_lost_or_gained_rows_has_the_same_first_inputs(tmp_path: Path) -> None:
    _, units = plan(tmp_path, rows(range(10)))
    finish(tmp_path, units)
    planner, again = plan(tmp_path, rows([11, *range(3, 10)]))
    assert (members(again), planner.finished) == ([b"11"], 7)


def test_a_run_that_an_older_visiond_began_is_refused_as_its_parts_have_fewer_columns(tmp_path: Path) -> None:
    plan(tmp_path, inputs(range(30)))
    settings = json.loads((tmp_path / SETTINGS).read_bytes())
    del settings["kept"]
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(OutputTaken, match="begun by an older visiond, whose parts have fewer"):
        open_plans(tmp_path)


def test_what_is_kept_is_the_same_in_all_parts(tmp_path: Path) -> None:
    def open_with(*kept: tuple[str, str, str]) -> Plans:
        chosen = Kept(tuple(each[0] for each in kept), tuple(each[1:] for each in kept))
        return Plans.open(ClusterFolder(str(tmp_path)), parse({}, tmp_path), resume=True, kept=chosen)

    open_with(("TEXT", "said", "string"))
    open_with(("TEXT", "said", "string"))
    for other in [(), (("TEXT", "text", "string"),), (("TEXT", "said", "int64"),)]:
        with pytest.raises(OutputTaken, match=r"other .* --keep"):
            open_with(*other)


def test_a_second_driver_cannot_plan_into_the_same_output(tmp_path: Path) -> None:
    first, second = open_plans(tmp_path), open_plans(tmp_path)
    [unit] = Planner(first, inputs(range(3)), 10).units()
    [other] = Planner(second, inputs(range(1, 4)), 10).units()
    first.write([unit.ids])
    with pytest.raises(OtherDriver, match="--resume"):
        second.write([other.ids])


def test_a_plan_without_the_number_of_its_driver_is_read(tmp_path: Path) -> None:
    _, units = plan(tmp_path, inputs(range(20)))
    file = tmp_path / FOLDER / "plan-00000.npz"
    with np.load(file) as kept:
        np.savez(file, ids=kept["ids"], ends=kept["ends"])
    _, again = plan(tmp_path, inputs(range(20)))
    assert [(unit.name, unit.fresh) for unit in again] == [(unit.name, False) for unit in units]


def test_results_of_an_earlier_run_are_only_continued_when_asked_and_with_the_same_settings(
    tmp_path: Path,
) -> None:
    plan(tmp_path, inputs(range(3)))
    with pytest.raises(OutputTaken, match="--resume"):
        open_plans(tmp_path, resume=False)
    open_plans(tmp_path, pipeline={"drain_seconds": 7})
    with pytest.raises(OutputTaken, match="other"):
        open_plans(tmp_path, stages={"ocr": {"backend": "fake"}})
    with pytest.raises(OutputTaken, match="other --shards"):
        Plans.open(ClusterFolder(str(tmp_path)), parse({}, tmp_path), resume=True, shards=Shards.images)
    with pytest.raises(OutputTaken, match="--float16"):
        Plans.open(ClusterFolder(str(tmp_path)), parse({}, tmp_path), resume=True, float16=True)


def test_a_digest_is_found_among_many(tmp_path: Path) -> None:
    _, units = plan(tmp_path, inputs(range(50)))
    finish(tmp_path, units[:2])
    plans = open_plans(tmp_path)
    ids = np.array([id_of(each) for each in inputs([0, 19, 20, 49, 50])], np.uint64)
    owners = plans.look_up(ids)
    assert owners[:2].tolist() == [FINISHED, FINISHED]
    assert [plans.units[number] for number in owners[2:4]] == [units[2].name, units[4].name]
    assert owners[4] == FRESH


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), max_size=12))
def test_known_digests_are_those_that_were_added(groups: list[list[int]]) -> None:
    known, seen = DigestSet(), set[int]()
    for group in groups:
        new = known.add(np.array(group, np.uint64))
        expected = []
        for number in group:
            expected.append(number not in seen)
            seen.add(number)
        assert new.tolist() == expected


def test_a_file_is_created_once_and_leaves_nothing_when_it_exists(tmp_path: Path) -> None:
    place: ClusterPlace = ClusterFolder(str(tmp_path))
    assert place.write_whole("sub/file", b"first")
    assert not place.write_whole("sub/file", b"second")
    assert (tmp_path / "sub" / "file").stat().st_mode & 0o007 == 0, "others cannot read it"
    assert place.read("sub/file") == b"first"
    assert [*place.names("sub")] == ["file"]
