"""The stages as a library, without the daemon: names and bytes in, rows out."""

from visiond.engine.annotator import Annotator, NotLoaded

__all__ = ["Annotator", "NotLoaded"]
