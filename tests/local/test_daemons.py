"""Finding and asking the daemons of this host: only this user's are believed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.local import packets
from fusion_rt.local.daemons import FoundDaemon, NoAnswer, ask, find


@pytest.fixture
def found(runtime_dir: Path) -> FoundDaemon:
    directory = runtime_dir / "mine.3"
    directory.mkdir(mode=0o700)
    return FoundDaemon("mine", 3, str(directory))


@pytest.fixture
def listener(found: FoundDaemon) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(found.socket_path)
        sock.listen()
        sock.settimeout(10)
        yield sock


def test_daemons_are_found_by_job_and_node(runtime_dir: Path) -> None:
    for name in ("b.0", "a.10", "a.9", "a.x", "a.²", "nothing", "a-b.0"):
        (runtime_dir / name).mkdir()
    root = str(runtime_dir)
    assert [(each.job, each.node) for each in find(root)] == [("a", 9), ("a", 10), ("a-b", 0), ("b", 0)]
    assert [each.node for each in find(root, "a")] == [9, 10]
    assert [each.directory for each in find(root, "a", 10)] == [str(runtime_dir / "a.10")]
    assert list(find(str(runtime_dir / "nowhere"))) == []


def test_a_daemon_answers_and_its_process_is_known(found: FoundDaemon, listener: socket.socket) -> None:
    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            assert wire.decode_worker_message(packets.receive(sock)[0]) == wire.HangRequest(True)
            packets.Packet(wire.encode(wire.Status('{"state": "running"}'))).send(sock)

    thread = threading.Thread(target=answer)
    thread.start()
    assert ask(found, wire.HangRequest(True), 10) == (os.getpid(), {"state": "running"})
    thread.join()


def test_a_daemon_that_hangs_is_still_known_by_its_process(found: FoundDaemon, listener: socket.socket) -> None:
    with pytest.raises(NoAnswer, match=r"does not answer within 0\.05 s") as raised:
        ask(found, wire.StatusRequest(), 0.05)
    assert raised.value.pid == os.getpid()


def test_a_daemon_that_is_dead_has_no_process(found: FoundDaemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(found.socket_path)
    with pytest.raises(NoAnswer, match="it does not answer: Connection refused") as raised:
        ask(found, wire.StatusRequest(), 10)
    assert raised.value.pid == 0


def test_a_daemon_that_hangs_up_has_not_answered(found: FoundDaemon, listener: socket.socket) -> None:
    thread = threading.Thread(target=lambda: listener.accept()[0].close())
    thread.start()
    with pytest.raises(FusionError):
        ask(found, wire.StatusRequest(), 10)
    thread.join()


def test_a_directory_that_others_may_enter_is_not_trusted(found: FoundDaemon, listener: socket.socket) -> None:
    os.chmod(found.directory, 0o755)
    with pytest.raises(FusionError, match="is not a directory that only user"):
        ask(found, wire.StatusRequest(), 10)


def test_another_users_daemon_is_not_asked(
    found: FoundDaemon, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packets, "peer_credentials", lambda sock: (1, os.getuid() + 1, 1))
    with pytest.raises(FusionError, match=r"user \d+ listens at .*, and not a daemon of user \d+"):
        ask(found, wire.StatusRequest(), 10)


def test_nonsense_is_an_error(found: FoundDaemon, listener: socket.socket) -> None:
    def answer() -> None:
        for data in (b"nonsense", wire.encode(wire.JobFailed("x"))):
            sock, _ = listener.accept()
            with sock:
                packets.receive(sock)
                sock.send(data)

    thread = threading.Thread(target=answer)
    thread.start()
    for why in ("not a message of this protocol", "answered with JobFailed"):
        with pytest.raises(FusionError, match=why):
            ask(found, wire.StatusRequest(), 10)
    thread.join()
