"""daemon.toml after `visiond tune`: these keys, and nothing else."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from daemon.config.loading import parse
from daemon.core.errors import ConfigError, NotWritable
from daemon.layout.profile import TunedSettings
from daemon.measure.edit import keys_of, replace_file, set_keys, show_difference
from tests.test_house import ROOT

SETTINGS = TunedSettings("replicated", 5, {"ocr": 128, "yolo": 128, "clip": 128, "blip": 64})


def test_every_tuned_key_is_one_of_the_configuration() -> None:
    document = tomllib.loads(set_keys("", keys_of(SETTINGS)))
    config = parse(document, Path("/srv"))
    assert (config.pipeline.placement, config.pipeline.workers_per_device) == ("replicated", 5)
    assert config.stages.blip.batch_size == 64  # type: ignore[attr-defined]


def test_the_shipped_file_changes_in_these_lines_only() -> None:
    """Each key takes the place of its commented default."""
    before = (ROOT / "daemon.toml").read_text().splitlines()
    after = set_keys("\n".join(before), keys_of(SETTINGS)).splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        ('#placement = "auto"', 'placement = "replicated"'),
        ("#workers_per_device = 0", "workers_per_device = 5"),
        *(("#batch_size = 0", f"batch_size = {size}") for size in (128, 128, 128, 64)),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "[pipeline]\nworkers_per_device = 2 # two\nmps = true\n",
            "[pipeline]\nworkers_per_device = 5 # two\nmps = true\n",
        ),
        (
            "[pipeline] # p\nmps = true\n\n# next\n[http]\n",
            "[pipeline] # p\nworkers_per_device = 5\nmps = true\n\n# next\n[http]\n",
        ),
        ("# alone", "# alone\n\n[pipeline]\nworkers_per_device = 5\n"),
        ("pipeline.mps = true\n", "pipeline.mps = true\npipeline.workers_per_device = 5\n"),
        ("pipeline = { mps = true }\n", "pipeline = { mps = true , workers_per_device = 5}\n"),
        ("[ pipeline ]\n", "[ pipeline ]\nworkers_per_device = 5\n"),
        (
            "[http]\n#workers_per_device = 0\n",
            "[http]\n#workers_per_device = 0\n\n[pipeline]\nworkers_per_device = 5\n",
        ),
        (
            "[pipeline]\nmps = true\n[http]\n#workers_per_device = 0\n",
            "[pipeline]\nworkers_per_device = 5\nmps = true\n[http]\n#workers_per_device = 0\n",
        ),
    ],
    ids=[
        *("set", "not set", "no table", "dotted", "inline", "spaces"),
        *("a comment of an earlier table", "a comment of a later table"),
    ],
)
def test_a_key_is_changed_wherever_it_is_and_comments_stay(before: str, after: str) -> None:
    changed = set_keys(before, {("pipeline", "workers_per_device"): 5})
    assert tomllib.loads(changed)["pipeline"]["workers_per_device"] == 5
    assert changed.replace(" ", "") == after.replace(" ", "")


def test_a_file_that_cannot_be_changed_safely_is_refused_with_the_keys_to_set() -> None:
    text = 'note = """\n[pipeline]\n"""\n'
    with pytest.raises(ConfigError, match=r"Set these keys yourself: pipeline\.workers_per_device = 5\."):
        set_keys(text, {("pipeline", "workers_per_device"): 5})


def test_the_old_file_is_kept_and_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.toml", tmp_path / "daemon.toml"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    kept = replace_file(link, "new", tmp_path / "ledger.sqlite", "tune")
    assert (link.read_text(), kept.read_text(), link.is_symlink()) == ("new", "old", True)
    assert {file.stat().st_mode & 0o777 for file in (real, kept)} == {0o640}
    assert {file.name for file in tmp_path.iterdir()} == {"real.toml", "daemon.toml", "real.toml.before-tune"}


def test_a_file_that_cannot_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text("old")
    (tmp_path / "daemon.toml.before-tune").mkdir()  # also stops root
    with pytest.raises(NotWritable):
        replace_file(file, "new", tmp_path / "ledger.sqlite", "tune")
    assert file.read_text() == "old"


def test_the_difference_names_the_file_and_the_lines() -> None:
    shown = show_difference("a = 1\nb = 2\n", "a = 3\nb = 2\n", Path("daemon.toml"))
    assert "-a = 1\n+a = 3\n" in shown
    assert shown.startswith("--- daemon.toml\n+++ daemon.toml (tuned)\n")
