"""The images nearest to a vector, compared with all of them in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from daemon.search.matrix import quantize
from stages.clip import nearest
from stages.clip.nearest import estimate, find_nearest


def embeddings(rows: int, dim: int = 64, spread: float = 1.0) -> NDArray[np.float16]:
    """Unit vectors around a common direction, as those of real images are. spread: how far they are from it."""
    source = np.random.default_rng(7)
    around = spread * source.standard_normal((rows, dim)) + source.standard_normal(dim)
    return np.asarray(around / np.linalg.norm(around, axis=1, keepdims=True), np.float16)


def reference(exact: NDArray[np.float16], query: torch.Tensor, count: int) -> list[int]:
    order = np.argsort(-(exact.astype(np.float32) @ query.numpy()), kind="stable")
    return [int(place) for place in order[:count]]


@pytest.mark.parametrize("spread", [1.0, 0.01, 0.002])
def test_the_best_are_those_of_a_comparison_with_all_in_full_precision(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a spread of a hundredth, thousands of cosines are equal as far as int8 can show; with a smaller one, all."""
    monkeypatch.setattr(nearest, "ROWS_AT_ONCE", 1000)
    monkeypatch.setattr(nearest, "CANDIDATES", 20)
    exact = embeddings(9000, spread=spread)
    query = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(3)), dim=0)
    found = find_nearest(query, *quantize(exact), exact, 5)
    assert found.places.tolist() == reference(exact, query, 5)
    assert found.scores == pytest.approx(exact[found.places].astype(np.float32) @ query.numpy(), abs=1e-6)


@pytest.mark.parametrize("dim", [1, 8, 40, 100])
def test_vectors_of_any_length_are_compared(dim: int) -> None:
    exact = embeddings(9000, dim)
    query = torch.nn.functional.normalize(torch.randn(dim, generator=torch.Generator().manual_seed(3)), dim=0)
    estimated = estimate(query, *quantize(exact)).numpy()
    assert estimated == pytest.approx(exact.astype(np.float32) @ query.numpy(), abs=0.02)


def test_only_allowed_rows_are_found() -> None:
    exact = embeddings(50)
    query = torch.from_numpy(exact[3].astype(np.float32))
    assert find_nearest(query, *quantize(exact), exact, 1).places.tolist() == [3]
    some = np.isin(np.arange(50), [7, 9, 20])
    assert set(find_nearest(query, *quantize(exact), exact, 10, some).places) == {7, 9, 20}
    assert not len(find_nearest(query, *quantize(exact), exact, 10, some & False).places)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.9])
def test_the_best_of_those_that_are_allowed_are_found_however_many_they_are(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "CANDIDATES", 20)
    exact = embeddings(9000, spread=0.1)
    allowed = np.random.default_rng(5).random(9000) < share
    query = torch.nn.functional.normalize(torch.randn(64, generator=torch.Generator().manual_seed(3)), dim=0)
    found = find_nearest(query, *quantize(exact), exact, 10, allowed)
    expected = [place for place in reference(exact, query, 9000) if allowed[place]]
    assert found.places.tolist() == expected[:10]


def test_a_text_of_another_model_is_refused() -> None:
    exact = embeddings(5)
    with pytest.raises(ValueError, match="the text has 3 values, the images have 64"):
        find_nearest(torch.ones(3), *quantize(exact), exact, 1)
