"""The output of a daemon: lines of its log, passed on, and how far its job has come."""

from __future__ import annotations

from collections.abc import Callable

from fusion_rt.core.errors import WireError
from fusion_rt.host.bootstrap import Phase, decode_line
from fusion_rt.runner.launch.printer import Printer
from fusion_rt.runner.launch.worker_output import Lines


class DaemonLogs:
    """The output of the daemon of one host.

    Args:
        host: its name.
        printer: passes lines of the log on.
        on_phase: is told how far the start of the job has come there.

    Attributes:
        last: the last line of its log.
    """

    def __init__(self, host: str, printer: Printer, on_phase: Callable[[str], None]) -> None:
        self._mark = f"[{host}]<fusiond>:".encode()
        self._printer = printer
        self._on_phase = on_phase
        self._log = Lines()
        self._reports = Lines()
        self.last = ""

    def feed(self, data: bytes) -> None:
        """Takes what it logged."""
        lines = self._log.feed(data)
        if lines:
            self.last = lines[-1].decode(errors="replace").strip()
            self._printer.write(2, b"".join(self._mark + line for line in lines))

    def feed_report(self, data: bytes) -> None:
        """Takes what it said to whoever started it."""
        for line in self._reports.feed(data):
            try:
                phase = decode_line(line, Phase).phase
            except WireError:  # somebody has printed something there
                self.feed(line)
            else:
                self._on_phase(phase)
