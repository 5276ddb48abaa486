"""What is taken from a bundle, and what is not: it may be cut short, or made by somebody who means no good."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from stages.contract.manifest import MANIFEST, Manifest, PackError, digest_folder, write_manifest
from stages.weights import bundles
from stages.weights.packs import Pack, open_pack

Members = dict[str, bytes]


def make_pack(folder: Path, **files: bytes) -> Pack:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_bytes(text)
    write_manifest(folder / MANIFEST, Manifest(name=folder.name, digests=digest_folder(folder)))
    return open_pack(folder, folder.parent)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    packs = [
        make_pack(tmp_path / "from" / name, config_json=b"{}", model_safetensors=b"x" * 30_000)
        for name in ("org--one", "org--two")
    ]
    bundles.write(tmp_path / "models.tar", packs, lambda _: None)
    return tmp_path / "models.tar"


def add(bundle: Path) -> list[Path]:
    return bundles.read(bundle, bundle.parent / "models", lambda _: None)


def change(bundle: Path, edit: Callable[[Members], None]) -> None:
    """Write the bundle again, with other files, and digests of manifests that fit them."""
    with tarfile.open(bundle) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    edit(members)
    manifests = {name: text for name, text in members.items() if name.endswith(f"/{MANIFEST}")}
    contents = {name.split("/")[0]: bundles.digest(text) for name, text in manifests.items()}
    members[bundles.CONTENTS] = msgspec.json.encode(bundles.BundleList(contents))
    with tarfile.open(bundle, "w") as tar:
        for name, text in members.items():
            bundles.add(tar, name, text)


def rename(members: Members, old: str, new: str) -> None:
    """Another name for a file of the first pack, also in its manifest."""
    members[f"org--one/{new}"] = members.pop(f"org--one/{old}")
    place = f"org--one/{MANIFEST}"
    members[place] = members[place].replace(f'"{old}"'.encode(), f'"{new}"'.encode())


def test_packs_are_the_same_on_the_other_machine_and_what_is_there_stays(bundle: Path) -> None:
    folders = add(bundle)
    for folder in folders:
        assert digest_folder(folder) == digest_folder(bundle.parent / "from" / folder.name)
    before = [file.stat().st_mtime_ns for file in folders[0].iterdir()]
    assert add(bundle) == folders
    assert [file.stat().st_mtime_ns for file in folders[0].iterdir()] == before
    (folders[0] / MANIFEST).write_text("{}")
    with pytest.raises(PackError, match="is another one than in the bundle"):
        add(bundle)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.4, 0.7])
def test_a_bundle_that_is_cut_short_adds_no_model(bundle: Path, share: float) -> None:
    whole = bundle.read_bytes()
    bundle.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(PackError, match=r"Copy it again|is not a file of"):
        add(bundle)
    assert not [*bundle.parent.glob("models/[!.]*")]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda members: members.update({"../outside": b""}), "which is not in a bundle"),
        (lambda members: members.update({"/tmp/outside": b""}), "which is not in a bundle"),
        (lambda members: rename(members, "config.json", "../../outside.json"), "which is not in a bundle"),
        (lambda members: rename(members, "config.json", "weights.pt"), "is a pickle, which can run code"),
        (lambda members: rename(members, "config.json", "code.py"), "is not a file of a model"),
        (
            lambda members: members.update({"org--one/config.json": b"other"}),
            "does not have the digest of its manifest",
        ),
        (lambda members: members.pop("org--two/config.json"), "is not complete: org--two/config.json"),
    ],
)
def test_a_bundle_that_leads_outside_or_runs_code_is_refused(
    bundle: Path, edit: Callable[[Members], None], message: str
) -> None:
    change(bundle, edit)
    with pytest.raises(PackError, match=message):
        add(bundle)
    assert not [*bundle.parent.rglob("*outside*"), *bundle.parent.glob("models/org--two")]


def test_a_manifest_that_names_a_file_outside_is_refused(bundle: Path) -> None:
    def edit(members: Members) -> None:
        place = f"org--one/{MANIFEST}"
        members[place] = members[place].replace(b'"config.json"', b'"../../outside.json"')

    change(bundle, edit)
    with pytest.raises(PackError, match="which is outside the pack"):
        add(bundle)


def test_a_link_in_a_bundle_is_refused(bundle: Path) -> None:
    with tarfile.open(bundle, "a") as tar:
        link = tarfile.TarInfo("org--one/link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link, io.BytesIO())
    with pytest.raises(PackError, match="which is not in a bundle"):
        add(bundle)


def test_what_an_attempt_left_makes_room_before_room_is_looked_at(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = bundle.parent / "models" / ".org--one.added" / "model.safetensors"
    left.parent.mkdir(parents=True)
    left.touch()
    real = shutil.disk_usage(bundle.parent)
    monkeypatch.setattr("shutil.disk_usage", lambda _: real._replace(free=0 if left.exists() else real.free))
    assert len(add(bundle)) == 2


def test_a_damaged_pack_is_not_called_here(bundle: Path) -> None:
    folder, _ = add(bundle)
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(PackError, match=f"is altered.*delete {folder} first"):
        add(bundle)


@pytest.mark.parametrize("names", [("same", "same"), ("mini",), (".hidden",), ("a\nb",)])
def test_no_bundle_is_written_that_cannot_be_added(tmp_path: Path, names: tuple[str, ...]) -> None:
    packs = [make_pack(tmp_path / str(i) / name, config_json=b"{}") for i, name in enumerate(names)]
    with pytest.raises(PackError, match=r"has this name|cannot be the name"):
        bundles.write(tmp_path / "a", packs, print)


def test_an_altered_bundle_is_called_one(bundle: Path) -> None:
    inside = "model.safetensors/config.json"
    change(bundle, lambda members: rename(members, "config.json", inside))
    with pytest.raises(PackError, match="altered"):
        add(bundle)
    bundle.write_bytes(bundle.read_bytes().replace(b'{"packs"', b'{"p\xffcks"'))
    with pytest.raises(PackError, match="altered"):
        add(bundle)


def test_without_room_nothing_is_written(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(bundle.parent)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="no room for"):
        add(bundle)
    assert not [*(bundle.parent / "models").iterdir()]


def test_no_pickle_and_no_changed_file_is_written_into_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="is a pickle"):
        bundles.write(tmp_path / "a", [make_pack(tmp_path / "one", best_pt=b"")], print)
    pack = make_pack(tmp_path / "two", config_json=b"{}")
    (pack.folder / "config.json").write_text("[]")
    with pytest.raises(PackError, match="is altered"):
        bundles.write(tmp_path / "a", [pack], print)
    assert not (tmp_path / "a").exists()
