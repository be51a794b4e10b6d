"""Who comes in: the guard over every route and websocket, and the login page in front of it.

A browser cannot put a header on the first request, and a token in an address ends up in logs and
histories. So the start command prints /login#TOKEN: the fragment stays in the browser, the page's script
sends it in a header, and gets it back as a cookie that scripts cannot read.
"""

import hmac
from importlib.resources import files
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from fp8scope_protocol.access import COOKIE, App, Guard, Message, Receive, Scope, Send, bearer

OPEN_PATHS = ("/healthz", "/login", "/assets/login.js", "/assets/login.css", "/assets/icon.svg")
COOKIE_SECONDS = 30 * 24 * 3600


class Door:
    """`Guard`, except that a browser without a token is shown the login page instead of a bare 401.

    Every response also gets the headers that keep a page from being framed or fed foreign scripts.
    """

    def __init__(self, guard: Guard, *, policy: str) -> None:
        self.guard = guard
        self._headers = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
            (b"referrer-policy", b"no-referrer"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.guard(scope, receive, send)
            return

        async def send_hardened(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        answer: App = self.guard
        if _wants_page(scope) and (self.guard.refusal(scope) or (0, ""))[0] == 401:
            answer = RedirectResponse("/login?next=" + quote(_address(scope), safe="/"), status_code=303)
        await answer(scope, receive, send_hardened)


def add_login(server: FastAPI, token: str) -> None:
    """`GET /login` is the page, `POST /login` trades an Authorization header for the cookie."""
    page = (files("fp8scope_dashboard") / "login.html").read_text(encoding="utf-8")

    @server.get("/login", include_in_schema=False)
    async def show() -> Response:
        return HTMLResponse(page, headers={"cache-control": "no-store"})

    @server.post("/login", include_in_schema=False)
    async def enter(request: Request) -> Response:
        # The cookie does not count here: only who knows the token may (re)new it.
        given = bearer({b"authorization": request.headers.get("authorization", "").encode("latin-1")})
        if given is None or not hmac.compare_digest(given.encode(), token.encode()):
            return JSONResponse({"title": "This token is not the one of this dashboard.", "status": 401}, 401,
                                media_type="application/problem+json")
        reply = Response(status_code=204)
        reply.set_cookie(COOKIE, token, max_age=COOKIE_SECONDS, path="/", httponly=True, samesite="strict",
                         secure=request.url.scheme == "https")
        return reply


def _wants_page(scope: Scope) -> bool:
    accepted = dict(scope["headers"]).get(b"accept", b"")
    return scope["method"] == "GET" and b"text/html" in accepted


def _address(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return quote(scope["path"]) + ("?" + query if query else "")
