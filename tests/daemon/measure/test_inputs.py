"""`visiond bench --inputs`, with fake stages and few files, and what it prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer

from daemon.cli.bench import bench, parse_kinds
from daemon.measure import inputs
from daemon.measure.inputs import MeasuredInput, list_files
from daemon.measure.place import MachineInfo, Place
from daemon.measure.report import describe_use, print_inputs
from daemon.measure.steady import Steady
from stages.contract.manifest import MANIFEST, Manifest, StageEntry, write_manifest
from stages.scenes.inputs import DISTINCT, DRAW


def make_originals(folder: Path) -> None:
    """Tiny ones in place of those that take a minute."""
    for kind in DRAW:
        (folder / "inputs" / kind).mkdir(parents=True)
        for number in range(3):
            (folder / "inputs" / kind / f"{kind}-0-{number}.jpg").write_bytes(b"P6\n1 1\n255\n%03d" % number)
    (folder / "images-2").mkdir()
    for number in range(2):
        (folder / "images-2" / f"standard-0-{number}.jpg").write_bytes(b"P6\n1 1\n255\n9%02d" % number)


def test_kinds_of_files_are_measured_one_after_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_originals(tmp_path)
    (tmp_path / "fakes").mkdir()
    manifest = Manifest(name="fakes", notice="", stages={"yolo": StageEntry("fake", {})}, digests={})
    write_manifest(tmp_path / "fakes" / MANIFEST, manifest)
    bench(
        folder=tmp_path,
        count=8,
        repeat=2,
        warm=1,
        memory=0.1,
        pack=str(tmp_path / "fakes"),
        pipeline=['stages = ["yolo"]', "[page]", 'listen = ""'],
        inputs="web",
        json=tmp_path / "inputs.json",
        plot=tmp_path / "inputs.png",
    )
    [found] = json.loads((tmp_path / "inputs.json").read_bytes())["inputs"]
    assert (found["name"], found["images"], found["failed"]) == ("web", 16, 0)
    assert found["memory_images_per_second"] > 0 < found["steady"]["images_per_second"]
    assert (tmp_path / "inputs.png").stat().st_size > 1000
    assert 16 << 20 < found["host_bytes"] < 16 << 30
    assert f"at most {found['host_bytes'] >> 20:,} MiB of the host's memory" in capsys.readouterr().out
    assert not (tmp_path / "drop").exists()


def test_no_two_files_of_a_kind_have_the_same_bytes(tmp_path: Path) -> None:
    make_originals(tmp_path)
    files = list_files(Place(tmp_path), "phone", 8)
    assert len({file.read_bytes() for file in files}) == len(files) == 8


def test_a_kind_of_one_format_and_size_has_those_files_of_a_larger_kind_that_fit(tmp_path: Path) -> None:
    (tmp_path / "inputs" / "phone").mkdir(parents=True)
    for number in range(32):
        (tmp_path / "inputs" / "phone" / f"phone-0-{number:06}.jpg").write_bytes(
            b"P6\n1 1\n255\n%03d" % number
        )
    files = list_files(Place(tmp_path), "phone-48", 5)
    assert [file.name.partition("-")[2] for file in files] == [
        f"phone-0-0000{number}.jpg" for number in (15, 31, 15, 31, 15)
    ]
    assert len({file.read_bytes() for file in files}) == 5
    assert len(list_files(Place(tmp_path), "phone-12", 30)) == 30


def test_a_mixture_has_all_kinds_in_an_order_that_is_always_the_same(tmp_path: Path) -> None:
    make_originals(tmp_path)
    files = list_files(Place(tmp_path), "mixed", 10)
    kinds = [inputs.kind_of(file) for file in files]
    assert {kind: kinds.count(kind) for kind in inputs.PARTS} == dict.fromkeys(inputs.PARTS, 2)
    assert kinds != sorted(kinds, key=inputs.PARTS.index)
    assert files == list_files(Place(tmp_path), "mixed", 10)


def measured(name: str, rate: float, **figures: Any) -> MeasuredInput:
    steady = Steady(images_per_second=rate, slowest=rate, fastest=rate, **figures)
    return MeasuredInput(
        name=name,
        images=3,
        failed=1,
        megabytes=1.0,
        rates=[rate],
        steady=steady,
        whole_images_per_second=rate,
        host_bytes=5 << 20,
        memory_images_per_second=None,
    )


def test_a_mixture_is_compared_with_its_parts_by_their_shares() -> None:
    parts = [measured(name, 100.0) for name in inputs.PARTS[:-1]] + [measured("scan", 10.0)]
    files = [Path("phone-1.jpg"), Path("web-1.jpg"), Path("scan-1.jpg"), Path("scan-2.jpg")]
    assert inputs._expect(files, parts) == pytest.approx(4 / (2 / 100 + 2 / 10))
    assert inputs._expect(files, [*parts, measured("phone-12", 1.0)]) == inputs._expect(files, parts)
    assert inputs._expect(files, parts[1:]) is None


def test_without_documents_no_pdf_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_originals(tmp_path)
    (tmp_path / "inputs" / "scan" / "scan-0-4.pdf").write_bytes(b"%PDF")
    monkeypatch.setattr(inputs, "reads_pdf", lambda: False)
    assert {file.suffix for file in list_files(Place(tmp_path), "scan", 8)} == {".jpg"}
    monkeypatch.setattr(inputs, "reads_pdf", lambda: True)
    assert {file.suffix for file in list_files(Place(tmp_path), "scan", 8)} == {".jpg", ".pdf"}


def test_cpu_time_is_shown_by_kind_of_process() -> None:
    spent = {"daemon": 1.5, "workers": 2000.0}
    shown = describe_use(measured("web", 5.0, cpu_milliseconds_by_kind=spent))
    assert shown == "CPU ms an image: daemon 1.5, workers 2,000.0; at most 5 MiB of the host's memory"


def test_the_table_says_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    machine = MachineInfo([], None, "2.0", "3.11", 16)
    report = inputs.InputsReport(
        command=[], version="", commit=None, machine=machine, pack="", inputs=[measured("web", 5.0)]
    )
    print_inputs(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "no GPU" in shown
    assert "web: what limits is not known: the run was too short" in shown
    assert "web: 1 image failed" in shown
    assert "web: CPU ms an image: not known; at most 5 MiB of the host's memory" in shown


def test_a_kind_that_does_not_exist_is_refused() -> None:
    assert parse_kinds("mixed, web,phone-48") == ["web", "phone-48", "mixed"]
    with pytest.raises(typer.BadParameter, match="--inputs does not know phones; write some of standard,web"):
        parse_kinds("phones,web")


def test_originals_are_made_once(tmp_path: Path) -> None:
    make_originals(tmp_path)
    before = [file.stat().st_mtime_ns for file in list_files(Place(tmp_path), "web", 8)]
    shutil.rmtree(tmp_path / "inputs" / "phone")
    assert [file.stat().st_mtime_ns for file in list_files(Place(tmp_path), "web", 8)] == before
    assert DISTINCT >= 24
