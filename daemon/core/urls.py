"""URLs of object stores: a bucket and a prefix in it."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

BUCKETS = ("s3", "gs", "az", "abfs", "abfss")  # that can be listed by page, with a version for each object
STORES = (*BUCKETS, "http", "https")


def is_url(text: str) -> bool:
    # Not by urlsplit, which raises ValueError for some texts, and a list may have any.
    return text.lstrip().partition(":")[0].lower() in STORES


def split_url(url: str) -> tuple[str, str]:
    """The bucket or server, and the path in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", unquote(parts.path).strip("/")


def check_bucket(url: str) -> str:
    """Accept the URL of a bucket or of a prefix in it, or ""; returned without a slash at its end.
    What is refused is not repeated, as it may have a secret."""
    if not url:
        return url
    if not re.fullmatch(rf"({'|'.join(BUCKETS)})://[^/\s?#]+(/[^?#]*)?", url):
        raise ValueError(
            'this is no URL of an object store; write it as "s3://bucket/prefix" (also gs://, az://, abfss://), without '
            "a query. Credentials come from the environment"
        )
    if ":" in urlsplit(url).netloc.rpartition("@")[0]:
        raise ValueError("a URL must have no password; credentials come from the environment")
    return url.rstrip("/")
