"""`visiond models list, pull, verify`: models by their names, with the hub's own library and a hub on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers

from daemon.config.loading import load
from daemon.core.errors import ModelsUnusable
from daemon.layout.models import resolve_models
from daemon.models.offered import describe_set, find_sizes
from stages.contract.manifest import HubUnreachable
from stages.weights import catalog
from stages.weights.packs import MINI, list_packs, open_pack, verify
from stages.yolo import library
from stages.yolo.weights import save_network
from tests.daemon_process import PATIENCE, Place, wait_for
from tests.forked import Forked
from tests.stages import checkpoints
from tests.stages.weights.hubs import serve

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
NOWHERE = "http://127.0.0.1:1"
BALANCED = ("rf-detr-small", "siglip2-b16-224", "blip-large")
SIGLIP2 = "google/siglip2-base-patch16-224"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder for repositories: org/name."""
    return tmp_path / "hub"


@pytest.fixture
def sent(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that the hub on this machine has sent. Commands use it."""
    hub.mkdir()
    with serve(hub) as (url, sent):
        for name, value in (("HF_ENDPOINT", url), ("HF_HUB_DISABLE_XET", "1")):
            monkeypatch.setenv(name, value)
        yield sent


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "site", {"stages": {"yolo": {"backend": ""}}})


def test_a_model_is_pulled_and_checked_and_has_its_name_in_lists(
    hub: Path, place: Place, sent: list[str]
) -> None:
    checkpoints.TOWERS["siglip"](hub / SIGLIP2)
    (hub / SIGLIP2 / "README.md").write_text("not wanted")
    place.configure({"stages": {"clip": {"backend": "", "model": "siglip2-b16-224"}}})
    for arguments in (("check", "--quick"), ("run", "--once")):
        refused = place.command(*arguments)
        assert refused.returncode == os.EX_CONFIG
        assert "models pull siglip2-b16-224" in refused.stdout + refused.stderr
        assert "downloads it" in refused.stdout + refused.stderr
    done = place.command("models", "pull", "siglip2-b16-224")
    assert done.returncode == 0, done.stderr
    assert 'write `model = "siglip2-b16-224"` under [stages.clip].' in done.stdout
    assert "README.md" not in sent
    assert place.command("check", "--quick").returncode == 0
    verified = place.command("models", "verify", "siglip2-b16-224", "mini")
    assert verified.stdout.splitlines()[0] == "siglip2-b16-224: 5 files unchanged"
    mini, listed = list_rows(place)
    assert (listed["name"], listed["used_for"], listed["license"]) == (
        "siglip2-b16-224",
        ["clip"],
        "Apache-2.0",
    )
    assert (mini["name"], mini["license"]) == ("mini", "")
    assert [row["name"] for row in list_rows(place, "--catalog") if row["here"]] == ["siglip2-b16-224"]


def list_rows(place: Place, *arguments: str) -> list[dict[str, Any]]:
    done = place.command("models", "list", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_a_revision_is_pinned_and_unknown_ones_are_named(hub: Path, place: Place, sent: list[str]) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    assert place.command("models", "pull", "me/clip@v1").returncode == 0
    pack = open_pack("me/clip@v1", place.folder / "models")
    verify(pack)
    assert (pack.manifest.license, len(pack.manifest.revision["me/clip"])) == ("apache-2.0", 40)
    assert not [*pack.folder.glob(".*")]
    assert sorted({*sent}) == sorted(pack.manifest.digests)
    for name, message in (
        ("me/clip@v7", "me/clip has no branch, tag or commit v7 on the model hub"),
        ("me/other", "the model hub has no repository me/other, or you may not read it"),
        ("me/a--b", "me/a--b is not a name that the model hub allows"),
        ("siglp2-b16-224", 'there is no model "siglp2-b16-224"; did you mean "siglip2-b16-224"?'),
    ):
        refused = place.command("models", "pull", name)
        assert (refused.returncode, message in refused.stderr) == (os.EX_CONFIG, True), refused.stderr


def test_an_interrupted_download_continues(hub: Path, place: Place, sent: list[str]) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    broken = hub / "me/clip/model.broken"
    broken.touch()
    failed = place.command("models", "pull", "me/clip")
    assert (failed.returncode, "me/clip could not be pulled" in failed.stderr) == (os.EX_CONFIG, True)
    before = {*sent} - {"config.json"}  # which shows what to download
    sent.clear()
    broken.unlink()
    assert place.command("models", "pull", "me/clip").returncode == 0
    assert "model.safetensors" in sent
    assert before & {*sent} == set(), "what is there is not downloaded again"


@pytest.mark.parametrize(
    ("refused", "answer"),
    [
        ("config", "401 GatedRepo Access to model me/clip is restricted."),
        ("model", "403 GatedRepo Your request to access me/clip is awaiting a review."),
        ("model", "403 - Forbidden"),
    ],
)
def test_for_a_gated_model_the_message_says_where_to_accept_its_terms(
    hub: Path, place: Place, sent: list[str], refused: str, answer: str
) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    (hub / f"me/clip/{refused}.broken").write_text(answer)
    failed = place.command("models", "pull", "me/clip")
    said, page = answer.split(maxsplit=2)[2].rstrip("."), f"{os.environ['HF_ENDPOINT']}/me/clip"
    assert f"accept the terms at {page}, and set HF_TOKEN to a token" in failed.stderr
    assert (failed.returncode, f"({said})" in failed.stderr) == (os.EX_CONFIG, True)


def test_a_busy_hub_is_asked_again_and_what_stays_busy_has_a_status_of_its_own(
    hub: Path, place: Place, sent: list[str]
) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    (hub / "me/clip/busy").write_text("503 3600\n")
    refused = place.command("models", "pull", "me/clip")
    assert (refused.returncode, "busy (HTTP status 503)" in refused.stderr) == (os.EX_TEMPFAIL, True)
    assert "again in 3600 s" in refused.stderr
    assert "HF_ENDPOINT" not in refused.stderr
    (hub / "me/clip/busy").write_text("429 1\n503 0\n")
    done = place.command("models", "pull", "me/clip")
    assert (done.returncode, done.stdout.count("trying again in")) == (0, 2), done.stderr
    assert "status 429); trying again in 1 s" in done.stdout


def test_a_pointer_and_a_full_disk_are_named_and_nothing_else_is_downloaded(
    hub: Path, place: Place, sent: list[str]
) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    weights = hub / "me/clip/model.safetensors"
    whole = weights.read_bytes()
    (hub / "me/clip/model.size").write_text(str(1 << 60))
    full = place.command("models", "pull", "me/clip")
    assert (full.returncode, "has no room for these models" in full.stderr) == (os.EX_CANTCREAT, True)
    assert "model.safetensors" not in sent
    (hub / "me/clip/model.size").unlink()
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    pointer = place.command("models", "pull", "me/clip")
    assert "me/clip/model.safetensors is a Git LFS pointer, not the file itself" in pointer.stderr
    assert pointer.returncode == os.EX_CONFIG
    weights.write_bytes(whole)
    assert place.command("models", "pull", "me/clip").returncode == 0


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_is_ended_leaves_no_model_and_the_same_command_goes_on(
    hub: Path, place: Place, sent: list[str], signum: int
) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    (hub / "me/clip/model.slow").touch()
    environment = {**os.environ, "VISIOND_CONFIG": str(place.config)}
    command = ["models", "pull", "me/clip"]
    with (
        (place.folder / "said").open("wb") as said,
        Forked(command, place.folder, environment, said, said) as pulling,
    ):
        wait_for(lambda: "model.safetensors" in sent, "half of the weights", process=pulling)
        pulling.send_signal(signum)
        assert pulling.wait(PATIENCE) != 0
    assert b"Traceback" not in (place.folder / "said").read_bytes()
    (hub / "me/clip/model.slow").unlink()
    assert list_packs(place.folder / "models") == ["mini"]
    sent.clear()
    assert place.command("models", "pull", "me/clip").returncode == 0
    assert {*sent} == {"config.json", "model.safetensors"}, "what was complete is not downloaded again"


def test_a_filled_cache_of_the_hubs_library_is_used_with_and_without_a_network(
    hub: Path, place: Place, sent: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    program = "import huggingface_hub as hub; hub.snapshot_download('me/clip')"
    subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True)
    sent.clear()
    assert place.command("models", "pull", "me/clip").returncode == 0
    assert {*sent} <= {"config.json"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = place.command("models", "pull", "me/clip@main")
    assert (again.returncode, "taken from the cache" in again.stdout) == (0, True), again.stderr
    verify(open_pack("me/clip@main", place.folder / "models"))


def test_models_come_to_a_machine_without_a_hub_in_one_file(
    hub: Path, place: Place, sent: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.TOWERS["siglip"](hub / SIGLIP2)
    file = tmp_path / "models.tar"
    written = place.command("models", "bundle", file, "siglip2-b16-224")
    assert (written.returncode, f"models add {file.name}" in written.stdout) == (0, True), written.stderr
    (tmp_path / "mine.jpg").write_bytes(b"a photograph")
    for there, status in ((file, 0), (tmp_path / "mine.jpg", os.EX_CANTCREAT)):
        replaced = place.command("models", "bundle", "--force", there, "siglip2-b16-224")
        assert replaced.returncode == status, replaced.stderr
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    other = Place(tmp_path / "other", {"stages": {"clip": {"backend": "", "model": "siglip2-b16-224"}}})
    other.configure()
    added = other.command("models", "add", file)
    assert (added.returncode, "is ready" in added.stdout) == (0, True), added.stderr
    assert "5 files unchanged" in other.command("models", "verify", "siglip2-b16-224").stdout
    file.write_bytes(file.read_bytes()[:-20_000])
    cut = Place(tmp_path / "cut")
    refused = cut.command("models", "add", file)
    assert (refused.returncode, "Copy it again" in refused.stderr) == (os.EX_CONFIG, True)


def test_without_a_hub_a_pull_names_its_models_and_the_commands_that_bring_them_here(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    place.configure()
    for words, bundled in (
        (["pull", "yolov8n", "clip-b32", "--allow-pickle"], "--allow-pickle models.tar yolov8n clip-b32"),
        (["bundle", "mine.tar", "clip-b32", "balanced"], f"models.tar clip-b32 {' '.join(BALANCED)}"),
    ):
        refused = place.command("models", *words)
        assert refused.returncode == os.EX_CONFIG
        assert refused.stderr.count("cannot be reached") == refused.stderr.count(NOWHERE) == 1
        assert f"type `visiond models bundle {bundled}` on a machine that has one" in refused.stderr


def test_a_hub_that_cannot_be_reached_is_not_asked_about_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, models = list[str](), [*catalog.offered().values()]

    def describe(_: object, repository: str, revision: str = "") -> None:
        asked.append(repository)
        raise HubUnreachable("no route")

    monkeypatch.setattr("stages.weights.hub.HuggingFaceHub.describe", describe)
    found = find_sizes(tmp_path, models, ask=True)
    assert found.known == {}
    assert found.problem == f"The size is not known of {len(models)} models: no route"
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["balanced"], "models.tar balanced"),
        (["clip-b32", "yolov8n", "--force"], "models.tar clip-b32 yolov8n"),
    ],
)
def test_a_bundle_without_its_file_is_refused_with_the_whole_command(
    place: Place, words: list[str], meant: str
) -> None:
    refused = place.command("models", "bundle", *words)
    assert refused.returncode == os.EX_USAGE
    assert f"The file to write is missing: {words[0]}" in refused.stderr
    assert f"visiond models bundle {meant}" in refused.stderr


def test_all_names_are_checked_before_the_first_download(place: Place, sent: list[str], hub: Path) -> None:
    checkpoints.TOWERS["clip"](hub / "me/clip")
    assert place.command("models", "pull", "me/clip", "nothing").returncode == os.EX_CONFIG
    assert sent == []


def test_the_list_shows_what_is_here_and_below_it_what_can_be_pulled(place: Place) -> None:
    assert [row["name"] for row in list_rows(place)] == ["mini"]
    models = {row["name"]: row for row in list_rows(place, "--catalog")}
    nano = models["rf-detr-nano"]
    assert (nano["stage"], nano["parameters"], nano["quality"], nano["repository"], nano["here"]) == (
        "yolo",
        30_500_000,
        "COCO AP 48.4",
        "Roboflow/rf-detr-nano",
        False,
    )
    assert models["clip-b32"]["measured"]["H100"].keys() == {
        "images_per_second",
        "batch_size",
        "memory_bytes",
    }
    assert nano["measured"] == {}
    assert (models["clip-b32"]["sets"], models["blip-large"]["sets"]) == (["fast"], ["balanced", "best"])
    assert nano["sets"] == []
    assert {row["stage"] for row in list_rows(place, "--catalog", "--stage", "clip")} == {"clip"}
    text = place.command("models", "list", "--stage", "yolo").stdout
    assert text.index("used for") < text.index("published quality") < text.index("yolo26n")
    assert "clip-b32" not in text
    assert re.search(r"^rf-detr-small +balanced +yolo ", text, re.M)
    assert text.splitlines()[-1].startswith(
        "To take all models of a set (fast, balanced, best): visiond setup balanced"
    )
    assert "used for" not in place.command("models", "list", "--catalog").stdout
    refused = place.command("models", "list", "--stage", "clpi")
    assert (refused.returncode, 'did you mean "clip"' in refused.stderr) == (os.EX_USAGE, True)


def test_a_size_is_that_on_the_disk_or_what_the_hub_says_if_it_may_be_asked(
    hub: Path, place: Place, sent: list[str]
) -> None:
    def list_sizes(*arguments: str) -> dict[object, object]:
        return {
            row["name"]: row["bytes"] for row in list_rows(place, "--catalog", *arguments) if row["bytes"]
        }

    checkpoints.TOWERS["siglip"](hub / SIGLIP2)
    (hub / SIGLIP2 / "README.md").write_text("not wanted")
    pickle = hub / "Ultralytics" / "YOLOv8" / "yolov8n.pt"
    pickle.parent.mkdir(parents=True)
    pickle.write_bytes(bytes(12345))
    (hub / SIGLIP2 / "busy").write_text("503 0")
    assert list_sizes() == {}
    assert (hub / SIGLIP2 / "busy").read_text(), "nobody has asked"
    (hub / SIGLIP2 / "busy").unlink()
    wanted = sum(file.stat().st_size for file in (hub / SIGLIP2).iterdir() if file.name != "README.md")
    assert list_sizes("--sizes") == {"siglip2-b16-224": wanted, "yolov8n": 12345}
    assert not {"model.safetensors", "yolov8n.pt"} & set(sent)
    assert place.command("models", "pull", "siglip2-b16-224").returncode == 0
    (hub / SIGLIP2).rename(hub / "gone")
    assert list_sizes() == {"siglip2-b16-224": wanted}
    listed = place.command("models", "list", "--stage", "clip", "--sizes")
    assert re.search(rf"^siglip2-b16-224 +balanced +clip .* {-(-wanted >> 20)} +yes", listed.stdout, re.M)
    assert "The size is not known of 32 models. Of the first: the model hub has no" in listed.stderr
    assert place.command("models", "list", "--sizes", "--json").returncode == os.EX_USAGE


def test_a_set_says_how_large_it_is_if_that_is_known_of_all_its_models() -> None:
    sizes = {"yolov8n": 1 << 20, "clip-b32": 1, "blip-base": 1 << 20}
    assert describe_set("fast", sizes) == "fast: 3 MiB"
    del sizes["clip-b32"]
    assert describe_set("fast", sizes) == "fast"


def break_row(folder: Path, backend: str) -> None:
    config = json.loads((folder / "yolo.json").read_text())
    config["model"]["backbone"].append([1])
    (folder / "yolo.json").write_text(json.dumps(config))


def drop_files(folder: Path, backend: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["stages"]["yolo"] = {"backend": backend}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "backend", "said"),
    [
        (break_row, "", "yolo.json does not describe a YOLO model"),
        (drop_files, "ultralytics", "needs files for weights and config"),
        (drop_files, "transformers", 'stages.yolo.files has no "model"'),
        (drop_files, "nope", 'manifest.json cannot be used: there is no backend for yolo called "nope"'),
    ],
)
def test_a_damaged_pack_is_marked_and_the_others_are_listed(
    place: Place, damage: Callable[[Path, str], None], backend: str, said: str
) -> None:
    for name in ("mine", "other"):
        shutil.copytree(MINI, place.folder / "models" / name)
    damage(place.folder / "models" / "mine", backend)
    listed = place.command("models", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    problems = {Path(row["folder"]).name: row["problem"] for row in json.loads(listed.stdout)}
    assert said in problems["mine"]
    assert problems["other"] == ""
    assert said in listed.stderr


YOLO26N = {"model": "yolo26n.yaml", "nc": 80, "names": [str(number) for number in range(80)], "imgsz": 64}


@dataclass(frozen=True)
class Used:
    """A place, and what its models led to in a check and a run: CLIP from a folder that was copied there, and a YOLO
    for which ultralytics is needed."""

    place: Place
    checked: str
    run: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    place = Place(tmp_path_factory.mktemp("used"))
    shutil.copytree(MINI / "clip", place.folder / "models" / "openai--clip-vit-base-patch32")
    save_network(library.build(YOLO26N).state_dict(), YOLO26N, place.folder / "yolo26n")
    yolo = {"backend": "", "model": str(place.folder / "yolo26n/yolo.safetensors")}
    place.configure({"stages": {"clip": {"backend": "", "model": "clip-b32"}, "yolo": yolo}})
    checked = place.command("check", "--quick").stdout
    place.drop_many(range(1))
    return Used(place, checked, place.run_once())


def test_a_folder_that_was_copied_counts_as_the_model_of_its_name(used: Used) -> None:
    [copied] = [row for row in list_rows(used.place, "--catalog") if row["here"]]
    assert (copied["here"], str(copied["folder"]).endswith("openai--clip-vit-base-patch32")) == (True, True)
    words = "clip: the model uses the tags of the demonstration pack mini"
    assert f"warning models: {words}" in used.checked
    assert (used.run.returncode, words in used.run.stderr) == (0, True)
    used.place.assert_kept(DONE=1)


def test_a_path_is_a_path_and_a_model_of_another_stage_is_refused(place: Place) -> None:
    shutil.copytree(MINI / "clip", place.folder / "me" / "mine")
    place.configure({"stages": {"clip": {"backend": "", "model": "me/mine"}}})
    checked = place.command("check", "--quick")
    taken = "models: clip: CLIP with both its halves (CLIPModel), backend transformers, float32, from"
    assert f"{taken} {place.folder / 'me/mine'}, tags from {MINI / 'labels.txt'}." in checked.stdout
    for name, message in (
        ("yolo11n", "yolo11n is a model for the stage yolo, not for clip."),
        (
            "me/none",
            f"there is no folder {place.folder / 'me/none'}, and no model me/none in {place.folder / 'models'}. If "
            f"you mean a model of the hub, pull it",
        ),
        ("./none", f"there is no folder {place.folder / 'none'}"),
    ):
        place.configure({"stages": {"clip": {"backend": "", "model": name}}})
        refused = place.command("check", "--quick")
        assert (refused.returncode, message in refused.stdout) == (os.EX_CONFIG, True), refused.stdout


def test_each_stage_whose_model_cannot_be_used_is_reported_with_its_key(place: Place) -> None:
    checkpoints.make_model("BertModel", transformers.BertConfig(**SMALL)).save_pretrained(
        place.folder / "bert"
    )
    place.configure(
        {
            "stages": {
                "yolo": {"backend": "", "model": "./bert"},
                "clip": {"backend": "", "model": "siglip2-b16-22"},
            },
            "second_look": [{"name": "again", "stage": "clip", "when": "A", "model": "./none"}],
        }
    )
    told = place.command("check", "--quick").stdout
    assert "stages.yolo.model: " in told
    assert "contains BertModel" in told
    assert "It can use these models for yolo: RT-DETR, RT-DETRv2, " in told
    assert "BLIP" not in told, "what other stages take"
    assert 'stages.clip.model: there is no pack or model "siglip2-b16-22"; did you mean' in told
    place.configure({"stages": {"clip": {"model": "siglip2-b16-224"}}})
    assert "`visiond models pull siglip2-b16-224` downloads it." in place.command("check", "--quick").stdout
    place.configure(
        {"stages": {"yolo": {"backend": "", "model": ""}, "clip": {"backend": "fake", "model": ""}}}
    )
    assert (
        f"second_look again: there is no folder {place.folder / 'none'}"
        in place.command("check", "--quick").stdout
    )


def test_verify_without_names_compares_what_the_configuration_uses_and_names_all_that_is_altered(
    place: Place,
) -> None:
    for name in ("mine", "other"):
        shutil.copytree(MINI / "clip", place.folder / name)
    look = {"name": "again", "stage": "clip", "when": "A", "model": "./other"}
    place.configure({"stages": {"clip": {"backend": "", "model": "./mine"}}, "second_look": [look]})
    assert "other: 5 files recorded, never used before" in place.command("models", "verify", "./other").stdout
    place.command("check", "--quick")
    whole = place.command("models", "verify")
    assert [line.split(":")[0] for line in whole.stdout.splitlines()] == ["mini", "mine", "other"]
    used = {row["name"]: row["used_for"] for row in list_rows(place)}
    assert (used["mine"], used["other"]) == (["clip"], ["clip (second look again)"])
    for name in ("mine", "other"):
        with (place.folder / name / "config.json").open("a") as file:
            file.write(" ")
    altered = [f"{place.folder / name}: config.json is altered" for name in ("mine", "other")]
    changed = place.command("models", "verify")
    assert changed.returncode == os.EX_CONFIG
    assert [line for line in altered if line not in changed.stderr] == []
    named = place.command("models", "verify", "other")
    assert [line in named.stderr for line in altered] == [False, True], (
        "a name as `visiond models list` shows it"
    )


def test_a_path_is_relative_to_the_folder_of_the_configuration_also_if_it_looks_like_a_repository(
    place: Place,
) -> None:
    place.configure({"stages": {"clip": {"backend": "", "model": "me/mine"}}})
    elsewhere = place.folder / "elsewhere"
    shutil.copytree(MINI / "clip", elsewhere / "me" / "mine")
    config = load(place.folder / "daemon.toml")
    with contextlib.chdir(elsewhere), pytest.raises(ModelsUnusable) as caught:
        resolve_models(config, [])
    assert f"there is no folder {place.folder / 'me/mine'}, and no model" in str(caught.value)
    assert str(caught.value).endswith("models pull me/mine` downloads it.")


def test_the_start_and_check_name_the_license_of_ultralytics_where_it_runs(used: Used) -> None:
    assert '"license": "AGPL-3.0"' in used.run.stderr
    assert "ultralytics is in use, which is under AGPL-3.0" in used.checked
