"""`visiond follow`: a line for each publication, from any number on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from stages.contract.processes import environment
from tests.daemon_process import Place


def test_follow_goes_on_behind_a_number_and_prints_what_comes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.drop_many(range(3))
    assert place.run_once().returncode == 0
    command = [sys.executable, "-P", "-m", "daemon", "follow", "--after", "1", "--config", str(place.config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdout
        seen = [json.loads(process.stdout.readline()) for _ in range(2)]
        place.drop_many(range(3, 4))
        assert place.run_once().returncode == 0
        seen.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert [event["number"] for event in seen] == [2, 3, 4]
    assert {event["status"] for event in seen} == {"DONE"}
