"""The tables [pipeline] and [unpacking] of daemon.toml: stages, devices and limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from daemon.config.sections import Section
from daemon.config.values import ByteCount, Device, Place, check_slab
from stages.contract.base import Limits
from stages.registry.registry import BUILT_IN

LATENCY = {"workers_per_device": 1, "threads_per_worker": 1}  # if prefer = "latency", unless they are set


class SegmentTable(Section):
    stages: list[str] = Field(min_length=1)
    """Stages of the segment, in order."""
    devices: list[Place] = Field(min_length=1)
    """Devices that hold these stages, for example ["cuda:0", "cuda:1"]; "cuda:0+cuda:1" is a group."""
    workers_per_device: int = Field(1, ge=1, le=256)
    """Worker processes on each of these devices."""


class PipelineSection(Section):
    stages: list[str] = Field([stage.name for stage in BUILT_IN], min_length=1)
    """Stages to run. Their order is always ocr, yolo, clip, blip, then further captioners with names of your own such as
    blip_long, those of plug-ins, then hash and classifiers: classifier, or several such as classifier_safety."""
    mode: Literal["full", "cascade"] = "full"
    """full: run every stage. cascade: skip the stages that cannot change an image's bin any more."""
    prefer: Literal["throughput", "latency"] = "throughput"
    """latency: for few images that somebody waits for. Unless they are set, workers_per_device and threads_per_worker are 1, so
    no other batch delays an image on its GPU, and batch_size is 8. Models are prepared for single images, and what `visiond
    tune` measured is not used. throughput: for many images."""
    placement: Literal["auto", "replicated", "pipelined"] = "auto"
    """replicated: each device holds all stages. pipelined: the stages are spread over the devices. auto: as `visiond tune`
    measured; without that, replicated if the memory is sufficient."""
    segment: list[SegmentTable] = []
    """Explicit placement: a [[pipeline.segment]] table for each segment."""
    devices: list[Device] = []
    """Devices to use: "cpu", or GPUs as `visiond gpus` lists them, by number ("cuda:0", a MIG device "cuda:0:1"), UUID
    ("GPU-…", "MIG-…") or part of the name ("H100" means all H100). Empty: all GPUs, or the CPU if there are none."""
    min_free_gpu_bytes: ByteCount = Field(0, ge=0)
    """GPUs with less free memory than this at the start are not used: for GPUs that other programs use too. Not with
    [[pipeline.segment]] tables."""
    workers_per_device: int = Field(0, ge=0, le=256)
    """Worker processes on each device. 0: the number that `visiond tune` found; without a profile, one on a CPU, and on a GPU
    as many as its memory, the host's memory (4 GB for each worker) and the cores allow. On GPUs, round-robin and fill-first of
    `spread` come before the profile."""
    spread: Literal["memory-aware", "round-robin", "fill-first"] = "memory-aware"
    """How many workers each GPU has while workers_per_device is 0. memory-aware: as many as its own free memory allows.
    round-robin: on every GPU as many as memory-aware gives the one with the fewest. fill-first: as many in all as with
    memory-aware, but the first GPU is filled before the next, so that the last ones may stay free."""
    mps: bool = True
    """Whether the workers of a GPU share it by NVIDIA's Multi-Process Service (MPS), if nvidia-cuda-mps-control is installed: a
    fifth faster than in turns. After the first lost worker they take turns. false: if the loss of one worker must not restart
    the others."""
    executors: int = Field(0, ge=0, le=256)
    """Number of executors: processes that read images, feed workers and write results. They divide the workers and share one
    ledger. 1: the daemon itself. 0: the daemon itself for up to two GPUs, otherwise one for each GPU; with a pipelined
    placement the fastest number. Each has a worker of each segment, and a slab: set fewer if memory is short, more if reading
    or writing limits the rate."""
    threads_per_worker: int = Field(2, ge=1, le=16)
    """Batches that a worker processes at once. More, if `visiond status` says that the workers limit the rate; 1 for less
    memory."""
    decoders_per_worker: int = Field(0, ge=0, le=256)
    """Decoder processes of each worker. 0: chosen by the number of cores. More, if `visiond status` says that decoding limits
    the rate; fewer for less memory."""
    slab_bytes: Annotated[ByteCount, AfterValidator(check_slab)] = 0
    """Size of the slab, an executor's shared memory for images in flight. 0: an eighth of the free memory, for each GPU at
    least 1 GiB and at most 12 GiB; 256 MiB without a GPU. Larger for images of many megabytes; smaller beside programs that
    need the memory."""
    max_attempts: int = Field(3, ge=1, le=1000)
    """Attempts at an image with a temporary error before it is FAILED. More for a share or store with many errors."""
    retry_seconds: float = Field(5.0, ge=0)
    """Wait before the second attempt; doubled before each further one. Longer for a share or store whose errors last."""
    batch_timeout_seconds: float = Field(120.0, gt=0)
    """A worker that takes longer for a batch is killed, and its images are tried one by one. On a slow machine a batch may take
    longer: four times as long as the slowest recent one. More for page readers and chat models on a CPU."""
    load_timeout_seconds: float = Field(600.0, gt=0)
    """A worker that takes longer to load its models is killed. More for large models on a slow disk."""
    drain_seconds: float = Field(30.0, ge=0)
    """Time for images in flight to finish after SIGTERM. Less than what systemd, the container or the batch system waits
    for."""
    rescan_seconds: float = Field(30.0, gt=0)
    """Time between scans, which compare the inboxes with the ledger. Longer for a store that charges for requests, shorter for
    one whose images are urgent."""
    reuse_results: bool = True
    """Whether to reuse results of the same bytes by the same models from the ledger. false: to measure rates."""
    max_pixels: int = Field(100_000_000, ge=1, le=10**12)
    """Images with more pixels FAIL with reason pixels. More for maps and large scans."""
    max_aspect_ratio: float = Field(50.0, ge=1)
    """Images with a larger ratio of long to short edge FAIL with reason aspect. More for panoramas and long screenshots."""
    decode_seconds: float = Field(20.0, gt=0)
    """CPU time of a decoder for one image. More for large images that you trust."""
    decode_bytes: ByteCount = Field(2 << 30, ge=256 << 20)
    """Address space of a decoder. More together with a larger max_pixels."""

    @model_validator(mode="before")
    @classmethod
    def _prefer(cls, table: Any) -> Any:
        prefers_latency = isinstance(table, dict) and table.get("prefer") == "latency"
        return LATENCY | table if prefers_latency else table

    def limits(self) -> Limits:
        return Limits(self.max_pixels, self.max_aspect_ratio, self.decode_seconds, self.decode_bytes)


class UnpackingSection(Section):
    most_files: int = Field(100_000, ge=1, le=1_000_000)
    """Most files, folders and links that may come from one archive, document or video. With more, nothing of it is unpacked.
    Raise this and the next two for archives that you trust."""
    most_bytes: ByteCount = Field(64 << 30, ge=1 << 20)
    """Most bytes that these files may have together. With more, nothing of it is unpacked."""
    most_ratio: int = Field(1100, ge=1, le=1_000_000_000_000)
    """Most bytes that these files may have for each byte of the archive; 64 MiB are always allowed. Deflate, which zip files
    use, reaches 1,032."""
    dpi: int = Field(200, ge=1, le=1200)
    """Resolution at which the pages of a PDF are drawn. More for small print."""
    video_seconds: float = Field(1.0, ge=0.01)
    """Time between two frames that are taken from a video. More for long recordings."""
