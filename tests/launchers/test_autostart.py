"""Jobs without a launcher: their daemon starts with the first worker and ends with the last."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_place
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from fusion_rt.client import Client
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.core.topology import Topology
from fusion_rt.host import daemon_start
from fusion_rt.host.bootstrap import Endpoint, PeerTable
from fusion_rt.launchers import autostart, rendezvous
from fusion_rt.launchers.entries import Introduction, seal
from fusion_rt.launchers.environment import Environment, detect
from fusion_rt.launchers.kvstore import Store
from fusion_rt.launchers.meeting import Meeting
from fusion_rt.launchers.rendezvous import Rendezvous, open_store
from fusion_rt.settings import Settings
from fusion_rt.wire import Signature
from fusiond.host.runtime_directory import listen
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
    monkeypatch.setenv("FUSION_TRACE_DIR", "records")
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
    assert os.listdir(runtime_dir / "records" / where.job) == ["node-0.ring"]


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
    monkeypatch.setattr(daemon_start, "DAEMON_COMMAND", (sys.executable, "-c", "import sys; sys.exit('no such luck')"))
    with pytest.raises(FusionError, match=r"(?s)ended with status 1\. Its log .*no such luck"):
        autostart.start(where, ALONE, settings)
    monkeypatch.setattr(daemon_start, "DAEMON_COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "0.2")
    with pytest.raises(FusionError, match=r"did not come up within 0\.2 s"):
        autostart.start(where, ALONE, Settings.from_env())


@pytest.mark.multiprocess
def test_why_a_daemon_does_not_start_is_said_if_it_has_ended_before_it_was_told_anything(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.setattr(daemon_start, "DAEMON_COMMAND", (sys.executable, "-c", "import sys; sys.exit('no such luck')"))
    with pytest.raises(FusionError, match=r"(?s)ended with status 1\. Its log .*no such luck"):
        autostart.start(detect({}), ALONE, Settings.from_env())


@pytest.mark.multiprocess
def test_a_job_has_one_daemon(runtime_dir: Path) -> None:
    where, settings = detect({}), Settings.from_env()
    daemon = autostart.start(where, ALONE, settings)
    with pytest.raises(FusionError, match="runs on this host already"):
        autostart.start(where, ALONE, settings)
    Client(autostart.path_of_socket(where, settings), where.job, 0, settings.start_timeout).close()
    assert daemon.wait(60)


@pytest.mark.multiprocess
def test_a_daemon_that_ends_with_the_last_job_of_the_name_is_not_taken_for_this_jobs(runtime_dir: Path) -> None:
    where, settings = detect({}), Settings.from_env()
    path = Path(autostart.path_of_socket(where, settings))
    path.parent.mkdir(mode=0o700)
    last = listen(str(path))
    last.setblocking(True)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(autostart.join, with_place(where, socket=str(path)), settings, open_store)
        sock, _ = last.accept()
        path.unlink()  # as a daemon does that ends in order
        daemon = autostart.start(where, ALONE, settings)
        sock.close()
        last.close()
        client, _ = joining.result()
    assert add(client) == b"\1\2\3"
    client.close()
    assert daemon.wait(60)


@pytest.mark.multiprocess
def test_a_daemon_waits_for_one_of_its_name_that_is_about_to_end(runtime_dir: Path) -> None:
    where, settings = detect({}), Settings.from_env()
    path = autostart.path_of_socket(where, settings)
    first = autostart.start(where, ALONE, settings)
    os.unlink(path)  # the first thing that it does when it ends
    end = threading.Timer(0.5, first.end)
    end.start()
    second = autostart.start(where, ALONE, settings)
    end.join()
    Client(path, where.job, 0, settings.start_timeout).close()
    assert second.wait(60)


def workers(**environ: str) -> list[Environment]:
    """Both, of a job of its own; `environ` is added to the second one's variables."""
    job = {**MEETING, "SLURM_JOB_ID": secrets.token_hex(8)}
    return [
        detect({**job, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}),
        detect({**job, "SLURM_PROCID": "1", "SLURM_NODEID": "1", **environ}),
    ]


@pytest.fixture(autouse=True)
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a secret, which the environment names."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    monkeypatch.setenv("FUSION_JOB_SECRET_FILE", str(path))
    return path


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


def not_opened(meeting: Meeting, rank: int, size: int) -> Store:
    raise AssertionError("a store was opened")


def test_several_hosts_without_a_secret_are_refused_with_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSION_JOB_SECRET_FILE")
    for where in workers():
        with pytest.raises(FusionError, match=r"share no secret.*openssl rand -hex 32 > ~/\.fusion_rt_secret.*"
                                              r"FUSION_JOB_SECRET_FILE=.*FUSION_INSECURE_RENDEZVOUS=1"):  # fmt: skip
            autostart.join(where, Settings.from_env(), not_opened)


def test_a_secret_that_others_can_read_is_refused(secret: Path) -> None:
    secret.chmod(0o644)
    with pytest.raises(FusionError, match="is not a file that only user"):
        autostart.join(workers()[0], Settings.from_env(), not_opened)


def test_the_secret_of_the_meeting_is_that_of_the_file(
    secret: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the launcher's own, and with the home directory of each host in its path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FUSION_JOB_SECRET_FILE", "~/secret")
    found: list[bytes] = []

    def note(meeting: Meeting, rank: int, size: int) -> Store:
        found.append(meeting.secret)
        raise FusionError("enough")

    with pytest.raises(FusionError, match="enough"):
        autostart.join(workers()[0], Settings.from_env(), note)
    assert found == [secret.read_bytes()]


FORGED = zmq.curve_keypair()[0].decode()


class LyingStore:
    """The store of a job of two nodes as one rank sees it: whoever serves it puts a key of his own in the place of the
    other node's."""

    where = "memory"
    hosts = ("127.0.0.1",)

    def __init__(self, rank: int, values: dict[str, bytes], truth: dict[int, Endpoint]) -> None:
        self._rank = rank
        self._values = values
        self._truth = truth
        self.lies = 0

    def get(self, key: str) -> bytes | None:
        other = 1 - self._rank
        if other not in self._truth or not re.search(r"\.(1|peers)$", key) or "confirmed" in key or "/rank." in key:
            return self._values.get(key)
        self.lies += 1
        forged = replace(self._truth[other], public_key=FORGED)
        if self._rank == 0:
            return seal(b"", key, forged) if key.endswith(".1") else self._values.get(key)
        return seal(b"", key, Introduction(PeerTable((forged, self._truth[1]))))

    def put(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def remove(self, key: str) -> None:
        self._values.pop(key, None)

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("insecure", [True, False])
@pytest.mark.filterwarnings("ignore:this job runs on several hosts")
def test_a_store_that_lies_is_believed_by_those_alone_who_asked_for_it(
    insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a daemon admits are the keys that it is told of: an attacker's key there is an attacker in the job."""
    truth = {node: Endpoint(node, 1, "127.0.0.1", 1, 2, zmq.curve_keypair()[0].decode()) for node in range(2)}
    told: dict[int, PeerTable] = {}

    class Daemon:
        """Listens, and is told of its peers."""

        def __init__(self, node: int) -> None:
            self.endpoint = truth[node]

        def introduce(self, peers: PeerTable) -> None:
            told[self.endpoint.node] = peers
            raise FusionError("enough")

        def end(self) -> None:
            """Nothing runs."""

    monkeypatch.setattr(autostart, "start", lambda where, *_: Daemon(where.node))
    if insecure:
        monkeypatch.delenv("FUSION_JOB_SECRET_FILE")
        monkeypatch.setenv("FUSION_INSECURE_RENDEZVOUS", "1")
    values: dict[str, bytes] = {}
    stores = [LyingStore(rank, values, truth) for rank in range(2)]

    def clock() -> float:  # the time is over when each rank has been lied to and has not believed it
        return time.monotonic() + 1000.0 * (not insecure and min(store.lies for store in stores) > 2)

    monkeypatch.setattr(autostart, "Rendezvous", partial(Rendezvous, clock=clock))
    monkeypatch.setattr(rendezvous, "_LAST_WORDS", 0.2)
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(autostart.join, where, Settings.from_env(), lambda _, rank, size: stores[rank])
            for where in workers()
        ]
        errors = [str(call.exception(60)) for call in calls]
    if insecure:
        assert errors == ["enough"] * 2
        assert {node: table.endpoints[1 - node].public_key for node, table in told.items()} == {0: FORGED, 1: FORGED}
    else:
        assert told == {}
        assert "the daemon of node 1 (host" in errors[0]
        assert all(store.lies for store in stores)
