"""The collective operations on tensors, with Horovod's names, arguments and meaning.

The variants of an operation differ in two things. `..._async` returns a handle (an int) at once, for `poll` and
`synchronize`; the others wait. A trailing underscore puts the result in the tensor's place; the others return a new
tensor, leave their input alone, and are differentiable (the ones that wait). `grouped_...` takes several tensors, which
complete together.

Names pair the operations of different ranks. A named operation may be under way once at a time; unnamed ones are paired
in the order in which each rank submits them. Ranks that do not agree about shape, dtype, op or root all get a
`HorovodInternalError` that says who submitted what.

A call that is wrong by itself (a scalar to gather, splits that do not add up, a process set that this rank is not in)
raises `ValueError` on this rank before anything is submitted.
"""

from fusion_rt.torch.ops.alltoall import alltoall, alltoall_async
from fusion_rt.torch.ops.broadcast import barrier, broadcast, broadcast_, broadcast_async, broadcast_async_, join
from fusion_rt.torch.ops.gather import allgather, allgather_async, gather, grouped_allgather, grouped_allgather_async
from fusion_rt.torch.ops.handles import poll, synchronize
from fusion_rt.torch.ops.reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from fusion_rt.torch.ops.scatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from fusion_rt.torch.ops.signatures import Adasum, Average, Max, Min, Product, Sum, resolve
from fusion_rt.torch.ops.sparse import sparse_allreduce_async

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "gather",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "resolve",
    "sparse_allreduce_async",
    "synchronize",
]
