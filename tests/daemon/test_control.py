from __future__ import annotations

from pathlib import Path

from tests.daemon_process import Place

# Notes for each connection where SQLite makes temporary files.
HOOK = """
import sqlite3
connect = sqlite3.connect
def noted(*arguments, **options):
    connection = connect(*arguments, **options)
    with open(FILE, "a") as file:
        print(arguments[0], *connection.execute("PRAGMA temp_store_directory").fetchall(), sep="\\t", file=file)
    return connection
sqlite3.connect = noted
"""


def test_temporary_files_of_the_ledger_are_in_the_state_folder(tmp_path: Path) -> None:
    """Its room is checked before the ledger is copied to shrink it."""
    folder = tmp_path / "it's mine"
    folder.mkdir()
    place = Place(folder)
    (tmp_path / "sitecustomize.py").write_text(HOOK.replace("FILE", repr(str(tmp_path / "noted"))))
    assert place.run_once(prefix=["env", f"PYTHONPATH={tmp_path}"]).returncode == 0
    noted = (tmp_path / "noted").read_text().splitlines()
    ledger = str(folder / "state" / "ledger.sqlite")
    assert {line for line in noted if line.startswith(ledger)} == {f"{ledger}\t{(str(folder / 'state'),)}"}
