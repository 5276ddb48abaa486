"""What the search knows of an image: its words, by field, and its marks, which filters ask for."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from daemon.core.jobs import JobStatus
from daemon.core.sidecar import unpack_embedding
from daemon.ledger.record import Record
from stages.contract.binning import likely_tags, text_of
from stages.registry.registry import kind_of

MOST_WORDS = 100_000  # characters of each field that are indexed
FIELDS = ("text", "caption", "tags", "objects", "name")

# Scripts that are written without spaces: Han, Hiragana, Katakana, Hangul, Thai, Lao, Khmer, Myanmar.
UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff])"
)


@dataclass
class Document:
    """One image. fields: its words. marks: what filters ask for, as in `mark`. embeddings: by stage."""

    number: int
    fields: dict[str, str] = field(default_factory=lambda: dict.fromkeys(FIELDS, ""))
    marks: set[str] = field(default_factory=set)
    embeddings: dict[str, Vector] = field(default_factory=dict)


class Vector(NamedTuple):
    """maker: the fingerprint of its model. values: of unit length. sharpness: of the image; 0 if not known."""

    maker: str
    values: NDArray[np.float16]
    sharpness: float = 0.0


def make_entry(number: int, record: Record) -> Document:
    """record: DONE or FAILED. number: of its publication."""
    entry = Document(number)
    path = os.fsdecode(record.path).encode(errors="replace").decode()
    entry.fields["name"] = separate(path)
    entry.marks = {mark("state", record.status.name.lower()), mark("inbox", os.fsdecode(record.inbox_path))}
    if record.finished_at:
        entry.marks |= days_of(record.finished_at)
    if record.status is JobStatus.FAILED:
        entry.fields["text"] = separate(f"{record.reason} {record.detail}"[:MOST_WORDS])
        entry.marks.add(mark("reason", record.reason))
        return entry
    entry.marks.add(mark("bin", record.bin))
    for model, output in record.answers():
        try:
            _read(entry, model.stage, answer := msgspec.json.decode(output.payload))
            # That of a second look, which comes later, is of another model.
            if model.stage in EMBEDDED and model.stage not in entry.embeddings:
                values, sharpness = EMBEDDED[model.stage](answer), float(answer.get("sharpness") or 0.0)
                entry.embeddings[model.stage] = Vector(model.fingerprint, values, sharpness)
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError):
            continue  # of an older version of a plug-in, say: the rest of the image can be found
    entry.fields |= {name: separate(entry.fields[name][:MOST_WORDS]) for name in FIELDS if name != "name"}
    return entry


def _embedding_of(answer: Mapping[str, Any]) -> NDArray[np.float16]:
    embedding = answer["embedding"]
    return unpack_embedding(embedding["base64"], embedding["dtype"]).astype(np.float16)


def _signs_of(answer: Mapping[str, Any]) -> NDArray[np.float16]:
    """A hash as an embedding, so that the cosine of two is 1 - d / 32 if d of the 64 bits differ."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(answer["phash"]), np.uint8))
    return (2.0 * bits - 1.0).astype(np.float16) / np.float16(len(bits) ** 0.5)


EMBEDDED = {"clip": _embedding_of, "hash": _signs_of}


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts_in(each)


class Words(NamedTuple):
    """read: words of an answer. field: of the index, in which they are. kind: of the filter that asks for them, if there is
    one."""

    read: Callable[[Any], Iterable[str]]
    field: str
    kind: str = ""


WORDS = {  # by stage
    "ocr": Words(lambda answer: [text_of(answer)], "text"),
    "yolo": Words(
        lambda answer: sorted({each["label"] for each in answer["detections"]}), "objects", "object"
    ),
    "clip": Words(
        lambda answer: sorted({*likely_tags((tag["label"], tag["score"]) for tag in answer["tags"])}),
        "tags",
        "tag",
    ),
    "blip": Words(lambda answer: [answer["text"]], "caption"),
    "classifier": Words(lambda answer: [answer["label"]], "tags", "tag"),
    "hash": Words(lambda _: [], "text"),  # it has no words
}
OTHERS = Words(_texts_in, "text")  # every text of a plug-in's result


def _read(entry: Document, stage: str, answer: Any) -> None:
    reader = WORDS.get(kind_of(stage), OTHERS)
    words = [*reader.read(answer)]
    entry.fields[reader.field] = "\n".join([entry.fields[reader.field], *words]).strip()
    if reader.kind:
        entry.marks |= {mark(reader.kind, each) for each in words}


def separate(text: str) -> str:
    """The text with spaces around each character of a script without spaces between words: each such
    character is a word of its own, so that every part of a sentence can be found."""
    return UNSPACED.sub(r" \1 ", text)


def mark(kind: str, value: str) -> str:
    """One word of the index for a value that a filter can ask for, whatever characters it has."""
    return "m" + hashlib.blake2b(f"{kind}={value}".encode(errors="replace"), digest_size=10).hexdigest()


def days_of(seconds: float) -> set[str]:
    """Marks of the year, the month and the day, in UTC. seconds: since 1970."""
    day = datetime.fromtimestamp(seconds, UTC).date().isoformat()
    return {mark("date", day[:length]) for length in (4, 7, 10)}
