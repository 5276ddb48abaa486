"""Uploads of backups: to a real store, and a proxy before it that makes faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.config.loading import parse
from daemon.core.errors import ConfigError
from daemon.core.stores import StoreFailed
from daemon.ledger.ledger import Ledger
from daemon.ledger.reading import Stopped
from daemon.maintenance.backups import upload_backups
from daemon.maintenance.schedule import Upkeep
from daemon.monitoring.metrics import Metrics
from tests.daemon.stores.server import BROKEN, BUCKET, Bucket, FaultyProxy

DAYS = [f"ledger-2026-01-{day:02}T020000Z.sqlite" for day in range(1, 6)]


def never() -> bool:
    return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "backups"
    folder.mkdir()
    return folder


def make(folder: Path, name: str, content: bytes = b"SQLite") -> None:
    (folder / name).write_bytes(content)


def test_the_store_has_the_newest_backups_each_uploaded_once(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, folder: Path
) -> None:
    url = f"s3://{BUCKET}/{prefix}"
    bucket.put({f"{prefix}/mine.sqlite": b"", f"{prefix}/deeper/{DAYS[0]}": b""})
    make(folder, "mine.sqlite")
    for name in DAYS:
        make(folder, name)
        upload_backups(folder, url, 2, never)
    assert sorted(bucket.names(prefix)) == [
        f"{prefix}/deeper/{DAYS[0]}",
        *(f"{prefix}/{name}" for name in DAYS[-2:]),
        f"{prefix}/mine.sqlite",
    ]
    before = len(proxy.asked)
    assert upload_backups(folder, url, 2, never) == f"0 uploaded to {url}, which has 2"
    assert all(asked.is_list for asked in proxy.asked[before:])


def test_what_an_outage_kept_back_is_uploaded_later(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, folder: Path
) -> None:
    url = f"s3://{BUCKET}/{prefix}"
    for name in DAYS[:3]:
        make(folder, name, content := name.encode() * 1000)
    proxy.fault = lambda asked: BROKEN if DAYS[1] in asked.path else None
    with pytest.raises(StoreFailed):
        upload_backups(folder, url, 7, never)
    assert bucket.names(prefix) == [f"{prefix}/{DAYS[0]}"]
    proxy.fault = lambda asked: None
    assert upload_backups(folder, url, 7, never) == f"2 uploaded to {url}, which has 3"
    assert bucket.names(prefix) == [f"{prefix}/{name}" for name in DAYS[:3]]
    assert bucket.get(f"{prefix}/{DAYS[2]}") == content


def test_an_upload_that_is_stopped_leaves_no_part_and_is_made_again(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.maintenance.backups.CHUNK_BYTES", 5 << 20)  # the least that S3 allows
    make(folder, DAYS[0], content := bytes(range(256)) * (12 << 12))  # 12 MiB
    answers = iter([False, True])
    with pytest.raises(Stopped):
        upload_backups(folder, f"s3://{BUCKET}/{prefix}", 7, lambda: next(answers))
    assert bucket.names(prefix) == []
    upload_backups(folder, f"s3://{BUCKET}/{prefix}", 7, never)
    assert bucket.get(f"{prefix}/{DAYS[0]}") == content


@pytest.mark.anyio
async def test_a_backup_is_uploaded_after_it_was_made(
    proxy: FaultyProxy, bucket: Bucket, prefix: str, ledger: Ledger, tmp_path: Path
) -> None:
    settings = {"backup_folder": "backups", "backup_url": f"s3://{BUCKET}/{prefix}"}
    config = parse(
        {"upkeep": settings | {"quiet_hours": "", "verify_days": 0, "forget_days": 0, "vacuum_days": 0}},
        tmp_path,
    )
    keeper = Upkeep(config, ledger, Metrics(), lambda: True, {})
    for task in ("backup", "upload"):
        assert keeper.next_task() == task
        await keeper.perform(task)
    assert keeper.next_task() is None
    [backup] = (tmp_path / "backups").iterdir()
    assert bucket.get(f"{prefix}/{backup.name}") == backup.read_bytes()


def test_uploads_need_a_folder_for_the_backups(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backup_url needs backup_folder"):
        parse({"upkeep": {"backup_url": "s3://bucket/backups"}}, tmp_path)
