"""The files of a daemon that ends: a log with something in it stays."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import DaemonConfig
from fusiond.host.log_writer import LogWriter
from fusiond.host.runtime_directory import Directory


class LateWriter(LogWriter):
    """Writes nothing before somebody waits for it."""

    def __init__(self, fd: int) -> None:
        self._awaited = threading.Event()
        super().__init__(fd)

    def flush(self) -> None:
        self._awaited.set()
        super().flush()

    def _write(self, line: bytes) -> bool:
        self._awaited.wait()
        return super()._write(line)


@pytest.mark.parametrize("said", ["", "rank 1 died"])
def test_a_log_stays_if_something_is_logged_as_the_daemon_ends(tmp_path: Path, said: str) -> None:
    directory = Directory(str(tmp_path), DaemonConfig("job", 0, Topology(("a",), ((0,),))))
    (lock,) = tmp_path.glob("*/lock")
    log = lock.with_name("log")
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = LateWriter(fd)
    logging.getLogger().addHandler(writer)
    try:
        if said:
            logging.getLogger("fusiond").error("%s", said)
        directory.release()
    finally:
        logging.getLogger().removeHandler(writer)
    os.close(fd)
    assert [path.read_text() for path in tmp_path.glob("*/log")] == ([f"{said}\n"] if said else [])
