from __future__ import annotations

import pytest
from transformers import CLIPImageProcessor, RTDetrImageProcessor
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

from stages.resizing.geometry import Geometry, PatchGeometry


def test_a_crop_is_the_middle_of_the_resized_image() -> None:
    geometry = Geometry.of(CLIPImageProcessor())
    assert geometry.place(480, 640) == ((224, 298), (0, 37), (224, 224))


def test_an_image_may_change_its_shape() -> None:
    geometry = Geometry.of(RTDetrImageProcessor(size={"height": 640, "width": 320}))
    assert geometry.place(100, 200) == ((640, 320), (0, 0), (640, 320))


def test_sizes_that_depend_on_the_image_are_refused() -> None:
    with pytest.raises(ValueError, match="a height and a width, or to a shortest edge with a center crop"):
        Geometry.of(CLIPImageProcessor(do_center_crop=False))


@pytest.mark.parametrize(
    "size", [(480, 640), (1, 1), (3, 5000), (5000, 3), (256, 256), (1333, 800), (17, 16)]
)
@pytest.mark.parametrize("most", [256, 7])
def test_patches_are_as_many_as_in_transformers(size: tuple[int, int], most: int) -> None:
    theirs = get_image_size_for_max_num_patches(*size, 16, most)
    assert PatchGeometry(16, most).place(*size) == (theirs, (0, 0), theirs)
