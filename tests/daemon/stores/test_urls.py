"""URLs of stores in the configuration, and how errors of stores are reported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from daemon.config.loading import parse
from daemon.core.errors import ConfigError
from daemon.core.stores import StoreFailed, StoreUnusable, find_trouble, store_errors, store_of
from daemon.core.urls import check_bucket, split_url
from daemon.results.destinations import Destination
from daemon.results.uploads import StoreSink
from daemon.service.start import check_inboxes

URL = "s3://bucket/in"


def problems_of(folder: Path, *inboxes: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        parse({"inbox": list(inboxes)} | more, folder)
    return str(error.value)


def test_an_inbox_in_a_store_is_known_by_its_url_and_moves_nothing(tmp_path: Path) -> None:
    config = parse(
        {"inbox": [{"url": f"{URL}/", "name": "a"}, {"name": "b"}], "output": {"bins": "link"}}, tmp_path
    )
    store, folder = config.inbox
    assert (store.root, folder.root) == (URL.encode(), os.fsencode(tmp_path / "inbox"))
    assert Destination.of(store, config).bins_mode == "none"
    assert Destination.of(folder, config).bins_mode == "link"


def test_what_a_store_cannot_do_is_refused(tmp_path: Path) -> None:
    assert "both a `path` and a `url`" in problems_of(tmp_path, {"url": URL, "path": "inbox"})
    assert "lifecycle rule" in problems_of(tmp_path, {"url": URL, "on_success": "delete"})
    assert 'use "auto"' in problems_of(tmp_path, {"url": URL, "watch": "inotify"})
    assert "drop archives into an inbox that is a folder" in problems_of(
        tmp_path, {"url": URL, "unpack": ["zip"]}
    )
    parts = ({"url": URL, "name": "a"}, {"url": f"{URL}/more", "name": "b"})
    assert "contains the other" in problems_of(tmp_path, *parts)
    parse({"inbox": [{"url": URL, "name": "a"}, {"url": f"{URL}side", "name": "b"}]}, tmp_path)


@pytest.mark.parametrize(
    ("url", "is_refused"),
    [
        (URL, True),
        (f"{URL}/out", True),
        ("s3://bucket", False),
        ("s3://bucket/out", False),
        ("s3://other/in", False),
    ],
)
def test_the_daemon_does_not_process_what_it_uploads(url: str, is_refused: bool, tmp_path: Path) -> None:
    output = {"sinks": ["store"], "store": {"url": url}}
    if is_refused:
        assert "would find what the sink store uploads" in problems_of(tmp_path, {"url": URL}, output=output)
    else:
        parse({"inbox": [{"url": URL}], "output": output}, tmp_path)
    inner = {"url": f"{url}/results/x"}
    assert "would find what the sink store uploads" in problems_of(tmp_path, inner, output=output)


@pytest.mark.parametrize(
    "url", ["s3://me:hidden@bucket/x", "s3://bucket/x?key=hidden", "https://hidden/x", "s3://"]
)
def test_a_url_that_may_have_a_secret_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"redentials come from the environment"):
        check_bucket(url)
    assert "hidden" not in problems_of(tmp_path, {"url": url})


def test_a_url_has_a_bucket_and_a_prefix() -> None:
    assert split_url("s3://bucket/a/b%20c/") == ("s3://bucket", "a/b c")
    assert check_bucket("abfss://files@account.dfs.core.windows.net/x") != ""


@pytest.mark.parametrize(
    ("text", "said", "status"),
    [
        (
            "Error in 3s - Server returned non-2xx status code: 503 Slow: <Error><Code>SlowDown</Code>",
            "answers 503 SlowDown",
            503,
        ),
        (
            "Error performing GET http://h/x?sig=hidden in 2ms, after 2 retries - HTTP error: error sending request",
            "does not answer: error sending request",
            0,
        ),
        (
            'Error - HTTP error: x\n\nDebug source:\n Os { message: "Connection refused" }',
            "does not answer: Connection refused",
            0,
        ),
        (
            "Error performing token request: Error performing GET http://169.254.169.254/x?a=b in 9ms - Server "
            "returned non-2xx status code: 404 Not Found: ",
            "no credentials: the environment does not have AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and this "
            "machine's role gives none",
            404,
        ),
        ("something about http://h/x?sig=hidden went wrong", "something about http://h/x went wrong", 0),
    ],
)
def test_an_error_of_a_store_is_one_line_without_secrets(text: str, said: str, status: int) -> None:
    exceptions = pytest.importorskip("obstore.exceptions", reason="obstore is not installed: make setup")
    with pytest.raises(StoreFailed) as error, store_errors(URL):
        raise exceptions.GenericError(text)
    assert str(error.value).startswith(f"{URL}: ")
    assert str(error.value).endswith(said)
    assert error.value.status == status
    assert error.value.is_general, "no image is the cause"


def test_credentials_that_a_machine_does_not_have_are_not_the_fault_of_one_object() -> None:
    exceptions = pytest.importorskip("obstore.exceptions", reason="obstore is not installed: make setup")
    with pytest.raises(StoreFailed) as error, store_errors(URL):
        raise exceptions.GenericError("GET http://169.254.169.254/x - status code: 404 Not Found: ")
    assert error.value.is_general


@pytest.mark.parametrize(
    ("url", "environment", "said"),
    [
        ("az://p", {}, "Account must be specified; check AZURE_STORAGE_ACCOUNT_NAME"),
        (
            "az://p",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "!hidden"},
            "Invalid Access Key; ",
        ),
        ("s3://p", {"AWS_ACCESS_KEY_ID": "hidden"}, "Missing SecretAccessKey; check AWS_ACCESS_KEY_ID"),
        ("gs://p", {"GOOGLE_SERVICE_ACCOUNT_KEY": '"hidden"'}, "service account file; check GOOGLE_APPL"),
        (
            "gs://p",
            {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"type": "hidden"}'},
            "service account file; check GOOGLE_APPL",
        ),
    ],
)
def test_a_store_that_the_environment_does_not_describe_is_told_without_its_secrets(
    url: str, environment: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: make setup")
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store_of.cache_clear()
    with pytest.raises(StoreUnusable) as error:
        store_of(url)
    assert said in str(error.value)
    assert "hidden" not in str(error.value)
    assert find_trouble(f"{url}/in") == str(error.value)
    with pytest.raises(StoreUnusable):  # and the daemon does not start
        check_inboxes(parse({"inbox": [{"url": f"{url}/in"}]}, tmp_path))
    sink = StoreSink(parse({"output": {"store": {"url": url}}}, tmp_path).output.store, {})
    assert said in sink.problem()
