"""Opens object stores with obstore. Credentials come from the environment, in the store's usual way, and are never logged."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from daemon.core.errors import MissingLibrary, VisiondError
from daemon.core.urls import split_url

PAGE = 1000  # objects that a store lists at once
# For the daemon, which itself tries again for as long as it takes: a store that is away must be noticed soon.
CONNECT_SECONDS, REQUEST_SECONDS = 3, 60
RETRIES, RETRY_SECONDS, LONGEST_BACKOFF_SECONDS = 4, 10, 2
# The store is busy, or something before it does not reach it: no object is the cause.
BUSY = (408, 429, 502, 503, 504)
NO_CREDENTIALS = "NoCredentials"  # visiond's own code: this machine's role gives none
# Codes of answers that refuse the credentials, whatever the request was.
CREDENTIALS = (
    *("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "InvalidAccessKeyId"),
    *("SignatureDoesNotMatch", "RequestTimeTooSkewed", "AuthenticationFailed", NO_CREDENTIALS),
)
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_SYSTEM = re.compile(r'message: "([^"]+)"')
_BUCKET_MISSING = ("NoSuchBucket", "ContainerNotFound")
# After these, obstore quotes what it could not read, which may be a part of a key.
_QUOTING = re.compile(r"(Unable to decode service account file|Invalid Access Key):.*|[\"`][^\"`]*[\"`]")
# How a request for the credentials of this machine's role is known.
_ROLE = ("http://169.254.", "token request")
_VARIABLES = {"s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
_VARIABLES_OF_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"


class StoreFailed(VisiondError, OSError):
    """A store does not answer, or refuses. status: of its answer by HTTP; 0 if there was none."""

    exit_status = os.EX_IOERR

    def __init__(self, text: str, status: int = 0, code: str = "") -> None:
        """code: the code in an answer in XML, such as AccessDenied; or NO_CREDENTIALS."""
        super().__init__(text)
        self.status, self.code = status, code

    @property
    def is_general(self) -> bool:
        """Whether the store or the credentials are the cause, as far as this answer says, and not this one request: then
        others would fail too, and may succeed later."""
        return (
            not self.status or self.status in (401, *BUSY) or self.status >= 500 or self.code in CREDENTIALS
        )


class StoreUnusable(StoreFailed):
    """The environment does not say how to open a store. No request was made."""

    exit_status = os.EX_CONFIG


@lru_cache(256)
def store_of(root: str, *, impatient: bool = False) -> Any:
    """The store of a bucket or server. impatient: give up soon, as the caller tries again. Raises MissingLibrary,
    StoreUnusable."""
    try:
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise MissingLibrary(
            "Object stores need obstore, which the extra stores has: pip install 'visiond[stores]'."
        ) from error
    try:
        return _open(root, impatient=impatient)
    except BaseError as error:
        text = _QUOTING.sub(r"\1", str(error).splitlines()[0]).partition(" error: ")[2]
        raise StoreUnusable(f"{root}: {text}; check {_variables_of(root)} in the environment") from None


def _variables_of(url: str) -> str:
    """The names of those that have the credentials, for a message."""
    return _VARIABLES.get(url.partition(":")[0], _VARIABLES_OF_AZURE)


def _open(root: str, *, impatient: bool) -> Any:
    from obstore.store import from_url

    if not impatient:
        return from_url(root, client_options={"timeout": "120s", "allow_http": True})
    timeouts = {"timeout": f"{REQUEST_SECONDS}s", "connect_timeout": f"{CONNECT_SECONDS}s"}
    longest = timedelta(seconds=LONGEST_BACKOFF_SECONDS)
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": longest, "base": 2}
    retry_timeout = timedelta(seconds=RETRY_SECONDS)
    return from_url(
        root,
        client_options={"allow_http": True, **timeouts},
        retry_config={"max_retries": RETRIES, "retry_timeout": retry_timeout, "backoff": backoff},
    )


@contextlib.contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn a store's errors into StoreFailed, FileNotFoundError or AlreadyExistsError of obstore."""
    from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError

    try:
        yield
    except (AlreadyExistsError, StoreFailed):
        raise
    except (NotFoundError, FileNotFoundError) as error:
        if any(code in str(error) for code in _BUCKET_MISSING):
            raise _explain(what, error) from None
        raise FileNotFoundError(errno.ENOENT, "it does not exist", what) from None
    except (BaseError, OSError) as error:
        raise _explain(what, error) from None


def _explain(what: str, error: Exception) -> StoreFailed:
    """In one line, without the query of a URL, which may have a signature."""
    text = str(error).strip() or type(error).__name__
    found = _STATUS.search(text)
    if any(part in text for part in _ROLE):
        why = f"no credentials: the environment does not have {_variables_of(what)}, and this machine's role gives none"
        return StoreFailed(f"{what}: {why}", int(found[1]) if found else 0, NO_CREDENTIALS)
    if found:
        code = _CODE.search(text)
        said = code[1] if code else ""
        return StoreFailed(f"{what}: the store answers {found[1]} {said}".rstrip(), int(found[1]), said)
    if cause := _SYSTEM.search(text):
        return StoreFailed(f"{what}: the store does not answer: {cause[1]}")
    first = re.sub(r"\?\S*", "", text.splitlines()[0]).rpartition(" - ")[2]
    return StoreFailed(f"{what}: {first.replace('HTTP error: ', 'the store does not answer: ')}")


def try_listing(url: str) -> None:
    """Raises MissingLibrary, StoreFailed, FileNotFoundError if a prefix cannot be listed now."""
    root, prefix = split_url(url)
    store = store_of(root, impatient=True)
    with store_errors(url):
        next(list_objects(store, prefix), None)


def find_trouble(url: str) -> str:
    """Why a prefix cannot be listed now; empty if it can."""
    try:
        try_listing(url)
    except MissingLibrary as error:
        return f"{url}: {error}".rstrip(".")
    except OSError as error:
        return str(error)
    return ""


def list_objects(store: Any, prefix: str, after: str = "") -> Iterator[Sequence[Any]]:
    """The objects below a prefix, by page, as mappings of obstore. after: begin behind this path. A page is
    fetched when it is asked for."""
    import obstore

    yield from obstore.list(store, prefix or None, offset=after or None, chunk_size=PAGE)
