"""`visiond bundle`, and an installation from what it made, without a package index."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from daemon.installing.bundle import AT_ONCE, SCRIPT
from tests.daemon_process import PATIENCE
from tests.deploy.standin import make_wheel

ROOT = Path(__file__).parents[2]


def make_package(folder: Path, code: str = "", name: str = "needed") -> str:
    """The wheel of a package that visiond needs, in a folder that stands for an index; returns its entry in a lock."""
    folder.mkdir(exist_ok=True)
    wheel, about = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    contents = {
        f"{name}.py": code,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        for file, text in {**contents, f"{about}/RECORD": ""}.items():
            packed.writestr(zipfile.ZipInfo(file), text)
    return f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "UV_OFFLINE": "1", **environment}
    return subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
        env=environ,
        cwd="/",
    )


def test_a_bundle_is_installed_without_an_index_and_a_package_with_another_digest_is_refused(
    tmp_path: Path,
) -> None:
    index, folder, tree = tmp_path / "index", tmp_path / "bundle", tmp_path / "tree"
    wheel = make_wheel(tmp_path, "0.0.1", lock=make_package(index))
    bundle = (sys.executable, "-m", "daemon.installing", "bundle", folder, "--wheel", wheel)
    folder.mkdir()
    (folder / "visiond-0.0.0-py3-none-any.whl").touch()  # of the bundle that it replaces
    made = run(*bundle, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))
    assert made.returncode == 0, made.stdout + made.stderr
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        *["install.sh", wheel.name, "wheels/needed-1.0-py3-none-any.whl"]
    ]
    assert os.access(folder / "install.sh", os.X_OK)
    [line] = [line for line in (folder / "install.sh").read_text().splitlines() if "--wheels" in line]
    words = line.partition("-m ")[2].replace('"$here/wheels" "$@"', str(folder / "wheels")).split()
    # a stand-in has no installer in it
    install: list[str | Path] = [sys.executable, "-m", *words, "--wheel", wheel, "--root", tree]
    shutil.rmtree(index)

    downloaded = folder / "wheels" / "needed-1.0-py3-none-any.whl"
    kept = downloaded.read_bytes()
    make_package(tmp_path / "other", "changed = True")
    shutil.copy(tmp_path / "other" / downloaded.name, downloaded)
    refused = run(*install).stderr
    assert "Hash mismatch" in refused, refused
    downloaded.write_bytes(kept)
    done = run(*install)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tree / "opt/visiond/lib").glob("python*/site-packages/needed.py"))


def test_if_an_index_lacks_a_package_it_is_named_with_what_to_type_and_what_came_is_kept(
    tmp_path: Path,
) -> None:
    index, folder = tmp_path / "index", tmp_path / "bundle"
    names = [f"package{number}" for number in range(AT_ONCE + 1)]
    lock = "".join(make_package(index, name=name) for name in names)
    (index / f"{names[-1]}-1.0-py3-none-any.whl").unlink()
    wheel = make_wheel(tmp_path, "0.0.1", lock=lock)
    words = (sys.executable, "-m", "daemon.installing", "bundle", folder, "--wheel", wheel)
    failed = run(*words, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(index))
    assert failed.returncode == os.EX_CANTCREAT
    assert f"{AT_ONCE} of {AT_ONCE + 1} packages" in failed.stdout
    assert f"No matching distribution found for {names[-1]}==1.0" in failed.stderr
    assert "visiond bundle" in failed.stderr.splitlines()[-1]
    kept = [f"wheels/{name}-1.0-py3-none-any.whl" for name in names[:-1]]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["wheels", *kept]


def test_its_script_is_for_any_shell() -> None:
    script = SCRIPT.format(python="python3.11", wheels="wheels")
    subprocess.run(["sh", "-n", "-c", script], check=True)
