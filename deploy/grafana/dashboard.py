"""Prints a board for Grafana 10 or later, as classic JSON; boards.py has its panels:

python deploy/grafana/dashboard.py visiond > deploy/grafana/visiond.json
"""

from __future__ import annotations

import json
import sys

from boards import BOARDS
from panels import build

if __name__ == "__main__":
    uid = sys.argv[1]
    json.dump(build(uid, BOARDS[uid]), sys.stdout, indent=2, ensure_ascii=False)
    print()
