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


def inputs(job: str, name: str) -> list[dict[str, Any]]:
    """Of each step with this action."""
    return [step["with"] for step in JOBS[job]["steps"] if step.get("uses", "").startswith(f"{name}@")]


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
    provenance, sbom = inputs("files", "actions/attest")
    assert provenance == {"subject-path": "dist/visiond*"}
    assert f'gh release create "$GITHUB_REF_NAME" {provenance["subject-path"]} ' in commands("files")[-1]
    assert sbom["subject-path"].split() == ["dist/*.whl", "dist/*.deb"]
    assert f"--output-file {sbom['sbom-path']}" in (ROOT / "Makefile").read_text()
    [image], [names] = inputs("image", "docker/build-push-action"), inputs("image", "docker/metadata-action")
    assert (image["push"], image["sbom"], image["provenance"]) == (True, True, "mode=max")
    assert (ROOT / image["file"]).is_file()
    [signed] = inputs("image", "actions/attest")
    assert signed["subject-name"] == names["images"]
    assert signed["subject-digest"] == "${{ steps.build.outputs.digest }}"


@pytest.mark.parametrize("name", ["test.yml", "release.yml"])
def test_every_action_is_a_commit_of_a_version_and_every_job_has_a_time_limit(name: str) -> None:
    text = (ROOT / ".github" / "workflows" / name).read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [use for use in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", use)] == []
    assert all(0 < job["timeout-minutes"] <= 90 for job in yaml.safe_load(text)["jobs"].values())


def test_a_tag_of_another_version_is_refused() -> None:
    def make(tag: str) -> subprocess.CompletedProcess[str]:
        words = ["make", "--silent", "tagged", f"TAG={tag}"]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    assert make(f"v{__version__}").returncode == 0
    refused = make("v0.0.9")
    assert refused.returncode
    assert f"the tag 'v0.0.9' is not that of this version: v{__version__}" in refused.stderr
