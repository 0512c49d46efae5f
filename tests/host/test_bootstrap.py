"""How a daemon comes up: its start-up lines, and the directories of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host import bootstrap
from fusion_rt.host.bootstrap import (
    Abandon,
    Awake,
    DaemonConfig,
    Endpoint,
    EpochOver,
    Knock,
    PeerTable,
    Reform,
    Reformed,
    StartError,
)
from tests.for_each import for_each

TOPOLOGY = Topology(("a", "b"), ((0, 1), (2,)))
CONFIG = DaemonConfig("job-1", 1, TOPOLOGY, "10.0.0.2", attached=False)
ENDPOINT = Endpoint(1, 4711, "fe80::1", 5000, 5001, "k" * 40)
REFORM = Reform(3, Topology(("a", "b"), ((), (0, 1))), (0,), (ENDPOINT,))


@for_each(
    "message",
    [
        CONFIG,
        ENDPOINT,
        StartError("no"),
        PeerTable((ENDPOINT,)),
        REFORM,
        Reformed(3),
        Abandon(3, "why"),
        Knock(),
        Awake(),
        EpochOver(3, (0,), "why"),
    ],
)
def test_a_line_survives(message: object) -> None:
    line = bootstrap.encode_line(message)  # type: ignore[arg-type]
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert bootstrap.decode_line(line, type(message)) == message


def test_an_answer_is_an_endpoint_or_an_error() -> None:
    answers = [ENDPOINT, StartError("no")]
    kind = Endpoint | StartError
    assert [bootstrap.decode_line(bootstrap.encode_line(a), kind) for a in answers] == answers  # type: ignore[arg-type]


@given(noise=st.binary(max_size=100))
def test_noise_is_a_wire_error(noise: bytes) -> None:
    for kind in (DaemonConfig, PeerTable, Endpoint, Reform):
        with pytest.raises(WireError, match="not a start-up message"):
            bootstrap.decode_line(noise, kind)


def test_nesting_without_end_is_a_wire_error() -> None:
    with pytest.raises(WireError, match="not a start-up message"):
        bootstrap.decode_line(b'{"x":' + b"[" * 100_000, DaemonConfig)


def test_a_line_beyond_the_limit_is_refused() -> None:
    with pytest.raises(WireError, match="longer than the limit"):
        bootstrap.decode_line(b" " * (bootstrap.MAX_LINE + 1), DaemonConfig)


def changed(line: bytes, old: bytes, new: bytes) -> bytes:
    assert old in line
    return line.replace(old, new)


@for_each(
    ("old", "new"),
    [
        (b'"job-1"', b'"../x"'),
        (b'"job-1"', b'""'),
        (b'"job-1"', b'"' + b"x" * 33 + b'"'),
        (b'"node":1', b'"node":2'),
        (b'"node":1', b'"node":-1'),
        (b"[[0,1],[2]]", b"[[0,1],[3]]"),
        (b'"10.0.0.2"', b'"some.host"'),
        (b'"10.0.0.2"', b'""'),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(old: bytes, new: bytes) -> None:
    with pytest.raises(WireError):
        bootstrap.decode_line(changed(bootstrap.encode_line(CONFIG), old, new), DaemonConfig)


@for_each(("old", "new"), [(b"5000", b"65536"), (b"5001", b"-1"), (b'"fe80::1"', b'"somewhere"')])
def test_an_endpoint_that_makes_no_sense_is_refused(old: bytes, new: bytes) -> None:
    with pytest.raises(WireError):
        bootstrap.decode_line(changed(bootstrap.encode_line(ENDPOINT), old, new), Endpoint)


@for_each(
    ("old", "new"),
    [
        (b'"absent":[0]', b'"absent":[]'),  # then node 0 has to have an endpoint
        (b'"absent":[0]', b'"absent":[1]'),  # which has ranks
        (b'"absent":[0]', b'"absent":[0,2]'),
        (b'"number":3', b'"number":0'),
    ],
)
def test_an_epoch_that_makes_no_sense_is_refused(old: bytes, new: bytes) -> None:
    with pytest.raises(WireError):
        bootstrap.decode_line(changed(bootstrap.encode_line(REFORM), old, new), Reform)


def test_only_in_an_elastic_job_may_the_first_node_be_without_workers() -> None:
    topology = Topology(("a", "b"), ((), (0,)))
    assert DaemonConfig("job-1", 1, topology, elastic=True).serial == 1
    with pytest.raises(ValueError, match="has no workers"):
        DaemonConfig("job-1", 1, topology)


def test_the_path_of_a_socket() -> None:
    assert bootstrap.socket_path("/run/x", "job-1", 3) == "/run/x/job-1.3/sock"
    assert bootstrap.socket_path("/run/x", "job-1", 3, serial=2) == "/run/x/job-1-2.3/sock"
    longest = "/" + "r" * (107 - len("/job-1.3/sock") - 1)
    assert len(bootstrap.socket_path(longest, "job-1", 3)) == 107
    with pytest.raises(FusionError, match=r"longer than the 107 bytes.*FUSION_RUNTIME_DIR"):
        bootstrap.socket_path(longest + "r", "job-1", 3)
    with pytest.raises(FusionError, match="longer than the 107 bytes"):
        bootstrap.socket_path("/" + "ü" * 50, "job-1", 3)  # bytes, not characters


def test_a_private_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    bootstrap.make_private_directory(str(path))
    assert path.stat().st_mode & 0o777 == 0o700
    bootstrap.make_private_directory(str(path))  # and is accepted when it is there


def test_a_private_directory_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bootstrap.make_private_directory("run")
    assert (tmp_path / "run").is_dir()


def test_a_directory_that_cannot_be_made_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    remedy = "Not a directory; set FUSION_RUNTIME_DIR to a directory that this user may make"
    with pytest.raises(FusionError, match=f"^the directory {tmp_path}/file/a/run cannot be made: .*: {remedy}$"):
        bootstrap.make_private_directory(str(tmp_path / "file" / "a" / "run"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file" / "1000"))  # after su, for instance
    with pytest.raises(FusionError, match=f"XDG_RUNTIME_DIR={tmp_path}/file/1000 is not there, .*: {remedy}$"):
        bootstrap.make_private_directory(str(tmp_path / "file" / "1000" / "fusion_rt"))


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(FusionError, match=r"is not a directory that only user \d+ can enter"):
        bootstrap.make_private_directory(str(path))


def test_a_link_and_a_file_are_no_private_directories(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch(0o600)
    for name in ("link", "file"):
        with pytest.raises(FusionError, match="is not a directory"):
            bootstrap.make_private_directory(str(tmp_path / name))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    with pytest.raises(FusionError, match="is not a directory that only user 0 can enter"):
        bootstrap.make_private_directory(str(path))
