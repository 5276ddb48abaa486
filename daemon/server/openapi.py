"""The description of the addresses for programs, OpenAPI 3.1. Its schemas come from the types of this file and of the
sidecar."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from daemon import __version__
from daemon.core.sidecar import json_schema
from daemon.ledger.soundness import MOST
from daemon.monitoring.snapshot import Snapshot
from daemon.search.disagreement import SIGNALS, STAGES
from daemon.search.evidence import list_orders

IMAGES, MOST_IMAGES = 100, 256  # in one answer: by default, and at most
LONGEST_WAIT_SECONDS = 60.0
DAY = "^2[01][0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])$"
ORDERS = ("both", "words", "meaning", "newest", *list_orders())
NEAR_DUPLICATES = "^(best|others|[0-9]{1,18})$"
Schema = dict[str, Any]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class Image(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One version of one file. result: the address at which it can be asked for. record: all that its sidecar has; null until
    it is DONE, absent if not asked for. number: of its publication. score: the cosine, if it was found by its
    meaning. probability: that it matches the words; null if the model gives none, so that all images are ranked by their
    score, also those that do not fit. found_by: null if only filters were asked for. disagreement: null without that order."""

    id: int | None
    status: Literal["PENDING", "DONE", "FAILED", "SKIPPED", "GONE"]
    inbox: str
    path: str  # in the inbox
    location: str
    digest: Annotated[str, msgspec.Meta(pattern="^(sha256:[0-9a-f]{64})?$")]
    finished_at: str | None
    result: str
    bin: str | None = None
    reason: str | None = None
    detail: str | None = None
    record: Sidecar | None = None
    number: Natural | None = None
    score: float | None = None
    probability: float | None = None
    found_by: Literal["words", "meaning", "both"] | None = None
    disagreement: Disagreement | None = None


class Disagreement(msgspec.Struct):
    """What disagrees most, of the signals that were asked for: from 0 to 1."""

    signal: Literal[SIGNALS]  # type: ignore[valid-type]
    stage: Literal[STAGES]  # type: ignore[valid-type]
    score: float


class Sidecar(msgspec.Struct):
    """Its schema is that of docs/sidecar.schema.json."""


class Accepted(msgspec.Struct):
    """In the order of the request."""

    images: list[Image]


class Listed(msgspec.Struct):
    """after: for the next request. more: whether there is more already."""

    images: list[Image]
    after: Natural
    more: bool


class Found(msgspec.Struct):
    """following: the address of what comes after these, if something does. problem: why the search by meaning had no part."""

    images: list[Image]
    following: str | None
    problem: str


class Problem(msgspec.Struct):
    """What is wrong, and what to do, in a sentence."""

    problem: str


def make_document(server: str, *, reading_is_free: bool) -> bytes:
    """As JSON. server: the address to which the paths are added. reading_is_free: only uploads need the token."""
    sidecar = msgspec.json.decode(json_schema().replace(b"#/$defs/", b"#/components/schemas/"))["$defs"]
    template = "#/components/schemas/{name}"
    _, types = msgspec.json.schema_components(
        [Accepted, Listed, Found, Problem, Snapshot], ref_template=template
    )
    paths = _paths()
    for path in paths.values() if reading_is_free else ():
        path["get"]["security"] = []
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "visiond",
                "version": __version__,
                "description": "Upload images, and ask for their results.",
            },
            "servers": [{"url": server}],
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "schemas": {name: _with_items(each) for name, each in (types | sidecar).items()}
                | {"Document": {"type": "object"}},
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


def _with_items(schema: Any) -> Any:
    """Generators of clients cannot read `items` that are false, as arrays of a fixed length have them."""
    if isinstance(schema, list):
        return [_with_items(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    items = {"items": schema["prefixItems"][0]} if schema.get("items") is False else {}
    return {key: _with_items(value) for key, value in (schema | items).items()}


def list_parameters(path: str, method: str) -> list[str]:
    """The names that the query of an address may have. path: of its route."""
    described = _paths()[re.sub(r":\w+}", "}", path)][method.lower()]
    return [each["name"] for each in described["parameters"] if each["in"] == "query"]


def _paths() -> Schema:
    number = {"type": "integer", "minimum": 0, "maximum": MOST}
    wait = _parameter(
        "wait", "Seconds to wait for results.", type="number", minimum=0, maximum=LONGEST_WAIT_SECONDS
    )
    limit = _parameter(
        "limit", "Images in the answer.", type="integer", minimum=1, maximum=MOST_IMAGES, default=IMAGES
    )
    records = _parameter("records", "Whether the images have their records.", enum=["true", "false"])
    after = _parameter("after", "A number of a publication; the answer has the next one.", **number)
    path = {"name": "path", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    id = {"name": "id", "in": "path", "required": True, "schema": number}
    search = [*_search_parameters(), _parameter("cursor", "As in `following`.", **number), limit, records]
    listed = "Images in the order of their publication. Each comes once, and again when its result changes."
    by_path = "An image by its path in the folder of results, without .json."
    return {
        "/api/images": {
            "post": _upload(wait),
            "get": _get(listed, "Listed", [after, limit, records], 400, 409),
        },
        "/api/images/{id}": {"get": _get("An image by its number.", "Image", [id], 400, 404)},
        "/api/images/by-path/{path}": {"get": _get(by_path, "Image", [path, wait], 400, 404)},
        "/api/search": {"get": _get("Search as on the page.", "Found", search, 400, 404, 409)},
        "/api/status": {"get": _get("As `visiond status --json`.", "Snapshot", [], 400)},
        "/api/openapi.json": {"get": _get("This description.", "Document", [], 400)},
    }


def _upload(wait: Schema) -> Schema:
    file = {"type": "string", "format": "binary", "minLength": 1}
    form = {"type": "object", "properties": {"file": file}, "required": ["file"]}
    refused = _problems(400, 401, 403, 404, 409, 413, 415, 429, 503)
    for status in ("429", "503"):
        refused[status]["headers"] = {
            "Retry-After": {"schema": {"type": "integer"}, "required": status == "429"}
        }
    return {
        "summary": "Upload images. They are on the disk before the answer.",
        "description": "The body is the file, or a form (multipart/form-data) with files. What it is, is seen by its first "
        "bytes. The same bytes under the same name are one image: a request may be repeated.",
        "parameters": [
            _parameter("name", "The name of the file, if the body is the file.", type="string"),
            _parameter("inbox", "The name of the inbox, if several take uploads.", type="string"),
            wait,
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": file},
                "multipart/form-data": {"schema": form},
            },
        },
        "responses": {
            "200": _answer("All of them have their results.", "Accepted"),
            "202": _answer("They are on the disk, and will be processed.", "Accepted"),
            **refused,
        },
    }


def _search_parameters() -> list[Schema]:
    return [
        _parameter("q", "Words, a sentence, and filters such as bin:A.", type="string"),
        _parameter("by", "What is compared, or what comes first; letters may be capital.", enum=[*ORDERS]),
        *(
            _parameter(name, f"Only this {name}.", type="string")
            for name in ("bin", "inbox", "tag", "object")
        ),
        _parameter("state", "Only these; letters may be capital.", enum=["done", "failed"]),
        *(
            _parameter(name, "A day.", type="string", format="date", pattern=DAY)
            for name in ("after", "before")
        ),
        _parameter(
            "group",
            "Of near-duplicates: only the best ones, all others, or those of the image with this number.",
            type="string",
            pattern=NEAR_DUPLICATES,
        ),
    ]


def _get(summary: str, kind: str, parameters: list[Schema], *statuses: int) -> Schema:
    return {
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": _answer(summary, kind), **_problems(401, *statuses, 503)},
    }


def _parameter(name: str, about: str, **schema: Any) -> Schema:
    return {"name": name, "in": "query", "description": about, "schema": schema}


def _answer(about: str, kind: str) -> Schema:
    schema = {"$ref": f"#/components/schemas/{kind}"}
    return {"description": about, "content": {"application/json": {"schema": schema}}}


ABOUT = {
    400: "The request cannot be understood, or has a parameter that is not described.",
    401: "It needs the token.",
    403: "No inbox takes uploads, or a browser sent it from elsewhere.",
    404: "There is no such image, or inbox.",
    409: "A file of this name has other bytes; nobody has this number yet; or this search cannot be made here.",
    413: "It has too many bytes.",
    415: "Its first bytes are not of an image that can be read.",
    429: "Too much waits already, or the disk is full.",
    503: "The inbox or the ledger cannot be used now.",
}


def _problems(*statuses: int) -> Schema:
    return {str(status): _answer(ABOUT[status], "Problem") for status in statuses}
