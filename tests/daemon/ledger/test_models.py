"""What the ledger knows of models: which are current, and what each of them is."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from daemon.core.errors import NothingFound, WrongArgument
from daemon.ledger.ledger import Ledger
from daemon.ledger.record import Model
from daemon.ledger.records import Reader
from daemon.server.control import describe_model
from stages.contract.base import Provenance
from stages.registry.registry import ORDER
from tests.makers import MODELS, admit, complete, content_of, done, make_outputs

pytestmark = pytest.mark.anyio
NEW = [Model("yolo", "yolo-2", ""), *(model for model in MODELS if model.stage != "yolo")]


async def start_with(ledger: Ledger, models: list[Model]) -> None:
    await ledger.register([(Path("/srv/inbox"), 0)], models)


async def test_the_same_bytes_get_no_result_of_an_earlier_model(ledger: Ledger) -> None:
    [job] = await admit(ledger, b"a.jpg")
    content = content_of(outputs=make_outputs())
    await ledger.keep([content])
    await start_with(ledger, NEW)
    known = await ledger.recall({job.id: content.digest})
    assert known[job.id].outputs.keys() == set(ORDER) - {"yolo"}


async def test_results_of_earlier_models_are_outdated_from_the_next_start_on(ledger: Ledger) -> None:
    await complete(ledger, done((await admit(ledger, b"a.jpg"))[0]))
    with contextlib.closing(Reader(ledger.path)) as reader:
        inboxes = reader.inboxes().values()
        assert reader.count_outdated(inboxes, every_stage=False).files == 0
        await start_with(ledger, NEW)
        assert reader.count_outdated(inboxes, every_stage=False).files == 1


async def test_a_check_of_the_ledger_knows_models_that_came_while_it_ran(ledger: Ledger) -> None:
    before, after = await admit(ledger, b"a.jpg", b"b.jpg")
    await complete(ledger, done(before))
    with contextlib.closing(Reader(ledger.path)) as reader:
        await start_with(ledger, NEW)
        await complete(ledger, done(after))
        assert list(reader.damaged_rows()) == []


async def test_a_fingerprint_is_that_of_a_current_or_a_former_model_or_of_several(ledger: Ledger) -> None:
    def model(digits: str, visiond: str, **known: Any) -> Model:
        provenance = Provenance(name="yolov8n", visiond=visiond, **known)
        return Model("yolo", f"sha256:{digits}", "", provenance)

    others = [each for each in MODELS if each.stage != "yolo"]
    former, latest = "0d8b9a1c00000001", "0d8b9a1cffffffff"
    known = {"repository": "me/yolo", "commit": "abc", "license": "MIT", "dtype": "float16"}
    await start_with(ledger, [model(former, "0.1"), *others])
    await start_with(ledger, [model(former, "0.2", **known), *others])
    await ledger.keep([content_of(outputs=make_outputs())])
    await start_with(ledger, [model(latest, "0.2"), *others])
    with contextlib.closing(Reader(ledger.path)) as reader:
        about = describe_model(reader, "sha256:0D8B9a1c0")
        assert about | known == about
        assert (about["results"], about["is_current"], about["versions"]) == (1, False, ["0.1", "0.2"])
        about = describe_model(reader, f"sha256:{latest}")
        assert (about["results"], about["is_current"], about["versions"]) == (0, True, ["0.2"])
        with pytest.raises(
            WrongArgument, match=f"begin with sha256:0d8b9a1c: .*{former}, .*{latest}. Type more"
        ):
            describe_model(reader, "sha256:0d8b9a1c")
        with pytest.raises(NothingFound):
            describe_model(reader, "sha256:0d8b9a1d")


async def test_what_a_model_is_stays_known_when_a_repair_does_not_know_it(ledger: Ledger) -> None:
    """Older sidecars have only the fingerprint."""
    await complete(ledger, done((await admit(ledger, b"a.jpg"))[0]))
    await start_with(ledger, [replace(model, provenance=Provenance()) for model in MODELS])
    with contextlib.closing(Reader(ledger.path)) as reader:
        [record] = reader.find("a.jpg")
    assert record.provenance() == {model.fingerprint: model.provenance for model in MODELS}


async def test_what_older_sidecars_say_of_a_model_stays_known(ledger: Ledger) -> None:
    newer = [replace(m, provenance=structs.replace(m.provenance, visiond="9.9")) for m in MODELS]
    for models in (newer, MODELS, newer):
        await start_with(ledger, models)
    with contextlib.closing(Reader(ledger.path)) as reader:
        known = list(reader.models.values())
    assert [model.provenance for model in known] == [model.provenance for model in newer]
    assert [model.former for model in known] == [(model.provenance,) for model in MODELS]
