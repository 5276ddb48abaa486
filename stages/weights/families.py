"""The form of the catalog: a published model, and what the models of a family have in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A published model.

    name: for the configuration and `visiond models pull`. type: its model_type, or the catalog's ULTRALYTICS.
    parameters: their number. quality: what was measured, and the value. source: of license, parameters and quality.
    file: of the repository, if it has several models. detector: the repository of the text detector that is pulled
    together with a text recognizer.
    """

    name: str
    stage: str
    family: str
    type: str
    repository: str
    license: str = ""
    parameters: int | None = None
    quality: str = ""
    source: str = ""
    file: str = ""
    detector: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of a family have in common.
    rows: of each model its name, its repository or file, millions of parameters, and the figure for `measure`."""

    stage: str
    name: str
    type: str
    license: str
    measure: str
    source: str
    rows: tuple[tuple[str, str, float | None, float | None], ...]
    repository: str = ""  # if all models are files of one
    detector: str = ""  # as of Entry

    def entries(self) -> Iterator[PublishedModel]:
        for name, place, millions, figure in self.rows:
            yield PublishedModel(
                name,
                self.stage,
                self.name,
                self.type,
                self.repository or place,
                self.license,
                None if millions is None else round(millions * 1_000_000),
                "" if figure is None else self.measure.format(figure),
                self.source,
                place if self.repository else "",
                self.detector,
            )
