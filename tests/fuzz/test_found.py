"""What the fuzzer and a hostile reading have found once: each test failed before it was mended."""

from __future__ import annotations

import array
import os
import socket
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fusion_rt import codecs, wire
from fusion_rt.codecs import CodecError, Layout, Span
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.core.errors import FusionError, SettingError, WireError
from fusion_rt.host.bootstrap import Endpoint, decode_line, encode_line
from fusion_rt.launchers.environment import hosts_of_list
from fusion_rt.local import array_codec, elastic, packets, stack_text
from fusion_rt.runner.command import config_file
from fusion_rt.runner.protocol import agent_messages
from fusion_rt.units import parse_seconds, parse_size
from fusiond.algorithms import shard_optimizer
from fusiond.buckets import codec_state


def test_an_empty_packet_with_a_descriptor_leaves_no_descriptor_behind() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        theirs.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
        with pytest.raises(WireError, match="a descriptor and no message"):
            packets.receive(ours)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("step", [-1, 2**48])
def test_a_saved_number_of_steps_that_cannot_be_is_refused(step: int) -> None:
    layout = Layout(DTYPES["float32"], 400, (Span("a", 0, 400, (20, 20)),))
    bucket = codec_state.open_bucket(codecs.parse("powersgd(rank=1, minimum=0)"), layout, 2)
    with pytest.raises(CodecError, match="steps, which cannot be"):
        codec_state.restore([bucket], {**codec_state.saved([bucket]), "0:step": np.array(step)})


@pytest.mark.parametrize("text", ["1e308GB", "9" * 400])
def test_a_size_beyond_all_numbers_is_no_size(text: str) -> None:
    with pytest.raises(SettingError, match="is not a size"):
        parse_size(text)
    with pytest.raises(SettingError, match="is not a duration"):
        parse_seconds("1e308h")


def test_a_hundred_thousand_digits_take_less_than_five_seconds_of_processor_time() -> None:
    began = time.thread_time()
    with pytest.raises(SettingError):
        parse_size("9" * 100_000 + "!")
    assert time.thread_time() - began < 5  # it took minutes: the square of the number of digits


@pytest.mark.parametrize("text", [b"[" * 20_000, b'{"type":"\xff"}', b'{"type":"stop","x":' + b"[" * 20_000])
def test_nesting_without_end_is_no_message_of_launchers_and_agents(text: bytes) -> None:
    for decode in (agent_messages.decode_command, agent_messages.decode_from_agent, elastic.decode_from_worker):
        with pytest.raises(WireError):
            decode(text)


@pytest.mark.parametrize("shape", [(0, 2**47, 2**47), (2**47, 2**47, 0)])
def test_an_empty_array_of_an_impossible_shape_is_a_wire_error(shape: tuple[int, ...]) -> None:
    header = msgspec.msgpack.encode([("a", "float32", shape)])
    data = np.frombuffer(len(header).to_bytes(8, "little") + header + bytes(64), np.uint8)
    with pytest.raises(WireError, match="cannot have the shape"):
        array_codec.read(data)


@pytest.mark.parametrize(
    "text", ["a[2999999999:1-3]", "a[\u00b2:1-3]", "a" * 300 + "[1-60000]", "[1]" * 300, "a[5-2]x"]
)
def test_lists_of_hosts_have_neither_endless_names_nor_empty_ranges(text: str) -> None:
    with pytest.raises(FusionError, match="is not a list of hosts"):
        hosts_of_list(text)


def read_yaml(text: str) -> object:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return config_file.read(file.name)


@pytest.mark.parametrize("text", ["a: !!int ''", "!!timestamp x: 1", "a: !!bool x", "a: !!float ''"])
def test_a_value_that_is_not_what_its_tag_says_is_a_setting_error(text: str) -> None:
    with pytest.raises(SettingError, match="not what its tag says"):
        read_yaml(text)


def test_mappings_that_merge_each_other_do_not_fill_the_memory() -> None:
    levels = (f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30))
    with pytest.raises(SettingError, match="more than 1000 keys are merged"):
        read_yaml("a0: &a0 {x: 1, y: 2}\n" + "".join(levels))
    assert read_yaml("params: {<<: {fusion_threshold_mb: 3}}")


def test_a_number_with_more_digits_than_python_writes_is_a_setting_error() -> None:
    number = "0x" + "f" * 5000
    with pytest.raises(SettingError, match="a number of so many digits"):
        read_yaml(f"params: {{fusion_threshold_mb: {number}}}")
    assert "is not known" in str(read_yaml(f"? {number}\n: 1\n"))


@pytest.mark.parametrize("key", ["short", "0" * 39 + "~", "0" * 41, "0" * 39 + "\u00b2", "#" * 40])
def test_an_endpoint_without_a_usable_key_is_no_endpoint(key: str) -> None:
    line = encode_line(Endpoint(0, 1, "10.0.0.1", 1, 2, "0" * 40)).replace(b"0" * 40, key.encode())
    with pytest.raises(WireError, match="is no CURVE key"):
        decode_line(line, Endpoint)
    assert Endpoint(0, 1, "127.0.0.1", 0, 0, "").public_key == ""  # of a job of one node


def test_arguments_of_an_optimizer_that_are_nested_without_end_are_a_sentence() -> None:
    with pytest.raises(shard_optimizer.ShardOptimizerError, match="are not the arguments of a parameter group"):
        shard_optimizer.is_plain(wire.OptimizerSpec("SGD", ("[" * 100_000,)))


@pytest.mark.parametrize("line", ["9" * 5000, "1" * 10])
def test_a_stack_with_an_impossible_line_is_no_error_of_the_daemon(line: str) -> None:
    text = f'Stack (most recent call first):\n  File "a\0b", line {line} in f\n  File "a\0b", line 3 in g\n'
    stack = stack_text.with_sources(stack_text.parse(text))
    assert [(frame.line, frame.function, frame.source) for frame in stack.frames] == [(3, "g", "")]


def test_machine_code_is_checked_and_read_from_one_and_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusion_rt.kernels.machine_code import MachineCode

    found = MachineCode([tmp_path])
    monkeypatch.setattr(MachineCode, "_key", "key")
    path = tmp_path / "sum-key.o"
    path.write_bytes(b"x")
    path.chmod(0o666)
    monkeypatch.setattr(Path, "stat", lambda self: pytest.fail("by its name, which may mean another file by now"))
    assert found._read("sum") is None
