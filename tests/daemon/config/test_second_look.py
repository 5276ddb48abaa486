"""What [[second_look]] tables refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.core.errors import ConfigError

LOOK = {"name": "pages", "when": "A", "stage": "ocr", "model": "other"}


def problems_of(look: dict[str, Any], **document: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse({"second_look": [LOOK | look], **document}, Path("/srv"))
    return caught.value.problems


@pytest.mark.parametrize(
    ("look", "problem"),
    [
        (
            {"stage": "ocrr"},
            'second_look pages: there is no stage "ocrr" in the pipeline; choose one of ocr, yolo',
        ),
        ({"model": ""}, "second_look pages: set its model"),
        ({"backend": "none"}, 'second_look pages: there is no backend for ocr called "none"'),
        ({"when": "D"}, 'second_look pages: there is no bin "D"; choose A, B, C, or set binning.rules'),
        ({"when": "every image"}, 'when = "every image" is neither a bin nor "module:function"'),
        ({"name": "My look"}, '"My look" is not a name'),
        ({"share": 1.5}, "second_look"),
    ],
)
def test_a_wrong_table_is_refused_with_what_to_write(look: dict[str, Any], problem: str) -> None:
    [said] = problems_of(look)
    assert problem in said


def test_two_looks_have_two_names() -> None:
    with pytest.raises(ConfigError, match='2 tables are called "pages"'):
        parse({"second_look": [LOOK, LOOK]}, Path("/srv"))


def test_images_that_are_deleted_cannot_be_looked_at_again() -> None:
    [said] = problems_of({}, inbox=[{"on_success": "delete"}])
    assert 'on_success = "delete"' in said


def test_a_folder_of_weights_is_relative_to_the_files_folder() -> None:
    config = parse({"second_look": [LOOK | {"model": "./weights/ocr"}]}, Path("/srv"))
    assert config.second_look[0].model == "/srv/weights/ocr"
