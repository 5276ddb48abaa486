"""Commands that start as users start them: a new Python, which has imported nothing.

Other tests fork these from their server, which has imported everything: there a missing import cannot show.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.daemon_process import PATIENCE, Place

NEW = ["env"]  # runs the command in a Python of its own


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the demo has processed its images, with the fakes of the configuration that it found."""
    place = Place(tmp_path_factory.mktemp("demo"))
    told = place.command("demo", place.folder, "--count", "1", prefix=NEW)
    assert told.returncode == 0, told.stderr
    assert "3 done, 0 failed, 0 skipped" in told.stdout
    return place


def test_a_comparison_imports_what_it_needs(place: Place) -> None:
    told = place.command("compare", "--stage", "yolo", "--set", "options.salt=1", "--json", prefix=NEW)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["compared"] == 3


def test_the_page_imports_what_it_serves(place: Place) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "daemon",
        "page",
        "--config",
        str(place.config),
        "--listen",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as page:
        try:
            assert page.stdout
            said = page.stdout.readline()
            address = re.match(r"http://\S+", said)
            assert address, said + page.stdout.read()
            with urllib.request.urlopen(address[0], timeout=PATIENCE) as answer:
                assert answer.read().count(b'<article class="card">') == 3
            page.send_signal(signal.SIGINT)
            assert page.wait(PATIENCE) == 0
        finally:
            page.kill()
