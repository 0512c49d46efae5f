"""A small HTTP server for this host only: a few read-only pages, made anew for each request."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from threading import Thread
from typing import NamedTuple

from fusion_rt.errors import FusionError

LOOPBACK = "127.0.0.1"
_REQUEST = 5.0  # seconds for a client to say what it wants, and to take it
_NAMES = frozenset({LOOPBACK, "localhost"})
_log = logging.getLogger("fusiond")


class Page(NamedTuple):
    """What is served at a path; `make` is called on the server's thread, and may raise `FusionError`."""

    content_type: str
    make: Callable[[], bytes]


class WebServer:
    """Serves pages until it is closed, one request at a time, on a thread.

    Args:
        port: on the loopback address; 0: any.
        pages: by path.

    Raises:
        FusionError: the port cannot be had.
    """

    def __init__(self, port: int, pages: Mapping[str, Page]) -> None:
        try:
            self._server = _Server(port, pages)
        except OSError as error:
            raise FusionError(f"port {port} of {LOOPBACK} cannot be had: {error.strerror}; name another one") from None
        self._address = self._server.server_address
        self.url = "http://{}:{}".format(*self._address)
        self._closing = False
        self._thread = Thread(target=self._serve, name="web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._closing = True
        socket.create_connection(self._address).close()  # wakes the thread, which waits for nothing else
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._closing:  # not `serve_forever`, which wakes up every now and then
            self._server.handle_request()


class _Server(TCPServer):  # not HTTPServer, which asks the name service for the name of this host
    allow_reuse_address = True
    server_address: tuple[str, int]

    def __init__(self, port: int, pages: Mapping[str, Page]) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.pages = pages

    def handle_error(self, request: object, client_address: object) -> None:
        if isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            _log.debug("web: whoever asked is gone", exc_info=True)
        else:
            _log.exception("web: a page failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST
    server_version = "fusiond"
    sys_version = ""

    def do_GET(self) -> None:
        # A page of a stranger's name that resolves to this address would be allowed to read ours.
        if self.headers.get("Host", "").partition(":")[0] not in _NAMES:
            self.send_error(HTTPStatus.FORBIDDEN, "this server is for this host only")
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = page.make()
        except FusionError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", f"{error}\n".encode())
        else:
            self._answer(HTTPStatus.OK, page.content_type, body)

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header(
            "Content-Security-Policy", "default-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
        )
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        _log.debug("web: " + format, *arguments)
