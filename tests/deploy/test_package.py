"""The Debian package, made from a stand-in wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from daemon.installing.__main__ import parser
from tests.deploy.standin import make_wheel

FOLDER = Path(__file__).parents[2] / "deploy" / "debian"
spec = importlib.util.spec_from_file_location("build", FOLDER / "build.py")
assert spec
assert spec.loader
packager = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packager)

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg is not installed: make tools")


@needs_dpkg
def test_the_package_has_the_wheel_and_a_version_that_debian_sorts_rightly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEBFULLNAME", "Ada")
    monkeypatch.setenv("DEBEMAIL", "ada@example.org")
    package = packager.build(make_wheel(tmp_path, "0.2.0.dev3"), tmp_path)
    wanted = ["Package", "Version", "Maintainer"]
    fields = subprocess.check_output(["dpkg-deb", "--field", package, *wanted], text=True)
    assert fields == "Package: visiond\nVersion: 0.2.0~dev3\nMaintainer: Ada <ada@example.org>\n"
    content = subprocess.check_output(["dpkg-deb", "--contents", package], text=True)
    assert "./usr/share/visiond/visiond-0.2.0.dev3-py3-none-any.whl" in content
    assert "./usr/share/visiond/install.sh" in content
    assert "root/root" in content
    older = ["dpkg", "--compare-versions", "0.2.0~dev3", "lt", packager.debian_version("0.2.0")]
    assert subprocess.run(older, check=False).returncode == 0


@pytest.mark.parametrize("name", ["postinst", "prerm", "install.sh"])
def test_the_scripts_give_the_installer_commands_that_it_takes(name: str) -> None:
    script = FOLDER / name
    subprocess.run(["sh", "-n", script], check=True)
    [words] = re.findall(
        r"python3 -m daemon\.installing ([^\n]*?)(?: \"\$@\")?$", script.read_text(), re.MULTILINE
    )
    assert parser().parse_args(words.split()).command == words.split()[0]


@pytest.mark.parametrize("has_wheels", [True, False])
def test_the_package_installs_only_from_packages_that_are_here(tmp_path: Path, has_wheels: bool) -> None:
    wheels, log = tmp_path / "wheels", tmp_path / "log"
    if has_wheels:
        wheels.mkdir()
    (tmp_path / "python3").write_text(f'#!/bin/sh\necho "$@" > {log}\n')
    (tmp_path / "python3").chmod(0o755)
    script = (FOLDER / "postinst").read_text().replace("/opt/visiond-wheels", str(wheels))
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.check_output(["sh", "-c", script, "postinst", "configure"], text=True, env=path)
    assert log.exists() == has_wheels
    if has_wheels:
        assert log.read_text() == f"-m daemon.installing install --upgrade --wheels {wheels}\n"
    else:
        assert "sh /usr/share/visiond/install.sh" in told
