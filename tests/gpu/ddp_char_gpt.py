"""char-GPT with DDP, on GPUs in turns: `torchrun --nproc-per-node N -m tests.gpu.ddp_char_gpt nccl`, or `gloo`."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from examples import char_gpt

STEPS, BATCH, CONTEXT = 60, 16, 64


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(sys.argv[1])
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    text = char_gpt.load()[0].to(device)
    model = DistributedDataParallel(char_gpt.Gpt(CONTEXT, 128, 4, heads=4).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    began = 0.0
    for step in range(STEPS):
        if step == 1:
            torch.cuda.synchronize()
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = char_gpt.loss_of(model, char_gpt.draw(text, BATCH, CONTEXT, generator))  # type: ignore[arg-type]
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), char_gpt.MAX_NORM)
        optimizer.step()
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"each step of {(time.perf_counter() - began) / (STEPS - 1) * 1e3:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
