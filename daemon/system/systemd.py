"""Notifies systemd: one datagram to the socket in NOTIFY_SOCKET (sd_notify(3)). Without systemd, does nothing."""

from __future__ import annotations

import os
import socket


class Notifier:
    """Sends READY, STATUS, STOPPING, WATCHDOG and EXTEND_TIMEOUT_USEC. `watchdog_seconds`:
    the longest time between two WATCHDOG messages."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        microseconds = os.environ.get("WATCHDOG_USEC", "") if mine else ""
        self.watchdog_seconds = int(microseconds) / 1e6 if microseconds.isdigit() else None

    def starting(self, text: str, seconds: float) -> None:
        """Say that the start is still in progress. systemd then waits this long for the next message, even after
        TimeoutStartSec."""
        self._send(f"STATUS={text}\nEXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}")

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        """A line for `systemctl status`."""
        self._send(f"STATUS={text}".replace("\n", " "))

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def alive(self) -> None:
        """Feed the watchdog. Call it only after real progress, or if there is nothing to do."""
        self._send("WATCHDOG=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # A leading @ means the null byte of the abstract namespace.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
                connection.sendto(state.encode(), socket.MSG_DONTWAIT, address)
        except OSError:  # systemd restarts or does not read, or there are too few descriptors
            return  # the message is not worth an error or a wait
