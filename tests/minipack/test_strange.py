from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from visiond_mini.strange import draw_strange, write_strange


def test_a_seed_and_an_index_always_make_the_same_picture() -> None:
    first, again = draw_strange(3, 5), draw_strange(3, 5)
    assert np.array_equal(first, again)
    assert first.dtype == np.uint8
    other = draw_strange(3, 6)
    assert first.shape != other.shape or not np.array_equal(first, other)


def test_pictures_are_written_as_files(tmp_path: Path) -> None:
    files = write_strange(tmp_path / "new", 3, seed=3)
    assert [file.name for file in files] == ["3-000000.jpg", "3-000001.jpg", "3-000002.jpg"]
    for index, file in enumerate(files):
        assert np.asarray(cv2.imread(str(file))).shape == draw_strange(3, index).shape
