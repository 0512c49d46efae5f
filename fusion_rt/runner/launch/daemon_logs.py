"""The log of a host's daemons, line by line."""

from __future__ import annotations

from fusion_rt.runner.launch.printer import Printer
from fusion_rt.runner.launch.worker_output import Lines


class DaemonLogs:
    """The log of the daemons of one host.

    Args:
        host: its name.
        printer: passes lines on.

    Attributes:
        last: the last line of the present daemon's.
    """

    def __init__(self, host: str, printer: Printer) -> None:
        self._mark = f"[{host}]<fusiond>:".encode()
        self._printer = printer
        self._lines = Lines()
        self.last = ""

    def begin(self) -> None:
        """Another daemon is started."""
        self._lines, self.last = Lines(), ""

    def feed(self, data: bytes) -> None:
        """Takes what a daemon logged."""
        lines = self._lines.feed(data)
        if lines:
            self.last = lines[-1].decode(errors="replace").strip()
            self._printer.write(2, b"".join(self._mark + line for line in lines))
