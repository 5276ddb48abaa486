"""The page's own token."""

from __future__ import annotations

from pathlib import Path

import pytest

from daemon.errors import ConfigError
from daemon.page.guard import own_path, own_token


def test_a_token_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    first = own_token(tmp_path / "page.token")
    assert len(first) == 32
    assert own_token(tmp_path / "page.token") == first
    assert (tmp_path / "page.token").stat().st_mode & 0o077 == 0
    assert [file.name for file in tmp_path.iterdir()] == ["page.token"]


def test_an_empty_token_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "page.token").touch()
    with pytest.raises(ConfigError, match="is empty"):
        own_token(tmp_path / "page.token")


@pytest.mark.parametrize(
    "given", ["//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil.example", ""]
)
def test_a_login_leads_to_no_other_site(given: str) -> None:
    assert own_path(given) == "/"
    assert own_path("/images/7?q=a%20b") == "/images/7?q=a%20b"
