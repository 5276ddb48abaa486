"""The rules of this code base that a program can check: the direction of imports,
and the length of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "torchvision", "torchcodec", "transformers", "ultralytics", "cv2", "opentelemetry"}
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
MOST_BRANCHES = 15
MOST_IMPORTS = 15  # of the project's own modules by one file
# Files with more of them today. The figures may only sink: mend or remove an entry when it does.
IMPORTS = {
    "daemon.cli.check": 16,
    "daemon.cli.commands": 17,
    "daemon.ledger.records": 16,
    "daemon.pipeline.child": 21,
    "daemon.pipeline.coordinator": 16,
    "daemon.service.lifecycle": 21,
    "daemon.service.wiring": 25,
    "visiond.cluster.reading.unpacking": 17,
}
# Of the whole. These may only sink too.
MEASURES = {
    "rooms": 46,
    "arrows": 313,
    "functions with over ten branches": 61,
    "names of several classes": 13,
}


MINI = "visiond_mini"  # the distribution beside visiond that makes the mini pack
TRAINING = "visiond.training"  # a process of its own, with models: the daemon never imports it
PACKAGES = {"daemon": ROOT, "stages": ROOT, "visiond": ROOT, MINI: ROOT / "minipack"}


def name_of(file: Path, place: Path) -> str:
    parts = file.relative_to(place).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(file, place): file
    for package, place in PACKAGES.items()
    for file in sorted((place / package).rglob("*.py"))
}


@cache
def parse(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(parse(module)))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every module that import statements among these nodes name. `from x import y` may name two: x, and x.y."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not the
    bodies of functions or code for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from executed(child)


def package_of(name: str) -> str:
    return name.partition(".")[0]


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and for type checkers count too."""
    graph = {module: set(imported(nodes_of(module))) & MODULES.keys() - {module} for module in MODULES}
    assert sum(map(len, graph.values())) > len(MODULES)
    assert find_cycle(graph) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def room_of(module: str) -> str:
    """The folder of a module; a file next to the folders counts as a separate one."""
    is_folder = MODULES[module].name == "__init__.py"
    folder = module if is_folder else module.rpartition(".")[0]
    return module if folder in ("daemon", "stages") else folder


@cache
def rooms() -> dict[str, set[str]]:
    """Each, and those that it imports: an arrow to each."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        named = set(imported(nodes_of(module))) & MODULES.keys()
        # `from folder import module` names the folder too.
        faces = {name for name in named if any(other.startswith(f"{name}.") for other in named)}
        graph.setdefault(room_of(module), set()).update(
            {room_of(name) for name in named - faces} - {room_of(module)}
        )
    return graph


def test_no_rooms_import_each_other() -> None:
    """A folder's modules may import each other, and of the other folders only those that do not need them."""
    assert len(rooms()) > 30
    assert find_cycle(rooms()) == []


def test_no_folder_has_too_many_files() -> None:
    counts = Counter(file.parent for file in MODULES.values() if file.name != "__init__.py")
    assert {str(folder) for folder, count in counts.items() if count > 16} == set()


def test_stages_do_not_know_the_daemon() -> None:
    named = {
        (module, name)
        for module in MODULES
        if package_of(module) == "stages"
        for name in imported(nodes_of(module))
    }
    assert named
    assert {(module, name) for module, name in named if package_of(name) == "daemon"} == set()


def test_only_one_command_knows_how_the_mini_pack_is_made() -> None:
    """Visiond runs without that distribution, which knows nothing of the daemon: of visiond only the trainer."""
    knowing = {
        module
        for module in MODULES
        for name in imported(nodes_of(module))
        if package_of(name) == MINI != package_of(module)
    }
    assert knowing == {"daemon.cli.models"}
    made_with = {package_of(n) for m in MODULES if package_of(m) == MINI for n in imported(nodes_of(m))}
    assert made_with & PACKAGES.keys() == {"stages", "visiond", MINI}


def test_the_daemon_imports_no_models() -> None:
    named = {
        (module, package_of(name))
        for module in MODULES
        if package_of(module) not in ("stages", MINI) and not module.startswith(TRAINING)
        for name in imported(executed(parse(module)))
    }
    assert named
    assert {(module, package) for module, package in named if package in HEAVY} == set()


def test_code_that_runs_at_import_is_distinguished_from_code_that_does_not() -> None:
    source = """
if TYPE_CHECKING:
    import a
def function():
    import b
try:
    import c
except ImportError:
    from d import e
class Class:
    import f
"""
    assert set(imported(executed(ast.parse(source)))) == {"c", "d", "d.e", "f"}


def loaded_by(module: str) -> set[str]:
    """The packages of others that a module imports, and that those of ours import which it imports."""
    ours, packages, waiting = set[str](), set[str](), [module]
    while waiting:
        ours.add(current := waiting.pop())
        named = set(imported(executed(parse(current))))
        waiting += named & MODULES.keys() - ours
        packages |= {package_of(name) for name in named} - PACKAGES.keys()
    return packages


def test_processes_that_start_often_load_no_library_that_they_do_not_need() -> None:
    """Each of these libraries takes as long as everything else that such a process does before its work."""
    assert "pydantic" in loaded_by("daemon.pipeline.child")
    assert "pydantic" not in loaded_by("daemon.search.grouping")
    assert "transformers" in loaded_by("stages.ocr.stage")
    assert "transformers" not in loaded_by("stages.yolo.stage")


def test_the_daemon_and_its_commands_load_no_torch() -> None:
    modules = "daemon.service.lifecycle, daemon.pipeline.child, daemon.cli.commands"
    modules += ", daemon.labels.reading, visiond.training.launch"  # what commands import when they are called
    program = f"import sys, {modules}; print(*({HEAVY!r} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.split() == []


def test_python_is_started_in_one_way_so_that_no_child_takes_code_from_the_working_directory() -> None:
    named = {
        module
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and node.attr == "executable"
    }
    assert named == {"stages.contract.processes"}


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    return (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0


def test_files_fit_on_a_few_screens() -> None:
    lengths = {module: len(file.read_text().splitlines()) for module, file in MODULES.items()}
    assert {module: length for module, length in lengths.items() if length > LONGEST_FILE} == {}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in MODULES:
        for node in nodes_of(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", node


def test_functions_fit_on_a_screen() -> None:
    """Lines of docstrings do not count."""
    lengths = Counter[str]()
    for name, node in functions():
        length = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)
        lengths[name] = max(lengths[name], length)
    assert len(lengths) > len(MODULES)
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def count_branches(function: ast.AST) -> int:
    """As McCabe, and each `and`, `or`, comprehension and condition of one counts too."""
    total = 1
    for node in ast.walk(function):
        match node:
            case ast.BoolOp():
                total += len(node.values) - 1
            case ast.comprehension():
                total += 1 + len(node.ifs)
            case (
                ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While() | ast.ExceptHandler()
                | ast.Assert() | ast.match_case()
            ):  # fmt: skip
                total += 1
    return total


def test_functions_have_few_branches() -> None:
    branches = Counter[str]()
    for name, node in functions():
        branches[name] = max(branches[name], count_branches(node))
    assert {name: count for name, count in branches.items() if count > MOST_BRANCHES} == {}


def test_branches_are_counted() -> None:
    assert count_branches(ast.parse("return 1")) == 1
    assert count_branches(ast.parse("if a and b or c:\n    x\nelif d:\n    y")) == 5
    assert count_branches(ast.parse("for a in [b for c in d if e]:\n    assert f if g else h")) == 6


def test_an_inbox_notes_itself_what_the_watcher_finds() -> None:
    """`Folder` has methods for that: nobody else assigns to its attributes."""
    assigned = [
        f"{module}:{node.lineno}"
        for module in MODULES
        for node in nodes_of(module)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "folder"
    ]
    assert assigned == []


def test_files_import_few_others() -> None:
    """Imports inside functions and for type checkers do not count."""
    named = {module: set(imported(parse(module).body)) & MODULES.keys() - {module} for module in MODULES}
    assert {module: len(names) for module, names in named.items() if len(names) > MOST_IMPORTS} == IMPORTS


def test_the_house_gets_no_more_crowded() -> None:
    classes = Counter(
        node.name for module in MODULES for node in nodes_of(module) if isinstance(node, ast.ClassDef)
    )
    public = [name for name in classes if not name.startswith("_")]
    assert {
        "rooms": len(rooms()),
        "arrows": sum(map(len, rooms().values())),
        "functions with over ten branches": sum(count_branches(node) > 10 for _, node in functions()),
        "names of several classes": sum(classes[name] > 1 for name in public),
    } == MEASURES
