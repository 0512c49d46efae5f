"""Real sockets of a daemon, and strangers at them that say something and then sit there."""

from __future__ import annotations

import itertools
import selectors
import socket
import struct
import time
from contextlib import ExitStack, suppress

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from fusion_rt.host.bootstrap import Endpoint
from fusion_rt.settings import Settings
from fusiond.host.loop import EventLoop
from fusiond.transport import sockets
from fusiond.transport.reception import Inbox, Tokens, descriptor_of
from fusiond.transport.zap import KeyGate

TIMEOUT_S = 60.0


def greeting(mechanism: bytes, minor: int = 0) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03" + bytes([minor]) + mechanism.ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes = b"") -> bytes:
    said = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(said)]) + said


PLAIN = greeting(b"PLAIN")
HELLO = command(b"HELLO", b"\x01f\x10" + bytes(16))  # with a token that is nobody's
READY = command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER")
STRANGERS = {
    "nothing": b"",
    "a part of a greeting": PLAIN[:11],
    "PLAIN": PLAIN,
    "PLAIN with an unknown token": PLAIN + HELLO,
    "ZMTP 3.1": greeting(b"PLAIN", 1) + HELLO,
    "PLAIN, which insists": PLAIN + HELLO + HELLO,
    "PLAIN, which begins with a heartbeat": PLAIN + command(b"PING", b"\0\0"),
    "NULL": greeting(b"NULL"),
    "NULL, which is ready": greeting(b"NULL") + READY,
    "CURVE": greeting(b"CURVE"),
    "ZMTP 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
    "ZMTP 1": b"\x01\x00\x05\x00abcd",
    "a byte of ZMTP 1": b"\x01",
}


@pytest.mark.parametrize("encryption", ["control", "all"])
def test_no_stranger_keeps_its_connection(encryption: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKE", 200)  # ms
    made = sockets.Sockets(Settings(encryption=encryption), "127.0.0.1", 2)
    gate = KeyGate(made.context)
    inboxes = [made.control_inbox(), made.payload_inbox(1 << 20)]
    deadline = time.monotonic() + TIMEOUT_S
    with ExitStack() as stack:
        stack.callback(made.context.destroy, linger=0)
        selector = stack.enter_context(selectors.DefaultSelector())
        for (_, port), (what, said) in itertools.product(inboxes, STRANGERS.items()):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            selector.register(stranger, selectors.EVENT_READ, (port, what))
            stranger.sendall(said)
        while selector.get_map():
            assert time.monotonic() < deadline, [key.data for key in selector.get_map().values()]
            gate.answer()
            for key, _ in selector.select(0.01):
                assert isinstance(key.fileobj, socket.socket)
                if not said_by(key.fileobj):
                    selector.unregister(key.fileobj)
    assert gate.admitted == 0


def test_nobody_is_admitted_while_nobody_asks_for_keys() -> None:
    """A peer's attempt, which knows the server's key, at a daemon whose ZAP handler is missing."""
    server, client = (sockets.Sockets(Settings(encryption="all"), "127.0.0.1", 2) for _ in range(2))
    try:
        _, port = server.control_inbox()
        endpoint = Endpoint(0, 1, "127.0.0.1", port, port, server.public.decode())
        outbox, monitor = client.outbox(endpoint)
        outbox.connect(f"tcp://127.0.0.1:{port}")
        event = zmq.EVENT_CONNECTED
        while event in (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_DELAYED):
            assert monitor.poll(1000 * TIMEOUT_S)
            event = parse_monitor_message(monitor.recv_multipart())["event"]
        assert event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    finally:
        for each in (client, server):
            each.context.destroy(linger=0)


def test_of_many_connections_each_is_looked_at_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, looked = EventLoop(), list[int]()
    made = sockets.Sockets(Settings(), "127.0.0.1", 2)
    listener, _ = made.payload_inbox(1 << 20)
    inbox = Inbox(loop, listener, made.monitor(listener), made.accepted(listener), lambda *it: None)
    monkeypatch.setattr(inbox, "_peers", {descriptor: ("10.0.0.1", 1000 + descriptor) for descriptor in range(200)})
    monkeypatch.setattr(inbox._accepted_sockets, "arrived", lambda descriptor, address: looked.append(descriptor) or 0)
    counts = []
    for _ in range(8):
        inbox.look(1 << 20)
        counts.append(len(looked))
    assert counts == [64, 128, 192, 200, 264, 328, 392, 400]
    assert looked == [*range(200)] * 2
    inbox.close()
    loop.close()
    made.context.destroy(linger=0)


def test_who_takes_a_connection_over_cannot_fill_memory_with_a_message_without_an_end() -> None:
    """A token is read on its way, and used first. Nothing that comes with it is a peer's, but libzmq keeps it."""
    most, loop = 4 << 20, EventLoop()
    made, tokens = sockets.Sockets(Settings(encryption="all"), "127.0.0.1", 2), Tokens()
    gate = KeyGate(made.context, tokens.id_of_new)
    listener, port = made.payload_inbox(1 << 20)
    taken: list[bytes] = []
    inbox = Inbox(loop, listener, made.monitor(listener), made.accepted(listener), lambda *it: taken.append(it[0]))
    inbox.start()
    loop.add_reader(gate.socket.fileno(), gate.answer)
    loop.call_every(0.01, lambda: inbox.look(most))
    token = tokens.issue(1, 1).token
    ready = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + struct.pack(">I", 16) + token
    piece = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # a frame, with more to come
    left, sent, heard = command(b"INITIATE", ready), 0, b""
    deadline = time.monotonic() + TIMEOUT_S
    with socket.create_connection(("127.0.0.1", port)) as thief:
        thief.sendall(PLAIN + command(b"HELLO", b"\x01f\x10" + token))
        thief.setblocking(False)
        while True:
            assert time.monotonic() < deadline, sent
            with suppress(BlockingIOError):
                try:
                    if b"WELCOME" not in heard:
                        loop.turn()
                        heard += thief.recv(4096)
                        continue
                    count = thief.send(left)
                except ConnectionError:
                    break
                sent, left = sent + count, left[count:] or piece
            loop.turn()
    assert gate.admitted == 1
    assert sent > most
    assert taken == []
    inbox.close()
    loop.close()
    made.context.destroy(linger=0)


def test_a_connection_is_ended_also_before_the_monitor_has_told_of_it() -> None:
    """Else its sender would go on, and be answered by nothing: its token is refused from then on."""
    made, tokens, loop = sockets.Sockets(Settings(encryption="all"), "127.0.0.1", 2), Tokens(), EventLoop()
    gate = KeyGate(made.context, tokens.id_of_new)
    listener, port = made.payload_inbox(1 << 20)
    inbox = Inbox(loop, listener, made.monitor(listener), made.accepted(listener), lambda *_: None)
    token = tokens.issue(1, 1).token
    ready = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER\x08Identity" + struct.pack(">I", 16) + token
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as peer:
        peer.sendall(PLAIN + command(b"HELLO", b"\x01f\x10" + token))
        assert gate.socket.poll(1000 * TIMEOUT_S)
        gate.answer()
        heard = b""
        while b"WELCOME" not in heard:  # the daemon ends a connection that goes on before it was let in
            more = said_by(peer)
            assert more
            heard += more
        peer.sendall(command(b"INITIATE", ready) + b"\x00\x03abc")
        assert listener.poll(1000 * TIMEOUT_S)
        assert listener.recv() == token
        inbox.end(descriptor_of(listener.recv(copy=False)))
        while said_by(peer):
            pass
    inbox.close()
    loop.close()
    made.context.destroy(linger=0)


def said_by(sock: socket.socket) -> bytes:
    """What has come; nothing when the connection is over."""
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""
