"""Jobs without a launcher: their daemon starts with the first worker and ends with the last."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusion_rt.client import Client
from fusion_rt.errors import FusionError, HorovodInternalError
from fusion_rt.launchers import autostart
from fusion_rt.launchers.environment import Environment, detect
from fusion_rt.launchers.rendezvous import open_store
from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusion_rt.wire import Signature
from tests.launchers.conftest import logs

ALONE = Topology(("here",), ((0,),))
MEETING = {  # two nodes, whose workers are started by hand as srun's
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "one,two",
    "MASTER_ADDR": "127.0.0.1",
}


@pytest.mark.multiprocess
def test_a_daemon_serves_one_worker_and_ends_with_it(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runtime_dir)
    monkeypatch.setenv("FUSION_RUNTIME_DIR", "relative")  # the daemon runs in another directory
    where, settings = detect({}), Settings.from_env()
    daemon = autostart.start(where, ALONE, settings)
    path = autostart.path_of_socket(where, settings)
    assert path.startswith(str(runtime_dir))
    assert os.getsid(daemon.pid) == daemon.pid, "Ctrl-C would end it before its workers"
    client = Client(path, where.job, 0, settings.start_timeout)
    answer = client.wait(client.submit("x", Signature("allreduce", "uint8", (3,)), inline=b"\1\2\3"))
    assert answer.inline == b"\1\2\3"
    assert not daemon.wait(0)
    client.close()
    assert daemon.wait(60)
    assert not os.path.exists(os.path.dirname(path)), "an empty log was left"


@pytest.mark.multiprocess
def test_why_a_daemon_does_not_start_is_said(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, settings = detect({}), Settings.from_env()
    os.chmod(runtime_dir, 0o755)
    with pytest.raises(FusionError, match="not a directory that only user"):
        autostart.start(where, ALONE, settings)
    os.chmod(runtime_dir, 0o700)
    monkeypatch.setenv("FUSION_WINDOW_BYTES", "nonsense")
    with pytest.raises(FusionError, match="the daemon did not start: FUSION_WINDOW_BYTES: 'nonsense' is not"):
        autostart.start(where, ALONE, settings)
    monkeypatch.delenv("FUSION_WINDOW_BYTES")
    monkeypatch.setattr(autostart, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no such luck')"))
    with pytest.raises(FusionError, match=r"(?s)ended with status 1\. Its log .*no such luck"):
        autostart.start(where, ALONE, settings)
    monkeypatch.setattr(autostart, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "0.2")
    with pytest.raises(FusionError, match=r"did not come up within 0\.2 s"):
        autostart.start(where, ALONE, Settings.from_env())


@pytest.mark.multiprocess
def test_a_job_has_one_daemon(runtime_dir: Path) -> None:
    where, settings = detect({}), Settings.from_env()
    daemon = autostart.start(where, ALONE, settings)
    with pytest.raises(FusionError, match="runs on this host already"):
        autostart.start(where, ALONE, settings)
    Client(autostart.path_of_socket(where, settings), where.job, 0, settings.start_timeout).close()
    assert daemon.wait(60)


def workers(**environ: str) -> list[Environment]:
    """Both, of a job of its own; `environ` is added to the second one's variables."""
    job = {**MEETING, "SLURM_JOB_ID": secrets.token_hex(8)}
    return [
        detect({**job, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}),
        detect({**job, "SLURM_PROCID": "1", "SLURM_NODEID": "1", **environ}),
    ]


def join(where: Environment) -> tuple[Client, autostart.StartedDaemon | None]:
    return autostart.join(where, Settings.from_env(), open_store)


def add(client: Client) -> bytes | None:
    return client.wait(client.submit("x", Signature("allreduce", "uint8", (3,)), inline=b"\1\2\3")).inline


@pytest.mark.multiprocess
def test_the_daemons_of_two_nodes_find_each_other_and_stay_until_both_are_done(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in one process, as `shutdown` and `init` do; each time the other node leaves first."""
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "error")  # on a busy machine a daemon warns of slowness, and its log stays
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            (zero, daemon_zero), (one, daemon_one) = pool.map(join, workers())
            assert daemon_zero is not None
            assert daemon_one is not None
            assert list(pool.map(add, (zero, one))) == [b"\2\4\6"] * 2
            assert zero.topology == Topology((socket.gethostname(),) * 2, ((0,), (1,)))
            one.close()
            with pytest.raises(HorovodInternalError, match="rank 1"):
                add(zero)
            assert not daemon_one.wait(0), "the other node may need it"
            zero.close()
            assert daemon_zero.wait(60)
            assert daemon_one.wait(60)
            assert logs(runtime_dir) == {}


@pytest.mark.multiprocess
def test_a_daemon_that_does_not_start_is_known_on_all_nodes(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(join, where) for where in workers(HOROVOD_GLOO_IFACE="no0")]
        errors = [str(call.exception(60)) for call in calls]
    assert "node 1 (host" in errors[0]
    assert all("no network interface no0" in error for error in errors)
