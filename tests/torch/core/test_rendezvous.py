"""The store of torchrun's agent, as the workers of several hosts use it."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from fusion_rt.core.errors import WireError
from fusion_rt.launchers import kvstore
from fusion_rt.launchers.kvstore import HttpStore
from fusion_rt.launchers.meeting import Meeting
from fusion_rt.torch.core import rendezvous
from fusion_rt.torch.core.rendezvous import AgentStore, open_store


def test_a_value_is_there_once_it_was_put(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting("torchrun", (("127.0.0.1", agent.port),), "scope", "n", "h")
    one, two = (open_store(meeting, rank, 2) for rank in range(2))
    assert isinstance(one, AgentStore)
    assert one.get("scope/a") is None
    one.put("scope/a", '{"host":"é"}'.encode())
    assert two.get("scope/a") == '{"host":"é"}'.encode()
    two.remove("scope/a")
    assert one.get("scope/a") is None
    agent.set("scope/big", "x" * 100)
    assert agent.check(["scope/big"])  # `set` does not wait until the store has it
    monkeypatch.setattr(kvstore, "MAX_VALUE", 99)
    with pytest.raises(WireError, match="has 100 bytes"):
        one.get("scope/big")
    assert (one.where, one.hosts) == (f"127.0.0.1:{agent.port}", ["127.0.0.1"])
    one.close()
    two.close()


def test_a_store_that_is_not_there_is_an_error_of_the_network(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_REQUEST", timedelta(milliseconds=200))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(OSError, match=str(port)):
        AgentStore("127.0.0.1", port).get("a")
    capfd.readouterr()  # torch writes a page about it


def test_without_the_agents_store_rank_0_has_one() -> None:
    meeting = Meeting("rank0", (("127.0.0.1", 1),), "scope", "n", "h")
    assert isinstance(open_store(meeting, 1, 2), HttpStore)
