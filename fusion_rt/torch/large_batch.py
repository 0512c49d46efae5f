"""Training with very large batches: optimizers whose rate is fitted to each tensor, and rates that follow the batch.

::

    optimizer = LARS(model.parameters(), lr=0.1, weight_decay=1e-4)  # the rate for 256 samples a step
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = LinearScaling(optimizer, batch_per_rank=64, dataset_size=len(dataset))

`scheduler.step()` follows each `optimizer.step()`.
"""

from fusion_rt.torch.contrib.large_batch.adaptive import Norms, split_over
from fusion_rt.torch.contrib.large_batch.lamb import LAMB
from fusion_rt.torch.contrib.large_batch.lars import LARS
from fusion_rt.torch.contrib.large_batch.schedule import LinearScaling

__all__ = ["LAMB", "LARS", "LinearScaling", "Norms", "split_over"]
