"""The collector's address, checked in one way wherever it is given: argument, option, environment.

An address is written to logs, so it must not hold a secret, and a message about one never shows what could
be one: what stands before an @, and what follows a ? or a #, where the link of the login page has the token.
"""

import ipaddress
import re
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fp8scope_protocol.errors import Invalid

RULE = "must be http(s)://HOST[:PORT][/PATH]"


def check_address(field: str, text: Any, *, also: str = "") -> str:
    """`text` if it is the address of a collector; else `Invalid`, whose rule ends in `also`."""
    if not isinstance(text, str) or not _is_address(text):
        raise Invalid(field, _shown(text), RULE + also)
    return text


def _is_address(text: str) -> bool:
    # urlsplit drops line ends and tabs by itself, and takes an empty user, query or fragment for none.
    if not text.isprintable() or re.search(r"[\s@?#\\]", text):
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and parts.port != 0 and _is_host(parts)
    except ValueError:  # half an IPv6 address, a port that is none
        return False


def _is_host(parts: SplitResult) -> bool:
    host = parts.hostname or ""
    if "[" in parts.netloc:
        return ipaddress.ip_address(host).version == 6
    labels = host.removesuffix(".").split(".")
    return len(host) <= 253 and all(re.fullmatch(r"[\w-]{1,63}", label) for label in labels)


def _shown(address: Any) -> Any:
    if not isinstance(address, str):
        return address
    before, at, after = address.rpartition("@")
    text = f"{before.partition('//')[0]}//...@{after}" if at else address
    return re.sub(r"([?#]).*", r"\1...", text, flags=re.DOTALL)
