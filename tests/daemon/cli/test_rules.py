"""`visiond check` tries the user's rule before it fails on thousands of images."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.daemon_process import Place, picture

RULES = """
def good(record):
    return "big" if record["source"]["width"] > 8 else record["caption"]["text"].split()[0]

def wrong_key(record):
    return record["faces"]

def no_name(record):
    return "no name of a bin"
"""


def check(place: Place, rule: str, module: str = RULES) -> tuple[int, list[str]]:
    """The exit status of `visiond check`, and its findings about the rule."""
    (place.folder / "my_rules.py").write_text(module)
    place.configure({"binning": {"rules": f"my_rules:{rule}"}})
    checked = place.command("check", "--quick", "--json", modules=place.folder)
    return checked.returncode, [
        finding["text"] for finding in json.loads(checked.stdout) if "my_rules:" in finding["text"]
    ]


def test_a_rule_is_tried_on_a_sample_and_once_there_is_one_on_the_newest_image_that_is_done(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    assert check(place, "good") == (0, ["binning rule my_rules:good puts a sample record into bin big."])
    place.configure({"binning": {"rules": ""}})
    place.drop("a.ppm", picture(1))
    assert place.run_once().returncode == 0
    assert check(place, "good") == (
        0,
        ["binning rule my_rules:good puts image 1 (the newest that is DONE) into bin a."],
    )


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("wrong_key", "KeyError: 'faces' (FILE, line 6); the record has bin, blip, caption"),
        (
            "no_name",
            "the binning rule returned 'no name of a bin'; a bin's name has 1 to 64 letters (A to Z, a to z), digits, "
            "- and _, and begins with a letter or a digit (FILE, line 8)",
        ),
    ],
)
def test_a_rule_that_would_fail_images_is_an_error_with_its_file_and_line(
    tmp_path: Path, rule: str, said: str
) -> None:
    place = Place(tmp_path)
    status, [text] = check(place, rule)
    assert status == os.EX_CONFIG
    assert text.startswith(f'[binning] rules = "my_rules:{rule}" fails on a sample record: ')
    assert said.replace("FILE", str(tmp_path / "my_rules.py")) in text


@pytest.mark.parametrize("module", ["def good(record:\n", "import math\n1 / 0\n"])
def test_a_module_that_cannot_be_imported_is_reported_whatever_it_raises(tmp_path: Path, module: str) -> None:
    status, [text] = check(Place(tmp_path), "good", module)
    assert status == os.EX_CONFIG
    assert "cannot be loaded: " in text
    assert "my_rules.py, line " in text
