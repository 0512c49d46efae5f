"""Distributed K-FAC: gradients are multiplied with an approximate inverse of the Fisher matrix before the step::

    from fusion_rt.torch.kfac import KFAC

    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    preconditioner = KFAC(model, lr=0.1, factor_update_steps=10, inverse_update_steps=100)
    ...
    loss.backward()
    optimizer.synchronize()
    preconditioner.step()
    with optimizer.skip_synchronize():
        optimizer.step()

The method is that of J. Martens, R. Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature"
(1503.05671), for convolutions that of R. Grosse, J. Martens (1602.01407), shared out over the ranks as in
J. G. Pauloski et al., "KAISA" (2107.01739), in its variant in which every rank gets every eigendecomposition.

For one example a layer does s_t = W a_t at locations t = 1 ... T: T = 1 for a `Linear` of a matrix, the positions of
the kernel for a `Conv2d`, whose a_t are the patches, and numbers in between for a `Linear` of [N, ..., features]. The
block of the Fisher matrix is approximated as A ⊗ G, with g_t the gradient of the example's loss by s_t:

    A = mean over examples and locations of a_t a_t^T,      G = mean over examples of sum over locations of g_t g_t^T

R. Grosse, J. Martens (1602.01407, theorem 1) write the factor T, which comes from locations that are uncorrelated and
alike, with A instead; only the product counts. A bias is the weight of a further input that is always 1.

Factors are symmetric, so only upper triangles travel. Those of several layers make a bucket, in an order that is the
same on all ranks and roughly that of the backward pass. The first update only counts the runs of each layer; from then
on a bucket is sent within the backward pass, when all its layers have run that often, and at the latest in `flush`.
Results are waited for in `settle`.
"""

from __future__ import annotations

import heapq
import math
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set, takes_part
from fusion_rt.torch.core.runtime import Runtime, is_initialized, runtime
from fusion_rt.torch.ops.broadcast import broadcast_async_
from fusion_rt.torch.ops.handles import synchronize
from fusion_rt.torch.ops.reduce import grouped_allreduce_async
from fusion_rt.torch.ops.signatures import Sum

Number: TypeAlias = float | Callable[[], float]

_SAVED_OPTIONS = ("lr", "damping", "factor_decay", "kl_clip", "factor_update_steps", "inverse_update_steps")
BUCKET_NBYTES = 4 << 20


def decomposition_cost(sizes: Sequence[int]) -> int:
    """The relative cost of eigendecompositions of symmetric n x n matrices: the sum of n^3."""
    return sum(size**3 for size in sizes)


def assign(costs: Mapping[str, float], ranks: Sequence[int]) -> dict[str, int]:
    """Gives each layer one owner, so that the ranks' total costs are about equal.

    The most expensive layer that is left goes to the rank that has least so far (R. Graham, "Bounds on multiprocessing
    timing anomalies", 1969: no rank gets more than 4/3 of the busiest one's share in the best of all assignments).
    The result depends on the arguments alone, so that all ranks come to the same one without talking.

    Args:
        costs: of each layer, none of them negative. Equally expensive ones are dealt out in this order.
        ranks: among which to choose; of those with equally little, the first one is taken.

    Returns:
        The owner of each layer, in the order of `costs`.

    Raises:
        ValueError: there are no ranks, or a cost is negative.
    """
    if not ranks:
        raise ValueError("layers cannot be assigned to no ranks at all; give at least one")
    negative = [name for name, cost in costs.items() if cost < 0]
    if negative:
        raise ValueError(f"the cost of layer {negative[0]!r} is negative: {costs[negative[0]]}")
    loads = [(0.0, position) for position in range(len(ranks))]
    owners = {}
    for name in sorted(costs, key=costs.__getitem__, reverse=True):
        load, position = loads[0]
        heapq.heapreplace(loads, (load + costs[name], position))
        owners[name] = ranks[position]
    return {name: owners[name] for name in costs}


class FactoredLayer:
    """A layer whose gradient is preconditioned.

    Attributes:
        name: its name in the model.
        module: the layer.
        weight, bias: its parameters; `bias` is None where there is none, or none that is trained.
        a_size, g_size: numbers of rows of A, with the bias's input, and of G.
        dtype: of the factors: the weight's, but single precision at least.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        self.name = name
        self.module = module
        self.weight = weight
        self.bias = bias if bias is not None and bias.requires_grad else None
        self.g_size = weight.shape[0]
        self.a_size = weight[0].numel() + (self.bias is not None)
        self.dtype = torch.promote_types(weight.dtype, torch.float32)

    def factors(
        self, inputs: torch.Tensor, gradient: torch.Tensor, loss_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns A [a_size, a_size] and G [g_size, g_size] of one batch; None if it is empty.

        Args:
            inputs: of the layer.
            gradient: of the loss, by the layer's outputs. The loss is the mean over the batch, the first dimension, so
                that the gradients of the single examples' losses are larger by the size of the batch.
            loss_scale: the factor by which the loss has been multiplied besides.
        """
        with torch.autocast(inputs.device.type, enabled=False):
            rows, gradients = self._input_rows(inputs.to(self.dtype)), self._gradient_rows(gradient.to(self.dtype))
            examples, locations, _ = rows.shape
            if not examples * locations:
                return None
            rows, gradients = rows.flatten(0, 1), gradients.flatten(0, 1)
            if self.bias is not None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            of_inputs = (rows.T @ rows).div_(examples * locations)
            of_gradients = (gradients.T @ gradients).mul_(examples / loss_scale**2)
        return of_inputs, of_gradients

    def gradient(self) -> torch.Tensor | None:
        """Returns the gradient of weight and bias as one matrix [g_size, a_size]; None if the layer took no part."""
        weight = self.weight.grad
        if weight is None or (self.bias is not None and self.bias.grad is None):
            return None
        matrix = weight.reshape(self.g_size, -1).to(self.dtype)
        if self.bias is not None:
            assert self.bias.grad is not None
            matrix = torch.cat([matrix, self.bias.grad.view(-1, 1).to(self.dtype)], dim=1)
        return matrix

    def assign(self, matrix: torch.Tensor) -> None:
        """Writes a matrix [g_size, a_size] into the gradients of weight and bias, in place."""
        assert self.weight.grad is not None
        if self.bias is not None:
            assert self.bias.grad is not None
            self.bias.grad.copy_(matrix[:, -1])
            matrix = matrix[:, :-1]
        self.weight.grad.copy_(matrix.reshape(self.weight.shape))

    def _input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """[examples, locations, inputs of the layer without the bias's]."""
        raise NotImplementedError

    def _gradient_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        """[examples, locations, g_size]."""
        raise NotImplementedError


class LinearLayer(FactoredLayer):
    """`torch.nn.Linear`, of [features], [N, features] or [N, ..., features]."""

    def _input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        return _by_example(inputs)

    def _gradient_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        return _by_example(gradient)


class Conv2dLayer(FactoredLayer):
    """`torch.nn.Conv2d` without groups, of [N, C, height, width] or [C, height, width]; with any padding and stride."""

    module: torch.nn.Conv2d

    def _input_rows(self, inputs: torch.Tensor) -> torch.Tensor:
        conv = self.module
        images = inputs if inputs.dim() == 4 else inputs.unsqueeze(0)
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        if images.numel():
            images = torch.nn.functional.pad(images, self._padding(), mode=mode)
        else:
            return images.new_empty(0, 0, self.weight[0].numel())
        patches = torch.nn.functional.unfold(images, conv.kernel_size, conv.dilation, 0, conv.stride)
        return patches.transpose(1, 2)

    def _gradient_rows(self, gradient: torch.Tensor) -> torch.Tensor:
        images = gradient if gradient.dim() == 4 else gradient.unsqueeze(0)
        return images.flatten(2).transpose(1, 2)

    def _padding(self) -> list[int]:
        """Columns to the left and to the right, rows above and below."""
        conv = self.module
        sides = []
        for dim in (1, 0):
            if conv.padding == "same":
                both = conv.dilation[dim] * (conv.kernel_size[dim] - 1)
                sides += [both // 2, both - both // 2]
            elif conv.padding == "valid":
                sides += [0, 0]
            else:
                sides += [int(conv.padding[dim])] * 2
        return sides


def find_layers(model: torch.nn.Module, skip: Iterable[str] = ()) -> tuple[list[FactoredLayer], list[str]]:
    """Returns the layers of a model that can be preconditioned, and its other modules with trained parameters.

    Args:
        model: whose parameters have their shapes (it has run once, if it has lazy modules).
        skip: names of modules, with all that is in them, and of classes, which are to be left alone.

    Returns:
        Layers in the order of the model; and sentences about those left alone that `skip` does not name.

    Raises:
        ValueError: a layer has no shape yet.
    """
    skipped = tuple(skip)
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    layers: list[FactoredLayer] = []
    left_alone = []
    for name, module in model.named_modules():
        trained = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        if not trained or _is_named(name, module, skipped):
            continue
        if any(is_lazy(parameter) for parameter in trained):
            raise ValueError(f"layer {name!r} has no shape yet; run the model on a batch before K-FAC is made for it")
        reason = _reason_against(module, users)
        if reason:
            left_alone.append(f"{name or 'the model itself'} ({type(module).__name__}: {reason})")
        elif isinstance(module, torch.nn.Linear):
            layers.append(LinearLayer(name, module))
        else:
            layers.append(Conv2dLayer(name, module))
    return layers, left_alone


def _reason_against(module: torch.nn.Module, users: Counter[int]) -> str:
    """Returns why a module with parameters cannot be preconditioned; empty if it can."""
    if not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
        return "neither Linear nor Conv2d"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        return "its weight is computed from other parameters"
    if not weight.requires_grad:
        return "its weight is not trained"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}"
    if any(p is not None and users[id(p)] > 1 for p in (weight, bias)):
        return "it shares a parameter with another module"
    if isinstance(module, torch.nn.Conv2d) and module.groups != 1:
        return f"{module.groups} groups"
    return ""


def _is_named(name: str, module: torch.nn.Module, names: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") or type(module).__name__ == one for one in names)


def _by_example(tensor: torch.Tensor) -> torch.Tensor:
    """Reshapes [features], [N, features] or [N, ..., features] to [N, locations, features]."""
    if tensor.dim() == 1:
        return tensor.view(1, 1, -1)
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.flatten(1, -2)


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the upper triangle of [n, n], row by row, as [n (n + 1) / 2]."""
    return matrix.masked_select(_triangle(len(matrix), matrix.device))


def unpack(packed: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the symmetric matrix [size, size] of which this is the upper triangle."""
    upper = packed.new_zeros(size, size).masked_scatter_(_triangle(size, packed.device), packed)
    return upper + upper.triu(1).T


def _triangle(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_()


class LayerState:
    """State of one layer's factors.

    Attributes:
        layer: the layer.
        a, g: running averages of its factors; None before the first update.
        updates: how many updates are in them.
        fresh: they have changed since they were decomposed.
        expected_runs: how often it ran in the last update in which it did; 0 if that is not known.
        runs: how often it has run since the last update.
        bucket: the layers that it is sent with.
    """

    bucket: FactorBucket

    def __init__(self, layer: FactoredLayer) -> None:
        self.layer = layer
        self.a: torch.Tensor | None = None
        self.g: torch.Tensor | None = None
        self.updates = 0
        self.fresh = False
        self.expected_runs = 0
        self.runs = 0
        self._sum: tuple[torch.Tensor, torch.Tensor] | None = None
        self._count = 0

    def add(self, factors: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Adds the factors of a batch, if it was not empty."""
        if factors is None:
            return
        self._count += 1
        if self._sum is None:
            self._sum = factors
        else:
            for total, factor in zip(self._sum, factors, strict=True):
                total += factor

    def take(self) -> tuple[list[torch.Tensor], int]:
        """Returns the triangles of A and G, averaged over the batches since the last call, and 1; or zeros and 0."""
        factors, count = self._sum, self._count
        self._sum, self._count = None, 0
        if factors is None:
            sizes = (self.layer.a_size, self.layer.g_size)
            dtype, device = self.layer.dtype, self.layer.weight.device
            return [torch.zeros(size * (size + 1) // 2, dtype=dtype, device=device) for size in sizes], 0
        return [pack(factor).div_(count) for factor in factors], 1

    def blend(self, a: torch.Tensor, g: torch.Tensor, decay: float) -> None:
        """Takes an update into the running averages, which begin as plain averages: with the weight min(1 − 1/k, decay)
        for the average before the k-th (Martens & Grosse, section 5)."""
        self.updates += 1
        self.fresh = True
        new = unpack(a, self.layer.a_size), unpack(g, self.layer.g_size)
        if self.a is None or self.g is None:
            self.a, self.g = new
            return
        weight = 1 - min(1 - 1 / self.updates, decay)
        self.a.lerp_(new[0], weight)
        self.g.lerp_(new[1], weight)


class FactorBucket:
    """Layers whose factors are sent together.

    Attributes:
        name: of the operation.
        states: the layers.
        missing: how many of them have not yet run as often as expected.
        sent: it has been sent in this update.
    """

    def __init__(self, name: str, states: Sequence[LayerState]) -> None:
        self.name = name
        self.states = states
        self.missing = len(states)
        self.sent = False
        for state in states:
            state.bucket = self


@dataclass(frozen=True)
class _Sent:
    """A bucket under way; without a handle it holds the result already."""

    bucket: FactorBucket
    tensors: list[torch.Tensor]
    handle: int | None
    here: Runtime | None


class FactorExchange:
    """Averages the factors of layers over the ranks, update after update.

    Every rank sends every bucket once in an update: also if it has nothing to say, because a layer took no part there;
    the average is then over those that have.

    Args:
        states: the layers, in the order of the model.
        name: the beginning of the operations' names.
        process_set: the ranks that take part.

    Attributes:
        updates: how often factors have been sent.
        nbytes: bytes of factors in an update.
        waited_seconds: time spent waiting for the others, in all updates together.
    """

    def __init__(self, states: Sequence[LayerState], name: str, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._buckets = _buckets(states, name)
        self._under_way: list[_Sent] = []
        self._open = False
        self.updates = 0
        self.nbytes = sum(_nbytes(state) for state in states)
        self.waited_seconds = 0.0

    def arrived(
        self, state: LayerState, factors: Callable[[], tuple[torch.Tensor, torch.Tensor] | None], decay: float
    ) -> None:
        """Takes in a layer that has run forward and backward. `factors` makes its contribution; it is not wanted any
        more if the layer has run as often as in its last update and was sent."""
        self._begin(decay)
        state.runs += 1
        if state.bucket.sent:
            return
        state.add(factors())
        if state.runs == state.expected_runs:
            state.bucket.missing -= 1
            if not state.bucket.missing:
                self._send(state.bucket)

    def flush(self, decay: float) -> None:
        """Sends the unsent rest, and ends the update."""
        self._begin(decay)
        for bucket in self._buckets:
            if not bucket.sent:
                self._send(bucket)
        self._close()
        self.updates += 1

    def settle(self, decay: float) -> None:
        """Waits for everything that was sent in the last update, and takes it into the running averages; not while an
        update is under way.

        An update with values that are not finite (a loss was scaled up too much, say) is dropped, on all ranks.

        Raises:
            HorovodInternalError: a reduction failed, on all ranks.
        """
        if self._open:
            return
        under_way, self._under_way = self._under_way, []
        started = time.perf_counter()
        results = [(sent, _result(sent)) for sent in under_way]
        self.waited_seconds += time.perf_counter() - started
        if not all(bool(tensor.isfinite().all()) for _, tensors in results for tensor in tensors):
            return
        for sent, tensors in results:
            if tensors:
                for number, count in enumerate(tensors[-1].tolist()):
                    if count:
                        a, g = tensors[2 * number : 2 * number + 2]
                        sent.bucket.states[number].blend(a / count, g / count, decay)

    def drop(self) -> None:
        """Forgets operations under way, and gathered values."""
        self._under_way = []
        for bucket in self._buckets:
            for state in bucket.states:
                state.take()
        self._close()

    def _begin(self, decay: float) -> None:
        if not self._open:
            self.settle(decay)
            self._open = True

    def _close(self) -> None:
        self._open = False
        for bucket in self._buckets:
            bucket.missing, bucket.sent = len(bucket.states), False
            for state in bucket.states:
                if state.runs:
                    state.expected_runs, state.runs = state.runs, 0

    def _send(self, bucket: FactorBucket) -> None:
        tensors: list[torch.Tensor] = []
        counts = []
        for state in bucket.states:
            triangles, count = state.take()
            tensors += triangles
            counts.append(count)
        tensors.append(tensors[0].new_tensor(counts))
        bucket.sent = True
        handle = here = None
        if takes_part(self._process_set):
            here = runtime()
            handle = grouped_allreduce_async(tensors, name=bucket.name, op=Sum, process_set=self._process_set)
        self._under_way.append(_Sent(bucket, tensors, handle, here))


def _result(sent: _Sent) -> Sequence[torch.Tensor]:
    """Waits for a bucket; nothing if it was sent to a job that has ended."""
    if sent.handle is None:
        return sent.tensors
    if not is_initialized() or sent.here is not runtime():
        return []
    reduced: Any = synchronize(sent.handle)
    return reduced or []


def _buckets(states: Sequence[LayerState], name: str) -> list[FactorBucket]:
    """Puts layers into buckets, from the last to the first, of about `BUCKET_NBYTES` each."""
    groups: list[list[LayerState]] = []
    filled = 0
    for state in reversed(states):
        nbytes = _nbytes(state)
        if not groups or filled + nbytes > BUCKET_NBYTES or not _alike(groups[-1][-1].layer, state.layer):
            groups.append([])
            filled = 0
        groups[-1].append(state)
        filled += nbytes
    return [FactorBucket(f"{name}.factors.{number}", group) for number, group in enumerate(groups)]


def _alike(one: FactoredLayer, other: FactoredLayer) -> bool:
    return one.dtype == other.dtype and one.weight.device == other.weight.device


def _nbytes(state: LayerState) -> int:
    sizes = (state.layer.a_size, state.layer.g_size)
    return sum(size * (size + 1) // 2 for size in sizes) * state.layer.dtype.itemsize


@dataclass(frozen=True)
class KFACStatistics:
    """Work of a preconditioner on this rank so far.

    Attributes:
        steps: how often gradients were preconditioned.
        factor_updates: how often factors were averaged over the ranks.
        inverse_updates: how often they were decomposed.
        decompositions: how many layers this rank has decomposed, all times together.
        factor_nbytes: bytes of factors that an update sends.
        waited_seconds: time for which factors and decompositions of other ranks kept the script waiting.
    """

    steps: int
    factor_updates: int
    inverse_updates: int
    decompositions: int
    factor_nbytes: int
    waited_seconds: float


class KFAC:
    """Preconditions the gradients of a model's `Linear` and `Conv2d` layers by K-FAC, on one rank or many.

    To be made on all ranks alike, before the first backward pass; `step()` is for between `synchronize()` and `step()`
    of a distributed optimizer, or before `step()` of a plain one. Factors are those of the empirical Fisher matrix: of
    the gradients that the script computes in training mode. Losses are means over the batch. A layer that runs several
    times before a step (it is used twice, or gradients are accumulated) counts each time as one more batch; if it runs
    more often than in the update before, the surplus is left out once.

    In an elastic job, ranks that come need the others' state: `kfac.load_state_dict(hvd.broadcast_object(
    kfac.state_dict(), 0))` on all ranks after a reset. After a step that failed, the next one decomposes the factors
    anew.

    Args:
        model: its layers get hooks; `remove` takes them off. Other modules' gradients stay as they are, with a warning.
        lr: the optimizer's learning rate, which only the KL clip needs: a number, which the script may change
            (`kfac.lr = ...`), or a function that tells it.
        damping: λ, added to the products of eigenvalues; a number, or a function that tells it.
        factor_decay: weight of the past in the running averages; smaller in the first updates.
        kl_clip: κ; preconditioned gradients P are multiplied by min(1, sqrt(κ / |Σ lr² G·P|)). None: they are not.
        factor_update_steps: factors are computed in every so many-th step.
        inverse_update_steps: they are decomposed in every so many-th step; in between the last decomposition is used.
        loss_scale: factor of losses before `backward()`: a number, or a function that returns it, such as
            `GradScaler.get_scale`; gradients must have been unscaled by `step()`. 1 / N for losses that are divided by
            N for accumulation. Updates with values that are not finite are dropped.
        skip_layers: names of modules (with all that is in them) and of classes that are left alone without a warning.
        name: the beginning of the names of the operations. Two preconditioners of a script need different ones.
        process_set: the ranks that take part; others work by themselves.

    Attributes:
        lr, damping, factor_decay, kl_clip, factor_update_steps, inverse_update_steps, loss_scale: as they were given;
            may be changed, on all ranks alike.

    Raises:
        ValueError: an argument is out of its range, the model has nothing to precondition, or layers without a shape.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: Number = 0.1,
        damping: Number = 0.001,
        factor_decay: float = 0.95,
        kl_clip: float | None = 0.001,
        factor_update_steps: int = 1,
        inverse_update_steps: int = 1,
        loss_scale: Number = 1.0,
        skip_layers: Iterable[str] = (),
        name: str = "kfac",
        process_set: ProcessSet = global_process_set,
    ) -> None:
        _check(lr, damping, factor_decay, kl_clip, factor_update_steps, inverse_update_steps)
        self.lr, self.damping, self.factor_decay, self.kl_clip = lr, damping, factor_decay, kl_clip
        self.factor_update_steps, self.inverse_update_steps = factor_update_steps, inverse_update_steps
        self.loss_scale = loss_scale
        layers, left_alone = find_layers(model, (skip_layers,) if isinstance(skip_layers, str) else skip_layers)
        if not layers:
            why = "; ".join(left_alone) or "nothing in it is trained, or all is in skip_layers"
            raise ValueError(f"K-FAC preconditions Linear and Conv2d layers, and the model has none that it can: {why}")
        if left_alone:
            warnings.warn(f"K-FAC leaves the gradients of these layers as they are: {'; '.join(left_alone)}. Name "
                          "them, or their classes, in skip_layers if that is meant.", stacklevel=2)  # fmt: skip
        self._name = name
        self._process_set = process_set
        self._states = {layer.module: LayerState(layer) for layer in layers}
        self._decompositions: dict[LayerState, _Decomposition] = {}
        self._exchange = FactorExchange(list(self._states.values()), name, process_set)
        self._steps = self._inverse_updates = self._decomposed = 0
        self._waited = 0.0
        self._never_ran_told = False
        hook = _Hook(self)
        self._hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in self._states]

    @torch.no_grad()
    def step(self) -> None:
        """Preconditions the gradients in place. They have to be the same on all ranks, which call this together.

        A layer stays as it is while it has no gradient, or has not been decomposed yet.

        Raises:
            RuntimeError: after `remove`.
            HorovodInternalError: communication failed, on all ranks.
        """
        if not self._hooks:
            raise RuntimeError("KFAC.step() after remove(); make a new KFAC for the model")
        try:
            if self._steps % self.factor_update_steps == 0:
                self._exchange.flush(self.factor_decay)
            if self._steps % self.inverse_update_steps == 0 or not self._decompositions:
                self._exchange.settle(self.factor_decay)
                self._decompose()
            self._precondition()
        except BaseException:
            self._forget()
            raise
        self._steps += 1

    def owners(self) -> dict[str, int]:
        """Returns the rank that decomposes each layer, by the layer's name, with work about equal (see `assign`)."""
        costs = {
            state.layer.name: float(decomposition_cost((state.layer.a_size, state.layer.g_size)))
            for state in self._states.values()
        }
        return assign(costs, self._process_set.ranks if takes_part(self._process_set) else [0])

    def statistics(self) -> KFACStatistics:
        """Returns the work done so far."""
        exchange = self._exchange
        return KFACStatistics(
            self._steps,
            exchange.updates,
            self._inverse_updates,
            self._decomposed,
            exchange.nbytes,
            self._waited + exchange.waited_seconds,
        )

    def remove(self) -> None:
        """Takes the hooks off the model; to be called on all ranks or none. Operations under way are forgotten."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._exchange.drop()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`: options that are numbers, and layers' factors and decompositions.

        To be called between steps. It waits for data that all ranks have sent, and sends nothing: one rank may call it
        alone. All ranks have the same state.
        """
        self._exchange.settle(self.factor_decay)
        options = {option: getattr(self, option) for option in _SAVED_OPTIONS}
        return {
            "steps": self._steps,
            "options": {option: value for option, value in options.items() if not callable(value)},
            "layers": {state.layer.name: self._saved(state) for state in self._states.values()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state, to be loaded on all ranks; training continues as if it had not been interrupted.

        Raises:
            ValueError: it is the state of another model; nothing has been changed then.
        """
        saved = state_dict["layers"]
        names = [state.layer.name for state in self._states.values()]
        if sorted(saved) != sorted(names):
            raise ValueError(
                f"the state is of a model with the layers {sorted(saved)}, and this one has {sorted(names)}"
            )
        for state in self._states.values():
            _check_saved(state, saved[state.layer.name])
        self._exchange.drop()
        self._steps = state_dict["steps"]
        for option, value in state_dict["options"].items():
            if not callable(getattr(self, option)):
                setattr(self, option, value)
        self._decompositions = {}
        for state in self._states.values():
            self._load(state, saved[state.layer.name])

    def _ran(self, module: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor) -> None:
        """Registers a hook on the output of a layer that has run forward, for the output's gradient."""
        state = self._states.get(module)
        if state is None or not module.training or not output.requires_grad:
            return
        if self._steps % self.factor_update_steps:
            return
        reference, step, seen = weakref.ref(self), self._steps, inputs.detach()

        def arrived(gradient: torch.Tensor) -> None:
            kfac = reference()
            if kfac is not None and kfac._hooks and kfac._steps == step:
                kfac._arrived(state, seen, gradient)

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _arrived(self, state: LayerState, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        scale = _value(self.loss_scale)
        self._exchange.arrived(state, lambda: state.layer.factors(inputs, gradient, scale), self.factor_decay)

    def _decompose(self) -> None:
        """Decomposes the factors that have changed, each on its owner, and begins to send the results to all."""
        fresh = [state for state in self._states.values() if state.fresh]
        together = takes_part(self._process_set)
        owners = self.owners() if together else {}
        if together:
            own = runtime().rank
            for state in fresh:  # before any work: the others' results may come while this rank decomposes
                if owners[state.layer.name] != own:
                    self._send(state, torch.empty(_packed_size(state), **_like(state)), owners[state.layer.name])
        for state in fresh:
            state.fresh = False
            if not together:
                self._decompositions[state] = _Decomposition(state, _decomposed(state), None)
            elif owners[state.layer.name] == own:
                self._send(state, _decomposed(state), own)
            else:
                continue
            self._decomposed += 1
        self._inverse_updates += bool(fresh)
        never = [state.layer.name for state in self._states.values() if not state.updates]
        if fresh and never and not self._never_ran_told:
            self._never_ran_told = True
            warnings.warn("K-FAC has not seen these layers run forward and backward in training mode, and leaves their "
                          f"gradients as they are until it does: {', '.join(never)}", stacklevel=4)  # fmt: skip

    def _forget(self) -> None:
        """Forgets all decompositions after a failure, so that the next step makes them anew."""
        self._exchange.drop()
        self._decompositions = {}
        for state in self._states.values():
            state.fresh = state.updates > 0

    def _send(self, state: LayerState, packed: torch.Tensor, owner: int) -> None:
        name = f"{self._name}.{state.layer.name}"
        handle = broadcast_async_(packed, owner, name, self._process_set)
        self._decompositions[state] = _Decomposition(state, packed, handle)

    def _precondition(self) -> None:
        damping, lr = float(_value(self.damping)), float(_value(self.lr))
        results = []
        products = []
        for state in self._states.values():
            gradient, decomposition = state.layer.gradient(), self._decompositions.get(state)
            if decomposition is None:
                continue
            started = time.perf_counter()
            decomposition.wait()
            self._waited += time.perf_counter() - started
            if gradient is None:
                continue
            preconditioned = decomposition.apply(gradient, damping)
            results.append((state, preconditioned))
            products.append((gradient * preconditioned).sum())
        factor = 1.0
        if self.kl_clip is not None and products:
            total = abs(lr**2 * sum(product.item() for product in products))
            factor = min(1.0, math.sqrt(self.kl_clip / total)) if total else 1.0
        for state, preconditioned in results:
            state.layer.assign(preconditioned.mul_(factor))

    def _saved(self, state: LayerState) -> dict[str, Any]:
        decomposition = self._decompositions.get(state)
        return {
            "updates": state.updates,
            "runs": state.expected_runs,
            "fresh": state.fresh,
            "a": None if state.a is None else state.a.clone(),
            "g": None if state.g is None else state.g.clone(),
            "decomposition": None if decomposition is None else decomposition.packed.clone(),
        }

    def _load(self, state: LayerState, saved: Mapping[str, Any]) -> None:
        like = _like(state)
        state.updates, state.expected_runs, state.fresh = saved["updates"], saved["runs"], saved["fresh"]
        state.a, state.g = (None if saved[key] is None else saved[key].to(**like, copy=True) for key in ("a", "g"))
        if saved["decomposition"] is not None:
            packed = saved["decomposition"].to(**like, copy=True)
            self._decompositions[state] = _Decomposition(state, packed, None)


class _Hook:
    """Forward hook of the layers. Copies of the model, and pickled ones, have hooks that do nothing."""

    def __init__(self, kfac: KFAC | None = None) -> None:
        self._kfac = None if kfac is None else weakref.ref(kfac)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kfac = None if self._kfac is None else self._kfac()
        if kfac is not None:
            kfac._ran(module, args[0] if args else kwargs["input"], output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return (_Hook, ())


class _Decomposition:
    """A layer's factors as Q diag(λ) Q^T.

    Args:
        state: the layer.
        packed: Q_A, λ_A, Q_G and λ_G, one after the other.
        handle: of the operation that fills it in; None if it is complete.
    """

    def __init__(self, state: LayerState, packed: torch.Tensor, handle: int | None) -> None:
        self.packed = packed
        self._handle = handle
        self._sizes = (state.layer.a_size, state.layer.g_size)

    def wait(self) -> None:
        """Waits until it is there. Raises `HorovodInternalError` if it failed, on all ranks."""
        handle, self._handle = self._handle, None
        if handle is not None:
            synchronize(handle)

    def apply(self, gradient: torch.Tensor, damping: float) -> torch.Tensor:
        """Returns Q_G [(Q_G^T gradient Q_A) / (λ_G λ_A^T + damping)] Q_A^T; gradient is [g_size, a_size]."""
        n_a, n_g = self._sizes
        q_a, l_a, q_g, l_g = torch.split(self.packed, [n_a * n_a, n_a, n_g * n_g, n_g])
        q_a, q_g = q_a.view(n_a, n_a), q_g.view(n_g, n_g)
        with torch.autocast(gradient.device.type, enabled=False):
            rotated: torch.Tensor = q_g.T @ gradient @ q_a
            rotated /= torch.outer(l_g, l_a).add_(damping)
            preconditioned: torch.Tensor = q_g @ rotated @ q_a.T
        return preconditioned


def _decomposed(state: LayerState) -> torch.Tensor:
    """Decomposes a layer's factors, packed for `_Decomposition`. Negative eigenvalues, due to rounding, become 0."""
    parts = []
    for factor in (state.a, state.g):
        assert factor is not None
        try:
            values, vectors = torch.linalg.eigh(factor)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # single precision may not do where eigenvalues are close together
            values, vectors = torch.linalg.eigh(factor.to("cpu", torch.float64))
        parts += [vectors.reshape(-1), values.clamp_(min=0)]
    return torch.cat([part.to(**_like(state)) for part in parts])


def _packed_size(state: LayerState) -> int:
    return sum(size * (size + 1) for size in (state.layer.a_size, state.layer.g_size))


def _like(state: LayerState) -> dict[str, Any]:
    return {"dtype": state.layer.dtype, "device": state.layer.weight.device}


def _value(number: Number) -> float:
    return number() if callable(number) else number


def _check_saved(state: LayerState, saved: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless the sizes are those of the layer."""
    layer = state.layer
    for key, shape in (
        ("a", (layer.a_size, layer.a_size)),
        ("g", (layer.g_size, layer.g_size)),
        ("decomposition", (_packed_size(state),)),
    ):
        if saved[key] is not None and tuple(saved[key].shape) != shape:
            found = tuple(saved[key].shape)
            raise ValueError(f"the state of layer {layer.name!r} has {key!r} of shape {found}, and the layer needs "
                             f"{shape}; it is the state of another model")  # fmt: skip


def _check(
    lr: Number, damping: Number, factor_decay: float, kl_clip: float | None, factor_steps: int, inverse_steps: int
) -> None:
    """Raises `ValueError` for options that are out of their range."""
    if not callable(lr) and lr < 0:
        raise ValueError(f"lr is the optimizer's learning rate, and cannot be negative: {lr}")
    if not callable(damping) and damping <= 0:
        raise ValueError(f"damping has to be positive, since factors may be singular: {damping}")
    if not 0 <= factor_decay < 1:
        raise ValueError(f"factor_decay has to be in [0, 1): {factor_decay}")
    if kl_clip is not None and kl_clip <= 0:
        raise ValueError(f"kl_clip has to be positive, or None for none: {kl_clip}")
    for option, steps in (("factor_update_steps", factor_steps), ("inverse_update_steps", inverse_steps)):
        if steps < 1:
            raise ValueError(f"{option} has to be 1 or more: {steps}")
