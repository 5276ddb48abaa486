"""The configuration: daemon.toml, checked whole before anything starts.

Every key is optional. An unknown key is refused with the nearest known one named, and all problems are told
at once. docs/configuration.md is made from the descriptions here.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import tomllib
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from daemon.errors import ConfigError
from stages.base import Limits
from stages.binning import Thresholds
from stages.registry import ORDER

# Temporary and partial names of the programs that people upload and edit with.
IGNORED = [".*", "*~", "*.tmp", "*.temp", "*.part", "*.partial", "*.crdownload", "*.download", "*.swp", "*.filepart"]

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


ByteCount = Annotated[int, BeforeValidator(_parse_bytes)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Inbox(Section):
    path: Path = Field(Path("inbox"), description="The folder to watch.")
    name: str = Field(
        "",
        pattern=r"^[A-Za-z0-9_-]*$",
        description="Sub-folder of results, failed, done and bins for this inbox. Needed as soon as there are several inboxes.",
    )
    priority: int = Field(0, description="Images of the inbox with the highest priority are fed first.")
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

    def ignores(self, path: bytes) -> bool:
        """Whether any part of a relative path matches an ignored pattern."""
        parts = os.fsdecode(path).split("/")
        return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in self.ignore)


class Output(Section):
    results: Path = Field(Path("results"), description="Where sidecars go: <path in the inbox>.json.")
    failed: Path = Field(
        Path("failed"),
        description="Where the reason of each failed image goes; the image itself too, unless on_success is keep.",
    )
    done: Path = Field(Path("done"), description='Where sources go with on_success = "move".')
    bins_folder: Path = Field(Path("bins"), description="Where bins A, B, C, … are.")
    bins: Literal["none", "link", "copy", "move"] = Field(
        "none", description="How images get into their bin: a symbolic link, a copy, or the source itself."
    )
    sinks: list[Literal["jsonl"]] = Field(
        [],
        description="Further outputs. jsonl: every record is appended to <results>.jsonl as well, at least once each, by id.",
    )


class State(Section):
    path: Path = Field(Path("state"), description="The daemon's own folder: ledger, lock, control socket, compile caches.")


class SegmentTable(Section):
    stages: list[str] = Field(min_length=1, description="Stages of this segment, in order.")
    devices: list[str] = Field(min_length=1, description='Devices that hold it, for example ["cuda:0", "cuda:1"].')
    workers_per_device: int = Field(1, ge=1, description="Processes on each of them.")


class PipelineSection(Section):
    stages: list[str] = Field(
        list(ORDER), min_length=1, description="Which stages run; their order is always ocr, yolo, clip, blip."
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
    devices: list[str] = Field([], description="Devices to use; empty: all GPUs, or the CPU when there is none.")
    workers_per_device: int = Field(
        0, ge=0, description="Worker processes on each device; 0: one on a CPU, measured defaults on a GPU."
    )
    threads_per_worker: int = Field(2, ge=1, le=16, description="Batches a worker has in hand at once.")
    decoders_per_worker: int = Field(0, ge=0, description="Disposable decoder processes for each worker; 0: chosen by cores.")
    slab_bytes: ByteCount = Field(256 << 20, ge=1 << 20, description="Shared memory for images in flight: the byte budget.")
    queue_images: int = Field(1024, ge=1, description="Most images waiting in front of each segment.")
    max_attempts: int = Field(3, ge=1, description="Tries of an image whose error may pass, before it is FAILED.")
    retry_seconds: float = Field(5.0, ge=0, description="Wait before the second try; doubled for each further one.")
    batch_timeout_seconds: float = Field(120.0, gt=0, description="A worker that takes longer over a batch is killed.")
    load_timeout_seconds: float = Field(600.0, gt=0, description="A worker that takes longer to load its models is killed.")
    drain_seconds: float = Field(30.0, ge=0, description="Time for images in hand to finish on SIGTERM.")
    rescan_seconds: float = Field(30.0, gt=0, description="Every so often the folders are held against the ledger.")
    reuse_results: bool = Field(True, description="Whether the same bytes under the same models are answered from the ledger.")
    max_pixels: int = Field(100_000_000, ge=1, description="Larger images FAIL with reason pixels.")
    max_aspect_ratio: float = Field(50.0, ge=1, description="Longer images FAIL with reason aspect.")
    decode_seconds: float = Field(20.0, gt=0, description="CPU time of a decoder for one image.")
    decode_bytes: ByteCount = Field(2 << 30, ge=256 << 20, description="Address space of a decoder.")

    def limits(self) -> Limits:
        return Limits(self.max_pixels, self.max_aspect_ratio, self.decode_seconds, self.decode_bytes)


class Models(Section):
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
        description="auto: bfloat16 on GPUs from Ampere on (ocr: float16), float16 on older ones, float32 on a CPU.",
    )
    batch_size: int = Field(0, ge=0, description="Most images in one forward pass; 0: 64 on a GPU, 8 on a CPU.")
    options: dict[str, Any] = Field({}, description="The backend's own settings.")


class StageTables(Section):
    ocr: StageSection = StageSection()
    yolo: StageSection = StageSection()
    clip: StageSection = StageSection()
    blip: StageSection = StageSection()


class BinningSection(Section):
    text_boxes_threshold: int = Field(2, ge=0, description="A: more text boxes than this.")
    text_area_threshold: Ratio = Field(0.2, description="A: text over more of the image's area.")
    text_score_threshold: Ratio = Field(
        0.7, description="A: how sure OCR must be of a line for it to count; a lone letter or sign never does."
    )
    object_count_threshold: int = Field(5, ge=0, description="B: more objects than this.")
    unique_objects_threshold: int = Field(3, ge=0, description="B: more kinds of object than this.")
    spatial_dispersion_threshold: Ratio = Field(0.3, description="B: centres of objects spread over more of the image's area.")
    clip_similarity_threshold: float = Field(0.25, ge=-1, le=1, description="C: likeness of caption and image, reported.")
    rules: str = Field("", description='Your own rule, "module:function": it gets the record and returns the bin\'s name.')

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
    listen: str = Field(
        "127.0.0.1:9464",
        pattern=r"^$|^(\[[0-9a-fA-F:.]+\]|[^:\[\]]+):\d{1,5}$",
        description="Address of /metrics, /healthz, /readyz and /api; empty: none.",
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


class Config(Section):
    """The whole of daemon.toml. Relative paths are relative to the file's own folder."""

    inbox: list[Inbox] = Field([Inbox()], min_length=1, description="A [[inbox]] table for each folder to watch.")
    output: Output = Output()
    state: State = State()
    pipeline: PipelineSection = PipelineSection()
    models: Models = Models()
    stages: StageTables = StageTables()
    binning: BinningSection = BinningSection()
    http: Http = Http()
    log: Log = Log()

    @property
    def stage_names(self) -> list[str]:
        """The stages asked for, in the order they run."""
        return [name for name in ORDER if name in self.pipeline.stages]


def load(path: Path | None) -> Config:
    """Read and check a configuration; None stands for the defaults in the current folder.

    Raises ConfigError with every problem found.
    """
    document: dict[str, Any] = {}
    if path is not None:
        try:
            document = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError([f"{path} cannot be read: {error.strerror}. Name the file with --config."]) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError([f"{path} is not TOML: {error}"]) from error
    return parse(document, path.parent if path else Path.cwd())


def parse(document: dict[str, Any], folder: Path) -> Config:
    """Check a parsed document; `folder` is what relative paths are relative to."""
    try:
        config = _anchor(Config.model_validate(document), folder.absolute())
    except ValidationError as error:
        raise ConfigError([_explain(problem) for problem in error.errors()]) from None
    except RuntimeError as error:  # of expanduser
        raise ConfigError([f"a path begins with the ~ of a user who has no home folder: {error}"]) from None
    if problems := [*_misplaced_folders(config), *_misused_names(config)]:
        raise ConfigError(problems)
    return config


def _anchor(config: Config, folder: Path) -> Config:
    """The same configuration with every path absolute."""

    def anchored(section: Section, *names: str) -> Any:
        paths = {name: Path(os.path.normpath(folder / getattr(section, name).expanduser())) for name in names}
        return section.model_copy(update=paths)

    def located(name: str) -> str:
        """A pack or model by name as it is, by path absolute."""
        return os.path.normpath(folder / Path(name).expanduser()) if "/" in name else name

    files = {name: getattr(config.http, name) for name in ("token_file", "tls_certificate", "tls_key")}

    stages = {
        name: section.model_copy(update={"model": located(section.model)})
        for name in ORDER
        if isinstance(section := getattr(config.stages, name), StageSection)
    }

    return config.model_copy(
        update={
            "inbox": [anchored(inbox, "path") for inbox in config.inbox],
            "output": anchored(config.output, "results", "failed", "done", "bins_folder"),
            "state": anchored(config.state, "path"),
            "models": anchored(config.models, "folder").model_copy(update={"pack": located(config.models.pack)}),
            "stages": config.stages.model_copy(update=stages),
            "http": config.http.model_copy(update={name: located(f"./{file}") for name, file in files.items() if file}),
        }
    )


def _explain(problem: Any) -> str:
    """One problem as a sentence: where, what, and the nearest known key if the key is unknown."""
    location = [part for part in problem["loc"] if part != "function-before[_parse_bytes(), int]"]
    where = ".".join(f"[{part}]" if isinstance(part, int) else part for part in location).replace(".[", "[")
    if problem["type"] != "extra_forbidden":
        return f"{where}: {problem['msg'].removeprefix('Value error, ')} (it is {problem['input']!r})"
    known = _keys_at(location[:-1])
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else f"known keys are {', '.join(known)}."
    return f"{where}: unknown key; {hint}"


def _keys_at(location: list[Any]) -> list[str]:
    """The keys that a table of the document may have."""
    model: Any = Config
    for part in location:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = next(iter(getattr(annotation, "__args__", ())), annotation)
    return list(model.model_fields)


def _misplaced_folders(config: Config) -> list[str]:
    """Folders that would feed the daemon its own output, or mix two inboxes."""
    problems = []
    own = {
        "output.results": config.output.results,
        "output.failed": config.output.failed,
        "output.done": config.output.done,
        "output.bins_folder": config.output.bins_folder,
        "state.path": config.state.path,
        "models.folder": config.models.folder,
    }
    for index, inbox in enumerate(config.inbox):
        for key, folder in own.items():
            if folder.is_relative_to(inbox.path) and (inbox.recursive or folder == inbox.path):
                problems.append(f"{key}: {folder} lies in the inbox {inbox.path}; put it elsewhere.")
        for key in ("output.failed", "output.done", "output.bins_folder"):
            if inbox.path.is_relative_to(own[key]):
                problems.append(
                    f"{key}: the inbox {inbox.path} lies in {own[key]}, where images go; put one of them elsewhere."
                )
        for other in config.inbox[index + 1 :]:
            if inbox.path.is_relative_to(other.path) or other.path.is_relative_to(inbox.path):
                problems.append(f"inbox: {inbox.path} and {other.path} lie in each other; keep one of them.")
            if inbox.name == other.name or not (inbox.name and other.name):
                problems.append(
                    f"inbox: {inbox.path} and {other.path} would write the same sidecars; give each a name of its own."
                )
    for key, folder in own.items():
        if key != "output.bins_folder" and folder.is_relative_to(config.output.bins_folder):
            problems.append(f"{key}: {folder} lies in output.bins_folder, where each folder is a bin; put it elsewhere.")
    if config.output.bins == "link" and any(inbox.on_success == "delete" for inbox in config.inbox):
        problems.append('output.bins: links to deleted sources would dangle; use "copy" or "move".')
    if config.output.bins == "move" and any(inbox.on_success != "keep" for inbox in config.inbox):
        problems.append('output.bins: "move" already takes the source; leave on_success at "keep".')
    return problems


def _misused_names(config: Config) -> list[str]:
    """Stage names, segments and rules that do not fit together."""
    problems = [
        f'pipeline.stages: "{name}" is no stage; stages are {", ".join(ORDER)}.'
        for name in config.pipeline.stages
        if name not in ORDER
    ]
    if config.binning.rules and config.pipeline.mode == "cascade":
        problems.append('binning.rules: a rule of your own sees every stage, so it needs pipeline.mode = "full".')
    if config.http.tls_key and not config.http.tls_certificate:
        problems.append("http.tls_key: a key alone makes no HTTPS; name its tls_certificate too.")
    placed = [name for table in config.pipeline.segment for name in table.stages]
    if placed and placed != config.stage_names:
        problems.append(
            f"pipeline.segment: segments hold {', '.join(placed)}; together and in order they must be "
            f"{', '.join(config.stage_names)}."
        )
    return problems
