"""Paths between two hosts of a lab: their delay, jitter, loss and rate, and the text that describes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.netlab.iproute import NetlabError, bits_per_second

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUEUE_S = 50e-3  # at most, before a path with a rate drops


@dataclass(frozen=True)
class Path:
    """The way from one host to another, which each direction has for itself.

    Attributes:
        delay: seconds that every packet takes longer; a round trip takes twice that.
        jitter: seconds by which the delay goes up and down; packets keep their order.
        loss: share of packets that are dropped at random, 0 <= loss < 1; each segment of TCP is one.
        rate: bit/s, counted as Ethernet frames; 0: no limit.
        queue: seconds of work that may wait for the rate; what comes then is dropped.
    """

    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    rate: int = 0
    queue: float = _QUEUE_S


Paths = Mapping[int | tuple[int, int], str]
"""Texts of special paths, such as "delay:40ms,loss:0.1%", by host (all its paths) or by pair (both directions)."""


def seconds(text: str) -> float:
    """Parses a time such as "40ms", "1.5s" or "200us".

    Raises:
        NetlabError: `text` is not a number followed by us, ms or s.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    if match is None:
        raise NetlabError(f"{text!r} is not a time: write a number and us, ms or s, such as 40ms.")
    return float(match[1]) * _SECONDS[match[2]]


def share(text: str) -> float:
    """Parses a share such as "0.01%" or "0.0001".

    Raises:
        NetlabError: `text` is not a number from 0 on and below 1, or 100 %.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    found = float(match[1]) / (100 if match[2] else 1) if match else 1.0
    if found >= 1:
        raise NetlabError(f"{text!r} is not a share of packets: write a number below 100 and %, such as 0.01%.")
    return found


_FIELDS = {"delay": seconds, "jitter": seconds, "loss": share, "rate": bits_per_second, "queue": seconds}


def parsed(text: str, base: Path) -> Path:
    """Returns `base` with what "delay:40ms,jitter:5ms,loss:0.01%,rate:100mbit,queue:20ms" says, or a part of it.

    Raises:
        NetlabError: it says something else.
    """
    found: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition(":")
        if name.strip() not in _FIELDS:
            raise NetlabError(f"{word!r} says nothing about a path: write {', '.join(_FIELDS)}, a colon and a value.")
        found[name.strip()] = _FIELDS[name.strip()](value)
    return replace(base, **found)


def matrix(hosts: int, base: Path, special: Paths, always: bool = False) -> list[list[Path]] | None:
    """Returns the path from each host (row) to each other (column), or None if nothing is said of any (`always`: not
    even then).

    What is said of a pair beats what is said of a host, and that beats `base`.

    Raises:
        NetlabError: there is no such host, or the text about it makes no sense.
    """

    def known(host: int) -> int:
        if not 0 <= host < hosts:
            raise NetlabError(f"there is no host {host} with a path of its own: the hosts are 0 to {hosts - 1}.")
        return host

    found = [[base] * hosts for _ in range(hosts)]
    for key in sorted(special, key=lambda key: isinstance(key, tuple)):
        ends: Sequence[tuple[int, int]]
        if isinstance(key, tuple):
            ends = [(known(key[0]), known(key[1]))]
        else:
            ends = [(known(key), other) for other in range(hosts) if other != key]
        for one, other in ends:
            for start, end in ((one, other), (other, one)):
                found[start][end] = parsed(special[key], found[start][end])
    return found if always or special else None
