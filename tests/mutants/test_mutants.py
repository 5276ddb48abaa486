"""The table of planted bugs matches the source. No bug is planted here: `make mutants` does that."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.mutants.__main__ import find_noticed, find_problems
from tests.mutants.planting import Copy, DoesNotApply, Mutant, failures
from tests.mutants.table import MUTANTS

TEST = "mutants/test_mutants.py::test_every_row_applies_to_the_source_and_names_tests_that_exist"
ROW = Mutant("one", "a promise", "a.py", "lock()", "pass", (TEST,))
SOURCE = "def take():\n    lock()\n\n\nclass Store:\n    def take(self):\n        lock()\n"


def test_every_row_applies_to_the_source_and_names_tests_that_exist() -> None:
    assert [problem for mutant in MUTANTS for problem in find_problems(mutant)] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.tests and mutant.before != mutant.after for mutant in MUTANTS)


def test_a_row_whose_tests_or_text_are_not_there_is_a_problem() -> None:
    here = dataclasses.replace(ROW, file="tests/mutants/test_mutants.py", before="no such" + " text")
    assert ["0 times" in problem for problem in find_problems(here)] == [True]
    gone = dataclasses.replace(
        MUTANTS[0], tests=("mutants/test_mutants.py::test_that_never_was", "none/test_none.py::test_one")
    )
    assert len(find_problems(gone)) == 2


def test_a_piece_is_planted_in_its_function_alone() -> None:
    assert dataclasses.replace(ROW, within="Store.take").plant(SOURCE) == SOURCE[:-7] + "pass\n"
    with pytest.raises(DoesNotApply, match="2 times"):
        ROW.plant(SOURCE)
    with pytest.raises(DoesNotApply, match="2 of take"):
        dataclasses.replace(ROW, within="take").plant(SOURCE)


def test_a_piece_is_found_however_its_lines_are_wrapped() -> None:
    row = dataclasses.replace(ROW, before="call(one, [two, three])", after="pass")
    assert row.plant("call(\n    one,\n    [\n        two,\n        three,\n    ],\n)\n") == "pass\n"
    with pytest.raises(DoesNotApply, match="0 times"):
        row.plant("call(one, [two three])\n")


def test_a_bug_that_is_not_valid_python_is_not_planted() -> None:
    with pytest.raises(DoesNotApply, match="no Python"):
        dataclasses.replace(ROW, within="Store.take", after="pass(").plant(SOURCE)


def test_the_failures_are_read_from_what_pytest_prints() -> None:
    text = "___ ERROR at teardown of test_two[x] ___\nFAILED tests/daemon/test_a.py::test_one[x-1] - assert 1\n1 failed\n"
    assert list(failures(text)) == ["test_two", "test_one"]
    assert find_noticed(1, text) == "test_two, test_one"


def test_a_test_whose_fixtures_fail_has_noticed_nothing() -> None:
    assert find_noticed(1, "___ ERROR at setup of test_one ___\nE  KeyError\n1 error in 2.00s\n") == ""
    assert find_noticed(1, "+++ Timeout +++\n") == "a run without an end"
    assert find_noticed(2, "___ ERROR collecting tests/test_a.py ___\n1 error in 2.00s\n") == ""


def test_children_of_the_copy_import_the_copy_and_notice_what_is_planted_there(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    assert [Path(file).is_relative_to(copy.root) for file in copy.imports()] == [True] * 4
    probe = "daemon/ledger/test_schema.py::test_migrations_run_once_and_in_order"
    assert copy.run((probe,))[0] == 0
    source = (copy.root / "daemon/ledger/schema.py").read_text()
    copy.write(
        "daemon/ledger/schema.py", source.replace("if version < newest():", "if version < 0 * newest():")
    )
    status, text = copy.run((probe,))
    assert (status, list(failures(text))) == (1, ["test_migrations_run_once_and_in_order"])
