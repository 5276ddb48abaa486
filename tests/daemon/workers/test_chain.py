"""The allowance: how a worker learns how much fits into its device's memory, and forgets it again."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from daemon.core.messages import Batch, Item, Setup
from daemon.workers import chain as module
from daemon.workers.chain import REGROW_CALLS, Allowance, Chain, InFlight
from stages.contract.base import Header, Image, Limits, OutOfMemory, Reason, StageSpec
from stages.images import images
from stages.images.images import inspect
from stages.ocr.descriptor import Ocr
from stages.registry import registry
from stages.registry.fake import FakeStage, answer
from tests.daemon_process import picture


def open_chain(count: int, oom_above: int) -> tuple[Chain, Batch]:
    """A fake stage that has memory for `oom_above` marked images, and a batch of `count` such images."""
    options = {"fail": {"MEMORY": "oom"}, "oom_above": oom_above}
    spec = StageSpec("ocr", "fake", batch_size=count, options=options)
    setup = Setup("w", "cpu", [spec], 0, 1, 1, Limits(), None, ["ocr"])
    data = picture(1, b"MEMORY")
    chain = Chain(setup, memoryview(data))
    chain.load()
    return chain, Batch(0, [Item(0, len(data), {})] * count)


def test_all_stages_are_imported_before_the_first_one_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading may wait for kernels, and imports take seconds: a fifth more if they are searched for garbage."""
    order: list[str] = []

    class Stage(FakeStage):
        def load(self) -> None:
            order.append("load")
            assert gc.isenabled()

    def build(spec: StageSpec, device: str) -> Stage:
        order.append("import")
        assert not gc.isenabled()
        return Stage(spec, device)

    monkeypatch.setattr(registry, "build", build)
    specs = [StageSpec(name, "fake") for name in ("ocr", "yolo")]
    seconds = Chain(
        Setup("w", "cpu", specs, 0, 1, 1, Limits(), None, ["ocr", "yolo"]), memoryview(b"")
    ).load()
    assert order == ["import", "import", "load", "load"]
    assert list(seconds) == ["ocr", "yolo"]


@pytest.mark.parametrize(
    ("device", "rehearse", "opens"), [("cuda:0", True, True), ("cuda:0", False, False), ("cpu", True, False)]
)
def test_a_gpus_decoder_is_opened_while_the_models_load(
    monkeypatch: pytest.MonkeyPatch, device: str, rehearse: bool, opens: bool
) -> None:
    opened: list[str] = []
    is_open = threading.Event()

    class Stage(FakeStage):
        def load(self) -> None:
            assert not opens or is_open.wait(10), "the first model waits for the decoder"

    def open_decoder(page: bytes, device: str) -> None:
        assert inspect(memoryview(page), Limits()).format == "JPEG"
        opened.append(device)
        is_open.set()

    monkeypatch.setattr(registry, "build", Stage)
    monkeypatch.setattr(images, "open_jpeg_decoder", open_decoder)
    specs = [StageSpec("ocr", "fake", options={"reads_pixels": True})]
    setup = Setup("w", device, specs, 0, 1, 1, Limits(), None, ["ocr"], rehearse=rehearse)
    Chain(setup, memoryview(b"")).load()
    assert opened == [device] * opens


def group_sizes(*formats: str, side: int = 10_000, most: int = 100) -> list[int]:
    entries = [module.InFlight(Header(name, side, side, 1)) for name in formats]
    setup = Setup("w", "cpu", [], 0, 1, 1, Limits(), None, group_pixels=5 * 10**8)
    return [len(group) for group in module._groups(entries, most, setup)]


def test_what_a_gpu_decodes_is_in_larger_groups_than_what_needs_the_hosts_memory() -> None:
    assert group_sizes(*["JPEG"] * 12) == [5, 5, 2]
    assert group_sizes(*["PNG"] * 5) == [2, 2, 1]
    assert group_sizes("PNG", "JPEG", "PNG", "JPEG", "PNG", "JPEG") == [4, 2]


def test_a_batch_is_split_where_a_gpu_has_to_fill_up_no_group() -> None:
    assert group_sizes(*["JPEG"] * 128, side=4_000) == [16] * 8  # 31 would fit
    assert group_sizes(*["JPEG"] * 128, side=3_500) == [32] * 4  # 40
    assert group_sizes(*["JPEG"] * 128, side=2_200) == [96, 32]  # 103
    assert group_sizes(*["JPEG"] * 40, side=3_500) == [40]
    assert group_sizes(*["JPEG"] * 60, side=1_000, most=25) == [16, 16, 16, 12]
    assert group_sizes(*["JPEG"] * 30, side=6_000) == [
        13,
        13,
        4,
    ]  # a small one takes a GPU as long as a full one


def test_a_batch_size_that_did_not_fit_is_not_tried_again() -> None:
    chain, batch = open_chain(8, oom_above=2)
    first, second = chain.run(batch), chain.run(batch)
    assert [outcome.reason for outcome in first.outcomes + second.outcomes] == [""] * 16
    assert first.out_of_memory > 0
    assert second.out_of_memory == 0


def test_more_is_tried_again_after_a_while() -> None:
    allowance = Allowance()
    assert allowance.most == sys.maxsize
    allowance.shrink(64)
    for _ in range(REGROW_CALLS):
        assert allowance.most == 32
        allowance.note_fit(5)  # a small batch says nothing about a large one
        allowance.note_fit(32)
    assert allowance.most == 64


def test_when_the_pixels_of_a_batch_do_not_fit_later_batches_are_smaller() -> None:
    chain, batch = open_chain(8, oom_above=8)
    seen: list[InFlight] = []

    def decode(entries: Sequence[InFlight]) -> list[str]:
        held = [entry for entry in seen if entry.image]
        if len(held) + len(entries) > 4:
            raise OutOfMemory
        seen.extend(entries)
        return ["pixels"] * len(entries)

    chain._decode = decode
    first, second = chain.run(batch), chain.run(batch)
    assert [outcome.reason for outcome in first.outcomes + second.outcomes] == [""] * 16
    assert first.out_of_memory > 0
    assert second.out_of_memory == 0


@pytest.mark.parametrize("where", ["a stage", "the decoder"])
def test_what_a_call_without_memory_held_is_free_before_its_half_is_tried(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, batch = open_chain(2, oom_above=2)
    held: list[weakref.ref[Allowance]] = []

    def call(items: Sequence[InFlight]) -> list[str]:
        if not held:
            tensor, error = Allowance(), OutOfMemory()  # any object
            held.append(weakref.ref(tensor))
            raise error  # which this frame holds, and which holds this frame
        assert not held[0]()
        return ["pixels"] * len(items)

    if where == "the decoder":
        chain._decode = call
    else:
        run = chain.stages[0].run
        monkeypatch.setattr(chain.stages[0], "run", lambda images: call(images) and run(images))
    gc.disable()
    try:
        reply = chain.run(batch)
    finally:
        gc.enable()
    assert reply.out_of_memory == 1
    assert [outcome.reason for outcome in reply.outcomes] == ["", ""]


def test_no_more_pixels_are_decoded_at_once_than_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, batch = open_chain(8, oom_above=8)
    groups: list[int] = []

    def decode(entries: Sequence[InFlight]) -> list[str]:
        groups.append(len(entries))
        return ["pixels"] * len(entries)

    chain._decode = decode
    sizes = itertools.cycle([(10_000, 10_000)] * 3 + [(30_000, 10_000)] + [(10_000, 10_000)] * 4)

    def inspect(*_: object) -> Header:
        return Header("PPM", *next(sizes), 1)

    monkeypatch.setattr(module, "inspect", inspect)
    assert [outcome.reason for outcome in chain.run(batch).outcomes] == [""] * 8
    assert groups == [2, 1, 1, 2, 2]  # 200 million, or a single larger one


def test_one_image_that_never_fits_fails_alone_and_is_tried_again_later() -> None:
    chain, batch = open_chain(2, oom_above=0)
    assert [(outcome.reason, outcome.transient) for outcome in chain.run(batch).outcomes] == [
        ("memory", True)
    ] * 2


def test_a_defect_in_a_reader_of_headers_costs_that_image_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, batch = open_chain(2, oom_above=2)
    answers = iter([Header("PPM", 1, 1, 1)])

    def inspect(*_: object) -> Header:
        return next(answers)  # and then StopIteration

    monkeypatch.setattr(module, "inspect", inspect)
    assert [outcome.reason for outcome in chain.run(batch).outcomes] == ["", "header"]


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda images: [], "ocr: ValueError: 0 answers for 1 images"),
        (
            lambda images: [Ocr([], cast(int, np.float32(0)), 0.0)] * len(images),
            "ocr returned a result that cannot be stored: ",
        ),
        (
            lambda images: [Ocr([], 0, math.nan)] * len(images),
            "ocr returned a result that cannot be stored: Expected `float`, got `null` - at `$.area_ratio`. A value is NaN",
        ),
    ],
)
def test_a_stage_that_answers_wrongly_is_named_and_the_worker_lives(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[Sequence[Image]], list[Ocr]], told: str
) -> None:
    chain, batch = open_chain(3, oom_above=3)
    monkeypatch.setattr(chain.stages[0], "run", run)
    for outcome in chain.run(batch).outcomes:
        assert outcome.reason == Reason.STAGE
        assert outcome.detail.startswith(told)


@pytest.mark.parametrize(
    ("dtype", "value", "advice"),
    [
        (
            "float16",
            math.inf,
            ', or too large for float16. Set dtype = "float32" under [stages.ocr], or take',
        ),
        ("float32", math.nan, ". Copy them again, or take another model"),
        ("float16", None, ""),
    ],
)
def test_a_value_that_is_not_a_number_is_explained_and_a_missing_one_is_not(
    monkeypatch: pytest.MonkeyPatch, dtype: str, value: Any, advice: str
) -> None:
    chain, batch = open_chain(1, oom_above=1)
    stage = chain.stages[0]
    monkeypatch.setattr(stage, "spec", msgspec.structs.replace(stage.spec, dtype=dtype))
    monkeypatch.setattr(stage, "run", lambda images: [Ocr([], 0, value)] * len(images))
    [outcome] = chain.run(batch).outcomes
    assert "got `null` - at `$.area_ratio`" in outcome.detail
    assert ("the model's weights are damaged" in outcome.detail) == bool(advice)
    assert advice in outcome.detail


def test_an_earlier_result_of_another_type_is_treated_as_missing() -> None:
    spec = StageSpec("blip", "fake")
    data = picture(1)
    chain = Chain(Setup("w", "cpu", [spec], 0, 1, 1, Limits(), None, ["clip", "blip"]), memoryview(data))
    chain.load()
    known = [b'{"embedding": 1}', msgspec.json.encode(answer("clip", 1, 8, 8, frozenset()))]
    reply = chain.run(Batch(0, [Item(0, len(data), {"clip": payload}) for payload in known]))
    likeness = [
        msgspec.json.decode(outcome.outputs["blip"].payload)["similarity"] for outcome in reply.outcomes
    ]
    assert likeness[0] is None
    assert likeness[1] is not None
