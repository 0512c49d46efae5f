"""Who may use a payload connection."""

from __future__ import annotations

from fusiond.transport.reception import Tokens


def test_a_token_says_whose_connection_it_is() -> None:
    tokens = Tokens()
    issued = {(node, number): tokens.issue(node, number).token for node in (1, 2) for number in (1, 2, 3)}
    assert len(set(issued.values())) == 6
    for (node, number), token in issued.items():
        for _ in range(3):
            holder = tokens.holder(token, 30 + number)
            assert holder is not None
            assert (holder.id, holder.number) == (node, number)
    assert tokens.stale == 0


def test_a_token_is_good_for_one_connection() -> None:
    tokens = Tokens()
    token = tokens.issue(1, 1).token
    assert tokens.holder(token, 7) is not None
    assert tokens.holder(token, 8) is None
    assert tokens.stale == 1
    assert tokens.holder(token, 7) is not None


def test_a_token_that_was_replaced_is_refused_and_counted() -> None:
    tokens = Tokens()
    old = tokens.issue(1, 1).token
    other = tokens.issue(1, 2).token
    assert tokens.holder(old, 7) is not None
    new = tokens.issue(1, 1).token
    assert tokens.holder(old, 7) is None
    assert tokens.is_stale(old)
    assert tokens.stale == 1
    assert tokens.holder(new, 9) is not None
    assert tokens.holder(other, 8) is not None


def test_a_token_is_refused_where_nobody_knows_on_which_connection_it_came() -> None:
    tokens = Tokens()
    token = tokens.issue(1, 1).token
    assert tokens.holder(token, -1) is None
    assert tokens.stale == 1
    assert tokens.holder(token, 7) is not None


def test_a_stranger_is_not_taken_for_somebody_who_is_late() -> None:
    tokens = Tokens()
    tokens.issue(1, 1)
    assert tokens.holder(b"guess", 7) is None
    assert not tokens.is_stale(b"guess")
    assert tokens.stale == 0


def test_no_two_connections_have_the_same_secret() -> None:
    tokens = Tokens()
    issued = [tokens.issue(node, number) for node in (1, 2) for number in (1, 2, 1)]
    assert len({ticket.secret for ticket in issued}) == len({ticket.token for ticket in issued}) == 6


def test_a_token_is_refused_once_its_connection_is_ended() -> None:
    tokens = Tokens()
    token = tokens.issue(1, 1).token
    holder = tokens.holder(token, 7)
    assert holder is not None
    tokens.end(holder)
    assert tokens.holder(token, 7) is None
    assert tokens.holder(tokens.issue(1, 1).token, 7) is not None


def test_old_tokens_are_forgotten_in_the_end() -> None:
    tokens = Tokens()
    first = tokens.issue(1, 1).token
    for _ in range(2000):
        last = tokens.issue(1, 1).token
    assert not tokens.is_stale(first)
    assert tokens.holder(last, 7) is not None
    assert len(tokens._old) <= 1024
    assert len(tokens._holders) == 1
