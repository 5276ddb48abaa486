"""The tables of daemon.toml: every key with its default, its limits and its meaning.

docs/configuration.md is made from the descriptions here.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from stages.base import Limits
from stages.binning import Thresholds
from stages.registry import BUILT_IN, STAGES

# Temporary and partial names of the programs that people upload and edit with.
IGNORED = [".*", "*~", "*.tmp", "*.temp", "*.part", "*.partial", "*.crdownload", "*.download", "*.swp", "*.filepart"]
LEAST_SLAB_BYTES = 1 << 20
OUT_OF_RANGE = "out_of_range"  # the type of the error of a number that is
MOST = {"_seconds": 10**8, "_bytes": 1 << 50, "": 10**12}  # by unit

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _parse_bytes(value: object) -> object:
    """268435456, "256 MiB" and "0.5GB" all count bytes."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().removesuffix("b").strip()
    number = text.rstrip("kmgi").strip()
    try:
        return int(float(number) * _UNITS[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f'"{value}" is no size; write a number of bytes or, for example, "256 MiB"') from None


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]*", name):
        raise ValueError(f'"{name}" is no folder\'s name; write letters, digits, - and _, for example "scans-2"')
    return name


def _check_address(text: str) -> str:
    """A host or [IPv6 address], a colon and a port; or nothing."""
    if text and not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):\d{1,5}", text):
        raise ValueError(f'"{text}" is no address; write a host and a port, for example "127.0.0.1:9464", or "" for none')
    if text and int(text.rpartition(":")[2]) > 65535:
        raise ValueError(f'"{text}": ports go up to 65535')
    return text


def _check_slab(count: int) -> int:
    if 0 != count < LEAST_SLAB_BYTES:
        raise ValueError("should be 0 or at least 1 MiB: larger images are refused")
    return count


def _canonical_device(name: str) -> str:
    """One name for each device, so that all may compare them: cpu, or cuda and its number."""
    found = re.fullmatch(r"(cpu|cuda)(?::(\d{1,6}))?", name, re.ASCII)
    if not found:
        raise ValueError(f'"{name}" is no device; write "cpu", or "cuda:0" as `visiond gpus` lists them')
    return "cpu" if found[1] == "cpu" else f"cuda:{int(found[2] or 0)}"


def most_of(name: str) -> int:
    """The largest number that a key of this name can have."""
    return next(most for unit, most in MOST.items() if name.endswith(unit))


ByteCount = Annotated[int, BeforeValidator(_parse_bytes), Field(le=1 << 53)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Device = Annotated[str, AfterValidator(_canonical_device)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_number(cls, value: object, field: ValidationInfo) -> object:
        """Neither infinite nor more than timers, the ledger and the kernel can count with."""
        most = most_of(field.field_name or "")
        if isinstance(value, int | float) and not -most <= value <= most:  # nor NaN
            raise PydanticCustomError(OUT_OF_RANGE, "is out of range")
        return value


class Inbox(Section):
    path: Path = Field(Path("inbox"), description="The folder to watch.")
    name: Annotated[str, AfterValidator(_check_name)] = Field(
        "",
        description="Sub-folder of results, failed, done and bins for this inbox. Needed as soon as there are several inboxes.",
    )
    priority: int = Field(
        0, ge=-1_000_000, le=1_000_000, description="Images of the inbox with the highest priority are fed first."
    )
    recursive: bool = Field(True, description="Whether folders inside the inbox are watched too.")
    settle_seconds: float = Field(
        2.0,
        ge=0,
        description="A file is whole once it has not changed for so long, or at once if it arrived by rename.",
    )
    ignore: list[str] = Field(
        IGNORED, description="Names to pass over, as shell patterns; matched against each part of the path."
    )
    on_success: Literal["keep", "move", "delete"] = Field(
        "keep", description="What becomes of the source once its result is durable. move: into [output] done."
    )
    watch: Literal["auto", "inotify", "poll"] = Field(
        "auto", description="How changes are noticed; auto polls network file systems, which send no events."
    )


class OutputSection(Section):
    results: Path = Field(Path("results"), description="Where sidecars go: <path in the inbox>.json.")
    failed: Path = Field(
        Path("failed"),
        description="Where the reason of each failed image goes; the image itself too, unless on_success is keep.",
    )
    done: Path = Field(Path("done"), description='Where sources go with on_success = "move".')
    bins_folder: Path = Field(Path("bins"), description="Where bins A, B, C, … are.")
    bins: Literal["none", "link", "copy", "move"] = Field(
        "none",
        description="How images get into their bin: a symbolic link to the absolute path, a copy, or the source itself.",
    )
    sinks: list[Literal["jsonl"]] = Field(
        [],
        description="Further outputs. jsonl: from now on every record that is DONE is appended to <results>.jsonl as well, at "
        "least once each, by id; a file that is annotated again gets another line. A sink that fails holds up nothing else.",
    )

    @property
    def jsonl_file(self) -> Path:
        """Where the sink jsonl writes."""
        return Path(f"{self.results}.jsonl")


class StateSection(Section):
    path: Path = Field(Path("state"), description="The daemon's own folder: ledger, lock, control socket, compile caches.")


def _check_hours(text: str) -> str:
    """ "HH:MM-HH:MM", or nothing."""
    found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)", text)
    if text and not found:
        raise ValueError(f'"{text}" is not a time range; write a start and an end, for example "02:00-05:00", or ""')
    if found and found.group(1, 2) == found.group(3, 4):
        raise ValueError(f'"{text}" starts and ends at the same time; write "" for any time')
    return text


class UpkeepSection(Section):
    quiet_hours: Annotated[str, AfterValidator(_check_hours)] = Field(
        "02:00-05:00",
        description="When upkeep may start, in local time, if no image is in flight; it may cross midnight. Empty: any time.",
    )
    verify_days: float = Field(
        7, ge=0, description="Days between checks of the whole ledger; work goes on meanwhile. 0: never."
    )
    vacuum_days: float = Field(
        7,
        ge=0,
        description="Days between attempts to shrink the ledger's file, if a quarter of it is free; stops when images or a "
        "command come. 0: never.",
    )
    prune_days: float = Field(0, ge=0, description="Days between prunes, as with `visiond prune`; 0: never.")
    prune_age_days: float = Field(
        90, ge=1, description="Days since a version was replaced, or gone, before it is pruned; like --older-than."
    )
    backup_folder: str = Field(
        "",
        description="Folder for backups of the ledger, each named by its date; best on another disk. Empty: no backups.",
    )
    backup_days: float = Field(1, gt=0, description="Days between backups, if backup_folder is set.")
    backups_kept: int = Field(7, ge=1, description="How many backups are kept; older ones are removed.")


class SegmentTable(Section):
    stages: list[str] = Field(min_length=1, description="Stages of this segment, in order.")
    devices: list[Device] = Field(min_length=1, description='Devices that hold it, for example ["cuda:0", "cuda:1"].')
    workers_per_device: int = Field(1, ge=1, le=256, description="Processes on each of them.")


class PipelineSection(Section):
    stages: list[str] = Field(
        [stage.name for stage in BUILT_IN],
        min_length=1,
        description="Which stages run; their order is always ocr, yolo, clip, blip, then those of plug-ins.",
    )
    mode: Literal["full", "cascade"] = Field(
        "full", description="cascade: stop at the first bin that passes and skip the later stages."
    )
    placement: Literal["auto", "replicated", "pipelined"] = Field(
        "auto",
        description="replicated: each device holds all stages. pipelined: stages spread over devices. "
        "auto: replicated where the memory suffices.",
    )
    segment: list[SegmentTable] = Field([], description="Explicit placement, a [[pipeline.segment]] table each.")
    devices: list[Device] = Field([], description="Devices to use; empty: all GPUs, or the CPU when there is none.")
    workers_per_device: int = Field(
        0,
        ge=0,
        le=256,
        description="Worker processes on each device; 0: one on a CPU, or where stages are spread over devices; else "
        "as many as a GPU's memory, the host's (4 GB for each worker) and the cores allow.",
    )
    mps: bool = Field(
        True,
        description="Whether a GPU's workers run side by side on it by NVIDIA's Multi-Process Service, a fifth faster than in "
        "turns, where the driver's nvidia-cuda-mps-control is installed. The first worker that is lost ends it.",
    )
    threads_per_worker: int = Field(2, ge=1, le=16, description="Batches a worker has in hand at once.")
    decoders_per_worker: int = Field(
        0, ge=0, le=256, description="Disposable decoder processes for each worker; 0: chosen by cores."
    )
    slab_bytes: Annotated[ByteCount, AfterValidator(_check_slab)] = Field(
        0, description="Shared memory for images in flight: the byte budget; 0: 1 GiB for each GPU, 256 MiB without one."
    )
    queue_images: int = Field(1024, ge=1, le=1_000_000, description="Most images waiting in front of each segment.")
    max_attempts: int = Field(3, ge=1, le=1000, description="Tries of an image whose error may pass, before it is FAILED.")
    retry_seconds: float = Field(5.0, ge=0, description="Wait before the second try; doubled for each further one.")
    batch_timeout_seconds: float = Field(120.0, gt=0, description="A worker that takes longer over a batch is killed.")
    load_timeout_seconds: float = Field(600.0, gt=0, description="A worker that takes longer to load its models is killed.")
    drain_seconds: float = Field(30.0, ge=0, description="Time for images in hand to finish on SIGTERM.")
    rescan_seconds: float = Field(30.0, gt=0, description="Every so often the folders are held against the ledger.")
    reuse_results: bool = Field(True, description="Whether the same bytes under the same models are answered from the ledger.")
    max_pixels: int = Field(100_000_000, ge=1, le=10**12, description="Larger images FAIL with reason pixels.")
    max_aspect_ratio: float = Field(50.0, ge=1, description="Longer images FAIL with reason aspect.")
    decode_seconds: float = Field(20.0, gt=0, description="CPU time of a decoder for one image.")
    decode_bytes: ByteCount = Field(2 << 30, ge=256 << 20, description="Address space of a decoder.")

    def limits(self) -> Limits:
        return Limits(self.max_pixels, self.max_aspect_ratio, self.decode_seconds, self.decode_bytes)


class ModelsSection(Section):
    pack: str = Field(
        "mini",
        description='Which weights: "mini" (inside the package), "standard" (pulled once), or a folder\'s path, with a slash.',
    )
    folder: Path = Field(Path("models"), description="Where pulled packs are kept.")


class StageSection(Section):
    backend: str = Field("", description='"fake" is a deterministic stand-in without a model; empty: what the pack names.')
    model: str = Field("", description="The path of a folder of weights for this stage alone; empty: the pack's.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto: bfloat16 on GPUs from Ampere on (ocr and yolo: float16), float16 on older ones, float32 on a CPU, "
        "where any other is slower, for ocr many times.",
    )
    batch_size: int = Field(
        0, ge=0, le=65_536, description="Images in one forward pass at most; 0: 8 on a CPU, by its memory up to 128 on a GPU."
    )
    options: dict[str, Any] = Field({}, description="The backend's own settings; docs/configuration.md has all of them.")


if TYPE_CHECKING:

    class StageTables(Section): ...
else:  # a table for each stage, those of plug-ins too
    StageTables = create_model("StageTables", __base__=Section, **{name: (StageSection, StageSection()) for name in STAGES})


class BinningSection(Section):
    text_boxes_threshold: int = Field(2, ge=0, le=1_000_000_000, description="A: more text boxes than this.")
    text_area_threshold: Ratio = Field(0.2, description="A: text over more of the image's area.")
    text_score_threshold: Ratio = Field(
        0.7, description="A: how sure OCR must be of a line for it to count; a lone letter or sign never does."
    )
    object_count_threshold: int = Field(5, ge=0, le=1_000_000_000, description="B: more objects than this.")
    unique_objects_threshold: int = Field(3, ge=0, le=1_000_000_000, description="B: more kinds of object than this.")
    spatial_dispersion_threshold: Ratio = Field(0.3, description="B: centres of objects spread over more of the image's area.")
    clip_similarity_threshold: float = Field(0.25, ge=-1, le=1, description="C: likeness of caption and image, reported.")
    rules: str = Field(
        "",
        description='Your own rule, "module:function": it gets a record and returns the bin\'s name. Not with '
        'mode = "cascade". docs/results.md has the record and an example.',
    )

    def thresholds(self) -> Thresholds:
        return Thresholds(
            self.text_boxes_threshold,
            self.text_area_threshold,
            self.text_score_threshold,
            self.object_count_threshold,
            self.unique_objects_threshold,
            self.spatial_dispersion_threshold,
            self.clip_similarity_threshold,
        )


class Http(Section):
    listen: Annotated[str, AfterValidator(_check_address)] = Field(
        "127.0.0.1:9464",
        description="Address of /metrics, /healthz, /readyz and /api; empty: none. Port 0: any; the log's ready line names it.",
    )
    token_file: str = Field(
        "",
        description='A file with a token, which every request must bring as "Authorization: Bearer …"; empty: none asked for.',
    )
    tls_certificate: str = Field("", description="A PEM file: the pages are then served by HTTPS alone; empty: by HTTP.")
    tls_key: str = Field("", description="The certificate's key, if it is not in the same file.")

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is written.")
    format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on a terminal, json otherwise.")
