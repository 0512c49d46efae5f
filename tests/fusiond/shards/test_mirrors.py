"""Shards that outlive their formation, and their node by a mirror of each update, in seeded interleavings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.local import array_codec
from fusiond.engine.keeper import Left
from fusiond.shards import mirrors
from fusiond.shards.mirrors import ToMirror
from tests.for_each import for_each
from tests.fusiond.algorithms.training import SGD, Workers
from tests.fusiond.simulation import Array, SimulatedJob

MOMENTUM = wire.OptimizerSpec("SGD", ('{"momentum": 0.5}',))
ALL = (1 << 48) - 1
RATE = 0.25
State = dict[str, Array]


def job(layout: list[int], seed: int) -> SimulatedJob:
    return SimulatedJob(layout, seed, chunk_bytes=96, connections=3)


def image(state: State) -> memoryview:
    found = np.empty(array_codec.nbytes_of(state), np.uint8)
    array_codec.write(state, found)
    return found.data


def gradient(rank: int, step: int, dim: int) -> Array:
    """Small whole numbers, so that sums are exact."""
    return np.random.default_rng([rank, step]).integers(-8, 9, dim).astype(np.float64)


def step_until(workers: Workers, choice: random.Random) -> None:
    """Lets the job go on until something has happened that makes a difference to who knows what: a home has made an
    update, or a rank has got an answer, or all of them."""
    homes = [hosted.home for node in workers.job.nodes for hosted in node.engine.homes._server]
    ranks = list(workers._handles)
    updates, waiting = [home.version for home in homes], [rank for rank in ranks if workers.waits(rank)]
    answers = sum(map(len, workers.job.answers.values()))
    happened = choice.choice(
        [
            lambda: [home.version for home in homes] != updates,
            lambda: sum(map(len, workers.job.answers.values())) > answers,
            lambda: any(not workers.waits(rank) for rank in waiting),
        ]
    )
    while not happened() and workers.job.step():
        pass
    for _ in range(choice.randrange(3)):
        workers.job.step()


def lose(workers: Workers) -> None:
    """Has all nodes' formation end."""
    for node in workers.job.nodes:
        node.engine.fail_job("a node is lost")
    while workers.job.deferred:  # threads end what they are at
        workers.job.deferred.popleft()()


def recalled(workers: Workers, nodes: Iterable[int], clock: int) -> dict[int, list[State]]:
    """Returns all states of each bucket that these nodes have kept."""
    found: dict[int, list[State]] = {bucket.index: [] for bucket in workers.plan.buckets}
    for node in nodes:
        states: dict[int, State] = {}
        for key, value in recall(workers, node, clock).items():
            kind, bucket, _, name = key.split(":", 3)
            if kind != "sender":
                states.setdefault(int(bucket), {})[name] = value
        for index, state in states.items():
            found[index].append(state)
    return found


def recall(workers: Workers, node: int, clock: int) -> State:
    """Returns all that a node has kept."""
    ended = workers.job.nodes[node].engine.homes.ended.get(workers.plan.id)
    return {} if ended is None else ended.saved_at(clock)


def residual(workers: Workers, clock: int) -> Array:
    """Returns the sum of what all ranks have not sent (elements of the vector,)."""
    total = np.zeros(sum(tensor.numel for bucket in workers.plan.buckets for tensor in bucket.tensors))
    for node in range(len(workers.job.nodes)):
        for key, value in recall(workers, node, clock).items():
            if ":codec/residual/" in key:
                start = workers._offsets[key.rpartition("/")[2]]
                total[start : start + len(value)] += value
    return total


def elements(workers: Workers, bucket: wire.Bucket, vector: Array) -> Array:
    """The elements of a bucket, of a vector of all."""
    value = np.zeros(bucket.numel)
    for tensor in bucket.tensors:
        start = workers._offsets[tensor.name]
        value[tensor.start : tensor.start + tensor.numel] = vector[start : start + tensor.numel]
    return value


def by_numpy(start: Array, steps: int, ranks: int) -> tuple[Array, Array]:
    """Value and momentum after so many steps."""
    value, velocity = start.copy(), np.zeros_like(start)
    for step in range(steps):
        velocity = 0.5 * velocity + sum(gradient(rank, step, len(start)) for rank in range(ranks)) / ranks
        value -= RATE * velocity
    return value, velocity


@for_each("seed", range(40))
def test_whichever_node_is_lost_all_shards_have_the_step_that_somebody_has_or_none_has_it(seed: int) -> None:
    choice = random.Random(seed)
    layout = choice.choice([[1, 1], [2, 2], [1, 1, 2], [1, 1, 1, 1]])
    start = np.arange(24.0)
    simulated = job(layout, seed)
    workers = Workers(layout, "bsp", start, RATE, MOMENTUM, job=simulated, survives=True)
    steps = choice.randrange(4)
    for step in range(steps):
        for rank in simulated.ranks:
            workers.post(rank, gradient(rank, step, len(start)), settle=False)
        simulated.settle()
        for rank in simulated.ranks:
            workers.collect(rank)
    for rank in choice.sample(list(simulated.ranks), choice.choice([len(simulated.ranks), len(simulated.ranks) - 1])):
        workers.post(rank, gradient(rank, steps, len(start)), settle=False)
    step_until(workers, choice)
    dead = choice.randrange(len(layout))
    living = [node for node in range(len(layout)) if node != dead]
    ranks = [rank for rank in simulated.ranks if simulated.topology.node_of(rank) != dead]
    has_all = any(rank in workers._handles and not workers.waits(rank) for rank in ranks)
    lose(workers)
    clock = steps + has_all
    value, velocity = by_numpy(start, clock, simulated.size)
    for index, states in recalled(workers, living, clock).items():
        bucket = workers.plan.buckets[index]
        assert states, f"nobody knows what bucket {index} had after {clock} steps"
        for state in states:
            assert (state["value"] == elements(workers, bucket, value)).all()
            momenta = [entry for key, entry in sorted(state.items()) if key.endswith("momentum_buffer")]
            assert bool(momenta) == bool(clock)
            for tensor, momentum in zip(sorted(bucket.tensors, key=lambda t: t.group), momenta, strict=bool(clock)):
                at = workers._offsets[tensor.name]
                assert (momentum.ravel() == velocity[at : at + tensor.numel]).all()


def applied(state: State, ranks: int) -> Array:
    return -state["value"]


def collected(state: State, ranks: int) -> Array:
    """Two contributions make a mean."""
    return -2 * state["value"] + state.get("aux/sum", np.zeros(1))


def carried(state: State, ranks: int) -> Array:
    """The sum of an update is divided by all ranks; a contribution that is late waits for the next one."""
    return np.rint(-ranks * state["value"] + state.get("aux/carried", np.zeros(1)))


@for_each("seed", range(30))
@pytest.mark.parametrize(("codec", "rounding"), [("topk(density=0.25, minimum=2)", 0), ("int8", 1e-4)])
def test_a_step_that_is_left_out_takes_back_what_codecs_have_sent_of_it(codec: str, rounding: float, seed: int) -> None:
    """All gradients of steps that count are in the shards, or wait to be sent; none of the step that is left out is."""
    choice = random.Random(seed)
    layout = choice.choice([[1, 1], [2, 2], [1, 1, 1, 1]])
    simulated = job(layout, seed)
    workers = Workers(layout, "bsp", np.zeros(24), 1.0, SGD, codec, job=simulated, survives=True)
    steps = choice.randrange(4)
    for step in range(steps + 1):
        posting = list(simulated.ranks)
        if step == steps:
            posting = choice.sample(posting, choice.choice([len(posting), len(posting) - 1]))
        for rank in posting:
            workers.post(rank, gradient(rank, step, 24), settle=False)
        if step < steps:
            simulated.settle()
            for rank in simulated.ranks:
                workers.collect(rank)
    step_until(workers, choice)
    dead = choice.randrange(len(layout))
    living = [node for node in range(len(layout)) if node != dead]
    has_all = any(rank in workers._handles and not workers.waits(rank) for rank in simulated.ranks)
    lose(workers)
    clock = steps + has_all
    given = sum((gradient(rank, step, 24) for rank in simulated.ranks for step in range(clock)), np.zeros(24))
    owed = residual(workers, clock)
    for index, states in recalled(workers, living, clock).items():
        bucket = workers.plan.buckets[index]
        assert states, f"nobody knows what bucket {index} had after {clock} steps"
        for state in states:
            found = elements(workers, bucket, owed) - simulated.size * state["value"]
            np.testing.assert_allclose(found, elements(workers, bucket, given), rtol=0, atol=rounding)


@for_each("seed", range(30))
@pytest.mark.parametrize(
    ("algorithm", "bits"),
    [
        ("asp", applied),
        ("ssp(staleness=2)", applied),
        ("hogwild", applied),
        ("dc_asgd(variance=0.0)", applied),
        ("softsync(contributions=2, aware=False)", collected),
        ("collaborative(samples=2)", collected),
        ("partial(backup=1)", carried),
    ],
)
def test_what_was_answered_counts_after_a_loss_and_nothing_counts_twice(
    algorithm: str, bits: Callable[[State, int], Array], seed: int
) -> None:
    """Contribution i is 2^i in all elements: the bits of what was applied say which ones those are."""
    choice = random.Random(seed)
    layout = choice.choice([[1, 1], [2, 1, 1]])
    start = np.zeros(24)
    simulated = job(layout, seed)
    workers = Workers(layout, algorithm, start, 1.0, SGD, job=simulated, survives=True)
    posted, answered, latest = 0, 0, dict[int, int]()
    for number in range(choice.randrange(1, 40)):
        rank = choice.choice(list(simulated.ranks))
        if not workers.waits(rank):
            if rank in workers._handles:
                workers.collect(rank)
                answered |= latest[rank]
            latest[rank] = 1 << number
            posted |= 1 << number
            workers.post(rank, np.full(24, float(1 << number)), settle=False)
        for _ in range(choice.randrange(60)):
            simulated.step()
    if any(workers.waits(rank) for rank in simulated.ranks):
        step_until(workers, choice)
    for rank in list(workers._handles):
        if not workers.waits(rank):
            answered |= latest[rank]
    dead = choice.randrange(len(layout))
    lose(workers)
    for index, states in recalled(workers, [n for n in range(len(layout)) if n != dead], ALL).items():
        assert states, f"nobody knows what bucket {index} had"
        for state in states:
            (counted,) = {int(value) for value in bits(state, simulated.size)}
            assert not answered & ~counted, "a worker was told of it"
            assert not counted & ~posted


@for_each("seed", range(6))
@pytest.mark.parametrize(
    "algorithm",
    [
        "bsp", "asp(aware=True)", "ssp(staleness=2)", "softsync(contributions=2)", "collaborative(samples=3)",
        "dc_asgd(variance=0.5)", "dc_asgd(variance=0.5, adaptive=True)", "hogwild", "partial(backup=1)", "easgd",
        "easgd(synchronous_home=True)", "ea_wild", "decoupled(quorum=2)",
    ],
)  # fmt: skip
def test_a_mirror_has_all_that_its_shard_has_to_the_bit(algorithm: str, seed: int) -> None:
    """Whoever contributes, and asks, in whatever order: value, momenta, and what the algorithm keeps besides."""
    choice = random.Random(seed)
    layout = choice.choice([[1, 1], [2, 1], [1, 1, 1]])
    start = np.linspace(-1, 1, 24)
    workers = Workers(layout, algorithm, start, RATE, MOMENTUM, job=job(layout, seed), survives=True)
    numbers = np.random.default_rng(seed)
    for _ in range(30):
        rank = choice.choice(list(workers.job.ranks))
        if not workers.waits(rank):
            if rank in workers._handles:
                workers.collect(rank)
            if choice.random() < 0.2 and workers.spec.steps_at_home:
                workers.ask(rank)
            workers.post(rank, numbers.normal(size=24), settle=False)
        for _ in range(choice.randrange(40)):
            workers.job.step()
    workers.job.settle()
    lose(workers)
    for states in recalled(workers, range(len(layout)), ALL).values():
        home, mirror = states
        home.pop("aux/arrivals", None)  # by the clock of its node
        assert home.keys() == mirror.keys()
        assert all((home[key] == mirror[key]).all() for key in home), "they differ"


def test_a_mirror_has_what_its_shard_was_set_to_and_its_momentum() -> None:
    start = np.arange(24.0)
    workers = Workers([1, 1], "bsp", start, RATE, MOMENTUM, survives=True)
    for step in range(2):
        for rank in (0, 1):
            workers.post(rank, gradient(rank, step, 24), settle=False)
        workers.job.settle()
        for rank in (0, 1):
            workers.collect(rank)
    for place, of in workers.places(0):
        place[:] = start[of] + 7
    for bucket in workers.plan.buckets:
        workers._ready(0, bucket.index, 0, "reseed")
    workers.job.settle()
    lose(workers)
    _, velocity = by_numpy(start, 2, 2)
    for index, states in recalled(workers, (0, 1), 2).items():
        bucket = workers.plan.buckets[index]
        assert len(states) == 2, "home and mirror"
        for state in states:
            assert (state["value"] == elements(workers, bucket, start + 7)).all()
            found = np.concatenate([entry.ravel() for key, entry in state.items() if key.endswith("momentum_buffer")])
            assert sorted(found) == sorted(np.concatenate([velocity[slice(*span)] for span in spans(workers, bucket)]))


def spans(workers: Workers, bucket: wire.Bucket) -> list[tuple[int, int]]:
    starts = [workers._offsets[tensor.name] for tensor in bucket.tensors]
    return [(start, start + tensor.numel) for start, tensor in zip(starts, bucket.tensors, strict=True)]


def test_when_two_neighbours_are_lost_their_shards_are_gone() -> None:
    workers = Workers([1, 1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM, survives=True)
    lose(workers)
    first = workers.plan.homes[0]
    left = [node for node in range(3) if node not in (first, (first + 1) % 3)]
    assert not recalled(workers, left, 0)[0]


def test_what_was_kept_is_of_one_plan_and_is_dropped_with_the_next_one() -> None:
    left: list[Left] = [{}, {}]
    ended = SimulatedJob([1, 1], left=left)
    workers = Workers([1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM, job=ended, survives=True)
    lose(workers)
    for node in ended.nodes:
        node.engine.keeper.remember()
    job = SimulatedJob([1, 1], left=left)
    keeper = job.nodes[0].engine.keeper
    id = workers.plan.id
    assert keeper.recall((0, "opt"), wire.EndedPlan(0, id, 0))
    assert not keeper.recall((0, "opt"), wire.EndedPlan(1, id, 0))
    assert not keeper.recall((0, "opt"), wire.EndedPlan(0, id + 1, 0))
    assert not keeper.recall((0, "other"), wire.EndedPlan(0, id, 0))
    Workers([1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM, job=job, survives=True)
    assert not keeper.recall((0, "opt"), wire.EndedPlan(0, id, 0))


def test_shards_that_need_not_survive_tell_nobody() -> None:
    workers = Workers([1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM)
    for rank in (0, 1):
        workers.post(rank, gradient(rank, 0, 24))
    assert not workers.job.messages(wire.PieceTaken)
    lose(workers)
    assert not any(recalled(workers, (0, 1), ALL).values())


# --- what no shard would send -----------------------------------------------------------------------------------------


def update_for(workers: Workers, node: int) -> tuple[wire.Piece, memoryview]:
    """An update of the other node's first shard to its mirror on a node of a job of two."""
    bucket = workers.plan.buckets[workers.plan.homes.index(1 - node)]
    payload = memoryview(np.ones(bucket.numel).tobytes())
    piece = wire.Piece(0, workers.plan.id, bucket.index, "update", -1, 0, 2, 1, len(payload), rates=(RATE,))
    return piece, payload


@for_each(
    ("changes", "why"),
    [
        ({"nbytes": 8}, "has 8 bytes instead of"),
        ({"kind": "image", "nbytes": 1 << 40}, "and .* is the most"),
        ({"rates": (float("inf"),)}, "its learning rates .inf. are not all finite"),
        ({"rates": ()}, "it has 0 learning rates for at least 1 parameter groups"),
        ({"samples": 0}, "has 64 bytes, and 0 is the most"),
        ({"home": 0}, "no update of rank 0"),
        ({"clock": 1}, "message 1 of bucket . came to its mirror, which has 1"),
        ({"clock": 1 << 40}, "message 1099511627776 of bucket . came to its mirror, which has 1"),
    ],
)
def test_a_message_that_no_shard_would_send_its_mirror_is_refused(changes: dict[str, object], why: str) -> None:
    workers = Workers([1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM, survives=True)
    piece, payload = update_for(workers, 0)
    with pytest.raises(WireError, match=why):
        workers.job.nodes[0].engine.homes.peer(1, replace(piece, **changes), payload)


def test_a_node_that_is_no_mirror_of_a_shard_takes_no_update_of_it() -> None:
    workers = Workers([1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM)
    piece, payload = update_for(workers, 0)
    with pytest.raises(WireError, match="no update of rank 0"):
        workers.job.nodes[0].engine.homes.peer(1, piece, payload)
    bucket = workers.plan.homes.index(0)
    with pytest.raises(WireError, match="it has no mirror"):
        workers.job.nodes[0].engine.homes._server.mirrored(
            1, wire.PieceTaken(0, workers.plan.id, bucket, "update", 1, 0)
        )


@for_each(
    ("image", "why"),
    [
        (memoryview(bytes(64)), "damaged"),
        (image({"value": np.zeros(3)}), "has 8 elements, and 3 were saved"),
        (image({"value": np.zeros(8, np.float32)}), "does not have its 8 elements"),
        (
            image({"value": np.zeros(8), "other": np.zeros(1)}),
            "'other' of bucket . cannot be in a saved state",
        ),
        (image({"value": np.zeros(8), "optimizer/x": np.zeros(1)}), "optimizer"),
    ],
)
def test_an_image_that_no_shard_has_is_refused_and_nothing_is_known_then(image: memoryview, why: str) -> None:
    workers = Workers([1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM, survives=True)
    found = [mirror for node in workers.job.nodes for mirror in node.engine.homes._mirrors.of(workers.plan.id)]
    mirror = next(mirror for mirror in found if mirror.bucket.numel == 8)
    with pytest.raises(FusionError, match=why):
        mirror.take(ToMirror("image", 0, [image]))
    assert mirror.state_at(ALL) is None


def test_mirrors_are_on_the_next_node_that_has_ranks() -> None:
    workers = Workers([1, 0, 1, 1], "bsp", np.arange(24.0), RATE, MOMENTUM, survives=True)
    state = next(iter(workers.job.nodes[0].engine.homes._plans.values()))
    assert [mirrors.mirror_of(state, node) for node in range(4)] == [2, 2, 3, 0]
    alone = Workers([2], "bsp", np.arange(24.0), RATE, MOMENTUM, survives=True)
    assert mirrors.mirror_of(next(iter(alone.job.nodes[0].engine.homes._plans.values())), 0) is None
