from __future__ import annotations

from pathlib import Path

import pytest

from stages.contract.manifest import MANIFEST, Manifest, PackError, write_manifest
from stages.registry.registry import UnknownName
from stages.weights.catalog import CATALOG
from stages.weights.names import find_pulled, parse, read_reference


@pytest.mark.parametrize(
    ("typed", "repository", "revision", "name", "folder"),
    [
        ("clip-b16", "openai/clip-vit-base-patch16", "", "clip-b16", "openai--clip-vit-base-patch16"),
        (
            "clip-b16@v1.0",
            "openai/clip-vit-base-patch16",
            "v1.0",
            "clip-b16",
            "openai--clip-vit-base-patch16@v1.0",
        ),
        (
            "openai/clip-vit-base-patch16",
            "openai/clip-vit-base-patch16",
            "",
            "clip-b16",
            "openai--clip-vit-base-patch16",
        ),
        ("me/my.model_2", "me/my.model_2", "", "me/my.model_2", "me--my.model_2"),
        ("me/mine@refs/pr/3", "me/mine", "refs/pr/3", "me/mine", "me--mine@refs--pr--3"),
        ("yolo26s", "Ultralytics/YOLO26", "", "yolo26s", "Ultralytics--YOLO26--yolo26s"),
        ("me/yolo/best.pt", "me/yolo", "", "me/yolo/best.pt", "me--yolo--best"),
    ],
)
def test_a_model_is_named_by_the_catalog_or_by_its_repository(
    typed: str, repository: str, revision: str, name: str, folder: str
) -> None:
    reference = parse(typed)
    assert reference
    assert (reference.repository, reference.revision, reference.name, reference.folder) == (
        repository,
        revision,
        name,
        folder,
    )
    assert reference.typed == name + f"@{revision}" * bool(revision)


@pytest.mark.parametrize(
    "typed",
    [
        "./me/mine",
        "/me/mine",
        "~/mine",
        "mine",
        "me/mine/other",
        "../me",
        "me/..",
        "me/mine@",
        "me/mine@../../etc",
        "me/mine@v1/../../etc",
        "clip-b32@v1/..",
        "me/",
    ],
)
def test_a_path_is_not_taken_for_a_repository(typed: str) -> None:
    assert parse(typed) is None


def test_a_model_without_a_revision_is_found_by_its_commit_too(tmp_path: Path) -> None:
    folder = tmp_path / "me--mine"
    write_manifest(folder / MANIFEST, Manifest(name="me/mine", revision={"me/mine": "abcdef0123456789"}))
    assert find_pulled("me/mine", tmp_path) == folder == find_pulled("me/mine@abcdef0", tmp_path)
    for other in ("me/mine@abcdef1", "me/mine@main", "me/other", "mine"):
        assert find_pulled(other, tmp_path) is None


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(
        UnknownName, match='there is no model "SigLIP2-b16-244"; did you mean "siglip2-b16-224"'
    ):
        read_reference("SigLIP2-b16-244")
    with pytest.raises(UnknownName, match=r"`visiond models list` shows all names; a repository .* org/name"):
        read_reference("zzzzzz")


def test_a_model_that_no_backend_takes_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.weights.catalog.find_backend", lambda _: None)
    with pytest.raises(PackError, match=r"no backend of this installation takes clip-b16 \(CLIP, model_type"):
        read_reference("clip-b16")
    assert CATALOG["clip-b16"].type == "clip"
