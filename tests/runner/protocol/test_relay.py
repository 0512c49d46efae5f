"""Processes that a relay starts and carries: a real one, as another host would run it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from fusion_rt.runner.agent.preflight import versions
from fusion_rt.runner.protocol.child_processes import Children
from fusion_rt.runner.protocol.relay import BeRelay, Relay

T = TypeVar("T")


class Word(msgspec.Struct):
    """A message."""

    text: str


def through_a_relay(use: Callable[[Relay], Awaitable[T]], argv: tuple[str, ...] = ()) -> T:
    """Runs a test with a relay on this host, which ends without a rest."""

    async def run() -> T:
        own = versions()
        command = argv or (sys.executable, "-m", "fusion_rt.runner.agent")
        relay = Relay("far", command, dict(os.environb), b"/", BeRelay(own.python, own.package))
        running = asyncio.create_task(relay.run(Children()))
        try:
            return await asyncio.wait_for(use(relay), 60)
        finally:
            relay.close()
            await asyncio.wait_for(running, 60)

    return asyncio.run(run())


def test_a_process_is_fed_heard_and_its_end_is_told() -> None:
    async def use(relay: Relay) -> None:
        child = await relay.start(("sh", "-c", 'read line; echo "$line"; echo oh >&2; exit 3'), 1 << 16)
        child.stdin.send_now(Word("hello"))
        assert await child.stdout.line() == b'{"text":"hello"}\n'
        assert await child.stdout.line() == b""
        assert await child.stderr.read() == b"oh\n"
        assert await child.exit == 3

    through_a_relay(use)


def test_input_of_any_length_arrives_whole_and_ends() -> None:
    async def use(relay: Relay) -> None:
        child = await relay.start(("wc", "-c"), 1 << 16)
        for _ in range(3):
            await child.stdin.send(Word("x" * 1_000_000))
        child.stdin.abort()
        assert int(await child.stdout.line()) == 3 * (1_000_000 + len('{"text":""}\n'))
        assert await child.exit == 0

    through_a_relay(use)


def test_signals_reach_it() -> None:
    async def use(relay: Relay) -> None:
        child = await relay.start(("sh", "-c", "echo up; exec sleep 600"), 1 << 16)
        assert await child.stdout.line() == b"up\n"
        child.signal(signal.SIGTERM)
        assert await child.exit == -signal.SIGTERM

    through_a_relay(use)


def test_a_program_that_is_not_there_is_told_and_others_go_on() -> None:
    async def use(relay: Relay) -> None:
        lost, good = await relay.start(("no-such-program",), 1 << 16), await relay.start(("true",), 1 << 16)
        assert (await lost.exit, await lost.stderr.read()) == (127, b"no-such-program: No such file or directory")
        assert await good.exit == 0

    through_a_relay(use)


def test_output_that_is_not_read_stays_where_it_is_and_none_is_lost() -> None:
    async def use(relay: Relay) -> None:
        child = await relay.start(("head", "-c", "20000000", "/dev/zero"), 1 << 16)
        while relay._may_read.is_set():
            await asyncio.sleep(0.01)
        assert not child.exit.done()
        received = 0
        while data := await child.stdout.read():
            received += len(data)
        assert received == 20_000_000

    through_a_relay(use)


def test_where_there_is_no_relay_its_processes_end_with_its_last_words() -> None:
    async def use(relay: Relay) -> None:
        child = await relay.start(("true",), 1 << 16)
        assert await child.exit == 255
        assert await child.stderr.read() == b"host far, through which it is reached, is gone: no route"
        late = await relay.start(("true",), 1 << 16)
        assert await late.exit == 255

    through_a_relay(use, ("sh", "-c", "echo no route >&2; exit 255"))
