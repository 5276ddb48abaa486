"""The last step of a training: what the pack knows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages.contract.manifest import MANIFEST, read_manifest
from stages.pretrained.familiarity import FILE, ROLES, load_familiarity
from stages.weights.packs import open_pack, resolve_all, verify
from tests.minipack.blank import make_blank_pack
from tests.minipack.test_mini import TINY
from tests.stages.pictures import draw_image
from visiond_mini import familiarity
from visiond_mini.familiarity import add_familiarity, fit, fit_logistic
from visiond_mini.options import Options
from visiond_mini.recipe import make_pack

STAGES = ("yolo", "clip", "blip")


def draw(count: int, mean: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 6, generator=generator) + mean).double()


def test_the_classifier_refuses_the_others_and_few_of_its_own() -> None:
    weight, bias = fit(draw(3000, 0.0, 1), draw(3000, 2.0, 2))
    assert 0.001 < (draw(20_000, 0.0, 3) @ weight + bias > 0).double().mean() < 0.012
    assert (draw(2000, 2.0, 4) @ weight + bias > 0).double().mean() > 0.95


def test_the_threshold_comes_from_scenes_that_were_not_fitted() -> None:
    own = draw(3000, 0.0, 1)
    own[2000:] += 0.5  # only in the part for the threshold
    weight, bias = fit(own, draw(3000, 2.0, 2))
    assert (own[2000:] @ weight + bias > 0).sum() == 5


def test_the_regression_is_the_least_of_its_loss() -> None:
    inputs = torch.cat((draw(200, 0.0, 1), draw(100, 0.5, 2)))
    answers = torch.cat((torch.zeros(200), torch.ones(100))).double()
    weights = fit_logistic(inputs, answers).requires_grad_()
    likely = inputs @ weights[:-1] + weights[-1]
    losses = torch.nn.functional.binary_cross_entropy_with_logits(likely, answers, reduction="none")
    shares = torch.where(answers > 0, 0.5 / 100, 0.5 / 200)
    loss = (shares * losses).sum() + familiarity.PENALTY / 2 * (weights[:-1] ** 2).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    assert weights.grad.abs().max() < 1e-5


def test_a_pack_gets_the_classifier_for_each_stage(tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    make_blank_pack(pack, seed=1, sizes=TINY)
    before = read_manifest(pack / MANIFEST)
    add_familiarity(pack, tmp_path, 9, say=lambda line: None)
    manifest = read_manifest(pack / MANIFEST)
    verify(open_pack(pack, tmp_path))
    assert set(manifest.digests) - set(before.digests) == {FILE}
    assert load_file(pack / FILE)["weight"].shape == (2 * 24,)
    for name, entry in manifest.stages.items():
        assert entry.files == before.stages[name].files | ROLES
    for spec in resolve_all(open_pack(pack, tmp_path), STAGES, {}):
        judge = load_familiarity(spec, "cpu", threading.Lock())
        assert len(judge.find_unfamiliar([draw_image(20, 30)] * 3)) == 3


def test_a_training_ends_with_the_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pack"
    steps: list[str] = []
    for name in ("make_scenes", "train_all"):
        monkeypatch.setattr(f"visiond_mini.recipe.{name}", lambda *_, name=name: steps.append(name))
    monkeypatch.setattr("visiond_mini.recipe.pack_models", lambda _: make_blank_pack(out, seed=1, sizes=TINY))
    monkeypatch.setattr("visiond_mini.recipe.list_logs", lambda _: {})
    make_pack(Options(out=out, workdir=tmp_path, scenes=6, score=0), lambda line: None, 0)
    assert steps == ["make_scenes", "train_all"]
    assert FILE in read_manifest(out / MANIFEST).digests
    assert FILE in (out / "README.md").read_text()
