"""Which commit counts after a loss in the midst of one."""

from __future__ import annotations

import random

import fusion_rt.torch as hvd
from fusion_rt.torch.elastic.commits import Commits, agreed
from tests.for_each import for_each
from tests.torch.elastic.jobs import ElasticJob, Worker, same
from tests.torch.elastic.test_carried import assert_equal, by_numpy, train


@for_each("seed", range(200))
def test_wherever_a_loss_interrupts_a_commit_all_who_are_left_have_the_one_they_agree_on(seed: int) -> None:
    """Ranks save, exchange mirrors, and meet, each at its own pace; of the operations of all ranks a rank is through
    when all have begun them, and if one is lost the others may be through already."""
    random_ = random.Random(seed)
    size = random_.randint(2, 5)
    commits = [Commits() for _ in range(size)]
    for each in commits:
        each.settle(7)
    done = [0] * size  # of: begun, saved, mirrors exchanged, complete, met
    lost = random_.randrange(size)
    for _ in range(random_.randint(0, 5 * size)):
        rank = random_.randrange(size)
        step = done[rank] + 1
        if step in (3, 5) and any(other < step - 1 for other in done):
            continue  # not all have begun this operation
        if step == 1:
            commits[rank].begin()
        elif step == 4:
            commits[rank].complete()
        elif step == 5:
            commits[rank].settle(commits[rank].last)
        done[rank] = min(step, 5)
    left = [each for rank, each in enumerate(commits) if rank != lost]
    number = agreed([each.held for each in left], random_.randrange(len(left)))
    assert all(number in each.held for each in left)
    if number == 8:
        others = [step for rank, step in enumerate(done) if rank != lost]
        assert min(others) >= 4, "all have their part of it, and what was mirrored"


def test_who_is_new_or_was_away_has_no_say() -> None:
    assert agreed([(), ()], 0) == 0
    assert agreed([(), (4, 5), (5,)], 1) == 5
    assert agreed([(9,), (4,), ()], 0) == 9
    assert agreed([(9, 10), (4,), (9,)], 0) == 9


class Pausing(hvd.elastic.TorchState):
    """Says so when it has saved the third commit, and waits for a word before mirrors are exchanged."""

    worker: Worker

    def _mirror(self) -> None:
        if len(self.trace) == 3 and hvd.size() == 3:
            self.worker.say("saved")
            self.worker.listen()
        super()._mirror()


def train_pausing(worker: Worker, *args: object) -> object:
    Pausing.worker = worker
    hvd.elastic.TorchState = Pausing  # type: ignore[misc]
    return train(worker, *args)  # type: ignore[arg-type]


def test_shards_of_a_host_that_dies_in_a_commit_are_those_of_the_commit_from_which_all_go_on() -> None:
    """Its mirror is of the commit before, so that all go back to that, and take the third step again."""
    how = {"algorithm": "bsp"}
    with ElasticJob(train_pausing, 6, (), how, 0.5, hosts={"a": 1, "b": 1, "c": 1}) as job:
        job.reports()
        job.tell("begin")
        assert job.reports() == ["saved"] * 3
        job.kill(job.hands[1])
        job.kill_daemon("b")
        job.tell("go on")
        job.change({"a": 1, "c": 1})
        assert [steps for steps, _, _ in job.reports()] == [2, 2]
        job.tell("go on")
        results = job.finish()
    trace = same([result["trace"] for result in results])
    assert trace == (3, 3, 2, 2, 2, 2)
    for result in results:
        assert_equal(result["parameters"], by_numpy(trace))
