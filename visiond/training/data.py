"""What a training learns from: images with what people say about them, some of which are held out for the scores."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec

from daemon.core.errors import WrongArgument
from daemon.core.hints import quantity
from daemon.core.labels import Kind, ObjectLabel, Said, Value, is_held_out
from daemon.core.urls import is_url
from daemon.labels.matching import KnownImage, find_split, keep_known
from daemon.labels.reading import read_labels
from daemon.labels.saying import has_image_suffix
from daemon.labels.store import LabelStore
from daemon.ledger.records import Reader
from stages.contract.base import ImageError, Limits
from stages.contract.files import open_file
from stages.contract.processes import count_cores
from stages.images.decoder import Decoders
from stages.images.images import inspect

NAMED = 3  # of the files that are left out for one reason
AS_SAID = "for validation or tests in their data set"

Step = Callable[[int, int], None]


class LabelledImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image. Width and height are of the upright image, in pixels. objects, or words: its tags or captions."""

    file: str
    digest: str
    width: int
    height: int
    objects: list[ObjectLabel] = []
    words: list[str] = []

    @property
    def value(self) -> Value:
        return self.objects or self.words


class Data(msgspec.Struct, frozen=True):
    """learnt, held_out: of the same kind. left_out: how many labels are not used, by why. said: of the held-out images, those
    that a file of labels keeps out of trainings."""

    kind: Kind
    learnt: list[LabelledImage]
    held_out: list[LabelledImage]
    left_out: dict[str, int] = {}
    said: int = 0

    @property
    def names(self) -> list[str]:
        """The labels of all objects, or all tags."""
        samples = (*self.learnt, *self.held_out)
        found = {each.label for sample in samples for each in sample.objects if not each.crowd}
        return sorted(found | {word for sample in samples for word in sample.words})

    def describe(self) -> str:
        said = f" ({self.said:,} of them are {AS_SAID})" if self.said else ""
        return f"{quantity(len(self.learnt), 'image')} to learn from, {len(self.held_out):,} held out{said}."

    @property
    def digest(self) -> str:
        """Of which images there are, what is said about them, and which are held out."""
        return hashlib.sha256(msgspec.json.encode((self.kind, self.learnt, self.held_out))).hexdigest()


def read_file(
    path: Path, images: Path, kind: Kind, share: float, step: Step = lambda done, total: None
) -> Data:
    """From a file that `visiond labels import` reads. images: the folder that its names start from. share: as of `split`.
    step: called with how many of how many images were decoded. Raises WrongArgument."""
    left_out: Counter[str] = Counter()
    said = [each for each in read_labels(path, lambda why: left_out.update([why])) if each.kind is kind]
    found = dict(_find_files(said, images, left_out, step))
    known = {name: image for name, (_, image) in found.items()}
    files = {image.digest: str(file) for file, image in reversed(found.values())}
    kept = keep_known(said, known, left_out)
    images_of = {image.digest: image for image in known.values()}
    samples = [_sample(files[digest], images_of[digest], each.value) for (digest, _), each in kept.items()]
    return split(kind, samples, left_out, share, find_split(said, known, kept))


def read_store(store: LabelStore, reader: Reader, kind: Kind, share: float) -> Data:
    """From the labels that were imported, of images whose files are on this machine."""
    left_out: Counter[str] = Counter()
    labels = dict(store.of_kind(kind))
    found: dict[bytes, LabelledImage] = {}
    for record in reader.newest_done(with_results=False):
        if record.digest in labels and record.digest not in found:
            file = os.fsdecode(record.location)
            if not is_url(file) and record.has_file():
                image = KnownImage(record.digest, record.width, record.height)
                found[record.digest] = _sample(file, image, labels[record.digest].value)
    if gone := len(labels) - len(found):
        left_out["labels of images whose files are not on this machine, or have changed"] += gone
    said = {digest: label.held_out for digest, label in labels.items()}
    return split(kind, list(found.values()), left_out, share, said)


def split(
    kind: Kind,
    samples: Sequence[LabelledImage],
    left_out: Counter[str],
    share: float,
    said: Mapping[bytes, bool | None] = MappingProxyType({}),
) -> Data:
    """share: of the images that are held out. Which ones follows from their digests alone, so that an image stays on its side
    when labels are added. said: by digest, `held_out` of Label, which comes first. Without any caption or tag, an image
    teaches nothing and is left out; without objects, that is what it teaches."""
    order = sorted(samples, key=lambda each: each.digest)
    useful = [each for each in order if kind is Kind.OBJECTS or each.words]
    if empty := len(order) - len(useful):
        left_out["images without a tag or caption"] += empty
    learnt, held = list[LabelledImage](), list[LabelledImage]()
    for each in useful:
        digest = bytes.fromhex(each.digest)
        (learnt, held)[is_held_out(digest, share, said.get(digest))].append(each)
    if not held and share and len(learnt) > 1:
        held = [learnt.pop(0)]  # of a few images none may have such a digest
    as_said = sum(bool(said.get(bytes.fromhex(each.digest))) for each in held)
    return Data(kind, learnt, held, dict(left_out), as_said)


def _sample(file: str, image: KnownImage, value: Value) -> LabelledImage:
    objects = [each for each in value if isinstance(each, ObjectLabel)]
    words = [] if isinstance(value, str) else [each for each in value if isinstance(each, str)]
    return LabelledImage(file, image.digest.hex(), image.width, image.height, objects, words)


def _find_files(
    said: Iterable[Said], folder: Path, left_out: Counter[str], step: Step
) -> Iterator[tuple[str, tuple[Path, KnownImage]]]:
    """By the image, as the labels name it."""
    without_suffix, files = None, dict[str, Path]()
    for name, image in {each.name: each.image for each in said}.items():
        file = folder / name
        if not has_image_suffix(name):  # in YOLO, where the images are elsewhere
            without_suffix = without_suffix or _list_stems(folder)
            below = name.removeprefix("images/")  # that folder may be FOLDER itself
            file = without_suffix.get(name) or without_suffix.get(below, file)
        files[image] = file
    broken: dict[str, list[str]] = {}
    with closing(Decoders(count_cores(), Limits())) as decoders, ExitStack() as stack:
        threads = ThreadPoolExecutor(count_cores())
        stack.callback(threads.shutdown, cancel_futures=True)  # after Ctrl-C it waits for no other image
        looks = threads.map(partial(_look, decoders), files.values())
        for done, ((name, file), found) in enumerate(zip(files.items(), looks, strict=True), 1):
            if isinstance(found, KnownImage):
                yield name, (file, found)
            elif isinstance(found, OSError):
                left_out[f"images that are not in {folder}"] += 1
            else:
                broken.setdefault(found.reason, []).append(name)
            step(done, len(files))
    for reason, names in broken.items():
        named = ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)
        left_out[f"files with no image that can be decoded ({reason}): {named}"] += len(names)


def _look(decoders: Decoders, file: Path) -> KnownImage | OSError | ImageError:
    """The image in a file if it can be decoded; otherwise why not. Tried here, as the training decodes it much later."""
    try:
        with open_file(file) as opened:
            data = opened.read()
        header = inspect(memoryview(data), Limits())
        [pixels] = decoders.decode_all([(memoryview(data), header)])
    except (OSError, ImageError) as error:
        return error
    if isinstance(pixels, ImageError):
        return pixels
    return KnownImage(hashlib.sha256(data).digest(), header.width, header.height)


def _list_stems(folder: Path) -> dict[str, Path]:
    files = (file for file in folder.rglob("*") if has_image_suffix(file.name))
    return {str(file.relative_to(folder).with_suffix("")): file for file in files}


def check(data: Data) -> None:
    """Raises WrongArgument if there is nothing to learn."""
    if not data.learnt and data.held_out:
        why = "lower --held-out" if data.said < len(data.held_out) else f"all are {AS_SAID}"
        raise WrongArgument(f"All labelled images are held out, so there is nothing to learn: {why}.")
    if not data.learnt:
        why = "".join(f" Left out: {reason} ({number:,})." for reason, number in data.left_out.items())
        raise WrongArgument(f"There are no labels of the kind {data.kind} to learn from.{why}")
