"""What a lab can do to packets and connections: drop in one direction or both, a link that goes, a reset."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.netlab import Netlab, NetlabError, preflight

UNAVAILABLE = preflight()
pytestmark = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]
TIMEOUT_S = 30.0
NOTHING_S = 0.4  # far more than a packet takes

# Every line on standard input is sent, and whatever comes is printed, as is how the connection ends.
TALK = """
import os, select, socket, sys
if sys.argv[1]:
    talk = socket.create_connection((sys.argv[1], 5001))
else:
    server = socket.create_server(("", 5001))
    print("listening", flush=True)
    talk, _ = server.accept()
print("connected", flush=True)
while True:
    for ready in select.select([talk, 0], [], [])[0]:
        try:
            if ready == 0:
                line = os.read(0, 100)
                if not line:
                    sys.exit()
                talk.sendall(line)
            elif not (line := talk.recv(100)):
                sys.exit()
            else:
                print(line.decode(), end="", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)
            sys.exit()
"""


class End:
    """One end of a connection, a process on a host; `peer` is where it connects to, "" to listen."""

    def __init__(self, lab: Netlab, host: int, peer: str) -> None:
        argv = [sys.executable, "-c", TALK, peer]
        self.process = lab.run(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    def hears(self, timeout: float = TIMEOUT_S) -> str:
        """The next line, or "" when there is none in time."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            return ""
        line: bytes = self.process.stdout.readline()
        return line.decode().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def lab() -> Iterator[Netlab]:
    with Netlab(hosts=3) as lab:
        yield lab


@pytest.fixture
def ends(lab: Netlab) -> Iterator[tuple[End, End]]:
    """The ends on hosts 0 and 1 of one connection."""
    server = End(lab, 1, "")
    assert server.hears() == "listening"
    client = End(lab, 0, lab.hosts[1].address)
    assert (client.hears(), server.hears()) == ("connected", "connected")
    yield client, server
    client.close()
    server.close()


def test_a_host_that_is_cut_off_hears_and_says_nothing_and_the_connection_lives_on(
    lab: Netlab, ends: tuple[End, End]
) -> None:
    client, server = ends
    with lab.cut_off(0):
        client.say("from 0")
        server.say("from 1")
        assert (client.hears(NOTHING_S), server.hears(NOTHING_S)) == ("", "")
    assert (client.hears(), server.hears()) == ("from 1", "from 0")


def test_packets_vanish_in_one_direction_only(lab: Netlab, ends: tuple[End, End]) -> None:
    client, server = ends
    with lab.dropping(0, 1):
        client.say("from 0")
        server.say("from 1")
        assert (client.hears(), server.hears(NOTHING_S)) == ("from 1", "")
    assert server.hears() == "from 0"
    with lab.dropping(0, 1, port=5002), lab.dropping(0, 2):  # none of this connection's
        client.say("still there")
        assert server.hears() == "still there"


def test_a_link_goes_down_and_comes_back(lab: Netlab, ends: tuple[End, End]) -> None:
    client, server = ends
    lab.set_link(1, up=False)
    client.say("x")
    assert server.hears(NOTHING_S) == ""
    lab.set_link(1, up=True)
    assert server.hears() == "x"


def test_connections_are_reset_at_both_ends(lab: Netlab, ends: tuple[End, End]) -> None:
    client, server = ends
    assert lab.reset(0, 1, port=5002) == 0
    assert lab.reset(0, 2) == 0
    assert lab.reset(0, 1, port=5001) == 1
    assert {client.hears(), server.hears()} <= {"ConnectionResetError", "ConnectionAbortedError"}


CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5003), 30)
except OSError as error:
    print(error.strerror)
"""


def refusal(lab: Netlab, host: int, peer: int) -> str:
    """Why a port of another host, at which nobody listens, cannot be reached."""
    argv = [sys.executable, "-c", CONNECT, lab.hosts[peer].address]
    return str(lab.run(host, argv, stdout=subprocess.PIPE, text=True).communicate()[0]).strip()


@pytest.mark.parametrize(
    ("reason", "error"), [("prohibit", "No route to host"), ("unreachable", "Network is unreachable")]
)
def test_a_router_rejects_packets_in_one_direction_and_the_connection_lives_on(
    lab: Netlab, ends: tuple[End, End], reason: str, error: str
) -> None:
    client, server = ends
    with lab.rejecting(0, 1, reason):
        assert refusal(lab, 0, 1) == error
        assert refusal(lab, 0, 2) == "Connection refused"  # by its own kernel
        client.say("from 0")
        server.say("from 1")
        assert (client.hears(), server.hears(NOTHING_S)) == ("from 1", "")
        with lab.rejecting(1, 0, reason):
            assert refusal(lab, 0, 1) == error
    assert server.hears() == "from 0"
    assert refusal(lab, 0, 1) == "Connection refused"


def test_a_host_that_does_not_exist_is_named(lab: Netlab) -> None:
    with pytest.raises(NetlabError, match="5 is not a host"), lab.cut_off(5):
        pass
