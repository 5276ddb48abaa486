"""A separate systemd for a test: process 1 of new namespaces, with only the unit and the targets that it
names. What it mounts and writes is visible only there. It needs root, unshare, and an installed systemd.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.daemon_process import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
TARGETS = ("basic", "sysinit", "shutdown", "network", "remote-fs", "multi-user", "sockets")
# The interpreter may be in a home folder, which the unit cannot see, so all of it goes to /opt,
# as in docs/operations.md.
BOOT = """
set -e
umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup
for folder in /run /opt /srv /var/lib /var/cache /var/tmp; do mount -t tmpfs tmpfs $folder; done
mkdir -p /opt/python /opt/packages /opt/source /opt/visiond/bin /srv/visiond
for folder in /etc /usr/local/bin; do
    mkdir -p /run/upper$folder /run/work$folder
    mount -t overlay overlay -o lowerdir=$folder,upperdir=/run/upper$folder,workdir=/run/work$folder $folder
done
mount --bind {prefix} /opt/python
mount --bind {packages} /opt/packages
mount --bind {source} /opt/source
mount --bind {folder} /srv/visiond
mount --bind {units} /lib/systemd/system
echo 'visiond:x:64999:64999::/var/lib/visiond:/bin/false' >> /etc/passwd
echo 'visiond:x:64999:' >> /etc/group
chown -R visiond:visiond /srv/visiond
cat > /opt/visiond/bin/visiond <<'EOF'
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/source:/opt/packages
exec /opt/python/bin/{python} -m daemon "$@"
EOF
chmod 755 /opt/visiond/bin/visiond
exec env container=test {systemd} --system --unit=basic.target --show-status=no --log-target=console
"""


class Machine:
    """A systemd that has booted."""

    def __init__(self, process: int) -> None:
        self._process = process

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in there."""
        return subprocess.run(
            ["nsenter", "-t", str(self._process), "-m", "-p", "-C", *command],
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
            env=environment,
        )

    def systemctl(self, *arguments: str) -> str:
        done = self.run("systemctl", *arguments)
        return (done.stdout + done.stderr).strip()

    def property(self, name: str, unit: str = "visiond") -> str:
        return self.systemctl("show", "--value", "-p", name, unit)


@contextlib.contextmanager
def booted(folder: Path, units: Path) -> Iterator[Machine]:
    """A machine with the units in `units`, and with `folder` as /srv/visiond.
    Skips the test if none can be booted."""
    if os.geteuid():
        pytest.skip("only root can boot a systemd")
    if not SYSTEMD.exists() or not shutil.which("unshare"):
        pytest.skip("systemd is not installed: make tools")
    for name in TARGETS:
        (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")
    script = BOOT.format(
        prefix=sys.base_prefix,
        packages=sysconfig.get_path("purelib"),
        source=ROOT,
        folder=folder,
        units=units,
        python=f"python3.{sys.version_info.minor}",
        systemd=SYSTEMD,
    )
    group = _control_group()
    command = [
        "unshare",
        "--fork",
        "--pid",
        "--mount",
        "--cgroup",
        "--ipc",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        script,
    ]
    enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    with (units.parent / "boot.log").open("w+") as log:
        process = subprocess.Popen(
            ["sh", "-c", enter, "sh", *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_for(lambda: children.read_text() or process.poll() is not None, "the first process")
            machine = Machine(int(children.read_text() or 0))
            with contextlib.suppress(AssertionError):
                wait_for(
                    lambda: machine.systemctl("is-system-running") in ("running", "degraded"),
                    "it to boot",
                    15.0,
                )
            if machine.systemctl("is-system-running") not in ("running", "degraded"):
                log.seek(0)
                pytest.skip(f"no systemd can be booted here: {log.read()[-300:]}")
            yield machine
        finally:
            process.kill()  # and with it, by --kill-child, all that runs in there
            process.wait(PATIENCE)
            wait_for(lambda: _remove(group), "the end of all its processes")


def _control_group() -> Path:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    if found is None or not os.access(found, os.W_OK):
        pytest.skip("there is no cgroup2 for a systemd to live in")
    group = found / f"visiond-test-{os.getpid()}"
    group.mkdir()
    return group


def _remove(group: Path) -> bool:
    """Whether the control group and those in it could be removed: no process is left in them."""
    try:
        for inner in sorted(group.glob("**/"), reverse=True):
            inner.rmdir()
    except OSError:
        return False
    return True
