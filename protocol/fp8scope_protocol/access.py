"""Who may talk to a local service: token file, Host and Origin.

Loopback is not trusted by itself: login nodes are shared, and a web page can reach 127.0.0.1 through DNS
rebinding. So every request needs a known Host, a browser's request needs a known Origin, and every caller
needs the token that the first start wrote to a file only its user can read.

`Guard` is plain ASGI, so that the collector and the dashboard stand behind the same code and no route or
websocket of either can be forgotten.
"""

import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fp8scope_protocol.errors import Invalid

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "fp8scope_session"
_TOKEN_RULE = "a token is printable ASCII without spaces or line ends"
_FILE_RULE = f"holds no token; remove it, or name another file; {_TOKEN_RULE}"


def data_home() -> Path:
    """FP8SCOPE_HOME, else /var/lib/fp8scope for root, else the user's data folder."""
    if home := os.environ.get("FP8SCOPE_HOME"):
        return Path(home)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/fp8scope")  # root's home is closed to the unprivileged database server
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "fp8scope"


def token_path() -> Path:
    """FP8SCOPE_TOKEN_FILE, else `token` in the data home."""
    return Path(os.environ.get("FP8SCOPE_TOKEN_FILE") or data_home() / "token")


def read_token() -> str | None:
    """The local token: FP8SCOPE_TOKEN, else the token file's content, else None where there is no such file.

    `Invalid`, without the token, where one is set or kept and cannot be used, and where the file that
    FP8SCOPE_TOKEN_FILE names cannot be read.
    """
    if token := os.environ.get("FP8SCOPE_TOKEN"):
        return _usable("FP8SCOPE_TOKEN", "(hidden)", token.strip(), rule=f"is no token; {_TOKEN_RULE}")
    named = os.environ.get("FP8SCOPE_TOKEN_FILE")
    field, path = "FP8SCOPE_TOKEN_FILE" if named else "token file", token_path()
    try:
        return _usable(field, str(path), path.read_text(encoding="ascii").strip(), rule=_FILE_RULE)
    except FileNotFoundError:
        if named:
            raise Invalid(field, str(path), "there is no such file; it holds the local token") from None
        return None
    except OSError as error:
        raise Invalid(field, str(path), f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise Invalid(field, str(path), _FILE_RULE) from None


def ensure_token() -> str:
    """The local token; written to the token file (mode 0600) if there is none yet."""
    path = token_path()
    if os.environ.get("FP8SCOPE_TOKEN") or os.path.lexists(path):
        return _existing(path)
    token = "f8s_" + secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=".token-")  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(token + "\n")
            os.link(draft, path)  # whole or not at all, and never over another process's
        finally:
            os.unlink(draft)
        return token
    except FileExistsError:
        return _existing(path)
    except OSError as error:
        raise Invalid("token file", str(path), f"cannot be written ({error.strerror}); set FP8SCOPE_HOME to "
                      "a folder that this user may write") from None


def _existing(path: Path) -> str:
    token = read_token()
    if token is None:
        raise Invalid("token file", str(path), "cannot be read; remove it")
    return token


def _usable(field: str, shown: str, token: str, *, rule: str) -> str:
    """`token` if a header can carry it; what is wrong is said without it."""
    if not token or not all("!" <= character <= "~" for character in token):
        raise Invalid(field, shown, rule)
    return token


def bearer(headers: dict[bytes, bytes]) -> str | None:
    """The token of an `Authorization: Bearer` header, else of the session cookie, else None."""
    kind, _, value = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if kind.lower() == "bearer" and value:
        return value.strip()
    try:
        cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
    except CookieError:
        return None
    return cookie.value if cookie else None


def host_name(host: str) -> str:
    """The name in a Host header, without its port and in lower case; empty where it has none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:  # half an IPv6 address
        return ""


def _place(origin: str) -> str:
    """The host and port in an Origin header; empty where it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


class Guard:
    """ASGI layer over a whole app: known Host, known Origin, valid token, or 4xx.

    `open_paths` need no token (health checks, the login page) but still a known Host and Origin.
    """

    def __init__(
        self, app: App, *, token: str, hosts: Collection[str] = ("127.0.0.1", "localhost", "::1"),
        open_paths: Collection[str] = ("/healthz",),
    ) -> None:
        self.app = app
        self.token = token
        self.hosts = frozenset(hosts)
        self.open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = self.refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the connect message; closing before accepting answers 403
            await send({"type": "websocket.close", "code": 4403, "reason": refusal[1]})
        else:
            await _answer(send, *refusal)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, reason) when the request must be refused, else None."""
        headers = {key.lower(): value for key, value in scope["headers"]}
        host = host_name(headers.get(b"host", b"").decode("latin-1"))
        if host not in self.hosts:
            return 421, f"unknown Host {host!r}; accepted: {', '.join(sorted(self.hosts))}"
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and _place(origin) != headers.get(b"host", b"").decode("latin-1"):
            return 403, f"foreign Origin {origin!r}"
        if scope["path"] in self.open_paths:
            return None
        given = bearer(headers)
        if given is None or not hmac.compare_digest(given.encode(), self.token.encode()):
            return 401, "a token is needed: Authorization: Bearer TOKEN, as in the file " + str(token_path())
        return None


async def _answer(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"title": reason, "status": status}).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


