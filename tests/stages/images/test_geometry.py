from __future__ import annotations

import itertools
from typing import Any

import pytest
from transformers import CLIPImageProcessor, DetrImageProcessor, RTDetrImageProcessor, YolosImageProcessor
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.image_utils import get_image_size_for_max_height_width
from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches
from transformers.models.yolos.image_processing_yolos import get_size_with_aspect_ratio_yolos

from stages.images.geometry import BoxGeometry, EdgeGeometry, Geometry, PatchGeometry


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


def test_an_image_that_keeps_its_shape_is_as_large_as_in_transformers() -> None:
    """Where that is not nothing, which it refuses."""
    size = {"shortest_edge": 80, "longest_edge": 133}
    detr, yolos = (
        EdgeGeometry.of(DetrImageProcessor(size=size)),
        EdgeGeometry.of(YolosImageProcessor(size=size)),
    )
    for height, width in itertools.product(range(1, 301, 7), range(2, 301, 3)):
        one, other = detr.place(height, width), yolos.place(height, width)
        expected = get_size_with_aspect_ratio((height, width), 80, 133)
        rounded = get_size_with_aspect_ratio_yolos((height, width), 80, 133)
        assert one == (tuple(max(side, 1) for side in expected), (0, 0), one.resized), (height, width)
        assert other == (tuple(max(side, 16) for side in rounded), (0, 0), other.resized), (height, width)


def test_an_image_that_is_padded_or_cropped_does_not_keep_its_shape() -> None:
    boxed = DetrImageProcessor(
        size={"shortest_edge": 80, "longest_edge": 133}, pad_size={"height": 133, "width": 133}
    )
    assert isinstance(EdgeGeometry.of(boxed), BoxGeometry)
    assert isinstance(EdgeGeometry.of(CLIPImageProcessor()), Geometry)


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
