"""The page that `fusiond dashboard` serves, which asks for the rates every now and then, and draws them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from fusion_rt.core.errors import FusionError
from fusiond.live.client import Lookout
from fusiond.live.rates import Rates
from fusiond.live.web import Page, WebServer


def serve(lookout: Lookout, port: int, interval: float) -> WebServer:
    """Serves the page on the loopback address until it is closed.

    Args:
        lookout: asks for the rates.
        port: 0: any.
        interval: seconds between two looks at the jobs, which are taken only while a page is open somewhere.

    Raises:
        FusionError: the port cannot be used.
    """
    page = files("fusiond.live").joinpath("dashboard.html").read_bytes()
    latest = Latest(lookout.look, interval)
    latest.take()  # rates need two looks, and the first page shows them
    return WebServer(
        port,
        {
            "/": Page("text/html; charset=utf-8", lambda: page),
            "/rates.json": Page("application/json", lambda: json.dumps(latest.take()).encode()),
        },
    )


class Latest:
    """The latest rates, shared by all open pages: taken anew when they are asked for and old.

    Args:
        look: takes the rates.
        interval: seconds after which they are old.
        clock: returns seconds, from any origin.
    """

    def __init__(
        self, look: Callable[[], list[Rates]], interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look
        self._interval = interval
        self._clock = clock
        self._taken: dict[str, Any] = {}
        self._at = 0.0

    def take(self) -> dict[str, Any]:
        """Returns `jobs` (the rates of each), `serial` (of the look), `interval` and `trouble` (an error, or empty)."""
        now = self._clock()
        if not self._taken or now - self._at >= 0.9 * self._interval:  # a page asks once an interval, more or less
            self._at = now
            jobs: list[dict[str, Any]] = []
            trouble = ""
            try:
                jobs = [dataclasses.asdict(rates) for rates in self._look()]
            except FusionError as error:
                trouble = str(error)
            serial = self._taken.get("serial", 0) + 1
            self._taken = {"serial": serial, "interval": self._interval, "jobs": jobs, "trouble": trouble}
        return self._taken
