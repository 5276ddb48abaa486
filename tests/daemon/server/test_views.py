"""What the templates show of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader

from daemon.config.sections import PageSection
from daemon.core.hints import quantity
from daemon.core.messages import Output
from daemon.ledger.record import Model
from daemon.monitoring.overview import FILTERS, LastHour
from daemon.monitoring.snapshot import GpuState, Snapshot
from daemon.search.entries import make_entry, mark
from daemon.search.searcher import By, Hit
from daemon.server.page.rendering import coded
from daemon.server.page.views import compare_looks, describe_one, view_of
from stages.classifier.descriptor import Classes
from tests.makers import MODELS, make_outputs, make_record


def test_a_card_names_the_folder_in_the_inbox_as_pages_of_documents_have_equal_names() -> None:
    templates = Environment(loader=PackageLoader("daemon.server.page"), autoescape=True)
    card = templates.get_template("card.html", globals={"url": PageSection().address})
    for path, told in ((b"a.pdf.unpacked/page-0001.png", True), (b"page-0001.png", False)):
        view = view_of(make_record(Path("/srv/inbox"), path))
        assert ("a.pdf.unpacked</bdi>" in card.render(view=view)) == told


def test_what_was_found_by_meaning_says_how_near_it_is_and_how_probable_if_the_model_gives_that() -> None:
    record = make_record(Path("/srv/inbox"), b"a.jpg")
    for probability, why in ((0.00312, " (nearness 0.12, probability 0.312 %)"), (None, " (nearness 0.12)")):
        hit = Hit(1, 1, 0.12, By.meaning, probability)
        assert view_of(record, hit).why == f"is near in meaning{why}"


def test_commands_in_a_sentence_are_code_and_what_looks_like_markup_is_not() -> None:
    assert coded("<b> type `visiond run`; `<i>`.") == (
        "&lt;b&gt; type <code>visiond run</code>; <code>&lt;i&gt;</code>."
    )


def test_a_gpu_has_its_temperature_where_the_driver_reports_it() -> None:
    templates = Environment(loader=PackageLoader("daemon.server.page"), autoescape=True)
    templates.filters |= FILTERS | {"coded": coded}
    names = {"url": PageSection().address, "quantity": quantity}
    gpus = [
        GpuState("cuda:0", "H200", 70 << 30, 140 << 30, 0.5, 61),
        GpuState("cuda:1:0", "MIG", 1 << 30, 10 << 30),
    ]
    snapshot = Snapshot(running=True, pending=0, done=0, failed=0, skipped=0, gone=0, gpus=gpus)
    hour = LastHour.of(snapshot.minutes)
    page = templates.get_template("workers.html", globals=names).render(
        snapshot=snapshot, hour=hour, rooms=[], reasons=[], notices=[]
    )
    assert "H200, 61 °C" in page
    assert "70 GiB of 140 GiB" in page
    assert page.count("°C") == page.count("not reported") == 1


def test_the_labels_of_each_classifier_stand_in_the_order_of_their_scores() -> None:
    scores = {f"label {place}": 0.9 / (1 + place) for place in range(9)}
    output = Output(msgspec.json.encode(Classes("label 0", 0.9, scores)), 0.1)
    models = [*MODELS, Model("classifier_b", "sha256:b", ""), Model("classifier_a", "sha256:a", "")]
    outputs = {**make_outputs(), "classifier_b": output, "classifier_a": output}
    record = make_record(Path("/srv/inbox"), outputs=outputs, models=models)
    best = [*scores.items()][:5]
    assert describe_one(record)["classes"] == [("classifier_a", best), ("classifier_b", best)]
    assert describe_one(make_record(Path("/srv/inbox")))["classes"] == []


def test_a_second_look_of_a_classifier_shows_its_best_labels() -> None:
    document: dict[str, Any] = {
        "classifier_a": {"label": "safe", "score": 0.9, "scores": {"safe": 0.9, "nsfw": 0.1}},
        "second_looks": {
            "sure": {"stage": "classifier_a", "model": "m", "result": {"scores": {"nsfw": 0.875}}}
        },
    }
    [look] = compare_looks(document)
    assert (look.first, look.second) == ("safe 0.9, nsfw 0.1", "nsfw 0.875")


def test_the_label_of_a_classifier_is_found_by_a_search() -> None:
    output = Output(msgspec.json.encode(Classes("not safe", 0.9, {"not safe": 0.9, "safe": 0.1})), 0.1)
    record = make_record(
        Path("/srv/inbox"), outputs={"classifier_a": output}, models=[Model("classifier_a", "sha256:a", "")]
    )
    entry = make_entry(1, record)
    assert entry.fields["tags"].split() == ["not", "safe"]
    assert mark("tag", "not safe") in entry.marks
