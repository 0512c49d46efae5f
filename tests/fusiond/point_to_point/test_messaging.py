"""Messages between ranks, in a job without I/O: on one node, and between two."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import ProcessSet
from fusiond.point_to_point.limits import ANNOUNCED, AT_ONCE, BYTES_AT_ONCE
from fusiond.transport.flow_control import CreditExceeded
from tests.for_each import for_each
from tests.fusiond.point_to_point.mail import Mail

LAYOUTS = {"a node": [2], "two nodes": [1, 1]}
layouts = for_each("sizes", LAYOUTS.values())
SIZES = [0, 1, 4, 4096, 4097, 100_000]


def data_of(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@layouts
@for_each("first", ["send", "receive"])
@for_each("nbytes", [*SIZES, 1_000_000])
def test_a_message_in_memory_arrives_whole_and_both_ends_are_told(sizes: list[int], first: str, nbytes: int) -> None:
    mail, data = Mail(sizes), data_of(nbytes)
    if first == "send":
        sent = mail.send(0, 1, data, 7)
        mail.job.settle()
        assert not mail.sent(0, sent)
        got = mail.receive(1, 0, nbytes, 7)
    else:
        got = mail.receive(1, 0, nbytes, 7)
        mail.job.settle()
        sent = mail.send(0, 1, data, 7)
    mail.job.settle()
    assert mail.received(1, got) == (0, data)
    assert mail.sent(0, sent)
    mail.nothing_is_left()


@layouts
@for_each("into_memory", [True, False])
@for_each("nbytes", [0, 4, wire.MAX_INLINE])
def test_a_small_message_is_away_before_anybody_receives_it(sizes: list[int], into_memory: bool, nbytes: int) -> None:
    mail, data = Mail(sizes), data_of(nbytes)
    sent = mail.send(0, 1, data, inline=True)
    mail.job.settle()
    assert mail.sent(0, sent)
    got = mail.receive(1, 0, nbytes, inline=not into_memory)
    mail.job.settle()
    assert mail.received(1, got) == (0, data)
    mail.nothing_is_left()


@layouts
def test_a_small_message_needs_no_answer(sizes: list[int]) -> None:
    mail = Mail(sizes)
    mail.send(0, 1, b"abcd", inline=True, answered=False)
    got = mail.receive(1, 0, 4, inline=True)
    mail.job.settle()
    assert mail.received(1, got) == (0, b"abcd")
    assert 0 not in mail.job.answers
    mail.nothing_is_left()


@layouts
def test_memory_of_a_send_that_is_over_may_change(sizes: list[int]) -> None:
    mail, data = Mail(sizes, chunk_bytes=1 << 17, window_bytes=1 << 18), data_of(1_000_000)
    sent, got = mail.send(0, 1, data), mail.receive(1, 0, len(data))
    while not mail.sent(0, sent):
        assert mail.job.step()
    mail.may_use_again(sent)
    mail.job.settle()
    assert mail.received(1, got) == (0, data)


@layouts
def test_a_receive_may_be_longer_than_its_message(sizes: list[int]) -> None:
    mail = Mail(sizes)
    got = [mail.receive(1, 0, 5000), mail.receive(1, 0, 100, inline=True)]
    mail.send(0, 1, data_of(4500))
    mail.send(0, 1, b"abc", inline=True)
    mail.job.settle()
    assert [mail.received(1, handle) for handle in got] == [(0, data_of(4500)), (0, b"abc")]
    mail.nothing_is_left()


@layouts
@for_each("first", ["send", "receive"])
@for_each("inline", [True, False])
def test_a_message_that_is_too_long_fails_with_both_sizes(sizes: list[int], first: str, inline: bool) -> None:
    mail, data = Mail(sizes), data_of(5000)
    if first == "send":
        sent = mail.send(0, 1, data, 3, inline=inline)
        mail.job.settle()
    got = mail.receive(1, 0, 4999, 3)
    if first == "receive":
        sent = mail.send(0, 1, data, 3, inline=inline)
    mail.job.settle()
    host = mail.job.topology.hosts[-1]
    sentence = (
        "rank 0 (host host0) sent a message of 5000 bytes with tag 3, and "
        f"rank 1 (host {host}) receives no more than 4999: sizes of a send and its receive have to be equal"
    )
    assert mail.job.error(1, got) == sentence
    if inline:
        assert mail.sent(0, sent)  # it was away
    else:
        assert mail.job.error(0, sent) == sentence
    mail.nothing_is_left()


@for_each("sizes", [[3], [1, 1, 1], [2, 1]])
def test_a_receive_from_any_rank_takes_the_first_that_came(sizes: list[int]) -> None:
    mail = Mail(sizes)
    for source, data in ((2, b"two"), (0, b"zero"), (2, b"again")):
        mail.send(source, 1, data, 5, inline=True)
        mail.job.settle()
    got = [mail.receive(1, source, 10, 5, inline=True) for source in (wire.ANYBODY, 2, wire.ANYBODY)]
    mail.job.settle()
    assert [mail.received(1, handle) for handle in got] == [(2, b"two"), (2, b"again"), (0, b"zero")]
    mail.nothing_is_left()


@layouts
def test_messages_of_other_tags_and_groups_are_not_taken(sizes: list[int]) -> None:
    mail = Mail(sizes, sets=[ProcessSet(1, (0, 1))])
    got = [mail.receive(1, 0, 9, tag, group=group, inline=True) for tag, group in ((1, 0), (2, 0), (1, 1))]
    for text, tag, group in ((b"tag 2", 2, 0), (b"group 1", 1, 1), (b"tag 1", 1, 0)):
        mail.send(0, 1, text, tag, group=group, inline=True)
    mail.job.settle()
    assert [mail.received(1, handle)[1] for handle in got] == [b"tag 1", b"tag 2", b"group 1"]
    mail.nothing_is_left()


@layouts
@for_each("seed", range(3))
def test_hundreds_of_messages_arrive_in_order_whatever_the_network_does(sizes: list[int], seed: int) -> None:
    mail, rng = Mail(sizes, seed, connections=3), np.random.default_rng(seed)
    sent = {rank: [(int(rng.integers(3)), rng.bytes(int(rng.choice(SIZES)))) for _ in range(150)] for rank in (0, 1)}
    got: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    def send(rank: int, tag: int, text: bytes) -> None:
        mail.send(rank, 1 - rank, text, tag, inline=len(text) <= 4096)

    def receive(rank: int, tag: int) -> None:
        got[rank].append((tag, mail.receive(rank, 1 - rank, 100_000, tag)))

    for rank in (0, 1):
        for tag, text in sent[rank]:
            mail.job.later(rank, partial(send, rank, tag, text))
        for tag, _ in sorted(sent[1 - rank]):
            mail.job.later(rank, partial(receive, rank, tag))
    mail.job.settle()
    for rank in (0, 1):
        for tag in range(3):
            wanted = [text for of, text in sent[1 - rank] if of == tag]
            assert [mail.received(rank, handle)[1] for of, handle in got[rank] if of == tag] == wanted
    mail.nothing_is_left()


@pytest.mark.parametrize("nbytes", [4, wire.MAX_INLINE])
def test_more_small_messages_than_a_node_keeps_wait_where_they_are(nbytes: int) -> None:
    mail, kept = Mail([1, 1]), min(AT_ONCE, BYTES_AT_ONCE // nbytes)
    for _ in range(3):  # room is made again
        sends = [mail.send(0, 1, data_of(nbytes, number), inline=True) for number in range(kept + 10)]
        mail.job.settle()
        told = [mail.sent(0, handle) for handle in sends]
        assert told == sorted(told, reverse=True)
        assert kept // 4 < sum(told) <= kept
        got = [mail.receive(1, 0, nbytes, inline=True) for _ in sends]
        mail.job.settle()
        assert [mail.received(1, handle)[1] for handle in got] == [data_of(nbytes, n) for n in range(kept + 10)]
        assert all(mail.sent(0, handle) for handle in sends)
        mail.nothing_is_left()


# --- what fails -------------------------------------------------------------------------------------------------------


@layouts
def test_a_receive_whose_time_is_up_names_who_sent_nothing(sizes: list[int]) -> None:
    mail = Mail(sizes)
    got = mail.receive(1, 0, 8, 4, seconds=3.0)
    other = mail.receive(1, 0, 8, 5)
    mail.job.pass_time(4)
    host = mail.job.topology.hosts[-1]
    assert mail.job.error(1, got) == (
        f"the receive of 8 bytes with tag 4 on rank 1 (host {host}) from rank 0 (host host0) has waited 3 s: "
        "rank 0 (host host0) has not sent any such message"
    )
    mail.send(0, 1, b"tag four", 4, inline=True)
    mail.send(0, 1, b"tag five", 5, inline=True)
    late = mail.receive(1, 0, 8, 4)
    mail.job.settle()
    assert (mail.received(1, other)[1], mail.received(1, late)[1]) == (b"tag five", b"tag four")
    mail.nothing_is_left()


@layouts
def test_a_send_whose_time_is_up_is_withdrawn(sizes: list[int]) -> None:
    mail = Mail(sizes)
    sent = mail.send(0, 1, data_of(9000), 4, seconds=2.0)
    mail.job.settle()
    mail.job.pass_time(3)
    host = mail.job.topology.hosts[-1]
    assert mail.job.error(0, sent) == (
        f"the send of 9000 bytes with tag 4 from rank 0 (host host0) to rank 1 (host {host}) has waited 2 s: "
        f"rank 1 (host {host}) has not received it"
    )
    mail.nothing_is_left()


@pytest.mark.parametrize("whose", [0, 1])
def test_a_time_out_while_data_moves_fails_both_ends(whose: int) -> None:
    mail = Mail([1, 1])
    mail.job.lost.add((0, 1))  # no payload arrives
    seconds = [3.0 if rank == whose else 0.0 for rank in (0, 1)]
    sent = mail.send(0, 1, data_of(100_000), seconds=seconds[0])
    got = mail.receive(1, 0, 100_000, seconds=seconds[1])
    mail.job.pass_time(4)
    assert "has waited 3 s for its data" in mail.job.error(0, sent)
    assert mail.job.error(0, sent) == mail.job.error(1, got)
    mail.nothing_is_left()


def test_chunks_of_a_message_that_was_given_up_are_dropped() -> None:
    mail = Mail([1, 1], window_bytes=4096)
    sent, got = mail.send(0, 1, data_of(100_000)), mail.receive(1, 0, 100_000, seconds=1.0)
    for _ in range(4):
        mail.job.step()
    mail.job.now += 2
    for _, callback in mail.job.timers:
        callback()
    mail.job.settle()
    assert mail.job.error(1, got) == mail.job.error(0, sent)
    mail.nothing_is_left()


@layouts
def test_a_rank_that_leaves_fails_who_waits_for_it_and_what_it_has_sent_still_comes(sizes: list[int]) -> None:
    mail = Mail(sizes)
    mail.send(0, 1, b"last", inline=True)
    announced = mail.send(0, 1, data_of(9000))
    mail.job.settle()
    waiting = [mail.receive(1, 0, 4, 9), mail.receive(1, wire.ANYBODY, 4, 9)]
    to_it = mail.send(1, 0, data_of(9000))
    mail.job.leave(0)
    mail.job.settle()
    assert "failed: rank 0 (host host0) has left the job" in mail.job.error(1, waiting[0])
    assert "all other ranks of the group have left the job" in mail.job.error(1, waiting[1])
    assert "failed: rank 0 (host host0) has left the job" in mail.job.error(1, to_it)
    assert mail.job.is_answered(0, announced)
    last, none = mail.receive(1, 0, 4), mail.receive(1, 0, 9000)
    assert mail.received(1, last) == (0, b"last")
    assert "is not possible: rank 0 (host host0) has left the job" in mail.job.error(1, none)
    assert "cannot send to rank 0: rank 0 (host host0) has left" in mail.job.error(
        1, mail.send(1, 0, b"x", inline=True)
    )
    mail.nothing_is_left()


@for_each("seed", range(40))
def test_a_message_arrives_whose_sender_leaves_as_soon_as_its_send_is_over(seed: int) -> None:
    """Word of that may be faster than the message's last chunks."""
    mail = Mail([1, 1], seed)
    data = data_of(50_000)
    got, sent = mail.receive(1, 0, len(data)), mail.send(0, 1, data)
    while not mail.sent(0, sent):
        mail.job.step()
    mail.job.leave(0)
    mail.job.settle()
    assert mail.received(1, got) == (0, data)
    mail.nothing_is_left()


@layouts
def test_an_epoch_that_ends_fails_all_that_waits(sizes: list[int]) -> None:
    mail = Mail(sizes)
    sent, got = mail.send(0, 1, data_of(9000)), mail.receive(1, 0, 5, 9)
    mail.job.settle()
    for node in mail.job.nodes:
        node.engine.end("the ranks left the job")
    mail.job.settle()
    for text in (mail.job.error(0, sent), mail.job.error(1, got)):
        assert text.endswith("failed: the ranks left the job")


def test_a_job_that_fails_leaves_nothing() -> None:
    mail = Mail([2, 1])
    mail.send(0, 1, b"kept", 8, inline=True)
    mail.send(0, 2, data_of(9000))
    mail.receive(1, 0, 5, 9)
    mail.send(2, 0, data_of(100_000))
    mail.receive(0, 2, 100_000)
    for _ in range(5):
        mail.job.step()
    for node in mail.job.nodes:
        node.engine.fail_job("no more")
    mail.job.settle()
    mail.nothing_is_left()
    late = mail.receive(1, 0, 4)
    assert mail.job.error(1, late).endswith("is not possible: no more")


@layouts
def test_a_rank_that_closes_a_group_fails_what_it_has_under_way_there_and_nothing_else(sizes: list[int]) -> None:
    mail = Mail([*sizes, 1])
    group = mail.job.open_group("g", (0, 1, 2))
    mail.send(0, 1, b"kept", 8, inline=True, group=group)
    sent, got = mail.send(0, 1, data_of(9000), group=group), mail.receive(1, 0, 5, 9, group=group)
    others = [mail.receive(1, 0, 5), mail.receive(0, 2, 5, group=group)]
    mail.job.settle()
    mail.job.close_group("g", 1)
    mail.job.settle()
    why = f"failed: rank 1 (host {mail.job.topology.hosts[len(sizes) - 1]}) has closed the group"
    assert mail.job.error(1, got).endswith(why)
    assert mail.job.error(0, sent).endswith(why)
    late = mail.send(0, 1, data_of(9000), group=group)
    mail.send(0, 1, b"too late", inline=True, group=group)
    mail.send(0, 1, b"there", inline=True)
    mail.send(2, 0, b"still", inline=True, group=group)
    mail.job.settle()
    assert mail.job.error(0, late).endswith(
        "rank 1 has closed group 'g'" if len(sizes) == 1 else "group 'g' has been closed"
    )
    assert mail.received(1, others[0]) == (0, b"there")
    assert mail.received(0, others[1]) == (2, b"still")
    mail.nothing_is_left()
    for rank in (0, 2):
        mail.job.close_group("g", rank)
    mail.job.settle()
    assert mail.job.error(0, mail.send(0, 2, b"x", inline=True, group=group)).endswith("group 'g' has been closed")
    mail.nothing_is_left()


def test_a_small_message_that_cannot_be_sent_is_warned_of_where_nobody_waits_for_an_answer() -> None:
    mail = Mail([2])
    mail.job.leave(1)
    for _ in range(3):
        mail.send(0, 1, b"abcd", inline=True, answered=False)
    assert mail.job.warnings == [
        "rank 0 cannot send to rank 1: rank 1 (host host0) has left the job; it was not told, since small messages are "
        "away when they are sent"
    ]


def test_who_is_in_no_such_group_is_told() -> None:
    mail = Mail([2, 1], sets=[ProcessSet(1, (0, 2))])
    assert mail.job.error(0, mail.send(0, 1, b"x", inline=True, group=1)).endswith("rank 1 is not in group 1")
    assert mail.job.error(1, mail.receive(1, 0, 4, group=1)).endswith("rank 1 is not in group 1")
    assert mail.job.error(0, mail.receive(0, 2, 4, group=5)).endswith("there is no group 5")
    mail.nothing_is_left()


# --- peers that do what no peer does ----------------------------------------------------------------------------------


def from_node_1(mail: Mail, *messages: wire.PeerMessage, payload: bytes | None = None) -> None:
    for message in messages:
        view = () if payload is None else (memoryview(payload),)
        mail.job.nodes[0].engine.peer_message(1, message, *view)


def test_no_more_messages_are_kept_than_were_granted() -> None:
    mail = Mail([1, 1])
    flood = [wire.MessageSent(0, 1, 0, 0, clock, 4, b"abcd") for clock in range(AT_ONCE + 1)]
    from_node_1(mail, *flood[:-1])
    with pytest.raises(
        CreditExceeded, match="it sent more messages that have not been received than 1024, of 1048576 bytes in all"
    ):
        from_node_1(mail, flood[-1])


def test_no_more_bytes_are_kept_than_were_granted() -> None:
    mail, data = Mail([1, 1]), bytes(wire.MAX_INLINE)
    most = BYTES_AT_ONCE // len(data)
    flood = [wire.MessageSent(0, 1, 0, 0, clock, len(data), data) for clock in range(most + 1)]
    from_node_1(mail, *flood[:-1])
    with pytest.raises(CreditExceeded, match="of 1048576 bytes in all"):
        from_node_1(mail, flood[-1])


def test_no_more_messages_are_announced_than_may_be() -> None:
    mail = Mail([1, 1])
    flood = [wire.MessageSent(0, 1, 0, 0, clock, 1 << 40) for clock in range(ANNOUNCED + 1)]
    from_node_1(mail, *flood[:-1])
    with pytest.raises(CreditExceeded, match="it announced more than 16384 messages"):
        from_node_1(mail, flood[-1])


@for_each(
    ("message", "why"),
    [
        (wire.MessageSent(0, 0, 1, 0, 0, 4, b"abcd"), "rank 0 is not there, or rank 1 not here"),
        (wire.MessageSent(0, 1, 1, 0, 0, 4, b"abcd"), "rank 1 not here"),
        (wire.MessageSent(0, 1, 0, 0, 0, 5, b"abcd"), "a message of 5 bytes has 4"),
        (wire.MessagesTaken(1, 0), "it has taken 1 messages of 0 bytes, and only 0 of 0 were sent to it"),
    ],
)
def test_a_message_that_cannot_be_is_refused(message: wire.PeerMessage, why: str) -> None:
    with pytest.raises(WireError, match=why):
        from_node_1(Mail([1, 1]), message)


def test_a_message_cannot_be_announced_twice() -> None:
    mail = Mail([1, 1])
    sent = wire.MessageSent(0, 1, 0, 0, 3, 9000)
    from_node_1(mail, sent)
    with pytest.raises(WireError, match=r"message 1 to 0 of clock 3 was announced before"):
        from_node_1(mail, sent)


@for_each(("start", "nbytes"), [(8990, 11), (9000, 1), (1 << 40, 1)])
def test_data_beyond_the_end_of_a_message_is_refused(start: int, nbytes: int) -> None:
    mail = Mail([1, 1])
    from_node_1(mail, wire.MessageSent(0, 1, 0, 0, 0, 9000))
    mail.receive(0, 1, 9000)
    key = wire.message_key(0, 1, 0, 0)
    with pytest.raises(WireError, match="do not fit the others: it has 9000, of which 9000 are missing"):
        from_node_1(mail, wire.MessageChunk(key, 0, 0, start, 0), payload=bytes(nbytes))


@for_each("second", [0, 1000, 4000])
def test_data_of_a_message_that_comes_twice_is_not_taken_for_the_rest_of_it(second: int) -> None:
    mail = Mail([1, 1])
    from_node_1(mail, wire.MessageSent(0, 1, 0, 0, 0, 9000))
    mail.receive(0, 1, 9000)
    key = wire.message_key(0, 1, 0, 0)
    from_node_1(mail, wire.MessageChunk(key, 0, 0, 0, 0), payload=bytes(4500))
    with pytest.raises(WireError, match=r"do not fit the others|overlap"):
        from_node_1(mail, wire.MessageChunk(key, 0, 0, second, 0), payload=bytes(4500))


def test_what_is_about_no_message_changes_nothing() -> None:
    mail = Mail([1, 1])
    key = wire.message_key(0, 0, 1, 0)
    from_node_1(mail, wire.MessageAccepted(key), wire.MessageOver(key, "why"), wire.MessageCredit(key, 3))
    from_node_1(mail, wire.MessageChunk(key, 0, 0, 0, 0), payload=bytes(100))
    mail.nothing_is_left()
    assert mail.job.nodes[0].engine.messages.statistics()["dropped"] == 1
