"""Small pictures of images, decoded in real disposable processes."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from PIL import Image

from daemon.config.loading import parse
from daemon.server.page.images import Images
from daemon.server.page.pictures import Cache, NoPicture, Pictures
from daemon.server.page.rendering import Renderer
from stages.contract.base import Limits
from tests.daemon_process import PATIENCE
from tests.makers import make_record


@pytest.fixture
def pictures(tmp_path: Path) -> Iterator[Pictures]:
    with closing(Pictures(tmp_path / "kept", 1 << 20, Limits(max_pixels=1_000_000))) as opened:
        yield opened


def encode(width: int, height: int, orientation: int = 1) -> bytes:
    out, exif = io.BytesIO(), Image.Exif()
    exif[274] = orientation
    Image.new("RGB", (width, height), "red").save(out, "JPEG", exif=exif)
    return out.getvalue()


def test_a_picture_is_upright_small_and_encoded_anew(pictures: Pictures, tmp_path: Path) -> None:
    record = make_record(tmp_path, data=encode(400, 200, orientation=6))
    with Image.open(io.BytesIO(pictures.get(record, 100))) as picture:
        assert (picture.format, picture.size) == ("WEBP", (50, 100))


def test_a_transparent_picture_has_the_ground_on_which_the_models_see_it(
    pictures: Pictures, tmp_path: Path
) -> None:
    both = Image.new("RGBA", (80, 40))
    both.paste("white", (10, 10, 30, 30))
    both.paste("black", (50, 10, 70, 30))
    out = io.BytesIO()
    both.save(out, "PNG")
    record = make_record(tmp_path, data=out.getvalue())
    with Image.open(io.BytesIO(pictures.get(record, 100))) as picture:
        levels = picture.convert("L")
    found = [levels.getpixel(place) for place in ((2, 2), (20, 20), (60, 20))]
    assert found == pytest.approx([128, 255, 0], abs=6)


def test_a_picture_is_kept(pictures: Pictures, tmp_path: Path) -> None:
    record = make_record(tmp_path, data=encode(40, 20))
    first = pictures.get(record, 100)
    (tmp_path / "a.jpg").unlink()
    assert pictures.get(record, 100) == first
    with pytest.raises(NoPicture, match="no longer there"):
        pictures.get(record, 50)


@pytest.mark.parametrize(
    "data", [b"<svg onload='alert(1)'/>", b"\xff\xd8\xff\xe0 no picture", encode(2000, 1000)]
)
def test_what_is_no_picture_is_never_sent(pictures: Pictures, tmp_path: Path, data: bytes) -> None:
    with pytest.raises(NoPicture):
        pictures.get(make_record(tmp_path, data=data), 100)


def test_a_file_that_has_changed_since_is_not_shown_with_the_old_result(
    pictures: Pictures, tmp_path: Path
) -> None:
    record = make_record(tmp_path, data=encode(40, 20))
    (tmp_path / "a.jpg").write_bytes(encode(20, 40))
    with pytest.raises(NoPicture, match="changed"):
        pictures.get(record, 100)


def test_a_link_out_of_the_inbox_is_not_followed(pictures: Pictures, tmp_path: Path) -> None:
    record = make_record(tmp_path, data=encode(40, 20))
    (tmp_path / "a.jpg").rename(tmp_path / "secret.jpg")
    (tmp_path / "a.jpg").symlink_to(tmp_path / "secret.jpg")
    with pytest.raises(NoPicture):
        pictures.get(record, 100)


def test_the_longest_unused_pictures_go_when_there_are_too_many(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "kept", 1000)
    for number in range(9):
        cache.put(f"{number}0-320", bytes(100))
        os.utime(cache._path(f"{number}0-320"), (number, number))
    assert cache.get("00-320")
    cache.put("90-320", bytes(150))
    assert cache.get("00-320")
    assert cache.get("90-320")
    assert cache.get("10-320") is None
    assert sum(size for _, size, _ in Cache(tmp_path / "kept", 1000)._list()) <= 900


class SlowPictures:
    """Huge images take until `over`; one is known."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def find(self, record: Any, side: int) -> bytes | None:
        return b"known" if record.id == 3 else None

    def get(self, record: Any, side: int) -> bytes:
        assert record.id not in (1, 2) or self.over.wait(PATIENCE)
        return b"made"


@pytest.mark.anyio
async def test_huge_images_hold_up_no_other_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: Any = SlowPictures()
    nobody: Any = None
    config, done = parse({}, tmp_path), list[int]()
    images = Images(config, nobody, nobody, pictures, Renderer(config))

    async def find(request: Any) -> Any:
        huge = request.id in (1, 2)
        size = SimpleNamespace(size=1)
        return SimpleNamespace(id=request.id, width=10_000 if huge else 100, height=10_000, version=size)

    async def ask(number: int) -> None:
        await images.picture(cast(Any, SimpleNamespace(id=number, path_params={"size": "small"})))
        done.append(number)

    monkeypatch.setattr(images, "_record", find)
    async with anyio.create_task_group() as tasks:
        for number in (1, 2):
            tasks.start_soon(ask, number)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(PATIENCE):
            await ask(3)
            await ask(4)
        assert done == [3, 4]
        pictures.over.set()
    assert sorted(done) == [1, 2, 3, 4]
