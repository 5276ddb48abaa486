from __future__ import annotations

from pathlib import Path

from daemon.system.mounts import NETWORK_FILE_SYSTEMS, is_network_mount


def test_the_kinds_of_file_system_that_send_no_events_are_known() -> None:
    assert NETWORK_FILE_SYSTEMS.fullmatch(b"nfs4")
    assert NETWORK_FILE_SYSTEMS.fullmatch(b"fuse.sshfs")
    assert not NETWORK_FILE_SYSTEMS.fullmatch(b"ext4")
    assert not is_network_mount(Path("/proc"))
