from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, DistributionFinder, EntryPoint
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

import msgspec
import pytest

from stages.classifier.descriptor import CLASSIFIER
from stages.contract import plugins
from stages.contract.descriptor import Backend, Descriptor
from stages.hash.descriptor import HASH
from stages.registry.registry import BUILT_IN


class Answer(msgspec.Struct, frozen=True):
    text: str


def describe(name: str, **fields: Any) -> Descriptor:
    backend = Backend(place="nowhere:Stage", options=Answer)
    usual: dict[str, Any] = {"key": name, "result": Answer, "backends": {"b": backend}}
    return Descriptor(name=name, **usual | fields)


FIRST, SECOND = describe("first", uses=("second", "ocr")), describe("second")
OCR, RENAMED, BARE, HYPHEN = (
    describe("ocr"),
    describe("renamed", key="other"),
    describe("bare", backends={}),
    describe("a-b"),
)
BIN, TEXT = describe("bin"), "not a stage"
OWN_HASH = describe("hash")
MISSPELT = describe("misspelt", uses=("clipp", "ocr", "zzz"))
LISTED, UNUSED = describe("listed", backends=["b"]), describe("unused", uses=None)
NOTHING, PLAIN = (
    describe("nothing", result=None),
    describe("plain", backends={"b": Backend(place="x:y", options=cast(Any, dict))}),
)


class Lost(msgspec.Struct):
    field: NoSuchName  # type: ignore[name-defined] # noqa: F821


UNREADABLE = describe("unreadable", result=Lost)


def gather(monkeypatch: pytest.MonkeyPatch, **values: str) -> plugins.Gathered:
    entries = [EntryPoint(name.replace("_", "-"), value, plugins.GROUP) for name, value in values.items()]
    monkeypatch.setattr(plugins, "find_entries", lambda: entries)
    return plugins.gather(BUILT_IN)


def test_stages_of_plug_ins_run_after_visionds_own_and_after_those_that_they_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = gather(monkeypatch, first=f"{__name__}:FIRST", second=f"{__name__}:SECOND")
    assert list(found.stages) == ["ocr", "yolo", "clip", "blip", "second", "first"]
    assert found.problems == {}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("gone", "no_such_module:STAGE", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("gone", f"{__name__}:NONE", "has no attribute 'NONE'"),
        ("text", f"{__name__}:TEXT", "is not a stages.contract.descriptor.Descriptor"),
        ("renamed", f"{__name__}:RENAMED", 'name "renamed" and key "other" must both be "renamed"'),
        ("another", f"{__name__}:SECOND", 'name "second" and key "second" must both be "another"'),
        ("a_b", f"{__name__}:HYPHEN", "lowercase letters and digits"),
        ("bin", f"{__name__}:BIN", "not one that visiond uses itself"),
        ("ocr", f"{__name__}:OCR", "visiond itself has a stage with this name"),
        ("bare", f"{__name__}:BARE", "it has no backends"),
        ("listed", f"{__name__}:LISTED", "it has no backends"),
        ("unused", f"{__name__}:UNUSED", "must be a tuple"),
        ("nothing", f"{__name__}:NOTHING", "its result must be a msgspec.Struct"),
        (
            "plain",
            f"{__name__}:PLAIN",
            'its backend "b" must be a Backend whose options are a msgspec.Struct',
        ),
        ("unreadable", f"{__name__}:UNREADABLE", "the type of its result cannot be read: NameError"),
        ("leaves", "tests.stages.leaves:STAGE", "SystemExit: 3"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named_and_stops_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    found = gather(monkeypatch, **{name: value}, second=f"{__name__}:SECOND")
    assert list(found.stages) == ["ocr", "yolo", "clip", "blip", "second"]
    [problem] = found.problems.values()
    assert problem.startswith(f'The stage "{name.replace("_", "-")}" of the plug-in {value} cannot be used: ')
    assert why in problem


def test_if_two_distributions_have_a_stage_of_the_same_name_neither_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [EntryPoint("second", f"{__name__}:{name}", plugins.GROUP) for name in ("SECOND", "FIRST")]
    monkeypatch.setattr(plugins, "find_entries", lambda: entries)
    found = plugins.gather(BUILT_IN)
    assert list(found.stages) == ["ocr", "yolo", "clip", "blip"]
    assert "has a stage with this name too; uninstall one of them" in found.problems["second"]


def test_if_a_plug_in_has_the_name_of_a_stage_that_must_be_named_neither_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A configuration of an earlier version means the plug-in's."""
    entries = [EntryPoint("hash", f"{__name__}:OWN_HASH", plugins.GROUP)]
    monkeypatch.setattr(plugins, "find_entries", lambda: entries)
    found = plugins.gather(BUILT_IN, (CLASSIFIER, HASH))
    assert list(found.stages) == ["ocr", "yolo", "clip", "blip", "classifier"]
    assert found.problems["hash"] == (
        f'The stage "hash" of the plug-in {__name__}:OWN_HASH cannot be used: visiond itself has a stage with this name; '
        "rename the stage of the plug-in, or uninstall the plug-in."
    )


def test_an_unknown_stage_in_uses_is_named_with_the_nearest_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = gather(monkeypatch, misspelt=f"{__name__}:MISSPELT")
    assert "misspelt" in found.stages
    assert found.problems["misspelt"] == (
        f'The stage "misspelt" of the plug-in {__name__}:MISSPELT uses stages that are not installed: '
        '"clipp" (did you mean "clip"?), "zzz".'
    )


def test_a_descriptor_that_imports_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # in place of torch, which the tests have imported already
    monkeypatch.setattr(plugins, "HEAVY", {"wave"})
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    monkeypatch.delitem(sys.modules, "tests.stages.heavy", raising=False)
    found = gather(monkeypatch, heavy="tests.stages.heavy:HEAVY", second=f"{__name__}:SECOND")
    assert list(found.problems) == ["heavy"]
    assert "imports wave with its descriptor, which makes every command slow" in found.problems["heavy"]
    assert "heavy" in found.stages


METADATA = "Metadata-Version: 2.1\nName: quality\nVersion: 1.0\n"
ENTRY_POINTS = "[visiond.stages]\nquality = quality:QUALITY\n"


def put_info(folder: Path, metadata: str, entry_points: str = ENTRY_POINTS) -> Path:
    folder.mkdir(parents=True)
    (folder / metadata).write_text(METADATA)
    (folder / "entry_points.txt").write_text(entry_points)
    return folder


def install(site: Path) -> Path:
    put_info(site / "quality-1.0.dist-info", "METADATA")
    return site


def install_shouting(site: Path) -> Path:
    put_info(site / "Quality-1.0.DIST-INFO", "METADATA")
    return site


def install_old(site: Path) -> Path:
    put_info(site / "quality-1.0.egg-info", "PKG-INFO")
    return site


def install_egg(site: Path) -> Path:
    return put_info(site / "quality.egg" / "EGG-INFO", "PKG-INFO").parent


def install_archive(site: Path) -> Path:
    with ZipFile(site / "quality.zip", "w") as archive:
        archive.writestr("quality-1.0.dist-info/METADATA", METADATA)
        archive.writestr("quality-1.0.dist-info/entry_points.txt", ENTRY_POINTS)
    return site / "quality.zip"


@pytest.mark.parametrize("install", [install, install_shouting, install_old, install_egg, install_archive])
def test_a_plug_in_is_found_however_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[[Path], Path]
) -> None:
    monkeypatch.setattr(sys, "path", [str(install(tmp_path)), str(tmp_path / "missing")])
    assert [entry.value for entry in plugins.find_entries()] == ["quality:QUALITY"]


def test_a_plug_in_is_found_by_a_finder_of_another_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Finder(DistributionFinder):
        def find_distributions(self, context: object = None) -> Iterator[Distribution]:
            yield Distribution.at(put_info(tmp_path / "quality-1.0.dist-info", "METADATA"))

        def find_spec(self, *_: object) -> None:
            return None

    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    assert [entry.value for entry in plugins.find_entries()] == ["quality:QUALITY"]


def test_without_plug_ins_a_start_does_not_search_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_info(tmp_path / "other-1.0.dist-info", "METADATA", "[console_scripts]\nquality = quality:main\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)  # importing it fails
    assert plugins.find_entries() == []


def test_a_place_that_cannot_be_listed_ends_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "loop"), str(install(tmp_path))])
    assert [entry.value for entry in plugins.find_entries()] == ["quality:QUALITY"]
