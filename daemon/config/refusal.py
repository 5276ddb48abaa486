"""Explains why a key of the configuration is refused: a sentence with the place and what to write instead.

pydantic finds the problem, but its own messages have neither the key's limits nor an example.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from daemon.config.sections import Section
from daemon.config.values import OUT_OF_RANGE, most_of
from stages.registry.registry import PROBLEMS, STAGES, kind_of

WANTED = {
    "path_type": "a path in quotes",
    "string_type": "text in quotes",
    "list_type": "a list in square brackets",
    "model_type": "a table",
    "dict_type": "a table",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}
GONE = {  # keys of earlier versions, and why nobody needs them
    "pipeline.numa": "the workers of a GPU always run on the cores of its NUMA node",
    "pipeline.queue_images": "slab_bytes says how many images are in flight",
}
RENAMED = {"pipeline.stations": "executors"}
NO_NUMBER = {  # or not within the key's limits
    "int_type", "int_parsing", "int_parsing_size", "int_from_float", "float_type", "float_parsing", "finite_number",
    "greater_than", "greater_than_equal", "less_than", "less_than_equal", OUT_OF_RANGE,
}  # fmt: skip
PARSERS = "function-before[_parse_bytes(), int]"  # added by pydantic to the location of a key with a parser
ALIKE = 0.8  # names, by difflib
MOST_TABLES = 3  # that a sentence names
TABLES = ("inbox", "segment")  # lists of tables


def explain(problem: Mapping[str, Any], root: type[Section]) -> str:
    """A sentence for one problem of pydantic's. root: the model of the whole configuration."""
    location = [part for part in problem["loc"] if part != PARSERS]
    where = ".".join(f"[{part}]" if isinstance(part, int) else part for part in location).replace(".[", "[")
    kind, field = problem["type"], _field_at(root, location)
    if kind == "extra_forbidden":
        return f"{where}: {_explain_unknown(root, location, where)}"
    if kind == "missing":
        about = _section_at(root, location[:-1]).about().get(location[-1], "")
        return f"{where}: this key is missing. {about}".rstrip()
    if kind == "list_type" and location[-1] in TABLES:
        return f"{where}: each entry is a separate table; write [[{where}]] with double brackets."
    if kind == "too_short":
        return f"{where}: this list is empty; {_fill(where, field)}"
    wanted = _describe_wanted(problem, field, str(location[-1]))
    is_address = str(location[-1]).endswith(("url", "endpoint"))  # which may have a password
    said = "" if is_address else _say(problem["input"], wanted)
    return f"{where}: {wanted}{said}"


def _say(value: object, wanted: str) -> str:
    """The value, unless the sentence about what is wanted begins with it, or is about a whole table."""
    if wanted.startswith('"') or isinstance(value, Mapping):
        return ""
    return f" (it is {_show(value)})"


def _show(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of too many digits"


def _describe_wanted(problem: Mapping[str, Any], field: FieldInfo | None, key: str) -> str:
    kind = problem["type"]
    if kind in NO_NUMBER and field:
        return f"write {_describe_number(key, field)}"
    if kind == "literal_error":
        return "write " + str(problem["ctx"]["expected"]).replace("'", '"')
    return f"write {WANTED[kind]}" if kind in WANTED else str(problem["msg"]).removeprefix("Value error, ")


def _describe_number(name: str, field: FieldInfo) -> str:
    """The kind of number, its limits, and the default as an example."""
    limits = {
        key: getattr(part, key) for part in field.metadata for key in ("gt", "ge", "le") if hasattr(part, key)
    }
    most = min(limits.get("le", most_of(name)), most_of(name))
    if name.endswith("_bytes"):
        least = f'from "{limits["ge"] >> 20} MiB" to' if "ge" in limits else "up to"
        return f'a number of bytes {least} "{most >> 30} GiB", for example "4 GiB"'
    kind = "a whole number" if field.annotation is int else "a number"
    reach = (
        f"above {limits['gt']:_}, at most {most:_}"
        if "gt" in limits
        else f"from {limits['ge']:_} to {most:_}"
    )
    example = "" if field.is_required() else f", for example {field.default}"
    return f"{kind} {reach}{example}"


def _fill(where: str, field: FieldInfo | None) -> str:
    if where in TABLES:
        return f"write a [[{where}]] table, or remove the key."
    example = field.get_default() if field and not field.is_required() else None
    return f"name at least one{f', for example {example}' if example else ''}.".replace("'", '"')


def explain_missing_stage(name: str) -> str:
    """Why a configured stage is not available."""
    kind, line, variant = name.partition("_")
    if line and kind in STAGES and not STAGES[kind].has_variants:
        return f'the stage {kind} runs only once; write "{kind}" in place of "{name}".'
    if line and kind in STAGES:
        return (
            f'"{variant}" cannot stand behind {kind}_: write a lowercase letter, and then lowercase letters and digits, for '
            f"example {kind}_second."
        )
    near = difflib.get_close_matches(name, STAGES, n=1, cutoff=0.6)
    hint = (
        f'did you mean "{near[0]}"?'
        if near
        else f"available are {', '.join(STAGES)}. Install its plug-in, or remove it from the configuration."
    )
    return PROBLEMS.get(name) or PROBLEMS.get(kind) or f'no stage "{name}" is installed; {hint}'


def _explain_unknown(root: type[Section], location: Sequence[Any], where: str) -> str:
    """With the most similar known key, the table that it belongs to, or all known keys."""
    if len(location) == 2 and location[0] == "stages":
        return explain_missing_stage(location[1])
    if where in GONE:
        return f"this key is gone: {GONE[where]}. Remove it."
    if where in RENAMED:
        return f"this key is called {RENAMED[where]} now."
    name, known = str(location[-1]), list(_section_at(root, location[:-1]).model_fields)
    cutoff = 1.0 if difflib.get_close_matches(name, known, cutoff=ALIKE) else ALIKE
    if elsewhere := _say_where(root, name, cutoff):
        return f"unknown key here; {elsewhere}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else f"known keys are {', '.join(known)}."
    return f"unknown key; {hint}"


def _say_where(root: type[Section], name: str, cutoff: float) -> str:
    """In which tables there is a key of this name, or of the one that is most like it; empty if in none."""
    places = list(_walk(root))
    near = difflib.get_close_matches(name, [key for key, _, _ in places], n=1, cutoff=cutoff)
    found = {header: field for key, header, field in places if key in near}
    if not found:
        return ""
    headers, [field, *_] = [*found][:MOST_TABLES], found.values()
    if not field:
        return f"write {headers[0]}."
    example = _make_example(field)
    return f"write it under {' or '.join(headers)}{f', for example {near[0]} = {example}' * bool(example)}."


def _walk(section: type[Section], path: str = "") -> Iterator[tuple[str, str, FieldInfo | None]]:
    """Each key of these tables, with the header of its table; of a table, its own header, and no field."""
    for key, field in section.model_fields.items():
        inner = next(iter(getattr(field.annotation, "__args__", ())), field.annotation)
        place = f"{path}{key}"
        if isinstance(inner, type) and issubclass(inner, Section):
            header = f"[{place}]" if inner is field.annotation else f"[[{place}]]"
            yield key, header, None
            ours = f"{place}."
            yield from (
                (name, within if within else header, each) for name, within, each in _walk(inner, ours)
            )
        else:
            yield key, "", field


def _make_example(field: FieldInfo) -> str:
    """A value as TOML: the default, or a list of the first choice; empty if neither says anything."""
    if field.is_required():
        return ""
    value = field.get_default()
    if value == []:
        [kind, *_] = getattr(field.annotation, "__args__", [None])
        value = [*getattr(kind, "__args__", ())][:1]
    return json.dumps(value, default=str) if value else ""


def _section_at(root: type[Section], location: Sequence[Any]) -> type[Section]:
    """The model of the table at this place in the document."""
    model: Any = root
    for part in location:
        if isinstance(part, str):
            fields = model.model_fields  # a table of a variant is like that of its stage
            annotation = fields[part if part in fields else kind_of(part)].annotation
            model = next(iter(getattr(annotation, "__args__", ())), annotation)
    found: type[Section] = model
    return found


def _field_at(root: type[Section], location: Sequence[Any]) -> FieldInfo | None:
    """The field of a key; None for an entry of a list."""
    if not isinstance(location[-1], str):
        return None
    return _section_at(root, location[:-1]).model_fields.get(location[-1])
