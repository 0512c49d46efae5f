"""A send or receive that waits is told of: who waits, for whom, and for how long."""

from __future__ import annotations

from fusion_rt import wire
from fusiond.control.waiting import Survey
from tests.for_each import for_each
from tests.fusiond.point_to_point.mail import Mail

LAYOUTS = for_each("sizes", [[3], [2, 1]])


def survey(mail: Mail) -> Survey:
    found: list[Survey] = []
    mail.job.nodes[0].engine.survey(False, found.append)
    mail.job.settle()
    for _ in range(4):  # for those that do not answer
        mail.job.pass_time(1)
    return found[0]


@LAYOUTS
def test_whoever_asks_is_told_who_waits_for_whom(sizes: list[int]) -> None:
    mail = Mail(sizes)
    mail.receive(1, 0, 8, 4)
    mail.send(0, 2, bytes(9000), 5)
    mail.receive(2, wire.ANYBODY, 8, 6)
    mail.job.settle()
    stalls = {(stall.submitted, stall.missing): stall.what for stall in survey(mail).stalls}
    host = mail.job.topology.hosts[-1]
    assert stalls == {
        ((1,), (0,)): "the receive of 8 bytes with tag 4 on rank 1 (host host0) from rank 0 (host host0)",
        ((0,), (2,)): f"the send of 9000 bytes with tag 5 from rank 0 (host host0) to rank 2 (host {host})",
        ((2,), (0, 1)): f"the receive of 8 bytes with tag 6 on rank 2 (host {host}) from any rank",
    }


def test_where_data_moves_nobody_is_missing() -> None:
    mail = Mail([1, 1])
    mail.job.lost.add((0, 1))
    mail.send(0, 1, bytes(100_000))
    mail.receive(1, 0, 100_000)
    mail.job.settle()
    stalls = survey(mail).stalls
    assert [(stall.submitted, stall.missing) for stall in stalls] == [((0,), ()), ((1,), ())]
    assert all(stall.notes == ("its data is under way",) for stall in stalls)


@LAYOUTS
def test_what_waits_long_is_warned_of_once_with_where_the_other_rank_is(sizes: list[int]) -> None:
    mail = Mail(sizes, stall_warning_time=5.0)
    mail.job.whereabouts[0] = wire.Whereabouts(0, 123, "runs", "it shows no stack")
    mail.receive(1, 0, 8, 4)
    mail.job.pass_time(30)
    assert len(mail.job.warnings) == 1
    assert mail.job.warnings[0].startswith(
        "the receive of 8 bytes with tag 4 on rank 1 (host host0) from rank 0 (host host0) has waited 6 s: "
        "rank 0 (host host0) has not sent any such message\nrank 0"
    )


@LAYOUTS
def test_what_has_waited_as_long_as_any_operation_may_fails(sizes: list[int]) -> None:
    mail = Mail(sizes, operation_timeout=20.0)
    got, sent = mail.receive(2, 0, 8, 4), mail.send(1, 2, bytes(9000), 5)
    patient = mail.receive(0, 1, 8, 4, seconds=100.0)
    mail.job.pass_time(30)
    assert "has waited 21 s: rank 0 (host host0) has not sent any such message" in mail.job.error(2, got)
    assert "has waited 21 s: rank 2 (host host" in mail.job.error(1, sent)
    assert not mail.job.is_answered(0, patient)
    mail.job.pass_time(80)
    assert "has waited 100 s" in mail.job.error(0, patient)
    mail.nothing_is_left()
