"""Addresses of object stores: ``s3://bucket/prefix``. Needs no pydantic, so that options can be read without it."""

import re

from glm46.config.hub_address import is_hub_address

_ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/+(?P<rest>[^/].*)", re.DOTALL)
_WITHOUT_HOST = ("file", "local")
"""Schemes whose address has no name of a bucket or host, so that its path begins with a slash."""
_PAGES = ("http", "https", "ftp")
"""Schemes of addresses that cannot be written, or that show a password."""


def is_store_address(address: str) -> bool:
    """Return True if a text is an address of an object store. `Path` merges two slashes to one, so one slash is
    accepted too."""
    match = _ADDRESS.fullmatch(address)
    return match is not None and match["scheme"] not in _PAGES and not is_hub_address(address)


def store_url(address: str) -> str:
    """Return an address with all of its slashes, without slashes at its end.

    Raises:
        ValueError: it holds credentials, or a chain of schemes. The message has no part of the address.
    """
    match = _ADDRESS.fullmatch(address)
    assert match is not None, "is_store_address"
    rest = match["rest"].rstrip("/")
    host = rest.partition("/")[0]
    if ":" in host.partition("@")[0] and "@" in host:
        raise ValueError("holds a password; remove it, and set the variables of the provider")
    if "::" in address or not rest.isprintable() or {"?", "#", "*"} & {*rest} or ".." in rest.split("/"):
        raise ValueError("is not one prefix of a store; give an address such as s3://bucket/runs/name")
    return f"{match['scheme']}://{'/' if match['scheme'] in _WITHOUT_HOST else ''}{rest}"
