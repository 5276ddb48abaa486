"""Which GPUs the configuration means: by number, by UUID, by part of the name, and by free memory.

They are looked up once, at the start. From then on the configuration names devices of `list_gpus` only, so
that a GPU that fills up or is renamed changes nothing in a running daemon.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from daemon.config.loading import Config
from daemon.config.second_look import SecondLook
from daemon.config.values import GROUP, NUMBERED, UUID, members_of
from daemon.core.errors import ConfigError
from daemon.core.hints import command
from daemon.system.gpus import Gpu
from stages.contract.base import StageSpec
from stages.registry.registry import ORDER, find_backend, find_stage

MIB = 1 << 20
ALLOCATORS = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}  # a user's own settings of PyTorch's memory


def select_devices(config: Config, gpus: Sequence[Gpu], *, by_memory: bool = True) -> Config:
    """The configuration with only "cpu" and devices of this list, and no further condition.

    by_memory: whether to leave out GPUs with too little free memory. Raises ConfigError.
    """
    chosen = _find_devices(config, gpus)
    short = {gpu.device: gpu for gpu in list_short(config, gpus)} if by_memory else {}
    if not short:
        return chosen
    devices = chosen.pipeline.devices or [gpu.device for gpu in gpus]
    left = [device for device in devices if device not in short]
    if not left:
        raise ConfigError([_describe_none_left(config, [*short.values()])])
    return chosen.model_copy(update={"pipeline": chosen.pipeline.model_copy(update={"devices": left})})


def _find_devices(config: Config, gpus: Sequence[Gpu]) -> Config:
    """As `select_devices`, whatever memory is free."""
    problems: list[str] = []
    chosen = _replace_devices(config, lambda names, key: _look_up(names, gpus, key, problems))
    if problems := problems or _list_shared(table.devices for table in chosen.pipeline.segment):
        raise ConfigError(problems)
    return chosen


def assume_gpus(config: Config) -> Config:
    """For GPUs that this machine does not have: each entry except those on the CPU means the first of them."""
    return _replace_devices(
        config, lambda names, _: [name if name.startswith("cpu") else "cuda:0" for name in names]
    )


def _replace_devices(config: Config, look_up: Callable[[list[str], str], list[str]]) -> Config:
    """The configuration with other devices everywhere, and no further condition. look_up: gets a list of devices, and its
    key for messages."""
    section = config.pipeline
    devices = look_up(section.devices, "pipeline.devices")
    tables = [
        table.model_copy(update={"devices": look_up(table.devices, f"pipeline.segment[{n}].devices")})
        for n, table in enumerate(section.segment)
    ]
    looks = [
        look.model_copy(update={"devices": look_up(look.devices, f"second_look {look.name}: devices")})
        for look in config.second_look
    ]
    changes = {"devices": devices, "segment": tables, "min_free_gpu_bytes": 0}
    return config.model_copy(update={"pipeline": section.model_copy(update=changes), "second_look": looks})


def used_gpus(config: Config, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that the configuration names, or all; none if it names a CPU too,
    as a stage has one dtype for all devices."""
    named = {
        *config.pipeline.devices,
        *(
            name
            for table in config.pipeline.segment
            for device in table.devices
            for name in members_of(device)
        ),
    }
    if any(device.startswith("cpu") for device in named):
        return []
    return [gpu for gpu in gpus if not named or gpu.device in named]


def gpus_of(look: SecondLook, config: Config, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs of a second look; none if it names a CPU too."""
    if not look.devices:
        return used_gpus(config, gpus)
    members = {member for name in look.devices for member in members_of(name)}
    return [] if any(name.startswith("cpu") for name in members) else [g for g in gpus if g.device in members]


def list_short(config: Config, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that are left out because too little of their memory is free. Tables of segments name each
    device, so all of these are used. Raises ConfigError."""
    section = config.pipeline
    if not section.min_free_gpu_bytes or section.segment:
        return []
    chosen = _find_devices(config, gpus).pipeline.devices
    return [
        gpu
        for gpu in gpus
        if (not chosen or gpu.device in chosen) and gpu.free_bytes < section.min_free_gpu_bytes
    ]


def describe_short(config: Config, gpus: Sequence[Gpu]) -> str:
    """Which GPUs are left out, for the reason of a placement; empty if none is."""
    short = list_short(config, gpus)
    return f"not used, as min_free_gpu_bytes asks for more: {_list_free(short)}" if short else ""


def describe_gpu(gpu: Gpu) -> str:
    """The names by which [pipeline] devices can choose it."""
    return f"{gpu.device} ({gpu.name}, {gpu.uuid})"


def _look_up(names: Sequence[str], gpus: Sequence[Gpu], key: str, problems: list[str]) -> list[str]:
    """The devices that these entries of a list mean. What is wrong is added to the problems."""
    found: list[str] = []
    for name in names:
        if name == "cpu" or any(gpu.device == name for gpu in gpus):
            found.append(name)  # a device that is named twice is used twice
            continue
        if GROUP in name:
            found.append(_look_up_group(name, gpus, key, problems))
            continue
        matches = _match(name, gpus)
        found += [gpu.device for gpu in matches if gpu.device not in found]
        if problem := _explain(name, matches, gpus):
            problems.append(f"{key}: {problem}")
    return found


def _look_up_group(name: str, gpus: Sequence[Gpu], key: str, problems: list[str]) -> str:
    """The group with the devices that its members mean. What is wrong is added to the problems."""
    members, found, known = members_of(name), list[str](), {gpu.device: gpu for gpu in gpus}
    for member in members:
        if member.startswith("cpu"):  # a pretended device
            found.append(member)
            continue
        matches = [known[member]] if member in known else _match(member, gpus)
        if problem := _explain(member, matches, gpus) or _explain_member(member, matches):
            problems.append(f"{key}: {problem}")
        found += [gpu.device for gpu in matches]
    if len(found) == len(members) and (problem := _explain_twice(name, found)):
        problems.append(f"{key}: {problem}")
    return GROUP.join(found)


def _explain_member(name: str, matches: Sequence[Gpu]) -> str:
    """What is wrong with a member of a group that means these GPUs; empty if nothing is."""
    if any(gpu.part is not None for gpu in matches):
        return (
            f"{name} means a MIG device, of which CUDA shows one to a process; write whole GPUs into a group."
        )
    if len(matches) > 1:
        return f"{name} means {len(matches)} GPUs, but a member of a group is one; write {_list(matches)}."
    return ""


def _explain_twice(group: str, devices: Sequence[str]) -> str:
    """What is wrong with a group that has a device twice; empty if none is."""
    twice = next((device for device in devices if devices.count(device) > 1), "")
    example = "cpu:0+cpu:1" if twice.startswith("cpu") else "cuda:0+cuda:1"
    problem = (
        f'the group "{group}" has {twice} twice; a group needs different devices, for example "{example}".'
    )
    return problem if twice else ""


def _list_shared(places: Iterable[Sequence[str]]) -> list[str]:
    """A sentence for each device that is in two different groups. places: the devices of each segment."""
    groups = dict.fromkeys(name for names in places for name in names if GROUP in name)
    return [
        f"pipeline.segment: {shared[0]} is in two groups, {first} and {second}; write it into one of them only."
        for first, second in itertools.combinations(groups, 2)
        if (shared := [device for device in members_of(first) if device in members_of(second)])
    ]


def _match(name: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs with this UUID, or the start of it, or with this in their name. The number or UUID of a divided GPU means its
    MIG devices."""
    if number := re.fullmatch(NUMBERED, name):
        return [gpu for gpu in gpus if gpu.part is not None and gpu.index == int(number[1]) and not number[2]]
    if re.fullmatch(UUID, name):
        return [gpu for gpu in gpus if gpu.uuid.lower().startswith(name.lower())]
    return _match_name(name, gpus)


def _match_name(name: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those with this in their name, whole words first, so that A10 does not mean an A100 beside it."""
    words = rf"(?<![a-z0-9]){re.escape(name.lower())}(?![a-z0-9])"
    whole = [gpu for gpu in gpus if re.search(words, gpu.name.lower())]
    return whole or [gpu for gpu in gpus if name.lower() in gpu.name.lower()]


def _explain(name: str, matches: Sequence[Gpu], gpus: Sequence[Gpu]) -> str:
    """What is wrong with an entry, and what to write; empty if it is fine."""
    is_uuid = re.fullmatch(UUID, name)
    if is_uuid and len(matches) > 1:
        return f"{name} is the start of several UUIDs; write more of it: {_list(matches)}."
    if matches:
        return ""
    if re.fullmatch(NUMBERED, name):
        problem = f"there is no {name}"
    elif is_uuid:
        problem = f"there is no GPU with the UUID {name}"
    else:
        problem = f'no GPU has "{name}" in its name'
    if not gpus:
        return f'{problem}; this machine has no GPU that NVIDIA\'s driver lists. Write "cpu" instead, or remove the key.'
    return f"{problem}; there are {_list(gpus)}. Write one of these names, or a part of it; `{command('gpus')}` lists them."


def _describe_none_left(config: Config, short: Sequence[Gpu]) -> str:
    wanted = config.pipeline.min_free_gpu_bytes // MIB
    return (
        f"pipeline.min_free_gpu_bytes: no GPU has {wanted:,} MiB free: {_list_free(short)}. Set a smaller value, stop what "
        f'uses their memory (also another visiond; `{command("gpus")}` lists the processes), or set devices = ["cpu"].'
    )


def _list(gpus: Sequence[Gpu]) -> str:
    return ", ".join(map(describe_gpu, gpus))


def _list_free(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.device} ({gpu.name}) with {gpu.free_bytes // MIB:,} MiB free" for gpu in gpus)


def list_useless_groups(config: Config, specs: Sequence[StageSpec]) -> Iterator[str]:
    """A sentence for each segment with a group of devices, but without a model that can be spread over them."""
    spreading = {spec.name for spec in specs if find_backend(spec.name, spec.backend).can_spread}
    for number, table in enumerate(config.pipeline.segment):
        group = next((device for device in table.devices if GROUP in device), None)
        if group and not spreading & set(table.stages):
            yield (
                f'pipeline.segment[{number}].devices: "{group}" is a group, but no model of this segment '
                f"({', '.join(table.stages)}) can be spread over several devices; stages with backends that can: "
                f"{', '.join(_list_spreading())}. Write each device by itself: {json.dumps(members_of(group))}."
            )


def _list_spreading() -> list[str]:
    """The stages with backends that can be spread, each with these."""
    able = {
        stage: [name for name, backend in find_stage(stage).backends.items() if backend.can_spread]
        for stage in ORDER
    }
    return [f"{stage} ({', '.join(backends)})" for stage, backends in able.items() if backends]


def address_device(device: str, gpus: list[Gpu], cpu_threads: int) -> tuple[str, dict[str, str]]:
    """The device's name inside a worker, of a group that of its first device; and the environment variables that hide
    all other devices from it. A MIG device can be used in no other way."""
    if device.startswith("cpu"):
        # waiting threads do not spin, which costs a multiple on a busy machine
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        return "cpu", {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(cpu_threads), **passive}
    uuids = {gpu.device: gpu.uuid for gpu in gpus}
    # the worker numbers them in this order
    visible = ",".join(uuids[member] for member in members_of(device))
    allocator = (
        {} if ALLOCATORS & os.environ.keys() else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    )
    return "cuda:0", {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "2", **allocator}


def name_members(device: str) -> list[str]:
    """What a worker calls the devices of its group; empty for a device that is no group."""
    if GROUP not in device:
        return []
    members = members_of(device)
    return members if device.startswith("cpu") else [f"cuda:{number}" for number in range(len(members))]
