"""Cases: a job and its fault, drawn from a seed, and what has to be said of it.

Shapes, noise and faults are drawn broadly. Seeds below `HELD_OUT` are for those who work on the tools; a claim is made
of those from there on, which nobody has looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tests.diagnosis.generator import MS, US, Fault, S, Shape

HELD_OUT = 1_000_000
FAULTS = (
    "forward", "backward", "loader", "host", "link", "both ways", "network of a host", "daemon", "negotiation", "stop",
    "killed worker", "killed daemon", "missing rings",
)  # fmt: skip
PATTERNS = ("always", "every n-th", "once", "drifting", "for a while", "a few")


@dataclass(frozen=True)
class Case:
    """A job and what has to be said.

    Attributes:
        fault: its name, of `FAULTS`; "" if there is none.
        pattern: of `PATTERNS`; every: n of every n-th, or 0.
        hidden: nodes whose rings are not there.
    """

    seed: int
    shape: Shape
    fault: str = ""
    pattern: str = ""
    every: int = 0
    injected: Fault | None = None
    hidden: frozenset[int] = frozenset()


def clean(seed: int) -> Case:
    """Draws a job without a fault."""
    return Case(seed, _shape(np.random.default_rng((seed, 1)), seed))


def uneven(seed: int) -> Case:
    """Draws a job without a fault on busy machines, whose daemons are late now and then: those with more ranks more
    often."""
    generator = np.random.default_rng((seed, 3))
    shape = _shape(generator, seed)
    nodes = max(2, shape.nodes)
    step = shape.forward + shape.backward
    shape = replace(
        shape,
        nodes=nodes,
        per_node=(int(generator.integers(2, 5)), *generator.integers(1, 3, nodes - 1).tolist()),
        late=float(generator.uniform(0.02, 0.2)),
        hiccup=step * float(generator.uniform(0.1, 0.8)),
        skews={},
        drifts={},
    )
    return Case(seed, shape)


def faulty(seed: int) -> Case:
    """Draws a job with a fault; kinds of faults and patterns take turns."""
    generator = np.random.default_rng((seed, 2))
    fault = FAULTS[seed % len(FAULTS)]
    shape = _shape(generator, seed)
    if fault in ("link", "daemon", "killed daemon", "missing rings"):
        shape = replace(shape, nodes=max(2, shape.nodes))
    elif fault in ("both ways", "network of a host"):
        shape = replace(shape, nodes=max(3, shape.nodes))
    elif fault == "host":
        shape = replace(shape, nodes=max(2, shape.nodes), ranks_per_node=max(2, shape.ranks_per_node))
    elif fault == "negotiation":
        shape = replace(shape, nodes=max(2, shape.nodes), loss=True)
    elif shape.ranks < 2:
        shape = replace(shape, ranks_per_node=2)
    if fault == "both ways":
        shape = replace(shape, exchange="owners")
    pattern = PATTERNS[int(generator.integers(len(PATTERNS)))]
    if fault in ("stop", "killed worker", "killed daemon"):
        pattern = "once"
    if pattern == "once" and fault in ("link", "both ways", "network of a host", "daemon", "negotiation", "host"):
        pattern = "for a while"
    when, every = _when(generator, pattern, shape.steps)
    injected = _fault(generator, fault, shape, when)
    hidden = frozenset[int]()
    if fault == "missing rings":
        count = int(generator.integers(1, shape.nodes))
        hidden = frozenset(generator.permutation(shape.nodes)[:count].tolist())
    return Case(seed, shape, fault, pattern, every, injected, hidden)


def _shape(generator: np.random.Generator, seed: int) -> Shape:
    nodes = int(generator.choice([1, 2, 2, 3, 4, 4, 6]))
    quiet = generator.random() < 0.7  # the others are on machines that do other things too
    step = float(np.exp(generator.uniform(math.log(10 * MS), math.log(300 * MS))))
    forward = float(generator.uniform(0.2, 0.45))
    busy = generator.random() < 0.15
    return Shape(
        nodes=nodes,
        ranks_per_node=int(generator.choice([1, 1, 2, 3] if nodes > 1 else [2, 3, 4, 8])),
        steps=int(generator.integers(20, 110)),
        buckets=int(generator.integers(1, 5)),
        bucket_nbytes=int(np.exp(generator.uniform(math.log(1 << 17), math.log(1 << 24)))),
        forward=step * forward,
        backward=step * (0.95 - forward),
        update=step * float(generator.uniform(0.01, 0.08)),
        loader=step * float(generator.uniform(0.0, 0.1)),
        bandwidth=float(np.exp(generator.uniform(math.log(25e6), math.log(2.5e9)))),
        latency=float(np.exp(generator.uniform(math.log(20 * US), math.log(2 * MS)))),
        pieces=int(generator.choice([1, 1, 2, 3])),
        exchange=str(generator.choice(["ring", "ring", "owners"])),
        waits=str(generator.choice(["backward", "step"])),
        loss=bool(generator.random() < 0.4),
        noise=float(generator.uniform(0.002, 0.03) if quiet else generator.uniform(0.03, 0.12)),
        host_noise=0.0 if quiet else float(generator.uniform(0.0, 0.06)),
        common=float(generator.uniform(0.0, 0.1)),
        uneven=float(generator.uniform(0.0, 0.005)),
        hiccups=float(generator.uniform(0.01, 0.08)) if busy else 0.0,
        hiccup=step * float(generator.uniform(0.1, 0.8)) if busy else 0.0,
        skews={node: int(generator.integers(-1000 * S, 1000 * S)) for node in range(nodes)},
        drifts={node: float(generator.uniform(-30, 30)) for node in range(nodes)},
        round_trip=float(np.exp(generator.uniform(math.log(100 * US), math.log(4 * MS)))),
        seed=seed,
    )


def _when(generator: np.random.Generator, pattern: str, steps: int) -> tuple[tuple[float, ...], int]:
    when, every = np.zeros(steps), 0
    if pattern == "always":
        when[:] = 1
    elif pattern == "every n-th":
        every = int(generator.integers(2, max(3, steps // 5)))
        when[int(generator.integers(every)) :: every] = 1
    elif pattern == "once":
        when[int(generator.integers(2, steps - 3))] = 1
    elif pattern == "drifting":
        when[:] = np.linspace(0, 1, steps)
    elif pattern == "for a while":
        length = int(generator.integers(max(5, steps // 6), steps // 2 + 1))
        first = int(generator.integers(1, steps - length))
        when[first : first + length] = 1
    else:
        count = int(generator.integers(3, max(4, steps // 6)))
        when[generator.choice(np.arange(2, steps - 1), count, replace=False)] = 1
    return tuple(when.tolist()), every


def _fault(generator: np.random.Generator, fault: str, shape: Shape, when: tuple[float, ...]) -> Fault | None:
    step = shape.forward + shape.backward
    share = sum(when) / len(when)
    # A fault costs from a few percent of the time to several times as much.
    cost = float(np.exp(generator.uniform(math.log(0.05), math.log(1.0))))
    more = max(cost / share, 0.1 + 5 * shape.noise) * step * float(generator.uniform(1.0, 1.4))
    node = int(generator.integers(shape.nodes))
    rank = int(generator.integers(shape.ranks))
    its = frozenset(range(node * shape.ranks_per_node, (node + 1) * shape.ranks_per_node))
    if fault in ("forward", "backward", "loader"):
        return Fault(fault, when, ranks=frozenset({rank}), more=more)
    if fault == "host":
        return Fault(
            str(generator.choice(["forward", "backward"])), when, ranks=its, nodes=frozenset({node}), more=more
        )
    if fault in ("link", "both ways", "network of a host"):
        factor = float(generator.uniform(3, 20)) / min(1.0, max(share, 0.2))
        other = (node + 1) % shape.nodes
        links = {(node, other)}
        if fault == "both ways":
            links |= {(other, node)}
        elif fault == "network of a host":
            links = {(a, b) for a in range(shape.nodes) for b in range(shape.nodes) if a != b and node in (a, b)}
        nodes = frozenset({node}) if fault == "network of a host" else frozenset[int]()
        return Fault("link", when, nodes=nodes, links=frozenset(links), factor=factor)
    if fault == "daemon":
        return Fault("daemon", when, nodes=frozenset({node}), more=more / (shape.buckets * 6))
    if fault == "negotiation":
        return Fault("negotiation", when, nodes=frozenset({node}), more=more)
    if fault == "stop":
        return Fault("stop", when, ranks=frozenset({rank}), more=max(more, 2 * step))
    if fault == "killed worker":
        return Fault("killed", when, ranks=frozenset({rank}))
    if fault == "killed daemon":
        return Fault("killed", when, nodes=frozenset({node}))
    return Fault("forward", when, ranks=frozenset({rank}), more=more) if fault == "missing rings" else None
