"""The distribution is built and installed as its README says, and the command finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from daemon import __version__

FOLDER = Path(__file__).parents[2] / "minipack"


def test_it_is_installed_beside_visiond_with_its_version_and_all_its_files(tmp_path: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--offline", "--quiet", "--python", sys.executable]
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "pip", "install", *options, "--target", tmp_path, FOLDER], check=True)
    installed, here = (
        {path.relative_to(root) for path in root.rglob("visiond_mini/**/*.py")} for root in (tmp_path, FOLDER)
    )
    assert installed == here
    assert (tmp_path / f"visiond_mini-{__version__}.dist-info").is_dir()
