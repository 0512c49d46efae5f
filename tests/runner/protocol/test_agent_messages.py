"""What comes from an agent is checked before it is believed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import Abandon, Endpoint, EpochOver, PeerTable, Reform, decode_line, encode_line
from fusion_rt.runner.protocol import agent_messages
from tests.for_each import for_each

ENDPOINT = Endpoint(0, 1, "127.0.0.1", 1, 2, "k" * 40)
EPOCH = agent_messages.Epoch(2, 0, Topology(("a", "b"), ((0, 1), ())), (0, 3))
REFORM = Reform(2, EPOCH.topology, (1,), (ENDPOINT,))
FROM_AGENT = [
    agent_messages.HostReady(),
    agent_messages.Refused(("no disk", "no \u2713")),
    agent_messages.DaemonUp(ENDPOINT, 1),
    agent_messages.DaemonDown(2, -9),
    agent_messages.WorkersUp(),
    agent_messages.Present(),
    agent_messages.InReach(2),
    agent_messages.Reached(2, "started"),
    EpochOver(2, (1,), "host b is silent"),
    agent_messages.Output(1, 3, "stderr", b"\xff\0\r\n"),
    agent_messages.DaemonLog(b"x"),
    agent_messages.Exited(0, -11),
    agent_messages.Asked(1, 2, "rank 3 is gone"),
    agent_messages.Asked(1, 2, "four are asked for", is_unfit=True),
    agent_messages.Exited(1, -9, unused=True),
    agent_messages.Stopped(),
]
COMMANDS = [
    agent_messages.SignOfLife(),
    agent_messages.Stop(5.0),
    agent_messages.Hail(),
    agent_messages.CheckDaemon(2),
    agent_messages.Introduce(PeerTable((ENDPOINT,))),
    agent_messages.StartDaemon(1, 3, ("a", "b")),
    agent_messages.Reach(2, (ENDPOINT,)),
    agent_messages.Begin(REFORM, EPOCH, (3,)),
    agent_messages.Recruit(3, EPOCH),
    Abandon(2, "why"),
    agent_messages.Remove((0, 1), "no room"),
    agent_messages.Release("no room"),
    agent_messages.Kill((0,)),
    agent_messages.Changed(1.5, True, False),
]


@for_each("message", FROM_AGENT)
def test_a_message_of_an_agent_survives_its_line(message: agent_messages.FromAgent) -> None:
    line = encode_line(message)
    assert line.startswith(agent_messages.LINE_START)
    assert line.count(b"\n") == 1
    assert agent_messages.decode_from_agent(line) == message


@for_each("message", COMMANDS)
def test_a_command_survives_its_line(message: agent_messages.Command) -> None:
    assert agent_messages.decode_command(encode_line(message)) == message


def test_a_job_carries_bytes_that_are_no_text() -> None:
    job = agent_messages.Job("3", "0", "j", 1, (b"\xff",), ((b"\xfe", b"\0"),), b"/\xfd")
    assert decode_line(encode_line(job), agent_messages.Job) == job


def test_another_versions_job_still_tells_its_version() -> None:
    line = b'{"type":"job","python":"4.0","package":"9.9","something":["new"]}\n'
    assert decode_line(line, agent_messages.Versions) == agent_messages.Versions("4.0", "9.9")


def test_a_full_piece_of_output_fits_into_a_line() -> None:
    line = encode_line(agent_messages.Output(4095, 65535, "stdout", b"\xff" * agent_messages.OUTPUT_CHUNK))
    assert len(line) < agent_messages.MAX_AGENT_LINE


@for_each(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"type":"nonsense"}',
        b'{"type":"exited","slot":"0","status":0}',
        b'{"type":"exited","slot":0}',
        b'{"type":"output","slot":0,"rank":0,"stream":"stdin","data":""}',
        b'{"type":"output","slot":0,"rank":0,"stream":"stdout","data":"?"}',
        b'{"type":"daemon_up","endpoint":{"type":"endpoint","node":0,"pid":1,"address":"a","control_port":70000,'
        b'"payload_port":0,"public_key":""}}',
        b'{"type":"stop","grace":1.0}',
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(WireError, match="is not a message of an agent"):
        agent_messages.decode_from_agent(line)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(line: bytes) -> None:
    for decode in (agent_messages.decode_from_agent, agent_messages.decode_command):
        try:
            message = decode(line)
        except WireError:
            continue
        assert isinstance(message, msgspec.Struct)
