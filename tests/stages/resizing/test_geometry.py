from __future__ import annotations

import pytest
from transformers import CLIPImageProcessor, RTDetrImageProcessor

from stages.resizing.geometry import Geometry


def test_a_crop_is_the_middle_of_the_resized_image() -> None:
    geometry = Geometry.of(CLIPImageProcessor())
    assert (geometry.resized(480, 640), geometry.kept, geometry.corner(480, 640)) == (
        (224, 298),
        (224, 224),
        (0, 37),
    )


def test_an_image_may_change_its_shape() -> None:
    geometry = Geometry.of(RTDetrImageProcessor(size={"height": 640, "width": 320}))
    assert (geometry.resized(100, 200), geometry.kept, geometry.corner(100, 200)) == (
        (640, 320),
        (640, 320),
        (0, 0),
    )


def test_sizes_that_depend_on_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match="a height and a width, or to a shortest edge with a center crop"):
        Geometry.of(CLIPImageProcessor(do_center_crop=False))
