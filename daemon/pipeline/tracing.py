"""Traces of a sample of the images, by OpenTelemetry: where the time of one image goes.

The spans of an image follow one another without gaps: each begins where the one before it ended, so it includes
the wait for its turn. The stages of a batch are in the span of the batch, one after another at its end, with the
durations that the worker has reported; what is before them is decoding and the wait for the device. Nothing of this
is imported, and no image is looked at, unless [traces] sample is set.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from daemon import __version__
from daemon.config.sections import TracesSection
from daemon.core.errors import ConfigError
from daemon.core.jobs import Attempt, Ending, JobStatus
from daemon.core.messages import Reply
from daemon.system.clock import steady_seconds

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

log = structlog.get_logger()

LIBRARY = "opentelemetry"  # its logger
LIBRARIES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
PATH = "/v1/traces"  # of OTLP over HTTP
CLOSE_SECONDS = 2.0  # at the end, for what was not sent yet
COMPLAINT_SECONDS = 600.0  # between two log lines about a receiver that takes nothing
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: spreads consecutive numbers evenly

Attributes = Mapping[str, "AttributeValue"]
NOTHING: Attributes = MappingProxyType({})


class Phase(NamedTuple):
    """A part of an image's way, which ended at this time (steady seconds). stages: those that ran in it, each with the
    seconds of its batch and its attributes."""

    name: str
    ended_at: float
    attributes: Attributes = NOTHING
    stages: Sequence[tuple[str, float, Attributes]] = ()


class Trail(msgspec.Struct):
    """What is known so far about one image on its way. began_at: steady seconds."""

    began_at: float
    phases: list[Phase]
    reused: list[str]  # stages whose results the ledger had


class Tracer:
    """Notes when the sampled images of an executor get from one phase to the next, and sends a trace when one is published.
    Every method is about a group of images, most of which are not in the sample."""

    def __init__(self, sample: float, provider: TracerProvider, exporter: SpanExporter) -> None:
        """sample: share of the images, 0 to 1. exporter: the provider's."""
        self._most = int(sample * 2**64)
        self._provider, self._exporter = provider, exporter
        self._tracer = provider.get_tracer("visiond", __version__)
        self._trails: dict[int, Trail] = {}  # of images in flight

    def read(self, attempts: Iterable[Attempt]) -> None:
        """The files were read, and what the ledger knew about their bytes is filled in."""
        now, clock = steady_seconds(), time.monotonic()
        for attempt in attempts:
            job = attempt.job
            if (job.id * GOLDEN) % 2**64 >= self._most:
                continue
            fed_at = now - (clock - attempt.began_at)
            # A redo was seen long ago.
            seen_at = fed_at if job.has_result else min(job.seen_at, fed_at)
            waits = [] if job.has_result else [Phase("wait", fed_at)]
            self._trails[job.id] = Trail(seen_at, [*waits, Phase("read", now)], list(attempt.content.outputs))

    def answered(self, segment: str, device: str, attempts: Sequence[Attempt], reply: Reply) -> None:
        """A worker has answered."""
        now, about = steady_seconds(), {"visiond.segment": segment, "visiond.device": device}
        seconds: dict[str, float] = {}
        for run in reply.runs:
            seconds[run.stage] = seconds.get(run.stage, 0.0) + run.seconds
        for attempt, outcome in zip(attempts, reply.outcomes, strict=True):
            if trail := self._trails.get(attempt.job.id):
                stages = [
                    (stage, spent, {"visiond.image.seconds": outcome.outputs[stage].seconds})
                    for stage, spent in seconds.items()
                    if stage in outcome.outputs
                ]
                attributes = about | {"visiond.batch.images": len(reply.outcomes)}
                trail.phases += [_queued(attempt), Phase("batch", now, attributes, stages)]

    def lost(self, attempts: Iterable[Attempt], cause: str) -> None:
        """A worker was lost with these."""
        batch = Phase("batch", steady_seconds(), {"visiond.error": cause})
        for attempt in attempts:
            if trail := self._trails.get(attempt.job.id):
                trail.phases += [_queued(attempt), batch]

    def pass_on(self, phase: str, images: Iterable[Attempt | Ending]) -> None:
        """This phase of these images is over."""
        now = steady_seconds()
        for image in images:
            if trail := self._trails.get(image.job.id):
                trail.phases.append(Phase(phase, now))

    def forget(self, attempts: Iterable[Attempt]) -> None:
        """These stay PENDING for the next daemon."""
        for attempt in attempts:
            self._trails.pop(attempt.job.id, None)

    def publish(self, endings: Collection[Ending]) -> None:
        """The results were written to files, or there are none: send the traces."""
        self.pass_on("publish", endings)
        for ending in endings:
            if trail := self._trails.pop(ending.job.id, None):
                self._send(trail, ending)

    def _send(self, trail: Trail, ending: Ending) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import StatusCode, set_span_in_context

        image = self._tracer.start_span(
            "image", Context(), start_time=_nanoseconds(trail.began_at), attributes=_describe(trail, ending)
        )
        if ending.status is JobStatus.FAILED:
            image.set_status(StatusCode.ERROR, str(ending.failure.reason) if ending.failure else None)
        within, began_at = set_span_in_context(image, Context()), trail.began_at
        for name, ended_at, attributes, stages in trail.phases:
            span = self._tracer.start_span(
                name, within, start_time=_nanoseconds(began_at), attributes=attributes
            )
            at = max(began_at, ended_at - sum(seconds for _, seconds, _ in stages))
            for stage, seconds, about in stages:
                part = self._tracer.start_span(
                    stage, set_span_in_context(span, Context()), start_time=_nanoseconds(at), attributes=about
                )
                at = min(at + seconds, ended_at)
                part.end(_nanoseconds(at))
            span.end(_nanoseconds(ended_at))
            began_at = ended_at
        image.end(_nanoseconds(began_at))

    def close(self) -> None:
        """Send what is left. Waits CLOSE_SECONDS for a receiver that is not there, and 10 s for one that does not answer."""
        give_up = threading.Timer(CLOSE_SECONDS, self._exporter.shutdown)
        give_up.daemon = True
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


def _queued(attempt: Attempt) -> Phase:
    """The wait for a worker, which has had the image since `sent_at`."""
    return Phase("queue", steady_seconds() - (time.monotonic() - attempt.sent_at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _describe(trail: Trail, ending: Ending) -> Attributes:
    """What a trace says about its image. Not its name: `visiond show` with the number has all about it."""
    job, content = ending.job, ending.content
    found: dict[str, AttributeValue] = {
        "visiond.image.id": job.id,
        "visiond.image.bytes": job.version.size,
        "visiond.inbox": job.inbox,
        "visiond.attempts": ending.attempts,
        "visiond.outcome": "retried" if ending.status is JobStatus.PENDING else ending.status.name.lower(),
    }
    if content.width:
        found |= {
            "visiond.image.format": content.format,
            "visiond.image.width": content.width,
            "visiond.image.height": content.height,
        }
    found |= {"visiond.bin": ending.bin} if ending.bin else {}
    found |= {"visiond.reason": str(ending.failure.reason)} if ending.failure else {}
    found |= {"visiond.reused": trail.reused} if trail.reused else {}
    return found


class _Complaints(logging.Handler):
    """Passes on what the library logs, now and then: it complains about each attempt to send."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._again_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + COMPLAINT_SECONDS
            log.warning("traces cannot be sent, and are dropped; work goes on", why=record.getMessage())


def check_traces(settings: TracesSection) -> None:
    """Raises ConfigError if traces are wanted and cannot be made."""
    try:
        missing = settings.sample and not all(map(importlib.util.find_spec, LIBRARIES))
    except ModuleNotFoundError:  # the package around it
        missing = True
    if missing:
        fix = "install it with: pip install 'visiond[traces]', or set sample = 0"
        raise ConfigError([f"traces.sample: OpenTelemetry is not installed; {fix}."])


@contextlib.contextmanager
def opened_tracer(settings: TracesSection, executor: str = "") -> Iterator[Tracer | None]:
    """A tracer, which sends what is left at the end of the context; None if nothing is to be traced. executor: its name;
    empty for the daemon's own. Raises ConfigError."""
    if not settings.sample:
        yield None
        return
    check_traces(settings)
    tracer = _open(settings, executor)
    try:
        yield tracer
    finally:
        tracer.close()


def _open(settings: TracesSection, executor: str) -> Tracer:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    library = logging.getLogger(LIBRARY)
    library.handlers, library.propagate = [_Complaints()], False
    endpoint = f"{settings.endpoint.rstrip('/')}{PATH}" if settings.endpoint else None
    exporter = OTLPSpanExporter(endpoint)
    about = {"service.name": "visiond", "service.version": __version__}
    resource = Resource.create(about | ({"visiond.executor": executor} if executor else {}))
    provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(settings.sample, provider, exporter)
