from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.ops import box_iou

from stages.contract.base import DeviceLost, Image, OutOfMemory, StageSpec
from stages.ocr.warp import resize_in_torch, resize_with_cv2
from stages.weights.packs import Pack, resolve
from stages.yolo import letterbox, library
from stages.yolo.descriptor import Objects
from stages.yolo.letterbox import Letterbox, fill_canvases
from stages.yolo.stage import YoloStage
from stages.yolo.weights import read_weights, save_network
from tests.stages.pictures import draw_image, draw_noise
from tests.stages.yolo.detectors import asset, files_in, make_stage, make_sure_of_itself, read_asset

SureWeights = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def sure_weights(tmp_path_factory: pytest.TempPathFactory) -> SureWeights:
    """Weights of an ultralytics architecture that find many objects in one photograph."""

    @functools.cache
    def make(name: str = "yolov8n.yaml", size: int = 320, photo: str = "bus.jpg") -> dict[str, str]:
        folder = tmp_path_factory.mktemp(name)
        config = {"model": name, "nc": 80, "names": [str(index) for index in range(80)], "imgsz": size}
        torch.manual_seed(0)
        model = library.build(config)
        make_sure_of_itself(model, read_asset(photo), size)
        save_network(model.state_dict(), config, folder)
        return files_in(folder)

    return make


@pytest.mark.parametrize(
    ("name", "size", "photo"),
    [
        ("yolov8n.yaml", 320, "bus.jpg"),
        ("yolov8n.yaml", 320, "zidane.jpg"),
        ("yolo11n.yaml", 320, "bus.jpg"),
        ("yolo26n.yaml", 320, "bus.jpg"),
    ],
)
def test_answers_are_those_of_ultralytics(
    sure_weights: SureWeights, name: str, size: int, photo: str
) -> None:
    files = sure_weights(name, size, photo)
    predictor = library.make_predictor(*read_weights(files))
    [found] = predictor.predict(str(asset(photo)), imgsz=size, conf=0.5, verbose=False, device="cpu")
    theirs = found.boxes
    [ours] = make_stage(files, conf=0.5).run([read_asset(photo)])
    assert isinstance(ours, Objects)
    assert ours.count == len(theirs) > 10
    overlaps = box_iou(torch.tensor([found.box for found in ours.detections]), theirs.xyxy)
    labels = torch.tensor([[float(found.label)] for found in ours.detections])
    same, partners = (overlaps * (labels == theirs.cls)).max(dim=1)
    assert same.min() > 0.99
    assert len(set(partners.tolist())) == ours.count
    assert [found.score for found in ours.detections] == pytest.approx(
        theirs.conf[partners].tolist(), abs=1e-4
    )


def test_on_a_cpu_a_stage_is_tried_with_one_image(
    sure_weights: SureWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def count(stage: YoloStage, pixels: list[torch.Tensor], boxes: list[Letterbox]) -> None:
        counts.append(len(pixels))

    monkeypatch.setattr(YoloStage, "_forward", count)
    make_stage(sure_weights(), batch_size=3)
    assert counts == [1]


def test_batch_mates_change_no_answer(sure_weights: SureWeights, mixed_images: list[Image]) -> None:
    bus = read_asset("bus.jpg")
    stage = make_stage(sure_weights(), conf=0.5, batch_size=3)
    [alone] = stage.run([bus])
    *others, together = stage.run([bus, *mixed_images, bus])[1:]
    assert isinstance(alone, Objects)
    assert isinstance(together, Objects)
    assert [found.label for found in together.detections] == [found.label for found in alone.detections]
    for one, other in zip(together.detections, alone.detections, strict=True):
        assert one.box == pytest.approx(other.box, abs=0.1)
    for image, answer in zip(mixed_images, others, strict=True):
        assert isinstance(answer, Objects)
        for found in answer.detections:
            assert 0 <= found.box[0] <= found.box[2] <= image.width
            assert 0 <= found.box[1] <= found.box[3] <= image.height


def test_a_class_without_a_name_is_left_out(sure_weights: SureWeights) -> None:
    stage, bus = make_stage(sure_weights(), conf=0.5), read_asset("bus.jpg")
    [whole] = stage.run([bus])
    assert isinstance(whole, Objects)
    label = whole.detections[0].label
    stage.names[int(label)] = "N/A"
    [named] = stage.run([bus])
    assert isinstance(named, Objects)
    assert named.detections == [found for found in whole.detections if found.label != label]


def test_half_precision_answers(blank_pack: Pack) -> None:
    stage = make_stage(resolve(blank_pack, "yolo").files, dtype="bfloat16", conf=0.0, max_det=2)
    [answer] = stage.run([draw_image(64, 64)])
    assert isinstance(answer, Objects)
    assert answer.count == 2


def test_the_mini_architecture_answers(blank_pack: Pack, mixed_images: list[Image]) -> None:
    spec = resolve(blank_pack, "yolo", {"options": {"conf": 0.0, "max_det": 3}})
    stage = YoloStage(spec, "cpu")
    stage.load()
    for answer in stage.run(mixed_images):
        assert isinstance(answer, Objects)
        assert answer.count == 3
        assert {found.label for found in answer.detections} <= set(stage.names)


@pytest.mark.parametrize("way", [resize_with_cv2, resize_in_torch])
@pytest.mark.parametrize(
    "size", [(1080, 810), (720, 1280), (1280, 960), (1, 3000), (641, 639), (32, 32), (7, 5)]
)
def test_a_letterbox_is_that_of_ultralytics(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], way: Callable[..., torch.Tensor]
) -> None:
    from ultralytics.data.augment import LetterBox

    image = draw_noise(*size)
    assert image.pixels is not None
    theirs = LetterBox(640, auto=True, stride=32)(image=image.pixels.permute(1, 2, 0).numpy())
    monkeypatch.setattr(letterbox, "resize", lambda pages, *sides: [way(page, *sides) for page in pages])
    [ours] = fill_canvases([image.pixels], [Letterbox.fit(*size, 640, 32)])
    assert torch.equal((ours * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(theirs))


def test_weights_of_another_model_are_refused(tmp_path: Path, blank_pack: Pack) -> None:
    files = resolve(blank_pack, "yolo").files
    config = json.loads(Path(files["config"]).read_text())
    config["nc"] += 1
    (tmp_path / "yolo.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not hold the weights"):
        make_stage({**files, "config": str(tmp_path / "yolo.json")})


def test_a_size_that_is_not_a_multiple_of_the_stride_is_refused(blank_pack: Pack) -> None:
    with pytest.raises(ValueError, match="choose a multiple of 32"):
        make_stage(resolve(blank_pack, "yolo").files, imgsz=100)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(torch.OutOfMemoryError("no"), OutOfMemory), (torch.AcceleratorError("CUDA error: no"), DeviceLost)],
)
def test_a_device_error_is_translated(
    blank_pack: Pack, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    stage = make_stage(resolve(blank_pack, "yolo").files)

    def fail(batch: torch.Tensor) -> None:
        raise raised

    monkeypatch.setattr(stage.model, "forward", fail)
    with pytest.raises(expected):
        stage.run([draw_image(64, 64)])
    assert not stage.lock.locked()


def test_threads_get_the_answers_of_their_own_images(sure_weights: SureWeights) -> None:
    photos = [read_asset("bus.jpg"), read_asset("zidane.jpg")]
    stage = make_stage(sure_weights())
    expected = [stage.run([image]) for image in photos]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda place=place: found.update({place: stage.run([photos[place % 2]])}))
        for place in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(4)] == [expected[place % 2] for place in range(4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_finds_what_a_cpu_finds(sure_weights: SureWeights) -> None:
    bus = read_asset("bus.jpg")
    assert bus.pixels is not None
    files = sure_weights()
    [expected] = make_stage(files, conf=0.6).run([bus])
    stage = YoloStage(StageSpec("yolo", "ultralytics", files, options={"conf": 0.6}), "cuda:0")
    stage.load()
    bus.pixels = bus.pixels.cuda()
    found, *others = stage.run([bus] * 3)  # with a fourth row, of zeros
    assert others == [found, found]
    assert isinstance(expected, Objects)
    assert isinstance(found, Objects)
    near = box_iou(
        *(torch.tensor([one.box for one in answer.detections[:30]]) for answer in (expected, found))
    )
    assert near.amax(1).median() > 0.95
