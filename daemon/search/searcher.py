"""Both searches together: what users ask for, and the images that the ledger still shows."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from daemon.config.state import SEARCH
from daemon.core.errors import SearchUnusable
from daemon.core.jobs import JobStatus
from daemon.ledger import publications
from daemon.ledger.records import Reader
from daemon.search.duplicates import choose_grouped, extend_groups
from daemon.search.encoder import Ask, EncoderProcess
from daemon.search.evidence import Columns, Evidence, Ranking, parse_order
from daemon.search.index import Index
from daemon.search.masks import Bits, Masks, make_bits
from daemon.search.query import Query, parse
from stages.contract.base import StageSpec

BEST = 200  # images of a search by meaning, or by both; by words there is no limit
LEAST_READ = 256  # entries of the index at once, as many may be stale
MOST_REASONS = 5_000  # failures whose reasons are counted
MOST_ASKED = 50_000  # answers, of which some may be stale
RANK = 60  # of Cormack, Clarke and Büttcher, "Reciprocal Rank Fusion", 2009
FEW, MOMENT_SECONDS = 256, 5.0  # images that another thread adds in a moment, and its longest
NEWEST = 1 << 62
UNCUT = "By meaning all images are ranked, the nearest first: those further down may not fit."

Passes = Callable[[Collection[int]], Collection[int]]  # those of these images that are wanted


class By(StrEnum):
    words = "words"
    meaning = "meaning"
    both = "both"
    disagreement = "disagreement"  # not how images are found, but which of them come first


class Near(NamedTuple):
    """score: the cosine. probability: that image and words match; None: the model gives none."""

    score: float
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """number: of the publication. score: the cosine, if it was found by its meaning. by: how it was found; None: it was not
    looked for, as with filters alone. probability: that it matches the words, if the model gives one. evidence: what disagrees,
    if that orders the images."""

    number: int
    image: int
    score: float | None = None
    by: By | None = None
    probability: float | None = None
    evidence: Evidence | None = None

    def document(self) -> dict[str, Any]:
        """As in JSON, beside what the image has."""
        found = {"score": self.score, "probability": self.probability, "found_by": self.by}
        return found | {"disagreement": self.evidence and self.evidence._asdict()}


@dataclass(frozen=True, slots=True)
class Found:
    """hits: newest first, or best first. following: the cursor of what comes after them; 0 if nothing does.
    problem: why the search by meaning had no part in it; empty if it had, or was not asked for. is_warming: its model
    is being loaded, so that it will have a part in the next answer. is_uncut: the search by meaning also found images that
    do not fit, as it ranks all of them."""

    hits: list[Hit] = field(default_factory=list)
    following: int = 0
    problem: str = ""
    is_warming: bool = False
    is_uncut: bool = False


class Searcher:
    """Any thread may use it."""

    def __init__(self, state: Path, reader: Reader, spec: StageSpec | None, least: float = 0.0) -> None:
        """state: the folder with the ledger. spec: of the stage that makes embeddings; None if there is none whose
        text encoder is here. least: probability with which an image has to match a sentence, if the model gives one; 0: any.
        Raises SearchUnusable."""
        self.index = Index(state / SEARCH)
        self._masks = Masks(self.index, reader)
        self._reader = reader
        self._least = least
        self._encoder = EncoderProcess(spec) if spec else None
        self._ranked: tuple[object, Ranking] = (None, Ranking(Columns.none()))
        self._catching_up, self._extending = threading.Lock(), threading.Lock()
        self._closing = threading.Event()

    def close(self) -> None:
        """Work of other threads ends soon afterwards."""
        self._closing.set()
        if self._encoder:
            self._encoder.close()
        self.index.close()

    def catch_up(self, note: Callable[[int, int], object] = lambda place, last: None) -> int:
        """Add what was published since; returns how many images. If another thread does that already, waits for it only where
        few are missing. note: called with how far it is and with the last number. Raises SearchUnusable."""
        is_free = self._catching_up.acquire(blocking=False)
        if not is_free and (self.behind() > FEW or not self._catching_up.acquire(timeout=MOMENT_SECONDS)):
            return 0
        try:
            return self.index.catch_up(self._reader, partial(self._go_on, note, self._last()))
        finally:
            self._catching_up.release()

    def _go_on(self, note: Callable[[int, int], object], last: int, place: int) -> bool:
        note(place, last)
        return not self._closing.is_set()

    def behind(self) -> int:
        """How many publications the index does not have yet, about."""
        return max(0, self._last() - self.index.about().place)

    def _last(self) -> int:
        with self._reader.lend() as ledger:
            return publications.read_last(ledger)

    def newest(self, query: Query, before: int = NEWEST, limit: int = 50) -> Found:
        """Images that fit all of the query, newest first. before: the cursor of an earlier answer."""
        hits: list[Hit] = []
        passes = self._passing(query)
        while len(hits) < limit:
            wanted = limit - len(hits)
            if query.is_empty:
                with self._reader.lend() as ledger:
                    shown = publications.read_shown_before(ledger, before, wanted)
                hits += [Hit(*each) for each in shown.items()]
                return Found(hits, min(shown) if len(shown) == wanted else 0)
            numbers = self._masks.older(query, before, max(wanted, LEAST_READ))
            words = set(numbers) if query.terms else ()
            present = _choose(self._shown(numbers, words=words), passes)
            hits += present[:wanted]
            if len(present) > wanted:
                return Found(hits, hits[-1].number)
            if len(numbers) < max(wanted, LEAST_READ):
                return Found(hits)
            before = numbers[-1]
        return Found(hits, before)

    def extend_groups(self) -> None:
        """Add the images to the groups of near-duplicates that were published since. Raises SearchUnusable."""
        with self._extending:
            extend_groups(self._reader, self.index)

    def _passing(self, query: Query) -> Passes:
        """Which images are among the near-duplicates that the query asks for."""
        if query.group:
            self.extend_groups()
        return partial(choose_grouped, self._reader, self.index, query.group)

    def unpublished(self, query: Query, state: str, before: int = NEWEST, limit: int = 50) -> Found:
        """Files that are pending or skipped, newest first: the ledger has them, and no index their words. before: the cursor
        of an earlier answer. Raises QueryError."""
        words, inboxes = query.of_names()
        with self._reader.lend() as ledger:
            found, following = publications.read_unpublished(
                ledger, JobStatus[state.upper()], before, limit, words=words, inboxes=inboxes
            )
        return Found([Hit(0, image) for image in found], following)

    def reasons(self, most: int = MOST_REASONS) -> tuple[Counter[str], bool]:
        """How many images failed, by reason; and whether only the last ones were counted, as there are more than `most`."""
        numbers = self.index.newest(parse("state:failed"), NEWEST, most)
        with self._reader.lend() as ledger:
            return publications.count_reasons(ledger, numbers), len(numbers) == most

    def best(
        self, query: Query, by: By = By.both, skip: int = 0, limit: int = 50, *, wait: bool = True
    ) -> Found:
        """Images that fit best, best first. skip: the cursor of an earlier answer. wait: for the model to be loaded,
        some seconds; otherwise the words alone answer until then. Raises SearchUnusable."""
        passes = self._passing(query)
        with ThreadPoolExecutor(1) as beside:  # the words, while a child process looks for the meaning
            ask = partial(self._enough, partial(self.index.best, query), BEST, passes)
            words = beside.submit(ask) if by is not By.meaning else None
            near, problem, is_warming = self._look_for_meaning(query, by, passes, wait=wait)
        ranked = words.result() if words else []
        hits = self._shown(_merge(ranked, list(near)), near, set(ranked))[:BEST]
        following = skip + limit if skip + limit < len(hits) else 0
        is_uncut = not self._least or any(each.probability is None for each in near.values())
        return Found(hits[skip : skip + limit], following, problem, is_warming, bool(near) and is_uncut)

    def disagreeing(
        self, query: Query, order: str = By.disagreement, skip: int = 0, limit: int = 50
    ) -> Found:
        """Images that fit all of the query, those first whose answers disagree most. order: as `parse_order` reads it. Raises
        SearchUnusable."""
        ranking = self._ranking(parse_order(order) or ())
        ordered = self._in_order(ranking, query, skip + limit + LEAST_READ)
        found = [*islice(ordered, skip, skip + limit + 1)]
        hits = [Hit(number, image, evidence=ranking.evidence_at(at)) for number, at, image in found[:limit]]
        return Found(hits, skip + limit if len(found) > limit else 0, self.index.trouble)

    def all_disagreeing(self, query: Query, order: str) -> tuple[Iterator[tuple[int, int]], Ranking]:
        """The same images, all of them, each with its place for `evidence_at`."""
        ranking = self._ranking(parse_order(order) or ())
        return ((image, at) for _, at, image in self._in_order(ranking, query, NEWEST)), ranking

    def _in_order(self, ranking: Ranking, query: Query, count: int) -> Iterator[tuple[int, int, int]]:
        """Numbers of publications, their places in the order, and images. count: as of `Ranking.in_order`."""
        passes = self._passing(query)
        for places in ranking.in_order(count, None if query.is_empty else self._masks.of(query)):
            with self._reader.lend() as ledger:
                shown = publications.read_shown(ledger, [*places])
            passing = passes(shown.values())
            yield from ((n, at, shown[n]) for n, at in places.items() if n in shown and shown[n] in passing)

    def _ranking(self, names: tuple[str, ...]) -> Ranking:
        """Of these columns; the last one is kept until the index changes."""
        key = (self.index.about(), names)
        known, ranking = self._ranked
        if known != key:
            ranking = Ranking(self.index.evidence_in(names))
            self._ranked = key, ranking
        return ranking

    def _look_for_meaning(
        self, query: Query, by: By, passes: Passes, *, wait: bool
    ) -> tuple[dict[int, Near], str, bool]:
        """Returns the publications that were found, the nearest first; a sentence that says why there are none, or ""; and
        whether this is because the model is still being loaded."""
        near: dict[int, Near] = {}
        problem = ""
        if is_warming := self._is_warming(wait=wait) and by is not By.words:
            problem = "The model that understands sentences is being loaded."
            problem += " Until then, words alone are looked for." if by is By.both else ""
        elif by is not By.words and query.sentence:
            try:
                near = self._mean(query, passes)
            except SearchUnusable as error:
                if by is By.meaning:
                    raise
                problem = str(error)
        return near, problem, is_warming

    def _enough(self, ask: Callable[[int], Sequence[int]], wanted: int, passes: Passes) -> list[int]:
        """The first answers that the ledger still shows. ask: for a number of answers; after a redo of all images most
        may be stale. passes: only images that this chooses."""
        count = wanted
        while True:
            found = ask(count)
            with self._reader.lend() as ledger:
                shown = publications.read_shown(ledger, found)
            passing = passes(shown.values())
            shown = {number: image for number, image in shown.items() if image in passing}
            if len(shown) >= wanted or len(found) < count or count >= MOST_ASKED:
                return [number for number in found if number in shown][:wanted]
            count *= 4

    def _is_warming(self, *, wait: bool) -> bool:
        """Whether the text encoder cannot answer yet; then it is started."""
        if wait or self._encoder is None or self._encoder.is_warm:
            return False
        self._encoder.warm_up()
        return True

    def beside(self, query: Query, image: int, by: By | None = None, order: str = "") -> tuple[int, int]:
        """The images before and after this one in the list that `newest` gives or, with `by`, `best`, or `disagreeing` with
        `order`; 0: there is none. An image that does not fit the query has neighbors only by time. Raises SearchUnusable."""
        if by:
            is_ranked = by is not By.disagreement
            found = (
                self.best(query, by, limit=BEST, wait=False)
                if is_ranked
                else self.disagreeing(query, order, 0, BEST)
            )
            images = [0, *(hit.image for hit in found.hits), 0]
            place = images.index(image) if image in images else 0
            return (images[place - 1], images[place + 1]) if place else (0, 0)
        with self._reader.lend() as ledger:
            number = publications.number_of(ledger, image)
        if not number:
            return 0, 0
        older = [hit.image for hit in self.newest(query, number, 1).hits]
        return self._next_newer(query, number), older[0] if older else 0

    def _next_newer(self, query: Query, number: int) -> int:
        """The image that was published next after this number, of those that fit; 0 if there is none."""
        if query.is_empty:
            with self._reader.lend() as ledger:
                return next(iter(publications.read_shown_after(ledger, number, 1).values()), 0)
        passes = self._passing(query)
        while numbers := self._masks.newer(query, number, LEAST_READ):
            if found := _choose(self._shown(numbers), passes):
                return found[0].image
            number = numbers[-1]
        return 0

    def like(self, image: int, limit: int = 24) -> Found:
        """The images that are nearest to this one, without itself. Raises SearchUnusable."""
        with self._reader.lend() as ledger:
            number = publications.number_of(ledger, image)
        near = self._nearest(limit + 1, self._passing(Query()), like=number)
        near.pop(number, None)
        return Found(self._shown(list(near), near)[:limit])

    def _mean(self, query: Query, passes: Passes) -> dict[int, Near]:
        """By publication, how near it is to the query's words; the nearest first."""
        rest = query.without_words()
        allowed = None if rest.is_empty else self._masks.of(rest)
        return self._nearest(BEST, passes, text=query.sentence, allowed=allowed)

    def _nearest(
        self, wanted: int, passes: Passes, text: str = "", like: int = 0, allowed: Bits | None = None
    ) -> dict[int, Near]:
        """The publications that are nearest and still shown. allowed: only these."""
        folder, rows, dim = self._matrix()
        near: dict[int, Near] = {}

        def ask(count: int) -> list[int]:
            bits = None if allowed is None else allowed.tobytes()
            question = Ask(str(folder), rows, dim, count, text, like, bits, self._least)
            answer = self._need_encoder().ask(question)
            nothing = [None] * len(answer.numbers)
            found = map(Near, answer.scores, answer.probabilities or nothing)
            near.update(zip(answer.numbers, found, strict=True))
            return answer.numbers

        found = self._enough(ask, wanted, passes)
        if len(found) < wanted and len(near) >= MOST_ASKED:
            # nearly all that are near are stale, or do not pass
            allowed = self._still_shown(allowed, passes)
            found = self._enough(ask, wanted, passes)
        return {number: near[number] for number in found}

    def _still_shown(self, allowed: Bits | None, passes: Passes) -> Bits:
        """The allowed publications that the ledger shows, and that pass. Slow, as it reads all of them."""
        with self._reader.lend() as ledger:
            all_shown = publications.read_shown_before(ledger, NEWEST, -1)
        passing = passes(all_shown.values())
        shown = [number for number, image in all_shown.items() if image in passing]
        bits = make_bits(shown, max(shown, default=0))
        if allowed is None:
            return bits
        size = min(len(bits), len(allowed))
        return bits[:size] & allowed[:size]

    def _matrix(self) -> tuple[Path, int, int]:
        found = self.index.matrix(self._need_encoder().spec.fingerprint)
        if found is None:
            if not self.index.newest(parse("state:done"), NEWEST, 1):
                raise SearchUnusable("no image has a result yet; search again when one has.")
            raise SearchUnusable(
                "no image has an embedding of the model that is configured for the stage clip; search by words, or "
                "bring the results up to date with `visiond redo --stale`."
            )
        return found

    def _need_encoder(self) -> EncoderProcess:
        if self._encoder is None:
            raise SearchUnusable(
                "the configured stages make no embeddings that sentences can be compared with; search by words."
            )
        return self._encoder

    def _shown(
        self, numbers: Sequence[int], near: Mapping[int, Near] | None = None, words: Collection[int] = ()
    ) -> list[Hit]:
        """Those that the ledger still shows, in the same order. near, words: what was found by meaning and by words."""
        with self._reader.lend() as ledger:
            shown = publications.read_shown(ledger, numbers)
        known, none = near or {}, (None, None)
        ways = {(True, True): By.both, (True, False): By.words, (False, True): By.meaning}
        return [
            Hit(number, shown[number], score, ways.get((number in words, number in known)), probability)
            for number in numbers
            if number in shown
            for score, probability in [known.get(number, none)]
        ]


def _choose(hits: Sequence[Hit], passes: Passes) -> list[Hit]:
    passing = passes({hit.image for hit in hits})
    return [hit for hit in hits if hit.image in passing]


def _merge(*rankings: Iterable[int]) -> list[int]:
    """What is high in one of the rankings, or in several, first."""
    points: dict[int, float] = {}
    for ranking in rankings:
        for place, number in enumerate(ranking):
            points[number] = points.get(number, 0.0) + 1 / (RANK + 1 + place)
    return sorted(points, key=lambda number: (-points[number], -number))
