from __future__ import annotations

import pytest

from stages.ocr.direction import put_in_order, reads_right_to_left


@pytest.mark.parametrize(
    ("seen", "written"),
    [
        ("םלוע םולש", "שלום עולם"),
        ("رالود 12.50 ةركذتلا رعس", "سعر التذكرة 12.50 دولار"),
        ("12/03/2024 خيرات", "تاريخ 12/03/2024"),
        ("عراش ISO 9001 يف (123) مقر", "رقم (123) في ISO 9001 شارع"),
        ("ةراجتلل ABC Trading LLC ةكرش", "شركة ABC Trading LLC للتجارة"),
        ("ىلع مصخ 50%", "50% خصم على"),
        ("Hello ملاع", "Hello عالم"),
        ("The word مالس means peace", "The word سلام means peace"),
        ("Hello (world) 3.5", "Hello (world) 3.5"),
        ("12.50", "12.50"),
        ("", ""),
    ],
)
def test_text_is_put_into_logical_order(seen: str, written: str) -> None:
    assert put_in_order(seen) == written


def test_a_dictionary_shows_whether_it_has_a_right_to_left_script() -> None:
    assert reads_right_to_left(["", "a", "ب", " "])
    assert reads_right_to_left(["", "ש"])
    assert not reads_right_to_left(["", "a", "é", "漢", "д", "1", " "])
