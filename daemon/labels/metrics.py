"""How well answers agree with labels: average precision of objects, tags, classes, error rates of text, and CIDEr of captions.

Each measure is computed from figures of single images, so that it can be computed again for images drawn at random from them:
the bootstrap (Efron, 1979), which gives intervals.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.core.errors import MissingLibrary
from daemon.core.labels import Box, ObjectLabel

Weights = npt.NDArray[np.float64]  # one for each image: how often it was drawn
Measure = Callable[[Weights], dict[str, float]]  # figures by name; NaN: it cannot be said

RESAMPLES = 500
LEVEL = 0.95
Z = 1.959963984540054  # of the normal distribution, for LEVEL
GRAMS, SIGMA = 4, 6.0  # of CIDEr-D
IOUS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST_OBJECTS = 100  # answers of an image that count, as in COCO
WORD = re.compile(r"\w+(?:['’]\w+)*")


def interval(
    measure: Measure, images: int, seed: int = 0, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float]]:
    """By name, the range that holds LEVEL of the values of resamples."""
    chance = np.random.default_rng(seed)
    drawn = [
        measure(chance.multinomial(images, np.full(images, 1 / images)).astype(np.float64))
        for _ in range(resamples)
    ]
    edges = [100 * (1 - LEVEL) / 2, 100 * (1 + LEVEL) / 2]
    found = {}
    for name in drawn[0]:
        values = [value for each in drawn if not math.isnan(value := each[name])]
        low, high = np.percentile(values, edges) if values else (math.nan, math.nan)
        found[name] = (float(low), float(high))
    return found


def difference(one: Measure, other: Measure) -> Measure:
    """Of the figures that both have, on the same images: the other's minus the first's."""

    def measure(weights: Weights) -> dict[str, float]:
        before, after = one(weights), other(weights)
        return {name: after[name] - before[name] for name in after if name in before}

    return measure


# Objects: COCO's mean average precision, https://cocodataset.org/#detection-eval. pycocotools finds which answer is which
# object; the rest is done here, as it cannot weight images.


class ObjectMeasure:
    """The mean over labels and IoUs of 0.5 to 0.95 (mAP), and over labels at 0.5 (AP50). Only labels that some person gave are
    scored; upper and lower case count as one."""

    def __init__(
        self, labels: Sequence[Sequence[ObjectLabel]], answers: Sequence[Sequence[tuple[str, float, Box]]]
    ) -> None:
        """answers: label, score and box. Both: of each image. Raises MissingLibrary."""
        truth, said = (
            defaultdict[str, list[dict[str, Any]]](list),
            defaultdict[str, list[dict[str, Any]]](list),
        )
        for image, objects in enumerate(labels):
            for each in objects:
                truth[each.label.casefold()].append(_annotation(image, each.box, iscrowd=int(each.crowd)))
        for image, found in enumerate(answers):
            for label, score, box in found:
                said[label.casefold()].append(_annotation(image, box, score=score))
        self._classes = {name: _prepare(truth[name], said[name], len(labels)) for name in sorted(truth)}
        self._images = len(labels)

    def __call__(self, weights: Weights) -> dict[str, float]:
        curves = [each for _, each in self._curves(weights)]
        whole, loose = (
            float(np.mean(each)) if curves else math.nan for each in (curves, [c[0] for c in curves])
        )
        return {"mAP": whole, "AP50": loose}

    def by_class(self) -> dict[str, float]:
        """The average precision of each label."""
        return {name: float(curve.mean()) for name, curve in self._curves(np.ones(self._images))}

    def _curves(self, weights: Weights) -> list[tuple[str, npt.NDArray[np.float64]]]:
        """Of each label of which there are objects, its average precision at each IoU."""
        curves = ((name, _precisions(each, weights)) for name, each in self._classes.items())
        return [(name, curve) for name, curve in curves if not np.isnan(curve[0])]


Prepared = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], npt.NDArray[np.float64]]


def _prepare(truth: Sequence[dict[str, Any]], said: Sequence[dict[str, Any]], images: int) -> Prepared:
    """Of one label: for each answer, the best score first, its image; by IoU, whether it is an object, and whether it is to be
    left out. Then the number of objects of each image. Raises MissingLibrary."""
    objects = np.bincount([each["image_id"] for each in truth if not each["iscrowd"]], minlength=images)
    matches = [each for each in _match(truth, said) if each is not None]
    if not matches:
        none = np.zeros((len(IOUS), 0), bool)
        return np.zeros(0, np.int64), none, none, objects.astype(np.float64)
    order = np.argsort(-np.concatenate([each["dtScores"] for each in matches]), kind="mergesort")
    image_of = np.concatenate([np.full(len(each["dtScores"]), each["image_id"]) for each in matches])
    matched = np.concatenate([each["dtMatches"] for each in matches], axis=1) > 0
    left_out = np.concatenate([each["dtIgnore"] for each in matches], axis=1).astype(bool)
    return image_of[order].astype(np.int64), matched[:, order], left_out[:, order], objects.astype(np.float64)


def _annotation(image: int, box: Box, **fields: float) -> dict[str, Any]:
    width, height = box[2] - box[0], box[3] - box[1]
    shape = {"bbox": [box[0], box[1], width, height], "area": width * height}
    return {"image_id": image, "category_id": 1, "iscrowd": 0} | shape | fields


def _match(truth: Sequence[dict[str, Any]], said: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Of each image, which answers are objects. Raises MissingLibrary."""
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise MissingLibrary("A score of objects needs pycocotools: pip install 'visiond[labels]'.") from None
    datasets = []
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        for annotations in (truth, said):
            coco = COCO()
            coco.dataset = {
                "images": [{"id": image} for image in sorted({each["image_id"] for each in (*truth, *said)})],
                "annotations": [each | {"id": number} for number, each in enumerate(annotations, 1)],
                "categories": [{"id": 1}],
            }
            coco.createIndex()
            datasets.append(coco)
        matching = COCOeval(*datasets, "bbox")
        matching.params.areaRng, matching.params.areaRngLbl = [[0, 1e10]], ["all"]
        matching.params.maxDets, matching.params.iouThrs = [MOST_OBJECTS], IOUS
        matching.evaluate()
    found: list[dict[str, Any] | None] = matching.evalImgs
    return found


def _precisions(prepared: Prepared, weights: Weights) -> npt.NDArray[np.float64]:
    """The average precision at each IoU; NaN without objects."""
    image_of, matched, left_out, objects = prepared
    total = float(weights @ objects)
    if not total:
        return np.full(len(IOUS), math.nan)
    if not len(image_of):
        return np.zeros(len(IOUS))
    weight = np.where(left_out, 0.0, weights[image_of])
    right = np.cumsum(weight * matched, axis=1)
    all_said = np.cumsum(weight, axis=1)
    precision = right / np.maximum(all_said, np.finfo(float).tiny)
    best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]  # of this recall or a higher one
    recall = right / total
    means = []
    for row in range(len(IOUS)):
        places = np.searchsorted(recall[row], RECALLS, side="left")
        reached = places < recall.shape[1]
        means.append(float(best[row][places[reached]].sum()) / len(RECALLS))
    return np.array(means)


# Tags


def measure_tags(labels: Sequence[Sequence[str]], answers: Sequence[Sequence[str]]) -> Measure:
    """Of the tags of all images together. Upper and lower case count as one."""
    sets = [
        ({tag.casefold() for tag in given}, {tag.casefold() for tag in said})
        for given, said in zip(labels, answers, strict=True)
    ]
    right = np.array([len(given & said) for given, said in sets], float)
    given_count = np.array([len(given) for given, _ in sets], float)
    said_count = np.array([len(said) for _, said in sets], float)

    def measure(weights: Weights) -> dict[str, float]:
        hits, given, said = weights @ right, weights @ given_count, weights @ said_count
        return {
            "recall": _share(hits, given),
            "precision": _share(hits, said),
            "F1": _share(2 * hits, given + said),
        }

    return measure


# Classes


class ClassMeasure:
    """accuracy: the share of images whose class is answered. macro F1: the mean of the F1 of each class that people gave or a
    model answered, so that a rare one counts as much as a frequent one. Upper and lower case count as one."""

    def __init__(self, labels: Sequence[str], answers: Sequence[str]) -> None:
        given, said = ([name.casefold() for name in names] for names in (labels, answers))
        self._names = sorted({*given, *said})
        self._given, self._said = (np.searchsorted(self._names, each) for each in (given, said))

    def __call__(self, weights: Weights) -> dict[str, float]:
        right = weights @ (self._given == self._said)
        scores = self._scores(weights)
        return {
            "accuracy": _share(right, float(weights.sum())),
            "macro F1": float(np.nanmean(scores)) if np.isfinite(scores).any() else math.nan,
        }

    def by_class(self) -> dict[str, float]:
        """The F1 of each class."""
        return dict(zip(self._names, self._scores(np.ones(len(self._given))).tolist(), strict=True))

    def _scores(self, weights: Weights) -> Weights:
        """NaN of a class that is not among these images."""
        count = len(self._names)
        hits = weights * (self._given == self._said)
        right, given, said = (
            np.bincount(places, each, count)
            for places, each in ((self._given, hits), (self._given, weights), (self._said, weights))
        )
        with np.errstate(invalid="ignore"):
            found: Weights = 2 * right / (given + said)
        return found


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


# Text


def measure_text(labels: Sequence[str], answers: Sequence[str]) -> Measure:
    """CER and WER: insertions, deletions and replacements, of characters and of words, for each that the labels have. Runs of
    white space count as one space. Raises MissingLibrary."""
    pairs = [(plain(given), plain(said)) for given, said in zip(labels, answers, strict=True)]
    letters = np.array([count_edits(given, said) for given, said in pairs], float)
    words = np.array([count_edits(given.split(), said.split()) for given, said in pairs], float)
    all_letters = np.array([len(given) for given, _ in pairs], float)
    all_words = np.array([len(given.split()) for given, _ in pairs], float)

    def measure(weights: Weights) -> dict[str, float]:
        return {
            "CER": _share(weights @ letters, weights @ all_letters),
            "WER": _share(weights @ words, weights @ all_words),
        }

    return measure


def count_edits(given: Sequence[str], said: Sequence[str]) -> int:
    """The least number of insertions, deletions and replacements that make one of the other. Raises MissingLibrary."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingLibrary(
            "A comparison of texts needs rapidfuzz: pip install 'visiond[labels]'."
        ) from None
    return int(Levenshtein.distance(given, said))


def plain(text: str) -> str:
    """With one form of each letter, and one space where there is any white space."""
    return " ".join(unicodedata.normalize("NFC", text).split())


# Captions: CIDEr-D of Vedantam, Zitnick, Parikh: CIDEr: Consensus-based Image Description Evaluation (CVPR 2015), section 4 and
# its appendix, with words in the place of stems, as in its authors' code.


def measure_captions(labels: Sequence[Sequence[str]], answers: Sequence[str]) -> Measure:
    """The mean of the images' CIDEr-D: 0 to 10. How rare a word is follows from all labels."""
    references = [[_grams(each) for each in given] for given in labels]
    seen: Counter[tuple[str, ...]] = Counter(
        gram for given in references for gram in {gram for each in given for gram in each}
    )
    images = math.log(max(len(labels), 1))
    scores = np.array(
        [_cider(_grams(said), given, seen, images) for said, given in zip(answers, references, strict=True)]
    )

    def measure(weights: Weights) -> dict[str, float]:
        # Of one image, no word is rarer than another.
        return {"CIDEr": _share(weights @ scores, float(weights.sum())) if len(scores) > 1 else math.nan}

    return measure


def _grams(text: str) -> Counter[tuple[str, ...]]:
    words = WORD.findall(unicodedata.normalize("NFC", text).casefold())
    return Counter(
        tuple(words[start : start + size])
        for size in range(1, GRAMS + 1)
        for start in range(len(words) - size + 1)
    )


Vectors = tuple[list[dict[tuple[str, ...], float]], list[float], int]


def _vectors(
    grams: Mapping[tuple[str, ...], int], seen: Mapping[tuple[str, ...], int], images: float
) -> Vectors:
    """By the length of the n-grams, tf-idf of each and their norms; and how many words, but for one, there are."""
    vectors: list[dict[tuple[str, ...], float]] = [{} for _ in range(GRAMS)]
    for gram, count in grams.items():
        vectors[len(gram) - 1][gram] = count * (images - math.log(max(1, seen.get(gram, 0))))
    norms = [math.sqrt(sum(value * value for value in each.values())) for each in vectors]
    return vectors, norms, sum(count for gram, count in grams.items() if len(gram) == 2)


def _cider(
    said: Mapping[tuple[str, ...], int],
    references: Sequence[Mapping[tuple[str, ...], int]],
    seen: Mapping[tuple[str, ...], int],
    images: float,
) -> float:
    own, own_norms, own_length = _vectors(said, seen, images)
    total = 0.0
    for reference in references:
        other, norms, length = _vectors(reference, seen, images)
        penalty = math.exp(-((own_length - length) ** 2) / (2 * SIGMA**2))
        for mine, theirs, norm in zip(
            own, other, [a * b for a, b in zip(own_norms, norms, strict=True)], strict=True
        ):
            clipped = sum(
                min(value, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0) for gram, value in mine.items()
            )
            total += penalty * (clipped / norm if norm else clipped)
    return 10.0 * total / GRAMS / len(references) if references else math.nan
