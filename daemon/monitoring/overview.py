"""What the page of the state shows beside the snapshot: disks, failures by reason and what to do about them, and the last hour
as bars. Figures are written as people say them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from daemon.config.loading import Config, parse
from daemon.config.showing import list_tables
from daemon.core.errors import VisiondError
from daemon.core.hints import command
from daemon.monitoring.counts import MINUTES
from daemon.monitoring.disks import Disks, DiskSpace, list_written_folders
from stages.contract.base import Reason

REST = 20  # between two counts of the reasons, as a multiple of what one takes
LITTLE_ROOM = 0.05  # of a disk, from which it is marked
FOLDERS = {
    "output.results": "results",
    "output.failed": "failed",
    "output.done": "done",
    "output.bins_folder": "bins",
    "state.path": "state",
}
RETRY = "then retry"
ADVICE = {
    Reason.EMPTY: "The file has no bytes. Deliver it again.",
    Reason.NOT_AN_IMAGE: "The name says that it is an image, but its bytes are none. Deliver it again, or remove it.",
    Reason.FORMAT: "Convert it to a format that visiond reads, and deliver that file; the reason says what it is.",
    Reason.HEADER: "The file is damaged, or made to look larger than it is. Deliver it again, or remove it.",
    Reason.PIXELS: "If you know the picture and want it, set [pipeline] max_pixels to what the reason says, restart the "
    f"daemon, {RETRY}. A small file with so many pixels may be made to use up memory: remove it.",
    Reason.ASPECT: f"Set [pipeline] max_aspect_ratio to what the reason says, restart the daemon, {RETRY}.",
    Reason.TRUNCATED: "The file ends too early. Deliver it again.",
    Reason.DECODER: "The file is damaged, or needs too much memory or time. Deliver it again.",
    Reason.BYTES: f"Set [pipeline] slab_bytes to what the reason says, restart the daemon, {RETRY}.",
    Reason.UNREADABLE: f"Fix the file's permissions, or its disk, {RETRY}.",
    Reason.NOT_REGULAR: "Put the file itself into the inbox: it is a link, a pipe or a device.",
    Reason.STAGE: f"A stage raised an error. The reason and the log have the cause; fix it, {RETRY}.",
    Reason.MEMORY: f"The GPU has too little memory for it. Make the image smaller, or use a larger GPU, {RETRY}.",
    Reason.TIMEOUT: f"Its worker took too long. Make the image smaller, or use a faster machine, {RETRY}.",
    Reason.POISON: f"Its worker died of it more than once. Look into the log; keep the file for a report, {RETRY}.",
    Reason.RULE: f"Your rule raised an error. Fix the rule, restart the daemon, {RETRY}.",
    Reason.CONTAINER: f"Something in it could not be unpacked: do what the reason says, {RETRY}.",
}


@dataclass(frozen=True, slots=True)
class Room:
    """A file system. folders: what is on it. space: None if it does not answer."""

    folders: list[str]
    space: DiskSpace | None

    @property
    def used(self) -> float:
        """0 to 1."""
        return (
            1 - self.space.free_bytes / self.space.size_bytes if self.space and self.space.size_bytes else 0.0
        )

    @property
    def is_short(self) -> bool:
        return bool(self.space) and self.used > 1 - LITTLE_ROOM


@dataclass(frozen=True, slots=True)
class Failures:
    """images: that failed for this reason. advice: what to do."""

    reason: str
    images: int
    advice: str


class Overview:
    """reasons: the failures by reason, the most frequent first. are_last: whether only the last ones are counted. settings:
    the configuration, which stays as it is while this process runs."""

    def __init__(self, config: Config, count_reasons: Callable[[], tuple[Counter[str], bool]]) -> None:
        """count_reasons: and whether only the last failures are counted. Raises VisiondError."""
        folders = {FOLDERS[key]: folder for key, folder in list_written_folders(config).items()}
        folders |= {f"inbox {each.name}".rstrip(): each.path for each in config.inbox if not each.url}
        self._disks = Disks(folders)
        self._names = [*folders]
        self.settings = [*list_tables(config, parse({}, config.folder))]
        self._count_reasons = count_reasons
        self._count_again_at = 0.0
        self.reasons: list[Failures] = []
        self.are_last = False

    async def look(self) -> None:
        """At the disks, which may not answer."""
        await self._disks.look()

    def rooms(self) -> list[Room]:
        """As of the last look."""
        folders: dict[int, Room] = {}
        silent = []
        for name in self._names:
            if (space := self._disks.rooms.get(name)) is None:
                silent.append(name)
            else:
                folders.setdefault(space.device, Room([], space)).folders.append(name)
        return [*folders.values(), *([Room(silent, None)] if silent else [])]

    def count(self, failed: int) -> None:
        """Count the reasons anew, unless that was done a moment ago. failed: images, as the daemon counts them."""
        began = time.monotonic()
        if not failed:
            self.reasons, self._count_again_at = [], 0.0
        elif began >= self._count_again_at:
            try:
                counts, self.are_last = self._count_reasons()
            except VisiondError:  # the search page says why
                counts = Counter()
            self.reasons = [
                Failures(reason, images, advise(reason)) for reason, images in counts.most_common()
            ]
            self._count_again_at = time.monotonic() + REST * (time.monotonic() - began)


def advise(reason: str) -> str:
    try:
        return ADVICE.get(Reason(reason), "")
    except ValueError:  # of another version
        return f"`{command('list', '--status', 'failed')}` has the details."


@dataclass(frozen=True, slots=True)
class Bar:
    """x, y, height: in percent. title: the minute and its count."""

    x: float
    y: float
    height: float
    title: str


@dataclass(frozen=True, slots=True)
class LastHour:
    """The images of each minute as bars, the last one on the right."""

    bars: list[Bar]
    images: int
    most: int  # in a minute
    span: str  # "last hour", or since when

    @classmethod
    def of(cls, minutes: Sequence[int]) -> LastHour:
        """minutes: as of the snapshot."""
        most, count = max(minutes, default=0), len(minutes)
        bars = []
        for place, images in enumerate(minutes):
            ago = count - 1 - place
            height = 100 * images / most if most else 0.0
            when = "this minute" if not ago else f"{ago} min ago"
            x = 100 * (MINUTES - count + place) / MINUTES
            bars.append(Bar(round(x, 3), round(100 - height, 2), round(height, 2), f"{when}: {images:,}"))
        span = "in the last hour" if count >= MINUTES else "since the daemon started"
        return cls(bars, sum(minutes), most, span)


def say_bytes(count: float) -> str:
    """ "820 MiB", "1.2 TiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit == "GiB" and count < 10 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def say_seconds(seconds: float) -> str:
    """ "45 s", "12 min", "3 h 20 min", "2 days 5 h"."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, left = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {left} min" if left else f"{hours} h"
    days, rest = divmod(hours, 24)
    return f"{days} days {rest} h" if rest else f"{days} days"


def say_ago(at: float) -> str:
    """at: Unix seconds."""
    return f"{say_seconds(time.time() - at)} ago"


def say_time(at: float) -> str:
    """In the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


FILTERS = {"size": say_bytes, "duration": say_seconds, "ago": say_ago, "clock": say_time}  # for templates
