"""A start that an error of the system prevents: systemd repeats it only if the error is temporary."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

import pytest

from daemon.config.sections import Http
from daemon.core.errors import ConfigError, ModelsUnusable, exit_status_of
from daemon.layout.models import pack_errors
from daemon.server.app import listen, load_certificate
from daemon.system import mounts
from stages.contract.manifest import PackError, PackErrors
from tests.daemon_process import Place, make_certificate
from tests.faults.syscalls import Call, Supervisor

TOKEN = {"listen": "127.0.0.1:0", "token_file": "token"}


@pytest.mark.parametrize(
    ("call", "path", "fault", "status"),
    [
        ("open", "state/lock", errno.EIO, os.EX_IOERR),
        ("open", "state/lock", errno.ENOSPC, os.EX_IOERR),
        ("mkdir", "state", errno.EDQUOT, os.EX_IOERR),
        ("open", "daemon.toml", errno.ENFILE, os.EX_IOERR),
        ("open", "token", errno.EMFILE, os.EX_IOERR),
        ("open", "token", errno.ESTALE, os.EX_IOERR),
        ("open", "state/lock", errno.EACCES, os.EX_CONFIG),
        ("open", "state/lock", errno.EROFS, os.EX_CONFIG),
        ("open", "daemon.toml", errno.ENOENT, os.EX_CONFIG),
        ("open", "token", errno.EACCES, os.EX_CONFIG),
    ],
)
def test_a_start_is_repeated_after_an_error_that_may_pass(
    tmp_path: Path, call: str, path: str, fault: int, status: int
) -> None:
    place = Place(tmp_path, {"http": TOKEN})
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    wanted = Call(call, os.fsencode(tmp_path / path))
    with Supervisor(tmp_path, lambda seen: fault if seen == wanted else 0) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert (run.returncode, "Traceback" in run.stderr) == (status, False), run.stderr
    assert path.removesuffix("/lock") in run.stderr


def test_results_that_their_disk_does_not_show_are_no_bug(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.run_once().returncode == 0
    wanted = Call("stat", os.fsencode(place.site.results))
    with Supervisor(tmp_path, lambda seen: errno.EIO if seen == wanted else 0, reads=True) as supervisor:
        run = place.run_once(supervisor=supervisor.path)
    assert (run.returncode, "Traceback" in run.stderr) == (os.EX_IOERR, False)
    assert f"{place.site.results}: Input/output error" in run.stderr


def test_an_inbox_that_its_disk_does_not_show_is_no_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (mounts.is_there(tmp_path), mounts.is_there(tmp_path / "none")) == (True, False)

    def refuse(path: Path) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        found = mounts.is_there(tmp_path)
    assert found is None


@pytest.mark.parametrize(("fault", "status"), [(errno.EIO, os.EX_IOERR), (errno.EACCES, os.EX_CONFIG)])
def test_weights_that_the_disk_does_not_deliver_are_no_wrong_weights(fault: int, status: int) -> None:
    unread = PackError("the manifest cannot be read")
    unread.__cause__ = OSError(fault, os.strerror(fault))
    with pytest.raises(ModelsUnusable) as refused, pack_errors():
        raise PackErrors([unread, PackError("another model is altered")])
    assert exit_status_of(refused.value) == status


@pytest.mark.parametrize(
    ("answer", "status"), [(socket.EAI_AGAIN, os.EX_IOERR), (socket.EAI_NONAME, os.EX_CONFIG)]
)
def test_a_resolver_that_does_not_answer_for_now_is_no_wrong_address(
    monkeypatch: pytest.MonkeyPatch, answer: int, status: int
) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise socket.gaierror(answer, "it says why")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ConfigError, match="cannot listen on name:1: it says why") as refused:
        listen(Http(listen="name:1"))
    assert exit_status_of(refused.value) == status


def test_a_certificate_with_the_wrong_key_is_wrong_whatever_number_openssl_gives(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    names = make_certificate(tmp_path), make_certificate(other)
    mixed = Http(
        tls_certificate=str(tmp_path / names[0]["tls_certificate"]),
        tls_key=str(other / names[1]["tls_key"]),
    )
    with pytest.raises(ConfigError, match="unusable") as refused:
        load_certificate(mixed)
    assert exit_status_of(refused.value) == os.EX_CONFIG
    assert not isinstance(refused.value.__cause__, ssl.SSLError)
