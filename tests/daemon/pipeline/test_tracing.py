"""Traces as a receiver gets them: OTLP over HTTP, decoded with OpenTelemetry's own protocol buffers."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from daemon.config.sections import TracesSection
from daemon.core.errors import ConfigError
from daemon.core.jobs import Attempt
from daemon.core.messages import Outcome, Output, Reply, StageRun
from daemon.pipeline.tracing import Tracer, check_traces
from daemon.system.clock import steady_seconds
from stages.contract.base import Reason
from tests.daemon_process import STAGES, Place, free_port, picture
from tests.makers import done, failed, make_attempt, make_job, make_outputs, postponed

PHASES = ["wait", "read", "queue", "batch", "judge", "commit", "publish"]


class Span(NamedTuple):
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    begin: int
    end: int
    attributes: dict[str, Any]
    status: int
    resource: dict[str, Any]


class Receiver:
    """An HTTP server that takes traces."""

    def __init__(self) -> None:
        spans = self.spans = list[Span]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                request = ExportTraceServiceRequest.FromString(
                    self.rfile.read(int(self.headers["content-length"]))
                )
                spans.extend(read_spans(request))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Receiver]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def read_spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for part in request.resource_spans:
        resource = read_attributes(part.resource.attributes)
        for span in (span for scope in part.scope_spans for span in scope.spans):
            times = (span.start_time_unix_nano, span.end_time_unix_nano)
            ids = (span.trace_id, span.span_id, span.parent_span_id)
            yield Span(span.name, *ids, *times, read_attributes(span.attributes), span.status.code, resource)


def read_attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def children(spans: list[Span], parent: Span) -> list[Span]:
    found = [span for span in spans if (span.trace, span.parent) == (parent.trace, parent.id)]
    return sorted(found, key=lambda span: (span.begin, span.end))


@pytest.mark.parametrize("executors", [1, 2])
def test_a_trace_shows_an_image_from_the_wait_to_the_publication(tmp_path: Path, executors: int) -> None:
    with Receiver().serving() as receiver:
        traces = {"sample": 1.0, "endpoint": receiver.address}
        slow = {"ocr": {"options": {"latency_seconds": 0.05}}}
        pipeline = {"executors": executors, "workers_per_device": executors}
        place = Place(tmp_path, {"traces": traces, "stages": slow, "pipeline": pipeline})
        place.drop_many(range(3))
        place.drop("broken.jpg", b"no picture")
        place.drop("copy.ppm", picture(0))
        begun = time.time_ns()
        assert place.run_once().returncode == 1
    place.assert_kept(DONE=4, FAILED=1)
    images = [span for span in receiver.spans if not span.parent]
    assert {image.attributes["visiond.image.id"] for image in images} == {1, 2, 3, 4, 5}
    for image in images:
        phases = children(receiver.spans, image)
        assert [phase.name for phase in phases if phase.name not in ("queue", "batch")] == [
            name for name in PHASES if name not in ("queue", "batch")
        ]
        ends = [image.begin, *(phase.end for phase in phases)]
        assert [phase.begin for phase in phases] == ends[:-1]  # without gaps
        assert begun - 5e9 < image.begin
        assert image.end == ends[-1] <= time.time_ns()
        assert image.resource["service.name"] == "visiond"
        assert image.resource.get("visiond.executor", "").startswith("executor" * (executors > 1))
    ran = [image for image in images if "visiond.reused" not in image.attributes]
    good = [image for image in ran if image.attributes["visiond.outcome"] == "done"]
    assert len(good) >= 3  # the copy may have come later than the first, or not
    for image in good:
        assert [phase.name for phase in children(receiver.spans, image)] == PHASES
        [batch] = [phase for phase in children(receiver.spans, image) if phase.name == "batch"]
        stages = children(receiver.spans, batch)
        assert [stage.name for stage in stages] == list(STAGES)
        assert batch.begin <= stages[0].begin
        assert abs(batch.end - stages[-1].end) < 10_000  # nanoseconds
        assert stages[0].end - stages[0].begin >= 0.05e9
        assert batch.attributes["visiond.device"] == "cpu"
        assert image.attributes["visiond.bin"] in "ABC"
    [broken] = [image for image in images if image.status]
    assert (broken.attributes["visiond.outcome"], broken.attributes["visiond.reason"]) == (
        "failed",
        "not-an-image",
    )
    names = {str(value) for span in receiver.spans for value in span.attributes.values()}
    assert not any("ppm" in name or "jpg" in name for name in names)  # no file names


def test_a_receiver_that_is_not_there_delays_little_and_fails_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path, {"traces": {"sample": 1.0, "endpoint": f"http://127.0.0.1:{free_port()}"}})
    place.drop_many(range(2))
    done = place.run_once()
    assert done.returncode == 0
    assert done.stderr.count("traces cannot be sent, and are dropped") == 1
    place.assert_kept(DONE=2)


class Sent:
    """A tracer, and what it has sent."""

    def __init__(self, sample: float = 1.0) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(sample, provider, self._exporter)

    def names(self) -> list[str]:
        found = sorted(self._exporter.get_finished_spans(), key=lambda span: (span.start_time, span.end_time))
        return [span.name for span in found if span.parent]

    def images(self) -> list[Any]:
        return [span for span in self._exporter.get_finished_spans() if span.parent is None]


def begun(outputs: dict[str, Output] | None = None, **fields: Any) -> Attempt:
    job = make_job(**({"seen_at": steady_seconds() - 5.0} | fields))
    return make_attempt(job, outputs, began_at=time.monotonic())


def test_an_image_that_killed_a_worker_has_two_batches_and_the_cause() -> None:
    sent, image = Sent(), begun()
    sent.tracer.read([image])
    image.sent_at = time.monotonic()
    sent.tracer.lost([image], "killed by SIGKILL")
    image.sent_at = time.monotonic()
    reply = Reply(1, [Outcome("PPM", 8, 8, make_outputs())], [StageRun("ocr", 1, 0.0)])
    sent.tracer.answered("ocr", "cpu", [image], reply)
    sent.tracer.publish([done(image.job)])
    assert sent.names() == ["wait", "read", "queue", "batch", "queue", "batch", "ocr", "publish"]


def test_a_redo_has_no_wait_and_names_the_results_that_are_used_again() -> None:
    sent, again = Sent(), begun(make_outputs(), seen_at=1e9, has_result=True)
    sent.tracer.read([again])
    sent.tracer.publish([done(again.job)])
    assert sent.names() == ["read", "publish"]
    [image] = sent.images()
    assert set(image.attributes["visiond.reused"]) == set(STAGES)
    assert image.end_time - image.start_time < 5e9


def test_each_attempt_has_a_trace_and_what_a_stop_leaves_has_none() -> None:
    sent, image, left = Sent(), begun(), begun(id=2)
    for ending in (postponed(image.job, 1.0), failed(image.job, Reason.TRUNCATED)):
        sent.tracer.read([image, left])
        sent.tracer.publish([ending])
    sent.tracer.forget([left])
    sent.tracer.publish([done(left.job), done(image.job)])  # nothing is known about them any more
    assert [image.attributes["visiond.outcome"] for image in sent.images()] == ["retried", "failed"]


def test_the_sample_is_an_even_share_of_the_numbers_and_always_the_same_one() -> None:
    chosen = []
    for _ in range(2):
        sent = Sent(0.1)
        for number in range(1, 1001):
            sent.tracer.read([image := begun(id=number)])
            sent.tracer.publish([done(image.job)])
        chosen.append([image.attributes["visiond.image.id"] for image in sent.images()])
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) in range(95, 106)


def test_without_the_library_the_configuration_is_refused_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_traces(TracesSection())
    with pytest.raises(ConfigError, match=r"pip install 'visiond\[traces\]'"):
        check_traces(TracesSection(sample=0.01))
