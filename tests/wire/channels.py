"""The channels, and everything that may be said on them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from fusion_rt import wire
from fusion_rt.core.topology import Topology

SOME_TOPOLOGIES = st.sampled_from([Topology(("a",), ((0,),)), Topology(("a", "b"), ((2, 0), (1,)))])
CHANNELS = {
    "worker": (wire.WorkerMessage, wire.decode_worker_message),
    "daemon": (wire.DaemonMessage, wire.decode_daemon_message),
    "peer": (wire.PeerMessage, wire.decode_peer_message),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Every value that the schema allows, as msgspec itself describes the schema; long ones are left out."""
    info = kind if isinstance(kind, msgspec.inspect.Type) else msgspec.inspect.type_info(kind)
    match info:
        case msgspec.inspect.IntType():
            above = info.lt - 1 if info.lt is not None else info.le if info.le is not None else 2**63 - 1
            return st.integers(info.ge if info.ge is not None else -(2**63), above)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.FloatType():
            least = info.ge if info.gt is None else info.gt
            return st.floats(least, info.le, allow_nan=False, exclude_min=info.gt is not None)
        case msgspec.inspect.StrType():
            return st.text(max_size=min(info.max_length or 20, 20))
        case msgspec.inspect.BytesType():
            least = info.min_length or 0
            return st.binary(min_size=least, max_size=max(least, min(info.max_length or 20, 20)))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType():
            return st.sampled_from(info.values)
        case msgspec.inspect.UnionType():
            return st.one_of([values_of(part) for part in info.types])
        case msgspec.inspect.VarTupleType():
            return st.lists(values_of(info.item_type), max_size=4).map(tuple)
        case msgspec.inspect.TupleType():
            return st.tuples(*[values_of(part) for part in info.item_types])
        case msgspec.inspect.DictType():
            return st.dictionaries(values_of(info.key_type), values_of(info.value_type), max_size=3)
        case msgspec.inspect.NamedTupleType():
            return st.tuples(*[values_of(field.type) for field in info.fields]).map(lambda parts: info.cls(*parts))
        case msgspec.inspect.StructType() if info.cls is Topology:
            return SOME_TOPOLOGIES
        case msgspec.inspect.StructType():
            return st.builds(info.cls, **{field.name: values_of(field.type) for field in info.fields})
        case msgspec.inspect.Metadata():
            return values_of(info.type)
    raise NotImplementedError(info)


MESSAGES = {channel: values_of(union) for channel, (union, _) in CHANNELS.items()}
every_channel = pytest.mark.parametrize("channel", CHANNELS)
