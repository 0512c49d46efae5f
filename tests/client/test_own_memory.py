"""Which tensors the daemon takes where they lie, and what holds them meanwhile."""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.client import Client, channel, own_memory
from fusion_rt.client.own_memory import HUGE_PAGE, OwnMemory
from fusion_rt.host.process_memory import Process
from tests.client.daemon import SUM, WELCOME, Daemon


class Advice:
    """Stands in for madvise.

    Attributes:
        given: address, bytes and advice of each call.
        refused_from: huge pages are refused from this address on.
    """

    def __init__(self) -> None:
        self.given: list[tuple[int, int, int]] = []
        self.refused_from = 1 << 60

    def madvise(self, address: int, nbytes: int, advice: int) -> int:
        self.given.append((address, nbytes, advice))
        return -1 if advice == 25 and address >= self.refused_from else 0

    @property
    def copied(self) -> list[int]:
        """Addresses of the pages that were copied to huge ones."""
        return [address for address, _, advice in self.given if advice == 25]


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Advice:
    made = Advice()
    monkeypatch.setattr(own_memory, "_libc", made)
    return made


@pytest.fixture
def memory() -> OwnMemory:
    made = OwnMemory(os.getpid())
    made.by_address = True
    return made


def ask(memory: OwnMemory, address: int, nbytes: int, identity: object = 1) -> wire.Address | None:
    return memory.address(address, nbytes, identity, object)


BASE = 100 * HUGE_PAGE


def test_a_tensor_is_given_by_address_once_it_was_used_again_and_has_huge_pages(
    memory: OwnMemory, advice: Advice
) -> None:
    address, nbytes = BASE + 64, 4 * HUGE_PAGE
    assert ask(memory, address, nbytes) is None  # perhaps it is never used again
    assert not advice.given
    assert ask(memory, address, nbytes) == wire.Address(address)
    assert advice.given[0] == (BASE, 5 * HUGE_PAGE, mmap.MADV_HUGEPAGE)
    assert sorted(advice.copied) == [BASE + i * HUGE_PAGE for i in range(5)]  # with both edges
    before = len(advice.given)
    assert ask(memory, address, nbytes) == wire.Address(address)
    assert len(advice.given) == before


def test_another_allocation_at_the_same_address_begins_anew(memory: OwnMemory, advice: Advice) -> None:
    for _ in range(2):
        found = ask(memory, BASE, 2 * HUGE_PAGE)
    assert found is not None
    assert ask(memory, BASE, 2 * HUGE_PAGE, identity=2) is None


def test_huge_pages_are_made_a_few_at_a_time(
    memory: OwnMemory, advice: Advice, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("fusion_rt.client.own_memory.time.perf_counter", lambda: next(clock) * own_memory._AT_ONCE / 2)
    uses = 1
    while ask(memory, BASE, 8 * HUGE_PAGE) is None:
        uses += 1
    assert uses > 4


def test_memory_for_which_there_are_no_huge_pages_is_copied(memory: OwnMemory, advice: Advice) -> None:
    advice.refused_from = BASE + 3 * HUGE_PAGE
    assert [ask(memory, BASE, 8 * HUGE_PAGE) for _ in range(5)] == [None] * 5
    assert len(advice.copied) == 6  # the edges, and up to the one that was refused


def test_what_is_remembered_is_bounded(memory: OwnMemory, advice: Advice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_memory, "_REMEMBERED", 3)
    for address in (1, 2, 3, 1, 4):
        ask(memory, address * BASE, 2 * HUGE_PAGE)
    assert ask(memory, BASE, 2 * HUGE_PAGE) is not None
    assert ask(memory, 2 * BASE, 2 * HUGE_PAGE) is None  # forgotten when 4 came


def test_small_tensors_and_daemons_that_were_refused(memory: OwnMemory) -> None:
    assert memory.may_take(own_memory.LEAST_BY_ADDRESS)
    assert not memory.may_take(own_memory.LEAST_BY_ADDRESS - 1)
    memory.welcome(False)
    assert not memory.may_take(1 << 30)
    memory.welcome(True)  # it says so, but nothing was answered
    assert not memory.may_take(1 << 30)


def test_real_memory_gets_huge_pages(memory: OwnMemory) -> None:
    values = np.ones(6 * HUGE_PAGE, np.uint8)
    found = None
    for _ in range(100):
        found = found or ask(memory, values.ctypes.data, values.nbytes)
    if found is None:
        pytest.skip("this kernel has no huge pages, or cannot make them of others")
    assert found == wire.Address(values.ctypes.data)
    assert values.all()


def test_a_client_makes_an_offer_and_believes_an_answer_that_it_sees(daemon: Daemon) -> None:
    def answered(self: Any, by_address: bool) -> None:
        assert self.offer is not None
        process = Process(os.getpid(), "the worker")
        process.accepts(self.offer.address, self.offer.text)
        process.end()
        welcome(self, by_address)

    welcome = OwnMemory.welcome
    client = daemon.connect(replace(WELCOME, by_address=True))
    assert not client.own_memory.by_address  # nobody has read the offer
    client.close()
    daemon.sock.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnMemory, "welcome", answered)
        client = daemon.connect(replace(WELCOME, by_address=True))
        assert client.own_memory.by_address
        client.close()
        daemon.sock.close()
        patch.setenv("FUSION_MEMORY", "copy")
        patch.setattr(OwnMemory, "welcome", welcome)
        client = daemon.connect(replace(WELCOME, by_address=True))
        assert not client.own_memory.by_address
        assert isinstance(daemon.hello, wire.Hello)
        assert (daemon.hello.offer_address, daemon.hello.offer_text) == (0, b"")
        client.close()


class Tensor:
    """Owns memory."""


@pytest.mark.parametrize("told", [True, False])
def test_memory_is_held_until_the_daemon_has_said_that_it_is_done(
    daemon: Daemon, client: Client, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_freed: list[object] = []
    monkeypatch.setattr(channel, "_NEVER_FREED", never_freed)
    tensor = Tensor()
    gone = weakref.ref(tensor)
    operation = client.submit("x", SUM, place=wire.Address(4096), keeps=tensor)
    submit = daemon.receive()
    assert isinstance(submit, wire.Submit)
    assert submit.place == wire.Address(4096)
    del tensor
    assert gone() is not None
    if told:
        daemon.send(wire.Done(operation.handle))
        client.wait(operation)
        assert gone() is None
    else:
        client.leave()
        assert gone() is not None
        assert never_freed == [gone()]
