"""What each kind of file is taken to have in it, without the child process."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from zipfile import BadZipFile

import pytest
from PIL import Image

from daemon.unpacking.kinds import find_missing, has_further_pages, kind_of
from daemon.unpacking.members import (
    WALKERS,
    ZIP_HEAD,
    Item,
    Member,
    Rules,
    UnbufferedReader,
    Unusable,
    explain,
    without_needless_colors,
)
from daemon.unpacking.messages import Declared, Link, Twin
from tests.daemon.unpacking.containers import (
    encrypt,
    encrypt_pdf,
    make_pages,
    make_pyramid,
    make_raw_zip,
    make_sparse_tar,
    make_tar,
    make_video,
    make_zip,
)
from tests.daemon_process import PATIENCE


def as_file(data: bytes) -> int:
    fd = os.memfd_create("container")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def walk(kind: str, data: bytes, rules: Rules | None = None) -> Iterator[Item]:
    return WALKERS[kind](UnbufferedReader(as_file(data)), rules or Rules())


def names(kind: str, data: bytes, rules: Rules | None = None) -> list[str]:
    """Of the members; each is read."""
    found = []
    for item in walk(kind, data, rules):
        if isinstance(item, Member):
            assert b"".join(item.pieces)
            found.append(item.name.decode())
    return found


def test_the_kinds_are_known_by_their_names() -> None:
    assert kind_of(b"x/A.ZIP", ["zip"]) == "zip"
    assert kind_of(b"a.tar.gz", ["zip", "tar"]) == "tar"
    assert kind_of(b"a.zip", ["tar"]) == ""
    assert kind_of(b"a.zip.unpacked/b.pdf", ["zip", "pdf"]) == "pdf"
    assert kind_of(b"a.zip.unpacked/b.zip", ["zip", "pdf"]) == ""


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.unpacking.kinds.find_spec", lambda name: None)
    assert find_missing(["zip", "tar", "tiff"]) == ""
    assert "needs pypdfium2" in find_missing(["zip", "pdf"])
    assert "pip install 'visiond[documents]'" in find_missing(["video"])


def test_a_video_becomes_a_frame_for_each_second() -> None:
    data = make_video([0, 0.5, 1, 1.5, 2])
    assert names("video", data) == [f"at-00000{second}.000s.jpg" for second in range(3)]
    assert len(names("video", data, Rules(video_seconds=0.5))) == 5


def test_a_long_video_says_so_before_it_is_decoded() -> None:
    expected = next(walk("video", make_video([0, 100_000])))
    assert isinstance(expected, Declared)
    assert expected.files == 100_001


def test_masks_and_smaller_copies_are_no_pages() -> None:
    assert names("tiff", make_pyramid(2)) == ["page-0001.png", "page-0003.png"]


@pytest.mark.parametrize(
    ("data", "has_more"),
    [
        (make_pages("TIFF", 1), False),
        (make_pages("TIFF", 2), True),
        (make_pyramid(1), False),
        (make_pyramid(2), True),
        (make_pages("TIFF", 2)[:9], False),
        (b"no TIFF", False),
        (b"II*\0\x08\0\0\0" + b"\xff" * 2 + b"\0" * 4, False),
    ],
)
def test_only_a_tiff_with_several_pages_is_unpacked(data: bytes, has_more: bool) -> None:
    assert has_further_pages(as_file(data)) == has_more


def test_a_tiff_with_far_too_many_pages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.images.tiff.MOST", 3)
    with pytest.raises(Unusable, match="3 pages or more"):
        next(walk("tiff", make_pages("TIFF", 4)))


def test_a_page_of_a_million_points_is_left_out_and_the_others_are_not() -> None:
    data = make_pages("PDF", 2).replace(b"[ 0 0 60.0 40.0 ]", b"[ 0 0 1000000 1000000 ]", 1)
    _, first, second = walk("pdf", data)
    assert isinstance(first, Member)
    with pytest.raises(Unusable, match="more pixels than max_pixels"):
        next(first.pieces)
    assert isinstance(second, Member)
    assert next(second.pieces)


@pytest.mark.parametrize(("color", "mode"), [((90, 90, 90), "L"), ((90, 90, 200), "RGB")])
def test_a_page_without_colors_is_written_in_gray(color: tuple[int, int, int], mode: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (60, 40), color).save(file, "PDF", quality=100)
    _, page = walk("pdf", file.getvalue())
    assert isinstance(page, Member)
    image = Image.open(io.BytesIO(b"".join(page.pieces)))
    assert image.mode == mode
    assert image.convert("RGB").getpixel((100, 50)) == pytest.approx(color, abs=2)  # PDF has it as a JPEG


@pytest.mark.parametrize("color", [(91, 90, 90), (90, 91, 90), (90, 90, 91)])
def test_one_pixel_with_a_color_in_the_last_row_keeps_all_colors(color: tuple[int, int, int]) -> None:
    image = Image.new("RGB", (30, 700), (90, 90, 90))
    assert without_needless_colors(image).mode == "L"
    image.putpixel((29, 699), color)
    assert without_needless_colors(image) is image


def test_an_encrypted_member_says_so_and_the_others_are_read() -> None:
    items = walk("zip", encrypt(make_zip({"a.png": b"a", "b.png": b"b"})))
    _, first = next(items), next(items)
    assert isinstance(first, Member)
    with pytest.raises(Unusable, match="encrypted"):
        next(first.pieces)
    second = next(items)
    assert isinstance(second, Member)
    assert next(second.pieces) == b"b"
    with pytest.raises(Unusable, match="unpack it with its password"):  # once, not for each member
        next(items)


def test_a_zip_that_was_cut_says_so_and_something_else_is_no_zip() -> None:
    data = make_zip({"a.png": bytes(1000)})
    with pytest.raises(Unusable, match="perhaps it is incomplete"):
        next(walk("zip", data[: len(data) // 2]))
    comment = b"PK\x05\x06" + bytes(26)  # like the end of a zip in which nothing is
    with pytest.raises(Unusable, match="perhaps it is incomplete"):
        next(walk("zip", data[:-2] + struct.pack("<H", len(comment)) + comment))
    with pytest.raises(BadZipFile):
        next(walk("zip", b"something else"))


@pytest.mark.parametrize(
    "attributes",
    [0xFFFF0000, 0x20, 0o100644 << 16, 0x10],  # nonsense, DOS, Unix; a folder that has bytes
)
def test_a_file_in_a_zip_is_known_whatever_its_attributes(attributes: int) -> None:
    entry = zipfile.ZipInfo("p/a.png")
    entry.external_attr = attributes
    assert names("zip", make_zip({entry: b"a"})) == ["p/a.png"]


@pytest.mark.parametrize("attributes", [0x10, 0o040755 << 16])
def test_a_folder_in_a_zip_is_known_without_a_slash(attributes: int) -> None:
    """Otherwise the folder of its files would get another name."""
    entry = zipfile.ZipInfo("p")
    entry.external_attr = attributes
    assert names("zip", make_zip({entry: b"", zipfile.ZipInfo("p/a.png"): b"a"})) == ["p/a.png"]


@pytest.mark.parametrize(("at", "value"), [(6, 99), (-1, 13)])
def test_what_other_programs_pass_over_refuses_no_zip(at: int, value: int) -> None:
    """A version that is too new, and an extra field that is longer than what is there."""
    entry = zipfile.ZipInfo("a.png")
    entry.extra = struct.pack("<HH", 0x5455, 5) + b"12345"
    data = bytearray(make_zip({entry: b"a", zipfile.ZipInfo("b.png"): b"b"}))
    start = data.index(b"PK\x01\x02")
    data[start + at if at > 0 else data.index(entry.extra, start) + 2] = value
    assert names("zip", bytes(data)) == ["a.png", "b.png"]


def test_a_zip_of_more_than_4_gib_that_macos_has_made_is_read() -> None:
    """It cuts places to 32 bits, and has no zip64. zipfile takes what is missing for something before the zip."""
    data = make_zip({"a.png": b"a", "b.png": b"b"})
    second = data.index(ZIP_HEAD, 1)
    fd = os.memfd_create("container")
    os.pwrite(fd, data[:second], 0)
    os.pwrite(fd, data[second:], (1 << 32) + second)  # a hole between both
    members = [item for item in WALKERS["zip"](UnbufferedReader(fd), Rules()) if isinstance(item, Member)]
    assert [b"".join(member.pieces) for member in members] == [b"a", b"b"]


def test_an_encrypted_pdf_says_so() -> None:
    with pytest.raises(Unusable, match="it is encrypted; save it without its password"):
        next(walk("pdf", encrypt_pdf(make_pages("PDF", 1))))


def test_a_zip_says_how_much_is_in_it_before_anything_is_read() -> None:
    assert next(walk("zip", make_zip({"a": bytes(5000), "b": b"b"}))) == Declared(2, 5001)


def test_a_hole_in_a_tar_says_how_large_it_is() -> None:
    hole = next(walk("tar", make_sparse_tar(1 << 32)))
    assert isinstance(hole, Member)
    assert hole.size == 1 << 32


def test_links_and_devices_are_no_members() -> None:
    data = make_tar({"a.png": b"a"}, links={"b.png": "/etc/passwd", "c.png": ""})
    others = [item for item in walk("tar", data) if item is not None and not isinstance(item, Member)]
    assert others == [Link(), Link()]


def test_in_a_tar_what_has_no_known_type_is_a_file_and_gnus_notes_are_none() -> None:
    kinds = {"label": b"V", "a.png": b"Z", "list": b"D", "b.png": tarfile.CONTTYPE}
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, kind in kinds.items():
                entry = tarfile.TarInfo(name)
                entry.type, entry.size = kind, 512
                archive.addfile(entry, io.BytesIO(bytes(512)))
        data = file.getvalue()
    assert names("tar", data) == ["a.png", "b.png"]
    assert not any(isinstance(item, Link) for item in walk("tar", data))


@pytest.mark.parametrize("kept", [1000, 1300, 1600, 2047, 2600, 3000])
def test_a_tar_that_ends_within_a_header_or_a_file_says_so(kept: int) -> None:
    data = make_tar({"a.png": b"a" * 600, "b.png": b"b" * 600}, mode="w")
    with pytest.raises((Unusable, tarfile.TarError)):
        names("tar", data[:kept])


@pytest.mark.parametrize("zeros", [0, 512])
@pytest.mark.parametrize("size", [600, 1024, 0])
def test_a_tar_whose_end_is_not_marked_is_whole_as_for_gnu_tar(tmp_path: Path, zeros: int, size: int) -> None:
    data = make_tar({"long" * 40 + ".png": b"a" * size, "b.png": b"b" * size}, mode="w")
    cut = data[: data.rindex(b"b.png") + 512 + -(-size // 512) * 512 + zeros]
    (tmp_path / "a.tar").write_bytes(cut)
    listed = subprocess.run(
        ["tar", "-tf", tmp_path / "a.tar"], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    found = [item.name.decode() for item in walk("tar", cut) if isinstance(item, Member)]
    assert found == listed.stdout.split()
    for kept in (cut[: len(cut) - zeros - size // 2 - 1], cut[:200]):  # a long name takes a header of its own
        with pytest.raises((Unusable, tarfile.TarError)):
            list(walk("tar", kept))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("more", [b"", b"no tar" * 1000, bytes(5000)], ids=["nothing", "text", "zeros"])
def test_a_tar_that_follows_another_one_is_read_too(mode: str, more: bytes) -> None:
    """As by `cat`; the file may be deleted then."""
    data = b"".join(make_tar({name: b"x"}, mode=mode) for name in ("a.png", "b.png"))
    assert names("tar", data + more) == ["a.png", "b.png"]


def test_a_damaged_header_is_not_taken_for_the_end_of_a_tar() -> None:
    data = bytearray(make_tar({"a.png": b"a" * 600, "b.png": b"b" * 600}, mode="w"))
    data[1536 + 148] ^= 0x40
    with pytest.raises(Unusable, match="after 1,536 bytes"):
        names("tar", bytes(data))


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("cp932", ["写真/東京タワー.jpg", "新しいフォルダ/ソ.jpg"]),
        ("cp932", ["新しいフォルダ/SJIS_835C_ソ.txt", "新しいフォルダ/新しいテキスト ドキュメント.txt"]),
        ("gb18030", ["图片/风景1.jpg", "新建文件夹/尤里的陰謀v1.0 .png"]),
        ("cp949", ["사진/여행.jpg", "새 폴더/스크린샷.png"]),
        ("cp950", ["照片/功能.jpg", "新增資料夾/許功蓋.png"]),
        ("utf-8", ["中文名1.jpg", "中文名2.jpg"]),
        ("cp866", ["Новая папка/Фото.jpg"]),
        ("cp1251", ["Новая папка/Фото.jpg", "Отпуск/море.jpg"]),
        ("koi8_r", ["Новая папка/Фото.jpg", "Отпуск/море.jpg"]),
        ("euc_jp", ["写真/東京タワー.jpg", "新しいフォルダ/資料.jpg"]),
        ("cp1252", ["Müller/Straße.jpg", "Élève/naïve.jpg"]),
        ("cp1250", ["Zdjęcia/żółć.jpg", "Łódź/kościół.jpg", "święta.jpg"]),
        ("cp852", ["Zdjęcia/żółć.jpg", "Łódź/kościół.jpg"]),
        ("cp850", ["Grüße/São Paulo.jpg"]),
    ],
)
def test_names_that_are_not_marked_are_in_the_code_page_that_fits_them_all(
    page: str, expected: list[str]
) -> None:
    assert names("zip", make_raw_zip([name.encode(page) for name in expected])) == expected


def test_names_that_do_not_fit_the_page_of_the_others_stay_different() -> None:
    raw = [
        *(f"写真/東京{number}.jpg".encode("cp932") for number in range(9)),
        b"\x85\x40.jpg",
        b"\x85\x41.jpg",
    ]
    assert names("zip", make_raw_zip(raw))[-2:] == [name.decode("cp437") for name in raw[-2:]]


def test_a_name_that_is_not_what_its_mark_says_refuses_no_archive() -> None:
    raw = ["风景.jpg".encode("gb18030"), "风景照片.jpg".encode("gb18030")]
    assert names("zip", make_raw_zip(raw, in_utf_8=True)) == ["风景.jpg", "风景照片.jpg"]


@pytest.mark.parametrize(("of", "expected"), [(b"0000.jpg", "東京.jpg"), (b"another!", "0000.jpg")])
def test_info_zips_name_in_utf_8_counts_if_it_belongs_to_the_name(of: bytes, expected: str) -> None:
    name = "東京.jpg".encode()
    extra = struct.pack("<HHBI", 0x7075, 5 + len(name), 1, zlib.crc32(of)) + name
    assert names("zip", make_raw_zip([b"0000.jpg"], extra=extra)) == [expected]


def test_a_hard_link_is_another_name_of_a_file() -> None:
    items = list(walk("tar", make_tar({"a.png": b"a"}, twins={"x/b.png": "a.png"})))
    assert items[1] == Twin(b"x/b.png", b"a.png")


@pytest.mark.parametrize(
    ("shape", "size"), [(Fraction(2), (128, 48)), (Fraction(1, 2), (64, 96)), (None, (64, 48))]
)
def test_frames_of_a_video_have_square_pixels(shape: Fraction | None, size: tuple[int, int]) -> None:
    _, frame, *_ = walk("video", make_video([0], shape))
    assert isinstance(frame, Member)
    assert Image.open(io.BytesIO(b"".join(frame.pieces))).size == size


def test_no_message_of_a_library_is_shown() -> None:
    error = ValueError("[Errno 1094995529] Invalid data found when processing input: '<none>'")
    assert explain(error, "video") == (
        "it is damaged or incomplete, or not a video: copy it into the inbox again"
    )
    assert "Deflate64" in explain(NotImplementedError("That compression method is not supported"), "")
    assert "KeyError" in explain(KeyError("/opt/visiond"), "pdf")
