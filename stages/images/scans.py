"""Checks whether zeros have replaced the compressed pixels of a JPEG,
as after a broken download or on a failing disk.

Every decoder reads zeros as codes, makes gray or striped blocks of them, and reports no error. A search for a
run of zeros takes microseconds, and most complete files have none. A flat picture may have long ones. So if
one is found, the Huffman tables show how many blocks it would be: no encoder writes more blocks than the
picture has, and none writes several in a row with many coefficients all set to the same value. With few it does:
a progressive scan may have one or two coefficients, and on a gradient these are the same in every block.

Source of the bit stream: ITU-T T.81, annexes B, C, F and G.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from stages.contract.base import ImageError, Reason

SHORTEST_RUN = 64  # zero bytes; shorter runs are not checked
ZEROS = re.compile(rb"\x00{%d,}" % SHORTEST_RUN)
MARKER = re.compile(rb"\xff[^\xff\x00\xd0-\xd7]")  # in a scan: not a stuffed zero and not a restart
SEGMENTS = 1 << 16  # most that are read; a progressive file has some dozens
DHT, SOS, DRI, EOI = 0xC4, 0xDA, 0xDD, 0xD9
SEQUENTIAL, PROGRESSIVE = frozenset((0xC0, 0xC1)), frozenset((0xC2,))
LEVELS = 4096  # more than the largest change of a DC coefficient of 8-bit pixels
FULL_BLOCKS = 2  # in a row with all coefficients the same: more than any encoder writes
MANY = 16  # coefficients of a block that no picture sets to the same value, block after block

Code = tuple[int, int]  # length in bits, and symbol, of the Huffman code that is all zeros


@dataclass(frozen=True, slots=True)
class Component:
    across: int  # sampling factors
    down: int
    columns: int  # blocks, in a scan of this component alone
    rows: int


@dataclass(slots=True)
class Picture:
    """The content of the segments read so far."""

    is_progressive: bool = False
    components: dict[int, Component] = field(default_factory=dict)
    units: int = 0  # in a scan of all components
    codes: dict[int, Code] = field(default_factory=dict)  # table class and number → its all-zero code
    restart: int = 0
    # (component, is DC) → lowest bit so far
    planes: dict[tuple[int, bool], int] = field(default_factory=dict)


def check_scans(data: memoryview, start: int) -> None:
    """Raises ImageError(TRUNCATED) if there are zeros instead of pixels.
    start: of the first scan's compressed data."""
    if gap := find_gap(data, start):
        at, size = gap
        problem = (
            f"{size:,} of its {len(data):,} bytes are zeros, from byte {at:,} on, where its pixels should be"
        )
        raise ImageError(
            Reason.TRUNCATED, f"the JPEG is incomplete: {problem}. Copy it again from its source"
        )


def find_gap(data: memoryview, start: int) -> tuple[int, int] | None:
    """The position and number of zeros instead of pixels; None if the file is complete."""
    body = bytes(data[start:])
    at = body.find(bytes(SHORTEST_RUN))
    if at < 0 or body.find(b"\xff\xd9", 0, at) >= 0:  # no pixels follow the end marker
        return None
    try:
        return _walk(data)
    except (struct.error, IndexError, KeyError, ValueError):  # malformed or unknown: the decoder decides
        return None


def _walk(data: memoryview) -> tuple[int, int] | None:
    picture, at, longest = Picture(), 2, (0, 0)
    for _ in range(SEGMENTS):
        found = MARKER.search(data, at)
        if found is None:
            return None
        marker, at = data[found.end() - 1], found.end()
        if marker == EOI:
            break
        if marker in (0x01, 0xD8):
            continue
        (length,) = struct.unpack_from(">H", data, at)
        segment = data[at + 2 : at + length]
        at += length
        _read_segment(picture, marker, segment)
        if marker == SOS:
            if not picture.components:  # arithmetic or lossless
                return None
            most = _longest_run(picture, segment)
            ending = MARKER.search(data, at)
            end = ending.start() if ending else len(data)
            for run in ZEROS.finditer(data, at, end):
                size = run.end() - run.start()
                longest = max(longest, (size, run.start()))
                if size > most:
                    return run.start(), size
            at = end
    if picture.is_progressive and longest[0] and not _is_complete(picture):
        # The remaining scans are among the zeros.
        return longest[1], longest[0]
    return None


def _read_segment(picture: Picture, marker: int, segment: memoryview) -> None:
    if marker in SEQUENTIAL | PROGRESSIVE:
        _read_frame(picture, segment, marker in PROGRESSIVE)
    elif marker == DHT:
        picture.codes |= dict(_read_codes(segment))
    elif marker == DRI:
        (picture.restart,) = struct.unpack_from(">H", segment)


def _read_frame(picture: Picture, segment: memoryview, is_progressive: bool) -> None:
    _, height, width, count = struct.unpack_from(">BHHB", segment)
    parts = [(segment[6 + 3 * i], segment[7 + 3 * i] >> 4, segment[7 + 3 * i] & 15) for i in range(count)]
    most_across, most_down = max(part[1] for part in parts), max(part[2] for part in parts)
    picture.is_progressive = is_progressive
    picture.units = _over(width, 8 * most_across) * _over(height, 8 * most_down)
    for number, across, down in parts:
        columns = _over(_over(width * across, most_across), 8)
        rows = _over(_over(height * down, most_down), 8)
        picture.components[number] = Component(across, down, columns, rows)


def _over(size: int, step: int) -> int:
    return -(-size // step) if step else 0


def _read_codes(segment: memoryview) -> Iterator[tuple[int, Code]]:
    """For each table the code that is all zeros, which is the first of the shortest codes."""
    at = 0
    while at < len(segment):
        counts = segment[at + 1 : at + 17]
        length = next((bits for bits, count in enumerate(counts, 1) if count), 0)
        yield segment[at], (length, segment[at + 17])
        at += 17 + sum(counts)


def _longest_run(picture: Picture, header: memoryview) -> int:
    """The most zero bytes in a row that a scan can have."""
    count = header[0]
    parts = [(header[1 + 2 * i], header[2 + 2 * i]) for i in range(count)]
    first, last, bits = header[1 + 2 * count : 4 + 2 * count]
    for number, _ in parts:
        if picture.is_progressive:
            picture.planes[number, first == 0] = bits & 15
    refines = bits >> 4 > 0  # one bit for each coefficient that is not zero
    units, unit_bits = picture.units, 0
    for number, tables in parts:
        component = picture.components[number]
        blocks = component.across * component.down
        if count == 1:
            blocks, units = 1, component.columns * component.rows
        block_bits, most = (1 if first == 0 else 64, 0) if refines else _cost(picture, tables, first, last)
        unit_bits += blocks * block_bits
        if most:
            units = min(units, _over(most, blocks))
    if picture.restart:
        units = min(units, picture.restart)
    return (units + 1) * unit_bits // 8 + 1  # it may begin and end inside a unit


def _cost(picture: Picture, tables: int, first: int, last: int) -> tuple[int, int]:
    """The number of zero bits in a block, and the most such blocks in a row; 0: any number."""
    block_bits = most = 0
    if first == 0:
        length, size = picture.codes[tables >> 4]
        block_bits = length + size
        # Each block is darker than the last one by this number of levels.
        most = _over(LEVELS, (1 << size) - 1)
    if first > 0 or not picture.is_progressive:
        length, symbol = picture.codes[0x10 | tables & 15]
        skipped, size = symbol >> 4, symbol & 15
        if size or skipped == 15:  # a coefficient, or sixteen zeros
            count, rest = divmod(last - max(first, 1) + 1, skipped + 1)
            block_bits += (count + (rest > 0)) * (length + size)
            if rest or count >= MANY:  # with a rest, the last code would be past the end of the block
                most = FULL_BLOCKS
        else:  # the end of the block or, in a progressive scan, of the next 2^skipped blocks
            block_bits += _over(length + skipped, 1 << skipped)
    return block_bits, most


def _is_complete(picture: Picture) -> bool:
    """Whether the scans of a progressive picture have contained the last bit of all components."""
    return all(
        picture.planes.get((number, is_dc)) == 0 for number in picture.components for is_dc in (True, False)
    )
