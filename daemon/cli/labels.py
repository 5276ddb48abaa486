"""The commands for what people say about images: `visiond labels` and `visiond score`."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.core.errors import NothingFound
from daemon.core.hints import command, quantity
from daemon.core.labels import STAGE_OF, Kind
from daemon.system.log import escape
from daemon.terminal.display import errors, print_found, print_json, print_table, print_warning, printable
from daemon.terminal.options import ConfigOption, JsonOption, flag, option, read_config
from daemon.terminal.progress import Progress

if TYPE_CHECKING:
    from daemon.core.labels import Said
    from daemon.labels.matching import Matches
    from daemon.labels.scoring import Estimate, Score
    from daemon.ledger.record import Model
    from daemon.ledger.records import Reader

NAMED = 3  # of several names, in a sentence

labels_app = typer.Typer(
    help="Keep what people say about images beside the answers of the models.\n\n"
    "Examples:\n  visiond labels import corrected.json\n  visiond labels list",
    no_args_is_help=True,
)
KindsOption = Annotated[
    list[Kind] | None, option("--only KIND", "Only objects, tags, caption, text or classes.")
]


@labels_app.command("import")
def import_labels(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file or folder with the labels.")],
    images: Annotated[
        Path | None,
        option(
            "--images FOLDER", "The folder that relative names of images start from. Default: that of FILE."
        ),
    ] = None,
    by_file_name: Annotated[
        bool, flag("--by-file-name", "The last part of a name is enough to find its image.")
    ] = False,
    only: KindsOption = None,
    corrected: Annotated[
        bool,
        flag("--corrected", "People have corrected the answers of models in FILE: they count as labels."),
    ] = False,
    origin: Annotated[str, option("--origin TEXT", "Their origin. Default: as exported, or FILE.")] = "",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read in labels of people, which stand beside the answers of the models.

    FILE is COCO (.json: objects, captions, text), a folder of YOLO with its
    data.yaml or classes.txt, tasks with annotations as Label Studio exports
    them (.json), CSV with a column path, location or digest and columns tags,
    caption, text or the name of a classifier, or the .truth.jsonl of
    `visiond samples`. Of what `visiond export --labels` wrote, only labels are
    taken, no answers, and a file with scores is refused, unless people have
    corrected them: --corrected.

    Labels belong to the bytes of an image: they stay when models run again,
    and when the file is renamed. They replace earlier labels of the same
    kind, or of the same classifier. An image is found by its digest, by its
    file if that is where the name says, or by the end of its path.

    Examples:
      visiond labels import corrected.json
      visiond labels import --images photos annotations/instances.json
      visiond labels import --only caption captions.csv
    """
    from daemon.labels.matching import find_images, find_split, keep_known
    from daemon.labels.reading import read_labels
    from daemon.labels.store import LabelStore
    from daemon.ledger.records import open_reader

    settings = read_config(config, needs_stages=False)
    left_out: Counter[str] = Counter()
    given = [*read_labels(file, lambda why: left_out.update([why]), corrected=corrected)]
    said = [each for each in given if not only or each.kind in only]
    with open_reader(settings) as reader, Progress("images") as progress:
        folder = images or (file if file.is_dir() else file.parent)
        names = [each.image for each in said]
        found = find_images(reader, names, folder, by_file_name=by_file_name, step=progress.step)
        kept = keep_known(said, found.images, left_out)
        why = "" if kept else _explain_empty(reader, file, given, said, found, left_out)
    store = LabelStore(settings.state.path)
    known_as = (origin or os.path.basename(os.path.abspath(file))).encode(errors="replace").decode()
    rows = [
        (digest, kind, each.value, (not origin and each.origin) or known_as)
        for (digest, kind), each in kept.items()
    ]
    split = find_split(said, found.images, kept)
    replaced = store.keep(rows, split) if rows else 0
    kinds, held_out = Counter(str(kind) for _, kind in kept), sum(split.values())
    _print_kept(kinds, replaced, held_out, found, left_out, as_json=as_json)
    _print_trouble(found, left_out, replaced)
    if why:
        raise NothingFound(f"Nothing is kept: {why}")


def _explain_empty(
    reader: Reader, file: Path, given: list[Said], said: list[Said], found: Matches, left_out: Counter[str]
) -> str:
    """Why no label is kept. given: all labels of the file; said: those of the kinds that are wanted."""
    if not given:
        return f"{file} has no labels" + (
            " that can be taken; what was left out is above." if left_out else "."
        )
    if not said:
        kinds = ", ".join(sorted({each.kind for each in given}))
        return f"{file} has only labels of other kinds: {kinds}. Leave out --only, or name one of these kinds with it."
    if found.images:
        return f"{quantity(len(found.images), 'image')} found, but no label can be used; what was left out is above."
    if not found.unknown:
        return "each name can mean several images. Write more of the paths, or the digests."
    if next(iter(reader.newest_done(with_results=False)), None) is None:
        return f"no image is DONE, so there is none to label. `{command('run')}` processes the images in the inboxes."
    return (
        f"no name in {file} is that of an image that is DONE. `{command('list')}` shows their paths; --images FOLDER says "
        "where relative names begin."
    )


def _print_kept(
    kinds: Counter[str],
    replaced: int,
    held_out: int,
    found: Matches,
    left_out: Counter[str],
    *,
    as_json: bool,
) -> None:
    """held_out: how many images the file keeps out of trainings."""
    if not as_json:
        for kind, count in sorted(kinds.items()):
            print(f"{kind} of {quantity(count, 'image')}")
        if held_out:
            images = quantity(held_out, "image")
            errors.print(
                f"{images} for validation or tests: a training is scored on these and learns from the others."
            )
        return
    print_json(
        {
            "labels": kinds,
            "replaced": replaced,
            "held_out": held_out,
            "by_file_name": found.by_file_name,
            "unknown": [*map(escape, found.unknown)],
            "ambiguous": [*map(escape, sorted(found.ambiguous))],
            "left_out": left_out,
        }
    )


def _print_trouble(found: Matches, left_out: Counter[str], replaced: int) -> None:
    if replaced:
        errors.print(f"{quantity(replaced, 'earlier label')} replaced.")
    if found.by_file_name:
        errors.print(f"{quantity(found.by_file_name, 'image')} found only by the file's name.")
    troubles = [f"Left out: {why} ({number:,})." for why, number in left_out.items() if number]
    if found.ambiguous:
        name, where = next(iter(found.ambiguous.items()))
        names = quantity(len(found.ambiguous), "name")
        troubles.append(
            f"{names} can mean several: {name} may be {where}. Write more of the path, or the digest."
        )
    if found.unknown:
        names = quantity(len(found.unknown), "name")
        hints = [
            f"Of these, {quantity(found.unfinished, 'file')} {'has' if found.unfinished == 1 else 'have'} no result yet: "
            f"import the labels again when the images are DONE. `{command('status')}` shows how many wait, and "
            f"`{command('run', '--once')}` processes them."
        ] * bool(found.unfinished)
        if found.unfinished < len(found.unknown):
            hints.append(
                "--images FOLDER says where the files are, and with --by-file-name the last part of a name is enough."
            )
        troubles.append(
            f"{names} found at no image that is DONE, such as {found.unknown[0]}. {' '.join(hints)}"
        )
    for trouble in troubles:
        print_warning(trouble)


@labels_app.command("list")
def list_labels(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show which labels there are, and where they are from.

    "Nothing" counts images of which people say that there is nothing, such
    as no object.

    Examples:
      visiond labels list
    """
    from daemon.labels.store import LabelStore

    tallies = LabelStore(read_config(config, needs_stages=False).state.path).tallies()
    if as_json:
        print_json([each._asdict() for each in tallies])
    elif not tallies:
        errors.print(f"There are no labels; `{printable(command('labels', 'import'))}` reads some in.")
    else:
        print_table(
            ("kind", "from", "images", "nothing", "imported"),
            (
                (
                    each.kind,
                    each.origin,
                    each.images,
                    each.empty,
                    time.strftime("%F %T", time.localtime(each.newest)),
                )
                for each in tallies
            ),
        )


@labels_app.command("forget")
def forget_labels(
    origin: Annotated[str, typer.Argument(metavar="FROM", help="As `visiond labels list` shows it.")],
    config: ConfigOption = None,
) -> None:
    """Forget all labels that are from one place.

    Examples:
      visiond labels forget corrected.json
    """
    from daemon.labels.store import LabelStore

    store = LabelStore(read_config(config, needs_stages=False).state.path)
    if not (forgotten := store.forget(origin)):
        known = ", ".join(sorted({each.origin for each in store.tallies()}))
        raise NothingFound(f"No labels are from {origin}. There are labels from: {known or 'nowhere'}.")
    print(f"{quantity(forgotten, 'label')} forgotten")


def score(
    only: KindsOption = None,
    by_label: Annotated[
        bool, flag("--by-label", "Also the average precision of each label, and the F1 of each class.")
    ] = False,
    held_out: Annotated[
        float,
        option("--held-out SHARE", "Only images that such a training did not learn from.", min=0, max=1),
    ] = 1,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold the answers of the models against the labels of people.

    Objects: mAP and AP50 as COCO defines them, of the labels that people
    gave. Tags: recall, precision and F1. Text: error rates of characters and
    words (CER, WER; less is better). Captions: CIDEr-D. Classes: accuracy and
    macro F1. Each with the range that holds 95 of 100 resamples of the images.

    Every model with answers in the ledger is listed, so that after a redo the
    model before stands below. Its last column says how it differs from the
    first, on the images that both have answered for: if the range has 0 in
    it, it is not certain that either is better.

    Examples:
      visiond score
      visiond score --only objects --by-label
      visiond score --only objects --held-out 0.1
    """
    from daemon.labels.scoring import score as find_scores
    from daemon.labels.store import LabelStore
    from daemon.ledger.records import open_reader

    settings = read_config(config, needs_stages=False)
    with open_reader(settings) as reader, Progress("images") as progress:
        scores = [
            *find_scores(reader, LabelStore(settings.state.path), only or [*Kind], progress.step, held_out)
        ]
    if as_json:
        print_json([_as_json(each) for each in scores])
        return
    if not scores:
        raise NothingFound(
            f"There are no labels of images with answers; `{command('labels', 'import')}` reads some in."
        )
    print_table(
        ("kind", "model", "images", "figure", "score", "95 % of resamples", "compared with the first"),
        chain.from_iterable(map(_rows, scores, name_apart(scores))),
    )
    for note in dict.fromkeys(chain.from_iterable(map(explain_nothing, scores))):
        print_warning(f"Note: {note}")
    for each in scores if by_label else ():
        classes = sorted(each.classes.items(), key=lambda item: -item[1])
        figure = "average precision" if each.kind is Kind.OBJECTS else "F1"
        title = f"{each.model.provenance.describe()}, {figure}"
        print_found(("label", figure), ((name, f"{value:.3f}") for name, value in classes), title)


def explain_nothing(each: Score) -> Iterator[str]:
    """Why a score can only be 0."""
    model = each.model.provenance.title or each.model.fingerprint
    if not each.given or each.given & each.answered:
        return
    if each.answered:
        yield (
            f"{model} used none of the names that people gave ({_some(each.given)}), but {_some(each.answered)}; "
            "only equal names are compared."
        )
    elif each.kind is Kind.OBJECTS:
        yield (
            f"{model} found no object in these images. Objects with a lower score than `conf` under "
            f"[stages.{STAGE_OF[each.kind]}.options] are not in its answers."
        )


def _some(names: Iterable[str]) -> str:
    first = [f'"{name}"' for name in sorted(names)]
    more = len(first) - NAMED
    return ", ".join(first[:NAMED]) + (f" and {more:,} more" if more > 0 else "")


def name_apart(scores: list[Score]) -> list[str]:
    """Of each its model: by its title, and where others of its kind have the same one, also by its options and fingerprint."""
    ways: tuple[Callable[[Model], str], ...] = (
        lambda model: model.provenance.title or model.fingerprint,
        lambda model: model.provenance.describe(),
        lambda model: f"{model.provenance.describe()} {model.fingerprint}",
    )

    def name(each: Score) -> str:
        others = [other.model for other in scores if other.name == each.name and other is not each]
        alone = (way for way in ways if way(each.model) not in map(way, others))
        return next(alone, ways[-1])(each.model)

    return [name(each) for each in scores]


def _rows(each: Score, model: str) -> list[tuple[object, ...]]:
    named = (each.name, model, f"{each.images:,} of {each.labelled:,}")
    return [
        (
            *(named if place == 0 else ("", "", "")),
            name,
            _number(figure.value),
            _range(figure),
            f"{_number(other.value, '+')} ({_range(other)})" if (other := each.against.get(name)) else "",
        )
        for place, (name, figure) in enumerate(each.figures.items())
    ]


def _range(figure: Estimate) -> str:
    return f"{_number(figure.low)} to {_number(figure.high)}"


def _number(value: float, sign: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{sign}.3f}"


def _as_json(each: Score) -> dict[str, object]:
    def plain(figures: dict[str, Estimate]) -> dict[str, list[float | None]]:
        """A number that cannot be said is null."""
        return {
            name: [None if math.isnan(v) else round(v, 6) for v in figure] for name, figure in figures.items()
        }

    return {
        "kind": each.kind,
        "stage": each.model.stage,
        "fingerprint": each.model.fingerprint,
        "model": each.model.provenance.describe(),
        "is_current": each.is_current,
        "images": each.images,
        "labelled": each.labelled,
        "figures": plain(each.figures),
        "compared_with_the_first": plain(each.against),
        "classes": each.classes,
    }
