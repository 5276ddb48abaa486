"""The list of files in a zip: as zipfile takes it, and with the names that were meant.

In which code page are the names in a zip that does not say so? By the standard, names that are not marked as UTF-8 are in code
page 437. In fact they are in that of the system which made the archive; macOS writes UTF-8. All names of an archive are decided
together: each page says how probable they are, and the most probable page is taken. A few names suffice, because each language
has some hundred characters that make up most of its texts, and a wrong page gives characters that are rare. (charset-normalizer
needs longer texts: it recognized 3 of 63 single names in GBK.)
"""

from __future__ import annotations

import codecs
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from math import log
from typing import BinaryIO, NamedTuple

ENTRY = b"PK\x01\x02"  # in the list
IN_UTF_8 = 0x0800  # a name
OLD_VERSION = 20  # of the standard, by which every file says that it can be read
MARKED = 0x8000  # a name in UTF-8: to here the reader moves the bit, as zipfile does not look at it
UNICODE_PATH = 0x7075  # Info-ZIP's extra field with a name in UTF-8
SAMPLE = 5_000  # different names that are looked at
ASCII, NEVER = log(1 / 40), log(1e-7)
OTHER_SCRIPT = log(0.02)  # a Latin letter directly before one of another script
CAPITAL = log(0.02)  # behind a small letter

SIMPLIFIED = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多定行学法所民得经十三"
    "之进着等部度家电力里如水化高自二理起小物现实加量都两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形相全表"
    "间样与关各重新线内数正心反你明看原又么利比或但质气第向道命此变条只没结解问意建月公无系军很情者最立代想已通并提直题程展五果料象员"
    "入常文总次品式活设及管特件长求老头基资边流路级少图山统接知较将组见计别手角期根论运指九区强放决西被干做必战先回则任取据处队南给色光"
    "门即保治北造百规热领七海口东导器压志世金增争济照片像截屏扫描发票报告旅行风景合同身份证微信夹册婚礼春夏秋冬花动猫狗城市夜庭视频音乐副未名"
)
TRADITIONAL = (
    "的一是在不了有和人這中大為上個國我以要他時來用們生到作地於出就分對成會可主發年動同工也能下過子說產種面而方後多定行學法所民得經十三"
    "之進著等部度家電力裡如水化高自二理起小物現實加量都兩體制機當使點從業本去把性好應開它合還因由其些然前外天政四日那社義事平形相全表"
    "間樣與關各重新線內數正心反你明看原又麼利比或但質氣第向道命此變條只沒結解問意建月公無系軍很情者最立代想已通並提直題程展五果料象員"
    "入常文總次品式活設及管特件長求老頭基資邊流路級少圖山統接知較將組見計別手角期根論運指九區強放決西被做必戰先回則任取據處隊南給色光"
    "門即保治北造百規熱領七海口東導器壓志世金增爭濟照片像擷取畫螢幕掃描票報告旅行風景約身證夾冊婚禮春夏秋冬花貓狗城市夜庭視音樂檔副未名臺台灣"
)
JAPANESE = (
    "日一国人年大十二本中長出三時行見月分後前生五間上東四今金九入学高円子外八六下来気小七山話女北午百書先名川千水半男西電校語土木聞食車"
    "何南万毎白天母火右読友左父雨会同事自社発者地業方新場員立開手力問代明動京目通言理体田主題意不作用度強公持野以思家世多正安院心界教文元"
    "重近考画海売知道集別物使品計死特私始朝運終台広住真有口少町料工建空急止送切転研足究楽起着店病質待試族銀早映親験英医仕去味写字答夜音"
    "注帰古歌買図週室歩風紙黒花春赤青館屋色走秋夏旅服肉鳥冬昼茶牛魚犬像表請求領収報告議録資無第号版予定設商製証契約結婚式"
)
KOREAN = (
    "이다는에의을가고하지로를사은한기자어들도서리시대인나정아일그부수전해있으과제라스보구여만상장주국원공성비마신조동생세우적안관용문무와"
    "연위선소경방계치학단었회내실개교거오바분면당유간호중저모산물재후명식영않트드진업반음르게것미요결두더없노화불때출달된발력김속크본데강표체카"
    "론까행말입터할려될점또타건설집양천던통너예차운년월날피근금민심각토남박권린되야약질추종외형최니작레직순평배프급람감육베품새폴캡처증첨복테"
    "름목풍족졸꽃몰코몽멕"
)
RUSSIAN = "оеаинтсрвлкмдпу"
CYRILLIC = "абвгдежзийклмнопрстуфхцчшщъыьэюяё"
# Of the characters that take two bytes in UTF-8: Latin, accents, Greek, Cyrillic, Hebrew and Arabic.
USUAL = ((0xC0, 0x17F), (0x300, 0x36F), (0x386, 0x3CE), (0x400, 0x45F), (0x5D0, 0x6FF))
LATIN = "äöüÄÖÜßéèêëàâçñóíáúôûùîïåæøÅÆÉÑ"
WESTERN = LATIN + "ãõÃÕÁÀÂÊÍÓÚØ"
EASTERN = "äöüÄÖÜßéáíóúýąćęłńśźżčďěňřšťůžľőűăâîôşţŁŚŻČŘŠŽÁÉÍÓÚÝ"


class CodePage(NamedTuple):
    """share: of a text, that `common` makes up. rare: how probable one of the other characters is, by its bytes."""

    name: str
    common: str
    share: float
    rare: Callable[[bytes], float]


def _of_shift_jis(code: bytes) -> float:
    number = int.from_bytes(code, "big")
    if len(code) == 1:
        return 0.05 / 63  # narrow katakana
    if 0x829F <= number <= 0x8396 or number == 0x815B:
        return 0.55 / 170  # kana
    return 0.02 / 500 if number < 0x889F else 0.3 / 2965 if number <= 0x9872 else 0.005 / 3800


def _of_euc_jp(code: bytes) -> float:
    if code[0] in (0x8E, 0x8F):
        return 0.005 / 6000  # narrow katakana, and what three bytes have
    if code[0] in (0xA4, 0xA5) or code == b"\xa1\xbc":
        return 0.55 / 170  # kana
    return 0.02 / 500 if code[0] < 0xB0 else 0.3 / 2965 if code[0] <= 0xCF else 0.005 / 3800


def _of_gbk(code: bytes) -> float:
    if len(code) != 2 or code[1] < 0xA1:
        return 0.01 / 14_000
    return 0.02 / 700 if code[0] < 0xB0 else 0.5 / 3755 if code[0] <= 0xD7 else 0.03 / 3008


def _of_big5(code: bytes) -> float:
    return 0.02 / 408 if code[0] < 0xA4 else 0.5 / 5401 if code[0] <= 0xC6 else 0.03 / 7652


def _of_korean(code: bytes) -> float:
    if min(code) < 0xA1:
        return 0.005 / 8822
    return 0.02 / 900 if code[0] < 0xB0 else 0.25 / 2350 if code[0] <= 0xC8 else 0.01 / 4888


def _of_letters(page: str, code: bytes) -> float:
    return 0.05 / 80 if code.decode(page).isalpha() else 0.0


def _of_russian(page: str, code: bytes) -> float:
    """Two of the pages have capitals where the other has small letters."""
    letter = code.decode(page)
    return 0.18 / 18 if letter in CYRILLIC else 0.15 / 33 if letter.lower() in CYRILLIC else 0.0


def _of_utf_8(code: bytes) -> float:
    if len(code) != 2:
        return 0.5 / 5000
    number = ord(code.decode())
    is_usual = any(first <= number <= last for first, last in USUAL)
    return 0.3 / 400 if is_usual else 1e-6


PAGES = (
    CodePage("utf-8", LATIN + CYRILLIC + CYRILLIC.upper(), 0.9, _of_utf_8),
    CodePage("cp932", JAPANESE, 0.25, _of_shift_jis),
    CodePage("euc_jp", JAPANESE, 0.25, _of_euc_jp),
    CodePage("gb18030", SIMPLIFIED, 0.5, _of_gbk),
    CodePage("cp950", TRADITIONAL, 0.5, _of_big5),
    CodePage("cp949", KOREAN, 0.75, _of_korean),
    *(CodePage(name, RUSSIAN, 0.65, partial(_of_russian, name)) for name in ("cp866", "cp1251", "koi8_r")),
    CodePage("cp437", LATIN, 0.9, lambda code: 0.0),
    *(CodePage(name, WESTERN, 0.85, partial(_of_letters, name)) for name in ("cp850", "cp1252")),
    *(CodePage(name, EASTERN, 0.85, partial(_of_letters, name)) for name in ("cp852", "cp1250")),
)


def load_code_pages() -> None:
    """While files can still be opened."""
    for page in PAGES:
        codecs.lookup(page.name)


def decode_names(names: Sequence[bytes]) -> list[str]:
    """Names of one archive that are in one code page, which nothing states."""
    parts = {part for name in names for part in name.split(b"/") if not part.isascii()}
    sample = sorted(parts)[:SAMPLE]
    page = max(PAGES, key=lambda page: _judge(page, sample)).name
    return [_decode(name, page) for name in names]


def _decode(name: bytes, page: str) -> str:
    """In code page 437, which has a character for each byte, if the name does not fit: so no two names become one."""
    try:
        return name.decode(page)
    except UnicodeDecodeError:
        return name.decode("cp437")


def _judge(page: CodePage, sample: Sequence[bytes]) -> float:
    """The logarithm of how probable these names are."""
    common, usual = frozenset(page.common), log(page.share / len(set(page.common)))
    known: dict[str, float] = {}
    total = 0.0
    for name in sample:
        before = " "
        for character in name.decode(page.name, errors="replace"):
            if character not in known:
                known[character] = usual if character in common else _rare(page, character)
            total += known[character] + _judge_pair(page, before, character)
            before = character
    return total


def _judge_pair(page: CodePage, before: str, character: str) -> float:
    """The same for what hardly ever follows each other."""
    is_mixed = before.isascii() != character.isascii() and before.isalpha() and character.isalpha()
    total = OTHER_SCRIPT if is_mixed and page.common[0] != LATIN[0] else 0.0
    if before.islower() and character.isupper() and not (before + character).isascii():
        total += CAPITAL
    return total


def _rare(page: CodePage, character: str) -> float:
    if character.isascii():
        return ASCII if character.isprintable() else NEVER
    if character == "\ufffd":
        return 2 * NEVER
    chance = page.rare(character.encode(page.name))
    return log(chance) if chance else NEVER


def zip_names(entries: list[zipfile.ZipInfo]) -> list[str]:
    """By what each says about its name, or all others together by their bytes."""
    found: list[str | None] = []
    unknown: list[bytes] = []
    for entry in entries:
        raw = entry.orig_filename.encode("latin-1")
        try:
            name = _unicode_path(entry.extra, raw) or (raw.decode() if entry.flag_bits & MARKED else None)
        except UnicodeDecodeError:
            name = None
        found.append(name)
        if name is None:
            unknown.append(raw)
    decoded = iter(decode_names(unknown))
    return [next(decoded) if name is None else name for name in found]


def _unicode_path(extra: bytes, raw: bytes) -> str:
    """The name in UTF-8, unless it belongs to another name; empty if there is none. Raises UnicodeDecodeError."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        if kind == UNICODE_PATH and size > 5 and struct.unpack_from("<BI", extra, 4) == (1, zlib.crc32(raw)):
            return extra[9 : 4 + size].decode()
        extra = extra[4 + size :]
    return ""


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
            moved = MARKED if flags & IN_UTF_8 else 0
            struct.pack_into("<BxH", entries, at + 6, OLD_VERSION, flags & ~(IN_UTF_8 | MARKED) | moved)
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
