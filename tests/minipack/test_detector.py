"""The detector's training resumes at its own checkpoint, whatever other files exist,
and does not restart when it is finished."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from visiond.training.settings import LOG
from visiond_mini import detector, mini
from visiond_mini.cache import CachePlan, write_cache
from visiond_mini.detector import LAST, train_detector
from visiond_mini.job import DetectorJob

pytestmark = pytest.mark.filterwarnings("ignore")  # ultralytics' own


SMALL = mini.Sizes(yolo_size=64, yolo_width=0.0625)


class Killed(BaseException):
    """Like SIGKILL: no cleanup runs."""


@pytest.fixture(autouse=True)
def small_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini, "Sizes", lambda: SMALL)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = CachePlan(
        tmp_path_factory.mktemp("scenes"), seed=3, scenes=12, edge=16, detector_scenes=12, detector_edge=64
    )
    write_cache(plan)
    return plan.detector_folder / "data.yaml"


@pytest.fixture
def job(dataset: Path, tmp_path: Path) -> DetectorJob:
    return DetectorJob(
        folder=str(tmp_path / "own"), dataset=str(dataset), batch_size=8, epochs=2, workers=0, resume=True
    )


def kill_after_an_epoch(job: DetectorJob) -> None:
    class Mortal(detector.DetectorTrainer):
        def save_model(self) -> bool:
            super().save_model()
            raise Killed

    kill(job, Mortal)


def kill_in_the_last_validation(job: DetectorJob) -> None:
    class Mortal(detector.DetectorTrainer):
        def final_eval(self) -> None:
            self.validator.add_callback("on_val_start", die)
            super().final_eval()

    def die(_: object) -> None:
        raise Killed

    kill(job, Mortal)


def kill(job: DetectorJob, mortal: type[detector.DetectorTrainer]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "DetectorTrainer", mortal)
        with pytest.raises(Killed):
            train_detector(job)


def read_steps(job: DetectorJob) -> list[int]:
    return [msgspec.json.decode(line)["step"] for line in (Path(job.folder) / LOG).read_bytes().splitlines()]


def test_a_training_goes_on_with_its_own_checkpoint_wherever_it_is_started(
    job: DetectorJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_after_an_epoch(job)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    another = msgspec.structs.replace(job, folder="another", seed=9)
    kill_after_an_epoch(another)
    before = Path(another.folder, LAST).read_bytes()
    with Path(job.folder, LOG).open("ab") as log:
        log.write(b'{"step":2}\n{"st')  # of an epoch that was not saved, and torn
    train_detector(job)
    assert read_steps(job) == [1, 2]
    assert Path(another.folder, LAST).read_bytes() == before


def test_a_new_training_uses_nothing_of_the_earlier_one(job: DetectorJob) -> None:
    kill_after_an_epoch(job)
    anew = msgspec.structs.replace(job, resume=False, dataset="there is none")
    with pytest.raises(RuntimeError, match="there is none"):
        train_detector(anew)
    assert not Path(job.folder, LAST).exists()


@pytest.mark.parametrize("kill", [kill_after_an_epoch, kill_in_the_last_validation])
def test_a_training_killed_after_its_last_epoch_is_finished(
    job: DetectorJob, kill: Callable[[DetectorJob], None]
) -> None:
    whole = msgspec.structs.replace(job, epochs=1)
    kill(whole)
    assert train_detector(whole) == Path(job.folder, LAST)
    assert read_steps(job) == [1]
