"""The published rules of distributed training algorithms in plain numpy, one function a rule.

They are what the tests compare the daemon's algorithms with, so nothing of the project is imported and nothing is fast.
Vectors are 1-D and have the element type of `x0` (float32 or float64) throughout; η is `rate`, g a stochastic gradient,
w the home's copy, x_i the copy of rank i, τ the staleness: updates of the home between a rank's read and its arrival.

`gradient(rank, step, x)` is the rank's `step`-th gradient, from 0, on what it has read. It is called once for every
contribution, may not depend on anything else, and gets a copy of its own.

Families that are driven by arrivals take `order`: the ranks whose contributions arrive at the home, one after another.
A rank reads the home right after its own contribution has been taken in, and computes its next gradient on that.
Entries of a rank that waits (ssp, partial, softsync with `wait`) are ignored, as it has nothing to contribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Gradient = Callable[[int, int, Array], Array]
Matrix = Callable[[int], Array]  # of a clock, from 0: entry (i, j) is what rank i gives to the message of rank j
Event = tuple[str, int] | tuple[str, int, int]  # ("step", i) or ("mix", i, j)


@dataclass
class Run:
    """The course of a run; fields that a rule does not have stay empty. The start is not recorded.

    Attributes:
        homes: the home's copy after each of its updates; after each event for asynchronous EASGD.
        workers: all x_i as one array (ranks, elements), after each step or event.
        staleness: τ of each contribution, in the order in which they were taken in.
        taken: the rank of each contribution that was taken in: `order` without the entries that were ignored.
        late: how many contributions of each rank came late.
        carried: what has come and is not in the home yet: a sum of gradients, as the next update would have added it up
            (softsync: each divided by max(τ, 1); collaborative: each times its samples).
        weights: the push-sum weights (ranks,) after each step.
        debiased: z = x / weight (ranks, elements) after each step.
        replicas: the public copies x̂ (ranks, elements) after each step.
    """

    homes: list[Array] = field(default_factory=list)
    workers: list[Array] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    carried: Array | None = None
    weights: list[Array] = field(default_factory=list)
    debiased: list[Array] = field(default_factory=list)
    replicas: list[Array] = field(default_factory=list)


class Readers:
    """The ranks of a family with a home: what each has read, at which version, and how many gradients it computed."""

    def __init__(self, x0: Array, gradient: Gradient, ranks: int) -> None:
        self.reads = copies(x0, ranks)
        self.versions = [0] * ranks
        self.steps = [0] * ranks
        self._gradient = gradient

    def contribution(self, rank: int) -> Array:
        """The next gradient of a rank, on what it has read."""
        if not 0 <= rank < len(self.steps):
            raise ValueError(f"the order names rank {rank}; ranks are 0 to {len(self.steps) - 1}")
        g = evaluate(self._gradient, rank, self.steps[rank], self.reads[rank])
        self.steps[rank] += 1
        return g

    def read(self, rank: int, home: Array, version: int) -> None:
        self.reads[rank] = home.copy()
        self.versions[rank] = version


def copies(x0: Array, ranks: int) -> Array:
    """Every rank's own copy of a vector, as one array (ranks, elements). Raises ValueError for anything else."""
    if x0.ndim != 1 or x0.dtype not in (np.float32, np.float64):
        raise ValueError(f"x0 has to be a vector of float32 or float64, and is {x0.ndim}-D of {x0.dtype}")
    if ranks < 1:
        raise ValueError(f"there has to be at least one rank, not {ranks}")
    return np.tile(x0, (ranks, 1))


def own_copies(x0s: Array) -> Array:
    """The copies that ranks begin with (ranks, elements). Raises ValueError for anything else."""
    if x0s.ndim != 2 or x0s.dtype not in (np.float32, np.float64):
        raise ValueError(f"x0s has to be (ranks, elements) of float32 or float64, and is {x0s.ndim}-D of {x0s.dtype}")
    xs: Array = x0s.copy()
    return xs


def evaluate(gradient: Gradient, rank: int, step: int, x: Array) -> Array:
    g: Array = np.asarray(gradient(rank, step, x.copy()), dtype=x.dtype)
    return g


def mixed(matrix: Array, xs: Array) -> Array:
    """Row i is Σ_j matrix[i, j] xs[j], added up in the order of the ranks. Raises ValueError if sizes do not fit."""
    ranks = len(xs)
    if matrix.shape != (ranks, ranks):
        raise ValueError(f"the mixing matrix is {matrix.shape}; {ranks} ranks need ({ranks}, {ranks})")
    matrix = matrix.astype(xs.dtype)
    out: Array = np.zeros_like(xs)
    for i in range(ranks):
        for j in range(ranks):
            out[i] += matrix[i, j] * xs[j]
    return out


def summed(vectors: Sequence[Array] | Array) -> Array:
    """One after another, as they are given."""
    total: Array = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return total


# --- with a home ------------------------------------------------------------------------------------------------------


def bsp(x0: Array, gradient: Gradient, ranks: int, rate: float, steps: int, momentum: float = 0) -> Run:
    """Synchronous SGD: w −= η · mean(g), the gradients added up in the order of the ranks.

    With momentum as in torch.optim.SGD (dampening 0): u = μ u + mean(g), first u = mean(g); w −= η u.
    Chen et al. 1604.00981, algorithms 3 and 4 without backup workers.
    """
    home = copies(x0, ranks)[0]
    velocity = np.zeros_like(home)
    run = Run()
    for step in range(steps):
        mean = summed([evaluate(gradient, rank, step, home) for rank in range(ranks)]) / ranks
        velocity = momentum * velocity + mean
        home = home - rate * velocity
        run.homes.append(home)
    return run


def asgd(x0: Array, gradient: Gradient, ranks: int, rate: float, order: Sequence[int]) -> Run:
    """Asynchronous SGD: on each arrival w −= η g(x), with x as the rank read it τ updates ago.

    Chen et al. 1604.00981, algorithms 1 and 2: Downpour SGD (Dean et al., NIPS 2012) with a fetch and a push each step.
    """
    home = copies(x0, ranks)[0]
    readers = Readers(x0, gradient, ranks)
    run = Run()
    for version, rank in enumerate(order):
        home = home - rate * readers.contribution(rank)
        run.staleness.append(version - readers.versions[rank])
        readers.read(rank, home, version + 1)
        run.taken.append(rank)
        run.homes.append(home)
    return run


def ssp(x0: Array, gradient: Gradient, ranks: int, rate: float, order: Sequence[int], staleness: int) -> Run:
    """Stale synchronous parallel: asgd in which nobody is more than `staleness` clocks ahead of the slowest.

    A rank's clock is how many of its contributions were applied. If afterwards its clock − the slowest > `staleness`,
    it waits, and reads the home as it is when the slowest has advanced. Ho et al., NIPS 2013: the condition on clocks;
    here a read sees all updates that were applied, and not only those that the bound guarantees.
    """
    home = copies(x0, ranks)[0]
    readers = Readers(x0, gradient, ranks)
    waiting: set[int] = set()
    run = Run()
    for rank in order:
        if rank in waiting:
            continue
        home = home - rate * readers.contribution(rank)
        run.staleness.append(len(run.homes) - readers.versions[rank])
        run.taken.append(rank)
        run.homes.append(home)
        waiting.add(rank)
        slowest = min(readers.steps)
        for released in [other for other in waiting if readers.steps[other] - slowest <= staleness]:
            readers.read(released, home, len(run.homes))
            waiting.remove(released)
    return run


def softsync(
    x0: Array,
    gradient: Gradient,
    ranks: int,
    rate: float,
    order: Sequence[int],
    contributions: int,
    wait: bool = False,
) -> Run:
    """Staleness-aware SGD: on every c = `contributions` arrivals, w −= 1/c Σ (η / max(τ, 1)) g.

    Zhang, Gupta, Lian, Liu 1511.05950: the rule of n-softsync, with c = ranks / n, and the learning rate divided by
    each gradient's staleness. As there, a rank goes on with the home as it is at its arrival, and may contribute to one
    update twice; so c = ranks is not bsp. With `wait` it reads the home after the update that it contributed to.
    """
    home = copies(x0, ranks)[0]
    readers = Readers(x0, gradient, ranks)
    arrived: list[Array] = []
    senders: set[int] = set()
    run = Run()
    for rank in order:
        if wait and rank in senders:
            continue
        tau = len(run.homes) - readers.versions[rank]
        arrived.append(readers.contribution(rank) / max(tau, 1))
        senders.add(rank)
        run.staleness.append(tau)
        run.taken.append(rank)
        released = {rank} if not wait else set()
        if len(arrived) == contributions:
            home = home - rate * (summed(arrived) / contributions)
            run.homes.append(home)
            if wait:
                released = senders
            arrived, senders = [], set()
        for other in released:
            readers.read(other, home, len(run.homes))
    run.carried = summed([np.zeros_like(home), *arrived])
    return run


def dc_asgd(
    x0: Array,
    gradient: Gradient,
    ranks: int,
    rate: float,
    order: Sequence[int],
    lam: float,
    adaptive: bool = False,
    decay: float = 0.95,
    epsilon: float = 1e-7,
    per_worker: bool = False,
) -> Run:
    """Delay-compensated ASGD: w −= η (g + λ g ⊙ g ⊙ (w − w_bak)), w_bak being what the rank had read.

    Zheng et al. 1609.08326, eq. 10. Adaptive, eq. 14: λ_t = λ₀ / √(m + ε) for each element, with m = decay · m +
    (1 − decay) g², from 0, g already in it. The paper has one m at the home; the authors' code (Multiverso,
    dcasgda_updater.h) has one for each worker: `per_worker`.
    """
    home = copies(x0, ranks)[0]
    readers = Readers(x0, gradient, ranks)
    squares = np.zeros((ranks if per_worker else 1, len(home)), home.dtype)
    run = Run()
    for version, rank in enumerate(order):
        g = readers.contribution(rank)
        scale: Array | float = lam
        if adaptive:
            owner = rank if per_worker else 0
            squares[owner] = decay * squares[owner] + (1 - decay) * g * g
            scale = lam / np.sqrt(squares[owner] + epsilon)
        home = home - rate * (g + scale * g * g * (home - readers.reads[rank]))
        run.staleness.append(version - readers.versions[rank])
        readers.read(rank, home, version + 1)
        run.taken.append(rank)
        run.homes.append(home)
    return run


def partial(x0: Array, gradient: Gradient, ranks: int, rate: float, order: Sequence[int], backup: int) -> Run:
    """Synchronous SGD with backup workers: w −= η/ranks · Σ g when `ranks - backup` gradients of this version came.

    Chen et al. 1604.00981, algorithms 3 and 4, with two differences: a gradient on an older version is not dropped but
    carried to the next update, and the sum is therefore divided by all ranks, and not by those on time. A late rank
    reads the home at once; those on time wait and read it after the update. On-time gradients are added up in the order
    of the ranks, then what was carried, in order of arrival; so `backup` 0 is bsp to the bit, whatever the order.
    """
    if not 0 <= backup < ranks:
        raise ValueError(f"{backup} backup workers among {ranks} ranks leave nobody to wait for")
    home = copies(x0, ranks)[0]
    readers = Readers(x0, gradient, ranks)
    on_time: dict[int, Array] = {}
    carried = np.zeros_like(home)
    run = Run(late=[0] * ranks)
    for rank in order:
        if rank in on_time:
            continue
        tau = len(run.homes) - readers.versions[rank]
        g = readers.contribution(rank)
        run.staleness.append(tau)
        run.taken.append(rank)
        if tau:
            run.late[rank] += 1
            carried = carried + g
            readers.read(rank, home, len(run.homes))
            continue
        on_time[rank] = g
        if len(on_time) == ranks - backup:
            home = home - rate * ((summed([on_time[sender] for sender in sorted(on_time)]) + carried) / ranks)
            run.homes.append(home)
            for sender in on_time:
                readers.read(sender, home, len(run.homes))
            on_time, carried = {}, np.zeros_like(home)
    run.carried = summed([*(on_time[sender] for sender in sorted(on_time)), carried])
    return run


def collaborative(
    x0: Array,
    gradient: Gradient,
    samples_of: Callable[[int, int], int],
    ranks: int,
    rate: float,
    order: Sequence[int],
    target: int,
) -> Run:
    """Large batches by volunteers: when Σ samples ≥ `target`, w −= η Σ samples · g / Σ samples.

    Diskin et al. 2106.10207 (DeDLOC), section 3; `samples_of(rank, step)` is how many samples a gradient is a mean of.
    A rank goes on with the home as it is at its arrival; what it then brings counts for the update under way, however
    old it is. All that is there goes into the update; nothing above `target` is kept for the next.
    """
    home = copies(x0, ranks)[0]
    readers = Readers(x0, gradient, ranks)
    total, samples = np.zeros_like(home), 0
    run = Run()
    for rank in order:
        count = int(samples_of(rank, readers.steps[rank]))
        total = total + count * readers.contribution(rank)
        samples += count
        run.staleness.append(len(run.homes) - readers.versions[rank])
        run.taken.append(rank)
        if samples >= target:
            home = home - rate * (total / samples)
            run.homes.append(home)
            total, samples = np.zeros_like(home), 0
        readers.read(rank, home, len(run.homes))
    run.carried = total
    return run


# --- elastic ----------------------------------------------------------------------------------------------------------


def easgd_async(
    x0: Array,
    gradient: Gradient,
    ranks: int,
    rate: float,
    alpha: float,
    period: int,
    order: Sequence[int],
    momentum: float = 0,
) -> Run:
    """Asynchronous elastic averaging; each entry of `order` is one step of that rank, home and worker copies after it.

    Zhang, Choromanska, LeCun 1412.6651, algorithm 1: if `period` divides the rank's clock (so at its first step too),
    d = α (x_i − x̃), x_i −= d, x̃ += d; and x_i −= η g, with g on the x_i that d was computed on. With momentum (the
    paper's algorithm 2, but torch.optim.SGD's heavy ball in place of Nesterov's): u = μ u + g, x_i −= η u; d stays
    outside of u.
    """
    xs = copies(x0, ranks)
    home = x0.copy()
    velocities = np.zeros_like(xs)
    clocks = [0] * ranks
    run = Run()
    for rank in order:
        velocities[rank] = momentum * velocities[rank] + evaluate(gradient, rank, clocks[rank], xs[rank])
        change = rate * velocities[rank]
        if clocks[rank] % period == 0:
            difference = alpha * (xs[rank] - home)
            change = change + difference
            home = home + difference
        xs[rank] -= change
        clocks[rank] += 1
        run.taken.append(rank)
        run.homes.append(home)
        run.workers.append(xs.copy())
    return run


def easgd_sync(
    x0: Array,
    gradient: Gradient,
    ranks: int,
    rate: float,
    alpha: float,
    period: int,
    steps: int,
    momentum: float = 0,
) -> Run:
    """Synchronous elastic averaging: all ranks take their step at once, home and worker copies after each step.

    1412.6651, eqs. 3 and 4 with α = ηρ: x_i −= η g(x_i) + α (x_i − x̃); x̃ += α Σ (x_i − x̃), both from the old values.
    The elastic term is there at each step that `period` divides. Momentum as in `easgd_async`.
    """
    xs = copies(x0, ranks)
    home = x0.copy()
    velocities = np.zeros_like(xs)
    run = Run()
    for step in range(steps):
        gradients = np.stack([evaluate(gradient, rank, step, xs[rank]) for rank in range(ranks)])
        velocities = momentum * velocities + gradients
        change = rate * velocities
        if step % period == 0:
            differences = alpha * (xs - home)
            change = change + differences
            home = home + summed(differences)
        xs = xs - change
        run.homes.append(home)
        run.workers.append(xs)
    return run


# --- gossip -----------------------------------------------------------------------------------------------------------


def dpsgd(x0s: Array, gradient: Gradient, W_of_clock: Matrix, rate: float, steps: int) -> Run:
    """Decentralised parallel SGD: x_i = Σ_j W_ij x_j − η g_i(x_i), the gradient on x_i before the mixing.

    Lian et al. 1705.09056, algorithm 1. `x0s` is (ranks, elements); W has to be symmetric and doubly stochastic.
    """
    xs = own_copies(x0s)
    run = Run()
    for step in range(steps):
        gradients = np.stack([evaluate(gradient, rank, step, xs[rank]) for rank in range(len(xs))])
        xs = mixed(W_of_clock(step), xs) - rate * gradients
        run.workers.append(xs)
    return run


def adpsgd(x0s: Array, gradient: Gradient, rate: float, order: Sequence[Event]) -> Run:
    """Asynchronous decentralised parallel SGD, one event after another; all copies after each event.

    Lian et al. 1710.06952, algorithm 1. ("step", i): x_i −= η g, with g on the x_i that rank i had after its previous
    step (at first: its start), whatever was mixed into x_i since. ("mix", i, j): x_i and x_j both become
    (x_i + x_j) / 2. Raises ValueError for any other event.
    """
    xs = own_copies(x0s)
    readers = Readers(xs[0], gradient, len(xs))
    readers.reads = xs.copy()
    run = Run()
    for event in order:
        if event[0] == "step" and len(event) == 2:
            rank = event[1]
            xs[rank] -= rate * readers.contribution(rank)
            readers.read(rank, xs[rank], 0)
        elif event[0] == "mix" and len(event) == 3:
            pair = [event[1], event[2]]
            if pair[0] == pair[1]:
                raise ValueError(f"rank {pair[0]} cannot mix with itself")
            xs[pair] = (xs[pair[0]] + xs[pair[1]]) / 2
        else:
            raise ValueError(f"an event is ('step', i) or ('mix', i, j), not {event!r}")
        run.workers.append(xs.copy())
    return run


def sgp(x0s: Array, gradient: Gradient, P_of_clock: Matrix, rate: float, steps: int) -> Run:
    """Stochastic gradient push: x = P (x − η g(z)), ω = P ω, z = x / ω; from ω = 1, z = x.

    Assran et al. 1811.10792, algorithm 1. `x0s` is (ranks, elements); P has to be column-stochastic. `workers` of the
    result is x, which is biased; `debiased` is z, the model.
    """
    xs = own_copies(x0s)
    weights = np.ones((len(xs), 1), xs.dtype)
    z = xs.copy()
    run = Run()
    for step in range(steps):
        gradients = np.stack([evaluate(gradient, rank, step, z[rank]) for rank in range(len(xs))])
        matrix = P_of_clock(step)
        xs = mixed(matrix, xs - rate * gradients)
        weights = mixed(matrix, weights)
        z = xs / weights
        run.workers.append(xs)
        run.weights.append(weights[:, 0])
        run.debiased.append(z)
    return run


def choco(
    x0: Array,
    gradient: Gradient,
    W: Array,
    rate: float,
    gamma: float,
    quantise: Callable[[Array], Array],
    steps: int,
    start: Array | None = None,
) -> Run:
    """CHOCO-SGD: gossip with compressed differences; all ranks begin at `x0`, and every x̂ at `start` (0 if None).

    Koloskova, Stich, Jaggi 1902.00340, algorithm 2: x½ = x − η g(x); q = Q(x½ − x̂); x̂ += q;
    x = x½ + γ Σ_j w_ij (x̂_j − x̂_i), with the new x̂. The sum is over j in the order of the ranks.
    """
    ranks = len(W)
    xs = copies(x0, ranks)
    matrix = W.astype(x0.dtype)
    hats = copies(np.zeros_like(x0) if start is None else start.astype(x0.dtype), ranks)
    run = Run()
    for step in range(steps):
        half = np.stack([xs[i] - rate * evaluate(gradient, i, step, xs[i]) for i in range(ranks)])
        hats = np.stack([hats[i] + np.asarray(quantise(half[i] - hats[i]), x0.dtype) for i in range(ranks)])
        xs = np.stack(
            [half[i] + gamma * summed([matrix[i, j] * (hats[j] - hats[i]) for j in range(ranks)]) for i in range(ranks)]
        )
        run.workers.append(xs)
        run.replicas.append(hats)
    return run


# --- local steps ------------------------------------------------------------------------------------------------------


def local_sgd(x0: Array, gradient: Gradient, ranks: int, rate: float, period: int, steps: int) -> Run:
    """Local SGD: x_i −= η g, and after every `period` steps all x_i become their mean; `homes` has these means.

    Stich 1808.07217, algorithm 1.
    """
    xs = copies(x0, ranks)
    run = Run()
    for step in range(steps):
        xs = np.stack([xs[rank] - rate * evaluate(gradient, rank, step, xs[rank]) for rank in range(ranks)])
        if (step + 1) % period == 0:
            mean = summed(xs) / ranks
            xs = copies(mean, ranks)
            run.homes.append(mean)
        run.workers.append(xs)
    return run


def diloco(
    x0: Array,
    gradient: Gradient,
    ranks: int,
    rate: float,
    period: int,
    outer_rate: float,
    outer_momentum: float,
    rounds: int,
) -> Run:
    """DiLoCo with plain SGD inside: every `period` steps Δ = mean(w − x_i), an outer step with it, and x_i = w.

    Douillard et al. 2311.08105, algorithm 1. The outer step is Nesterov's as torch.optim.SGD has it: u = μ u + Δ (first
    u = Δ), w −= outer_rate (Δ + μ u). Steps are counted through the rounds. `workers` has x_i at the end of each round.
    """
    home = copies(x0, ranks)[0]
    velocity = np.zeros_like(home)
    run = Run()
    for turn in range(rounds):
        xs = copies(home, ranks)
        for step in range(turn * period, (turn + 1) * period):
            for rank in range(ranks):
                xs[rank] -= rate * evaluate(gradient, rank, step, xs[rank])
        delta = summed([home - x for x in xs]) / ranks
        velocity = outer_momentum * velocity + delta
        home = home - outer_rate * (delta + outer_momentum * velocity)
        run.homes.append(home)
        run.workers.append(xs)
    return run


def sparseloco(
    x0: Array,
    gradient: Gradient,
    nodes: Sequence[Sequence[int]],
    rate: float,
    period: int,
    outer: tuple[float, float],
    decay: float,
    send: Callable[[Array], Array],
    rounds: int,
    owner: int | None = None,
) -> Run:
    """DiLoCo with compressed differences: each node's m = decay m + sum of w − x_i of its ranks; q = send(m); m −= q;
    Δ = mean of all q; then the outer step of `diloco`.

    Sarfi et al. 2508.15706, algorithm 1, where `send` keeps the largest in two bits and there is no outer momentum.

    Args:
        nodes: the ranks of each.
        owner: of the sum, which it sends by `send` too, and keeps what is left (DoubleSqueeze, Tang et al. 2019);
            None: all nodes send to all.
    """
    home, ranks = copies(x0, 1)[0], sum(map(len, nodes))
    velocity, waiting = np.zeros_like(home), [np.zeros_like(home) for _ in nodes]
    run = Run()
    for turn in range(rounds):
        xs = copies(home, ranks)
        for step in range(turn * period, (turn + 1) * period):
            for rank in range(ranks):
                xs[rank] -= rate * evaluate(gradient, rank, step, xs[rank])
        total = np.zeros_like(home)
        for node, local in enumerate(nodes):
            waiting[node] = decay * waiting[node] + summed([home - xs[rank] for rank in local])
            sent = send(waiting[node])
            waiting[node] -= sent
            total += sent
        if owner is not None:
            sent = send(total)
            waiting[owner] += total - sent
            total = sent
        velocity = outer[1] * velocity + total / ranks
        home = home - outer[0] * (total / ranks + outer[1] * velocity)
        run.homes.append(home)
        run.workers.append(xs)
    return run


def largest(k: int, values: Array) -> Array:
    """The k largest of some values, and zeros."""
    kept: Array = np.where(np.abs(values) >= np.sort(np.abs(values))[-k], values, 0)
    return kept


def two_bits(values: Array) -> Array:
    """Signs times the nearer of two powers of two, the larger of which is next to the largest value; zeros stay."""
    least = 2.0 ** np.floor(np.log2(np.abs(values).max() / 1.5))
    rounded: Array = np.sign(values) * np.where(np.abs(values) >= 1.5 * least, 2 * least, least)
    return rounded


def streaming_diloco(
    x0: Array,
    gradient: Gradient,
    ranks: int,
    rate: float,
    period: int,
    outer_rate: float,
    outer_momentum: float,
    fragments: Sequence[Sequence[int]],
    offsets: Sequence[int],
    delay: int,
    mixing: float,
    steps: int,
) -> Run:
    """Streaming DiLoCo with plain SGD inside: copies after each step, and the outer ones in `homes`.

    Douillard et al. 2501.18512, algorithm 2. Fragment p has the elements `fragments[p]`. At steps t (from 1) with
    t mod `period` = `offsets[p]`, Delta_m = theta - theta_m of these elements is sent; `delay` steps later, which have
    been taken by then, theta takes an outer step with its mean (as in `diloco`), and
    theta_m = mixing theta_m + (1 - mixing) theta.
    """
    xs = copies(x0, ranks)
    home, velocity = x0.copy(), np.zeros_like(x0)
    sent: dict[int, Array] = {}
    run = Run()

    def receive(piece: int) -> None:
        of = list(fragments[piece])
        delta = sent.pop(piece)
        velocity[of] = outer_momentum * velocity[of] + delta
        home[of] -= outer_rate * (delta + outer_momentum * velocity[of])
        for rank in range(ranks):
            xs[rank, of] = mixing * xs[rank, of] + (1 - mixing) * home[of]

    for step in range(1, steps + 1):
        for rank in range(ranks):
            xs[rank] -= rate * evaluate(gradient, rank, step - 1, xs[rank])
        for piece in range(len(fragments)):
            if delay and piece in sent and (step - delay) % period == offsets[piece]:
                receive(piece)
        for piece, of in enumerate(fragments):
            if step % period == offsets[piece]:
                sent[piece] = summed([home[list(of)] - x[list(of)] for x in xs]) / ranks
                if not delay:
                    receive(piece)
        run.homes.append(home.copy())
        run.workers.append(xs.copy())
    return run


def noloco(
    x0: Array,
    gradient: Gradient,
    ranks: int,
    rate: float,
    period: int,
    outer_rate: float,
    outer_momentum: float,
    consensus: float,
    partner: Callable[[int, int], int],
    rounds: int,
) -> Run:
    """NoLoCo with plain SGD inside: copies after each round.

    Kolehmainen et al. 2506.10911, section 3, with groups of two: from phi_i, `period` steps to theta_i, and
    Δ_i = theta_i - phi_i. δ_i = α δ_i + β mean(Δ) - γ (phi_i - mean(phi)), with means over rank i and `partner(i,
    round)`, which may be i itself; phi_i += δ_i, theta_i = phi_i. α is `outer_momentum`, β `outer_rate`, γ `consensus`.
    """
    phis = copies(x0, ranks)
    deltas = np.zeros_like(phis)
    run = Run()
    for turn in range(rounds):
        xs = phis.copy()
        for step in range(turn * period, (turn + 1) * period):
            for rank in range(ranks):
                xs[rank] -= rate * evaluate(gradient, rank, step, xs[rank])
        changes = xs - phis
        pairs = [(rank, partner(rank, turn)) for rank in range(ranks)]
        mean_change = np.stack([(changes[i] + changes[j]) / 2 for i, j in pairs])
        mean_phi = np.stack([(phis[i] + phis[j]) / 2 for i, j in pairs])
        deltas = outer_momentum * deltas + outer_rate * mean_change - consensus * (phis - mean_phi)
        phis = phis + deltas
        run.workers.append(phis)
    return run


def decoupled_diloco(
    x0: Array,
    gradient: Gradient,
    samples: Callable[[int, int], int],
    ranks: int,
    rate: float,
    period: int,
    outer_rate: float,
    outer_momentum: float,
    quorum: int,
    mixing: float,
    order: Sequence[int],
) -> Run:
    """Decoupled DiLoCo with plain SGD inside, one fragment and no grace window; each entry of `order` is a step of that
    learner. Homes after each outer step, copies after each entry.

    Douillard et al. 2604.21428. A learner whose step `period` divides posts Delta = start - theta with the weight
    samples * samples / steps of what it has done since it last posted, unless that is not answered yet. When `quorum`
    of them have posted, the syncer takes an outer step (as in `diloco`) with the weighted mean, times quorum / ranks
    (the paper's deltas are against the syncer's own parameters, and need no factor). Who has contributed
    goes on meanwhile; after its next step it takes the outcome in place of what it has posted, theta_p: theta = theta -
    theta_p + mixing theta_p + (1 - mixing) outcome. `samples(rank, step)` is how many a step has seen.
    """
    xs, starts, was = copies(x0, ranks), copies(x0, ranks), copies(x0, ranks)
    home, velocity = x0.copy(), np.zeros_like(x0)
    steps, seen, posted = [0] * ranks, [0] * ranks, [(0, 0)] * ranks
    slot: dict[int, tuple[Array, float]] = {}
    answers: dict[int, Array] = {}
    run = Run()
    for rank in order:
        xs[rank] -= rate * evaluate(gradient, rank, steps[rank], xs[rank])
        seen[rank] += samples(rank, steps[rank])
        steps[rank] += 1
        if rank in answers:
            starts[rank] = answers.pop(rank)
            xs[rank] += (1 - mixing) * (starts[rank] - was[rank])
        if steps[rank] % period == 0 and rank not in slot:
            count, taken = seen[rank] - posted[rank][0], steps[rank] - posted[rank][1]
            posted[rank], was[rank] = (seen[rank], steps[rank]), xs[rank].copy()
            slot[rank] = starts[rank] - xs[rank], count * count // taken
            run.taken.append(rank)
            if len(slot) == quorum:
                total = sum(weight for _, weight in slot.values())
                parts = [change * (weight / total) for _, (change, weight) in sorted(slot.items())]
                delta = summed(parts) * (quorum / ranks)
                velocity = outer_momentum * velocity + delta
                home = home - outer_rate * (delta + outer_momentum * velocity)
                answers.update(dict.fromkeys(slot, home))
                slot = {}
                run.homes.append(home)
        run.workers.append(xs.copy())
    return run


# --- something to minimise --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quadratic:
    """Least squares over all ranks: f(x) = mean over ranks of ½ (x − c_i)ᵀ H_i (x − c_i); it is itself a `Gradient`.

    Attributes:
        hessians: H_i (ranks, dim, dim), positive definite.
        centres: c_i (ranks, dim), the minimum of each rank alone; they differ, as data of ranks does.
        minimum: of f (dim,).
        noise: standard deviation of the normal noise on each element of a gradient, a function of (seed, rank, step).
        seed: of the noise.
    """

    hessians: Array
    centres: Array
    minimum: Array
    noise: float
    seed: int

    def __call__(self, rank: int, step: int, x: Array) -> Array:
        """The gradient in the element type of x; computed in float64."""
        exact = self.hessians[rank] @ (x.astype(np.float64) - self.centres[rank])
        noise = self.noise * np.random.default_rng((self.seed, rank, step)).standard_normal(len(x))
        inexact: Array = (exact + noise).astype(x.dtype)
        return inexact

    def loss(self, x: Array) -> float:
        """f(x) without noise, above its minimum."""
        difference = x.astype(np.float64) - self.minimum
        return float(difference @ self.hessians.mean(axis=0) @ difference) / 2


def quadratic(ranks: int, dim: int, seed: int, noise: float = 0.1, spread: float = 0.3) -> Quadratic:
    """A noisy least-squares problem: each rank has 8·dim random rows A, H = AᵀA / rows (eigenvalues about .4 to 1.8).

    `spread` is the standard deviation of the ranks' own minima around a common vector; 0 makes all of them the same.
    """
    rng = np.random.default_rng((seed, ranks, dim))
    rows = rng.standard_normal((ranks, 8 * dim, dim))
    hessians = np.einsum("rmi,rmj->rij", rows, rows) / (8 * dim)
    centres = rng.standard_normal(dim) + spread * rng.standard_normal((ranks, dim))
    minimum = np.linalg.solve(hessians.sum(axis=0), np.einsum("rij,rj->i", hessians, centres))
    return Quadratic(hessians, centres, minimum, noise, seed)
