"""Writes the reference of the configuration from the descriptions in the code, so that the two always agree:

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
from daemon.config.reloading import is_live
from daemon.config.sections import Section
from stages.registry.registry import STAGES

WIDTH = 110

# Keys that are not commented out in daemon.toml: those that users look for first.
LIVE = {
    ("[[inbox]]", "path"),
    ("[output]", "results"),
    ("[output]", "failed"),
    ("[state]", "path"),
    ("[http]", "listen"),
}

KINDS = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "object": "table",
    "string": "text",
}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

ABOUT = {
    "[[inbox]]": "A folder to watch. For more folders repeat the table, each with its own name.",
    "[output]": "Folders for results, failed images and moved images. None of them may be inside an inbox.",
    "[output.webhook]": "The sink webhook, if output.sinks names it. docs/sinks.md describes what it posts.",
    "[output.store]": "The sink store, if output.sinks names it. docs/stores.md describes what it uploads.",
    "[unpacking]": "How files of the kinds in [[inbox]] unpack are unpacked; docs/archives.md explains it.",
    "[state]": "The daemon's own files. They must be on a local disk.",
    "[upkeep]": "Scheduled maintenance of the ledger. One task runs at a time, and none delays incoming images.",
    "[pipeline]": "The stages, the devices that run them, and limits.",
    "[[pipeline.segment]]": """\
An explicit placement, if neither "replicated" nor "pipelined" fits. Together the segments have all stages, in
order:

    [[pipeline.segment]]
    stages = ["ocr", "yolo"]
    devices = ["cuda:0"]

    [[pipeline.segment]]
    stages = ["clip", "blip"]
    devices = ["cuda:1"]

A model that is too large for one GPU lies on a group of them: `devices = ["cuda:1+cuda:2"]` is one worker,
which spreads its model over both. docs/models.md has more about groups.
""",
    "[models]": "The pack: the weights of all stages.",
    "[stages.ocr]": "Settings of one stage that differ from the pack.",
    "[binning]": "The rule for bins: A (text) if any of its criteria passes, else B (objects), else C.",
    "[[second_look]]": """\
A second model for some images, after their first results; docs/second-looks.md explains it. For example:

    [[second_look]]
    name = "detailed"
    when = "C"
    stage = "blip"
    model = "smolvlm2-2.2b"
    devices = ["cuda:1"]
""",
    "[http]": "The read-only pages: metrics, health and status.",
    "[page]": "The page with images, search and results: a process of its own.",
    "[search]": "What `visiond search`, the page and /api/search find.",
    "[traces]": "Traces by OpenTelemetry: where the time of one image goes. docs/monitoring.md explains them.",
    "[log]": "The log goes to standard error; with systemd, to the journal.",
}


OPTIONS = """\
Each backend has its own options. For example the labels that CLIP tags images with:

```toml
[stages.clip.options]
labels = ["invoice", "handwriting", "street", "portrait"]
template = "a scan of a {}"
top_k = 2
```

`options = { labels = ["invoice", "portrait"] }` under `[stages.clip]` does the same in one line. An unknown option is refused.
The manifest of a pack can set other defaults than these. After a change, the stage runs again for all new images; images that
are DONE keep their results until `visiond redo --stale`."""


@dataclass(frozen=True, slots=True)
class TomlKey:
    name: str
    kind: str  # "integer ≥ 1", "path", …
    limited: bool  # the kind has choices or bounds
    default: str | None  # as TOML; "": no default, but optional; None: required
    meaning: str


@dataclass(frozen=True, slots=True)
class TomlTable:
    headers: list[str]  # one, or several that take the same keys
    keys: list[TomlKey]
    about: str


def list_tables() -> list[TomlTable]:
    """Every table and key of the configuration, in the order of the code."""
    schema = Config.model_json_schema()
    tables = {Config.__name__: schema, **schema["$defs"]}
    for section in Section.__subclasses__():
        for key, text in section.about().items():
            tables[section.__name__]["properties"][key]["description"] = text
    merged: list[TomlTable] = []
    for header, keys in _walk("", schema, schema["$defs"]):
        if merged and merged[-1].keys == keys:
            merged[-1].headers.append(header)
        else:
            merged.append(TomlTable([header], keys, ABOUT.get(header, "")))
    return merged


def list_options() -> list[TomlTable]:
    """The options of every backend, except the fake ones, which are for tests (stages/registry/fake.py)."""
    tables = []
    for stage, described in STAGES.items():
        header = f"[stages.{stage}.options]"
        by_type: dict[type[msgspec.Struct], list[str]] = {}
        for name, backend in described.backends.items():
            by_type.setdefault(backend.options, []).append(f"`{name}`")
        for kind, names in by_type.items():
            described_options = msgspec.json.schema(kind)["$defs"]
            schema = described_options[kind.__name__]
            backends = f"the backend{'s' * (len(names) > 1)} {' and '.join(names)}"
            about = f"Options of {backends}. {schema.get('description', '')}".rstrip()
            tables += [
                TomlTable([header], keys, about)
                for _, keys in [*_walk(header, schema, described_options)][:1]
            ]
    return tables


def write_markdown() -> str:
    """docs/configuration.md."""
    parts = [
        "# Configuration",
        "<!-- Generated by `python -m daemon.config.reference > docs/configuration.md`; "
        "change the tables in daemon/config/ and the stages' descriptor.py instead. -->",
        "visiond reads the file that `--config` or `VISIOND_CONFIG` names, or else `daemon.toml` in the current folder.\n"
        "Every key is optional. Relative paths are relative to the file's folder. A size is a number of bytes or text\n"
        'such as `"256 MiB"`. An unknown key is refused; `visiond check` lists all problems.',
        "Commands that read it once also take what a shell passes: `visiond check --config <(envsubst < daemon.toml)`, or\n"
        "`--config /dev/stdin`. Relative paths are then relative to the current folder. `run` without `--once`, `setup` and\n"
        "`tune` need a file, which they read again or change.",
        "In paths, `~`, `$NAME` and `${NAME}` are replaced from the environment of the process that reads the file; `$$` is a\n"
        "dollar sign. A variable that is not set, or empty, is refused. The file is UTF-8, with or without a byte order mark.",
        "A variable of the environment sets a key too, and wins over the file: `VISIOND_PIPELINE__DRAIN_SECONDS=60`, with\n"
        "two underscores between table and key, or `VISIOND_STAGES__CLIP__MODEL`. Text and numbers have no quotes, lists\n"
        'are as in the file: `VISIOND_PIPELINE__STAGES=\'["ocr", "yolo"]\'`. With `_FILE` behind its name it names a file\n'
        "with the value, as containers pass secrets: `VISIOND_OUTPUT__WEBHOOK__URL_FILE=/run/secrets/webhook`. A name\n"
        "that is no key is refused. The tables `[[inbox]]`, `[[second_look]]` and `[[pipeline.segment]]` are only in the\n"
        "file. `visiond check` and the page say which keys come from variables. A reload reads the named files again.\n"
        "Commands need the daemon's variables to find its folders; `docker compose exec` passes them.",
        "A key with ↻ can change while the daemon works: `systemctl reload visiond` or `visiond reload` reads the file again.\n"
        "All other keys change at the next start. [Reload](operations.md#reload) has the details.",
    ]
    for table in list_tables():
        parts += _markdown_table(table, "##")
        if "[stages.clip]" in table.headers:
            parts.append(OPTIONS)
            parts += [part for options in list_options() for part in _markdown_table(options, "###")]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: TomlTable, mark: str) -> list[str]:
    path = table.headers[0].strip("[]")
    rows = [
        f"| `{key.name}`{' ↻' * is_live(path, key.name)} | {_escape(key.kind)} "
        f"| {_code(key.default)} | {_escape(key.meaning)} |"
        for key in table.keys
    ]
    heading = f"{mark} " + ", ".join(f"`{header}`" for header in table.headers)
    return [
        heading,
        table.about.strip(),
        "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]),
    ]


def write_toml() -> str:
    """daemon.toml with all defaults. Text follows "# "; a key to uncomment follows "#"."""
    parts = [
        _comment(
            "Configuration of visiond. Every key is optional. A key behind a # shows its default; remove the # to change it. "
            "Relative paths are relative to this file's folder. The same keys as tables: docs/configuration.md."
        )
    ]
    for table in list_tables():
        if all(key.default is not None for key in table.keys):
            parts += [_toml_table(table, header) for header in table.headers]
        else:
            parts.append(_comment(table.about))  # without defaults there are no keys to uncomment
    return "\n\n".join(parts) + "\n"


def _toml_table(table: TomlTable, header: str) -> str:
    """One table. Of several tables with the same keys, only the first has comments."""
    explains = header == table.headers[0]
    lines = [_comment(table.about)] if explains else []
    lines.append(header)
    for key in table.keys:
        if explains:
            lines.append(_comment(f"{key.meaning} ({key.kind})" if key.limited else key.meaning))
        lines.append(f"{'' if (header, key.name) in LIVE else '#'}{key.name} = {key.default}")
    return "\n".join(lines)


def _walk(header: str, section: dict[str, Any], known: dict[str, Any]) -> Iterator[tuple[str, list[TomlKey]]]:
    """A section's keys, then its sub-sections."""
    path = header.strip("[]")
    keys, below = [], []
    for name, spec in section["properties"].items():
        where = f"{path}.{name}".lstrip(".")
        if target := spec.get("$ref"):
            below.append((f"[{where}]", target))
            continue
        if target := spec.get("items", {}).get("$ref"):
            below.append((f"[[{where}]]", target))
            if not path:  # at the top level the tables themselves are not commented out
                continue
        # An optional key: use its other type.
        spec = spec | next((kind for kind in spec.get("anyOf", ()) if kind.get("type") != "null"), {})
        limited = not spec.keys().isdisjoint({"enum", *BOUNDS})
        keys.append(
            TomlKey(name, _kind(name, spec), limited, _default(name, spec), spec.get("description", ""))
        )
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
    kind = (
        "path" if spec.get("format") == "path" else "size" if name.endswith("_bytes") else KINDS[spec["type"]]
    )
    if "minimum" in spec and "maximum" in spec:
        return f"{kind} from {_figure(spec['minimum'])} to {_figure(spec['maximum'])}"
    bounds = [
        f" {sign} {_size(spec[bound]) if kind == 'size' else spec[bound]}"
        for bound, sign in BOUNDS.items()
        if bound in spec
    ]
    return kind + "".join(bounds)


def _default(name: str, spec: dict[str, Any]) -> str | None:
    if "default" not in spec:
        return None
    if (default := spec["default"]) is None:
        return ""
    if default and name.endswith("_bytes"):
        default = _size(default)
    # All other defaults look the same in TOML.
    return "{}" if default == {} else json.dumps(default, ensure_ascii=False)


def _size(count: int) -> str:
    return f"{count >> 30} GiB" if count % (1 << 30) == 0 else f"{count >> 20} MiB"


def _code(default: str | None) -> str:
    return "required" if default is None else f"`{default}`" if default else "–"


def _escape(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return text.replace("<", "\\<").replace("|", "\\|")


def _comment(text: str) -> str:
    """Wrap text into comment lines; indented lines are not wrapped."""
    lines: list[str] = []
    for line in text.strip("\n").split("\n"):
        lines += [line] if line.startswith(" ") or not line else textwrap.wrap(line, WIDTH)
    return "\n".join(f"# {line}".rstrip() for line in lines)


if __name__ == "__main__":
    sys.stdout.write(write_toml() if "--toml" in sys.argv[1:] else write_markdown())
