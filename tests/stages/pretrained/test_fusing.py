"""Faster parts of models, beside transformers' own: with kernels on a GPU, interpreted elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.images.devices import hold_device, pixels_of
from stages.pretrained import fusing
from stages.pretrained.vision import Patches, is_patching
from tests.stages.pictures import draw_image
from tests.stages.pretrained.models import KINDS, make_known, make_stage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
DTYPE = torch.float16
CLOSE = 2 * torch.finfo(DTYPE).eps  # of the whole, relative
FORMS = (fusing.FastNorm, fusing.FastLayerNorm, fusing.FastGatedMlp, fusing.FastGeluMlp)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "has_kernels_for", lambda _: True)


def form_of(part: Any) -> type[nn.Module] | None:
    return next((form for form in FORMS if isinstance(part, form)), None)


def width_of(part: Any) -> int:
    """Of what a part gets."""
    first = next((layer for layer in part.modules() if isinstance(layer, nn.Linear)), None)
    return first.in_features if first else len(part.weight)


@each_kind
@torch.inference_mode()
def test_each_part_computes_what_it_did(kind: str, kernels: None) -> None:
    model = make_known(kind, DTYPE, DEVICE)
    names = list(model.state_dict())
    fusing.speed_up(model)
    assert list(model.state_dict()) == names
    parts = {(form_of(part), type(part).__name__): part for part in model.modules() if form_of(part)}
    assert parts
    for (form, name), part in parts.items():
        x = torch.randn(2, 3, width_of(part), generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
        theirs = super(form, part).forward(x)  # type: ignore[arg-type]
        assert (part(x) - theirs).float().norm() < CLOSE * theirs.float().norm(), name


@each_kind
def test_the_first_layer_of_a_tower_is_a_matrix_product(kind: str) -> None:
    model = make_known(kind, device=DEVICE)
    before = {name: part for name, part in model.named_modules() if is_patching(part)}
    fusing.speed_up(model)
    assert before
    for name, part in before.items():
        patches = model.get_submodule(name)
        assert isinstance(patches, Patches)
        window = [2 * side + 1 if side > 2 else side for side in part.kernel_size]  # with a rest
        pixels = torch.randn(3, part.in_channels, *window, device=DEVICE)
        torch.testing.assert_close(patches(pixels), part(pixels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "heads_are_halved"), [("qwen3_vl", True), ("lighton_ocr", True), ("glm_ocr", False)]
)
def test_rotations_by_halves_of_a_head_are_replaced(kind: str, heads_are_halved: bool, kernels: None) -> None:
    model = make_known(kind, DTYPE, DEVICE)
    fusing.speed_up(model)
    [module] = {
        sys.modules[type(part).__module__]
        for part in model.modules()
        if type(part).__name__.endswith("TextMLP")
    } or {sys.modules[type(part).__module__] for part in model.modules() if type(part).__name__ == "Qwen3MLP"}
    rotation: Any = module.apply_rotary_pos_emb
    assert hasattr(rotation, "__wrapped__") == heads_are_halved
    fusing.speed_up(make_known(kind))
    assert module.apply_rotary_pos_emb is rotation, "once"
    if not heads_are_halved:
        return
    query, key, cos, sin = (torch.randn(2, 4, 5, 8).to(DEVICE, DTYPE) for _ in range(4))
    for turns in ((cos[:, 0], sin[:, 0]), (cos[:1, 0], sin[:1, 0])):
        for ours, theirs in zip(
            rotation(query, key, *turns), rotation.__wrapped__(query, key, *turns), strict=True
        ):
            assert torch.equal(ours, theirs)
    quarter = cos[:, 0, :, :4], sin[:, 0, :, :4]
    with pytest.raises(RuntimeError, match="size of tensor"):  # as transformers' own
        rotation(query, key, *quarter)


def test_other_dtypes_and_devices_are_computed_as_before() -> None:
    assert not fusing.can_fuse(torch.zeros(1, dtype=torch.bfloat16))
    assert not fusing.can_fuse(torch.zeros(1, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@each_kind
def test_a_gpu_scores_words_as_without_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = make_stage(kind, "cuda:0", dtype="bfloat16", options={"max_new_tokens": 4})
    pixels = [image.to("cuda:0") for image in pixels_of([draw_image(90, 120, 0), draw_image(64, 48, 1)])]

    def score() -> Tensor:
        with hold_device(stage.lock):
            scores: Tensor = stage.model(**stage.prepare_inputs(pixels)).logits.float()
        return scores

    ours = score()
    monkeypatch.setattr(fusing, "can_fuse", lambda _: False)
    theirs = score()
    assert (ours - theirs).norm() < 0.03 * theirs.norm()
