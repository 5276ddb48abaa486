"""Dockerfile and compose file agree with the rest of deploy/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from daemon.config import loading as config
from daemon.config.pipeline import PipelineSection
from daemon.installing.source import CODE
from daemon.system import children

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
GPU: dict[str, Any] = yaml.safe_load((FOLDER / "gpu.yaml").read_text())
VISIOND = COMPOSE["services"]["visiond"]
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def test_prometheus_and_grafana_are_configured_as_without_containers() -> None:
    def read(name: str) -> Any:
        return yaml.safe_load((ROOT / "deploy" / name).read_text())

    scrape = yaml.safe_load(
        COMPOSE["configs"]["prometheus"]["content"].replace("visiond:9464", "127.0.0.1:9464")
    )
    assert scrape == read("prometheus/prometheus.yml")
    source = COMPOSE["configs"]["datasource"]["content"].replace("//prometheus:", "//127.0.0.1:")
    assert yaml.safe_load(source) == read("grafana/provisioning/datasources/prometheus.yml")
    [provider] = read("grafana/provisioning/dashboards/visiond.yml")["providers"]
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    for board in (ROOT / "deploy" / "grafana").glob("*.json"):
        assert f"{provider['options']['path']}/{board.name}" in mounted


def test_everything_that_is_mounted_exists() -> None:
    volumes = [v for service in COMPOSE["services"].values() for v in service["volumes"]]
    files = [FOLDER / v.split(":")[0] for v in volumes if v.startswith(".")]
    assert len(files) == 6
    assert [file for file in files if not file.exists()] == []


def test_a_stop_leaves_time_to_drain() -> None:
    assert VISIOND["stop_signal"] == "SIGTERM"
    assert (
        int(VISIOND["stop_grace_period"].rstrip("s")) > PipelineSection().drain_seconds + children.END_SECONDS
    )


def test_nothing_is_published_beyond_this_machine_and_visiond_has_no_rights() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert (VISIOND["cap_drop"], VISIOND["read_only"]) == (["ALL"], True)


def test_only_the_file_for_gpus_asks_for_gpus() -> None:
    assert [name for name, service in COMPOSE["services"].items() if "deploy" in service] == []
    [gpus] = GPU["services"].pop("visiond")["deploy"]["resources"]["reservations"]["devices"]
    assert gpus == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert GPU == {"services": {}}


def test_the_user_is_the_number_that_the_image_has() -> None:
    number = re.search(r"^ARG USER_ID=(\d+)$", DOCKERFILE, re.MULTILINE)
    assert number
    assert VISIOND["user"] == f"{number[1]}:{number[1]}"
    assert "USER ${USER_ID}:${USER_ID}" in DOCKERFILE.splitlines()


def test_memory_is_limited_without_swap_and_the_user_chooses_how_much() -> None:
    assert VISIOND["mem_limit"] == VISIOND["memswap_limit"] == "${VISIOND_MEMORY:-16g}"


def test_a_change_of_the_configuration_by_rename_is_seen_in_the_container() -> None:
    """A bind mount of a file goes on showing the old one."""
    [mounted] = [volume.split(":") for volume in VISIOND["volumes"] if ":/etc/" in volume]
    assert mounted[1:] == ["/etc/visiond", "ro"]
    assert (FOLDER / mounted[0] / "daemon.toml").is_file()


def test_models_are_in_a_volume_of_their_own_which_the_image_gives_to_its_user() -> None:
    [volume] = [volume for volume in VISIOND["volumes"] if volume.endswith(":/var/lib/visiond/models")]
    assert volume.startswith("${VISIOND_WEIGHTS:-models}:")
    assert "models" in COMPOSE["volumes"]
    assert config.load(FOLDER / "config" / "daemon.toml").models.folder == Path("/var/lib/visiond/models")
    assert re.search(r"install -d -o visiond .* /var/lib/visiond/models$", DOCKERFILE, re.MULTILINE)


def test_the_configuration_fits_the_image() -> None:
    settings = config.load(FOLDER / "config" / "daemon.toml")
    volumes = re.search(r"^VOLUME (\[.*\])", DOCKERFILE, re.MULTILINE)
    assert volumes
    kept = [Path(path) for path in yaml.safe_load(volumes[1])]
    output = settings.output
    written = [output.results, output.failed, output.done, output.bins_folder, settings.state.path]
    for folder in [*written, *(inbox.path for inbox in settings.inbox)]:
        assert any(folder.is_relative_to(path) for path in kept), f"{folder} is lost with the container"
    assert f"127.0.0.1:{settings.http.port}:{settings.http.port}" in VISIOND["ports"]


def test_the_image_gets_all_that_the_installer_reads() -> None:
    kept = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    needed = [
        *(folder.rstrip("/") for folder in CODE),
        "deploy/systemd",
        "docs",
        "pyproject.toml",
        "requirements.lock",
        "README.md",
        "LICENSE",
    ]
    assert [name for name in needed if f"!{name}" not in kept] == []
