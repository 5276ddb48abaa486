from __future__ import annotations

import math
import re
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from daemon.config.loading import Config, load, parse
from daemon.config.models import table_of
from daemon.config.salvage import load_rest
from daemon.config.sections import Section
from daemon.core.errors import ConfigError
from stages.contract.base import Limits
from stages.contract.binning import Thresholds
from stages.registry.registry import ORDER


def problems_of(document: dict[str, Any], folder: Path = Path("/srv")) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(document, folder)
    return caught.value.problems


def pipeline(**keys: Any) -> Config:
    return parse({"pipeline": keys}, Path("/srv"))


# Reading


def test_an_empty_file_means_the_defaults() -> None:
    config = parse({}, Path("/srv"))
    assert [inbox.path for inbox in config.inbox] == [Path("/srv/inbox")]
    assert config.stage_names == ["ocr", "yolo", "clip", "blip"]
    assert (config.inbox[0].on_success, config.output.bins, config.pipeline.placement) == (
        "keep",
        "none",
        "auto",
    )
    assert config.pipeline.limits() == Limits()
    assert config.binning.thresholds() == Thresholds()


@pytest.mark.parametrize("name", Thresholds.__struct_fields__)
def test_the_key_of_a_threshold_changes_that_one_alone(name: str) -> None:
    config = parse({"binning": {f"{name}_threshold": 1}}, Path("/srv"))
    assert config.binning.thresholds() == replace(Thresholds(), **{name: 1})


def test_paths_are_relative_to_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text('[output]\nresults = "../out"\nfailed = "/var/failed"\n[[inbox]]\npath = "drop/./here"\n')
    config = load(file)
    assert config.output.results == tmp_path.parent / "out"
    assert config.output.failed == Path("/var/failed")
    assert config.inbox[0].path == tmp_path / "drop" / "here"
    assert config.state.path == tmp_path / "state"


@pytest.mark.parametrize(
    ("told", "meant"), [("token", "/srv/token"), ("../token", "/token"), ("/etc/token", "/etc/token")]
)
def test_a_file_of_http_may_lie_anywhere(told: str, meant: str) -> None:
    assert parse({"http": {"token_file": told}}, Path("/srv")).http.token_file == meant


def test_without_a_file_paths_are_relative_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None).models.folder == tmp_path / "models"


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert parse({"inbox": [{"path": "~/drop"}]}, Path("/srv")).inbox[0].path == Path("/home/ada/drop")


def test_a_pack_or_a_model_is_a_path_when_it_has_a_slash_and_a_name_otherwise() -> None:
    config = parse(
        {"models": {"pack": "./packs/mine"}, "stages": {"ocr": {"model": "../ocr"}}}, Path("/srv/visiond")
    )
    assert config.models.pack == "/srv/visiond/packs/mine"
    assert table_of(config.stages, "ocr").model == "/srv/ocr"
    plain = parse({"models": {"pack": "standard"}, "stages": {"clip": {"model": "large"}}}, Path("/srv"))
    assert plain.models.pack == "standard"
    assert [table_of(plain.stages, name).model for name in ("clip", "blip")] == ["large", ""]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"missing.toml cannot be read: No such file or directory. Name another file with --config",
    ):
        load(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    "content", [b"[pipeline\n", b"\0\0\0\0", b"a = " + b"9" * 5000, b"a = " + b"[" * 10_000 + b"]" * 10_000]
)
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "daemon.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"daemon.toml is not valid TOML"):
        load(file)


LEVEL = '# Größe\r\n[log]\r\nlevel = "debug"\r\n'


def test_a_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_bytes(LEVEL.encode("utf-8-sig"))
    assert load(file).log.level == "debug"
    file.write_bytes(LEVEL.encode("utf-8-sig") + b"[inbox]\n")
    rest = load_rest(file)
    assert rest
    assert rest.log.level == "debug"


@pytest.mark.parametrize(
    ("encoding", "sentence"),
    [
        (
            "utf-16",
            r"daemon.toml: the file is encoded in UTF-16, which TOML does not allow. Save it as UTF-8",
        ),
        ("utf-16-be", "encoded in UTF-16"),
        ("utf-32", "encoded in UTF-16"),  # its mark begins with that of UTF-16
        ("cp1252", r"line 1 has a character that is not encoded in UTF-8 \(byte 0xf6\)"),
    ],
)
def test_another_encoding_is_named(tmp_path: Path, encoding: str, sentence: str) -> None:
    file = tmp_path / "daemon.toml"
    file.write_bytes(LEVEL.encode(encoding))
    with pytest.raises(ConfigError, match=sentence):
        load(file)


def test_variables_in_paths_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("DATA", "big")
    document = {
        "inbox": [{"path": "$HOME/in"}],
        "output": {"results": "/mnt/${DATA}/results", "done": "~/done", "failed": "/mnt/c$/a$$b"},
        "state": {"path": "$DATA"},
        "http": {"token_file": "$HOME/token"},
    }
    config = parse(document, Path("/srv/$HOME"))
    assert config.inbox[0].path == Path("/home/ada/in")
    assert config.output.results == Path("/mnt/big/results")
    assert (config.output.done, config.output.failed) == (Path("/home/ada/done"), Path("/mnt/c$/a$b"))
    assert (config.state.path, config.http.token_file) == (Path("/srv/$HOME/big"), "/home/ada/token")


def test_a_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    [problem] = problems_of({"inbox": [{"path": "$NOWHERE/in"}]})
    assert problem.startswith("$NOWHERE/in: there is no variable NOWHERE in the environment")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("$NOTHING/in", "the variable NOTHING is empty"),
        ("${NOTHING}", "the variable NOTHING is empty"),
        ("${DATA:-/srv}/in", "only ${NAME} is replaced"),
        ("in\0box", "a path cannot contain the character"),
    ],
)
def test_a_path_that_would_be_another_than_its_author_means_is_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.setenv("NOTHING", "")
    [said] = problems_of({"inbox": [{"path": path}]})
    assert problem in said


def test_two_slashes_hide_no_folder_inside_another() -> None:
    problems = problems_of({"inbox": [{"path": "//srv"}], "output": {"results": "/srv/results"}})
    assert any("/srv/results is inside the inbox /srv;" in problem for problem in problems)


def test_a_number_of_too_many_digits_is_refused_by_name() -> None:
    [problem] = problems_of({"pipeline": {"max_pixels": 1 << 20_000}})
    assert problem.startswith("pipeline.max_pixels: write a whole number from 1 to")


def test_a_home_folder_that_does_not_exist_is_refused() -> None:
    [problem] = problems_of({"output": {"results": "~nosuchuser/results"}})
    assert problem.startswith("~nosuchuser/results: there is no user nosuchuser with a home folder")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (2097152, 2 << 20),
        ("2097152", 2 << 20),
        ("256 MiB", 256 << 20),
        ("256mib", 256 << 20),
        ("1.5 GiB", 3 << 29),
        ("0.5GB", 500_000_000),
        ("64 M", 64_000_000),
        ("2000 kB", 2_000_000),
        ("4096Ki", 4 << 20),
        ("  8 MB  ", 8_000_000),
    ],
)
def test_sizes_have_units(text: object, count: int) -> None:
    assert pipeline(slab_bytes=text).pipeline.slab_bytes == count


@pytest.mark.parametrize("text", ["much", "", "12 TB", "MiB", "1 2 MB", "nan", "inf"])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    [problem] = problems_of({"pipeline": {"slab_bytes": text}})
    assert problem.startswith(
        f'pipeline.slab_bytes: "{text}" is not a size; write a number of bytes or, for example, "256 MiB"'
    )


def test_a_size_below_its_least_is_refused() -> None:
    [problem] = problems_of({"pipeline": {"slab_bytes": "1 kB"}})
    assert (
        problem
        == "pipeline.slab_bytes: write 0 or at least 1 MiB; images larger than the slab are refused (it is '1 kB')"
    )


NOT_NUMBERS = [math.inf, -math.inf, math.nan, 1e308, -1e308, 2**63, 2**64, -(2**63) - 1, 10**400]


def number_keys() -> list[tuple[str, ...]]:
    """Every key of the configuration that takes a number."""
    return all_keys((int, float))


def all_keys(kinds: Collection[type] = ()) -> list[tuple[str, ...]]:
    """Every key of the configuration, or those of these types, as a path;
    [[inbox]], [[second_look]] and the segments are lists."""
    found: list[tuple[str, ...]] = []

    def walk(model: Any, path: tuple[str, ...]) -> None:
        for name, field in model.model_fields.items():
            inner = next(iter(getattr(field.annotation, "__args__", ())), field.annotation)
            if isinstance(inner, type) and issubclass(inner, Section):
                walk(inner, (*path, name))
            elif not kinds or field.annotation in kinds:
                found.append((*path, name))

    walk(Config, ())
    return found


def document_of(path: tuple[str, ...], value: object) -> dict[str, Any]:
    """The document with this value of the key."""
    document: Any = value
    for name in reversed(path):
        document = {name: document}
        if name == "inbox":
            document = {name: [document[name]]}
        elif name == "segment":
            document = {name: [{"stages": list(ORDER), "devices": ["cpu"]} | document[name]]}
        elif name == "second_look":
            document = {name: [{"name": "x", "when": "A", "stage": "ocr", "model": "y"} | document[name]]}
    return dict(document)


@pytest.mark.parametrize("path", number_keys(), ids=".".join)
@pytest.mark.parametrize(
    "value", NOT_NUMBERS, ids=lambda value: f"{value:.3g}" if isinstance(value, float) else str(value)[:8]
)
def test_infinite_and_too_large_numbers_are_refused_by_name(path: tuple[str, ...], value: float) -> None:
    problems = problems_of(document_of(path, value))
    assert [path[-1] in problem for problem in problems] == [True]


def test_the_keys_that_take_numbers_are_found() -> None:
    keys = {path[-1] for path in number_keys()}
    assert {
        "priority",
        "settle_seconds",
        "slab_bytes",
        "text_area_threshold",
        "batch_size",
        "max_aspect_ratio",
    } <= keys
    assert len(number_keys()) >= 29
    for path in number_keys():
        load_default = document_of(path, 256 << 20 if path[-1].endswith("_bytes") else 1)
        assert parse(load_default, Path("/srv"))


# Refusing


def test_every_problem_is_reported_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text('log.levle = "info"\n[[inbox]]\npath = 3\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    wrong, unknown = sorted(caught.value.problems)
    assert wrong == f"{file}: inbox[0].path: write a path in quotes (it is 3)"
    assert unknown == f'{file}: log.levle: unknown key; did you mean "level"?'


SINKS = 'sinks: unknown key here; write it under [output], for example sinks = ["jsonl"].'


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"pipelin": {}}, 'pipelin: unknown key; did you mean "pipeline"?'),
        ({"inbox": [{}, {"priorty": 1}]}, 'inbox[1].priorty: unknown key; did you mean "priority"?'),
        ({"stages": {"ocr": {"bakend": "fake"}}}, 'stages.ocr.bakend: unknown key; did you mean "backend"?'),
        ({"stages": {"orc": {}}}, 'stages.orc: no stage "orc" is installed; did you mean "ocr"?'),
        (
            {"pipeline": {"segment": [{"stages": ["ocr"], "device": ["cpu"], "devices": ["cpu"]}]}},
            'pipeline.segment[0].device: unknown key; did you mean "devices"?',
        ),
        (
            {"http": {"zzz": 1}},
            "http.zzz: unknown key; known keys are listen, token_file, tls_certificate, tls_key, names, "
            "proxies.",
        ),
        ({"sinks": ["jsonl"]}, SINKS),
        ({"sink": {"jsonl": True}}, SINKS.replace("sinks", "sink", 1)),
        ({"inbox": [{"sinks": ["jsonl"]}]}, f"inbox[0].{SINKS}"),
        ({"webhook": {"url": "https://a/b"}}, "webhook: unknown key here; write [output.webhook]."),
        ({"segment": []}, "segment: unknown key here; write [[pipeline.segment]]."),
        (
            {"listen": ":80"},
            'listen: unknown key here; write it under [http] or [page], for example listen = "127.0.0.1:9464".',
        ),
        (
            {"unpack": ["pdf"]},
            'unpack: unknown key here; write it under [[inbox]], for example unpack = ["zip"].',
        ),
        ({"rules": "a:b"}, "rules: unknown key here; write it under [binning]."),
        ({"pipeline": {"stations": 2}}, "pipeline.stations: this key is called executors now."),
        (
            {"pipeline": {"queue_images": 64}},
            "pipeline.queue_images: this key is gone: slab_bytes says how many images are in flight. Remove it.",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(document: dict[str, Any], problem: str) -> None:
    assert problem in problems_of(document)


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (
            {"inbox": {"path": "inbox"}},
            "inbox: each entry is a separate table; write [[inbox]] with double brackets.",
        ),
        ({"inbox": [{"path": 3}]}, "inbox[0].path: write a path in quotes (it is 3)"),
        (
            {"pipeline": {"devices": "cuda:0"}},
            "pipeline.devices: write a list in square brackets (it is 'cuda:0')",
        ),
        ({"http": 9464}, "http: write a table (it is 9464)"),
        ({"http": {"listen": "here:70000"}}, 'http.listen: "here:70000": the largest port is 65535'),
        (
            {"upkeep": {"backup_url": "s3://b/x"}},
            "upkeep: backup_url needs backup_folder too: a backup is made there first, then uploaded",
        ),
        ({"pipeline": {"mps": "perhaps"}}, "pipeline.mps: write true or false (it is 'perhaps')"),
        (
            {"pipeline": {"stages": []}},
            'pipeline.stages: this list is empty; name at least one, for example ["ocr", "yolo", "clip", "blip"].',
        ),
        ({"inbox": []}, "inbox: this list is empty; write a [[inbox]] table, or remove the key."),
        (
            {"pipeline": {"segment": [{"stages": ["ocr"]}]}},
            "pipeline.segment[0].devices: this key is missing. "
            'Devices that hold these stages, for example ["cuda:0", "cuda:1"]; "cuda:0+cuda:1" is a group.',
        ),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_is_wanted(
    document: dict[str, Any], problem: str
) -> None:
    assert problems_of(document) == [problem]


def test_all_problems_are_reported_at_once() -> None:
    document = {
        "pipeline": {"max_attempts": 0, "mode": "fast"},
        "output": {"bin": "copy"},
        "inbox": [{"settle_seconds": -1}, {"on_success": "burn"}],
    }
    problems = problems_of(document)
    assert [problem.split(":")[0] for problem in problems] == [
        "inbox[0].settle_seconds",
        "inbox[1].on_success",
        "output.bin",
        "pipeline.mode",
        "pipeline.max_attempts",
    ]
    assert problems[3] == """pipeline.mode: write "full" or "cascade" (it is 'fast')"""


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("rescan_seconds", math.inf, "a number above 0, at most 100_000_000, for example 30.0 (it is inf)"),
        ("rescan_seconds", 0, "a number above 0, at most 100_000_000, for example 30.0 (it is 0)"),
        ("retry_seconds", 1e9, "a number from 0 to 100_000_000, for example 5.0 (it is 1000000000.0)"),
        ("threads_per_worker", 1.5, "a whole number from 1 to 16, for example 2 (it is 1.5)"),
        ("threads_per_worker", "two", "a whole number from 1 to 16, for example 2 (it is 'two')"),
        (
            "decode_bytes",
            1,
            'a number of bytes from "256 MiB" to "1048576 GiB", for example "4 GiB" (it is 1)',
        ),
        ("slab_bytes", math.nan, 'a number of bytes up to "1048576 GiB", for example "4 GiB" (it is nan)'),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_the_limits_and_an_example(
    key: str, value: object, wanted: str
) -> None:
    assert problems_of({"pipeline": {key: value}}) == [f"pipeline.{key}: write {wanted}"]


ODD = [math.inf, math.nan, -1, 1.5, 10**30, "abc", "", True, [], [1], {}, {"a": 1}, date(2026, 1, 1)]
FOREIGN = re.compile("Input should|Unable to|List should|Field required|validation|Value error|out of range")


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_no_key_is_refused_in_another_librarys_words(value: object) -> None:
    said: list[str] = []
    for path in all_keys():
        try:
            parse(document_of(path, value), Path("/srv"))
        except ConfigError as error:
            said += error.problems
    assert len(said) > len(all_keys()) / 4
    assert [problem for problem in said if FOREIGN.search(problem)] == []


@pytest.mark.parametrize(
    "document",
    [
        {"inbox": []},
        {"inbox": [{"name": "a/b"}]},
        {"inbox": [{"path": "~nobody-of-that-name/in"}]},
        {"pipeline": {"stages": []}},
        {"pipeline": {"segment": [{"stages": [], "devices": ["cpu"]}]}},
        {"inbox": [{"settle_seconds": float("nan")}]},
        {"pipeline": {"batch_timeout_seconds": 0}},
        {"pipeline": {"threads_per_worker": 17}},
        {"binning": {"text_area_threshold": 1.1}},
        {"http": {"listen": "9464"}},
        {"http": {"listen": "localhost:65536"}},
        {"log": {"level": "loud"}},
    ],
)
def test_a_value_out_of_range_is_refused(document: dict[str, Any]) -> None:
    assert len(problems_of(document)) == 1


def test_invalid_addresses_and_names_are_refused_with_an_example() -> None:
    for address in ("a\0b:1", "localhost:٩٤", "a b:1"):
        assert "is not an address" in problems_of({"http": {"listen": address}})[-1]
    listen, name = problems_of({"http": {"listen": "9464"}, "inbox": [{"name": "a/b"}]})[::-1]
    assert listen.startswith(
        'http.listen: "9464" is not an address; write a host and a port, for example "127.0.0.1:9464"'
    )
    assert name.startswith('inbox[0].name: "a/b" is not a valid name; write letters, digits, - and _')


@pytest.mark.parametrize("name", ["gpu0", "cuda:x", "cuda:-1", "cuda:", "cuda:²"])
def test_an_invalid_device_is_refused_with_an_example(name: str) -> None:
    [problem] = problems_of({"pipeline": {"devices": ["cpu", name]}})
    assert problem.startswith(
        f'pipeline.devices[1]: "{name}" is not a device; write "cpu", or a GPU as `visiond gpus` lists'
    )


@pytest.mark.parametrize("listen", ["", "127.0.0.1:9464", "localhost:80", "[::1]:9464", "0.0.0.0:1"])
def test_an_address_is_a_host_and_a_port_or_nothing(listen: str) -> None:
    assert parse({"http": {"listen": listen}}, Path("/srv")).http.listen == listen


@pytest.mark.parametrize("key", ["results", "failed", "done", "bins_folder"])
def test_an_output_folder_in_an_inbox_is_refused(key: str) -> None:
    document = {"inbox": [{"path": "drop"}], "output": {key: "drop/out"}}
    assert problems_of(document) == [
        f"output.{key}: /srv/drop/out is inside the inbox /srv/drop; choose a folder outside it."
    ]


def test_the_daemons_own_folders_in_an_inbox_are_refused() -> None:
    document = {"inbox": [{"path": "."}]}
    keys = [problem.split(":")[0] for problem in problems_of(document)]
    assert keys == [
        "output.results",
        "output.failed",
        "output.done",
        "output.bins_folder",
        "state.path",
        "models.folder",
    ]


@pytest.mark.parametrize("failed", ["out", "out/failed", "."])
def test_results_and_failed_in_each_other_are_refused_as_a_sidecar_would_be_taken_for_a_failures_reason(
    failed: str,
) -> None:
    [problem] = problems_of({"inbox": [{"path": "/inbox"}], "output": {"results": "out", "failed": failed}})
    assert problem.startswith("output.failed: ")
    assert "contains the other" in problem


def test_a_folder_of_the_daemons_among_the_bins_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output\.done: .* is inside output\.bins_folder"):
        parse(
            {"inbox": [{"on_success": "move"}], "output": {"bins_folder": "out", "done": "out/done"}},
            tmp_path,
        )


def test_an_inbox_among_the_bins_is_refused() -> None:
    [problem] = problems_of({"inbox": [{"path": "bins/A"}], "output": {"bins": "copy"}})
    assert problem.startswith("output.bins_folder: the inbox /srv/bins/A is inside /srv/bins")


def test_an_inbox_whose_sub_folders_are_not_watched_may_hold_them() -> None:
    document = {"inbox": [{"path": ".", "recursive": False}]}
    assert parse(document, Path("/srv")).inbox[0].path == Path("/srv")
    assert problems_of(document | {"output": {"results": "."}})


def test_a_jsonl_output_among_the_images_of_an_inbox_is_refused() -> None:
    document = {
        "inbox": [{"path": "drop", "recursive": False}],
        "output": {"results": "drop/results", "sinks": ["jsonl"]},
    }
    assert problems_of(document) == [
        "output.results: /srv/drop/results.jsonl, the file of the sink jsonl, is inside the inbox /srv/drop; "
        "choose another place."
    ]
    document["output"] = {"results": "drop/results/deeper", "sinks": ["jsonl"]}
    parse(document, Path("/srv"))


def test_inboxes_within_each_other_are_refused() -> None:
    document = {"inbox": [{"path": "drop", "name": "a"}, {"path": "drop/urgent", "name": "b"}]}
    assert problems_of(document) == [
        "inbox: one of /srv/drop and /srv/drop/urgent contains the other; keep one of them."
    ]


@pytest.mark.parametrize("name", ["", "cam"])
def test_inboxes_without_names_of_their_own_are_refused_as_they_would_share_their_sidecars(name: str) -> None:
    [problem] = problems_of({"inbox": [{"path": "a"}, {"path": "b", "name": name}]})
    assert (
        problem == "inbox: /srv/a and /srv/b would write the same sidecars; give each inbox its own `name`."
    )


@pytest.mark.parametrize(
    ("bins", "on_success", "refused"),
    [
        ("link", "delete", True),
        ("move", "move", True),
        ("move", "delete", True),
        ("link", "move", False),
        ("copy", "delete", False),
        ("move", "keep", False),
    ],
)
def test_bins_and_the_sources_fate_must_agree(bins: str, on_success: str, refused: bool) -> None:
    document: dict[str, Any] = {"inbox": [{"on_success": on_success}], "output": {"bins": bins}}
    if refused:
        assert problems_of(document)[0].startswith("output.bins: ")
    else:
        parse(document, Path("/srv"))


# Stages and segments


def test_stages_run_in_their_own_order_whatever_the_file_says() -> None:
    assert pipeline(stages=["blip", "ocr", "blip"]).stage_names == ["ocr", "blip"]


def test_an_unknown_stage_is_refused_with_a_list_of_the_known_ones() -> None:
    [problem] = problems_of({"pipeline": {"stages": ["ocr", "yodo"]}})
    assert problem == 'pipeline.stages: no stage "yodo" is installed; did you mean "yolo"?'


@pytest.mark.parametrize(
    "held", [[["ocr", "yolo"], ["blip"]], [["clip", "blip"], ["ocr", "yolo"]], [["ocr"] * 2, ["yolo"]]]
)
def test_segments_must_hold_every_stage_once_and_in_order(held: list[list[str]]) -> None:
    tables = [{"stages": stages, "devices": ["cpu"]} for stages in held]
    [problem] = problems_of({"pipeline": {"segment": tables}})
    assert problem.endswith("together and in this order they must have ocr, yolo, clip, blip.")


def test_segments_fit_the_stages_that_are_asked_for() -> None:
    tables = [{"stages": ["ocr"], "devices": ["cpu"]}, {"stages": ["clip"], "devices": ["cpu"]}]
    assert len(pipeline(stages=["clip", "ocr"], segment=tables).pipeline.segment) == 2


def test_a_segment_without_a_device_is_refused() -> None:
    tables = [{"stages": ["ocr", "yolo", "clip", "blip"], "devices": []}]
    assert problems_of({"pipeline": {"segment": tables}})[0].startswith("pipeline.segment[0].devices: ")


NUMBERS = [
    ("pipeline", "max_attempts"),
    ("pipeline", "max_pixels"),
    ("pipeline", "slab_bytes"),
]
NUMBERS += [
    ("pipeline", "workers_per_device"),
    ("pipeline", "decoders_per_worker"),
    ("binning", "text_boxes_threshold"),
]


@pytest.mark.parametrize(("section", "key"), NUMBERS)
def test_a_number_beyond_all_bounds_is_refused_by_name(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}: write a (whole number from|number of bytes) "):
        parse({section: {key: 1 << 63}}, Path("/srv"))


@pytest.mark.parametrize("priority", [1 << 63, -(1 << 63)])
def test_a_priority_beyond_all_bounds_is_refused_by_name(priority: int) -> None:
    with pytest.raises(ConfigError, match=r"inbox\[0\]\.priority: "):
        parse({"inbox": [{"priority": priority}]}, Path("/srv"))


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize("key", ["rescan_seconds", "retry_seconds", "drain_seconds", "batch_timeout_seconds"])
def test_a_value_that_is_not_a_number_is_refused_by_name(key: str, number: float) -> None:
    with pytest.raises(ConfigError, match=rf"pipeline\.{key}: "):
        parse({"pipeline": {key: number}}, Path("/srv"))


def test_without_its_missing_stages_a_configuration_is_as_if_they_were_not_named(tmp_path: Path) -> None:
    file, warnings = tmp_path / "daemon.toml", list[str]()
    file.write_text(
        '[pipeline]\nstages = ["ocr", "quality"]\n[[pipeline.segment]]\nstages = ["ocr", "quality"]\ndevices = ["cpu"]\n'
    )
    with pytest.raises(ConfigError, match='no stage "quality" is installed'):
        load(file)
    config = load(file, warn=warnings.append)
    assert (config.stage_names, [table.stages for table in config.pipeline.segment]) == (["ocr"], [["ocr"]])
    assert len(warnings) == 1
    for other in (
        '[pipeline]\nstages = "quality"\n',
        "[pipeline]\nstages = [3]\n",
        "stages = 3\n",
        "pipeline = 3\n",
    ):
        file.write_text(other)
        with pytest.raises(ConfigError):
            load(file, warn=warnings.append)
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("line", "problem"), [("", "this key is missing"), ("stages = []\n", "this list is empty")]
)
def test_a_segment_without_stages_is_refused_by_commands_that_need_no_stages_too(
    tmp_path: Path, line: str, problem: str
) -> None:
    (tmp_path / "daemon.toml").write_text(f'[[pipeline.segment]]\n{line}devices = ["cpu"]\n')
    with pytest.raises(ConfigError, match=rf"segment\[0\]\.stages: {problem}"):
        load(tmp_path / "daemon.toml", warn=lambda _: None)


def test_a_configuration_whose_only_stage_is_missing_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "daemon.toml").write_text(
        '[pipeline]\nstages = ["quality"]\n[stages.quality]\nbackend = "torch"\n'
    )
    assert load(tmp_path / "daemon.toml", warn=lambda _: None).stage_names == ["ocr", "yolo", "clip", "blip"]


def test_every_unknown_backend_is_named_with_its_key(tmp_path: Path) -> None:
    tables = {
        "inbox": [{"path": "inbox"}],
        "stages": {"ocr": {"backend": "onnx"}, "yolo": {"backend": "fakes"}},
    }
    with pytest.raises(ConfigError) as refused:
        parse(tables, tmp_path)
    assert refused.value.problems == [
        'stages.ocr.backend: there is no backend for ocr called "onnx"; choose one of fake, ppocr, reader.',
        'stages.yolo.backend: there is no backend for yolo called "fakes"; did you mean "fake"?',
    ]


def test_uploads_need_a_folder_an_address_and_where_others_reach_it_a_token() -> None:
    inbox = {"uploads": True}
    assert parse({"inbox": [inbox]}, Path("/srv")).inbox[0].uploads
    assert "set an address" in problems_of({"inbox": [inbox], "page": {"listen": ""}})[0]
    open_page = {"inbox": [inbox], "page": {"listen": "0.0.0.0:9465"}}
    assert "set http.token_file" in problems_of(open_page)[0]
    parse(open_page | {"http": {"token_file": "token"}}, Path("/srv"))
    assert "writes nothing to s3://bucket" in problems_of({"inbox": [inbox | {"url": "s3://bucket"}]})[0]
