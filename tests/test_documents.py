"""The links in the documents work: the files exist, and so do the headings that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
BENCHMARK = re.compile(r"python -m\sbenchmarks\.(\w+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors_of(document: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for link in LINK.findall(document.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{document.name}: {link}"


def test_every_benchmark_that_a_document_names_exists() -> None:
    named = {name for document in DOCUMENTS for name in BENCHMARK.findall(document.read_text())}
    assert "overhead" in named
    assert sorted(named - {file.stem for file in (ROOT / "benchmarks").glob("*.py")}) == []


def test_every_make_target_that_a_document_or_the_public_tests_name_exists() -> None:
    workflows = (ROOT / ".github" / "workflows").glob("*.yml")
    texts = [file.read_text() for file in (*DOCUMENTS, *workflows)]
    named = {name for text in texts for name in re.findall(r"(?:`|    |run: )make ([a-z-]+)", text)}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"test", "tools"} <= named
    assert sorted(named - set(targets)) == []


def test_make_coverage_runs_folders_that_exist_and_a_document_lists_them() -> None:
    [folders] = re.findall(
        r"^COVERAGE = .*tests/daemon/,(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    *first, last = folders.split()
    wanted = [ROOT / parent / name for parent in ("tests/daemon", "daemon") for name in (*first, last)]
    assert [folder for folder in wanted if not folder.is_dir()] == []
    document = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f"runs the tests in `tests/daemon/` of {', '.join(first)} and {last}:" in document


def test_the_glossary_is_linked_from_the_readme_and_for_contributors() -> None:
    assert len(DOCUMENTS) > 10
    assert all(
        "docs/glossary.md" in LINK.findall((ROOT / name).read_text())
        for name in ("README.md", "CONTRIBUTING.md")
    )
