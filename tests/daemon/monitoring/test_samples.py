from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from daemon.monitoring.samples import Sum, add, read_samples


class Executor:
    """The metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.images = Counter("images", "Images.", ["stage"], registry=self.registry)
        self.seconds = Histogram("seconds", "Time.", registry=self.registry, buckets=(1.0,))
        self.memory = Gauge("memory", "Bytes.", ["worker"], registry=self.registry)

    def work(self, images: int, memory: int) -> None:
        self.images.labels("ocr").inc(images)
        self.seconds.observe(0.5)
        self.memory.labels(f"{memory}").set(memory)


def values(daemon: Executor, total: Sum) -> dict[str, float]:
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in add(daemon.registry.collect(), total.total())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_work_of_all_executors_is_added_up_and_what_a_lost_one_counted_stays() -> None:
    daemon, first, second, total = Executor(), Executor(), Executor(), Sum()
    daemon.images.labels("ocr")
    first.work(3, 10)
    second.work(4, 20)
    for executor in (first, second):
        total.take(executor, read_samples([executor.images, executor.seconds, executor.memory]))
    seen = values(daemon, total)
    assert (seen["images_total ocr"], seen["seconds_bucket 1.0"], seen["seconds_count"]) == (7, 2, 2)
    assert (seen["memory 10"], seen["memory 20"]) == (10, 20)
    total.keep(first)
    seen = values(daemon, total)
    assert (seen["images_total ocr"], seen["seconds_sum"]) == (7, 1.0)
    assert "memory 10" not in seen
