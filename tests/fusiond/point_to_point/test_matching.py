"""Messages are matched with receives as a list that is searched from its beginning would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.wire import ANYBODY, message_key
from fusiond.point_to_point.calls import Message, ReceiveCall
from fusiond.point_to_point.matching import Mailbox

SOURCES, TAGS = st.integers(0, 2), st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("message"), SOURCES, TAGS),
    st.tuples(st.just("receive"), st.one_of(SOURCES, st.just(ANYBODY)), TAGS),
    st.tuples(st.just("withdraw"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("drop"), st.integers(0, 50), st.just(0)),
)


def takes(receive: ReceiveCall, message: Message) -> bool:
    return receive.tag == message.tag and receive.other in (ANYBODY, message.source)


class Model:
    """Two lists in order of time."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.receives: list[ReceiveCall] = []

    def arrive(self, message: Message) -> ReceiveCall | None:
        for receive in self.receives:
            if takes(receive, message):
                self.receives.remove(receive)
                return receive
        self.messages.append(message)
        return None

    def receive(self, receive: ReceiveCall) -> Message | None:
        for message in self.messages:
            if takes(receive, message):
                self.messages.remove(message)
                return message
        self.receives.append(receive)
        return None


@given(st.lists(EVENTS, max_size=60))
def test_a_mailbox_matches_as_the_model_does(events: list[tuple[str, int, int]]) -> None:
    mailbox, model = Mailbox(), Model()
    for number, (kind, which, tag) in enumerate(events):
        if kind == "message":
            message = Message(message_key(0, which, 9, number), which, 9, tag, 4)
            assert mailbox.arrive(message) is model.arrive(message)
        elif kind == "receive":
            receive = ReceiveCall(9, number, 0, which, tag, 4, ("", 0), 0.0, memory=None)
            assert mailbox.receive(receive) is model.receive(receive)
        elif kind == "withdraw" and model.receives:
            mailbox.withdraw(model.receives.pop(which % len(model.receives)))
        elif kind == "drop" and model.messages:
            mailbox.drop(model.messages.pop(which % len(model.messages)))
        assert set(mailbox.messages()) == set(model.messages)
        assert all(message in mailbox for message in model.messages)
        assert bool(mailbox) == bool(model.messages or model.receives)
