"""The configuration written out from its own descriptions, so that documents and code cannot disagree:

python -m daemon.config.reference > docs/configuration.md
python -m daemon.config.reference --toml > daemon.toml
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from daemon.config.loading import Config
from stages.registry import STAGES

WIDTH = 110

# Keys that stand in daemon.toml without a comment mark: what one looks for first.
LIVE = {("[[inbox]]", "path"), ("[output]", "results"), ("[output]", "failed"), ("[state]", "path"), ("[http]", "listen")}

KINDS = {"integer": "integer", "number": "number", "boolean": "true or false", "object": "table", "string": "text"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

ABOUT = {
    "[[inbox]]": "A folder to watch. Repeat the table for each further one, with a name each.",
    "[output]": "Where results, reasons of failure and sources go. None of these folders may lie in an inbox.",
    "[state]": "What the daemon keeps for itself. It must be on a local disk.",
    "[upkeep]": "Tasks that keep the ledger in good order over the years. One runs at a time, and none delays incoming images.",
    "[pipeline]": "What is done to an image, where, and within which limits.",
    "[[pipeline.segment]]": """\
Stages and the devices that hold them, when neither of the placements fits. Together the segments hold all
stages, in order:

    [[pipeline.segment]]
    stages = ["ocr", "yolo"]
    devices = ["cuda:0"]

    [[pipeline.segment]]
    stages = ["clip", "blip"]
    devices = ["cuda:1"]
""",
    "[models]": "The weights of all stages, as a pack.",
    "[stages.ocr]": "Where one stage departs from the pack.",
    "[binning]": "When an image goes to bin A (text), else B (objects), else C.",
    "[http]": "The read-only pages for people and machines.",
    "[log]": "The log goes to standard error; under systemd to the journal.",
}


OPTIONS = """\
A backend's own settings are a table, for instance what CLIP tags images with:

```toml
[stages.clip.options]
labels = ["invoice", "handwriting", "street", "portrait"]
template = "a scan of a {}"
top_k = 2
```

Under `[stages.clip]`, `options = { labels = ["invoice", "portrait"] }` does the same in a line. An unknown option is refused.
A pack's manifest may have other defaults than these. After a change the stage answers anew whatever comes in; what is
DONE stays as it is until `visiond redo --stale`."""


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    kind: str  # "integer ≥ 1", "path", …
    limited: bool  # the kind tells more than the default shows: choices or bounds
    default: str | None  # as TOML; empty: none, for one that may be left out; None: the key must be given
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    headers: list[str]  # one, or several that take the same keys
    keys: list[Key]
    about: str


def list_tables() -> list[Table]:
    """Every table of the configuration with every key, in the order of the code."""
    schema = Config.model_json_schema()
    merged: list[Table] = []
    for header, keys in _walk("", schema, schema["$defs"]):
        if merged and merged[-1].keys == keys:
            merged[-1].headers.append(header)
        else:
            merged.append(Table([header], keys, ABOUT.get(header, "")))
    return merged


def list_options() -> list[Table]:
    """What each stage's own backend takes; the fake ones' settings are for tests, and stages/fake.py has them."""
    tables = []
    for stage, described in STAGES.items():
        for name, backend in described.backends.items():
            header, described_options = f"[stages.{stage}.options]", msgspec.json.schema(backend.options)["$defs"]
            schema = described_options[backend.options.__name__]
            about = f"Of backend `{name}`. {schema.get('description', '')}".rstrip()
            tables += [Table([header], keys, about) for _, keys in [*_walk(header, schema, described_options)][:1]]
    return tables


def write_markdown() -> str:
    """docs/configuration.md."""
    parts = [
        "# Configuration",
        "<!-- Made by `python -m daemon.config.reference > docs/configuration.md`; "
        "change daemon/config/sections.py and the stages' descriptor.py instead. -->",
        "visiond reads `daemon.toml`, named by `--config` or `VISIOND_CONFIG`, else the one in the current folder.\n"
        "Every key is optional. Relative paths are relative to the file's folder. A size is a number of bytes or, for\n"
        'example, `"256 MiB"`. An unknown key is refused; `visiond check` tells what is wrong.',
    ]
    for table in list_tables():
        parts += _markdown_table(table, "##")
        if "[stages.clip]" in table.headers:
            parts.append(OPTIONS)
            parts += [part for options in list_options() for part in _markdown_table(options, "###")]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table, mark: str) -> list[str]:
    rows = [f"| `{key.name}` | {_escape(key.kind)} | {_code(key.default)} | {_escape(key.meaning)} |" for key in table.keys]
    heading = f"{mark} " + ", ".join(f"`{header}`" for header in table.headers)
    return [heading, table.about.strip(), "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])]


def write_toml() -> str:
    """daemon.toml: all defaults. Text follows "# "; a line that starts with # and no space is a key to uncomment."""
    parts = [
        _comment(
            "visiond's configuration. Every key is optional; those behind a # stand at their default: take the # away to "
            "change one. Relative paths are relative to this file's folder. The same as tables: docs/configuration.md."
        )
    ]
    for table in list_tables():
        if all(key.default is not None for key in table.keys):
            parts += [_toml_table(table, header) for header in table.headers]
        else:
            parts.append(_comment(table.about))  # without defaults there is nothing to uncomment
    return "\n\n".join(parts) + "\n"


def _toml_table(table: Table, header: str) -> str:
    """One table; of several with the same keys only the first explains them."""
    explains = header == table.headers[0]
    lines = [_comment(table.about)] if explains else []
    lines.append(header)
    for key in table.keys:
        if explains:
            lines.append(_comment(f"{key.meaning} ({key.kind})" if key.limited else key.meaning))
        lines.append(f"{'' if (header, key.name) in LIVE else '#'}{key.name} = {key.default}")
    return "\n".join(lines)


def _walk(header: str, section: dict[str, Any], known: dict[str, Any]) -> Iterator[tuple[str, list[Key]]]:
    """A section's own keys, then the sections in it."""
    path = header.strip("[]")
    keys, below = [], []
    for name, spec in section["properties"].items():
        where = f"{path}.{name}".lstrip(".")
        if target := spec.get("$ref"):
            below.append((f"[{where}]", target))
            continue
        if target := spec.get("items", {}).get("$ref"):
            below.append((f"[[{where}]]", target))
            if not path:  # at the top the tables themselves are what is live
                continue
        spec = spec | next((kind for kind in spec.get("anyOf", ()) if kind["type"] != "null"), {})  # it may be left out
        limited = not spec.keys().isdisjoint({"enum", *BOUNDS})
        keys.append(Key(name, _kind(name, spec), limited, _default(name, spec), spec.get("description", "")))
    if keys:
        yield header, keys
    for inner, target in below:
        yield from _walk(inner, known[target.rpartition("/")[2]], known)


def _figure(number: float) -> str:
    return f"{number:g}" if abs(number) < 1_000_000 else f"{number:,.0f}"


def _kind(name: str, spec: dict[str, Any]) -> str:
    if choices := spec.get("enum", [spec["const"]] if "const" in spec else []):
        return " | ".join(json.dumps(choice) for choice in choices)
    if spec["type"] == "array":
        return "list of tables" if "$ref" in spec["items"] else f"list of {_kind(name, spec['items'])}"
    kind = "path" if spec.get("format") == "path" else "size" if name.endswith("_bytes") else KINDS[spec["type"]]
    if "minimum" in spec and "maximum" in spec:
        return f"{kind} from {_figure(spec['minimum'])} to {_figure(spec['maximum'])}"
    bounds = [
        f" {sign} {_size(spec[bound]) if kind == 'size' else spec[bound]}" for bound, sign in BOUNDS.items() if bound in spec
    ]
    return kind + "".join(bounds)


def _default(name: str, spec: dict[str, Any]) -> str | None:
    if "default" not in spec:
        return None
    if (default := spec["default"]) is None:
        return ""
    if default and name.endswith("_bytes"):
        default = _size(default)
    return "{}" if default == {} else json.dumps(default, ensure_ascii=False)  # what is left looks the same in TOML


def _size(count: int) -> str:
    return f"{count >> 30} GiB" if count % (1 << 30) == 0 else f"{count >> 20} MiB"


def _code(default: str | None) -> str:
    return "must be given" if default is None else f"`{default}`" if default else "–"


def _escape(text: str) -> str:
    """So that Markdown shows it as it is, in a table's cell."""
    return text.replace("<", "\\<").replace("|", "\\|")


def _comment(text: str) -> str:
    """Behind "# ", wrapped; indented lines stay as they are."""
    lines: list[str] = []
    for line in text.strip("\n").split("\n"):
        lines += [line] if line.startswith(" ") or not line else textwrap.wrap(line, WIDTH)
    return "\n".join(f"# {line}".rstrip() for line in lines)


if __name__ == "__main__":
    sys.stdout.write(write_toml() if "--toml" in sys.argv[1:] else write_markdown())
