"""Reads daemon.toml and checks all of it before anything starts.

Every key is optional. An unknown key is refused, and the message names the most similar known one.
All problems are reported at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, PrivateAttr, ValidationError

from daemon.config.models import ModelsSection, StageTables, table_of
from daemon.config.output import OutputSection
from daemon.config.pipeline import PipelineSection, UnpackingSection
from daemon.config.refusal import explain, explain_missing_stage
from daemon.config.second_look import SecondLook, misused_looks
from daemon.config.sections import (
    BinningSection,
    Http,
    Inbox,
    Log,
    PageSection,
    SearchSection,
    Section,
    StateSection,
    TracesSection,
    UpkeepSection,
)
from daemon.config.values import descriptor_of, expand, parse_toml, read_text
from daemon.config.variables import apply_variables, locate
from daemon.core.errors import ConfigError
from daemon.system.mounts import Position
from stages.registry.registry import UnknownName, find_backend, find_stage, has_stage, sort_stages
from stages.weights import names

Kept = TypeVar("Kept", bound=Section)
P = TypeVar("P")  # a folder, as it is compared with others


class Config(Section):
    """All of daemon.toml. Relative paths are relative to the file's folder."""

    inbox: list[Inbox] = Field([Inbox()], min_length=1)
    """An [[inbox]] table for each folder to watch."""
    output: OutputSection = OutputSection()
    state: StateSection = StateSection()
    upkeep: UpkeepSection = UpkeepSection()
    pipeline: PipelineSection = PipelineSection()
    models: ModelsSection = ModelsSection()
    stages: StageTables = StageTables()
    unpacking: UnpackingSection = UnpackingSection()
    binning: BinningSection = BinningSection()
    second_look: list[SecondLook] = []
    """A [[second_look]] table for each additional model."""
    http: Http = Http()
    page: PageSection = PageSection()
    search: SearchSection = SearchSection()
    traces: TracesSection = TracesSection()
    log: Log = Log()
    _folder: Path = PrivateAttr(Path())
    _variables: dict[str, str] = PrivateAttr({})

    @property
    def folder(self) -> Path:
        """The folder that relative paths of the file are relative to."""
        return self._folder

    @property
    def variables(self) -> dict[str, str]:
        """By key, for example "log.level": the environment variable that has set it."""
        return self._variables

    @property
    def stage_names(self) -> list[str]:
        """The configured stages, in the order in which they run."""
        return sort_stages({name for name in self.pipeline.stages if has_stage(name)})

    @property
    def page_http(self) -> Http:
        """Where the page is: its own address, with the token and the certificate of the other pages."""
        return self.http.model_copy(update={"listen": self.page.listen})

    @property
    def kept_inboxes(self) -> list[bytes]:
        """The paths of the inboxes whose images can be processed again: visiond deletes none of them."""
        return [inbox.root for inbox in self.inbox if inbox.on_success != "delete"]

    @property
    def own_folders(self) -> dict[str, Path]:
        """The folders that are no inboxes, by their keys, without those of sinks."""
        own = {
            "output.results": self.output.results,
            "output.failed": self.output.failed,
            "output.done": self.output.done,
            "output.bins_folder": self.output.bins_folder,
            "state.path": self.state.path,
            "models.folder": self.models.folder,
        }
        if self.upkeep.backup_folder:
            own["upkeep.backup_folder"] = Path(self.upkeep.backup_folder)
        return own

    @property
    def folders(self) -> list[Inbox]:
        """The inboxes that are folders, and no prefixes of stores."""
        return [inbox for inbox in self.inbox if not inbox.url]

    def keeps_in_place(self, inbox: Inbox) -> bool:
        """Whether visiond leaves the files of an inbox where they are."""
        return inbox.on_success == "keep" and self.output.bins != "move"


def load(
    path: Path | None, *, warn: Callable[[str], None] | None = None, environ: Mapping[str, str] = os.environ
) -> Config:
    """Read and check a configuration, and what variables of the environment set. None: the defaults, in the current folder.

    warn: for commands that need no stages. If configured stages are missing, it gets a sentence;
    without it that is an error.

    Raises ConfigError with all problems, each with the file's name.
    """
    variables: dict[str, str] = {}
    try:
        document = parse_toml(read_text(path)) if path else {}
        variables = apply_variables(document, Config, environ)
        if warn and (missing := drop_missing_stages(document)):
            warn(f"{path}: {' '.join(map(explain_missing_stage, missing))}")
        config = parse(document, path.parent if path and descriptor_of(path) is None else Path.cwd())
        config._variables = variables
        return config
    except OSError as error:
        raise ConfigError(
            [f"{path} cannot be read: {error.strerror}. Name another file with --config."]
        ) from error
    except ConfigError as error:
        raise ConfigError([locate(problem, path, variables) for problem in error.problems]) from None
    except ValueError as error:
        raise ConfigError([f"{path} is not valid TOML: {error}"]) from error


def parse(document: dict[str, Any], folder: Path) -> Config:
    """Check a parsed document; `folder` is what relative paths are relative to."""
    try:
        found = Config.model_validate(document)
        if problems := [problem for inbox in found.inbox for problem in inbox.misuses()]:
            raise ConfigError(problems)
        config = _anchor(found, folder.absolute())
    except ValidationError as error:
        raise ConfigError([explain(problem, Config) for problem in error.errors()]) from None
    if problems := [
        *_misplaced_folders(config),
        *_contradictions(config),
        *_unreachable_uploads(config),
        *_misused_names(config),
    ]:
        raise ConfigError(problems)
    return config


def drop_missing_stages(document: dict[str, Any]) -> list[str]:
    """Remove stages that are not installed from a document; returns their names.
    Parts of a wrong type are left to `parse`."""
    missing: dict[str, None] = {}
    tables, pipeline = _table_of(document, "stages"), _table_of(document, "pipeline")
    for name in [name for name, table in tables.items() if not has_stage(name) and isinstance(table, dict)]:
        del tables[name]
        missing[name] = None
    if _names_only_missing(pipeline, missing):  # the default is as good for a command that needs none
        del pipeline["stages"]
    segments = pipeline.get("segment")
    if isinstance(segments, list) and all(isinstance(table, dict) for table in segments):
        pipeline["segment"] = [table for table in segments if not _names_only_missing(table, missing)]
    return list(missing)


def _table_of(document: dict[str, Any], key: str) -> dict[str, Any]:
    table = document.get(key)
    return table if isinstance(table, dict) else {}


def _names_only_missing(table: dict[str, Any], missing: dict[str, None]) -> bool:
    """Whether none of a table's stages is installed. Those that are not are moved from it to the missing ones."""
    names = table.get("stages")
    if not names or not isinstance(names, list):
        return False
    gone = [name for name in names if isinstance(name, str) and not has_stage(name)]
    missing.update(dict.fromkeys(gone))
    table["stages"] = [name for name in names if name not in gone]
    return not table["stages"]


def _anchor(config: Config, folder: Path) -> Config:
    """The configuration with absolute paths."""

    def anchored(section: Kept, *names: str, **others: object) -> Kept:
        """With these paths absolute, as far as they are set."""
        made = {name: type(path)(absolute(str(path))) for name in names if (path := getattr(section, name))}
        return section.model_copy(update=made | others)

    def absolute(file: str) -> str:
        path = os.path.normpath(folder / expand(file))
        return f"/{path.lstrip('/')}"  # POSIX lets two slashes mean something else; Linux does not

    def located(name: str) -> str:
        """A pack's or model's name unchanged, its path absolute. "org/name" is a path if there is one."""
        path = absolute(name)
        is_path = "/" in name and (os.path.exists(path) or not names.parse(name))
        return path if is_path else name

    stages = {
        name: anchored(section := table_of(config.stages, name), model=located(section.model))
        for name in dict.fromkeys([*dict(config.stages), *config.stage_names])
    }
    webhook = anchored(config.output.webhook, "secret_file")
    config._folder = folder
    return anchored(
        config,
        inbox=[inbox if inbox.url else anchored(inbox, "path") for inbox in config.inbox],
        output=anchored(config.output, "results", "failed", "done", "bins_folder", webhook=webhook),
        state=anchored(config.state, "path"),
        upkeep=anchored(config.upkeep, "backup_folder"),
        models=anchored(config.models, "folder", pack=located(config.models.pack)),
        stages=anchored(config.stages, **stages),
        second_look=[anchored(look, model=located(look.model)) for look in config.second_look],
        http=anchored(config.http, "token_file", "tls_certificate", "tls_key"),
    )


def _misplaced_folders(config: Config) -> list[str]:
    """Folders inside each other, so that the daemon would process its own output or mix two inboxes."""
    own = config.own_folders
    problems = [*_nested_folders(config, Path, Path.is_relative_to), *_misplaced_sinks(config)]
    problems += _clashing_inboxes(config.inbox)
    problems += [
        f"{key}: {folder} is inside output.bins_folder, where each folder is a bin; choose another place."
        for key, folder in own.items()
        if key != "output.bins_folder" and folder.is_relative_to(config.output.bins_folder)
    ]
    results, failed = own["output.results"], own["output.failed"]
    if results.is_relative_to(failed) or failed.is_relative_to(results):
        problems.append(
            f"output.failed: one of {failed} and output.results {results} contains the other, so a sidecar and the reason of a "
            "failure could be the same file; choose two separate folders."
        )
    return [*problems, *_uploaded_into(config)]


def _clashing_inboxes(inboxes: Sequence[Inbox]) -> Iterator[str]:
    """Inboxes inside each other, or whose sidecars would be the same files."""
    for inbox, other in itertools.combinations(inboxes, 2):
        one, two = (os.path.join(each.place, "") for each in (inbox, other))
        if one.startswith(two) or two.startswith(one):
            yield f"inbox: one of {inbox.place} and {other.place} contains the other; keep one of them."
        if inbox.name == other.name or not (inbox.name and other.name):
            yield (
                f"inbox: {inbox.place} and {other.place} would write the same sidecars; give each inbox its own `name`."
            )


def _contradictions(config: Config) -> list[str]:
    """Settings that exclude each other."""
    output, endings = config.output, {inbox.on_success for inbox in config.inbox}
    moves = output.bins == "move" or bool(endings - {"keep"})
    placed = [*itertools.chain.from_iterable(table.stages for table in config.pipeline.segment)]
    rules = (
        (
            output.bins == "link" and "delete" in endings,
            'output.bins: "link" would leave links to deleted images, as an inbox has on_success = "delete"; '
            'use "copy" or "move".',
        ),
        (
            output.bins == "move" and endings - {"keep"},
            'output.bins: "move" already moves the source; set on_success = "keep" for every inbox.',
        ),
        (
            "store" in output.sinks and output.store.images and moves,
            "output.store.images: the sink uploads images after they were published, so they must stay where they are; "
            'set on_success = "keep" for every inbox, and output.bins to "none", "link" or "copy".',
        ),
        (
            config.binning.rules and config.pipeline.mode == "cascade",
            'binning.rules: a custom rule needs the results of every stage; set pipeline.mode = "full".',
        ),
        (
            config.http.tls_key and not config.http.tls_certificate,
            "http.tls_key: HTTPS also needs a certificate; set http.tls_certificate.",
        ),
        (
            placed and placed != config.stage_names,
            f"pipeline.segment: the segments have the stages {', '.join(placed)}; together and in this order they must have "
            f"{', '.join(config.stage_names)}.",
        ),
        (
            config.second_look and "delete" in endings,
            'second_look: an inbox has on_success = "delete", so its images are gone before a second look; '
            'use "keep" or "move".',
        ),
    )
    return [sentence for is_broken, sentence in rules if is_broken]


def _unreachable_uploads(config: Config) -> Iterator[str]:
    """Inboxes that take uploads which nobody can send, or everybody."""
    if not any(inbox.uploads for inbox in config.inbox):
        return
    if not config.page.listen:
        yield "inbox.uploads: programs upload at the address of the page, and [page] listen is empty; set an address."
    elif not (config.page_http.is_loopback or config.http.token_file):
        yield (
            f"inbox.uploads: everyone on the network can reach {config.page.listen}; set http.token_file, a file "
            "with the token that programs must send."
        )


def find_shared_folders(config: Config) -> list[str]:
    """As `_misplaced_folders`, but for folders that are inside each other only through links or mounts. Looks at the disk,
    and may wait for a dead mount."""
    how = ", through a link or a mount"
    inboxes = [(f"the inbox {inbox.path}", Position.of(inbox.path)) for inbox in config.folders]
    problems = [
        f"inbox: {one} and {other} are the same folder, or one contains the other{how}; keep one of them."
        for (one, here), (other, there) in itertools.combinations(inboxes, 2)
        if here.is_within(there) or there.is_within(here)
    ]
    return [*problems, *_nested_folders(config, Position.of, Position.is_within, how)]


def _nested_folders(
    config: Config, find: Callable[[Path], P], is_within: Callable[[P, P], bool], how: str = ""
) -> Iterator[str]:
    """One of the daemon's own folders in an inbox, or an inbox in one of these. find: where a folder is. how: it is there."""
    inboxes = [(inbox, find(inbox.path)) for inbox in config.folders]
    for key, folder in (config.own_folders | (config.output.sink_folders if how else {})).items():
        here = find(folder)
        for inbox, there in inboxes:
            holds = is_within(there, here)
            if is_within(here, there) and (inbox.recursive or holds):
                what = "an inbox too" if folder == inbox.path else f"inside the inbox {inbox.path}{how}"
                yield f"{key}: {folder} is {what}; choose a folder outside it."
            elif holds and key in ("output.failed", "output.done", "output.bins_folder"):
                why = how or ", where finished images go"
                yield f"{key}: the inbox {inbox.path} is inside {folder}{why}; move one of them."


def _uploaded_into(config: Config) -> Iterator[str]:
    """Inboxes that would find what the sink store uploads."""
    uploads = [f"{config.output.store.url}/{part}/" for part in ("results", "bins")]
    for inbox in config.inbox if "store" in config.output.sinks and config.output.store.url else ():
        if any(f"{inbox.url}/".startswith(each) or each.startswith(f"{inbox.url}/") for each in uploads):
            yield (
                f"output.store.url: the inbox {inbox.url} would find what the sink store uploads to {config.output.store.url}; "
                "choose another prefix."
            )


def _misplaced_sinks(config: Config) -> Iterator[str]:
    """The file of a sink in an inbox without sub-folders, in which the folder of results may be; or something in the folder of
    another sink."""
    taken = [*(inbox.path for inbox in config.folders), *config.own_folders.values()]
    for key, folder in config.output.sink_folders.items():
        if inside := next((path for path in taken if path.is_relative_to(folder)), None):
            yield f"output.results: {inside} is in {folder}, the folder of {key}; choose another place."
    files = {"jsonl": config.output.jsonl_file, "label-studio": config.output.labeling_file}
    for sink, inbox in itertools.product(files.keys() & config.output.sinks, config.folders):
        if not inbox.recursive and files[sink].parent == inbox.path:
            where = f"is inside the inbox {inbox.path}"
            yield f"output.results: {files[sink]}, the file of the sink {sink}, {where}; choose another place."


def _misused_backends(config: Config) -> Iterator[str]:
    for name, table in config.stages:
        try:
            only = find_backend(name, table.backend or next(iter(find_stage(name).backends))).dtype
        except UnknownName as error:
            yield f"stages.{name}.backend: {error}"
        else:
            if only and table.dtype not in ("auto", only):
                yield f"stages.{name}.dtype: {name} computes in {only} on every device; remove dtype from [stages.{name}]."


def _misused_names(config: Config) -> list[str]:
    """Names of stages and backends that do not exist."""
    problems = [
        f"pipeline.stages: {explain_missing_stage(name)}"
        for name in config.pipeline.stages
        if not has_stage(name)
    ]
    problems += _misused_backends(config)
    problems += misused_looks(config.second_look, config.stage_names, has_rules=bool(config.binning.rules))
    return problems
