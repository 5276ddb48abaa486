"""A sink that posts finished records to an HTTP address, signed as Standard Webhooks (standardwebhooks.com) describes it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http
import os
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from email.message import Message
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec
from anyio import to_thread

from daemon import __version__
from daemon.config.output import WebhookSection
from daemon.config.secrets import read_secret_line
from daemon.core.errors import ConfigError
from daemon.ledger.record import Record

ANSWER_SECONDS = 20.0  # for each part of the receiver's answer
REQUEST_BYTES = 512 << 10  # of records in one request; many receivers take up to 1 MiB
PREFIX = b"whsec_"  # of a secret in base64
UNFIT = (
    http.HTTPStatus.BAD_REQUEST,
    http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    http.HTTPStatus.UNPROCESSABLE_ENTITY,
)
SECRET_BYTES = range(24, 65)  # of such a secret, by Standard Webhooks


class Refused(OSError):
    """The receiver did not take the records."""


class RequestRefused(Refused):
    """The receiver does not take this request, perhaps because of its size, or of one record in it."""


class WebhookSink:
    """Records that are DONE or FAILED, in the order of their publication, at most 128 in a request."""

    def __init__(self, settings: WebhookSection) -> None:
        self._settings = settings
        # A redirect could lead the signed content to another host.
        self._opener = urllib.request.build_opener(_NoRedirects())
        # What the receiver took of a group that then failed: it is not sent again with each try.
        self._taken: set[bytes] = set()

    def problem(self) -> str:
        if not self._settings.url:
            return "[output.webhook] url is not set"
        try:
            self.check_secret()
        except ConfigError as error:
            return str(error).removesuffix(".")
        return ""

    def check_secret(self) -> None:
        """Raises ConfigError if there is to be one, and it cannot be used."""
        if self._settings.secret_file:
            self._secret()

    async def append(self, records: Sequence[Record]) -> None:
        """Raises OSError if the receiver does not answer with a status from 200 to 299."""
        parts = [(record, msgspec.json.encode(self._describe(record))) for record in records]
        left = [(record, part) for record, part in parts if part not in self._taken]
        await to_thread.run_sync(self._post_all, left, abandon_on_cancel=True)
        self._taken.clear()

    def _post_all(self, parts: Sequence[tuple[Record, bytes]]) -> None:
        """In several requests if one would be too large, or the receiver does not take it. Raises Refused, which names the
        record if it is one alone."""
        if not parts:
            return
        if sum(len(part) for _, part in parts) <= REQUEST_BYTES or len(parts) == 1:
            try:
                self._post(msgspec.json.encode({"records": [msgspec.Raw(part) for _, part in parts]}))
            except RequestRefused as error:
                if len(parts) == 1:
                    image = f"image {parts[0][0].id} ({os.fsdecode(parts[0][0].location)})"
                    raise Refused(f"{error} to the record of {image}; the later ones wait for it") from error
            else:
                self._taken.update(part for _, part in parts)
                return
        half = len(parts) // 2
        self._post_all(parts[:half])
        self._post_all(parts[half:])

    def _describe(self, record: Record) -> Any:
        if self._settings.content == "record":
            return msgspec.Raw(record.sidecar)
        return record.outline()

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self._settings.url, body, self._headers(body), method="POST")
        try:
            with self._opener.open(request, timeout=ANSWER_SECONDS) as answer:
                answer.read(1 << 16)
        except urllib.error.HTTPError as error:
            with error:
                kind = RequestRefused if error.code in UNFIT else Refused
                raise kind(f"{self._host} answers {error.code} {error.reason}") from error
        except urllib.error.URLError as error:
            raise Refused(f"{self._host} does not answer: {error.reason}") from error

    @property
    def _host(self) -> str:
        """The rest of the address may be secret."""
        address = urlsplit(self._settings.url)
        return f"{address.scheme}://{address.netloc.rpartition('@')[2]}"

    def _headers(self, body: bytes) -> dict[str, str]:
        """A request that is repeated as it was has the same id, so that a receiver knows it."""
        headers = {"content-type": "application/json", "user-agent": f"visiond/{__version__}"}
        number, moment = f"msg_{hashlib.blake2b(body, digest_size=16).hexdigest()}", str(int(time.time()))
        headers |= {"webhook-id": number, "webhook-timestamp": moment}
        if self._settings.secret_file:
            secret = self._secret()
            signed = hmac.digest(secret, f"{number}.{moment}.".encode() + body, hashlib.sha256)
            headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
        return headers

    def _secret(self) -> bytes:
        """Read for each request, so that it can be changed; never empty. Raises ConfigError."""
        key, file = "output.webhook.secret_file", self._settings.secret_file
        text = read_secret_line(key, file)
        if not text.lower().startswith(PREFIX):
            return text
        try:
            secret = base64.b64decode(text.removeprefix(PREFIX), validate=True)
            if len(secret) in SECRET_BYTES:
                return secret
            why = f"these are {len(secret)} bytes"
        except ValueError as error:
            why = str(error)
        fix = f"to make a new one: (umask 077; {{ printf {PREFIX.decode()}; openssl rand -base64 32; }} > {shlex.quote(file)})"
        least, most = SECRET_BYTES[0], SECRET_BYTES[-1]
        wanted = f"begins with {PREFIX.decode()}, so the rest must be base64 of {least} to {most} bytes"
        raise ConfigError([f"{key}: {file} {wanted}: {why}; {fix}"])


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None
