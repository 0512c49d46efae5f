"""Batch normalization over the batches of all ranks: as `torch.nn.BatchNorm*d` does with all of them in one process.

In the forward pass the ranks exchange, in one message, how many elements they have, and their mean and variance in each
channel; in the backward pass two sums a channel. Variances are combined from the ranks' own, around their own means
(T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979). That
loses nothing where the mean is large; sums of squares would.

Derivatives are those of the sum of all ranks' losses, of any order (`create_graph=True`), if all ranks ask for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set, takes_part
from fusion_rt.torch.ops.gather import allgather
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.ops.signatures import Sum


class SyncBatchNorm(_BatchNorm):
    """Batch normalization of [N, C, ...] whose statistics are those of all ranks' batches together.

    Batches may differ in size between ranks, and be empty on some. Statistics are those of all ranks whenever they are
    taken from the batch: in training, and without `track_running_stats` in evaluation, too. Parameters' gradients are
    this rank's share, which `DistributedOptimizer` reduces. Unlike Horovod's, it also takes tensors of the host.

    Args:
        num_features: C, the number of channels.
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None for their cumulative average.
        affine: whether there are a learnable weight and bias.
        track_running_stats: whether there are running statistics, which are used in evaluation.
        process_set: the ranks whose batches are normalized together; other ranks normalize their own alone.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        # None: a copy of the module must not have a copy of the global set, which is filled in by `init`.
        self._process_set = None if process_set is global_process_set else process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes the batch, [N, C, ...].

        Raises:
            ValueError: it has less than two dimensions; or the ranks have one element a channel between them.
            HorovodInternalError: the exchange failed, on all ranks.
        """
        self._check_input_dim(input)
        process_set = self._process_set or global_process_set
        of_batch = self.training or not self.track_running_stats
        if not of_batch or not takes_part(process_set):
            return super().forward(input)
        elements, mean, variance = _Statistics.apply(input, process_set)  # type: ignore[no-untyped-call]
        count = float(elements)
        if count <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got {count:.0f} on all ranks")
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        inverse = torch.rsqrt(variance + self.eps)
        return _Normalize.apply(  # type: ignore[no-any-return, no-untyped-call]
            input, self.weight, self.bias, mean, inverse, count, process_set
        )

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(new.to(running.dtype), weight)


def _statistics(input: torch.Tensor, process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns, over all ranks, elements a channel (float64), mean and biased variance ([C], on the input's device)."""
    channels = input.shape[1]
    if input.numel():
        variance, mean = torch.var_mean(_wide(input), dim=_other_dims(input), correction=0)
    else:
        mean = variance = torch.zeros(channels, dtype=_wide(input).dtype, device=input.device)
    own = torch.cat([mean.new_tensor([input.numel() // max(channels, 1)]), mean, variance])
    everybodys = allgather(own.cpu().view(1, -1), process_set=process_set).double()
    counts, means, variances = everybodys[:, :1], everybodys[:, 1 : channels + 1], everybodys[:, channels + 1 :]
    count = counts.sum()
    total_mean = (counts * means).sum(0) / max(float(count), 1)
    total_variance = (counts * (variances + (means - total_mean).square())).sum(0) / max(float(count), 1)
    return count, total_mean.to(mean), total_variance.to(mean)


class _Statistics(torch.autograd.Function):
    """`_statistics`. A first derivative does not come here, since `_Normalize` has all of it in one exchange."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count, mean, variance = _statistics(input, process_set)
        ctx.mark_non_differentiable(count)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, mean)
        ctx.count, ctx.process_set = float(count), process_set
        return count, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        input, mean = ctx.saved_tensors
        of_statistics = gradients[1:]
        if all(gradient is None for gradient in of_statistics):  # on all ranks: see `_Normalize`
            return None, None
        own = torch.cat([torch.zeros_like(mean) if part is None else part for part in of_statistics])
        of_all = allreduce(own, op=Sum, process_set=ctx.process_set) / ctx.count
        of_mean, of_variance = (_channelwise(part, input) for part in of_all.chunk(2))
        from_mean = _wide(input) - _channelwise(mean, input)
        return (of_mean + 2 * of_variance * from_mean).to(input.dtype), None


class _Normalize(torch.autograd.Function):
    """(input − mean) · inverse · weight + bias, in which mean and inverse depend on the inputs of all ranks.

    The derivative by the input is the whole one, through mean and inverse, too, which get none. Derivatives of it go
    through them, since it is made of them by operations that autograd knows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        count: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.count, ctx.process_set = count, process_set
        normalized = _normalized(input, mean, inverse)
        if weight is not None:
            normalized *= _channelwise(weight, input)
        if bias is not None:
            normalized += _channelwise(bias, input)
        return normalized.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        gradient, normalized = _wide(gradients[0]), _normalized(input, mean, inverse)
        dims = _other_dims(input)
        sums = torch.cat([gradient.sum(dims), (gradient * normalized).sum(dims)])
        of_bias, of_weight = (part.to(mean.dtype) for part in sums.chunk(2))
        of_input = None
        if ctx.needs_input_grad[0]:
            means = allreduce(sums, op=Sum, process_set=ctx.process_set) / ctx.count
            mean_gradient, mean_product = means.chunk(2)
            of_input = gradient - _channelwise(mean_gradient, input) - normalized * _channelwise(mean_product, input)
            of_input *= _channelwise(inverse if weight is None else inverse * weight, input)
            of_input = of_input.to(input.dtype)
        if weight is None:
            return of_input, None, None, None, None, None, None
        return of_input, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None, None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in single precision at least."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _other_dims(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _channelwise(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshapes [C] to [1, C, 1, ...], in single precision at least."""
    return _wide(values).view(1, -1, *[1] * (like.dim() - 2))


def _normalized(input: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return (_wide(input) - _channelwise(mean, input)).mul_(_channelwise(inverse, input))
