"""Ranks that are lost between exchanges, and one that returns with the state: each algorithm goes on, in virtual time.

After a loss the ranks that are left form a job of their own, as an elastic job does: replicas begin with what their
workers have; shards begin with what mirrors have of them, by `fusion_rt.torch.sync.carried`; an outer step goes on with
its start and momentum. Judged are the mean of those that are there, their agreement without
gradients, and where training ends: at the optimum of the ranks that are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fusion_rt import algorithms, codecs
from fusion_rt.core.errors import FusionError
from fusion_rt.torch.sync import carried
from tests.fusiond.algorithms.training import Workers
from tests.fusiond.simulation import Array
from tests.properties.test_local_steps import Learners
from tests.reference import algorithms as published

DIM, RATE = 30, 0.1
LAYOUTS = {6: [2, 2, 2], 5: [2, 2, 1], 4: [2, 2]}  # by the number of ranks: a host is lost with one of its ranks or two
PROBLEM = published.quadratic(6, DIM, seed=7, noise=0.0, spread=1.0)
CODECS = ("dense", "topk(density=0.3, minimum=2)", "int4(minimum=2)", "fp16")
AT_HOMES = (
    *("bsp", "asp", "hogwild", "ssp(staleness=1)", "softsync(contributions=2)", "softsync(contributions=6)"),
    *("dc_asgd", "partial(backup=1)", "collaborative(samples=4)", "easgd(steps=1)", "ea_wild(steps=1)"),
    *("easgd(steps=1, synchronous_home=True)", "dpsgd", "dpsgd(topology='exponential')", "sgp", "choco"),
    *("dpsgd(topology='bipartite')", "dpsgd(topology='hypercube')", "adpsgd(topology='bipartite')"),
)
LOCAL = (
    *("local_sgd(steps=2)", "diloco(steps=2, outer_momentum=0.3)", "noloco(steps=2, outer_momentum=0.3)"),
    *("diloco(steps=2, outer_momentum=0.3, fragments=2, delay=1, mix=0.25)", "decoupled(steps=2, outer_momentum=0.3)"),
)
REFUSED = {"softsync(contributions=6)": (5, 4), "dpsgd(topology='hypercube')": (6, 5)}
"""Numbers of ranks that cannot go on by an algorithm; all others can."""
START = 0.5  # from the optimum of all, in each element
NEAR = 0.15  # to an optimum; those of six, five and four ranks are further apart
JOURNEYS = ((6, 5, 6), (6, 4, 5))  # numbers of ranks: as many as before return, or fewer


def refusal(text: str, codec: str, ranks: int) -> str:
    """The sentence by which so many ranks cannot do this; empty if they can."""
    try:
        algorithms.check_use(algorithms.parse(text), codecs.parse(codec), "average", ranks)
    except FusionError as error:
        return str(error)
    return ""


def optimum(members: Sequence[int]) -> Array:
    """Where the mean of these ranks' losses is least."""
    pulls = [PROBLEM.hessians[who] @ PROBLEM.centres[who] for who in members]
    return np.linalg.solve(sum(PROBLEM.hessians[who] for who in members), sum(pulls))


def next_members(members: Sequence[int], count: int) -> list[int]:
    """The last ranks are lost, or the first ones that are not there return."""
    back = [who for who in range(6) if who not in members]
    return sorted([*members, *back[: count - len(members)]]) if count > len(members) else list(members[:count])


# --- at homes ---------------------------------------------------------------------------------------------------------


def formed(text: str, codec: str, xs: Sequence[Array], homes: dict[str, carried.Arrays]) -> Workers:
    """A job of ranks with these parameters, whose shards begin with what is known of them."""
    workers = Workers(LAYOUTS[len(xs)], text, xs[0], RATE, codec=codec)
    workers.x = [x.copy() for x in xs]
    values = {name: xs[0][workers.span_of(name)] for name in workers.sizes}
    for node in workers.job.nodes:
        state: dict[str, Array] = {}
        for bucket, home in zip(workers.plan.buckets, workers.plan.homes, strict=False):
            if home == node.node and homes:
                state |= carried.home_state(bucket, len(xs), homes, values)
        if state:
            workers.job.load_homes(node.node, state)
    workers.job.settle()
    if homes and workers.spec.signal is algorithms.Signal.GRADIENT:
        for rank in workers.job.ranks:
            workers.ask(rank)
    return workers


def homes_of(workers: Workers) -> dict[str, carried.Arrays]:
    """What the mirrors of all shards have of them."""
    saved = workers.job.saved_homes(workers.plan)
    return carried.united([carried.collect(state, workers.plan).homes for state in saved])


def trained(workers: Workers, members: Sequence[int], rate: float, rounds: int) -> None:
    """All ranks contribute in each round, in any order; replicas and elastic homes get what a local step has made."""
    posts_gradients = workers.spec.signal is algorithms.Signal.GRADIENT
    workers.rate, choose = rate, np.random.default_rng(rounds)
    for _ in range(rounds):
        for rank in choose.permutation(len(members)).tolist():
            if workers.waits(rank):
                continue
            gradient = PROBLEM(members[rank], 0, workers.x[rank])
            if not posts_gradients:
                workers.x[rank] = workers.x[rank] - workers.x[rank].dtype.type(rate) * gradient
            workers.post(rank, gradient if posts_gradients else workers.x[rank])
            for other in workers.answered():
                workers.collect(other)
        workers.job.pass_time(1)
        for other in workers.answered():
            workers.collect(other)


def total(workers: Workers) -> Array:
    """The sum of all copies, with the elastic home."""
    elastic = workers.spec.at_shards
    return np.sum(workers.x, axis=0, dtype=np.float64) + (workers.home() if elastic else 0.0)


def agree(workers: Workers, members: Sequence[int], where: str) -> None:
    """Without gradients ranks keep their mean, or stay at the home, and come together."""
    apart = float(np.ptp(np.stack(workers.x), axis=0).max())
    if workers.spec.signal is algorithms.Signal.GRADIENT:
        begun = workers.home()
        assert apart == 0, f"{where}: the ranks begin {apart} apart"
        np.testing.assert_array_equal(workers.x[0], begun, err_msg=where)
        return
    begun = total(workers)
    for _ in range(12):
        for rank in workers.job.ranks:
            workers.post(rank, workers.x[rank], settle=False)
        workers.job.settle()
        for rank in workers.answered():
            workers.collect(rank)
    owed = 0.0
    if algorithms.parse(str(workers.spec)).name == "adpsgd":
        kept = np.sum([workers.replica(rank) for rank in workers.job.ranks], axis=0, dtype=np.float64)
        owed = kept - np.sum(workers.x, axis=0, dtype=np.float64)
    scale = max(1.0, float(np.abs(begun).max()))
    np.testing.assert_allclose(total(workers) + owed, begun, rtol=0, atol=1e-3 * scale, err_msg=where)
    left = float(np.ptp(np.stack(workers.x), axis=0).max())
    assert left < 0.8 * apart + 1e-3, f"{where}: {left} of {apart} between the ranks is left"


@pytest.mark.parametrize("text", AT_HOMES)
def test_ranks_that_are_left_and_one_that_returns_go_on_at_homes(text: str) -> None:
    spec = algorithms.parse(text)
    fitting = [codec for codec in CODECS if not refusal(text, codec, 6)] or ["dense"]
    for journey in [JOURNEYS[AT_HOMES.index(text) % 2]]:
        codec = fitting[AT_HOMES.index(text) % len(fitting)]
        members, xs, homes = (
            list(range(6)),
            [(optimum(range(6)) + START).astype(np.float32)] * 6,
            dict[str, carried.Arrays](),
        )
        for part, count in enumerate(journey):
            where = f"{text}, {codec}, part {part} of {journey}"
            if refusal(text, codec, count):
                assert count in REFUSED[text]
                break
            if part:
                kept = [xs[members.index(who)] for who in next_members(members, count) if who in members]
                members = next_members(members, count)
                xs = [*kept, *[kept[0]] * (count - len(kept))]  # one that returns gets the first one's
            workers = formed(text, codec, xs, homes)
            agree(workers, members, where)
            each = 1 if spec.name in ("bsp", "partial", "softsync", "collaborative") else count
            rate = RATE if not spec.at_shards or spec.signal is not algorithms.Signal.GRADIENT else RATE / each
            trained(workers, members, rate, 40)
            ends = workers.home() if spec.at_shards else np.mean(workers.x, axis=0)
            off = float(np.abs(ends - optimum(members)).max())
            assert off < NEAR, f"{where}: ends {off} from the optimum"
            xs, homes = workers.x, homes_of(workers) if spec.at_shards else {}


# --- local steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", LOCAL)
def test_ranks_that_are_left_and_one_that_returns_go_on_with_outer_steps(text: str) -> None:
    for journey in [JOURNEYS[LOCAL.index(text) % 2]]:
        members, before, homes = list(range(6)), None, dict[str, carried.Arrays]()
        for part, count in enumerate(journey):
            where = f"{text}, part {part} of {journey}"
            slots = None
            if part:
                assert before is not None
                there = next_members(members, count)
                slots = [before.slots[members.index(who)] if who in members else before.slots[0] for who in there]
                members = there
            learners = Learners(
                LAYOUTS[count],
                text,
                optimum(range(6)) + START,
                lambda rank, step, x, of=tuple(members): PROBLEM(of[rank], 0, x),
            )
            for rank, slot in enumerate(slots or ()):
                for name, value in vars(slot).items():
                    setattr(learners.slots[rank], name, None if value is None else value.clone())
                learners.slots[rank].moved = learners.slots[rank].posted = None
                learners.x[rank] = learners.slots[rank].parameter.numpy()
            if homes:
                values = {name: np.ones(size) for name, size in learners.workers.sizes.items()}
                for node in learners.workers.job.nodes:
                    state: dict[str, Array] = {}
                    for bucket, home in zip(learners.workers.plan.buckets, learners.workers.plan.homes, strict=True):
                        if home == node.node:
                            state |= carried.home_state(bucket, count, homes, values)
                    learners.workers.job.load_homes(node.node, state)
                learners.workers.job.settle()
            for _ in range(60):
                learners.step(*range(count))
                if learners.spec.at_shards:
                    learners.workers.job.pass_time(1)
            off = float(np.abs(np.mean(learners.x, axis=0) - optimum(members)).max())
            assert off < NEAR + 0.1, f"{where}: ends {off} from the optimum"  # outer steps are larger
            apart = float(np.ptp(np.stack(learners.x), axis=0).max())
            assert apart < 1.0 or learners.spec.at_shards, f"{where}: the ranks are {apart} apart"
            before = learners
            homes = homes_of(learners.workers) if learners.spec.at_shards else {}


def test_an_algorithm_that_so_many_ranks_cannot_go_on_by_says_so() -> None:
    found: dict[str, tuple[int, ...]] = {}
    for text in (*AT_HOMES, *LOCAL):
        for count in LAYOUTS:
            if sentence := refusal(text, "topk" if text == "choco" else "dense", count):
                print(f"refused with {count} ranks: {text}: {sentence}")
                assert "ranks" in sentence
                found[text] = (*found.get(text, ()), count)
    assert found == REFUSED


def test_optima_of_those_that_are_there_are_told_from_each_other() -> None:
    all_of_them, five, four = (optimum(range(count)) for count in (6, 5, 4))
    for one, other in ((all_of_them, five), (five, four), (all_of_them, four)):
        assert np.abs(one - other).max() > 2 * NEAR
