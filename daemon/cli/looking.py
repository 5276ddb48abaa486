"""The commands that look for images: `visiond search` and `visiond page`."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from daemon.core.errors import ConfigError, VisiondError
from daemon.ledger.soundness import MOST
from daemon.terminal.display import console, errors, print_json, print_listing, print_notices, printable
from daemon.terminal.options import ConfigOption, JsonOption, flag, option, read_config

if TYPE_CHECKING:
    from daemon.config.loading import Config
    from daemon.ledger.record import Record
    from daemon.search.searcher import Hit

ANY_PORT = "127.0.0.1:0"
FOLLOW_SECONDS = 0.5


def search(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORDS", help="What to look for; see below.", show_default=False),
    ] = None,
    by: Annotated[str, option("--by", metavar="WAY", help="words, meaning, or both.")] = "both",
    bin: Annotated[str, option("--bin", metavar="BIN", help="Only images of this bin.")] = "",
    newest: Annotated[bool, flag("--newest", help="The newest first, not the best. Only by words.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, max=MOST, help="Show at most N images.")
    ] = 20,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find images by the words on them, and by what they show.

    Words are looked for in text, captions, tags, objects and names. By
    meaning, all of the words are one sentence, which is compared with the
    images themselves; nearness is the cosine of the two. Models of SigLIP
    also give a probability that they match, and images below [search]
    probability_threshold are left out; with others all images are ranked.
    What both ways have found comes first, then what is high in one. The first
    search makes an index, which takes some minutes for a million images;
    later ones only add what is new.

    "red car" in quotes are words one after another, invo* a beginning,
    -draft excludes a word. text:, caption:, tags:, objects: and name: look
    in one place. Filters: bin:A, tag:dog, object:car, state:failed,
    inbox:/srv/in, after:2026-11-01, before:2026-12-01.

    Examples:
      visiond search two red cars
      visiond search "two red cars" --bin B --json
      visiond search 'invoice -draft after:2026-11-01' --by words
    """
    from daemon.ledger.records import open_reader
    from daemon.results.choice import refuse_unknown_bins
    from daemon.search.opening import open_searcher
    from daemon.search.query import parse
    from daemon.search.searcher import NEWEST, UNCUT, By
    from daemon.terminal.progress import Progress

    try:
        way = By(by)
    except ValueError:
        raise typer.BadParameter("it is words, meaning or both.", param_hint="--by") from None
    query = parse(" ".join(words or [])).narrowed(bin=[bin] if bin else [])
    settings = read_config(config, needs_stages=False)
    with open_reader(settings) as reader:
        if bin:
            refuse_unknown_bins([bin], reader.bin_counts())
        with Progress("images") as progress, open_searcher(settings, reader, progress.step) as searcher:
            if newest or not query.sentence:
                found = searcher.newest(query, NEWEST, limit + 1)  # one more, to know whether there are more
            else:
                found = searcher.best(query, way, limit=limit + 1)
        hits = {hit.image: hit for hit in found.hits[:limit]}
        records = reader.find_numbers(list(hits))
    if found.problem:
        errors.print(f"[yellow]By words only: {printable(found.problem)}[/yellow]")
    if found.is_uncut and not as_json:
        errors.print(UNCUT)
    _print([(record, hits[record.id]) for record in records], as_json=as_json)
    if len(found.hits) > limit:
        images = "image is" if limit == 1 else f"{limit:,} images are"
        errors.print(f"Only the first {images} shown; --limit N shows more.")


def _print(found: list[tuple[Record, Hit]], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"score": hit.score, "probability": hit.probability, "found_by": hit.by}
                | record.document()
                | {"location": record.location.decode(errors="replace")}
                for record, hit in found
            ]
        )
        return
    print_listing(
        ("id", "nearness", "file", "bin or reason", "found by"),
        (
            (
                r.id,
                "-" if hit.score is None else f"{hit.score:.3f}",
                os.fsdecode(r.location),
                r.summary,
                hit.by or "-",
            )
            for r, hit in found
        ),
    )
    print_notices((model.stage, model.notice) for record, _ in found for model in record.models)
    if not found:
        errors.print("No image fits.")


def page(
    listen: Annotated[
        str, option("--listen", metavar="HOST:PORT", help="Another address than [page] listen.")
    ] = "",
    config: ConfigOption = None,
) -> None:
    """Serve the page with images, search and results, until Ctrl-C.

    A running daemon serves it already: then this prints the address. It is
    for a ledger whose daemon is not running.

    Examples:
      visiond page
      visiond page --listen 127.0.0.1:8000
    """
    from daemon.config.values import check_address

    settings = read_config(config, needs_stages=False)
    try:
        check_address(listen)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.", param_hint="--listen") from None
    chosen = settings.page.model_copy(update={"listen": listen or settings.page.listen or ANY_PORT})
    is_daemons = listen in ("", settings.page.listen)
    serve_page(settings.model_copy(update={"page": chosen}), is_daemons=is_daemons)


def serve_page(config: Config, *, anywhere: bool = False, is_daemons: bool = False) -> None:
    """Serve the page until Ctrl-C. anywhere: if its address is in use, serve it on a free port instead. is_daemons: its
    address is that of the daemon, so if that serves it, say so. Raises ConfigError if the address is in use otherwise."""
    import anyio

    from daemon.config.state import closed_to_others
    from daemon.server.app import listen
    from daemon.server.page.process import serve
    from daemon.terminal import control

    http = config.page_http
    try:
        opened = listen(http, "page")
    except ConfigError as error:
        if anywhere:
            free = config.page.model_copy(update={"listen": ANY_PORT})
            serve_page(config.model_copy(update={"page": free}))
            return
        with contextlib.suppress(VisiondError):
            obstacles = control.ask_status(config).obstacles
            if is_daemons and not any(each.startswith("page:") for each in obstacles):
                console.print(
                    f"The daemon is running and serves the page: {printable(http.url_at(http.port))}"
                )
                return
        raise ConfigError([f"{error} For this command: --listen {ANY_PORT}"]) from error
    with opened as listener, closed_to_others(), contextlib.suppress(KeyboardInterrupt):
        console.print(f"{printable(http.url_at(listener.getsockname()[1]))}      Ctrl-C ends it")
        anyio.run(serve, config, listener, backend_options={"use_uvloop": True})


def follow(
    after: Annotated[
        int | None,
        typer.Option(
            "--after",
            metavar="NUMBER",
            min=0,
            help="Begin behind this number. Default: now.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[bool, flag("--full", help="Print all that the sidecar has.")] = False,
    config: ConfigOption = None,
) -> None:
    """Print a line of JSON for each image that is done or has failed.

    Goes on until Ctrl-C. Each line has a `number`; --after with the last
    one that you have seen goes on behind it, whether visiond or you were
    away. 0 begins with the first image.

    Examples:
      visiond follow
      visiond follow --after 0 --full > everything.jsonl
    """
    import sys

    from daemon.ledger.records import open_reader
    from daemon.search.following import encode_events, read_last

    with (
        open_reader(read_config(config, needs_stages=False)) as reader,
        contextlib.suppress(KeyboardInterrupt),
    ):
        place = read_last(reader) if after is None else after
        while True:
            lines, following = encode_events(reader, place, full=full)
            sys.stdout.buffer.writelines(line + b"\n" for _, line in lines)
            sys.stdout.buffer.flush()
            if following == place:
                time.sleep(FOLLOW_SECONDS)
            place = following
