"""Losses with each algorithm whose ranks do not wait for each other at shards: the ranks that are left go on, and
shards and ranks have exactly what numpy says.

Ranks take their steps in turns, as the test says, so that the order in which shards get contributions is known. A rank
is lost before it posts; when some shards have its contribution and others never will; or when it has answers that it
has not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.sync.exchanges import exchanges
from fusion_rt.torch.sync.step_schedule import Schedule
from fusion_rt.torch.sync.synchroniser import Synchroniser
from tests.torch.elastic.jobs import ElasticJob, Hand, Worker, same
from tests.torch.elastic.test_survival import before, once, pretend
from tests.torch.elastic.test_surviving_shards import SHAPES, SMALL, gradient

Array = npt.NDArray[np.float64]
RATE, MOMENTUM = 0.125, 0.5
HOSTS = {"a": 1, "b": 1, "c": 1, "d": 1}
POINTS = ("before it posts", "when some shards have it", "when it has the answers")


# --- what shards are to come to ---------------------------------------------------------------------------------------


class Shard:
    """One tensor's shard by numpy: SGD with momentum, by each on arrival.

    Args:
        ranks: how many there are.

    Attributes:
        kept: what the algorithm keeps besides, by the daemon's names.
    """

    def __init__(self, shape: Sequence[int], ranks: int) -> None:
        self.value, self.velocity = np.zeros(shape), np.zeros(shape)
        self.kept: dict[str, Array] = {}
        self.lost(ranks)

    def lost(self, ranks: int) -> None:
        """So many ranks go on, for all of which the shard is as it is."""
        self.ranks, self.version = ranks, 0
        self.seen: dict[int, int] = {}

    def step(self, mean: Array) -> None:
        self.velocity = MOMENTUM * self.velocity + mean
        self.value = self.value - RATE * self.velocity
        self.version += 1

    def contribute(self, given: Mapping[int, Array]) -> None:
        """Takes gradients that come at the same time, by rank, and answers."""
        for who, one in given.items():
            self.take(who, one)
            self.seen[who] = self.version

    def take(self, who: int, given: Array) -> None:
        self.step(given)

    def leave_out(self, who: int, given: Array, is_answered: bool) -> None:
        """A rank that goes on has left out its step. `is_answered`: it has taken the answers before."""


class Summing(Shard):
    """The sum of all gradients, and nothing else."""

    def take(self, who: int, given: Array) -> None:
        self.value = self.value + given


class Collecting(Shard):
    """Means of so many contributions; `is_aware`: each divided by its staleness."""

    def __init__(self, shape: Sequence[int], ranks: int, target: int, is_aware: bool) -> None:
        super().__init__(shape, ranks)
        self.target, self.is_aware, self.count = target, is_aware, 0
        self.kept["sum"] = np.zeros(shape)

    def take(self, who: int, given: Array) -> None:
        stale = max(self.version - self.seen.get(who, 0), 1) if self.is_aware else 1
        self.kept["sum"] = self.kept["sum"] + given / stale
        self.count += 1
        if self.count == self.target:
            self.step(self.kept["sum"] / self.target)
            self.kept["sum"], self.count = np.zeros(self.value.shape), 0


class Compensating(Shard):
    """Gradients with compensated delay; `is_adaptive`: by their mean square."""

    def __init__(self, shape: Sequence[int], ranks: int, is_adaptive: bool) -> None:
        super().__init__(shape, ranks)
        self.is_adaptive = is_adaptive
        self.kept |= {"square": np.zeros(shape)} if is_adaptive else {}

    def lost(self, ranks: int) -> None:
        super().lost(ranks)
        self.backups: dict[int, Array] = {}
        self.common = self.value

    def take(self, who: int, given: Array) -> None:
        strength: Array | float = VARIANCE
        if self.is_adaptive:
            self.kept["square"] = 0.5 * self.kept["square"] + 0.5 * given * given
            strength = VARIANCE / np.sqrt(self.kept["square"] + 1e-7)
        moved = self.value - self.backups.get(who, self.common)
        self.step(given + strength * given * given * moved)
        self.backups[who] = self.value


class Partial(Shard):
    """Updates without one rank, whose given counts in the next one."""

    def __init__(self, shape: Sequence[int], ranks: int) -> None:
        super().__init__(shape, ranks)
        self.kept["carried"] = np.zeros(shape)

    def contribute(self, given: Mapping[int, Array]) -> None:
        in_time = {who: one for who, one in given.items() if self.seen.get(who, 0) == self.version}
        for who in given.keys() - in_time.keys():
            self.kept["carried"] = self.kept["carried"] + given[who]
        if in_time:
            assert len(in_time) >= self.ranks - 1, "they would wait"
            self.step((sum(in_time.values()) + self.kept["carried"]) / self.ranks)
            self.kept["carried"] = np.zeros(self.value.shape)
        self.seen |= dict.fromkeys(given, self.version)


class Local(Shard):
    """Local steps of SGD with momentum, after each of which a rank posts; it takes the answer a step later."""

    own: dict[int, Any]  # of each rank; the first is its parameter


class Averaging(Local):
    """Elastic averaging.

    Attributes:
        own: of each rank: parameter, momentum, and the answer that it has not taken.
    """

    def __init__(self, shape: Sequence[int], ranks: int, at_once: bool = False) -> None:
        self.own = {who: (np.zeros(shape), np.zeros(shape), np.zeros(shape)) for who in range(ranks)}
        super().__init__(shape, ranks)
        self.at_once = at_once

    def lost(self, ranks: int) -> None:
        super().lost(ranks)
        self.own = {who: (own, velocity, 0 * own) for who, (own, velocity, _) in self.own.items()}

    def contribute(self, given: Mapping[int, Array]) -> None:
        home = self.value
        for who, one in given.items():
            self.leave_out(who, one, is_answered=True)
            own, velocity, _ = self.own[who]
            difference = ALPHA * (own - (home if self.at_once else self.value))
            self.own[who] = own, velocity, difference
            self.value = self.value + difference

    def leave_out(self, who: int, given: Array, is_answered: bool) -> None:
        own, velocity, difference = self.own[who]
        velocity = MOMENTUM * velocity + given
        own = own - RATE * velocity
        self.own[who] = own - difference if is_answered else own, velocity, np.zeros(own.shape)


class Decoupled(Local):
    """Outer steps by each change that comes, which counts its rank's share of them all.

    Attributes:
        own: of each rank: parameter, momentum, the shard in the last answer that it has taken, how far it has moved
            from there by what is not to be posted again, the parameter as it was when it posted last, and the answer
            that it has not taken.
    """

    def __init__(self, shape: Sequence[int], ranks: int) -> None:
        self.own = {who: (*(np.zeros(shape) for _ in range(4)), None, None) for who in range(ranks)}
        super().__init__(shape, ranks)
        self.kept["velocity"] = np.zeros(shape)

    def lost(self, ranks: int) -> None:
        super().lost(ranks)
        for who, (own, velocity, start, moved, was, _) in self.own.items():
            self.own[who] = own, velocity, start, moved if was is None else start - was, None, None

    def contribute(self, given: Mapping[int, Array]) -> None:
        for who, one in given.items():
            self.leave_out(who, one, is_answered=True)
            _, _, start, moved, was, _ = self.own[who]
            change = (start - was - moved) * (1 / self.ranks)
            self.kept["velocity"] = MOMENTUM * self.kept["velocity"] + change
            self.value = self.value - OUTER_RATE * (change + MOMENTUM * self.kept["velocity"])
            self.own[who] = *self.own[who][:5], self.value

    def leave_out(self, who: int, given: Array, is_answered: bool) -> None:
        own, velocity, start, moved, was, answer = self.own[who]
        velocity = MOMENTUM * velocity + given
        own = own - RATE * velocity
        if is_answered and answer is not None:
            start, moved = answer, np.zeros(own.shape)
            own = start - (start - was) * MIX + (own - was)
        if is_answered:  # it posts then, whoever gets that
            was = own
        self.own[who] = own, velocity, start, moved, was, None


VARIANCE, ALPHA, MIX, OUTER_RATE = 1 / 64, 1 / 4, 1 / 2, 1 / 2
ASYNCHRONOUS: dict[str, Callable[[Sequence[int], int], Shard]] = {
    "asp": Shard,
    "hogwild": Shard,
    "softsync(contributions=2)": partial(Collecting, target=2, is_aware=True),
    "collaborative(samples=3)": partial(Collecting, target=3, is_aware=False),
    f"dc_asgd(variance={VARIANCE})": partial(Compensating, is_adaptive=False),
    f"easgd(steps=1, alpha={ALPHA})": Averaging,
    f"ea_wild(steps=1, alpha={ALPHA})": Averaging,
    f"decoupled(steps=1, quorum=1, mix={MIX}, outer_rate={OUTER_RATE}, outer_momentum={MOMENTUM})": Decoupled,
    f"dc_asgd(variance={VARIANCE}, adaptive=True, decay=0.5)": partial(Compensating, is_adaptive=True),
}
# One of each kind; the others, whose mirrors tests/fusiond/shards has, are for -m long.
RARE = ("hogwild", "collaborative", "ea_wild", f"dc_asgd(variance={VARIANCE}, adaptive=True")
KINDS = [pytest.param(text, marks=[pytest.mark.long] * text.startswith(RARE)) for text in ASYNCHRONOUS]


# --- jobs -------------------------------------------------------------------------------------------------------------


def lose_at(worker: Worker, point: str, kind: str, sync: Synchroniser) -> None:
    """Has this rank, or its host, be lost at a point of the step that begins; tells before which tensors' shards have
    its contribution."""

    def die() -> None:
        if kind == "host":
            worker.listen()  # for ever
        raise pretend()

    def between(call: Callable[[], Any]) -> None:
        *sent, _ = sync.plan.buckets
        for bucket in sent:
            bucket.await_result()
        worker.say([slot.name for bucket in sent for slot in bucket.slots])
        die()

    def answered(call: Callable[[], Any]) -> None:
        sync.await_results()
        sync.await_sent()
        worker.say([] if cast(Schedule, sync.schedule).local else list(SHAPES))
        worker.listen()  # until others that are to have theirs have them
        die()

    if point == "before it posts":
        worker.say([])
        if kind == "host":
            die()
        once(sync, "submit", before)
    elif point == "when some shards have it":
        once(sync.plan.buckets[-1], "send", between)
    elif point == "when it has the answers":
        once(sync, "receive", answered)  # of the step before, where these are taken a step later


def plan(sync: Synchroniser) -> None:
    """Makes a plan, which takes all ranks at the same time."""
    sync.begin()
    sync.idle = True
    sync.make_plan()


def residuals_of(optimizer: Any) -> dict[str, Array]:
    """Returns what the codecs of this rank's node have not sent, by tensor."""
    kept = optimizer._sync.checkpoint.carry()
    return {} if kept is None else kept.residuals


def train(worker: Worker, how: Mapping[str, Any]) -> Any:
    """Takes a step whenever it is told so, and tells whether it counts."""
    hvd.init()
    who = hvd.rank()
    parameters = {name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
    plain = torch.optim.SGD(parameters.values(), lr=how.get("rate", RATE), momentum=how.get("momentum", MOMENTUM))
    optimizer = hvd.DistributedOptimizer(
        plain, parameters.items(), compression=how.get("codec", "dense"), algorithm=how["algorithm"]
    )
    state: Any = hvd.elastic.TorchState(torch.nn.ParameterDict(parameters), optimizer, step=0)
    calls = [0]

    @hvd.elastic.run
    def run(state: Any) -> None:
        calls[0] += 1
        while (told := worker.listen()) != "end":
            if told == "plan":
                plan(optimizer._sync)
                worker.say(told)
                continue
            if told == "residuals":
                worker.say(residuals_of(optimizer))
                continue
            optimizer.zero_grad()
            given = gradient(state.step, who)
            if told == "after the loss":
                with pytest.raises(HorovodInternalError):
                    hvd.barrier()
            elif told:
                lose_at(worker, *told, optimizer._sync)
            sum((parameters[name] * given[name]).sum() for name in SHAPES).backward()  # type: ignore[union-attr]
            generation = exchanges.generation
            optimizer.step()
            for bucket in optimizer._sync.plan.buckets:
                with suppress(HorovodInternalError):  # which the next step finds out
                    bucket.await_result()
            state.step += 1
            worker.say(exchanges.generation == generation)

    run(state)
    own = {name: parameter.detach().tolist() for name, parameter in parameters.items()}
    hvd.consensus(optimizer)
    carried = optimizer._sync.checkpoint.carry()
    assert carried is not None
    values = {name: parameter.detach().tolist() for name, parameter in parameters.items()}
    return {"who": who, "calls": calls[0], "own": own, "parameters": values, "homes": carried.homes}


class Turns:
    """The ranks of a job, which take their steps in turns, and what numpy says of these."""

    def __init__(self, job: ElasticJob, shard: Callable[[Sequence[int], int], Shard]) -> None:
        self.job = job
        self.who: dict[str, int] = {hand.host: rank for rank, hand in enumerate(job.hands)}
        self.steps = dict.fromkeys(self.who, 0)
        self.shards = {name: shard(shape, len(job.hands)) for name, shape in SHAPES.items()}
        self.is_local = isinstance(self.shards["first"], Local)
        self.plan()

    def plan(self) -> None:
        self.job.tell("plan")
        assert set(self.job.reports()) == {"plan"}

    def hand(self, host: str) -> Hand:
        return next(hand for hand in self.job.hands if hand.host == host)

    def take(self, turns: str) -> None:
        """Hosts take a step that counts: one after the other, or together, as they are told ("a bc")."""
        for hosts in turns.split():
            for host in hosts:
                self.hand(host).tell(None)
            assert [self.job.report(self.hand(host)) for host in hosts] == [True] * len(hosts)
            self.contribute(hosts, list(SHAPES))

    def contribute(self, hosts: str, names: Sequence[str], is_answered: bool = True) -> None:
        """Notes what numpy says of a step of these hosts, which only these tensors' shards get."""
        given = {self.who[host]: gradient(self.steps[host], self.who[host]) for host in hosts}
        for host in hosts:
            self.steps[host] += 1
        for name, shard in self.shards.items():
            each = {who: gradients[name].numpy() for who, gradients in given.items()}
            if name in names:
                shard.contribute(each)
            else:
                for who, one in each.items():
                    shard.leave_out(who, one, is_answered)

    def lose(self, host: str, point: str, kind: str, together: str = "") -> None:
        """Loses a host in a step, or its worker, which comes back; all others leave out a step.

        Args:
            together: they take that step at the same time.
        """
        self.hand(host).tell((point, kind))
        for other in together:
            self.hand(other).tell(None)
        names = self.job.report(self.hand(host))
        self.contribute(host + together, names, is_answered=point != "when it has the answers")
        are_answered = len(names) == len(SHAPES)
        waiting = "" if self.is_local or are_answered else together
        if are_answered:
            self.go_on(together)
        if point == "when it has the answers":
            self.hand(host).tell("die")
        if kind == "host":
            self.job.kill_daemon(host)
            self.job.kill(self.hand(host))
        if self.is_local and not are_answered:
            self.go_on(together)
        for hand in self.job.living():
            if hand.host not in host + waiting:
                hand.tell("after the loss")
                self.contribute(hand.host, [], is_answered=are_answered or hand.host not in together)
        self.job.change({hand.host: 1 for hand in self.job.living()})
        assert self.job.reports() == [False] * len(self.job.hands), "a step counts that was lost"
        for shard in self.shards.values():
            shard.lost(len(self.job.hands))
        self.plan()

    def go_on(self, hosts: str) -> None:
        """Waits until the step of these hosts has counted."""
        assert all(self.job.report(self.hand(host)) is True for host in hosts)

    def residuals(self, host: str) -> dict[str, Array]:
        """Returns what the codecs of a host have not sent, by tensor."""
        self.hand(host).tell("residuals")
        found: dict[str, Array] = self.job.report(self.hand(host))
        return found

    def end(self) -> list[Any]:
        """Ends the job; returns what its ranks return."""
        self.job.tell("end")
        results = self.job.finish()
        assert [result["calls"] for result in results] == [1] * len(results), "somebody has left its function"
        return results

    def check(self) -> None:
        """Ends the job, and compares."""
        results = self.end()
        parameters = same([result["parameters"] for result in results])
        homes = {name: home for result in results for name, home in result["homes"].items()}
        for name, shard in self.shards.items():
            np.testing.assert_array_equal(parameters[name], shard.value)
            if isinstance(shard, Local):
                for result in results:
                    np.testing.assert_array_equal(result["own"][name], shard.own[result["who"]][0])
            else:
                np.testing.assert_array_equal(homes[name]["optimizer/momentum_buffer"], shard.velocity)
            for key, wanted in shard.kept.items():
                found = homes[name].get(f"aux/{key}", np.zeros(wanted.size))
                np.testing.assert_array_equal(found, wanted.ravel())


@pytest.mark.multiprocess
@pytest.mark.parametrize("algorithm", KINDS)
def test_what_was_answered_counts_whoever_is_lost_and_what_was_not_is_left_out(algorithm: str) -> None:
    with ElasticJob(train, {"algorithm": algorithm}, hosts=HOSTS, environment=SMALL) as job:
        turns = Turns(job, ASYNCHRONOUS[algorithm])
        turns.take("a b c d c a b")
        for point, host in zip(POINTS, "acd", strict=True):
            turns.lose(host, point, "worker")
            turns.take("b d a c c")
        turns.lose("b", "when some shards have it", "host")
        turns.take("a c c d a")
        turns.lose("d", "when it has the answers", "host")
        turns.take("a c c")
        turns.check()


@pytest.mark.multiprocess
def test_what_came_late_to_a_partial_update_is_carried_beyond_a_loss() -> None:
    with ElasticJob(train, {"algorithm": "partial(backup=1)"}, hosts=HOSTS, environment=SMALL) as job:
        turns = Turns(job, Partial)
        turns.take("abc d abd c")
        turns.lose("a", "before it posts", "worker")
        turns.take("bcd a acd b")
        turns.lose("b", "when some shards have it", "worker", together="cd")
        turns.take("abc d")
        turns.lose("b", "when it has the answers", "host", together="ac")
        turns.take("ad c cd a")
        turns.check()


@pytest.mark.multiprocess
def test_differences_that_count_at_once_are_in_all_shards_that_have_those_of_all_ranks() -> None:
    algorithm = f"easgd(steps=1, alpha={ALPHA}, synchronous_home=True)"
    with ElasticJob(train, {"algorithm": algorithm}, hosts=HOSTS, environment=SMALL) as job:
        turns = Turns(job, partial(Averaging, at_once=True))
        turns.take("abcd abcd")
        turns.lose("a", "before it posts", "worker")
        turns.take("abcd abcd")
        turns.lose("c", "when some shards have it", "worker", together="abd")
        turns.take("abcd")
        turns.lose("b", "when some shards have it", "host", together="acd")
        turns.take("acd acd")
        turns.check()


@pytest.mark.multiprocess
def test_what_a_codec_has_not_sent_is_sent_after_a_loss_but_for_that_of_the_lost_host() -> None:
    how = {"algorithm": "asp", "codec": "topk(density=0.25, minimum=2)", "rate": 1.0, "momentum": 0.0}
    with ElasticJob(train, how, hosts=HOSTS, environment=SMALL) as job:
        turns = Turns(job, Summing)
        turns.take("a b c d c a b")
        for point, host in zip(POINTS, "acd", strict=True):
            turns.lose(host, point, "worker")
            turns.take("b d a c c")
        lost = turns.residuals("b")
        turns.lose("b", "before it posts", "host")
        turns.take("a c c d a")
        owed = [lost, *(turns.residuals(host) for host in "acd")]
        results = turns.end()
    parameters = same([result["parameters"] for result in results])
    assert all(any(np.any(value) for value in each.values()) for each in owed), "a codec has sent all"
    for name, shard in turns.shards.items():
        waits = sum(each.get(name, np.zeros(shard.value.size)) for each in owed)
        np.testing.assert_array_equal(waits - np.ravel(parameters[name]), shard.value.ravel())
