"""Addresses of object stores as they may be shown: without the keys that open them."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/@\s\"']+@")
_SECRET = re.compile(r"(?<=[?&])([^=&\s]*(?:key|secret|token|password|signature|credential)[^=&\s]*=)[^&\s\"']+", re.I)


def without_keys(text: str) -> str:
    """Return a text without user names and passwords before a host, and without secret values of a query.

    `s3://KEY:SECRET@bucket/a` becomes `s3://bucket/a`. What is not an address stays as it is.
    """
    return _SECRET.sub(r"\1...", _USER.sub("", text))
