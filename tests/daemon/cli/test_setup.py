"""`visiond setup`: from the demonstration pack to models that know real images, with a hub on this machine that serves
small checkpoints in the published forms."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.cli import setup
from daemon.config.loading import load, parse
from daemon.config.models import table_of
from daemon.core import hints
from daemon.core.notices import list_notices
from stages.weights.catalog import CATALOG
from stages.weights.packs import list_packs
from stages.weights.sets import SETS, choose_models, is_permissive, license_of
from tests.daemon_process import PATIENCE, Place
from tests.forked import run_forked
from tests.stages.captioners import CAPTIONERS
from tests.stages.checkpoints import DETECTORS, TOWERS
from tests.stages.weights.hubs import serve

MODELS = {"yolo": "rf-detr-small", "clip": "siglip2-b16-224", "blip": "blip-large"}  # of the set balanced
MAKERS = {
    "rf-detr-small": DETECTORS["rf_detr"],
    "d-fine-nano": DETECTORS["d_fine"],
    "siglip2-b16-224": TOWERS["siglip"],
    "clip-b32": TOWERS["clip"],
    "blip-base": CAPTIONERS["blip"],
    "blip-large": CAPTIONERS["blip"],
}
COMMENTED = """\
# My photographs.
[[inbox]]
path = "inbox"  # from the camera

[stages.yolo]
# Which detector?
#model = ""
batch_size = 2

[stages.clip]
model = "clip-l14"  # the old one

[http]
listen = ""

[page]
listen = ""

[pipeline]
stages = ["yolo", "clip", "blip"]  # no text is read
"""
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    for name, make in MAKERS.items():
        make(folder / CATALOG[name].repository)
    return folder


@pytest.fixture
def hub(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published, tmp_path / "hub")
    return tmp_path / "hub"


@pytest.fixture
def sent(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that the hub has sent. Commands use it."""
    with serve(hub) as (url, sent):
        for name, value in (("HF_ENDPOINT", url), ("HF_HUB_DISABLE_XET", "1")):
            monkeypatch.setenv(name, value)
        yield sent


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path / "site")
    place.config.write_text(COMMENTED)
    return place


def test_one_command_leads_to_models_that_know_real_images(place: Place, sent: list[str]) -> None:
    place.configure()
    place.drop_many(range(2))
    assert place.run_once().returncode == 0
    place.config.write_text(COMMENTED)
    done = place.command("setup", "balanced", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (*MODELS.values(), "Apache-2.0", "BSD-3-Clause", "2 MiB", "ok      stage blip on cpu"):
        assert words in done.stdout
    assert "warning models" not in done.stdout
    assert (
        "2 images have results of other models or settings; `visiond redo --stale` processes" in done.stdout
    )
    place.assert_kept(DONE=2)
    config = load(place.config)
    assert {stage: getattr(config.stages, stage).model for stage in MODELS} == MODELS
    lines = place.config.read_text().splitlines()
    kept = [line for line in COMMENTED.splitlines() if line and not line.startswith(("#model", "model"))]
    assert [line for line in lines if line in kept] == kept, "comments, order and other settings stay"
    assert (place.folder / "daemon.toml.before-setup").read_text() == COMMENTED
    written, files = place.config.stat().st_mtime_ns, [*sent]
    again = place.command("setup", "balanced", "--quick", "--yes")
    assert (again.returncode, "The models are here" in again.stdout) == (0, True)
    assert (place.config.stat().st_mtime_ns, sent) == (written, files), "the second time changes nothing"


def test_a_pull_that_fails_leaves_the_configuration_as_it_was_and_keeps_what_is_here(
    place: Place, hub: Path, sent: list[str]
) -> None:
    (hub / CATALOG["blip-large"].repository / "model.broken").touch()
    failed = place.command("setup", "--yes")
    assert (failed.returncode, place.config.read_text()) == (os.EX_CONFIG, COMMENTED)
    assert f"{place.config} is as it was" in failed.stderr
    here = list_packs(place.folder / "models")
    assert here == ["mini", "Roboflow--rf-detr-small", "google--siglip2-base-patch16-224"]


def test_with_too_little_room_on_the_disk_nothing_is_downloaded(
    place: Place, hub: Path, sent: list[str]
) -> None:
    (hub / CATALOG["blip-large"].repository / "model.size").write_text(str(1 << 60))
    refused = place.command("setup", "--yes")
    assert (refused.returncode, place.config.read_text()) == (os.EX_CANTCREAT, COMMENTED)
    assert "has no room for these models" in refused.stderr
    assert "model.safetensors" not in sent


def test_without_a_terminal_or_with_the_answer_no_nothing_is_done(place: Place, sent: list[str]) -> None:
    refused = place.command("setup")
    assert (refused.returncode, "Add --yes" in refused.stderr) == (os.EX_USAGE, True)
    answers, terminal = pty.openpty()
    os.write(answers, b"n\n")
    asked = subprocess.run(
        [sys.executable, "-P", "-m", "daemon", "setup", "-c", str(place.config)],
        stdin=terminal,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    os.close(answers)
    os.close(terminal)
    assert (asked.returncode, f"Set this up in {place.config}? [Y/n]" in asked.stdout) == (1, True), (
        asked.stderr
    )
    assert (place.config.read_text(), "model.safetensors" in sent) == (COMMENTED, False)


def test_an_unknown_set_is_refused_with_the_nearest_one(place: Place) -> None:
    refused = place.command("setup", "balnced")
    assert (refused.returncode, 'there is no set "balnced"; did you mean "balanced"?' in refused.stderr) == (
        os.EX_USAGE,
        True,
    )


def test_a_demo_whose_models_cannot_be_set_up_ends_before_it_processes_anything(place: Place) -> None:
    ended = place.command("demo", place.folder, "--count", "1", "--models", "balnced")
    assert (ended.returncode, place.has_ledger()) == (os.EX_USAGE, False)


def test_permissive_takes_other_models_only_where_the_license_asks_for_it(
    place: Place, sent: list[str]
) -> None:
    place.config.write_text(COMMENTED.replace(', "blip"', ""))
    done = place.command("setup", "fast", "--permissive", "--quick", "--yes")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = load(place.config).stages
    models = [table_of(stages, name).model for name in ("yolo", "clip", "blip")]
    assert models == ["d-fine-nano", "clip-b32", ""]
    for name in SETS:
        assert all(map(is_permissive, choose_models(name, permissive=True).values()))
    assert not is_permissive(choose_models("fast", permissive=False)["yolo"])


def test_every_set_is_in_the_documents_with_its_licenses() -> None:
    rows = [line.split("|") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    for name in SETS:
        [row] = [row for row in rows if row[1].strip() == f"`{name}`"]
        for models in (choose_models(name, permissive=wanted) for wanted in (False, True)):
            for stage, model in models.items():
                assert not model or CATALOG[model].stage == stage
                assert model in "".join(row)
                assert license_of(model) in "".join(row)


def test_what_a_user_chose_for_other_scripts_tags_and_backends_stays_or_follows_the_model(
    tmp_path: Path,
) -> None:
    stages = {
        "ocr": {"model": "pp-ocrv5-cyrillic"},
        "yolo": {"model": "yolov8n", "backend": "fake"},
        "clip": {"options": {"labels": ["cat"]}},
    }
    config = parse({"stages": stages}, tmp_path)
    models = setup.choose_models(config, "best", permissive=False)
    assert setup.list_keys(config, models) == {
        ("stages", "yolo", "model"): "d-fine-xlarge-o365",
        ("stages", "yolo", "backend"): "",
        ("stages", "clip", "model"): "siglip2-so400m-384",
        ("stages", "blip", "model"): "blip-large",
    }
    before = parse({"stages": {"ocr": {"model": "pp-ocrv6-medium"}}}, tmp_path)
    keys = setup.list_keys(before, setup.choose_models(before, "balanced", permissive=False))
    assert keys["stages", "ocr", "model"] == "", "from one set to another"
    assert "document" in keys["stages", "clip", "options", "labels"]


def test_what_works_only_without_the_models_is_named_and_the_configuration_stays(
    place: Place, sent: list[str]
) -> None:
    old = COMMENTED.replace(', "clip", "blip"', "") + "[stages.yolo.options]\niou = 0.6\n"
    place.config.write_text(old)
    refused = place.command("setup", "--yes", "--quick")
    assert (refused.returncode, place.config.read_text()) == (os.EX_CONFIG, old)
    assert (
        "daemon.toml is as it was: with these models stages.yolo.options.iou: unknown key" in refused.stderr
    )


def test_a_folder_without_settings_and_inbox_gets_settings(tmp_path: Path, sent: list[str]) -> None:
    command = ["setup", "--yes", "--quick"]
    done = run_forked(command, tmp_path, os.environ, tmp_path / "said", 2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inbox does not exist" in done.stdout
    assert table_of(load(tmp_path / "daemon.toml").stages, "blip").model == "blip-large"


def test_what_somebody_changes_meanwhile_and_the_first_copy_stay(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "_options", [])  # messages of other tests name no configuration
    place.config.write_text(COMMENTED + "[log]\nlevel = 'error'\n")  # since the models were chosen
    changed, _ = setup.write(place.config, place.config, MODELS)
    assert load(place.config).log.level == "error"
    setup.write(place.config, place.config, {"yolo": "d-fine-nano"})
    copies = [place.folder / f"daemon.toml.before-{name}" for name in ("setup", "setup-2")]
    assert copies[0].read_text() == changed
    assert copies[1].read_text() != changed


def test_what_says_that_models_are_a_demonstration_ends_with_the_command_that_replaces_them(
    place: Place,
) -> None:
    place.settings["stages"]["yolo"]["backend"] = ""
    place.configure()
    place.drop_many(range(1))
    told = [
        place.run_once(),
        *(place.command(*words) for words in (("check", "--quick"), ("status",), ("list",))),
    ]
    told += [place.command("search", "picture", "--by", "words"), place.command("show", "00000.ppm")]
    told.append(place.command("export", "-"))
    for done in told:
        said = done.stdout + done.stderr
        assert "demonstration" in said
        assert "for real images: `visiond setup`" in said, said
        assert "AGPL" not in said, "ultralytics does not run these models"
    assert list_notices([("clip", "weights that are random")]) == ["clip: weights that are random"]
