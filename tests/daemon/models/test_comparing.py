"""`visiond compare` as a user types it, with fake stages whose answers an option changes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.config.loading import load
from daemon.config.state import lock_state
from daemon.core.errors import NotAnswering, NoWorkersLeft
from daemon.core.labels import Kind, ObjectLabel
from daemon.core.messages import Output
from daemon.exports import choice
from daemon.exports.choice import draw, find_records
from daemon.labels.store import LabelStore
from daemon.ledger import statements
from daemon.ledger.record import Model, Record
from daemon.ledger.records import Reader, open_reader
from daemon.maintenance import keeping
from daemon.maintenance.keeping import GROUP, AnswerKeeper, ModelAnswers
from daemon.models import comparing, sampling
from daemon.models.changes import AnswerChange, estimate_share, measure_change
from daemon.models.comparing import ModelComparison, Pair, count_left
from daemon.models.sampling import SampleRun, count_joules, run_stage
from daemon.models.verdict import Prices, describe, say_what_next
from daemon.server import control
from daemon.server.answers import ANSWERS_BYTES
from daemon.system.gpus import Gpu, Sensors
from daemon.workers import pool
from tests.daemon_process import PATIENCE, Daemon, Place, picture, wait_for
from tests.forked import TOKEN, Forked
from tests.makers import admit, complete, done, make_record
from visiond.engine import Annotator

IMAGES = 40


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A folder with images that are DONE."""
    place = Place(tmp_path, {"http": {"listen": "127.0.0.1:0"}})
    place.drop_many(range(IMAGES))
    assert place.run_once().returncode == 0
    return place


def compare(place: Place, *arguments: str, stage: str = "yolo", salt: int = 1) -> dict[str, Any]:
    told = place.command("compare", "--stage", stage, "--set", f"options.salt={salt}", "--json", *arguments)
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def start_compare(place: Place) -> Forked:
    """Of YOLO, with salt 2. What it prints is in the file `told`."""
    command = ["compare", "--stage", "yolo", "--set", "options.salt=2", "--json"]
    environment = os.environ | {TOKEN: place.token, "VISIOND_CONFIG": str(place.config)}
    with (place.folder / "told").open("wb") as told, (place.folder / "errors").open("wb") as errors:
        return Forked(command, place.folder, environment, told, errors)


def redo_with_the_new_settings(place: Place, stage: str, images: int) -> float:
    """Of how many images the stage runs."""
    place.configure({"stages": {stage: {"options": {"salt": 1}}}})
    assert place.command("redo", "--stale").returncode == 0
    with Daemon(place) as daemon:
        daemon.wait_idle(images)
        return daemon.metric("visiond_stage_images_total", stage=stage)


@pytest.mark.parametrize("stage", ["yolo", "blip"])
def test_a_redo_computes_only_the_images_that_were_not_compared(place: Place, stage: str) -> None:
    found = compare(place, "--sample", "15", stage=stage)
    assert (found["compared"], found["kept"]) == (15, 15)
    assert redo_with_the_new_settings(place, stage, IMAGES) == IMAGES - 15
    assert place.rows("SELECT status, COUNT(*) FROM image GROUP BY status") == [(1, IMAGES)]
    documents = [json.loads(path.read_bytes()) for path in place.site.results.iterdir()]
    assert all(each["caption"]["similarity"] is not None for each in documents)  # clip's answers were there
    assert place.command("verify").returncode == 0


def test_beside_a_running_daemon_the_same_and_it_goes_on_with_the_answers_that_it_has(place: Place) -> None:
    with Daemon(place) as daemon:
        daemon.wait_ready()
        found = compare(place, "--sample", "15")
        assert found["kept"] == 15
        compared = Path(found["most_changed"][0]["location"])
        place.drop("copy.ppm", compared.read_bytes())
        daemon.wait_idle(1)
        assert not [*daemon.events("result damaged in the ledger; its model runs again")]
        assert daemon.metric("visiond_stage_images_total", stage="yolo") == 0
        kept = found["kept"] + compare(place, "--sample", "20", "--seed", "1")["kept"]
    assert redo_with_the_new_settings(place, "yolo", IMAGES + 1) == IMAGES - kept


def test_an_answer_that_nobody_could_read_is_refused(place: Place) -> None:
    output = Output(b"no JSON", 0.1)
    digest = place.rows("SELECT digest FROM image")[0][0]
    group = ModelAnswers(Model("yolo", "sha256:0", ""), [(digest, output)])
    with Daemon(place) as daemon:
        daemon.wait_ready()
        with pytest.raises(NotAnswering, match="an answer of yolo cannot be kept"):
            control.keep_answers(load(place.config), group)
    assert place.rows("SELECT 1 FROM model WHERE fingerprint = 'sha256:0'") == []


@pytest.mark.parametrize(
    "pipeline",
    [
        {"mode": "cascade"},
        {"segment": [{"stages": each, "devices": ["cpu"]} for each in (["ocr", "yolo"], ["clip", "blip"])]},
    ],
)
def test_a_cascade_and_a_placement_by_hand_change_nothing_about_the_answers(
    place: Place, pipeline: dict[str, Any]
) -> None:
    place.configure({"pipeline": pipeline})
    assert compare(place)["kept"] == IMAGES
    assert redo_with_the_new_settings(place, "yolo", IMAGES) == 0


def test_what_was_found_is_printed_also_if_the_answers_cannot_be_kept(place: Place) -> None:
    with lock_state(place.folder / "state"):  # as by a daemon that starts, and does not answer yet
        told = place.command("compare", "--stage", "yolo", "--set", "options.salt=1", "--json")
    assert told.returncode == os.EX_TEMPFAIL
    assert json.loads(told.stdout)["compared"] == IMAGES
    assert json.loads(told.stdout)["kept"] == 0


def test_until_a_redo_every_image_keeps_its_result(place: Place) -> None:
    before = {path.name: path.read_bytes() for path in place.site.results.iterdir()}
    results = place.rows("SELECT models FROM image ORDER BY id")
    compare(place)
    assert {path.name: path.read_bytes() for path in place.site.results.iterdir()} == before
    assert place.rows("SELECT models FROM image ORDER BY id") == results
    assert place.command("verify").returncode == 0


def test_answers_that_a_stage_gave_with_other_answers_beside_it_are_not_kept(place: Place) -> None:
    """A redo would run clip first, whose answers blip uses."""
    place.configure({"stages": {"clip": {"options": {"salt": 1}}}})
    found = compare(place, stage="blip")
    assert (found["compared"], found["kept"]) == (IMAGES, 0)
    assert found["other_stages"] == {"clip": IMAGES}


def test_the_answers_are_those_that_a_redo_gives(place: Place) -> None:
    found = compare(place)
    before = {path.name: json.loads(path.read_bytes()) for path in place.site.results.iterdir()}
    place.configure({"stages": {"yolo": {"options": {"salt": 1}}}})
    assert place.command("redo", "--stale").returncode == 0
    assert place.run_once().returncode == 0
    after = {path.name: json.loads(path.read_bytes()) for path in place.site.results.iterdir()}
    moved = {
        (before[name]["id"], before[name]["bin"]["name"], after[name]["bin"]["name"])
        for name in after
        if before[name]["bin"]["name"] != after[name]["bin"]["name"]
    }
    assert {after[name]["models"]["yolo"] for name in after} == {found["fingerprint"]}
    assert {
        (each["id"], *each["bins"]) for each in found["most_changed"] if len({*each["bins"]}) > 1
    } == moved
    assert found["shares"]["other_bin"]["value"] == pytest.approx(len(moved) / IMAGES)
    labels = [
        [[each["label"] for each in document[name]["objects"]["detections"]] for name in sorted(after)]
        for document in (before, after)
    ]
    assert (
        found["shares"]["changed"]["value"] >= sum(a != b for a, b in zip(*labels, strict=True)) / IMAGES > 0
    )


def test_a_sample_has_the_shares_of_its_images_and_an_interval_and_the_whole_ledger_has_none(
    place: Place,
) -> None:
    sampled, whole = compare(place, "--sample", "25"), compare(place)
    drawn = {each["id"] for each in sampled["most_changed"]}
    other = [each["is_other"] for each in whole["most_changed"] if each["id"] in drawn]
    expected = estimate_share(sum(other), 25, sampled["images"])
    assert len(other) == 25
    assert sampled["shares"]["changed"] == pytest.approx(expected._asdict(), abs=1e-6)
    assert sampled["shares"]["changed"]["low"] < sampled["shares"]["changed"]["high"]
    assert all(share["low"] == share["value"] == share["high"] for share in whole["shares"].values())


def test_images_without_an_answer_of_the_stage_are_no_part_of_what_is_estimated(place: Place) -> None:
    place.drop_many(range(IMAGES, 2 * IMAGES))
    place.configure({"pipeline": {"stages": ["ocr"]}})
    assert place.run_once().returncode == 0
    place.configure({"pipeline": {"stages": ["ocr", "yolo", "clip", "blip"]}})
    assert compare(place)["images"] == compare(place)["compared"] == IMAGES
    about = compare(place, "--sample", "30")
    assert about["compared"] == 30
    assert about["images"] == pytest.approx(IMAGES, rel=0.25)


def test_a_file_that_is_gone_or_was_changed_is_left_out_and_named(place: Place) -> None:
    (place.inbox() / "00003.ppm").unlink()
    (place.inbox() / "00004.ppm").write_bytes(picture(4, b"more"))
    found = compare(place)
    assert (found["compared"], found["images"]) == (IMAGES - 2, IMAGES)
    assert found["left_out"] == {"No such file or directory": 1, "the file has changed since": 1}


def test_labels_of_people_say_which_answers_are_nearer(place: Place) -> None:
    rows = place.rows("SELECT id, digest FROM image ORDER BY id")
    new = {each["id"]: each for each in compare(place)["most_changed"]}
    changed = [(image, digest) for image, digest in rows if new[image]["change"] == 1.0][:3]
    documents = {
        json.loads(path.read_bytes())["id"]: json.loads(path.read_bytes())
        for path in place.site.results.iterdir()
    }
    stored = {
        digest: [
            ObjectLabel(each["label"], tuple(each["box"]))
            for each in documents[image]["objects"]["detections"]
        ]
        for image, digest in changed
    }
    LabelStore(place.folder / "state").keep(
        [(digest, Kind.OBJECTS, boxes, "file") for digest, boxes in stored.items()]
    )
    found = compare(place)
    assert (found["labelled"], found["nearer_to_labels"], found["farther_from_labels"]) == (3, 0, 3)


def test_the_cost_of_a_redo_follows_from_the_rate_and_the_prices(place: Place) -> None:
    cost = compare(place, "--sample", "15", "--price-per-hour", "3", "--price-per-kwh", "2")["cost"]
    assert cost["hours"] == pytest.approx((IMAGES - 15) / cost["images_per_second"] / 3600)
    assert cost["price"] == pytest.approx(3 * cost["hours"])
    assert cost["kwh"] is None  # of a CPU nobody knows it


def test_the_cost_counts_equal_bytes_once_and_no_answer_that_was_kept(place: Place) -> None:
    for number in range(5):
        place.drop(f"copy-{number}.ppm", picture(number))
    assert place.run_once().returncode == 0
    found = compare(place, "--sample", "10")
    left = IMAGES - found["kept"]
    assert (found["images"], found["cost"]["images"]) == (IMAGES + 5, left)
    again = compare(place, "--sample", "10", "--seed", "1")
    assert again["cost"]["images"] == left - again["kept"]


def test_what_a_redo_computes_is_estimated_in_a_large_ledger(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = compare(place, "--sample", "20")["kept"]
    config = load(place.config)
    with open_reader(config) as reader:
        current = reader.current_models()
        [model] = [m for n, m in reader.models.items() if m.stage == "yolo" and n not in current]
        assert count_left(config, reader, model, IMAGES) == IMAGES - kept
        monkeypatch.setattr(comparing, "MOST_COUNTED", 20)
        estimate = count_left(config, reader, model, IMAGES)
        monkeypatch.setattr(comparing, "MOST_COUNTED", IMAGES)
        assert count_left(config, reader, model, 7) == 7  # no more than there are images with an answer
    assert estimate % 2 == 0  # twice what 20 of 40 contents are
    assert abs(estimate - (IMAGES - kept)) <= 12


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_was_computed_before_a_signal_is_kept_and_the_same_command_goes_on(
    place: Place, signum: signal.Signals
) -> None:
    device = place.folder / "device"
    slow = {"device_file": str(device), "latency_per_image_seconds": 0.05, "switch_seconds": 0.001}
    place.configure({"stages": {"yolo": {"batch_size": 1, "options": slow}}})
    before = place.rows("SELECT COUNT(*) FROM result")
    with start_compare(place) as process:
        # Whether it has content: a worker makes it before it locks it, and the test could be first.
        wait_for(lambda: device.exists() and device.read_bytes(), "the first image", process=process)
        with device.open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # no other image gets the device
            new = "SELECT COUNT(*) FROM result"
            wait_for(lambda: place.rows(new) != before, "an answer in the ledger", process=process)
            process.send_signal(signum)
        assert process.wait(PATIENCE) == 128 + signum
    found = json.loads((place.folder / "told").read_bytes())
    assert 0 < found["kept"] == found["compared"] < IMAGES
    assert found["left_out"] == {"the comparison was stopped first": IMAGES - found["kept"]}
    assert place.orphans() == []
    again = compare(place, salt=2)
    assert (again["compared"], again["kept"]) == (IMAGES, IMAGES - found["kept"])


def test_what_was_computed_before_a_kill_is_kept_and_the_same_command_goes_on(place: Place) -> None:
    place.configure({"stages": {"yolo": {"batch_size": 1, "options": {"latency_per_image_seconds": 0.2}}}})

    def count() -> int:
        return int(place.rows("SELECT COUNT(*) FROM result")[0][0])

    before = count()
    with start_compare(place) as process:
        wait_for(lambda: count() > before, "the first answers in the ledger", process=process)
        process.kill()
    kept = count() - before
    assert 0 < kept < IMAGES
    assert place.orphans() == []
    found = compare(place, salt=2)
    assert (found["compared"], found["kept"]) == (IMAGES, IMAGES - kept)
    assert count() - before == IMAGES
    assert place.command("verify").returncode == 0


def test_answers_that_could_not_be_kept_are_tried_again_with_the_next_ones() -> None:
    """As while a daemon starts. Those that were kept before the error are not sent again."""
    kept, model = list[bytes](), Model("yolo", "sha256:0", "")

    def keep(group: ModelAnswers) -> int:
        if is_starting and kept:
            raise NotAnswering("The daemon is starting.")
        kept.extend(digest for digest, _ in group.answers)
        return len(group.answers)

    keeper, is_starting = AnswerKeeper(model, keep), True
    digests = [b"%d" % number for number in range(GROUP + 10)]
    for digest in digests:
        keeper.add(digest, Output(b"{}", 0.1))
    keeper.flush()
    assert (keeper.kept, str(keeper.trouble)) == (GROUP, "The daemon is starting.")
    is_starting = False
    keeper.add(b"last", Output(b"{}", 0.1))
    keeper.flush()
    assert (kept, keeper.kept, keeper.trouble) == ([*digests, b"last"], GROUP + 11, None)


def test_answers_are_kept_while_the_next_ones_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "KEEP_SECONDS", 0.01)
    with AnswerKeeper(Model("yolo", "sha256:0", ""), lambda group: len(group.answers)) as keeper:
        for number in range(3):
            keeper.add(b"%d" % number, Output(b"{}", 0.1))
        wait_for(lambda: keeper.kept == 3, "all three to be kept")


def test_what_was_computed_before_the_workers_failed_is_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BACKOFF_SECONDS": 0.001, "LONE_DEATHS": 2}.items():
        monkeypatch.setattr(pool, name, value)
    for number in range(IMAGES, IMAGES + 4):
        place.drop(f"{number}.ppm", picture(number, b"deadly"))
    assert place.run_once().returncode == 0
    options = {"salt": 1, "fail": {"deadly": "exit"}}
    place.configure({"stages": {"yolo": {"batch_size": 1, "options": options}}})
    settings, kept = load(place.config), list[int]()

    def keep(group: ModelAnswers) -> int:
        kept.append(control.keep_answers(settings, group))
        return kept[-1]

    with open_reader(settings) as reader, pytest.raises(NoWorkersLeft):
        run_stage(settings, "yolo", [*find_records(reader, range(1, IMAGES + 5))], reader, print, print, keep)
    assert 0 < sum(kept) <= IMAGES


def test_a_stop_does_not_wait_for_a_mount_that_hangs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def read_source(_record: Record) -> bytes:
        signal.raise_signal(signal.SIGINT)  # its handler runs in the main thread, which waits
        answers.wait()
        raise FileNotFoundError

    monkeypatch.setattr(sampling, "_read_source", read_source)
    place.configure({"stages": {"yolo": {"options": {"salt": 1}}}})
    settings = load(place.config)
    with open_reader(settings) as reader:
        [record] = find_records(reader, [1])
        run = run_stage(settings, "yolo", [record], reader, print, print, lambda group: len(group.answers))
    answers.set()
    assert (run.stop, run.failures.total()) == (signal.SIGINT, 1)


def test_a_sample_stays_when_images_arrive(place: Place) -> None:
    first = {each["id"] for each in compare(place, "--sample", "15")["most_changed"]}
    place.drop_many(range(IMAGES, IMAGES + 4))
    assert place.run_once().returncode == 0
    assert len(first - {each["id"] for each in compare(place, "--sample", "15")["most_changed"]}) <= 4


def test_people_are_told_what_would_change_and_what_to_type(place: Place) -> None:
    asked = ("--stage", "yolo", "--set", "options.salt=1", "--sample", "15", "--price-per-kwh", "0.3")
    told = place.command("compare", *asked)
    assert told.returncode == 0, told.stderr
    assert re.search(
        r"Another answer: [\d.]+% \([\d.]+% to [\d.]+%, 95 of 100 times\) of the images\.", told.stdout
    )
    assert "energy and its price not known" in told.stdout
    assert "write `options.salt = 1` under [stages.yolo] in daemon.toml" in told.stdout
    assert "redo --stale`" in told.stdout
    assert "15 new answers kept" in told.stdout


def test_a_page_shows_both_answers_and_refers_to_nothing_outside(place: Place) -> None:
    file = place.folder / "both.html"
    place.drop("<script>alert(1)<.ppm", picture(77))
    assert place.run_once().returncode == 0
    found = compare(place, "--page", str(file))
    changed = sum(each["change"] > 0 for each in found["most_changed"])
    page = file.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == 2 * changed > IMAGES
    assert all(each.startswith("data:image/webp;base64,") for each in sources)
    assert "<script" not in page
    assert "url(" not in page
    assert [page.count(f"<figcaption>{name}</figcaption>") for name in ("stored", "new")] == [changed] * 2
    again = place.command("compare", "--stage", "yolo", "--set", "options.salt=1", "--page", file)
    assert "already exists" in again.stderr
    compare(place, "--page", str(file), "--force")


def test_a_page_that_could_not_be_written_is_refused_before_anything_is_computed(place: Place) -> None:
    photograph = place.folder / "photograph.ppm"
    photograph.write_bytes(picture(0))
    same = ("--stage", "yolo", "--set", "backend=fake")  # refused too, but after the models were loaded
    told = place.command("compare", *same, "--page", photograph, "--force")
    assert told.returncode == os.EX_CANTCREAT
    assert "is no file of this command" in told.stderr


def test_a_page_that_cannot_be_written_in_the_end_costs_no_answer(place: Place) -> None:
    page = place.folder / "both.html"
    (place.folder / ".both.html.partial").mkdir()
    told = place.command("compare", "--stage", "yolo", "--set", "options.salt=1", "--json", "--page", page)
    assert told.returncode == os.EX_CANTCREAT
    assert json.loads(told.stdout)["kept"] == IMAGES


def test_what_cannot_be_compared_is_refused_with_a_sentence(place: Place) -> None:
    for arguments, sentence in (
        (["--stage", "yolo"], "Name what is new: --model MODEL, or --set KEY=VALUE."),
        (["--stage", "yolo", "--set", "dtype"], "--set dtype has no value"),
        (["--stage", "yolo", "--set", "backend=fake"], "are of this model and these settings already"),
        (
            ["--stage", "yolo", "--set", "dtyp=float32"],
            "there is no key stages.yolo.dtyp; did you mean dtype?",
        ),
        (["--stage", "classifier", "--set", "backend=fake"], "classifier is not among the stages"),
        (["--stage", "nope", "--set", "backend=fake"], "nope is not among the stages of [pipeline]: ocr,"),
        (
            ["--stage", "yolo", "--model", "./nothing", "--set", "backend=transformers"],
            "visiond: stages.yolo.model: there is no folder",
        ),
    ):
        told = place.command("compare", *arguments)
        assert told.returncode != 0
        assert sentence in told.stderr


@pytest.mark.anyio
async def test_a_sample_reads_only_the_rows_that_are_drawn_and_its_interval_holds_in_93_of_100_trials(
    tmp_path: Path, ledger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await admit(ledger, *(b"%d.jpg" % number for number in range(3000)))
    await complete(ledger, *(done(job, data=b"%d" % job.id) for job in jobs))
    looked_up: list[int] = []

    def run_rows(connection: Any, name: str, rows: Any, *before: Any) -> Any:
        looked_up.extend(number for (number,) in rows)
        return statements.run_rows(connection, name, rows, *before)

    monkeypatch.setattr(choice, "run_rows", run_rows)
    with contextlib.closing(Reader(ledger.path)) as reader:
        numbers = draw(reader, seed=3)
        drawn = [next(numbers) for _ in range(100)]
        assert len(looked_up) <= 256
        assert sorted(number for number, _ in [*drawn, *numbers]) == list(range(1, 3001))
        held = [is_held(reader, seed) for seed in range(100)]
    assert sum(held) >= 93


def is_held(reader: Reader, seed: int) -> bool:
    """Whether the interval of a sample holds the share of those images whose number can be divided by 5."""
    numbers = [number for number, _ in itertools.islice(draw(reader, seed), 200)]
    _, low, high = estimate_share(sum(number % 5 == 0 for number in numbers), 200, 3000)
    return low <= 0.2 <= high


def make_gpu(index: int, joules: float | None) -> Gpu:
    return Gpu(index, f"GPU-{index}", "H200", 1, 1, 0, "9.0", None, (), sensors=Sensors(joules=joules))


@pytest.mark.parametrize(
    ("devices", "joules"),
    [
        (["cuda:0", "cuda:0"], 5.0),  # two workers of one GPU
        (["cuda:0+cuda:1"], 12.0),
        (["cuda:2"], None),
        (["cuda:0", "cuda:2"], None),
        (["cpu"], None),
    ],
)
def test_energy_is_that_of_the_gpus_that_were_used_if_all_of_them_say_it(
    devices: list[str], joules: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [make_gpu(0, 5.0), make_gpu(1, 7.0), make_gpu(2, None)]
    monkeypatch.setattr(sampling, "list_gpus", lambda: gpus)
    assert count_joules(devices) == joules


def test_energy_of_all_images_follows_from_that_of_those_that_were_computed() -> None:
    model = Model("yolo", "sha256:0", "")
    run = SampleRun({"yolo": model}, ["cuda:0"], {}, Counter(), 20, 0, 4.0, 3.6e6)
    cost = ModelComparison("yolo", 3000, [], Counter(), Counter(), [], 1000, run).cost()
    assert cost == pytest.approx((1000, 5.0, 1000 / 5 / 3600, 50.0))


def test_answers_are_kept_in_requests_that_a_daemon_takes_without_a_pause() -> None:
    """Those of OCR may have 100 KB each."""
    model = Model("ocr", "sha256:0", "")
    outputs = {number: Output(b"%d" % number + b" " * 100_000, 0.1) for number in range(1, 2001)}
    groups = list[ModelAnswers]()

    def keep(group: ModelAnswers) -> int:
        groups.append(group)
        return len(group.answers)

    keeper = AnswerKeeper(model, keep)
    for number, output in outputs.items():
        keeper.add(b"%d" % number, output)
    keeper.flush()
    assert keeper.kept == len(outputs)
    sizes = [len(msgspec.json.encode([group])) for group in groups]
    assert max(sizes) < 8 << 20 < ANSWERS_BYTES < sum(sizes)
    assert [output for group in groups for _, output in group.answers] == [*outputs.values()]


def test_the_rate_of_a_comparison_counts_from_when_the_model_is_loaded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[object]()
    wait = Annotator.load

    def load_model(annotator: Annotator) -> None:
        wait(annotator)
        steps.append("loaded")

    def keep(group: ModelAnswers) -> int:
        return len(group.answers)

    monkeypatch.setattr(Annotator, "load", load_model)
    place.configure({"stages": {"yolo": {"options": {"salt": 2}}}})
    settings = load(place.config)
    with open_reader(settings) as reader:
        records = [*find_records(reader, range(1, 3))]
        run_stage(settings, "yolo", records, reader, lambda *begun: steps.append(begun), steps.append, keep)
    assert steps == ["loaded", ("images", 2), 1, 2]


@pytest.mark.parametrize(("amount", "is_said"), [(0.0, True), (0.4, False)])
def test_that_nothing_would_change_is_said_only_if_scores_stay_too(
    amount: float, is_said: bool, tmp_path: Path
) -> None:
    pair = Pair(make_record(tmp_path), b"", b"", AnswerChange(amount, False), ("A", "A"))
    run = SampleRun({"clip": Model("clip", "sha256:0", "")}, ["cpu"], {}, Counter(), 1, 0, 4.0, None)
    [said] = say_what_next(
        ModelComparison("clip", 1, [pair], Counter(), Counter(), [], 1, run), {"model": "siglip2-base"}
    )
    assert ("Nothing would change" in said) is is_said


def test_a_model_that_finds_nothing_is_said_to_find_nothing(tmp_path: Path) -> None:
    dog = {"label": "dog", "score": 0.9, "box": [0, 0, 10, 10]}
    [some, none] = [msgspec.json.encode({"detections": found}) for found in ([dog], [])]
    answers = [(some, none), (some, none), (none, none), (some, some)]
    pairs = [
        Pair(make_record(tmp_path), *each, measure_change("yolo", (100, 100), *each), ("A", "A"))
        for each in answers
    ]
    run = SampleRun({"yolo": Model("yolo", "sha256:0", "")}, ["cpu"], {}, Counter(), 4, 0, 4.0, None)
    found = ModelComparison("yolo", 4, pairs, Counter(), Counter(), [], 4, run)
    assert found.empty() == (1, 3)
    assert "Nothing is found in 3 images of the sample; it was in 1." in describe(found, Prices(), 0)
