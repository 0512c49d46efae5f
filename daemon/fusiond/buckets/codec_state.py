"""The state of the codecs of a plan on this node: saved, restored, and moved to another plan.

A state has an entry `INDEX:KEY` for each entry `KEY` of the state of bucket `INDEX`'s codec
(`fusion_rt.local.saved_state`). `INDEX:layout` stands for the bucket's codec and layout, and `INDEX:bounds` has the
nodes' ranges, if there are any. A bucket of the same layout goes on bit by bit; any other takes over the tensors that
it has.

All but residuals and velocities is the same on all nodes, and has to be: so that they can go on together even where
some of them have lost the rest, that *common* part is also saved by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fusion_rt import codecs
from fusion_rt.codecs import BucketCodec, CodecError, Layout
from fusion_rt.codecs.dense import Dense
from fusion_rt.codecs.error_feedback import NODE_STATE, NODE_TENSORS
from fusion_rt.kernels.team import ALONE, Team
from fusion_rt.local.saved_state import State, StateOwner, by_owner
from fusiond.buckets.traced_codecs import release_codec
from fusiond.collectives.base import Array

_EXTRA = ("layout", "bounds")
_MOST_STEPS = 2**48
_DTYPES = {**dict.fromkeys(NODE_TENSORS, np.float32), **dict.fromkeys(("step", *_EXTRA), np.int64)}


def open_bucket(codec: codecs.Codec, layout: Layout, nodes: int, team: Team = ALONE) -> BucketCodec:
    """Opens the codec of a bucket that so many nodes exchange; dense where it does not apply, or nothing is sent.

    Args:
        team: the threads that it may use.
    """
    return codecs.open_bucket(codec if nodes > 1 else Dense(), layout, team)


class Remembered:
    """The memory of the codecs of a plan that is over, until another plan takes it over.

    It is brought together when it is asked for: a formation ends in the event loop, where nothing may be done to every
    parameter.

    Args:
        buckets: the codecs of the plan's buckets, in their order.
        dropped: those whose last step is dropped, since it was not complete in all buckets.
    """

    def __init__(self, buckets: Sequence[BucketCodec], dropped: Iterable[BucketCodec] = ()) -> None:
        self._buckets, self._dropped = buckets, list(dropped)

    def state(self, bounds: bool) -> State:
        """Returns the state, of which residuals and velocities may be the codecs' own arrays, and no copies.

        Args:
            bounds: with the ranges of nodes, which are still the same ones.
        """
        while self._dropped:
            codec = self._dropped.pop()
            if codec.go_back is not None:
                codec.go_back()
            elif codec.codec.stateful:
                codec.step -= 1  # as on nodes where it was not complete
        state = saved(self._buckets, copies=False)
        return state if bounds else {key: value for key, value in state.items() if not key.endswith(":bounds")}

    def release(self) -> None:
        """Frees the memory of the codecs."""
        for codec in self._buckets:
            release_codec(codec)


def saved(buckets: Iterable[BucketCodec], common: bool = False, copies: bool = True) -> State:
    """Returns the memory of the codecs of a plan's buckets, in their order.

    Args:
        common: only the part that is the same on all nodes.
        copies: arrays are copies; else large ones may be the codecs' own.
    """
    state: State = {}
    for index, codec in enumerate(buckets):
        found = codec.state_dict(copies)
        if not found:
            continue
        found["layout"] = _fingerprint(codec)
        if codec.bounds:
            found["bounds"] = np.array(codec.bounds, np.int64)
        state |= StateOwner("codec", index).keyed(found)
    return only_common(state) if common else state


def only_common(state: Mapping[str, Array]) -> State:
    """Returns the part of a state that is the same on all nodes."""
    return {key: value for key, value in state.items() if not _is_own(key.partition(":")[2])}


def steps_of(state: Mapping[str, Array]) -> int:
    """The number of steps that had been taken; 0 for an empty state."""
    steps = [int(value.reshape(-1)[0]) for key, value in state.items() if key.endswith(":step") and value.size]
    return max(steps, default=0)


def restore(buckets: Sequence[BucketCodec], state: Mapping[str, Array], strict: bool = False) -> None:
    """Lets the codecs of a plan's buckets go on from a state; tensors that it lacks start anew.

    Args:
        strict: a tensor that is in no bucket is an error.

    Raises:
        WireError, CodecError: the state is none, or of other tensors; nothing has changed then.
    """
    by_bucket = list(by_owner(state).values())
    stateful = [codec for codec in buckets if codec.codec.stateful]
    _check(stateful, by_bucket, strict)
    whole = {_number(found["layout"]): found for found in by_bucket if "layout" in found}
    united: State = {key: value for found in by_bucket for key, value in found.items() if key not in _EXTRA}
    if united:
        united["step"] = np.array(steps_of(state), np.int64)
    for codec in stateful:
        same = whole.get(_number(_fingerprint(codec)), {})
        own = {key: value for key, value in same.items() if key not in _EXTRA}
        if any(key.startswith("residual/") for key in own):
            codec.load_state_dict(own)
        else:
            codec.load_state_dict(united, partial=True)
        codec.bounds = tuple(int(bound) for bound in same.get("bounds", ()))


def _check(buckets: Sequence[BucketCodec], states: Sequence[State], strict: bool) -> None:
    """Raises `CodecError` for a state that buckets cannot go on from."""
    sizes = {span.name: span.numel for codec in buckets for span in codec.layout.spans}
    elements = {_number(_fingerprint(codec)): codec.layout.elements for codec in buckets}
    for found in states:
        for key, value in found.items():
            kind, slash, name = key.partition("/")
            if slash and name not in sizes and strict and buckets:
                raise CodecError(
                    f"the saved state has the tensor {name!r}, which is not in the plan; use the model that the "
                    f"checkpoint was written with, and give its parameters the same names"
                )
            if kind in NODE_TENSORS and name in sizes and value.shape != (sizes[name],):
                raise CodecError(f"{name!r} has {value.size} elements in the saved state, and {sizes[name]} here")
            if value.dtype != _DTYPES.get(kind, value.dtype):
                raise CodecError(f"{key!r} is {value.dtype} in the saved state, which it cannot be")
        if any(key in found and found[key].size != 1 for key in ("step", "layout")):
            raise CodecError("the saved state has other than one number of steps, or one layout, of a bucket")
        if "step" in found and not 0 <= _number(found["step"]) < _MOST_STEPS:
            raise CodecError(f"the saved state has {_number(found['step'])} steps, which cannot be")
        bounds = [int(bound) for bound in found.get("bounds", ())]
        end = elements.get(_number(found["layout"]), bounds[-1] if bounds else 0) if "layout" in found else 0
        if bounds and (bounds[0] != 0 or bounds[-1] != end or bounds != sorted(bounds)):
            raise CodecError("the saved state has ranges of nodes that are none of its bucket")


def _is_own(key: str) -> bool:
    return key.partition("/")[0] in NODE_STATE


def _fingerprint(codec: BucketCodec) -> Array:
    """Returns a fingerprint of a codec and a layout."""
    text = repr((str(codec.codec), codec.layout)).encode()
    fingerprint: Array = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), np.int64)
    return fingerprint


def _number(fingerprint: Array) -> int:
    return int(fingerprint.reshape(-1)[0])
