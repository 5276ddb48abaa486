"""Packs in one file, for machines without the model hub: a tar with the folder of each pack.

Nothing of a bundle is believed: a file is taken only if the manifest of its pack names it, is of a kind that runs no code,
and has the digest that is in the manifest. The tar's own paths, links and modes are not used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from stages.contract.manifest import MANIFEST, SUFFIXES, Manifest, PackError, read_manifest
from stages.weights.packs import Pack, open_pack, verify

CONTENTS = "visiond-models.json"  # the first file
LONGEST_BYTES = 16 << 20  # of the list of contents, and of a manifest
BLOCK_BYTES = 1 << 20
PICKLES = (".pt", ".bin", ".pth", ".ckpt", ".pkl")
SAFE = SUFFIXES - {".pt"}
Print = Callable[[str], None]


class BundleList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    packs: dict[str, str]  # folder → digest of its manifest


def write(file: Path, packs: Sequence[Pack], progress: Print) -> None:
    """Write packs into a new file. Raises PackError if one is changed or has a pickle, OSError."""
    for pack in packs:
        check_name(pack.folder.name, f"{pack.folder}: it")
        if [other.folder for other in packs if other.folder.name == pack.folder.name] != [pack.folder]:
            raise PackError(
                f"{pack.folder}: another pack of the bundle has this name; give one of the folders another."
            )
        check_kinds(pack.folder, pack.manifest)
        verify(pack)
    manifests = {pack.folder.name: (pack.folder / MANIFEST).read_bytes() for pack in packs}
    contents = BundleList({name: digest(text) for name, text in manifests.items()})
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        add(tar, CONTENTS, msgspec.json.encode(contents))
        for name, text in manifests.items():
            add(tar, f"{name}/{MANIFEST}", text)
        for pack in packs:
            progress(f"{pack.name}: {len(pack.manifest.digests)} files")
            for name in pack.manifest.digests:
                with (pack.folder / name).open("rb") as opened:
                    member = tarfile.TarInfo(f"{pack.folder.name}/{name}")
                    member.size = os.fstat(opened.fileno()).st_size
                    tar.addfile(member, opened)


def read(file: Path, models_folder: Path, progress: Print) -> list[Path]:
    """Make the packs of a bundle under the models folder, those that are not there. Returns the folders of all.
    Raises PackError, and OSError if the folder cannot be written, also before the first file if there is no room."""
    with reading(file), tarfile.open(file, "r:") as tar:
        bundle = Bundle(file, tar, list_members(tar, file))
        found = {
            models_folder / name: bundle.read(f"{name}/{MANIFEST}", digest_)
            for name, digest_ in bundle.read_contents().packs.items()
        }
        new = {folder: text for folder, text in found.items() if not is_here(folder, text, progress)}
        models_folder.mkdir(parents=True, exist_ok=True)
        for folder in new:  # of an attempt that ended
            shutil.rmtree(partial_of(folder), ignore_errors=True)
        sizes = [(name.split("/")[0], member.size) for name, member in bundle.members.items()]
        need = sum(size for name, size in sizes if models_folder / name in new)
        if need > shutil.disk_usage(models_folder).free:
            raise OSError(errno.ENOSPC, f"no room for {need >> 20:,} MiB", str(models_folder))
        for folder, text in new.items():
            take(bundle, folder, text)
            progress(f"{folder} is ready.")
    return list(found)


class Bundle(NamedTuple):
    """A bundle that is open."""

    file: Path
    tar: tarfile.TarFile
    members: dict[str, tarfile.TarInfo]

    def open(self, name: str) -> IO[bytes]:
        source = self.tar.extractfile(self.members[name]) if name in self.members else None
        if source is None:
            raise PackError(f"{self.file} is not complete: {name} is missing. Copy it again.")
        return source

    def read(self, name: str, expected: str = "") -> bytes:
        """A small file, with this digest if one is expected."""
        text = self.open(name).read(LONGEST_BYTES)
        if expected and digest(text) != expected:
            raise PackError(f"{self.file}: {name} does not have the digest of {CONTENTS}. Copy it again.")
        return text

    def read_contents(self) -> BundleList:
        if CONTENTS not in self.members:
            raise PackError(f"{self.file} is not a file of `visiond models bundle`: it has no {CONTENTS}.")
        contents = msgspec.json.decode(self.read(CONTENTS), type=BundleList)
        for name in contents.packs:
            check_name(name, f"{self.file} has a pack {name!r}, which")
        return contents


def partial_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.added")


def take(bundle: Bundle, folder: Path, text: bytes) -> None:
    """Make one pack, which gets its name when it is complete. text: of its manifest."""
    partial = partial_of(folder)
    partial.mkdir()
    (partial / MANIFEST).write_bytes(text)
    manifest = read_manifest(partial / MANIFEST)
    check_kinds(folder, manifest)
    for name, expected in manifest.digests.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        if copy(bundle.open(f"{folder.name}/{name}"), partial / name) != expected:
            raise PackError(
                f"{bundle.file}: {folder.name}/{name} does not have the digest of its manifest. Copy it again."
            )
    os.sync()  # before the pack has its name
    os.rename(partial, folder)


def check_kinds(folder: Path, manifest: Manifest) -> None:
    """Raises PackError for a file that may run code when it is read, or that no stage reads."""
    for name in manifest.digests:
        if name.endswith(PICKLES):
            raise PackError(
                f"{folder}: {name} is a pickle, which can run code when it is read, so it is not taken in a bundle. "
                "`visiond models make` converts it to safetensors."
            )
        if Path(name).suffix not in SAFE or any(part.startswith(".") for part in Path(name).parts):
            raise PackError(f"{folder}: {name} is not a file of a model, so it is not taken in a bundle.")


def list_members(tar: tarfile.TarFile, file: Path) -> dict[str, tarfile.TarInfo]:
    """Raises PackError for what no bundle has: links, devices, and a name twice or outside a pack."""
    members: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        parts = Path(member.name).parts
        outside = member.name != CONTENTS and (
            len(parts) < 2 or ".." in parts or parts[0].startswith((".", "/"))
        )
        if not member.isreg() or outside or member.name in members:
            raise PackError(
                f"{file} has {member.name!r}, which is not in a bundle of `visiond models bundle`."
            )
        members[member.name] = member
    return members


def check_name(name: str, what: str) -> None:
    """Raises PackError for a name that no folder of the models folder may have."""
    is_text = name.isprintable() and len(os.fsencode(name)) < 200
    if name in ("", "mini", "locks") or name.startswith(".") or Path(name).name != name or not is_text:
        raise PackError(f"{what} cannot be the name of a pack in the models folder.")


def is_here(folder: Path, manifest: bytes, progress: Print) -> bool:
    """Raises PackError if another pack has this name."""
    if not folder.exists():
        return False
    if not (folder / MANIFEST).is_file() or (folder / MANIFEST).read_bytes() != manifest:
        raise PackError(
            f"{folder} already exists, and is another one than in the bundle; delete it to take that."
        )
    try:
        verify(open_pack(folder, folder.parent))
    except PackError as error:
        raise PackError(f"{error} To take it from this bundle, delete {folder} first.") from error
    progress(f"{folder} is here already.")
    return True


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turns errors of a file that is not a whole bundle into PackError."""
    try:
        yield
    except tarfile.TarError as error:
        raise PackError(f"{file} is not a bundle, or not complete ({error}). Copy it again.") from error
    except (ValueError, RecursionError, FileExistsError, NotADirectoryError) as error:  # altered
        raise PackError(f"{file} is not a bundle of `visiond models bundle`, or altered: {error}.") from error


def add(tar: tarfile.TarFile, name: str, text: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    tar.addfile(member, io.BytesIO(text))


def copy(source: IO[bytes], place: Path) -> str:
    """Returns the digest of what was copied."""
    hashed = hashlib.sha256()
    with place.open("xb") as target:
        while block := source.read(BLOCK_BYTES):
            hashed.update(block)
            target.write(block)
    return f"sha256:{hashed.hexdigest()}"


def digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"
