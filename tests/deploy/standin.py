"""Wheels that stand for visiond where the real one, with gigabytes of packages, would take minutes."""

from __future__ import annotations

import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = "daemon/installing/files"
PROGRAM = """
import sys

def main():
    print("visiond {version}", *sys.argv[1:])
    sys.exit({status})
"""


LOADING = """
import tomllib
from types import SimpleNamespace

def load(file):
    return SimpleNamespace(state=SimpleNamespace(**tomllib.loads(file.read_text())["state"]))
"""


def make_wheel(
    folder: Path, version: str, *, program: str = "", status: int = 0, schema: int = 1, lock: str = ""
) -> Path:
    """A visiond of this version, whose command prints its version and ends with this status.
    program: the command, in place of that. schema: of its ledger."""
    wheel = folder / f"visiond-{version}-py3-none-any.whl"
    about = f"visiond-{version}.dist-info"
    contents = {
        "standin.py": program or PROGRAM.format(version=version, status=status),
        "daemon/__init__.py": "",
        "daemon/config/__init__.py": "",
        "daemon/config/loading.py": LOADING,
        "daemon/ledger/__init__.py": "",
        "daemon/ledger/schema.py": f"def newest():\n    return {schema}\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: visiond\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\nvisiond = standin:main\n",
        f"{FILES}/requirements.lock": lock,
        f"{FILES}/docs/operations.md": "# Install and run",
    }
    for file in (ROOT / "deploy" / "systemd").glob("*.*"):
        if file.is_file():
            contents[f"{FILES}/systemd/{file.name}"] = file.read_text()
    contents[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*contents, f"{about}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in contents.items():
            packed.writestr(zipfile.ZipInfo(name), text)
    return wheel
