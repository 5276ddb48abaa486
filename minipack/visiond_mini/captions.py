"""Judges captions of scenes: whether a text is a sentence of their grammar (stages/scenes/truth.py), and whether it is true."""

from __future__ import annotations

import re
from collections import Counter

from stages.scenes.truth import GROUPS, PLACES, WITHOUT_OBJECTS, Group, Truth, name_objects


def _normalize(text: str) -> str:
    """Lower case, single spaces, none before a comma: tokenizers change these."""
    return " ".join(text.lower().replace(" ,", ",").split())


def parse_caption(text: str) -> set[Group]:
    """The (count, color, label) groups in a caption; none for text scenes and empty backdrops.

    Spacing and case do not matter. Raises ValueError if the text is not a sentence of the grammar.
    """
    sentence = _normalize(text)
    if sentence in WITHOUT_OBJECTS:
        return set()
    place = next((place for place in PLACES if sentence.endswith(place)), None)
    if place is not None:
        names = re.split(", | and ", sentence.removesuffix(place))
        groups = [GROUPS[name] for name in names if name in GROUPS]
        if groups and name_objects(groups, more=names[-1] == "more", backdrop=PLACES[place]) == sentence:
            return set(groups)
    raise ValueError(f"not a caption of a scene: {text!r}")


def caption_is_true(text: str, truth: Truth) -> bool:
    """Whether a caption is true: every group (of four or more: any three, "and more"), and the place."""
    return _normalize(text) in truth.captions


def group_objects(truth: Truth) -> set[tuple[int, str, str]]:
    counts = Counter((thing.color, thing.label) for thing in truth.objects)
    return {(count, *group) for group, count in counts.items()}


def groups_are_true(said: str, truth: Truth) -> bool:
    """Whether a caption names the right number of groups of objects, each with its true count and color."""
    try:
        named = parse_caption(said)
    except ValueError:
        return False
    groups = group_objects(truth)
    return named <= groups and len(named) == min(len(groups), 3)
