"""The Horovod-compatible API for PyTorch::

    import fusion_rt.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Names, arguments and meaning are those of `horovod.torch`. Beyond it there are `empty` (a tensor that needs no copies to
be communicated), `Compression.bf16` and the codecs of docs/compression.md, `compression_stats`, and `statistics()` of a
distributed optimizer; the training algorithms of docs/algorithms.md (`algorithms`), with `consensus`, `averaged`,
`average_buffers`, `staleness` and `consensus_distance`; updates that overlap with the next forward pass
(docs/overlap.md), with `synchronize_parameters`; and, in modules of their own, `large_batch` and `kfac`.
"""

from fusion_rt import algorithms
from fusion_rt.core.errors import HorovodInternalError, HostsUpdatedInterrupt
from fusion_rt.torch import elastic, mpi_ops
from fusion_rt.torch.agreement import average_buffers, averaged, consensus, consensus_distance, staleness
from fusion_rt.torch.core.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
    start_timeline,
    stop_timeline,
)
from fusion_rt.torch.core.compressors import Compression, compression_stats, network_stats
from fusion_rt.torch.core.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    remove_process_set,
)
from fusion_rt.torch.core.runtime import cross_rank, cross_size, local_rank, local_size, rank, size
from fusion_rt.torch.core.tensors import empty
from fusion_rt.torch.core.uncompiled import keep_out_of_graphs
from fusion_rt.torch.core.watching import synchronize_parameters
from fusion_rt.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fusion_rt.torch.ops.alltoall import alltoall, alltoall_async
from fusion_rt.torch.ops.broadcast import barrier, broadcast, broadcast_, broadcast_async, broadcast_async_, join
from fusion_rt.torch.ops.gather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
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
from fusion_rt.torch.ops.signatures import Adasum, Average, Max, Min, Product, Sum
from fusion_rt.torch.ops.sparse import sparse_allreduce_async
from fusion_rt.torch.optimizer import DistributedOptimizer
from fusion_rt.torch.sync.synchroniser import OptimizerStatistics
from fusion_rt.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "OptimizerStatistics",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "algorithms",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "average_buffers",
    "averaged",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "compression_stats",
    "consensus",
    "consensus_distance",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "empty",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "network_stats",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "staleness",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "synchronize_parameters",
]

keep_out_of_graphs()
