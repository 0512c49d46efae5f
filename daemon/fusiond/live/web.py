"""Read-only pages on this host's loopback address, made anew for each request that has a token."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import parse_qs, quote

from fusion_rt.core.errors import FusionError
from fusion_rt.host import http_server
from fusion_rt.host.http_server import HttpRequest, response

LOOPBACK = "127.0.0.1"
_REQUEST = 5.0  # seconds for a request and its answer
_NAMES = frozenset({LOOPBACK, "localhost"})
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
}


class Page(NamedTuple):
    """A page that is served at a path; `make` is called on the server's thread, and may raise `FusionError`."""

    content_type: str
    make: Callable[[], bytes]


class WebServer:
    """Serves pages to requests with the token, until it is closed.

    The token is in the address, as `?token=...`, or in a header `Authorization: Bearer ...`: every user of a host
    reaches its loopback address.

    Args:
        port: on the loopback address; 0: any.
        pages: by path.
        token: empty: a random one.

    Raises:
        FusionError: the port cannot be used.
    """

    def __init__(self, port: int, pages: Mapping[str, Page], token: str = "") -> None:
        try:
            listener = socket.create_server((LOOPBACK, port))
        except OSError as error:
            raise FusionError(
                f"port {port} of {LOOPBACK} is not available: {os.strerror(error.errno or 0)}; name another one"
            ) from None
        self.url = "http://{}:{}".format(*listener.getsockname())
        self._pages = pages
        self._token = token or secrets.token_urlsafe(24)
        self._server = http_server.Server(listener, self._answer, _REQUEST)

    def address(self, path: str) -> str:
        """Returns the address of a page with the token, for this user only."""
        return f"{self.url}{path}?token={quote(self._token, safe='')}"

    def close(self) -> None:
        """Ends the server, whatever clients do."""
        self._server.close()

    def _answer(self, request: HttpRequest) -> bytes:
        # Against DNS rebinding: a web page whose host name resolves to this address could read ours.
        if request.headers.get("host", "").partition(":")[0] not in _NAMES:
            return _text("403 Forbidden", "this server is for this host only")
        path, _, query = request.target.partition("?")
        if not self._is_known(query, request.headers.get("authorization", "")):
            return _text("401 Unauthorized", "the address needs the token that was printed with it (?token=...), or a "
                         "header Authorization: Bearer", {"WWW-Authenticate": "Bearer"})  # fmt: skip
        if request.method != "GET":
            return _text("501 Not Implemented", "there is nothing but GET here")
        page = self._pages.get(path)
        if page is None:
            return _text("404 Not Found", "there is no such page")
        try:
            body = page.make()
        except FusionError as error:
            return _text("503 Service Unavailable", str(error))
        return response("200 OK", body, {"Content-Type": page.content_type, **_HEADERS})

    def _is_known(self, query: str, authorization: str) -> bool:
        scheme, _, bearer = authorization.partition(" ")
        shown = [*parse_qs(query).get("token", []), bearer.strip() if scheme.lower() == "bearer" else ""]
        return any(hmac.compare_digest(each.encode(), self._token.encode()) for each in shown)


def _text(status: str, text: str, headers: Mapping[str, str] | None = None) -> bytes:
    fields = {"Content-Type": "text/plain; charset=utf-8", **_HEADERS, **(headers or {})}
    return response(status, f"{text}\n".encode(), fields)
