"""The text of daemon.toml, and the kinds of values in it: paths, sizes, names, addresses and devices; each is checked as
it is read."""

from __future__ import annotations

import codecs
import io
import os
import re
import tomllib
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from daemon.core.errors import ConfigError
from stages.contract.files import find_other_kind, read_file

LEAST_SLAB_BYTES = 1 << 20
GROUP = "+"  # joins the devices of a group
NUMBERED = r"cuda:(\d{1,6})(?::(\d{1,6}))?"  # a GPU, or a MIG device of it
UUID = r"(?i:GPU|MIG)-[0-9A-Za-z/-]*"  # or the start of one
# How addresses of the page begin.
PAGE_PATHS = "api|duplicates|events|images|live|login|logout|pictures|settings|state|static"
OUT_OF_RANGE = "out_of_range"  # error type, for refusal.py
MOST = {"_seconds": 10**8, "_bytes": 1 << 50, "": 10**12}  # largest value, by suffix of the key

Dtype = Literal["auto", "float32", "half", "bfloat16", "float16", "int8", "float8", "int4"]

_AS_UTF8 = "Save it as UTF-8, for example in Notepad with Save as, Encoding."
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def _parse_bytes(value: object) -> object:
    """Accept 268435456, "256 MiB" and "0.5GB"."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().removesuffix("b").strip()
    number = text.rstrip("kmgi").strip()
    try:
        return int(float(number) * _UNITS[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f'"{value}" is not a size; write a number of bytes or, for example, "256 MiB"'
        ) from None


def check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]*", name):
        raise ValueError(
            f'"{name}" is not a valid name; write letters, digits, - and _, for example "scans-2"'
        )
    return name


def check_address(text: str) -> str:
    """Accept a host or [IPv6 address], a colon and a port; or ""."""
    if text and not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]\x00-\x20]+):[0-9]{1,5}", text):
        raise ValueError(
            f'"{text}" is not an address; write a host and a port, for example "127.0.0.1:9464", or "" for no pages'
        )
    if text and int(text.rpartition(":")[2]) > 65535:
        raise ValueError(f'"{text}": the largest port is 65535')
    return text


def check_public_names(names: list[str]) -> list[str]:
    """Accept hosts, also with a port; those that browsers leave out are left out here too."""
    for name in names:
        if not re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?", name):
            raise ValueError(
                f'"{name}" is not a name; write it as a browser shows it, without https:// and path, and other scripts as '
                'xn--…, for example "photos.example.org"'
            )
    return [re.sub(":(80|443)$", "", name.lower()) for name in names]


def check_networks(networks: list[str]) -> list[str]:
    for network in networks:
        try:
            ip_network(network)
        except ValueError as error:
            raise ValueError(
                f'"{network}" is not an IP address or a network ({error}); write, for example, "10.0.0.7" or "172.18.0.0/16"'
            ) from None
    return networks


def check_root_path(text: str) -> str:
    """Accept a path, with or without slashes at its ends. One that begins as an address of the page could not be told from
    that address by somebody who does not know whether the proxy has taken it away."""
    path = text.strip("/")
    if path and not re.fullmatch(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]*(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*", path):
        raise ValueError(
            f'"{text}" is not a path of letters, digits, - and _; write, for example, "/visiond"'
        )
    if re.fullmatch(PAGE_PATHS, first := path.partition("/")[0]):
        raise ValueError(
            f'"/{first}" is an address of the page itself; write another path, for example "/visiond"'
        )
    return path and f"/{path}"


def check_url(text: str) -> str:
    """Accept an address of HTTP, or "". No message repeats the address, as it may have a password."""
    if not text:
        return text
    form = 'write it as "https://host/path"'
    if unfit := re.search(r"""[^!-~]|["<>\\^`{|}]|%(?![0-9A-Fa-f]{2})""", text):
        raise ValueError(
            f"the address has the character {unfit[0]!a}; write it percent-encoded, or in a host name as xn--…"
        )
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # both are checked only now
    except ValueError:  # its message may have the password
        raise ValueError(f"the address has a host or a port that cannot be read; {form}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"it is not an HTTP address; {form}")
    return text


def check_webhook_url(text: str) -> str:
    if "@" in urlsplit(check_url(text)).netloc:
        raise ValueError(
            "the address has a user or a password, which would not be sent; use secret_file, or a token in the path"
        )
    return text


def check_slab(count: int) -> int:
    if 0 != count < LEAST_SLAB_BYTES:
        raise ValueError("write 0 or at least 1 MiB; images larger than the slab are refused")
    return count


def _canonical_device(name: str) -> str:
    """Return the one form of a device's name: "cpu", "cuda:" and its number, a UUID, or part of a GPU's name.
    devices.py finds the GPU."""
    if re.fullmatch(r"cpu(:\d{1,6})?", name, re.ASCII):
        return "cpu"
    if name == "cuda":
        return "cuda:0"
    if found := re.fullmatch(NUMBERED, name, re.ASCII):
        return ":".join(["cuda", *(str(int(number)) for number in found.groups() if number)])
    is_part = re.search("[A-Za-z]", name) and not re.match("(?i)cpu|cuda|gpu", name)
    if not re.fullmatch(UUID, name) and not is_part:
        raise ValueError(
            f'"{name}" is not a device; write "cpu", or a GPU as `visiond gpus` lists it: its number, UUID or part of its '
            'name, for example "cuda:0" or "H100"'
        )
    return name.strip()


def _refuse_group(name: str) -> str:
    if GROUP in name:
        raise ValueError(
            f'"{name}" is a group of devices, over which one model is spread; write it as devices of a [[pipeline.segment]] '
            "table"
        )
    return name


def _canonical_place(text: str) -> str:
    """Return the one form of a device, or of a group: "cuda:0+cuda:1". A group of pretended devices on the CPU
    keeps their numbers: "cpu:0+cpu:1"."""
    if GROUP not in text:
        return _canonical_device(text)
    names = [name.strip() for name in text.split(GROUP)]
    members = [_canonical_device(name) for name in names]
    if 0 < members.count("cpu") < len(members):
        raise ValueError(
            f'"{text}" has both a CPU and a GPU, but a model is spread over devices of one kind; write, for example, '
            '"cuda:0+cuda:1"'
        )
    if "cpu" in members:
        members = [f"cpu:{int(name.partition(':')[2] or 0)}" for name in names]
    return GROUP.join(members)


def members_of(device: str) -> list[str]:
    """The devices of a group; a device that is no group is its own only member."""
    return device.split(GROUP)


def most_of(name: str) -> int:
    """The largest value of a key with this name."""
    return next(most for unit, most in MOST.items() if name.endswith(unit))


ByteCount = Annotated[int, BeforeValidator(_parse_bytes), Field(le=1 << 53)]
ContainerKind = Literal["zip", "tar", "tiff", "pdf", "video"]
Ratio = Annotated[float, Field(ge=0, le=1)]
Device = Annotated[str, AfterValidator(_refuse_group), AfterValidator(_canonical_device)]
Place = Annotated[str, AfterValidator(_canonical_place)]  # of a worker: a device or a group


def read_text(path: Path) -> str:
    """The text of a file as editors write it: UTF-8, with or without a byte order mark. Raises OSError, and ConfigError if
    it has another encoding, or nothing comes through the pipe that it is."""
    number = descriptor_of(path)
    is_pipe = number is not None and find_other_kind(path) in ("a FIFO", "a socket")
    data = _drain(number) if number is not None and is_pipe else read_file(path)
    half_zeros = len(data) > 1 and (not data[0]) != (not data[1])
    if half_zeros or data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError([f"the file is encoded in UTF-16, which TOML does not allow. {_AS_UTF8}"])
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            [
                f"line {line} has a character that is not encoded in UTF-8 (byte 0x{data[error.start]:02x}). {_AS_UTF8}"
            ]
        ) from None


def descriptor_of(path: Path) -> int | None:
    """The number of the open file that a path names, as /dev/stdin and a shell's <(…) do; None if it names a file."""
    if str(path) == "/dev/stdin":
        return 0
    is_own = path.name.isdecimal() and os.path.realpath(path.parent) == os.path.realpath("/proc/self/fd")
    return int(path.name) if is_own else None


def _drain(number: int) -> bytes:
    """All that comes through a pipe, which can be read once. Raises ConfigError, OSError."""
    with open(number, "rb", closefd=False) as pipe:
        data = pipe.read()
    if not data:  # every key would have its default
        raise ConfigError(["nothing came through this pipe. Did the command fail that writes to it?"])
    return data


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError, which says what is wrong."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError("it has a number of too many digits") from None
    except RecursionError:
        raise ValueError("it has too many brackets inside each other") from None


def expand(path: str) -> Path:
    """Replace ~, $NAME and ${NAME}; $$ is a dollar sign. Raises ConfigError."""

    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if found[0] == "${":
            raise ConfigError([f"{path}: only ${{NAME}} is replaced. Write $$ for a dollar sign."])
        if name and not os.environ.get(name):
            is_empty = f"the variable {name} is empty"
            why = is_empty if name in os.environ else f"there is no variable {name} in the environment"
            raise ConfigError([f"{path}: {why}. Set it, or write $$ for a dollar sign."])
        return os.environ[name] if name else "$"

    if "\0" in path:
        raise ConfigError([f"{path!a}: a path cannot contain the character \\u0000."])
    expanded = Path(re.sub(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\}|\$|\{)", value_of, path))
    try:
        return expanded.expanduser()
    except RuntimeError:
        user = expanded.parts[0][1:]
        why = f"there is no user {user} with a home folder" if user else "this user has no home folder"
        raise ConfigError([f"{path}: {why}. Write the whole path."]) from None
