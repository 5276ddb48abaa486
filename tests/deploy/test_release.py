"""The workflow that publishes a version: it does what the Makefile can do, after the tests, with SBOM and provenance."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon import __version__

ROOT = Path(__file__).parents[2]
# YAML 1.1 reads the key `on` as true.
RELEASE: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
JOBS: dict[str, dict[str, Any]] = RELEASE["jobs"]


def action(job: str, name: str) -> dict[str, Any]:
    """The inputs of a step."""
    [step] = [step for step in JOBS[job]["steps"] if step.get("uses", "").startswith(f"{name}@")]
    found: dict[str, Any] = step["with"]
    return found


def commands(job: str) -> list[str]:
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def test_it_runs_for_tags_of_versions_only() -> None:
    assert RELEASE[True] == {"push": {"tags": ["v*"]}}


def test_nothing_is_published_before_the_tests_have_passed_with_the_same_pythons_as_ever() -> None:
    assert {name for name, job in JOBS.items() if job.get("needs") != "test"} == {"test"}
    assert commands("test") == ['make tagged TAG="$GITHUB_REF_NAME"', "make tools", "make test"]
    usual = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert JOBS["test"]["strategy"]["matrix"] == usual["jobs"]["test"]["strategy"]["matrix"]


def test_only_jobs_that_publish_may_write() -> None:
    assert RELEASE["permissions"] == {"contents": "read"}
    signs = {"id-token": "write", "attestations": "write"}
    assert {name: job.get("permissions") for name, job in JOBS.items()} == {
        "test": None,
        "files": {"contents": "write", **signs},
        "image": {"contents": "read", "packages": "write", **signs},
    }


def test_every_command_is_a_target_of_the_makefile_or_the_release_itself() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for command in (command for job in JOBS for command in commands(job)):
        program, first, *_ = command.split()
        assert (program == "make" and first in targets) or command.startswith("gh release create "), command
    [needed] = re.findall(r"^release: ([a-z ]+?) +##", makefile, re.MULTILINE)
    assert needed.split() == ["tagged", "wheel", "deb", "sbom"]


def test_files_and_image_have_provenance_and_an_sbom() -> None:
    assert action("files", "actions/attest-build-provenance")["subject-path"] == "dist/*"
    sbom = action("files", "actions/attest-sbom")
    assert sbom["subject-path"].split() == ["dist/*.whl", "dist/*.deb"]
    assert f"--output-file {sbom['sbom-path']}" in (ROOT / "Makefile").read_text()
    image = action("image", "docker/build-push-action")
    assert (image["push"], image["sbom"], image["provenance"]) == (True, True, "mode=max")
    assert (ROOT / image["file"]).is_file()
    signed = action("image", "actions/attest-build-provenance")
    assert signed["subject-name"] == action("image", "docker/metadata-action")["images"]
    assert signed["subject-digest"] == "${{ steps.build.outputs.digest }}"


@pytest.mark.parametrize("name", ["test.yml", "release.yml"])
def test_every_action_has_a_version_and_every_job_a_time_limit(name: str) -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"].values()
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert [use for use in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+", use)] == []
    assert all(0 < job["timeout-minutes"] <= 90 for job in jobs)


def test_a_tag_of_another_version_is_refused() -> None:
    def make(tag: str) -> subprocess.CompletedProcess[str]:
        words = ["make", "--silent", "tagged", f"TAG={tag}"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    assert make(f"v{__version__}").returncode == 0
    refused = make("v0.0.9")
    assert refused.returncode
    assert f"the tag 'v0.0.9' is not that of this version: v{__version__}" in refused.stderr
