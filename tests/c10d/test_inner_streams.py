"""Inner groups on a made-up GPU, whose streams run as late as CUDA allows, by a made-up NCCL, which gloo moves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusion_rt.torch.node.groups import Nccl
from tests.c10d.test_inner import LENGTHS, TYPES, _given
from tests.harness import Job
from tests.torch.cuda_fake.nccl import MadeUpNccl
from tests.torch.cuda_fake.streams import FakeStream
from tests.torch.cuda_fake.tensors import fake_cuda, on_gpu, value_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(60)]

SCHEDULES = range(4)


def _all_reduce(store: str) -> None:
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSION_NODE_REDUCTION", "nccl")
        patch.setattr(dist, "ProcessGroupNCCL", MadeUpNccl, raising=False)
        patch.setattr(Nccl, "device_of", lambda *_: f"GPU {rank}")
        dist.init_process_group("fusion", init_method=f"file://{store}", rank=rank, world_size=size)
        for seed in SCHEDULES:
            with fake_cuda(seed) as gpus, gpus.stream(FakeStream()):
                group = dist.new_group()
                for dtype in TYPES:
                    for length in LENGTHS[:-1]:
                        tensor = on_gpu(_given(rank, length, dtype)) * 1
                        before = tensor * 1
                        dist.all_reduce(tensor, group=group)
                        after = tensor * 1
                        tensor.zero_()
                        total = torch.stack([_given(other, length, dtype) for other in range(size)]).sum(0).to(dtype)
                        assert torch.equal(value_of(after), total), (seed, dtype, length)
                        assert torch.equal(value_of(before), _given(rank, length, dtype)), (seed, dtype, length)
                inner = group._inner  # type: ignore[union-attr]
                assert inner._whole is not None or inner._lane is not None
                dist.destroy_process_group(group)
        dist.destroy_process_group()


def test_what_is_queued_before_and_after_an_all_reduce_sees_it_so(job: Job, tmp_path: Path) -> None:
    job.run(_all_reduce, str(tmp_path / "store"))
