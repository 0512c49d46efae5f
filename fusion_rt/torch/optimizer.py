"""`DistributedOptimizer`: the script's optimizer, with gradients reduced over all ranks before each step.

The way of gradients is in `sync/`. Here its rule and its schedule are chosen.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from fusion_rt import algorithms, codecs, wire
from fusion_rt.settings import Settings
from fusion_rt.torch.autotune.replanning import replanning
from fusion_rt.torch.core.compressors import Compression, codec_of
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set, takes_part
from fusion_rt.torch.core.runtime import runtime
from fusion_rt.torch.ops.signatures import Adasum, Average, id_of, resolve
from fusion_rt.torch.sync.at_step.adasum import AdasumAtStep, CombinedSteps
from fusion_rt.torch.sync.at_step.at_homes import AtHomes, OfGradients
from fusion_rt.torch.sync.at_step.at_step import AtStep
from fusion_rt.torch.sync.at_step.local_steps import LocalSteps, OfParameters
from fusion_rt.torch.sync.at_step.outer_optimizer import chosen_outer_optimizer
from fusion_rt.torch.sync.broadcasting import broadcast_step
from fusion_rt.torch.sync.in_backward import InBackward, ReducedGradients
from fusion_rt.torch.sync.options import Options
from fusion_rt.torch.sync.overlap.after_step import AfterStep, OneStepLate
from fusion_rt.torch.sync.parameters import (
    Groups,
    are_shards,
    check_dtypes,
    check_memory,
    groups_of,
    names_of,
    optimizer_spec,
)
from fusion_rt.torch.sync.step_schedule import Schedule
from fusion_rt.torch.sync.update_rule import UpdateRule
from fusion_rt.torch.sync.wrapped import Wrapped, checked_passes, rewrap, wrap

OVERLAPS = ("none", "forward", "stale")
_DistributedOptimizer = Wrapped  # under this name of Horovod's, other libraries import it


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    algorithm: algorithms.Algorithm | str | None = None,
    overlap: str | None = None,
) -> Any:
    """Makes an optimizer that reduces gradients over all ranks before it takes a step.

    Reduction starts during the backward pass, as gradients arrive, in buckets that are agreed upon in the first step.
    From then on gradients lie in shared memory (`p.grad` is a view of it). Optimizers have to be made in the same order
    on all ranks. A parameter belongs to the distributed optimizer that was made for it last.

    Sparse gradients (of `torch.nn.Embedding(sparse=True)`) are combined as sparse ones: every rank gets all rows.

    Args:
        optimizer: any `torch.optim.Optimizer`. Use the result in its place from now on.
        named_parameters: `model.named_parameters()`; names the tensors in messages. All parameters of the optimizer
            have to be among them.
        compression: `Compression.none`, `.fp16`, `.bf16`, `.topk(0.01)` and its like (docs/compression.md), a codec's
            text, or a class with `compress` and `decompress`. `none` means the codec of `fusionrun --compression`.
        backward_passes_per_step: backward passes whose gradients are accumulated (summed) locally before they are
            reduced.
        op: how the ranks' gradients are combined: `Average`, `Sum`, `Min`, `Max` or `Product`; with `Adasum`, every
            rank takes its own step, and the changes of the parameters are combined.
        gradient_predivide_factor: with `Average`, divides gradients by this before they are added up instead of
            dividing the sum only at the end: the result is the same, the range of values in between is not.
        num_groups: deprecated, use `groups`.
        groups: lists of parameters that are reduced together, each list in a bucket of its own (for each dtype); or the
            number of such lists to make of the parameters in their order. By default buckets are filled up to
            HOROVOD_FUSION_THRESHOLD, in the order in which gradients arrive.
        sparse_as_dense: sparse gradients are reduced as dense ones, and sparse again afterwards.
        process_set: the ranks that take part. On all others the optimizer steps with the gradients it has.
        algorithm: training algorithm: one of `hvd.algorithms`, or its text; see docs/algorithms.md. The default is
            `fusionrun --algorithm`, and without that the synchronous all-reduce.
        overlap: "forward": `step()` returns at once, and a parameter is updated when the next forward pass needs it,
            with the same results; "stale": it is updated one step late; "none"; see docs/overlap.md. The default is
            `fusionrun --overlap`.

    Returns:
        An instance of a class derived from the optimizer's, with the methods `synchronize`, `skip_synchronize`,
        `set_backward_passes_per_step` and `statistics` besides.

    Raises:
        ValueError: before `init`, or for arguments that cannot be used.
        NotImplementedError: `Adasum` with a process set.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
                      DeprecationWarning, stacklevel=2)  # fmt: skip
        groups = num_groups if groups is None else groups
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    names, together = names_of(optimizer, named_parameters), groups_of(optimizer, groups)
    here = runtime()
    if process_set.included():
        id_of(here, process_set, "allreduce")  # raises if it is not registered
    codec = codec_of(compression)
    compressor = compression if codec is None else None
    if compressor is None and takes_part(process_set):
        check_dtypes(optimizer, names)
    chosen = here.client.welcome.compression if compression is Compression.none else codec or "dense"
    spec = algorithms.parse(here.client.welcome.algorithm if algorithm is None else str(algorithm))
    if spec.codec and codecs.parse(chosen).lossless:
        chosen = spec.codec
    check_codec(optimizer, chosen, resolve(op))
    if spec.signal is algorithms.Signal.GRADIENT and are_shards(optimizer):
        raise ValueError(
            "parameters are sharded (by fully_shard, for example), and their gradients are reduced by the sharding, "
            f"not by {spec}; use the optimizer as it is, local_sgd or diloco, or fusion_rt.c10d.ReplicatedShards"
        )
    algorithms.check_use(spec, codecs.parse(chosen), resolve(op), process_set.size() or 1)
    settings, asked = Settings.from_env(), overlap
    overlap = chosen_overlap(overlap, optimizer, spec, op == Adasum)
    reduction = wire.Reduction(
        resolve(op), 1.0 / gradient_predivide_factor, gradient_predivide_factor, chosen, "allreduce",
        packages=algorithms.packages(spec, codecs.parse(chosen)),
    )  # fmt: skip
    options = Options(reduction, process_set, ReducedGradients(), compressor)
    schedule: type[Schedule] = InBackward
    checked_passes(backward_passes_per_step)
    if not spec.sums_gradients and takes_part(process_set):
        replanning(settings, f"{spec} is no all-reduce", here.rank)
        _check_algorithm(optimizer, spec, compressor, gradient_predivide_factor)
        shard = optimizer_spec(optimizer) if spec.steps_at_home else None
        if spec.steps_at_home:
            check_memory({p: names[p] for group in optimizer.param_groups for p in group["params"]}, spec)
        reduction = wire.Reduction(
            "average", codec=chosen, algorithm=str(spec), optimizer=shard, packages=reduction.packages
        )
        schedule, rule = family_of(spec, codecs.parse(chosen))
        options = Options(reduction, process_set, rule, sparse_as_dense=True)
    elif op == Adasum and here.size > 1:
        if process_set != global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        replanning(settings, "it is for Adasum", here.rank)
        options = replace(options, rule=CombinedSteps())
        schedule = AdasumAtStep
    else:
        tuned = replanning(settings, "", here.rank) if takes_part(process_set) else None
        options = replace(options, sparse_as_dense=sparse_as_dense, replanning=tuned)
        if tuned and settings.auto == "async" and asked is None and overlap == "none":
            overlap = "none" if isinstance(optimizer, torch.optim.LBFGS) else "forward"
        if overlap != "none" and takes_part(process_set):
            schedule = OneStepLate if overlap == "stale" else AfterStep
        if tuned and overlap != "stale" and _may_step_locally(optimizer, options, settings):
            options = _with_local_steps(options, schedule)
    wrapped = wrap(optimizer, names, together, options, schedule, backward_passes_per_step)
    wrapped.op, wrapped.gradient_predivide_factor = op, gradient_predivide_factor
    wrapped.sparse_as_dense, wrapped.process_set = sparse_as_dense, process_set
    if overlap != "none":
        wrapped.synchronize_parameters = wrapped._schedule.finish  # also with one rank, where nothing is late
    return wrapped


def chosen_overlap(
    asked: str | None, optimizer: torch.optim.Optimizer, spec: algorithms.Algorithm, adasum: bool
) -> str:
    """Returns which of `OVERLAPS` an optimizer has. `asked`: None for the one that FUSION_OVERLAP names.

    Raises:
        ValueError: there is no such way, or it makes no sense with the rest.
    """
    way = Settings.from_env().overlap if asked is None else asked
    if way not in OVERLAPS:
        raise ValueError(f"overlap={way!r} is not one of {', '.join(OVERLAPS)}")
    if way == "none":
        return way
    source = f"overlap={way!r}" + (" (of FUSION_OVERLAP)" if asked is None else "")
    if not spec.sums_gradients:
        raise ValueError(
            f"{source} cannot be used with the algorithm {spec}, whose updates come from elsewhere, at their own "
            "time; overlap is for allreduce"
        )
    if adasum:
        raise ValueError(f"{source} cannot be used with op=Adasum, which combines steps that have been taken already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(f"{source} cannot be used with L-BFGS, which evaluates the model while it takes a step; "
                         "use overlap='none'")  # fmt: skip
    return way


def family_of(spec: algorithms.Algorithm, codec: codecs.Codec) -> tuple[type[AtStep], UpdateRule]:
    """Returns the schedule and the rule of an algorithm that is no all-reduce of gradients, by what its ranks send.

    Where all ranks take the mean of their parameters, and a codec rounds, they send their changes since the last mean,
    so that the parameters are not rounded, and a step that is small beside them is not lost.
    """
    if spec.steps_at_home:
        return AtHomes, OfGradients()
    if spec.signal is algorithms.Signal.PARAMETER and (spec.at_homes or codec.lossless):
        return LocalSteps, OfParameters()
    return chosen_outer_optimizer(spec)


def _may_step_locally(optimizer: torch.optim.Optimizer, options: Options, settings: Settings) -> bool:
    """Tells whether `--auto` may have ranks take local steps instead, which has to be possible on all of them, and to
    end at any exchange: so not where ranks come and go, or may rely on parameters that are alike after each step."""
    return (
        settings.auto == "async"
        and options.process_set is global_process_set
        and options.compressor is None
        and not options.sparse_as_dense
        and (options.reduction.op, options.reduction.postscale) == ("average", 1.0)
        and not runtime().client.is_elastic
        and not isinstance(optimizer, torch.optim.LBFGS)
        and not are_shards(optimizer)
    )


def _with_local_steps(options: Options, schedule: type[Schedule]) -> Options:
    """Returns the options of all-reduces with a way to algorithms with local steps, and back."""

    def go_on(wrapped: Wrapped, text: str) -> None:
        spec, tuner = algorithms.parse(text), wrapped._sync.replanning
        assert tuner is not None
        again = replace(known, replanning=lambda: tuner)
        if spec.sums_gradients:
            broadcast_step(wrapped, 0)  # local steps have left momenta that differ
            rewrap(wrapped, again, schedule)
            return
        codec = spec.codec or "dense"
        packages = algorithms.packages(spec, codecs.parse(codec))
        reduction = wire.Reduction("average", codec=codec, algorithm=text, packages=packages)
        family, rule = family_of(spec, codecs.parse(codec))
        local = replace(again, reduction=reduction, rule=rule, sparse_as_dense=True)
        rewrap(wrapped, local, family)

    known = replace(options, go_on=go_on)
    return known


def _check_algorithm(
    optimizer: torch.optim.Optimizer, spec: algorithms.Algorithm, compressor: Any, predivide: float
) -> None:
    """Raises `ValueError` for what cannot be used with an algorithm other than all-reduce, and warns of momentum."""
    if compressor is not None:
        raise ValueError(f"{spec} cannot use a compressor of the script's own; use a codec, such as Compression.fp16")
    if predivide != 1.0:
        raise ValueError(
            f"gradient_predivide_factor makes no sense with {spec}, which adds up no gradients of all ranks"
        )
    if spec.stale and any(group.get("momentum") for group in optimizer.param_groups):
        warnings.warn(
            f"the optimizer has momentum, and {spec} is asynchronous: stale gradients act like momentum themselves, so "
            "that both together may diverge; use momentum=0, or a lower learning rate",
            stacklevel=4,
        )


def check_codec(optimizer: torch.optim.Optimizer, text: str, op: wire.Op) -> None:
    """Raises `CodecError` for a codec that cannot be used with `op`, and warns of momentum that would count twice."""
    codec = codecs.parse(text)
    codec.check_use(op)
    if not codec.has_momentum():
        return
    groups = optimizer.param_groups
    if any(group.get("momentum") or (group.get("betas") or (0.0,))[0] for group in groups):
        asked = "betas=(0, ...)" if any("betas" in group for group in groups) else "momentum=0"
        warnings.warn(
            f"the codec {codec.name} has a momentum, and the optimizer another: the update would have both; give the "
            f"optimizer {asked}, or the codec no momentum",
            stacklevel=3,
        )
