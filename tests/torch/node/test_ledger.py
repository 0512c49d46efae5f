"""In which steps the ranks of a node combine gradients themselves: what they agree upon, and the file of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fusion_rt.torch.node.ledger import REFUSED, NodeLedger, NodeState
from tests.for_each import for_each


def enrolled(steps: tuple[int, ...] = (0, 0, 0)) -> NodeState:
    state = NodeState.of(len(steps))
    for position, step in enumerate(steps):
        state.enrol(position, f"nccl:gpu{position}", step)
    return state


def test_whoever_has_gathered_results_is_awaited_by_those_who_have_not() -> None:
    state = enrolled()
    for first in (1, 2):
        state.gather(first)
        assert [state.is_awaited(position) for position in range(3)] == [position == first for position in range(3)]
        for other in range(3):
            if other != first:
                state.gather(other)
        assert not any(state.is_awaited(position) for position in range(3))
    state.gather(0)
    state.give_up("a rank is lost")
    assert not state.is_awaited(0), "it will not come"


def test_it_begins_after_the_latest_step_in_which_a_rank_has_enrolled() -> None:
    for order in ((0, 1, 2), (2, 0, 1)):
        state = NodeState.of(3)
        for position in order:
            assert not state.includes(8)
            state.enrol(position, f"nccl:gpu{position}", (5, 7, 6)[position])
        assert [state.decide(0, step) for step in (6, 7, 8, 9)] == [False, False, True, True]


@for_each(
    "offers",
    [
        ("nccl:gpu0", "nccl:gpu0"),
        ("nccl:gpu0", "gloo:gpu1"),
        ("nccl:gpu0", REFUSED),
        (REFUSED, REFUSED),
        ("nccl:gpu0", ""),
    ],
)
def test_ranks_that_share_a_device_or_cannot_do_it_leave_it_to_the_daemon(offers: tuple[str, str]) -> None:
    state = NodeState.of(2)
    for position, offer in enumerate(offers):
        state.enrol(position, offer, 0)
    assert not any(state.decide(position, step) for position in range(2) for step in range(4))


@for_each("seed", range(20))
def test_all_ranks_decide_alike_whenever_one_withdraws(seed: int) -> None:
    """Ranks decide step after step, none more than one ahead of another, as results need all of them."""
    choose = np.random.default_rng(seed)
    state, ranks = enrolled((0, 0, 0, 0)), 4
    decided: list[dict[int, bool]] = [{0: False} for _ in range(ranks)]
    leaver, leaves_at = int(choose.integers(ranks)), int(choose.integers(1, 8))
    owed: list[int] = []
    withdrawn = False
    while min(max(steps) for steps in decided) < 9:
        rank = int(choose.integers(ranks))
        step = max(decided[rank]) + 1
        if withdrawn and rank == leaver:
            decided[rank][step] = step in owed  # after that it is away, and nobody waits for it
        elif step > min(max(steps) for steps in decided) + 1:
            continue
        elif rank == leaver and step == leaves_at:
            state.withdraw()
            owed, withdrawn = [later for later in range(step, step + 3) if state.includes(later)], True
        else:
            decided[rank][step] = state.decide(rank, step)
    for step in range(1, 9):
        assert len({steps[step] for steps in decided}) == 1, f"step {step}: {decided}"
    assert len(owed) <= 1, "others were more than a step ahead"
    assert all(decided[rank][step] for rank in range(ranks) for step in range(1, leaves_at))
    assert not any(steps[8] for steps in decided)


def test_who_withdraws_before_anybody_has_begun_owes_nothing() -> None:
    state = enrolled()
    state.withdraw()
    assert not any(state.decide(position, 1) for position in range(3))
    late = NodeState.of(2)
    late.enrol(0, "nccl:gpu0", 3)
    late.withdraw()
    late.enrol(1, "nccl:gpu1", 3)
    assert not any(late.includes(step) for step in range(10))


def test_all_have_connected_or_none_goes_on() -> None:
    state = enrolled()
    state.connect(0)
    state.connect(1)
    assert state.outcome() is None
    state.refuse(2)
    assert state.outcome() is False
    assert not state.decide(0, 1)
    state = enrolled()
    for position in range(3):
        state.connect(position)
    state.refuse(1)  # too late: others have gone on
    assert state.outcome() is True
    assert state.decide(0, 1)


def test_a_step_that_some_have_begun_when_one_gives_up_is_the_last_for_all() -> None:
    state = NodeState.of(3)
    for position in range(3):
        state.enrol(position, f"gloo:{position}", 0)
    assert [state.decide(position, 1) for position in range(3)] == [True] * 3
    assert state.decide(0, 2)
    state.give_up("rank 0 is gone")
    assert [state.decide(position, 2) for position in (1, 2)] == [True, True], "as rank 0 has"
    assert [state.decide(position, 3) for position in range(3)] == [False] * 3


def test_the_first_reason_to_give_up_counts() -> None:
    state = enrolled()
    state.give_up("rank 1 is gone")
    state.give_up("and so is rank 2" * 1000)
    assert state.broken == "rank 1 is gone"
    state = enrolled()
    state.give_up("x" * 10**6)
    assert 0 < len(state.broken) < 10**4


def test_what_one_writes_the_others_read(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger")
    ledgers = [NodeLedger(path, 3, position) for position in range(3)]
    for position, ledger in enumerate(ledgers):
        assert os.path.exists(path)
        ledger.enrol(f"nccl:gpu{position}", 4)
    assert not os.path.exists(path), "nobody needs its name any more"
    assert [ledger.decide(5) for ledger in ledgers] == [True] * 3
    for ledger in ledgers:
        assert ledger.read().outcome() is None
        ledger.connect()
    assert ledgers[0].refuse()
    assert ledgers[0].read().outcome() is True
    assert ledgers[1].withdraw().includes(5)
    assert not ledgers[2].decide(6)
    ledgers[0].give_up("x" * 10**6)
    assert ledgers[2].read().broken
    for ledger in ledgers:
        ledger.close()
        ledger.close()


def test_a_ledger_that_was_never_complete_leaves_no_file(tmp_path: Path) -> None:
    ledger = NodeLedger(str(tmp_path / "ledger"), 2, 1)
    assert oct(os.stat(tmp_path / "ledger").st_mode & 0o777) == "0o600"
    ledger.enrol("nccl:gpu0", 0)
    ledger.close()
    assert not os.listdir(tmp_path)
