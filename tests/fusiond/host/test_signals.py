"""Standard input of a daemon: its orders come first, and its end last."""

from __future__ import annotations

import os

from fusion_rt.host import bootstrap
from fusiond.host.loop import EventLoop
from fusiond.host.signals import StandardInput


class Heard:
    """What a daemon is told, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def signalled(self, name: str) -> None:
        self.words.append(name)

    def ordered(self, order: bootstrap.Order) -> None:
        self.words.append(type(order).__name__)

    def starter_gone(self) -> None:
        self.words.append("gone")


def test_orders_come_before_what_workers_say_at_the_same_time_and_the_end_after_it() -> None:
    """A starter that ends the job says so before it ends workers, and goes when they have left."""
    loop, heard = EventLoop(), Heard()
    from_starter, starter = os.pipe()
    from_worker, worker = os.pipe()
    StandardInput(loop, from_starter, b"", bootstrap.Order, heard)
    loop.add_reader(from_worker, lambda: heard.words.append(os.read(from_worker, 10).decode()))
    os.write(worker, b"died")
    os.write(starter, bootstrap.encode_line(bootstrap.Farewell()))
    loop.turn()
    assert heard.words == ["Farewell", "died"]
    os.write(worker, b"bye")
    os.close(starter)
    loop.turn()
    assert heard.words[2:] == ["bye", "gone"]
    loop.close()
    for descriptor in (from_starter, from_worker, worker):
        os.close(descriptor)
