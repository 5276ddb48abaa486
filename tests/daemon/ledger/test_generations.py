"""Jobs of two generations of models at the same time: each result belongs to the model that gave it."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from msgspec import structs

from daemon.core.jobs import Job
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from stages.contract.base import Provenance
from stages.registry.registry import ORDER
from tests.makers import MODELS, admit, complete, content_of, done, make_outputs

NEW = [Model("yolo", "yolo-2", ""), *(model for model in MODELS if model.stage != "yolo")]


async def read_two(ledger: Ledger) -> tuple[Job, Job]:
    """Two jobs with the same bytes, one of each generation."""
    before, after = await admit(ledger, b"a.jpg", b"b.jpg")
    return before, structs.replace(after, generation=await ledger.generations.begin(NEW))


@pytest.mark.anyio
async def test_what_both_models_said_of_the_same_bytes_is_kept_apart(ledger: Ledger) -> None:
    before, after = await read_two(ledger)
    outputs = [make_outputs(3), make_outputs(3) | make_outputs(7, ["yolo"])]
    said = [each["yolo"].payload for each in outputs]
    assert said[0] != said[1]
    jobs = zip((before, after), outputs, strict=True)
    endings = [done(job, data=b"an image", outputs=each) for job, each in jobs]
    written = await complete(ledger, *endings)
    with contextlib.closing(Reader(ledger.path)) as reader:
        stored = [record for name in ("a.jpg", "b.jpg") for record in reader.find(name)]
    for records in (written, stored):
        assert [record.outputs["yolo"].payload for record in records] == said
        made_by = [next(m for m in record.models if m.stage == "yolo").fingerprint for record in records]
        assert made_by == ["yolo-1", "yolo-2"]
        assert not any(record.damage for record in records)


@pytest.mark.anyio
async def test_a_job_gets_no_result_of_another_generations_model(ledger: Ledger) -> None:
    before, after = await read_two(ledger)
    content = content_of(outputs=make_outputs())
    await ledger.keep([(before, content)])
    known = await ledger.recall([(before, content.digest), (after, content.digest)])
    assert known[before.id].outputs.keys() == set(ORDER)
    assert known[after.id].outputs.keys() == set(ORDER) - {"yolo"}


@pytest.mark.anyio
async def test_results_of_earlier_models_are_outdated_from_the_end_of_an_exchange_on(ledger: Ledger) -> None:
    before, _ = await read_two(ledger)
    await complete(ledger, done(before))
    with contextlib.closing(Reader(ledger.path)) as reader:
        inboxes = reader.inboxes().values()
        assert reader.count_outdated(inboxes, every_stage=True).files == 0
        await ledger.generations.make_current(1)
        assert reader.count_outdated(inboxes, every_stage=True).files == 1


@pytest.mark.anyio
async def test_a_check_of_the_ledger_knows_models_that_came_while_it_ran(ledger: Ledger) -> None:
    before, after = await read_two(ledger)
    await complete(ledger, done(before))
    with contextlib.closing(Reader(ledger.path)) as reader:
        reader.models = dict(list(reader.models.items())[: len(MODELS)])
        await complete(ledger, done(after))
        assert list(reader.damaged_rows()) == []


@pytest.mark.anyio
async def test_what_a_model_is_stays_known_when_a_repair_does_not_know_it(ledger: Ledger) -> None:
    """Older sidecars have only the fingerprint."""
    await complete(ledger, done((await admit(ledger, b"a.jpg"))[0]))
    await ledger.generations.begin([replace(model, provenance=Provenance()) for model in MODELS])
    with contextlib.closing(Reader(ledger.path)) as reader:
        [record] = reader.find("a.jpg")
    assert record.provenance() == {model.fingerprint: model.provenance for model in MODELS}


@pytest.mark.anyio
async def test_what_older_sidecars_say_of_a_model_stays_known(ledger: Ledger) -> None:
    newer = [replace(m, provenance=structs.replace(m.provenance, visiond="9.9")) for m in MODELS]
    for models in (newer, MODELS, newer):
        await ledger.generations.begin(models)
    with contextlib.closing(Reader(ledger.path)) as reader:
        known = list(reader.models.values())
    assert [model.provenance for model in known] == [model.provenance for model in newer]
    assert [model.former for model in known] == [(model.provenance,) for model in MODELS]
