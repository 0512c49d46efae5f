"""The kinds of operations. A kind is declared here, once: its name, and its rules for daemons and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "reduce", "barrier", "join",
    "add_process_set", "remove_process_set",
]  # fmt: skip


@dataclass(frozen=True)
class Traits:
    """The properties of all operations of one kind.

    Attributes:
        verb: its effect along the first dimension ("deals out"). Then it takes no scalars, and its result may have
            another number of rows than the tensor. Empty: the result is as long as the tensor.
        uneven: ranks may differ in the first dimension, and the coordinator tells each the others' sizes.
        root: one rank's data goes out (`from`), or one rank gets the result (`to`).
        reduces: elements are combined, by an op and a `Reducer`.
        carries: it has data. One without goes on without lost ranks.
        complete: every node contributes to every result, so that data which does not match is noticed before anything
            completes. Only then ranks may start without asking the coordinator whether they agree.
        joinable: it goes on without the ranks that have joined; others are refused then.
        negotiated: it is possible outside of groups, too.
    """

    verb: str = ""
    uneven: bool = False
    root: Literal["", "from", "to"] = ""
    reduces: bool = False
    carries: bool = True
    complete: bool = False
    joinable: bool = False
    negotiated: bool = True


KINDS: dict[Kind, Traits] = {
    "allreduce": Traits(reduces=True, complete=True, joinable=True),
    "allgather": Traits("concatenates", uneven=True),
    "broadcast": Traits(root="from"),
    "alltoall": Traits("deals out", uneven=True),
    "reducescatter": Traits("deals out", reduces=True, complete=True),
    "reduce": Traits(root="to", reduces=True, negotiated=False),
    "barrier": Traits(carries=False, complete=True, joinable=True),
    "join": Traits(carries=False),
    "add_process_set": Traits(carries=False),
    "remove_process_set": Traits(carries=False),
}
