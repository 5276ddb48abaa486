"""`visiond bench --inputs`: how fast are the kinds of files that people drop, and what limits each?"""

from __future__ import annotations

import importlib.util
import random
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from daemon.measure.ceiling import measure_ceiling
from daemon.measure.job import Print, Run, run_job
from daemon.measure.place import Place, Report, describe_run, make_once
from daemon.measure.steady import Steady
from stages.scenes.inputs import PDF_PAGES, UNIFORM, copy_inputs, write_inputs

STANDARD, MIXED = "standard", "mixed"
PARTS = (STANDARD, "web", "phone", "screen", "scan")  # of the mixture
PAGES = ("letter", "receipt")  # with which others measure OCR alone
KINDS = (*PARTS, *UNIFORM, *PAGES, MIXED)
MEMORY_SECONDS = 5.0  # of feeding the workers from memory, if nothing else was asked for
SEED = 0
PDF = ".pdf"


class MeasuredInput(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of files, as measured: the run of median rate. images: DONE; a page of a PDF is one.
    expected_images_per_second: of a mixture, if its parts were measured too: the rate that they give by their shares."""

    name: str
    images: int
    failed: int
    megabytes: float  # of a file, on average
    rates: list[float]  # images/s of the steady part, of all runs
    steady: Steady
    whole_images_per_second: float  # from the first loaded worker to the last sidecar
    host_bytes: int  # the most memory that all processes had together, by LoadSample.host_bytes
    memory_images_per_second: float | None  # of the same workers, fed from memory with these files
    expected_images_per_second: float | None = None


class InputsReport(Report, frozen=True, kw_only=True):
    pack: str
    inputs: list[MeasuredInput]


def measure_inputs(
    place: Place,
    kinds: Sequence[str],
    count: int,
    *,
    repeat: int,
    runs: int,
    memory_seconds: float,
    progress: Print,
) -> InputsReport:
    """count: files of each kind, no two with the same bytes; repeat: names of each. Before the runs that count, the workers
    process some files of the kind, so that no kernel is compiled in a run."""
    place.make_pack()
    measured: list[MeasuredInput] = []
    for number, kind in enumerate(kinds, 1):
        named = f"{number} of {len(kinds)}, {kind}"
        progress(f"{named}: files")
        files = list_files(place, kind, count)
        progress(f"{named}: kernels")
        _run(place, files[: min(count, 64)], 1)
        found: list[Run] = []
        for turn in range(runs):
            progress(f"{named}: run {turn + 1} of {runs}")
            found.append(_run(place, files, repeat))
            progress(f"{named}: {found[-1].steady.images_per_second:,.1f} images/s")
        progress(f"{named}: workers fed from memory")
        fed = [file for file in files if file.suffix != PDF]
        memory = measure_ceiling(place.prepare(place.drop), fed, memory_seconds or MEMORY_SECONDS)
        measured.append(_sum_up(kind, files, repeat, found, memory, measured))
    shutil.rmtree(place.drop, ignore_errors=True)
    return InputsReport(**describe_run(), pack=place.pack, inputs=measured)


def list_files(place: Place, kind: str, count: int) -> list[Path]:
    """The files of a kind, made unless they exist. A mixture is made of all kinds, in random order."""
    if kind == STANDARD:
        return place.make_images(count)
    if kind == MIXED:
        each = -(-count // len(PARTS))
        files = [file for part in PARTS for file in list_files(place, part, each)]
        random.Random(SEED).shuffle(files)
        return files[:count]
    folder, drawn = place.folder / "inputs", kind.partition("-")[0]
    originals = make_once(folder / drawn, lambda part: write_inputs(part, drawn, SEED))
    copies = make_once(folder / f"{kind}-{count}", lambda part: copy_inputs(originals, part, kind, count))
    return [file for file in sorted(copies.iterdir()) if file.suffix != PDF or reads_pdf()]


def reads_pdf() -> bool:
    return importlib.util.find_spec("pypdfium2") is not None


def _run(place: Place, files: Sequence[Path], repeat: int) -> Run:
    """In a folder of links, because documents are unpacked beside their file."""
    shutil.rmtree(place.drop, ignore_errors=True)
    place.drop.mkdir(parents=True)
    for number, file in enumerate(list(files) * repeat):
        (place.drop / f"{number:07}-{file.name}").hardlink_to(file)
    has_pdf = any(file.suffix == PDF for file in files)
    return run_job(place, place.drop, cold=False, unpack=["pdf"] if has_pdf else [])


def _sum_up(
    kind: str,
    files: Sequence[Path],
    repeat: int,
    runs: Sequence[Run],
    memory: float,
    parts: Sequence[MeasuredInput],
) -> MeasuredInput:
    middle = sorted(runs, key=lambda run: run.steady.images_per_second)[len(runs) // 2]
    images = len(middle.published_at)
    expected = repeat * sum(PDF_PAGES if file.suffix == PDF else 1 for file in files)
    return MeasuredInput(
        name=kind,
        images=images,
        failed=expected - images,
        megabytes=statistics.fmean(file.stat().st_size for file in files) / 1e6,
        rates=[run.steady.images_per_second for run in runs],
        steady=middle.steady,
        whole_images_per_second=middle.images_per_second,
        host_bytes=max((sample.host_bytes for sample in middle.samples), default=0),
        memory_images_per_second=memory,
        expected_images_per_second=_expect(files, parts) if kind == MIXED else None,
    )


def _expect(files: Sequence[Path], parts: Sequence[MeasuredInput]) -> float | None:
    """The rate of a mixture, by those of its parts; None if not all of them were measured."""
    rates = {part.name: part.steady.images_per_second for part in parts}
    if not rates.keys() >= set(PARTS):
        return None
    images = dict.fromkeys(PARTS, 0)
    for file in files:
        images[kind_of(file)] += PDF_PAGES if file.suffix == PDF else 1
    return sum(images.values()) / sum(count / rates[part] for part, count in images.items())


def kind_of(file: Path) -> str:
    return next(part for part in PARTS if f"{part}-" in file.name)
