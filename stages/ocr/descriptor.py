"""Describes the stage OCR for the rest of the program. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from stages.contract.descriptor import SMALL, Backend, Descriptor, KnownModel
from stages.contract.options import Fraction, Side
from stages.contract.recognition import make_backend
from stages.ocr import files

READERS = (
    KnownModel("lighton_ocr", "LightOnOcrForConditionalGeneration", "LightOnOCR"),
    KnownModel(
        "mistral3",
        "LightOnOCRForConditionalGeneration",
        "LightOnOCR as its authors publish it",
        loaded_as="LightOnOcrForConditionalGeneration",
    ),
    KnownModel("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", "PaddleOCR-VL"),
    KnownModel("glm_ocr", "GlmOcrForConditionalGeneration", "GLM-OCR"),
    KnownModel(
        "deepseek_ocr2",
        "DeepseekOcr2ForConditionalGeneration",
        "DeepSeek-OCR 2, as in deepseek-community/DeepSeek-OCR-2",
    ),
)

VERTICAL_RATIO = 1.5  # height / width from which a line counts as vertical text and is turned

Point = tuple[float, float]


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: its text, its score (0..1), its corners clockwise from top left;
    `guessed` if the text is likely wrong."""

    text: str
    score: float
    box: tuple[Point, Point, Point, Point]
    guessed: bool = False


def bounds_of(corners: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    """The smallest upright box around a line's corners: x0, y0, x1, y1."""
    across, down = zip(*corners, strict=True)
    return min(across), min(down), max(across), max(down)


class Ocr(msgspec.Struct, frozen=True, omit_defaults=True):
    """The text of an image: as lines, each with its box; or, from a page reader, which finds no boxes, as `text`, without
    lines. `cut` if that text ends at max_new_tokens; `scale` if the image was made smaller for OCR."""

    # A reader measures neither boxes nor scores, and a line without them would break whoever reads lines. So a
    # reader's text is not made into lines.
    lines: list[Line]
    count: int  # of lines
    area_ratio: float  # area of all boxes / area of the image
    text: str | None = None
    cut: bool = False
    scale: float | None = None  # at which PP-OCR read the image, if max_side made it smaller


class OcrOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As rapidocr's options. If rapidocr has another name for one, it is in brackets."""

    text_score: Annotated[Fraction, Meta(description="Lines with a lower score are not in the result.")] = 0.5
    mask_threshold: Annotated[
        Fraction,
        Meta(description="Probability from which the detector counts a pixel as text (rapidocr's thresh)."),
    ] = 0.3
    box_threshold: Annotated[
        Fraction,
        Meta(description="Mean probability of a box's pixels from which the box is read (box_thresh)."),
    ] = 0.5
    unclip_ratio: Annotated[
        float,
        Meta(
            gt=0,
            le=10,
            description="How far boxes are enlarged: by this times their area, divided by their perimeter.",
        ),
    ] = 1.6
    max_side: Annotated[
        Side,
        Meta(
            description="Pixels. An image with a longer side is shrunk to this size (max_side_len), and its result has "
            "`scale`; a long and narrow one is read in pieces of this length instead."
        ),
    ] = 2000
    min_side: Annotated[
        int,
        Meta(
            ge=1,
            le=736,
            description="Pixels. An image with a smaller shorter side is enlarged to this size (min_side_len).",
        ),
    ] = 30
    map_side: Annotated[
        Side,
        Meta(
            description="Pixels. If the shorter side is less, the image is enlarged to this for the detector (limit_side_len)."
        ),
    ] = 736
    orientation: Annotated[
        bool,
        Meta(
            description="Whether to also read pages that are upside down or sideways. A page whose text has a low score is "
            "then also read the other way round, and the reading with the higher score is used."
        ),
    ] = False


class ReaderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts of pages by vision-language models."""

    prompt: Annotated[
        str,
        Meta(
            description="What the model is asked about each page; empty: what transformers' documentation of the model asks "
            "for text."
        ),
    ] = ""
    max_new_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Most tokens (words or parts of words) of a text. A text that is longer is cut, and has "
            "`cut` in the result.",
        ),
    ] = 1024


def bundled_weights() -> dict[str, str]:
    """The PP-OCRv6 small weights in the rapidocr package. Raises WeightsError if it is not installed."""
    # It imports numpy, which most commands do not need.
    from stages.ocr.onnxfile import weight_files

    return {role: str(path) for role, path in weight_files().items()}


@lru_cache(maxsize=4096)
def fake(variant: int, width: int, height: int, earlier: frozenset[str]) -> Ocr:
    """0 to 4 lines, each with a twentieth of the image's height and half of its width."""
    lines = [
        Line(
            f"line {variant}.{row}",
            0.9,
            (
                (0.1 * width, top * height),
                (0.6 * width, top * height),
                (0.6 * width, (top + 0.05) * height),
                (0.1 * width, (top + 0.05) * height),
            ),
        )
        for row, top in enumerate((0.1, 0.2, 0.3, 0.4)[: variant % 5])
    ]
    return Ocr(lines, len(lines), 0.025 * len(lines))


OCR = Descriptor(
    name="ocr",
    key="ocr",
    result=Ocr,
    backends={
        "ppocr": Backend(
            place="stages.ocr.stage:OcrStage",
            options=OcrOptions,
            version=3,
            bundled=bundled_weights,
            roles=("det", "rec"),
            models=files.MODELS,
            find=files.find,
            check=files.check,
        ),
        "reader": make_backend(
            "stages.reading.stage:ReaderStage",
            ReaderOptions,
            READERS,
            small=SMALL,
            can_spread=True,
            half="bfloat16",  # in float16, language models overflow
        ),
    },
    # bfloat16 has 8 bits of precision: boxes would move by up to three pixels, which changes some texts
    half="float16",
    cost=0.60,
    fake=fake,
)
