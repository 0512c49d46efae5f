"""Targets: the decoders of messages between processes."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from fusion_rt import run_function, wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import (
    DaemonConfig,
    Endpoint,
    PeerTable,
    Phase,
    Reform,
    StartError,
    decode_line,
    encode_line,
)
from fusion_rt.launchers import entries, kvstore
from fusion_rt.local import elastic
from fusion_rt.runner.protocol import agent_messages
from fusiond.transport import delivery, sealing
from tests.fuzz.engine import Target

TOPOLOGY = Topology(("a", "b"), ((0, 2), (1,)))
_ENDPOINT = Endpoint(1, 4711, "10.0.0.1", 40001, 40002, "0" * 40)
_CONFIG = DaemonConfig("job-1", 1, TOPOLOGY, "10.0.0.2")
_ARRIVAL = entries.Arrival(3, 1, "node", "host", "0123456789abcdef")
_REFUSAL = entries.Refusal("why", ("a",))
_INTRODUCTION = entries.Introduction(PeerTable((_ENDPOINT,)))
_ASSIGNMENT = entries.Assignment("job-1", TOPOLOGY, ("a", "b", "c"))
_EPOCH = agent_messages.Epoch(1, 1, TOPOLOGY, (0,))
_JOB = agent_messages.Job(
    "3.11", "0.1.0", "job-1", 1, (b"python", b"train.py"), ((b"PATH", b"/bin"),), b"/", ("eth0",), epoch=_EPOCH
)
_REFORM = Reform(2, Topology(("a", "b"), ((), (0,))), (0,), (_ENDPOINT,))
_MADE = {Topology: TOPOLOGY, Endpoint: _ENDPOINT, Reform: _REFORM}  # what not all values of the fields' types make
_SECRET, _NAME = b"secret", "scope/rank.1"
_REQUESTS = (
    b"GET /scope/rank.1 HTTP/1.0\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
    b"PUT /scope/rank.1 HTTP/1.0\r\nContent-Length: 5\r\n\r\n12345",
    b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\n123",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)
_HTTP_WORDS = (b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"99999999", b" HTTP/1.1", b"/..", b"DELETE", b":", b"GET ")
_TAGS = tuple(
    f'"type":"{tag}"'.encode() for tag in ("job", "epoch", "begin", "stop", "output", "refused", "error", "endpoint")
)


def examples(union: Any) -> list[msgspec.Struct]:
    """A message of each kind of a union, with something in each of its fields."""
    return [_example(msgspec.inspect.type_info(kind)) for kind in union.__args__]


def _examples_as_lines(union: Any) -> list[bytes]:
    return [encode_line(example) for example in examples(union)]


def _example(info: Any) -> Any:
    """A value of a type, as msgspec describes it."""
    match info:
        case msgspec.inspect.IntType():
            return info.ge if info.ge is not None else info.lt - 1 if info.lt is not None else 7
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.BytesType():
            return b"0123456789abcdef"
        case msgspec.inspect.LiteralType():
            return info.values[0]
        case msgspec.inspect.NoneType():
            return None
        case msgspec.inspect.UnionType():
            return _example(next(kind for kind in info.types if not isinstance(kind, msgspec.inspect.NoneType)))
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return [_example(info.item_type)] * min(2, info.max_length or 2)
        case msgspec.inspect.TupleType():
            return [_example(item) for item in info.item_types]
        case msgspec.inspect.DictType():
            return {_example(info.key_type): _example(info.value_type)}
        case msgspec.inspect.NamedTupleType():
            return info.cls(*(_example(field.type) for field in info.fields))
        case msgspec.inspect.StructType():
            made = _MADE.get(info.cls)
            return info.cls(**{f.name: _example(f.type) for f in info.fields}) if made is None else made
        case msgspec.inspect.Metadata():
            return _example(info.type)
    raise NotImplementedError(info)


def targets() -> list[Target]:
    """Decoders of the local channel, the mesh, the launcher, elastic jobs, a daemon's start, and the rendezvous."""
    return [
        _decoder("wire: worker to daemon", wire.decode_worker_message, map(wire.encode, examples(wire.WorkerMessage))),
        _decoder("wire: daemon to worker", wire.decode_daemon_message, map(wire.encode, examples(wire.DaemonMessage))),
        _decoder("wire: daemon to daemon", wire.decode_peer_message, map(wire.encode, examples(wire.PeerMessage))),
        _lines("start-up: configuration", DaemonConfig, _CONFIG),
        _lines("start-up: answer", Endpoint | StartError, _ENDPOINT, StartError("why")),
        _lines("start-up: peers", PeerTable, PeerTable((_ENDPOINT,))),
        _lines("start-up: phase", Phase, Phase("joined")),
        _lines("start-up: reform", Reform, _REFORM),
        _lines("launcher: versions", agent_messages.Versions, _JOB),
        _lines("launcher: job", agent_messages.Job, _JOB),
        _decoder(
            "launcher: commands", agent_messages.decode_command, _examples_as_lines(agent_messages.Command), words=_TAGS
        ),
        _decoder(
            "launcher: agents",
            agent_messages.decode_from_agent,
            _examples_as_lines(agent_messages.FromAgent),
            words=_TAGS,
        ),
        _lines("run: request", run_function.RunRequest, run_function.RunRequest(("-np", "2"), b"/", 3)),
        _lines("run: answer", run_function.RunAnswer, run_function.RunAnswer((1, 2), failed="why")),
        _decoder("elastic: workers", elastic.decode_from_worker, map(elastic.encode, examples(elastic.FromWorker))),
        _decoder("elastic: agents", _hear, map(elastic.encode, examples(elastic.FromAgent)), (FusionError,), cost=5),
        _sealed("rendezvous: arrival", entries.Arrival, _ARRIVAL),
        _sealed("rendezvous: assignment", entries.Assignment | entries.Refusal, _ASSIGNMENT, _REFUSAL),
        _sealed("rendezvous: introduction", entries.Introduction | StartError, _INTRODUCTION),
        Target("mesh: control head", [delivery.control_head(7, (1, 2, 3)) + b"x"], _split, (WireError,)),
        Target("mesh: sealed payload", _sealed_payloads(), _open, (WireError,)),
        Target("rendezvous: entries", [entries.seal(_SECRET, _NAME, _ARRIVAL)], _unseal, (WireError,)),
        Target("rendezvous: requests", _REQUESTS, _read_request, (WireError, OSError), words=_HTTP_WORDS, cost=5),
    ]  # fmt: skip


def _decoder(
    name: str,
    decode: Callable[[bytes], Any],
    seeds: Any,
    errors: tuple[type[Exception], ...] = (WireError,),
    words: tuple[bytes, ...] = (),
    cost: int = 1,
) -> Target:
    def run(data: bytes) -> bool:
        found = decode(data)
        if isinstance(found, msgspec.Struct):
            repr(found)  # as it would stand in an error
        return True

    return Target(name, list(seeds), run, errors, words=words, cost=cost)


def _lines(name: str, kind: Any, *seeds: msgspec.Struct) -> Target:
    return _decoder(name, lambda line: decode_line(line, kind), map(encode_line, seeds), words=_TAGS)


def _sealed(name: str, kind: Any, *seeds: msgspec.Struct) -> Target:
    """What a process that knows the secret may have put there; else the digest would refuse nearly all inputs."""

    def run(line: bytes) -> bool:
        value = entries.digest(_SECRET, _NAME.encode() + b"\0" + line) + b" " + line
        repr(entries.unseal(_SECRET, _NAME, value, kind))
        return True

    return Target(name, [encode_line(seed) for seed in seeds], run, (WireError,))


def _split(data: bytes) -> bool:
    serial, received, message = delivery.split_control(memoryview(data))
    assert delivery.control_head(serial, received) + bytes(message) == data
    return True


def _sealed_payloads() -> list[bytes]:
    """Two frames each, the length of the first before them."""
    found = []
    for encrypts, cipher in itertools.product((True, False), (sealing.AES, sealing.CHACHA)):
        head, payload = sealing.Sealer(bytes(32), encrypts, cipher).seal(0, b"message", b"payload")
        found.append(bytes([encrypts, len(head)]) + head + payload)
    return found


def _open(data: bytes) -> bool:
    if len(data) < 2:
        return False
    middle = 2 + data[1]
    sealing.Opener(bytes(32), bool(data[0])).open(memoryview(data[2:middle]), memoryview(data[middle:]))
    return True


def _unseal(value: bytes) -> bool:
    entries.unseal(_SECRET, _NAME, value, entries.Arrival)
    return True


def _hear(data: bytes) -> None:
    """What a worker of an elastic job makes of a packet of its agent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        connection = elastic.AgentConnection.__new__(elastic.AgentConnection)
        connection._socket, connection.epoch = ours, 0
        theirs.send(data[: elastic.MAX_PACKET])
        connection.changes()


def _read_request(data: bytes) -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # longer than what is read at once
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        start, body = kvstore.read_message(ours, time.monotonic() + 5)
    assert len(body) <= kvstore.MAX_VALUE
    return bool(start)
