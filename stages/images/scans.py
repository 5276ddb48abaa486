"""Checks whether zeros have replaced the compressed pixels of a JPEG, as after a broken download or on a failing disk.

Every decoder reads zeros as codes, and makes gray or striped blocks of them. A search for zeros takes microseconds, and most
complete files have no long row of them. A flat picture may have some: then what libjpeg-turbo warns of counts, as after zeros
that are not the picture's own nearly always too many or too few codes are left for its blocks.
"""

from __future__ import annotations

import re

from stages.contract.base import ImageError, Reason
from stages.images.headers import EOI, read_jpeg_frame

SHORTEST_ROW = 64  # zero bytes; shorter rows are not looked at
DAMAGE = ("Corrupt JPEG data", "Premature end of JPEG file")  # how the warnings that count begin
ZEROS = re.compile(rb"\x00{%d,}" % SHORTEST_ROW)


def find_zeros(data: memoryview) -> tuple[int, int] | None:
    """The first byte and the number of the longest row of zeros in the pixels of a JPEG; None if it has none."""
    content = bytes(data)
    if bytes(SHORTEST_ROW) not in content:
        return None
    start = read_jpeg_frame(data).pixels_at
    rows = [row.span() for row in ZEROS.finditer(content, start, content.find(EOI, start))]
    first, end = max(rows, key=lambda row: row[1] - row[0], default=(0, 0))
    return (first, end - first) if rows else None


def check_zeros(data: memoryview) -> None:
    """Decode a JPEG that has them. Raises ImageError(TRUNCATED) if they are not its pixels. What libjpeg-turbo cannot read at
    all is left to the next decoder."""
    if (found := find_zeros(data)) is None or _is_whole(data):
        return
    first, count = found
    problem = (
        f"{count:,} of its {len(data):,} bytes are zeros, from byte {first:,} on, where its pixels should be"
    )
    raise ImageError(Reason.TRUNCATED, f"the JPEG is incomplete: {problem}. Copy it again from its source")


def _is_whole(data: memoryview) -> bool:
    """Whether libjpeg-turbo warns of no missing or superfluous codes. At an eighth of the size, as only the codes count."""
    import simplejpeg

    try:
        colors = simplejpeg.decode_jpeg_header(data, strict=False)[2]
        space = "CMYK" if colors in ("CMYK", "YCCK") else "GRAY"
        simplejpeg.decode_jpeg(data, space, min_height=1, min_width=1, min_factor=8, strict=True)
    except ValueError as error:  # a warning, or that it cannot go on
        return not str(error).startswith(DAMAGE)
    return True
