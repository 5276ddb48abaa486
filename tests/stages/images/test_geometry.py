from __future__ import annotations

from typing import Any

import pytest
from transformers import CLIPImageProcessor, RTDetrImageProcessor
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.image_utils import get_image_size_for_max_height_width
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

from stages.images.geometry import BoxGeometry, Geometry, PatchGeometry


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


@pytest.mark.parametrize(
    "size", [(480, 640), (640, 480), (1, 1), (9, 450), (256, 256), (1333, 800), (17, 16)]
)
def test_in_a_box_an_image_is_as_large_as_in_transformers(size: tuple[int, int]) -> None:
    within = RTDetrImageProcessor(
        size={"max_height": 64, "max_width": 90}, do_pad=True, pad_size={"height": 96, "width": 96}
    )
    edges = RTDetrImageProcessor(
        size={"shortest_edge": 48, "longest_edge": 80}, do_pad=True, pad_size={"height": 80, "width": 81}
    )
    assert (Geometry.of(within).kept, Geometry.of(edges).kept) == ((96, 96), (80, 81))
    assert Geometry.of(within).place(*size).resized == get_image_size_for_max_height_width(size, 64, 90)
    assert Geometry.of(edges).place(*size).resized == get_size_with_aspect_ratio(size, 48, 80)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"max_height": 64, "max_width": 64}, "do_pad": True}, "or pad to a pad_size"),
        (
            {
                "size": {"max_height": 64, "max_width": 64},
                "do_pad": True,
                "pad_size": {"height": 63, "width": 64},
            },
            "its pad_size must not be smaller than the resized image",
        ),
        ({"size": {"max_height": 64, "max_width": 64}, "do_pad": False}, "or pad to a pad_size"),
    ],
)
def test_padding_to_a_size_that_depends_on_the_images_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Geometry.of(RTDetrImageProcessor(**settings))


def test_padding_to_the_size_that_images_have_is_none() -> None:
    settings = {"size": {"height": 64, "width": 32}, "do_pad": True}
    assert isinstance(Geometry.of(RTDetrImageProcessor(**settings)), Geometry)
    padded = Geometry.of(RTDetrImageProcessor(**settings, pad_size={"height": 64, "width": 48}))
    assert isinstance(padded, BoxGeometry)
    assert padded.place(10, 10).resized == (64, 32)
