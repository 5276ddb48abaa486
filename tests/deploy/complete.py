"""The complete installation, with all packages, in a throwaway tree: `make install-test`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def main(wheel: Path) -> None:
    """Install, use, install again, remove. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="visiond-complete-") as scratch:
        tree = Path(scratch, "tree")
        visiond = tree / "opt" / "visiond" / "bin" / "visiond"
        # The interpreter of the machine and the wheel alone: nothing of this checkout's environment.
        alone = ["env", f"PYTHONPATH={wheel.resolve()}", "/usr/bin/python3", "-m", "daemon.installing"]
        commands: list[list[str | Path]] = [
            [*alone, "install", "--root", tree],
            [visiond, "--version"],
            [visiond, "demo", Path(scratch, "demo"), "--count", "4"],
            [*alone, "install", "--root", tree],
            [visiond, "install", "--root", tree],  # made into a wheel again: it is the same
            [*alone, "uninstall", "--root", tree],
        ]
        for words in commands:
            _run(words, scratch)
        print("left:", *sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()))


def _run(words: Sequence[str | Path], folder: str) -> None:
    print("$", *words, flush=True)
    started = time.monotonic()
    subprocess.run([*map(str, words)], check=True, cwd=folder)
    print(f"({time.monotonic() - started:.1f} s)", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
