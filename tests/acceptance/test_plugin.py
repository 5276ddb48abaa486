"""The example of a plug-in: built as a distribution, installed in the same environment as visiond,
and used without a change to visiond."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from tests.daemon_process import STAGES, Place

EXAMPLE = Path(__file__).parents[2] / "examples" / "quality"
NAMES = ("sharp.png", "blurred.png")
RULE = "def choose(record):\n    return 'sharp' if record['quality']['sharpness'] > 500 else 'blurred'\n"
BROKEN = "raise RuntimeError('a stranger\\'s bug')\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example is installed."""
    folder = tmp_path_factory.mktemp("site")
    uv = Path(sys.executable).with_name("uv")
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--offline",
        "--quiet",
        "--python",
        sys.executable,
        "--target",
        str(folder),
    ]
    subprocess.run([uv, "pip", "install", *options, str(EXAMPLE)], check=True)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Place:
    """A place where it has processed a sharp image and a blurred one."""
    folder = tmp_path_factory.mktemp("plugin")
    (site / "rules.py").write_text(RULE)
    place = Place(
        folder, {"pipeline": {"stages": [*STAGES, "quality"]}, "binning": {"rules": "rules:choose"}}
    )
    sharp = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    for name, image in zip(NAMES, (sharp, sharp.filter(ImageFilter.GaussianBlur(4))), strict=True):
        image.save(folder / "picture.png")
        place.drop(name, (folder / "picture.png").read_bytes())
    ended = run(place, site, "run", "--once")
    assert ended.returncode == 0, ended.stderr
    return place


def run(place: Place, site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return place.command(*words, plugins=site)


def install(site: Path, name: str, stage: str, program: str) -> Path:
    """A folder with a distribution whose module has the stage as STAGE."""
    (info := site / f"{name}-1.0.dist-info").mkdir(parents=True)
    (site / f"{name}.py").write_text(program)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[visiond.stages]\n{stage} = {name}:STAGE\n")
    return site


def test_its_result_is_in_the_sidecar_and_a_rule_reads_it(place: Place) -> None:
    sharp, blurred = place.sidecar("sharp.png"), place.sidecar("blurred.png")
    assert sharp["quality"].keys() == {"sharpness", "brightness", "dark", "bright", "noise", "hash"}
    assert sharp["quality"]["sharpness"] > 10 * blurred["quality"]["sharpness"]
    assert sharp["quality"]["brightness"] == pytest.approx(0.5, abs=0.05)
    assert len(sharp["quality"]["hash"]) == 16
    assert (sharp["bin"]["name"], blurred["bin"]["name"]) == ("sharp", "blurred")
    assert sharp["models"].keys() == sharp["timings"].keys() == {*STAGES, "quality"}


def test_show_and_export_have_its_figures(place: Place, site: Path) -> None:
    assert "sharpness" in run(place, site, "show", "sharp.png").stdout
    [first, _] = csv.DictReader(io.StringIO(run(place, site, "export", "-").stdout))
    assert float(first["quality_sharpness"]) == place.sidecar(first["path"])["quality"]["sharpness"]
    parquet = place.folder / "all.parquet"
    assert run(place, site, "export", str(parquet)).returncode == 0


def test_check_names_it_and_the_reference_has_its_keys(place: Place, site: Path) -> None:
    checked = run(place, site, "check").stdout
    assert "plug-in visiond-quality 1.0.0: stage quality is installed and in use." in checked
    assert "stage quality on cpu: imports its libraries in" in checked
    command = [sys.executable, "-P", "-m", "daemon.config.reference"]
    reference = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    assert "### `[stages.quality.options]`" in reference.stdout
    assert "`clipped`" in reference.stdout


def test_its_options_are_checked_and_a_change_repeats_this_stage_alone(place: Place, site: Path) -> None:
    place.configure({"stages": {"quality": {"options": {"clipped": 500}}}})
    refused = run(place, site, "run", "--once")
    assert refused.returncode == os.EX_CONFIG
    assert "clipped" in refused.stderr
    place.configure({"stages": {"quality": {"options": {"clipped": 100}}}})
    before = place.sidecar("sharp.png")
    assert run(place, site, "redo", "sharp.png").returncode == 0
    assert run(place, site, "run", "--once").returncode == 0
    after = place.sidecar("sharp.png")
    assert after["quality"]["dark"] > before["quality"]["dark"]
    changed = {stage for stage in after["models"] if after["models"][stage] != before["models"][stage]}
    assert changed == {"quality"}


def test_without_it_its_results_stay_readable(place: Place) -> None:
    place.configure(
        {"pipeline": {"stages": list(STAGES)}, "binning": {"rules": ""}, "stages": {"quality": {}}}
    )
    del place.settings["stages"]["quality"]
    place.configure()
    assert "sharpness" in place.command("show", "blurred.png").stdout
    lines = place.command("export", "--format", "jsonl", "-").stdout.splitlines()
    assert {
        json.loads(line)["source"]["path"]: "quality" in json.loads(line) for line in lines
    } == dict.fromkeys(NAMES, True)
    assert place.command("verify").returncode == 0


def test_one_that_cannot_be_imported_is_named_and_stops_nothing_unless_it_is_configured(
    tmp_path: Path,
) -> None:
    site = install(tmp_path / "site", "broken", "broken", BROKEN)
    sentence = 'The stage "broken" of the plug-in broken 1.0 cannot be used: RuntimeError: a stranger\'s bug.'
    place = Place(tmp_path)
    place.drop_many(range(1))
    ended = run(place, site, "run", "--once")
    assert ended.returncode == 0
    assert any(
        json.loads(line).get("event") == sentence
        for line in ended.stderr.splitlines()
        if line.startswith("{")
    )
    assert sentence in run(place, site, "check", "--quick").stdout
    place.configure({"pipeline": {"stages": [*STAGES, "broken"]}})
    refused = run(place, site, "run", "--once")
    assert refused.returncode == os.EX_CONFIG
    assert f"pipeline.stages: {sentence}" in refused.stderr


def test_a_configured_one_is_not_replaced_by_a_new_stage_of_visiond_with_its_name(tmp_path: Path) -> None:
    named = "classifier_safety"
    program = "from stages.classifier.descriptor import CLASSIFIER as STAGE\n"
    site = install(tmp_path / "site", "own", "classifier", program)
    place = Place(
        tmp_path, {"pipeline": {"stages": [*STAGES, named]}, "stages": {named: {"backend": "fake"}}}
    )
    sentence = (
        'The stage "classifier" of the plug-in own 1.0 cannot be used: visiond itself has a stage with this name; rename the '
        "stage of the plug-in, or uninstall the plug-in."
    )
    for words in (["run", "--once"], ["check", "--quick"]):
        refused = run(place, site, *words)
        assert refused.returncode == os.EX_CONFIG
        assert sentence in refused.stdout + refused.stderr
    place.configure({"pipeline": {"stages": list(STAGES)}})
    del place.settings["stages"][named]
    place.configure()
    checked = run(place, site, "check", "--quick")
    assert checked.returncode == 0, checked.stdout
    assert sentence in checked.stdout
