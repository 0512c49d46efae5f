"""Jobs without a launcher: their daemon starts with the first worker and ends with the last."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fusion_rt import autostart
from fusion_rt.client import Client
from fusion_rt.environment import detect
from fusion_rt.errors import FusionError
from fusion_rt.settings import Settings
from fusion_rt.wire import Signature


@pytest.mark.multiprocess
def test_a_daemon_serves_one_worker_and_ends_with_it(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runtime_dir)
    monkeypatch.setenv("FUSION_RUNTIME_DIR", "relative")  # the daemon runs in another directory
    where, settings = detect({}), Settings.from_env()
    daemon = autostart.start(where, settings)
    path = autostart.path_of_socket(where, settings)
    assert path.startswith(str(runtime_dir))
    assert os.getsid(daemon.pid) == daemon.pid, "Ctrl-C would end it before its workers"
    client = Client(path, where.job, 0, settings.start_timeout)
    answer = client.wait(client.submit("x", Signature("allreduce", "uint8", (3,)), inline=b"\1\2\3"))
    assert answer.inline == b"\1\2\3"
    assert not daemon.wait(0)
    client.close()
    assert daemon.wait(10)
    assert not os.path.exists(os.path.dirname(path)), "an empty log was left"


@pytest.mark.multiprocess
def test_why_a_daemon_does_not_start_is_said(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, settings = detect({}), Settings.from_env()
    os.chmod(runtime_dir, 0o755)
    with pytest.raises(FusionError, match="not a directory that only user"):
        autostart.start(where, settings)
    os.chmod(runtime_dir, 0o700)
    monkeypatch.setenv("FUSION_WINDOW_BYTES", "nonsense")
    with pytest.raises(FusionError, match="the daemon did not start: FUSION_WINDOW_BYTES='nonsense'"):
        autostart.start(where, settings)
    monkeypatch.delenv("FUSION_WINDOW_BYTES")
    monkeypatch.setattr(autostart, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no such luck')"))
    with pytest.raises(FusionError, match=r"(?s)ended with status 1\. Its log .*no such luck"):
        autostart.start(where, settings)
    monkeypatch.setattr(autostart, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "0.2")
    with pytest.raises(FusionError, match=r"did not come up within 0\.2 s"):
        autostart.start(where, Settings.from_env())


@pytest.mark.multiprocess
def test_a_job_has_one_daemon(runtime_dir: Path) -> None:
    where, settings = detect({}), Settings.from_env()
    daemon = autostart.start(where, settings)
    with pytest.raises(FusionError, match="runs on this host already"):
        autostart.start(where, settings)
    Client(autostart.path_of_socket(where, settings), where.job, 0, settings.start_timeout).close()
    assert daemon.wait(10)
