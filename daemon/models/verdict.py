"""What a comparison has found: in sentences for people, and as a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from daemon.config.values import parse_toml
from daemon.core.hints import command, quantity
from daemon.labels.scoring import Estimate
from daemon.models.changes import LARGE, describe_measure
from daemon.models.comparing import ModelComparison

MOST_LISTED = 50
MOST_MOVES = 4  # from bin to bin, that are named
SMALL_KWH = 0.01


class Prices(NamedTuple):
    """Of a kWh, and of an hour of the machine; None: not given."""

    kwh: float | None = None
    hour: float | None = None


def find_price(found: ModelComparison, prices: Prices) -> float | None:
    """Of a redo: the sum of what is known and has a price; None if nothing has."""
    cost = found.cost()
    pairs = [(cost.kwh, prices.kwh), (cost.hours, prices.hour)]
    parts = [amount * price for amount, price in pairs if amount is not None and price is not None]
    return sum(parts) if parts else None


def describe(found: ModelComparison, prices: Prices, seed: int) -> list[str]:
    """In sentences."""
    return [*_describe_sample(found, seed), *_describe_changes(found), *_describe_cost(found, prices)]


def _describe_sample(found: ModelComparison, seed: int) -> Iterator[str]:
    before = ", ".join(
        f"{model.provenance.title or model.fingerprint} ({count:,})"
        for model, count in found.models.most_common()
    )
    yield (
        f"{found.stage}: {found.model.provenance.describe()} against the stored answers of {before}. "
        f"Compared: {len(found.pairs):,} of {found.population:,} images with answers, drawn with --seed {seed}."
    )
    for why, count in found.run.failures.most_common():
        yield f"Left out: {quantity(count, 'image')}: {why}."
    if found.labelled:
        yield (
            f"Of {quantity(len(found.labelled), 'image')} with labels of people, the new answers are nearer to these in "
            f"{sum(each < 0 for each in found.labelled):,}, and farther from them in "
            f"{sum(each > 0 for each in found.labelled):,}; `{command('score')}` has figures for both."
        )


def _describe_changes(found: ModelComparison) -> Iterator[str]:
    shares = found.shares()
    yield f"Another answer: {_percent(shares['changed'])} of the images."
    yield f"A change of {LARGE:g} or more ({describe_measure(found.stage)}): {_percent(shares['changed_much'])}."
    moves = ", ".join(
        f"{before or 'none'} → {after or 'none'} {count:,}"
        for (before, after), count in found.moves().most_common(MOST_MOVES)
    )
    if any(empty := found.empty()):
        yield f"Nothing is found in {empty[1]:,} images of the sample; it was in {empty[0]:,}."
    yield f"Another bin: {_percent(shares['other_bin'])}{f' ({moves} of the sample)' if moves else ''}."


def _describe_cost(found: ModelComparison, prices: Prices) -> Iterator[str]:
    cost, price = found.cost(), find_price(found, prices)
    if not cost.images:
        yield "A redo would compute nothing: all these answers are in the ledger."
    elif cost.hours is None:
        yield "What a redo would cost is not known: all answers of the sample were in the ledger already."
    else:
        unknown = "energy not known" if prices.kwh is None else "energy and its price not known"
        energy = unknown if cost.kwh is None else _say_energy(cost.kwh)
        priced = f", price {price:,.2f}" if price is not None else ""
        devices = ", ".join(found.run.devices)
        yield (
            f"A redo would compute {cost.images:,} of {found.population:,} images: {_say_time(cost.hours)} at "
            f"{cost.images_per_second:,.1f} images/s on {devices}, {energy}{priced}."
        )
    for stage, count in found.others.most_common():
        yield (
            f"A redo would also run {stage}, for {count / found.drawn:.0%} of the images: their answers are of another model, "
            "or depend on one that would be replaced."
        )


def say_what_next(found: ModelComparison, changes: Mapping[str, str]) -> list[str]:
    """changes: other settings of the stage, as `read_changed` takes them."""
    is_same = not any(pair.change.amount for pair in found.pairs)  # also of scores
    if is_same and found.shares()["changed"].high == 0 and found.shares()["other_bin"].high == 0:
        return [f"Nothing would change, so there is no reason for a redo of {found.stage}."]
    keys = " and ".join(f"`{key} = {_as_toml(value)}`" for key, value in changes.items())
    return [
        f"If you want these answers: write {keys} under [stages.{found.stage}] in daemon.toml, restart the daemon if "
        f"it runs, and type `{command('redo', '--stale')}`. If not, there is nothing to do."
    ]


def as_document(found: ModelComparison, prices: Prices) -> dict[str, Any]:
    """For programs."""
    return {
        "stage": found.stage,
        "fingerprint": found.model.fingerprint,
        "model": found.model.provenance.describe(),
        "stored": {model.fingerprint: count for model, count in found.models.items()},
        "images": found.population,
        "compared": len(found.pairs),
        "left_out": found.run.failures,
        "measure": describe_measure(found.stage),
        "shares": {name: each._asdict() for name, each in found.shares().items()},
        "empty": dict(zip(("before", "now"), found.empty(), strict=True)),
        "bins": [{"from": a, "to": b, "images": count} for (a, b), count in found.moves().most_common()],
        "labelled": len(found.labelled),
        "nearer_to_labels": sum(each < 0 for each in found.labelled),
        "farther_from_labels": sum(each > 0 for each in found.labelled),
        "kept": found.run.kept,
        "cost": {**found.cost()._asdict(), "price": find_price(found, prices), "devices": found.run.devices},
        "other_stages": found.others,
        "most_changed": [
            {
                "id": pair.record.id,
                "location": pair.record.location.decode(errors="replace"),
                "change": round(pair.change.amount, 6),
                "is_other": pair.change.is_other,
                "bins": pair.bins,
            }
            for pair in found.pairs[:MOST_LISTED]
        ],
    }


def _percent(share: Estimate) -> str:
    """With the interval, unless all images were looked at."""
    if share.low == share.high:
        return f"{share.value:.1%}"
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%}, 95 of 100 times)"


def _as_toml(value: str) -> str:
    """A text in quotes, unless it is a number, a list or the like."""
    try:
        parse_toml(f"value = {value}")
    except ValueError:
        return msgspec.json.encode(value).decode()
    return value


def _say_time(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{hours * 60:.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:.1f} seconds"


def _say_energy(kwh: float) -> str:
    return f"{kwh:,.2f} kWh" if kwh >= SMALL_KWH else f"{kwh * 1000:.2g} Wh"
