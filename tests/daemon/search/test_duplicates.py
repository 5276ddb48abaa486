"""Near-duplicates of real ledgers, grouped in the real process."""

from __future__ import annotations

import base64
import itertools
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.core.errors import SearchUnusable
from daemon.search import duplicates, grouping, searcher
from daemon.search.duplicates import (
    Duplicates,
    NearBest,
    about_groups,
    extend_groups,
    find_duplicates,
    keep_groups,
    read_groups,
)
from daemon.search.grouping import Grouping
from daemon.search.query import QueryError, parse
from daemon.search.searcher import By
from daemon.system.gpus import Gpu
from stages.contract import processes
from tests.daemon.search.place import Place


def at(degrees: float) -> dict[str, Any]:
    """The answer of CLIP for an image whose embedding has this direction: 18 degrees are a cosine of 0.951."""
    vector = np.zeros(16, "<f2")
    vector[:2] = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    encoded = base64.b64encode(vector.tobytes()).decode()
    return {"embedding": {"dim": 16, "dtype": "float16", "base64": encoded}, "tags": []}


def find(place: Place, near: float = 0.95, **options: Any) -> Duplicates:
    place.search.catch_up()
    return find_duplicates(place.reader, place.search.index, near, **options)


def groups(place: Place, **options: Any) -> list[list[int]]:
    found = find(place, **options)
    return [found.images[group].tolist() for group in found.groups()]


def change(place: Place, statement: str, *values: Any) -> None:
    place._run(place.ledger.run(lambda connection: connection.execute(statement, values)))


def resize(place: Place, image: int, width: int, height: int) -> None:
    content = "SELECT content.id FROM content JOIN image USING (digest) WHERE image.id = ?"
    change(place, f"UPDATE content SET width = ?, height = ? WHERE id = ({content})", width, height, image)


def test_the_best_image_of_a_group_has_most_pixels_then_most_bytes_then_is_the_oldest(place: Place) -> None:
    for number, size in enumerate((5, 5, 9, 3)):
        place.add(f"{number}.jpg", "x", size=size, clip=at(0))
    assert groups(place) == [[3, 1, 2, 4]]
    resize(place, 4, 4000, 3000)
    assert groups(place) == [[4, 3, 1, 2]]
    assert find(place).better() == {image: NearBest(4, 1.0) for image in (1, 2, 3)}


def test_of_equally_large_images_the_sharpest_is_the_best(place: Place) -> None:
    for number, sharpness in enumerate((2.0, 30.5, None, 30.5)):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(0) | {"sharpness": sharpness})
    assert groups(place) == [[2, 4, 1, 3]]
    resize(place, 3, 4000, 3000)
    assert groups(place) == [[3, 2, 4, 1]]


def test_every_image_of_a_group_is_near_the_best_one_and_no_two_best_ones_are_near(place: Place) -> None:
    """Each of a chain of ten is near the next one."""
    for number in range(10):
        place.add(f"{number}.jpg", "x", size=100 - number, clip=at(12 * number))
    assert groups(place) == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert groups(place, near=0.9) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    found = find(place, near=0.98)
    assert (found.groups(), len(found.images), found.freed_bytes) == ([], 10, 0)


def test_the_group_whose_other_files_have_most_bytes_comes_first(place: Place) -> None:
    for number, (size, degrees) in enumerate([(90, 0), (1, 0), (20, 90), (9, 90), (9, 90), (5, 180)]):
        place.add(f"{number}.jpg", "x", size=size, clip=at(degrees))
    assert groups(place) == [[3, 4, 5], [1, 2]]
    assert find(place).freed_bytes == 19


def test_only_the_chosen_images_are_grouped(place: Place) -> None:
    for number in range(4):
        place.add(f"{number}.jpg", "x", clip=at(0))
    place.search.catch_up()
    change(place, "UPDATE image SET bin = 'B' WHERE id IN (2, 4)")
    assert groups(place, bins=["B"]) == [[2, 4]]
    assert groups(place, among=np.array([4, 3, 77])) == [[3, 4]]
    assert groups(place, bins=["C"]) == []


def test_images_that_failed_or_were_replaced_have_no_part_and_images_without_an_embedding_are_named(
    place: Place,
) -> None:
    place.add("a.jpg", "x", size=8, clip=at(0))
    place.add("b.jpg")
    place.add("c.jpg", "x", clip={"tags": []})
    place.add("d.jpg", "x", clip=at(0))
    place.add("a.jpg", "y", size=9, clip=at(90))
    found = find(place)
    assert sorted(found.images.tolist()) == [4, 5]
    assert (found.groups(), found.without) == ([], [3])


def test_embeddings_of_two_models_are_not_compared(place: Place) -> None:
    for number in range(2):
        place.add(f"{number}.jpg", "x", clip=at(0))
    place.begin_with("clip-2", "clip")
    for number in range(3):
        place.add(f"new{number}.jpg", "x", clip=at(0))
    found = find(place)
    assert (found.model, found.without) == ("clip-2", [1, 2])
    assert groups(place) == [[3, 4, 5]]


@pytest.mark.parametrize("stage", ["clip", "hash"])
def test_that_no_image_has_what_is_compared_is_said(place: Place, stage: str) -> None:
    place.add("a.jpg", "x", clip={"tags": []})
    with pytest.raises(SearchUnusable, match=f"no image has a result of the stage {stage}"):
        find(place, by=stage)


def hashed(bits: int) -> dict[str, Any]:
    """The answers of an image, whose embedding no other image has, with a hash of so many ones at its end."""
    return {"hash": {"phash": f"{(1 << bits) - 1:016x}"}, "clip": at(90 * bits)}


def test_images_are_grouped_by_how_many_bits_of_their_hashes_differ(place: Place) -> None:
    place.begin_with("hash-1", "hash")
    for number, bits in enumerate((0, 6, 7, 40, 34)):
        place.add(f"{number}.jpg", "x", size=9 - number, **hashed(bits))
    assert groups(place, near=0.8, by="hash") == [[1, 2], [4, 5]]
    assert groups(place, near=0.95) == [[1, 4], [2, 5]], "by their embeddings"
    found = find(place, near=0.5, by="hash")
    assert found.better() == {
        2: NearBest(1, 1 - 6 / 32),
        3: NearBest(1, 1 - 7 / 32),
        5: NearBest(4, 1 - 6 / 32),
    }
    assert place.find("000000000000003f") == [], "a hash is no word"


def test_images_that_come_later_join_groups_by_hash(place: Place) -> None:
    place.begin_with("hash-1", "hash")
    for number, bits in enumerate((0, 6, 40)):
        place.add(f"{number}.jpg", "x", size=9 - number, **hashed(bits))
    place.search.catch_up()
    keep_groups(place.search.index, find(place, near=0.8, by="hash"))
    place.add("3.jpg", "x", **hashed(43))
    assert grouped(place) == [[1, 2], [3, 4]]
    kept = about_groups(place.search.index)
    assert kept
    assert (duplicates.stage_of(place.reader, kept), kept.near) == ("hash", 0.8)
    assert not duplicates.has_newer_model(place.reader, place.search.index, kept)
    place.begin_with("hash-2", "hash")
    place.add("4.jpg", "x", **hashed(43))
    place.search.catch_up()
    assert duplicates.has_newer_model(place.reader, place.search.index, kept)


def test_a_process_that_is_killed_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.add("a.jpg", "x", clip=at(0))
    died = processes.python("-c", f"import os; os.kill(os.getpid(), {signal.SIGKILL:d})")
    monkeypatch.setattr(processes, "python", lambda *_: died)
    with pytest.raises(SearchUnusable, match="killed by SIGKILL"):
        find(place)


def test_what_keeps_images_from_being_compared_is_said(place: Place) -> None:
    place.add("a.jpg", "x", clip=at(0))
    place.search.catch_up()
    [(folder, *_)] = place.search.index.matrices().values()
    os.truncate(folder / "float16", 3)
    with pytest.raises(SearchUnusable, match="images could not be compared: "):
        find(place)


def test_progress_ends_with_all_images(place: Place) -> None:
    for number in range(3):
        place.add(f"{number}.jpg", "x", clip=at(0))
    steps: list[tuple[int, int]] = []
    find(place, note=lambda *step: steps.append(step))
    assert steps[-1] == (3, 3)
    assert all(one <= other for one, other in itertools.pairwise(steps))


def keep(place: Place) -> None:
    keep_groups(place.search.index, find(place))


def test_the_groups_that_were_kept_are_those_that_were_found_and_replace_former_ones(place: Place) -> None:
    assert about_groups(place.search.index) is None
    for number, degrees in enumerate((0, 1, 90, 91, 45)):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(degrees))
    for _ in range(2):
        keep(place)
        kept = about_groups(place.search.index)
        assert kept
        assert (kept.near, kept.images, kept.last, kept.groups, kept.others) == (0.95, 5, 5, 2, 2)
        groups = read_groups(place.search.index, 0, 9)
        assert [[each.best for each in group] for group in groups] == [[1, 2], [3, 4]]
        assert groups[0][0].cosine == 1.0
        assert read_groups(place.search.index, 1, 1) == groups[1:]


def test_a_search_has_only_the_best_only_others_or_one_group(place: Place) -> None:
    for number, degrees in enumerate((0, 1, 2, 45)):
        place.add(f"{number}.jpg", "odd" if number % 2 else "even", size=9 - number, clip=at(degrees))
    keep(place)
    assert place.find("group:best") == [4, 1]
    assert place.find("group:others") == [3, 2]
    assert place.find("group:2") == [3, 2, 1]
    assert place.find("group:4") == []
    assert place.find("even group:2") == [3, 1]
    assert place.find("group:2", limit=2) == [3, 2]
    first = place.search.newest(parse("group:2"), limit=2)
    assert [hit.image for hit in place.search.newest(parse("group:2"), first.following).hits] == [1]
    assert [hit.image for hit in place.search.best(parse("odd group:best"), By.words).hits] == [4]
    assert [hit.image for hit in place.search.disagreeing(parse("group:others")).hits] == [3, 2]
    assert place.search.beside(parse("group:others"), 2) == (3, 0)
    with pytest.raises(QueryError, match="group:17"):
        parse("group:all")


def test_images_that_were_published_again_are_others_before_the_groups_know_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(0))
    keep(place)
    monkeypatch.setattr(searcher.Searcher, "extend_groups", lambda _: None)
    for image in (1, 2, 3):
        place.put_back(image)
        place.annotate("y", clip=at(0))
    assert place.find("group:others") == [3, 2]
    assert place.find("group:best") == [1]


def test_near_duplicates_are_found_however_many_images_fit_better(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searcher, "BEST", 1)
    for number, text in enumerate(("dog", "dog and more", "dog and much more")):
        place.add(f"{number}.jpg", text, size=9 - number, clip=at(0 if number else 90))
    keep(place)
    for query, images in (("dog group:2", [2]), ("dog group:others", [3]), ("more group:best", [2])):
        assert [hit.image for hit in place.search.best(parse(query), By.words).hits] == images


def test_an_image_whose_better_one_is_gone_is_no_copy_any_more(place: Place) -> None:
    """Whoever keeps only the best ones loses no image without keeping one that is near it."""
    for number in range(3):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(0))
    keep(place)
    assert place.find("group:best") == [1]
    place.add("0.jpg", "x", size=20, clip=at(90))
    assert place.find("group:best") == [4, 3, 2]
    assert place.find("group:2") == [3, 2]
    keep(place)
    assert place.find("group:best") == [4, 2]


def grouped(place: Place) -> list[list[int]]:
    place.search.catch_up()
    extend_groups(place.reader, place.search.index)
    return [[each.best for each in group] for group in read_groups(place.search.index, 0, 99)]


def test_images_that_come_later_join_the_kept_groups_or_begin_new_ones(place: Place) -> None:
    for number, degrees in enumerate((0, 1, 45)):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(degrees))
    keep(place)
    assert grouped(place) == [[1, 2]]
    place.add("larger.jpg", "x", size=99, clip=at(2))  # it is better, but came later
    place.add("single.jpg", "x", clip=at(44))
    place.add("new.jpg", "x", clip=at(120))
    place.add("bad.jpg")
    assert grouped(place) == [[1, 2, 4], [3, 5]]
    place.add("copy.jpg", "x", clip=at(121))
    assert grouped(place) == [[1, 2, 4], [3, 5], [6, 8]]
    kept = about_groups(place.search.index)
    assert kept
    assert (kept.images, kept.leaders, kept.groups, kept.others, kept.last) == (7, 3, 3, 4, 8)
    assert place.find("group:best") == [7, 6, 3, 1]
    keep(place)
    assert grouped(place) == [[4, 1, 2], [3, 5], [6, 8]], "the best ones are found anew"


def test_who_keeps_groups_while_another_process_does_is_told_to_run_it_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add("0.jpg", "x", clip=at(0))
    found = find(place)

    def lose(folder: Path, *_: object) -> None:
        shutil.rmtree(folder)
        raise FileNotFoundError(folder)

    monkeypatch.setattr(duplicates, "_append", lose)
    with pytest.raises(SearchUnusable, match="run `visiond duplicates` again"):
        keep_groups(place.search.index, found)


def test_what_a_gpu_cannot_compare_the_cpu_does(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        place.add(f"{number}.jpg", "x", clip=at(10 * number))
    place.search.catch_up()
    [(folder, rows, dim)] = place.search.index.matrices().values()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(grouping, "GPU_FROM", 0)
    gone = Gpu(0, "GPU-gone", "a card", 1 << 40, 1 << 40, 0, "9.0", None, ())
    monkeypatch.setattr(grouping, "list_gpus", lambda: [gone])
    asked = Grouping(str(folder), rows, dim, np.arange(3).tobytes(), 0.95, 1)
    assert grouping._find(asked, lambda done: None).leaders.tolist() == [0, 0, 2]
    assert "as the GPU failed" in capsys.readouterr().err


def test_images_that_come_while_others_are_compared_are_compared_later(place: Place) -> None:
    for number, degrees in enumerate((0, 1)):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(degrees))
    found = find(place)
    place.add("meanwhile.jpg", "x", clip=at(0))
    place.search.catch_up()
    keep_groups(place.search.index, found)
    assert grouped(place) == [[1, 2, 3]]


@pytest.mark.parametrize("name", ["axes.npy", "kept"])
def test_kept_groups_that_cannot_be_read_are_named_and_made_again(place: Place, name: str) -> None:
    place.add("0.jpg", "x", clip=at(0))
    keep(place)
    [file] = (place.state / "search" / "groups").glob(f"*/{name}")
    os.truncate(file, 0)
    place.add("1.jpg", "x", clip=at(0))
    with pytest.raises(SearchUnusable, match="`visiond duplicates` makes them again"):
        grouped(place)
    keep(place)
    assert grouped(place) == [[1, 2]]


def test_an_image_that_is_published_again_stays_where_it_was(place: Place) -> None:
    for number, degrees in enumerate((0, 1, 90)):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(degrees))
    keep(place)
    for image in (1, 3):
        place.put_back(image)
        place.annotate("x", clip=at(0))
    assert grouped(place) == [[1, 2]]
    kept = about_groups(place.search.index)
    assert kept
    assert (kept.images, kept.leaders) == (3, 2)
    place.put_back(2)
    place.annotate("x", clip=at(0))
    assert place.find("group:others") == [2]
    assert place.find("group:2") == [2, 1]


def meanwhile(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> list[str]:
    """Let something happen once, while groups are computed. Returns where it happened, when it has."""
    work, done = getattr(duplicates, name), list[str]()

    def interrupted(*given: Any) -> Any:
        if not done:
            done.append(name)
            act()
        return work(*given)

    monkeypatch.setattr(duplicates, name, interrupted)
    return done


@pytest.mark.parametrize("name", ["find_axes", "shorten", "extend_cover"])
def test_the_index_can_be_written_while_groups_are_computed(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def write() -> None:
        with closing(sqlite3.connect(place.state / "search" / "index.sqlite", timeout=0)) as connection:
            connection.execute("BEGIN IMMEDIATE")

    done = meanwhile(monkeypatch, name, write)
    place.add("0.jpg", "x", clip=at(0))
    keep(place)
    place.add("1.jpg", "x", clip=at(0))
    assert grouped(place) == [[1, 2]]
    assert done == [name]


@pytest.mark.parametrize("act", [grouped, keep])
def test_images_that_another_process_has_grouped_meanwhile_are_grouped_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, act: Callable[[Place], object]
) -> None:
    place.add("0.jpg", "x", size=9, clip=at(0))
    place.add("1.jpg", "x", size=8, clip=at(90))
    keep(place)
    done = meanwhile(monkeypatch, "extend_cover", lambda: act(place))
    for number, degrees in enumerate((1, 45, 46), 2):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(degrees))
    assert grouped(place) == [[1, 3], [4, 5]]
    kept = about_groups(place.search.index)
    assert kept
    assert (done, kept.images, kept.leaders) == (["extend_cover"], 5, 3)


def test_groups_of_an_index_that_was_made_again_meanwhile_are_not_kept(place: Place) -> None:
    for number in range(2):
        place.add(f"{number}.jpg", "x", size=9 - number, clip=at(0))
    place.search.catch_up()
    place.put_back(1)
    place.annotate("x", clip=at(0))
    found = find(place)  # of an index that also has the former entry of image 1
    shutil.rmtree(place.state / "search")
    place.search.catch_up()
    with pytest.raises(SearchUnusable, match="run `visiond duplicates` again"):
        keep_groups(place.search.index, found)
    assert about_groups(place.search.index) is None


def test_kept_groups_are_those_of_the_whole_order_also_when_many_images_come(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "BATCH", 4)
    chance = np.random.default_rng(3)
    directions = chance.uniform(0, 360, 40).tolist()
    for number, degrees in enumerate(directions):
        place.add(f"{number}.jpg", "x", size=200 - number, clip=at(degrees))
        if number == 9:
            keep(place)
    found = {frozenset(group) for group in grouped(place)}
    assert found == {frozenset(group) for group in groups(place)}
    assert len(list((place.state / "search" / duplicates.GROUPS).iterdir())) == 1
