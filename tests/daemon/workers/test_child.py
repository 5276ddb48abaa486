from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from resource import RUSAGE_SELF, getrusage
from daemon.workers.child import keep_memory

def use():
    return [b"x" * (4 << 20 | block) for block in range(16)]

keep_memory()
use()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(100):
    use()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 16 * (4 << 20) // 4096  # that it takes once


def test_memory_that_one_batch_frees_serves_the_next_without_the_kernel() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < PAGES
