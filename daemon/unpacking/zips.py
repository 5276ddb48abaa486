"""Zip files whose list of files zipfile would refuse."""

from __future__ import annotations

import struct
from typing import BinaryIO

from daemon.unpacking import names

ENTRY = b"PK\x01\x02"  # in the list
IN_UTF_8 = 0x0800  # a name
OLD_VERSION = 20  # of the standard, by which every file says that it can be read


class RepairedZip:
    """A zip file whose names zipfile takes for bytes: it would refuse all of an archive for one that is not the UTF-8
    that its mark promises, and would cut names at a zero byte. So it would for a version that is too new, and for an extra
    field that is longer than what is there, which other programs pass over."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        if not data.startswith(ENTRY):
            return data
        entries, at = bytearray(data), 0
        while entries[at : at + 4] == ENTRY and at + 46 <= len(entries):
            (flags,) = struct.unpack_from("<H", entries, at + 8)
            moved = names.MARKED if flags & IN_UTF_8 else 0
            struct.pack_into("<BxH", entries, at + 6, OLD_VERSION, flags & ~(IN_UTF_8 | names.MARKED) | moved)
            name, extra, comment = struct.unpack_from("<HHH", entries, at + 28)
            _cut_extra(entries, at + 46 + name, extra)
            at += 46 + name + extra + comment
        return bytes(entries)


def _cut_extra(entries: bytearray, at: int, length: int) -> None:
    """Of extra fields that end behind what is there."""
    end = at + length
    while at + 4 <= end <= len(entries):
        (size,) = struct.unpack_from("<H", entries, at + 2)
        struct.pack_into("<H", entries, at + 2, min(size, end - at - 4))
        at += 4 + size
