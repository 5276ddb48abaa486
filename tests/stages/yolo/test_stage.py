from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import PIL.Image
import pytest
import torch
from torchvision.ops import box_iou

from stages.base import DeviceLost, Image, OutOfMemory, StageSpec
from stages.ocr.warp import resize, resize_in_torch
from stages.weights.packs import Pack, resolve
from stages.yolo import letterbox
from stages.yolo.descriptor import Objects
from stages.yolo.letterbox import Letterbox, fill_canvases
from stages.yolo.network import (
    build_network,
    convert_checkpoint,
    decode_in_float32,
    load_network,
    save_network,
)
from stages.yolo.stage import YoloStage
from tests.stages.pictures import draw_image, draw_noise, read_photo

SureWeights = Callable[..., dict[str, str]]


def asset(name: str) -> Path:
    """One of the two photographs in the ultralytics package."""
    from ultralytics.utils import ASSETS

    return Path(ASSETS) / name


def read_asset(name: str) -> Image:
    return read_photo(asset(name))


def make_sure_of_itself(model: Any, photo: Image, size: int) -> None:
    """Give a random network the statistics of a photograph,
    so that scores spread from 0 to 1 and boxes differ."""
    for norm in [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]:
        norm.momentum = 1.0
        norm.train()
    assert photo.pixels is not None
    with torch.no_grad():
        model(fill_canvases([photo.pixels], [Letterbox.fit(photo.height, photo.width, size, 32)]))
        head = model.model[-1]
        for branch in head.one2one_cv3 if model.end2end else head.cv3:
            branch[-1].bias.normal_(-2, 0.5)
    model.eval()


@pytest.fixture(scope="session")
def sure_weights(tmp_path_factory: pytest.TempPathFactory) -> SureWeights:
    """Weights of an ultralytics architecture that find many objects in one photograph."""

    @functools.cache
    def make(name: str = "yolov8n.yaml", size: int = 320, photo: str = "bus.jpg") -> dict[str, str]:
        folder = tmp_path_factory.mktemp(name)
        config = {"model": name, "nc": 80, "names": [str(index) for index in range(80)], "imgsz": size}
        torch.manual_seed(0)
        model = build_network(config)
        make_sure_of_itself(model, read_asset(photo), size)
        save_network(model, config, folder)
        return {"weights": str(folder / "yolo.safetensors"), "config": str(folder / "yolo.json")}

    return make


def make_stage(
    files: dict[str, str], *, dtype: str = "float32", batch_size: int = 4, **options: Any
) -> YoloStage:
    spec = StageSpec("yolo", "ultralytics", files, dtype=dtype, batch_size=batch_size, options=options)
    stage = YoloStage(spec, "cpu")
    stage.load()
    return stage


def predict(files: dict[str, str], path: Path) -> Any:
    """ultralytics' own answer, from the same weights."""
    from ultralytics import YOLO

    network, config = load_network(files)
    reference = YOLO(config["model"], verbose=False)
    reference.model.load_state_dict(network.state_dict())
    return reference.predict(str(path), imgsz=config["imgsz"], conf=0.5, verbose=False, device="cpu")[0].boxes


@pytest.mark.parametrize(
    ("name", "size", "photo"),
    [
        ("yolov8n.yaml", 640, "bus.jpg"),
        ("yolov8n.yaml", 640, "zidane.jpg"),
        ("yolo11n.yaml", 320, "bus.jpg"),
        ("yolo26n.yaml", 320, "bus.jpg"),
    ],
)
def test_answers_are_those_of_ultralytics(
    sure_weights: SureWeights, name: str, size: int, photo: str
) -> None:
    files = sure_weights(name, size, photo)
    theirs = predict(files, asset(photo))
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


def test_half_precision_finds_boxes_to_the_pixel(blank_pack: Pack) -> None:
    model, _ = load_network(resolve(blank_pack, "yolo").files)
    torch.manual_seed(0)
    features = [torch.zeros(1, 8, size, size) for size in (80, 40, 20)]
    anchors = sum(feature.shape[2] ** 2 for feature in features)
    boxes, scores = (
        torch.randn(1, 64, anchors).bfloat16(),
        torch.randn(1, len(model.names), anchors).bfloat16(),
    )
    exact = model.model[-1]._inference({"boxes": boxes.float(), "scores": scores.float(), "feats": features})
    head = model.to(torch.bfloat16).model[-1]
    raw = {"boxes": boxes, "scores": scores, "feats": [feature.bfloat16() for feature in features]}
    assert (head._inference(raw).float() - exact).abs().max() > 1
    decode_in_float32(head)
    assert torch.allclose(head._inference(raw), exact, atol=1e-3)


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


@pytest.mark.parametrize("way", [resize, resize_in_torch])
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
    monkeypatch.setattr(letterbox, "resize", way)
    [ours] = fill_canvases([image.pixels], [Letterbox.fit(*size, 640, 32)])
    assert torch.equal((ours * 255).round().to(torch.uint8).permute(1, 2, 0), torch.from_numpy(theirs))


def test_importing_ultralytics_leaves_the_process_as_it_was() -> None:
    assert PIL.Image.open.__module__ == "PIL.Image"
    assert torch.save.__module__ == "torch.serialization"
    assert cv2.getNumThreads() > 0


def test_a_pickle_is_read_only_if_that_is_allowed(tmp_path: Path, blank_pack: Pack) -> None:
    checkpoint = write_checkpoint(tmp_path, blank_pack)
    with pytest.raises(ValueError, match="allow_pickle = true"):
        make_stage({"weights": str(checkpoint)})
    [answer] = make_stage({"weights": str(checkpoint)}, allow_pickle=True).run([draw_image(64, 64)])
    assert isinstance(answer, Objects)


def write_checkpoint(folder: Path, pack: Pack) -> Path:
    """A .pt file as ultralytics' trainer writes them."""
    model, config = load_network(resolve(pack, "yolo").files)
    model.names = dict(enumerate(config["names"]))
    torch.save({"model": model.half(), "ema": None, "train_args": {"imgsz": 320}}, folder / "best.pt")
    return folder / "best.pt"


def test_a_converted_checkpoint_is_the_same_network(tmp_path: Path, blank_pack: Pack) -> None:
    convert_checkpoint(write_checkpoint(tmp_path, blank_pack), tmp_path)
    files = {"weights": str(tmp_path / "yolo.safetensors"), "config": str(tmp_path / "yolo.json")}
    (converted, config), (original, _) = load_network(files), load_network(resolve(blank_pack, "yolo").files)
    assert (config["imgsz"], config["nc"]) == (320, len(config["names"]))
    for name, tensor in original.half().float().state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor), name


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("bomb"),))


def test_a_checkpoint_that_would_run_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="not an ultralytics checkpoint"):
        convert_checkpoint(tmp_path / "evil.pt", tmp_path / "out")
    assert not Path("bomb").exists()
    with pytest.raises(FileNotFoundError):
        convert_checkpoint(tmp_path / "yolov8n.pt", tmp_path / "out")


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
def test_a_device_error_is_translated(blank_pack: Pack, raised: Exception, expected: type[Exception]) -> None:
    stage = make_stage(resolve(blank_pack, "yolo").files)

    def fail(batch: torch.Tensor) -> None:
        raise raised

    stage.model = fail
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
    [found] = stage.run([bus])
    assert isinstance(expected, Objects)
    assert isinstance(found, Objects)
    near = box_iou(
        *(torch.tensor([one.box for one in answer.detections[:30]]) for answer in (expected, found))
    )
    assert near.amax(1).median() > 0.95
