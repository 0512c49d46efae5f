"""Who may connect: the answers to libzmq's questions, and real sockets with right and wrong keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from fusiond.transport.reception import Tokens
from fusiond.transport.zap import KeyGate

PUBLIC, SECRET = zmq.curve_keypair()
STRANGER, STRANGERS_SECRET = zmq.curve_keypair()
TIMEOUT_MS = 5000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def gate(context: zmq.Context[zmq.Socket[bytes]]) -> KeyGate:
    gate = KeyGate(context)
    gate.allow(PUBLIC.decode(), 3)
    return gate


def request(key: bytes, mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"1.0", b"7", b"fusion_rt", b"10.0.0.1", b"", mechanism, key]


def test_a_key_of_the_job_is_admitted_as_its_node(gate: KeyGate) -> None:
    assert gate._reply(request(z85.decode(PUBLIC))) == [b"1.0", b"7", b"200", b"OK", b"3", b""]
    assert (gate.admitted, gate.refused) == (1, 0)


REFUSED = {
    "another key": request(z85.decode(STRANGER)),
    "no key": request(b""),
    "the key in its text form": request(PUBLIC),
    "another mechanism": request(z85.decode(PUBLIC), b"PLAIN"),
    "no mechanism": request(z85.decode(PUBLIC), b"NULL"),
    "a frame too few": request(b"")[:6],
    "a frame too many": [*request(z85.decode(PUBLIC)), b"x"],
    "one frame": [b"1.0"],
}


@pytest.mark.parametrize("frames", REFUSED.values(), ids=REFUSED.keys())
def test_everything_else_is_refused_and_counted(gate: KeyGate, frames: list[bytes]) -> None:
    reply = gate._reply(frames)
    assert reply == [b"1.0", b"7" if len(frames) > 1 else b"", b"400", b"this key is not one of the job's", b"", b""]
    assert (gate.admitted, gate.refused) == (0, 1)


def test_a_token_is_admitted_until_it_was_used(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    tokens = Tokens()
    gate = KeyGate(context, tokens.id_of_new)
    token = tokens.issue(5, 0).token

    def ask(password: bytes) -> list[bytes]:
        return gate._reply([*request(b"name", b"PLAIN"), password])

    assert ask(token) == [b"1.0", b"7", b"200", b"OK", b"5", b""]
    assert ask(bytes(16))[2] == ask(b"")[2] == b"400"
    assert tokens.holder(token, 17) is not None
    assert ask(token)[2] == b"400"
    tokens.issue(5, 0)
    assert ask(token)[2] == b"400"
    assert (gate.admitted, gate.refused) == (1, 4)
    gate.socket.close()


def connected(
    context: zmq.Context[zmq.Socket[bytes]], server: zmq.Socket[bytes], keys: tuple[bytes, bytes]
) -> zmq.Socket[bytes]:
    client = context.socket(zmq.DEALER)
    client.linger = 0
    client.curve_serverkey = PUBLIC
    client.curve_publickey, client.curve_secretkey = keys
    client.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
    client.send(b"hello")
    return client


@pytest.fixture
def server(context: zmq.Context[zmq.Socket[bytes]], gate: KeyGate) -> zmq.Socket[bytes]:
    server = context.socket(zmq.ROUTER)
    server.curve_server = 1
    server.curve_secretkey = SECRET
    server.zap_domain = b"fusion_rt"
    server.bind("tcp://127.0.0.1:*")
    return server


def test_libzmq_lets_a_known_key_in_and_says_whose_it_is(
    context: zmq.Context[zmq.Socket[bytes]], gate: KeyGate, server: zmq.Socket[bytes]
) -> None:
    client = connected(context, server, (PUBLIC, SECRET))
    assert gate.socket.poll(TIMEOUT_MS)
    gate.answer()
    assert server.poll(TIMEOUT_MS)
    _, frame = server.recv_multipart(copy=False)
    assert frame.bytes == b"hello"
    assert frame.get("User-Id") == "3"
    client.close()


def test_libzmq_keeps_a_stranger_out_who_knows_the_servers_key(
    context: zmq.Context[zmq.Socket[bytes]], gate: KeyGate, server: zmq.Socket[bytes]
) -> None:
    stranger = connected(context, server, (STRANGER, STRANGERS_SECRET))
    assert gate.socket.poll(TIMEOUT_MS)
    gate.answer()
    client = connected(context, server, (PUBLIC, SECRET))
    assert gate.socket.poll(TIMEOUT_MS)
    gate.answer()
    assert server.poll(TIMEOUT_MS)
    assert server.recv_multipart(copy=False)[1].get("User-Id") == "3"
    assert not server.poll(0)
    assert gate.refused >= 1
    stranger.close()
    client.close()
