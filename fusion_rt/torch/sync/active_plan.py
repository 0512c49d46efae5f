"""The active plan of an optimizer in this worker: its proposal, and buckets and arena that follow from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from fusion_rt import wire
from fusion_rt.client import Operation
from fusion_rt.host.arena import Segment
from fusion_rt.torch.autotune.replanning import Replanning
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.core.tensors import TORCH_DTYPES
from fusion_rt.torch.node.reduction import NodeReduction, NodeWay, reduction_in_node
from fusion_rt.torch.ops.signatures import id_of
from fusion_rt.torch.sync.buckets import Bucket, BucketIO, Stage
from fusion_rt.torch.sync.checkpoint import Checkpoint
from fusion_rt.torch.sync.gpu_selection import Selections
from fusion_rt.torch.sync.in_node import InNode
from fusion_rt.torch.sync.on_device import OnDevice
from fusion_rt.torch.sync.options import Options, Where
from fusion_rt.torch.sync.parameters import Trained, exchanged_dtype
from fusion_rt.torch.sync.slots import Slot
from fusion_rt.torch.sync.sparse_gradients import SparseBucket


class ActivePlan:
    """The plan of one optimizer, or none yet.

    Args:
        options: how the optimizer's parameters are exchanged.
        trained: asked for the groups of parameters.
        checkpoint: the optimizer's state in the daemons.
        selections: the part of that which this worker keeps itself.

    Attributes:
        here: the membership that it belongs to.
        made: there is one.
        agreed: the plan that ranks have agreed upon; also after it has been dropped, until there is another one.
        buckets: of the plan; empty while there is none.
        node: the reduction within this node; None if the daemon combines gradients.
        count: how often there was a new plan.
        nbytes: bytes that a step exchanges, without sparse gradients.
        order: names of parameters in the last plan of an earlier membership; none if some had sparse gradients.
    """

    def __init__(self, options: Options, trained: Trained, checkpoint: Checkpoint, selections: Selections) -> None:
        self._options, self._trained = options, trained
        self._checkpoint, self._selections = checkpoint, selections
        self.here = runtime()
        self._group, self._identity = self._name()
        self.made = False
        self.agreed: wire.Plan | None = None
        self.buckets: list[Bucket] = []
        self.node: NodeReduction | None = None
        self.count = self.nbytes = 0
        self.order: tuple[str, ...] = ()
        self._id = 0
        self._proposed: Operation | None = None
        self._segment: int | None = None

    @property
    def group(self) -> str:
        """Name of the plans of this optimizer, the same on all ranks."""
        if not self._group:
            self._group, self._identity = self._name()
        return self._group

    @property
    def is_named(self) -> bool:
        """False after `unname`, until the optimizer is used."""
        return bool(self._group)

    def unname(self) -> None:
        """Has later memberships name this optimizer's plans only when it is used, in the order in which those are."""
        self._group = ""

    def where(self) -> Where:
        """Returns where daemons keep the state that belongs to it."""
        return Where(self.here, self._options.process_set, self.group, self.agreed)

    def is_first(self) -> bool:
        """Tells whether this rank is the first of those that take part."""
        return self.here.rank == self.here.client.process_sets[self.where().process_set].ranks[0]

    def propose(
        self,
        order: Mapping[str, Slot],
        reduction: wire.Reduction,
        replanning: Replanning | None = None,
        may_be_late: bool = False,
        ahead: bool = False,
    ) -> None:
        """Asks for a plan if there is none, and does not wait for it.

        Args:
            order: slots by name, in the order in which they are wanted.
            reduction: how contributions are combined.
            replanning: the tuner of plans, if there is one.
            may_be_late: updates can be applied one step late.
            ahead: gradients are not looked at; none is sparse, and there is no compressor. With overlap, who touches
                one waits until it is reduced.

        Raises:
            AlgorithmError, MixingError: so many ranks cannot do this; on all of them.
        """
        if self.made or self._proposed is not None:
            return
        if not order:
            self.made = True
            return
        process_set = id_of(self.here, self._options.process_set, "allreduce")
        self._options.check(len(self.here.client.process_sets[process_set].ranks))  # no other membership would help
        # Numbered by the plan that the new one replaces, which all ranks agree about even if one of them, which had
        # joined, took no part in some of their proposals.
        specs = tuple(self._spec(slot, None if ahead else self._options.rule.value(slot)) for slot in order.values())
        proposal = wire.Proposal(self.group, process_set, self._id, reduction, specs, identity=self._identity)
        if replanning is not None:
            proposal = replanning.proposal(self.here, proposal, may_be_late, self._options.go_on is not None)
        self._proposed = self.here.client.propose(proposal)

    @property
    def is_asked_for(self) -> bool:
        """True if a plan has been proposed, and has not been waited for yet."""
        return self._proposed is not None

    def is_proposed_in_vain(self) -> bool:
        """Tells whether a plan has been proposed that has not arrived yet."""
        return self._proposed is not None and not self.here.client.poll(self._proposed)

    def await_agreement(self) -> wire.Plan | None:
        """Waits for the plan that was asked for; None if none was."""
        if self._proposed is None:
            return None
        proposed, self._proposed = self._proposed, None
        self.agreed = self.here.client.wait(proposed).plan
        return self.agreed

    def make(self, plan: wire.Plan, order: Mapping[str, Slot], io: BucketIO) -> None:
        """Makes buckets as ranks have agreed, in a new segment of the arena."""
        here, where = self.here, self.where()
        self._checkpoint.planned(where, plan, order)
        parameters = [order[tensor.name].parameter for bucket in plan.buckets for tensor in bucket.tensors]
        parts = not self._selections.may_select(plan, parameters)  # a worker selects from the whole
        way = NodeWay(parts, parts and not io.schedule.delays)
        self.node = reduction_in_node(here, plan, parameters, self.node, way)
        nbytes = self._selections.choose(where, plan, order, self.node)
        self.buckets = [self._sparse(order[tensor.name], tensor.sparse, io) for tensor in plan.sparse]
        with here.allocating:
            here.collect()
            self._segment, segment = here.client.plan_segment(plan, nbytes)
        self._id, self.made = plan.id, True
        self.count += 1
        self.nbytes = 0
        for planned in plan.buckets:
            dtype = TORCH_DTYPES[planned.dtype]
            flat = torch.frombuffer(segment.view, dtype=dtype, count=planned.numel, offset=planned.offset)
            slots = [order[tensor.name] for tensor in planned.tensors]
            name = f"{self.group}, bucket {planned.index}"
            bucket = Bucket(here, (name, plan.id, planned.index), slots, io, flat)
            for slot, tensor in zip(slots, planned.tensors, strict=True):
                place = flat[tensor.start : tensor.start + tensor.numel]
                slot.place(bucket, place, io.is_direct(slot))
                if (due := self._checkpoint.pay(tensor.name)) is not None:
                    owed = torch.from_numpy(due) / self._options.reduction.prescale
                    bucket.owed.append((tensor.start, owed.to(dtype)))
            self._choose_stages(bucket, planned, segment)
            self.buckets.append(bucket)
            self.nbytes += bucket.nbytes
        if not all(io.is_direct(slot) for slot in order.values()):
            device.layer.pin(segment, parameters)

    def give_up(self, here: Runtime) -> None:
        """Drops the plan. `here`: the membership that the next one will belong to.

        Raises:
            HorovodInternalError: one was asked for in this membership, and the job has failed.
        """
        if here is self.here and (agreed := self.await_agreement()) is not None:
            self._id = agreed.id  # all ranks have asked for it, and the next one replaces it
        if here is not self.here and self.made:
            self.order = _order_of(self.agreed)
        self.made, self.buckets, self._proposed = False, [], None
        if here is self.here:
            self._selections.lay_down(self.where())
        self._selections.forget()
        if here is not self.here:
            self.close()
            self.here, self._segment, self._id, self.agreed = here, None, 0, None
            self._group, self._identity = self._name() if self._group else ("", "")
        if self._segment is not None:
            here.client.arena.drop_segment(self._segment)
            self._segment = None

    def release(self) -> None:
        """Releases the plan's resources. Called by a finalizer, and so at any moment: sends nothing."""
        if self._segment is not None:
            self.here.retired.append(self._segment)
            self._segment = None
        self.close()

    def close(self) -> None:
        """Ends the connection to other ranks of the node."""
        if self.node is not None:
            self.node.close()
            self.node = None

    def _name(self) -> tuple[str, str]:
        alike = sorted((named.name, *named.parameter.shape) for named in self._trained.named())
        digest = hashlib.blake2b(repr(alike).encode(), digest_size=8).hexdigest()
        return self.here.next_group(self._options.process_set.process_set_id, digest)

    def _spec(self, slot: Slot, value: torch.Tensor | None) -> wire.TensorSpec:
        """Makes the spec with which a slot is proposed. `value`: the one posted of it, if it is known."""
        options = self._options
        sparse = value.sparse_dim() if value is not None and value.is_sparse and not options.sparse_as_dense else 0
        if options.compressor is None:
            tensor = slot.parameter.permute(slot.order)
        else:
            dense = value.to_dense() if value is not None and value.is_sparse else value
            tensor = slot.compress(options.compressor, dense)
        group = 0 if options.algorithm.sums_gradients else self._trained.group_of(slot.parameter)
        dtype = exchanged_dtype(slot.name, tensor)
        return wire.TensorSpec(slot.name, dtype, tuple(tensor.shape), slot.together, sparse, group)

    def _choose_stages(self, bucket: Bucket, planned: wire.Bucket, segment: Segment) -> None:
        """Gives a bucket its further stages: none where its values are in this process's memory, and the daemon
        combines those of the node's ranks."""
        on_host = all(device.layer.is_host(slot.parameter) for slot in bucket.slots)
        copies = None if on_host else OnDevice(bucket)
        selector = self._selections.selector(planned, segment, bucket.slots, copies)
        in_node = None if self.node is None else InNode(self.node, selector, copies)
        stages: tuple[Stage | None, ...] = (in_node, selector, copies)
        bucket.stages, bucket.stage = [stage for stage in stages if stage is not None], copies

    def _sparse(self, slot: Slot, dims: int, io: BucketIO) -> Bucket:
        op = self._options.reduction.op
        if op not in ("average", "sum"):
            raise ValueError(f"the gradient of {slot.name!r} is sparse, and sparse gradients have no {op}; use Average "
                             "or Sum, or sparse_as_dense=True")  # fmt: skip
        name = f"{self.group}.{slot.name}"
        bucket = slot.bucket = SparseBucket(self.here, name, slot, io, dims, op, self._options.process_set)
        return bucket


def _order_of(plan: wire.Plan | None) -> tuple[str, ...]:
    if plan is None or plan.sparse:
        return ()
    return tuple(tensor.name for bucket in plan.buckets for tensor in bucket.tensors)
