"""The sidecar, schema "visiond/1". docs/sidecar.schema.json is generated from these types."""

from __future__ import annotations

import base64
import hashlib
import os
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import msgspec

from daemon.core.jobs import Version
from stages.contract import plugins
from stages.contract.base import Provenance
from stages.contract.binning import Bin
from stages.contract.files import NotAFile, open_file
from stages.registry.registry import BUILT_IN, STAGES, decode, kind_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCHEMA = "visiond/1"
# Of results, in their order; those of other stages have their names.
KEYS = {stage.name: stage.key for stage in BUILT_IN}
LONGEST_NAME = 255  # bytes, of every common file system
TIMINGS = "By stage: the seconds of the batch that the image was in, divided by its images; as measured when the model ran."


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The file. `path_base64` if its name is not UTF-8; size, format and, if several, `pages` if it could be read."""

    inbox: str  # its folder, absolute
    path: str  # in the inbox
    path_base64: str = ""
    bytes: int
    digest: str = ""  # "sha256:…"
    width: int = 0  # pixels of the upright image
    height: int = 0
    format: str = ""  # "JPEG", "PNG", …
    pages: int = 1  # pictures in the file, of which one was read; at most 10,000 are counted
    seen_at: str  # RFC 3339, UTC


class SecondLook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The answer of a second model. `result` has the same form as that of its stage; if it is null, `reason` and
    `detail` describe the error."""

    stage: str
    model: str  # fingerprint
    notice: str = ""  # about the model
    provenance: Provenance = Provenance()  # of the model
    result: msgspec.Raw
    seconds: float = 0.0  # as in `timings`
    reason: str = ""
    detail: str = ""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A result; or, in the failed folder, `status`, `reason`, `detail` and `attempts` instead of one."""

    schema: str
    id: int  # its number in the ledger
    source: Source
    notice: str = ""  # about the models, for example that they are a demonstration
    # Each stage's result follows, under its key.
    bin: Bin | None = None
    timings: Annotated[dict[str, float], msgspec.Meta(description=TIMINGS)] = {}
    models: dict[str, str] = {}  # stage → fingerprint of the model
    provenance: dict[str, Provenance] = {}  # stage → what the model is, as far as it was known
    second_looks: dict[str, SecondLook] = {}  # by the look's name
    status: str = ""
    reason: str = ""
    detail: str = ""
    attempts: int = 0
    finished_at: str | None = None


class ParsedSidecar(NamedTuple):
    """A sidecar, and parts of it as JSON: the results by stage, and the criteria of its bin."""

    sidecar: Sidecar
    results: dict[str, bytes]
    criteria: bytes


def parse_sidecar(data: bytes) -> ParsedSidecar:
    """Raises ValueError or KeyError if the bytes are not a sidecar. Results of plug-ins may be anything."""
    sidecar = msgspec.json.decode(data, type=Sidecar)
    parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    keys = {stage: KEYS.get(stage, stage) for stage in sidecar.models}
    if strange := parts.keys() - {*Sidecar.__struct_fields__} - {*keys.values()}:
        raise ValueError(f"unknown field: {min(strange)}")
    results = {stage: bytes(parts[key]) for stage, key in keys.items()}
    looks = [(look.stage, bytes(look.result)) for look in sidecar.second_looks.values() if not look.reason]
    for stage, result in (*results.items(), *looks):
        # The type of a plug-in's result may differ in a later version.
        if STAGES.get(kind_of(stage)) in BUILT_IN:
            decode(stage, result)
    is_done = not sidecar.status
    criteria = (
        bytes(msgspec.json.decode(parts["bin"], type=dict[str, msgspec.Raw])["criteria"]) if is_done else b""
    )
    return ParsedSidecar(sidecar, results, criteria)


class NamedVersion(Protocol):
    """A version of a file."""

    @property
    def path(self) -> bytes: ...  # relative to the inbox
    @property
    def version(self) -> Version: ...
    @property
    def seen_at(self) -> float: ...


class Described(Protocol):
    """What is known about its bytes."""

    @property
    def digest(self) -> bytes: ...
    @property
    def format(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def pages(self) -> int: ...


def describe_source(inbox: bytes, image: NamedVersion, content: Described) -> dict[str, Any]:
    """The sidecar's `source`. inbox: its folder."""
    source: dict[str, Any] = {
        "inbox": inbox.decode(errors="replace"),
        "path": image.path.decode(errors="replace"),
    }
    if source["path"].encode() != image.path:
        source["path_base64"] = base64.b64encode(image.path).decode()
    source["bytes"] = image.version.size
    if content.digest:
        source["digest"] = f"sha256:{content.digest.hex()}"
    if content.width:
        source |= {"width": content.width, "height": content.height, "format": content.format}
    if content.pages > 1:
        source["pages"] = content.pages
    source["seen_at"] = timestamp(image.seen_at)
    return source


def path_of(source: Source) -> bytes:
    """The file's path in its inbox."""
    return base64.b64decode(source.path_base64) or source.path.encode()


def unpack_embedding(text: str, dtype: str) -> NDArray[np.floating[Any]]:
    """The values of an embedding: `base64` and `dtype` of the answer."""
    import numpy as np

    return np.frombuffer(base64.b64decode(text), "<f2" if dtype == "float16" else "<f4")


@lru_cache(64)  # images that were admitted or finished together have the same timestamp
def timestamp(seconds: float) -> str:
    """Unix seconds as RFC 3339 in UTC, cut to milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def json_schema() -> bytes:
    """The JSON Schema (2020-12) of a sidecar, with the results of all stages that are installed."""
    fields: list[Any] = [
        (field.name, field.type, _default_of(field)) for field in msgspec.structs.fields(Sidecar)
    ]
    fields = [field if field[2] is not msgspec.NODEFAULT else field[:2] for field in fields]
    place = Sidecar.__struct_fields__.index("bin")
    results = [(stage.key, stage.result | None, None) for stage in STAGES.values()]
    whole = msgspec.defstruct(
        "Sidecar",
        [*fields[:place], *results, *fields[place:]],
        kw_only=True,
        omit_defaults=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": Sidecar.__doc__},
    )
    schema = msgspec.json.schema(whole)
    for stage in STAGES.values():
        if stage.has_variants:
            pattern = f"^{stage.name}_{plugins.NAME.pattern}$"
            patterns = schema["$defs"]["Sidecar"].setdefault("patternProperties", {})
            patterns[pattern] = {"$ref": f"#/$defs/{stage.result.__name__}"}
    for kind in schema["$defs"].values():  # a description is a docstring, with its line breaks
        if "description" in kind:
            kind["description"] = " ".join(kind["description"].split())
    return (
        msgspec.json.format(
            msgspec.json.encode({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
        )
        + b"\n"
    )


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    return (
        field.default
        if field.default_factory is msgspec.NODEFAULT
        else msgspec.field(default_factory=field.default_factory)
    )


if __name__ == "__main__":
    print(json_schema().decode(), end="")


def sidecar_paths(folder: bytes, path: bytes, suffix: bytes = b".json") -> tuple[bytes, bytes]:
    """<folder>/<path>.json, or with another suffix, in which a name that is too long is cut and ends in a digest of the whole
    path; and, if that cannot be written, a digest of the path at the top of `folder`."""
    head, name = os.path.split(path)
    digest = hashlib.sha256(path).hexdigest().encode()
    sidecar = name + suffix
    if len(sidecar) > LONGEST_NAME:
        mark = b"~" + digest[:16] + suffix
        sidecar = cut_name(name, LONGEST_NAME - len(mark)) + mark
    return os.path.join(folder, head, sidecar), os.path.join(folder, b"~" + digest + suffix)


def cut_name(name: bytes, length: int) -> bytes:
    """The start of a name, at most this number of bytes; UTF-8 is not cut within a character."""
    if len(name) <= length:
        return name
    while length > 0 and name[length] & 0xC0 == 0x80:
        length -= 1
    return name[:length]


class _Reason(msgspec.Struct):
    source: Source


def is_reason_of(path: bytes, file: bytes) -> bool:
    """Whether a file is the reason of the image with this path in its inbox: another image may have the same name as its
    second name. Raises FileNotFoundError."""
    try:
        with open_file(file) as opened:
            source = msgspec.json.decode(opened.read(), type=_Reason).source
    except (NotADirectoryError, IsADirectoryError, NotAFile, msgspec.DecodeError):
        return False
    return path_of(source) == path
