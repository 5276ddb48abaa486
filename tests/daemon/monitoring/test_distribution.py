from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from daemon.monitoring.distribution import Distribution

BUCKETS = (0.1, 0.5, 2.0)
VALUES = (0.0, 0.1, 0.2, 0.5, 0.50001, 2.0, 7.5)


def test_it_says_what_the_librarys_histogram_says() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution("wait_seconds", "How long.", registry=ours, buckets=BUCKETS)
    histogram = Histogram("wait_seconds", "How long.", registry=theirs, buckets=BUCKETS)
    for value in VALUES:
        distribution.observe(value)
        histogram.observe(value)
    expected = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == expected
    assert ours.get_sample_value("wait_seconds_bucket", {"le": "0.5"}) == 4
