"""The installed unit under a systemd that the test boots: start, watchdog, reload, restart, stop."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.daemon_process import SLACK_SECONDS, Place, counts_of, picture, wait_for
from tests.deploy.machine import booted
from tests.deploy.test_unit import UNIT

# What a test changes: which configuration, where the log goes, and how long things take.
WATCHDOG_SECONDS = 4
DROP_IN = f"""
[Service]
ExecStart=
ExecStart=/opt/visiond/bin/visiond run --config /srv/visiond/daemon.toml
ExecReload=
ExecReload=/opt/visiond/bin/visiond reload --config /srv/visiond/daemon.toml
StandardError=file:/srv/visiond/log
WatchdogSec={WATCHDOG_SECONDS}
RestartSec=1
"""


def test_systemd_starts_it_reloads_it_restarts_it_when_it_hangs_or_dies_and_stops_it(tmp_path: Path) -> None:
    place, units = Place(tmp_path / "place"), tmp_path / "units"
    (units / "visiond.service.d").mkdir(parents=True)
    place.configure({"log": {"level": "info"}})
    (units / UNIT.name).write_text(UNIT.read_text())
    (units / "visiond.service.d" / "test.conf").write_text(DROP_IN)
    with booted(place.folder, units) as machine:

        def process(image: int) -> None:
            sidecar = place.drop(f"{image}.ppm", picture(image)).name + ".json"
            wait_for(
                (place.site.results / sidecar).exists,
                f"image {image}; the log:\n{(place.folder / 'log').read_text()[-3000:]}",
            )

        def restart_after(signal: str, within: float) -> None:
            restarts = int(machine.property("NRestarts"))
            machine.systemctl("kill", "--kill-whom=main", f"--signal={signal}", "visiond")
            within += SLACK_SECONDS
            wait_for(
                lambda: int(machine.property("NRestarts")) > restarts, f"a restart after {signal}", within
            )
            wait_for(lambda: machine.property("ActiveState") == "active", "the service to be active again")

        assert machine.systemctl("start", "visiond") == ""
        assert machine.property("ActiveState") == "active"
        score = machine.run("cat", f"/proc/{machine.property('MainPID')}/oom_score_adj").stdout
        assert int(score) == 200, "the kernel ends its processes before those of the machine"
        assert 0.85 < int(machine.property("MemoryHigh")) / psutil.virtual_memory().total < 0.95
        process(1)
        wait_for(lambda: machine.property("StatusText").startswith("1 done"), "the status text")
        restart_after("SIGSTOP", WATCHDOG_SECONDS + 5)  # it is alive and silent: only the watchdog notices
        process(2)
        whole = place.config.read_text()
        place.config.write_text(whole.replace('"level" = "info"', '"level" = "debug"'))
        assert machine.systemctl("reload", "visiond") == ""
        wait_for(lambda: '"changed": ["log.level"]' in (place.folder / "log").read_text(), "the reload")
        place.config.write_text("broken")
        assert "Job for visiond.service failed" in machine.systemctl("reload", "visiond")
        assert machine.property("ActiveState") == "active"
        place.config.write_text(whole)
        restart_after("SIGKILL", 5)
        process(3)
        assert machine.systemctl("stop", "visiond") == ""
        ending = [machine.property(name) for name in ("Result", "ExecMainStatus", "TasksCurrent")]
        assert ending == ["success", "0", "[not set]"]
    assert counts_of(place) == {"DONE": 3}
