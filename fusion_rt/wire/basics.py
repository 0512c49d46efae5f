"""Limits of messages, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 1
MAX_PACKET = 64 * 1024  # bytes of a local message; a longer one travels in a memfd (see `local.py`)
MAX_MESSAGE = 64 * 1024 * 1024  # bytes of any encoded message
MAX_INLINE = 8 * 1024  # bytes of a tensor that travels inside a local message instead of in the arena
MAX_NAME = 1024
MAX_RANKS = 65536
MAX_DIMS = 64
MAX_GROUPS = 64  # parameter groups of an optimizer that runs at a home
NOT_AT_HOMES = {"LBFGS": "closure", "SparseAdam": "sparse gradients"}  # optimizers, and their needs
MAX_TEXT = 256 * 1024  # characters
MAX_LINE = 512  # characters of a line about where a worker is
MAX_FRAMES = 32  # calls of a stack
MAX_LOCATED = 16  # workers of a node
MAX_WAITING = 256  # operations of a node
MAX_PATH = 4096  # characters
GROUPS = 1 << 40  # ids of process sets from here on are groups, which only their members know
EPOCHS_OF_A_FORMATION = 1 << 20  # see `first_epoch`
CLOCKS_OF_A_JOIN = 1 << 30  # more than a rank contributes to homes between two joins
WEIGHT_OF_ONE = 1 << 36
WEIGHT_UNIT = 1 / WEIGHT_OF_ONE  # of a push-sum weight, which is up to 4096 then
CLOCKS_OF_AN_EPOCH = 1 << 36  # clocks of a membership epoch: a late message of the one before is known by its clock
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
_RANGES = 1 << 12  # of clocks, all of which are a `Count`
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
Shape: TypeAlias = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
Op: TypeAlias = Literal["sum", "average", "min", "max", "product", "band", "bor", "bxor", "adasum"]
PostKind: TypeAlias = Literal["post", "seed", "reseed", "ask", "has"]
Rates: TypeAlias = Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_GROUPS)]
Line: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


def first_epoch(formation: int) -> int:
    """Returns the first membership epoch of a formation, which is one set of nodes and ranks.

    It is the number of a `bootstrap.Reform`; 0 in a job that is not elastic. Each time that all of its workers leave
    and come back another epoch of it begins.
    """
    return formation * EPOCHS_OF_A_FORMATION


def formation_of(epoch: int) -> int:
    """Returns the formation that a membership epoch belongs to."""
    return epoch // EPOCHS_OF_A_FORMATION


def clock_range(epoch: int) -> int:
    """Returns which range of clocks, from 0 on, an epoch has. A range comes again after 64 formations, when nothing of
    the one before can be under way any more."""
    return (64 * formation_of(epoch) + epoch % EPOCHS_OF_A_FORMATION) % _RANGES


def first_clock_after_join(clock: int) -> int:
    """Returns from which clock on contributions to homes are counted when all ranks have joined, the same for all who
    have posted different numbers of them.

    Args:
        clock: of the next contribution before that.
    """
    return (clock // CLOCKS_OF_A_JOIN + 1) * CLOCKS_OF_A_JOIN


def first_clock(epoch: int) -> int:
    """Returns the first clock of an epoch's operations."""
    return clock_range(epoch) * CLOCKS_OF_AN_EPOCH
