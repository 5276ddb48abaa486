"""Plants a bug: replaces one piece of the source by another, in a copy of the tree.

A `Mutant` names the piece by its text, and by its function if the text alone would be too long or is
elsewhere too. How the source wraps its lines does not matter. A piece that is not found exactly once is an
error: the table no longer matches the source.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", "demo", "shared")
RUN_SECONDS = 1800  # for all that is run at once


class DoesNotApply(Exception):
    """The table does not match the source."""


@dataclass(frozen=True)
class Mutant:
    """A bug to plant. tests: those that must notice it, as pytest names them below tests/,
    without parameters."""

    name: str
    promise: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    within: str = ""  # a function, or Class.method

    def plant(self, source: str) -> str:
        """The source with the bug in it. Raises DoesNotApply."""
        start, end = _extent(source, self.within) if self.within else (0, len(source))
        found = list(_pattern(self.before).finditer(source, start, end))
        if len(found) != 1:
            place = f"{self.within} of {self.file}" if self.within else self.file
            raise DoesNotApply(f"{self.name}: {self.before!r} is {len(found)} times in {place}, not once")
        planted = source[: found[0].start()] + self.after + source[found[0].end() :]
        if self.file.endswith(".py"):
            try:
                ast.parse(planted)
            except SyntaxError as error:
                raise DoesNotApply(
                    f"{self.name}: what it makes of {self.file} is no Python: {error}"
                ) from error
        return planted


def _pattern(text: str) -> re.Pattern[str]:
    """Finds the text however its lines are wrapped: with other white space inside,
    and commas before brackets."""
    before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    text = re.sub(r",?\s*([)\]}])", r"\1", re.sub(r"([(\[{])\s+", r"\1", text.strip()))
    pieces = re.findall(r"\s+|[(\[{]|[)\]}]|[^\s()\[\]{}]+", text)
    forms = {"(": r"\(\s*", "[": r"\[\s*", "{": r"\{\s*", ")": r",?\s*\)", "]": r",?\s*\]", "}": r",?\s*\}"}
    inside = "".join(forms.get(piece, r"\s+" if piece.isspace() else re.escape(piece)) for piece in pieces)
    return re.compile(re.escape(before) + inside + re.escape(after))


_parse = functools.lru_cache(8)(ast.parse)  # rows of one file follow each other


def _extent(source: str, name: str) -> tuple[int, int]:
    """The start and end of a function in the source, in characters. Raises DoesNotApply."""
    node: ast.AST = _parse(source)
    for part in name.split("."):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        children = [child for child in ast.walk(node) if isinstance(child, kinds) and child.name == part]
        if len(children) != 1:
            raise DoesNotApply(f"there are {len(children)} of {name}, not one")
        node = children[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    assert node.end_lineno is not None
    return starts[node.lineno - 1], starts[node.end_lineno]


def missing_tests(mutant: Mutant) -> list[str]:
    """Those of its tests that do not exist."""
    return [test for test in mutant.tests if not _has_test(*test.split("::"))]


def _has_test(file: str, name: str) -> bool:
    path = ROOT / "tests" / file
    return path.exists() and name in _list_functions(path.read_text())


@functools.cache
def _list_functions(source: str) -> set[str]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(source).body if isinstance(node, functions)}


class Copy:
    """A copy of the tree with a separate interpreter, which finds the copy first. Its children do so too,
    also with `-P`."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        environment = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = environment / "lib" / version / "site-packages"
        installed = sysconfig.get_path("purelib")  # its own .pth names the checkout, behind the copy
        (packages / "copy.pth").write_text(
            f"{self.root}\n{self.root / 'minipack'}\nimport site; site.addsitedir({installed!r})\n"
        )
        self._python = environment / "bin" / "python"
        self._changes = itertools.count(1)

    def write(self, file: str, source: str) -> None:
        """Sets another time: Python uses its compiled file for a source with the same size and second."""
        path = self.root / file
        path.write_text(source)
        second = 10**9 + next(self._changes)
        os.utime(path, (second, second))

    def run(self, tests: tuple[str, ...], *options: str, patience_seconds: float = 60.0) -> tuple[int, str]:
        """pytest's exit status and what it printed.

        patience_seconds: how long a test waits for what may never come.
        """
        command = [str(self._python), "-m", "pytest", "--tb=short", "-rf", *options]
        process = subprocess.Popen(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=self.root,
            env=os.environ | {"VISIOND_PATIENCE": str(patience_seconds)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            text, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return 1, f"the tests did not end within {RUN_SECONDS} s"
        return process.returncode, text

    def imports(self) -> list[str]:
        """From where a child of the copy's interpreter imports the packages."""
        program = (
            "import daemon, stages, visiond_mini as m, tests.checker as c\n"
            "print(daemon.__file__, stages.__file__, m.__file__, c.__file__)"
        )
        run = subprocess.run(
            [str(self._python), "-P", "-c", program], cwd="/", capture_output=True, text=True, check=True
        )
        return run.stdout.split()


def failures(text: str) -> Iterator[str]:
    """The names of the tests that failed, or after which a fixture did, from what pytest printed. One whose fixtures fail
    before it has not begun, and noticed nothing."""
    found = re.finditer(r"^(?:FAILED tests/\S*?::|_+ ERROR at teardown of )(\w+)", text, re.MULTILINE)
    yield from (each[1] for each in found)


def is_begun(text: str) -> bool:
    """Whether no fixture failed before its test, from what pytest printed."""
    return not re.search("^_+ ERROR at setup of ", text, re.MULTILINE)
