"""Groups of near-duplicates, compared with what a comparison of all pairs finds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from daemon.search import covering
from daemon.search.covering import Leaders, extend_cover, find_axes, find_cover, shorten
from daemon.system.gpus import list_gpus

NEAR = 0.95
DIM = 48
CUDA = (pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="needs CUDA"))
DEVICES = ("", "cpu", pytest.param("cuda", marks=CUDA))  # "": without torch


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images fill several blocks, strips and parts."""
    sizes = {
        "BLOCK": 64,
        "STRIP": 32,
        "READ": 16,
        "GPU_PAIRS": 50,
        "SAMPLE": 300,
        "PAIRED": 100,
        "WIDTHS": (2, 6, 24),
    }
    for name, size in sizes.items():
        monkeypatch.setattr(covering, name, size)
    monkeypatch.setattr(covering._Covering, "part", 64)
    monkeypatch.setattr(covering._CoveringByTorch, "part", 100)


def unit(vectors: NDArray[Any]) -> NDArray[np.float16]:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.float16)


def cone(chance: np.random.Generator, images: int, spread: float) -> NDArray[Any]:
    """Around one direction, the first coordinates with most of the spread, as of pictures by CLIP."""
    scale = np.arange(1, DIM + 1) ** -0.7
    found: NDArray[Any] = np.eye(DIM)[-1] + spread * chance.standard_normal((images, DIM)) * scale
    return found


def with_copies(chance: np.random.Generator, vectors: NDArray[Any]) -> NDArray[Any]:
    """A third of them nearly as others."""
    some = chance.random(len(vectors)) < 1 / 3
    step = chance.standard_normal(vectors.shape) * np.linalg.norm(vectors, axis=1, keepdims=True) / DIM**0.5
    copied = vectors[chance.integers(0, len(vectors), len(vectors))] + 0.3 * step
    return np.where(some[:, None], copied, vectors)


def chain(images: int) -> NDArray[Any]:
    """Each is near the next one, and the last is the opposite of the first."""
    angles = np.linspace(0, np.pi, images)
    return np.pad(np.column_stack([np.cos(angles), np.sin(angles)]), ((0, 0), (0, DIM - 2)))


def collection(kind: str, chance: np.random.Generator) -> NDArray[np.float16]:
    made: dict[str, Callable[[], NDArray[Any]]] = {
        "a cone with copies": lambda: with_copies(chance, cone(chance, 500, 0.6)),
        "a narrow cone": lambda: cone(chance, 500, 0.2),
        "noise": lambda: with_copies(chance, chance.standard_normal((500, DIM))),
        "clusters": lambda: (
            np.repeat(cone(chance, 9, 1.0), 60, 0) + 0.04 * chance.standard_normal((540, DIM))
        ),
        "one image": lambda: cone(chance, 1, 1.0),
        "equal images": lambda: np.repeat(cone(chance, 3, 1.0), 200, 0),
        "a chain": lambda: chain(400),
    }
    return unit(made[kind]())


KINDS = ("a cone with copies", "a narrow cone", "noise", "clusters", "one image", "equal images", "a chain")


def compare_all(exact: NDArray[np.float16], near: float) -> tuple[list[int], list[float]]:
    """The same by comparing everything in float64, which is exact."""
    wide = exact.astype(np.float64)
    cosines = wide @ wide.T
    leaders: list[int] = []
    for place in range(len(wide)):
        led = [each for each in range(place) if leaders[each] == each and cosines[each, place] >= near]
        leaders.append(led[0] if led else place)
    return leaders, [
        1.0 if leader == place else cosines[leader, place] for place, leader in enumerate(leaders)
    ]


@functools.cache
def compared(
    kind: str, near: float, seed: int
) -> tuple[NDArray[np.float16], NDArray[np.int64], list[int], list[float]]:
    """A collection and its order, and what a comparison of all pairs finds."""
    chance = np.random.default_rng(seed)
    exact = collection(kind, chance)
    order = chance.permutation(len(exact))
    return exact, order, *compare_all(exact[order], near)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("near", [0.6, NEAR, 0.99])
@pytest.mark.parametrize("kind", KINDS)
def test_the_groups_are_those_of_a_comparison_of_all_pairs(kind: str, near: float, device: str) -> None:
    for seed in range(2):
        exact, order, leaders, cosines = compared(kind, near, seed)
        found = find_cover(exact, order, near, threads=3, device=device)
        assert found.leaders.tolist() == leaders
        assert found.cosines == pytest.approx(cosines, abs=1e-5)


def test_the_collections_have_groups_and_single_images() -> None:
    """Otherwise the comparison above would show little."""
    exact = collection("a cone with copies", np.random.default_rng(0))
    leaders = find_cover(exact, np.arange(500), NEAR).leaders
    sizes = np.bincount(leaders, minlength=500)
    assert 100 < np.count_nonzero(sizes == 1) < 400
    assert np.count_nonzero(sizes > 1) > 50


def test_a_chain_of_small_steps_is_no_group() -> None:
    found = find_cover(collection("a chain", np.random.default_rng(0)), np.arange(400), NEAR)
    assert found.cosines.min() >= NEAR
    assert len(np.unique(found.leaders)) > 5


def test_the_first_of_an_order_leads() -> None:
    exact = unit(np.ones((5, DIM)))
    assert find_cover(exact, np.array([3, 0, 4, 2, 1]), NEAR).leaders.tolist() == [0] * 5
    assert find_cover(exact, np.array([4, 2]), NEAR).leaders.tolist() == [0, 0], (
        "only images of the order count"
    )


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_does_not_decide_at_the_least_cosine(device: str) -> None:
    for seed in range(20):
        chance = np.random.default_rng(seed)
        one = chance.standard_normal(DIM)
        pair = unit(np.stack([one, one + 0.2 * chance.standard_normal(DIM)]))
        cosine = float(np.prod(pair.astype(np.float64), axis=0).sum())
        assert find_cover(pair, np.arange(2), cosine, device=device).leaders.tolist() == [0, 0]
        above = np.nextafter(cosine, 1)
        assert find_cover(pair, np.arange(2), above, device=device).leaders.tolist() == [0, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_an_embedding_that_is_not_finite_is_near_no_other(device: str) -> None:
    exact = unit(np.ones((100, DIM)))
    exact[[3, 70], 5] = np.nan, np.inf
    leaders = find_cover(exact, np.arange(100), NEAR, device=device).leaders.tolist()
    assert leaders == [{3: 3, 70: 70}.get(place, 0) for place in range(100)]


def test_copies_of_an_image_are_each_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    monkeypatch.setattr(covering._Covering, "_multiply", _noted(rows, covering._Covering._multiply))
    monkeypatch.setattr(covering._Covering, "_measure", _noted(rows, covering._Covering._measure))
    find_cover(unit(np.ones((5000, DIM))), np.arange(5000), NEAR)
    assert sum(rows) <= 2 * 5000


def _noted(rows: list[int], work: Any) -> Any:
    def compare(self: Any, left: Any, right: Any) -> Any:
        rows.append(len(right))
        return work(self, left, right)

    return compare


def test_how_many_images_have_their_group_is_noted() -> None:
    done: list[int] = []
    find_cover(collection("noise", np.random.default_rng(0)), np.arange(500), NEAR, note=done.append)
    assert done == sorted(done)
    assert done[-1] == 500


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_later_are_grouped_as_if_they_had_been_the_last_of_the_order(seed: int) -> None:
    chance = np.random.default_rng(seed)
    exact = unit(with_copies(chance, cone(chance, 400, 0.5)))
    exact[350] = np.nan
    order = chance.permutation(400)
    before, whole = find_cover(exact, order[:250], NEAR), find_cover(exact, order, NEAR)
    leading = np.flatnonzero(before.leaders == np.arange(250))
    axes = find_axes(exact, order[:250], NEAR)
    leaders, expected = order[leading], whole.leaders[250:]
    for start in range(250, 400, 50):
        new = order[start : start + 50]
        found = extend_cover(exact, Leaders(leaders, shorten(exact, leaders, axes), axes), new, NEAR)
        places = np.concatenate([leaders, new])[found.leaders]
        assert np.array_equal(places, order[expected[start - 250 : start - 200]])
        assert found.cosines == pytest.approx(whole.cosines[start : start + 50], abs=1e-6)
        leaders = np.concatenate([leaders, new[found.leaders == len(leaders) + np.arange(50)]])
