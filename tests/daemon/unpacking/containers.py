"""Archives, documents and videos, made on the spot."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from PIL import Image


def make_zip(files: Mapping[str, bytes] | Mapping[zipfile.ZipInfo, bytes], claimed_bytes: int = 0) -> bytes:
    """claimed_bytes: as the size of each file; 0: its own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        for member in archive.filelist:
            member.file_size = claimed_bytes or member.file_size
    return file.getvalue()


def make_raw_zip(names: Sequence[bytes], *, extra: bytes = b"", in_utf_8: bool = False) -> bytes:
    """A zip with names in bytes, each with the bytes of its number."""
    stand_ins = [b"%04d" % number + b"x" * (len(name) - 4) for number, name in enumerate(names)]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number, stand_in in enumerate(stand_ins):
            entry = zipfile.ZipInfo(stand_in.decode())
            entry.extra = extra
            archive.writestr(entry, str(number))
    data = bytearray(file.getvalue())
    for name, stand_in in zip(names, stand_ins, strict=True):
        data = data.replace(stand_in, name)
    if in_utf_8:
        for at in range(len(data) - 4):
            if bytes(data[at : at + 4]) in (b"PK\x03\x04", b"PK\x01\x02"):
                data[at + (7 if data[at + 2] == 3 else 9)] |= 0x08
    return bytes(data)


def encrypt_pdf(document: bytes) -> bytes:
    """The same PDF, which says that it is encrypted, by a password that nobody knows."""
    key = b"<" + b"00" * 32 + b">"
    standard = b"/Encrypt<</Filter/Standard/V 1/R 2/O %b/U %b/P -4>>/ID[<00><00>]" % (key, key)
    return document.replace(b"trailer\n<<", b"trailer\n<<" + standard)


def encrypt(archive: bytes) -> bytes:
    """The same zip, which says that its first file is encrypted."""
    data = bytearray(archive)
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def make_tar(
    files: Mapping[str, bytes],
    links: Mapping[str, str] | None = None,
    mode: str = "w:gz",
    twins: Mapping[str, str] | None = None,
) -> bytes:
    """links: names and what they point to; "" makes a device. twins: hard links."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.CHRTYPE, "")
            archive.addfile(entry)
        for name, target in (twins or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.LNKTYPE, target
            archive.addfile(entry)
    return file.getvalue()


def make_sparse_tar(size: int) -> bytes:
    """A tar with one file of this size, of which it has no bytes: all of it is a hole."""
    entry = tarfile.TarInfo("hole.png")
    entry.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % size  # the true size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def make_pages(kind: str, pages: int) -> bytes:
    """A TIFF or a PDF with this number of gray pages."""
    file = io.BytesIO()
    first, *others = (Image.new("L", (60, 40), 10 * page) for page in range(pages))
    first.save(file, kind, save_all=True, append_images=others)
    return file.getvalue()


def make_pyramid(pages: int) -> bytes:
    """A TIFF with this number of pages, each followed by a smaller copy."""
    file = io.BytesIO()
    copy = {"tiffinfo": {254: 1}}
    with_copies = [
        image
        for page in range(pages)
        for image in (Image.new("L", (60, 40), 10 * page), Image.new("L", (6, 4), 10 * page))
    ]
    for number, image in enumerate(with_copies):
        image.encoderinfo = copy if number % 2 else {}
    with_copies[0].save(file, "TIFF", save_all=True, append_images=with_copies[1:])
    return file.getvalue()


def make_video(times: Sequence[float], shape: Fraction | None = None) -> bytes:
    """A video with a frame at each of these seconds. shape: a pixel's width by its height."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 10)
        if shape:
            stream.codec_context.sample_aspect_ratio = shape
        for number, seconds in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 3 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(10 * seconds), Fraction(1, 10)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()
