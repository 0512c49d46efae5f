"""Hooks meet what scripts do with DDP and FSDP2: each pair of hook, codec and feature is right, or refused by a
sentence.

The reference trains all ranks in one process, by plain torch. With no codec the weights have to be equal to its own; a
codec has to learn what it learns, for the most part, and ranks have to agree to the bit. What a feature promises has to
hold with all of them. Two nodes of two ranks; one job and one process group run all cells.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fusion_rt.torch as hvd
from fusion_rt.c10d import ReplicatedShards, compress, local_steps
from fusion_rt.core.errors import HorovodInternalError
from tests.c10d.script import START, backward, batch_of, process_group
from tests.harness import Job, on_ranks

STEPS, PERIOD, OVERFLOWS, UNFROZEN, SAVED = 6, 2, 2, 2, 3
BOUND = 0.2  # of the norm of gradients, which is larger without
SHARE = 0.4  # of what the reference learns
RATE = 0.3
GRADIENTS, LOCAL = ("ddp", "shards"), ("local ddp", "local shards")
CODECS = {
    "dense": "dense",
    "fp16": "fp16",
    "topk": "topk(density=0.3, minimum=100)",
    "topk with momentum": "topk(density=0.3, minimum=100, momentum=0.5)",
    "powersgd": "powersgd(rank=4, minimum=100)",
    "int8": "int8(minimum=100)",
}
KINDS = ("dense", "topk", "powersgd")
FEATURES = ("clipping", "overflow", "accumulation", "unused parameters", "unfreezing", "checkpoint", "join")


@dataclass(frozen=True)
class HookCell:
    """A meeting: the names of the things that meet."""

    hook: str
    codec: str
    feature: str


def cover() -> list[HookCell]:
    """Cells in which every two things meet that go together, with one codec of each kind."""
    pairs = itertools.product(enumerate(KINDS), enumerate(FEATURES))
    cells = [HookCell(GRADIENTS[(i + j) % 2], codec, feature) for (i, codec), (j, feature) in pairs]
    # FSDP2 gathers parameters in each forward pass, and torch has no Join for it.
    cells = [HookCell("ddp", each.codec, "join") if each.feature == "join" else each for each in cells]
    return cells + [
        HookCell(hook, "dense", feature)
        for hook in LOCAL
        for feature in FEATURES
        if (hook, feature) != ("local shards", "join")
    ]


def product() -> list[HookCell]:
    """All cells of gradients."""
    cells = [HookCell(*each) for each in itertools.product(GRADIENTS, CODECS, FEATURES)]
    return [each for each in cells if (each.hook, each.feature) != ("shards", "join")]


class Branching(torch.nn.Module):
    """Layers of which a rank uses one or the other, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(40, 30)
        self.left, self.right = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
        self.last = torch.nn.Linear(20, 4)

    def forward(self, inputs: torch.Tensor, branches: str = "both") -> torch.Tensor:
        inner = self.first(inputs).tanh()
        taken = [self.left(inner)] * (branches != "right") + [self.right(inner)] * (branches != "left")
        outputs: torch.Tensor = self.last(sum(taken).tanh())
        return outputs


def loss_of(model: Any, step: int, rank: int, feature: str) -> torch.Tensor:
    """The loss of a rank in a step; batches come again, so that they can be learned."""
    inputs, labels = batch_of(rank, step % 2)
    branches = ("left" if rank < 2 else "right") if feature == "unused parameters" else "both"
    loss: torch.Tensor = torch.nn.functional.cross_entropy(model(inputs, branches), labels)
    return loss * (float("inf") if feature == "overflow" and (step, rank) == (OVERFLOWS, 1) else 1.0)


def steps_of(rank: int, hook: str, feature: str) -> int:
    """How many steps a rank takes: in the feature join not all equally many, but those that share a replica."""
    if feature != "join":
        return STEPS
    return STEPS - 2 * (rank // 2) if hook == "local shards" else STEPS - rank


def quality(model: Any) -> float:
    """The mean loss on all batches."""
    with torch.no_grad():
        return sum(loss_of(model, step, rank, "").item() for step in range(2) for rank in range(4)) / 8


def make(feature: str) -> Branching:
    model = Branching()
    if feature == "unfreezing":
        model.first.requires_grad_(False)
    return model


# --- in one process ---------------------------------------------------------------------------------------------------


def reference(hook: str, feature: str) -> list[Branching]:
    """The models of all ranks after the script, as one process computes them."""
    replicas = {"local ddp": [[0], [1], [2], [3]], "local shards": [[0, 1], [2, 3]]}.get(hook, [[0, 1, 2, 3]])
    models = [make(feature) for _ in replicas]
    for step in range(STEPS):
        if step == UNFROZEN and feature == "unfreezing":
            for model in models:
                model.requires_grad_(True)
        there = [[rank for rank in ranks if step < steps_of(rank, hook, feature)] for ranks in replicas]
        for model, ranks, everyone in zip(models, there, replicas, strict=True):
            if ranks:
                _reference_step(model, ranks, len(everyone), step, feature)
        if hook in LOCAL and (step + 1) % PERIOD == 0:
            present = [model for model, ranks in zip(models, there, strict=True) if ranks]
            _take_mean(present)
    return [models[next(n for n, ranks in enumerate(replicas) if rank in ranks)] for rank in range(4)]


def _reference_step(model: Branching, ranks: Sequence[int], size: int, step: int, feature: str) -> None:
    model.zero_grad()
    for rank in ranks:
        for part in range(2 if feature == "accumulation" else 1):
            backward(loss_of(model, step + part, rank, feature) / size)
    if feature == "overflow" and step == OVERFLOWS and 1 in ranks:
        return
    if feature == "clipping":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
        assert norm > BOUND
    torch.optim.SGD(model.parameters(), lr=RATE).step()


@torch.no_grad()
def _take_mean(models: Sequence[torch.nn.Module]) -> None:
    for each in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack(list(each)).mean(0)
        for parameter in each:
            parameter.copy_(mean)


# --- on the ranks of a job --------------------------------------------------------------------------------------------


class HookedTraining:
    """A rank's model, with a hook, and its optimizer."""

    def __init__(self, cell: HookCell, meshes: Any, model: Branching) -> None:
        self.cell = cell
        self.model: Any = model
        unused = cell.feature == "unused parameters"
        if "ddp" in cell.hook:
            self.model = DistributedDataParallel(model, bucket_cap_mb=0.01, find_unused_parameters=unused)
        else:
            if not hasattr(model, "set_requires_gradient_sync"):
                fully_shard(model.first, mesh=meshes["shard"])
                fully_shard(model, mesh=meshes["shard"])
            if unused:
                self.model.set_reduce_scatter_unused_params(True)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.state: Any = None
        codec = CODECS[cell.codec]
        if cell.hook == "ddp":
            self.state = compress(self.model, codec, self.optimizer)
        elif cell.hook == "shards":
            self.state = ReplicatedShards(self.model, codec, meshes["replicate"], self.optimizer)
        else:
            replicas = meshes["replicate"] if cell.hook == "local shards" else None
            self.optimizer = local_steps(
                self.optimizer,
                self.model,
                f"local_sgd(steps={PERIOD})",
                replicas,
                *([] if codec == "dense" else [codec]),
            )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=cell.feature == "overflow")

    def step(self, step: int) -> None:
        rank, feature = dist.get_rank(), self.cell.feature
        self.optimizer.zero_grad()
        if feature == "accumulation":
            with self._kept_local():
                backward(loss_of(self.model, step, rank, feature))
            step += 1
        backward(self.scaler.scale(loss_of(self.model, step, rank, feature)))
        if feature == "clipping":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), BOUND)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @contextlib.contextmanager
    def _kept_local(self) -> Iterator[None]:
        if "ddp" in self.cell.hook:
            with self.model.no_sync():
                yield
            return
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def saved(self) -> bytes:
        """Everything that goes on after a restart; a node's codec is saved by its first rank, shards by each."""
        own = None
        if self.cell.hook in LOCAL:
            own = self.optimizer.own_state()
        elif self.cell.hook == "shards" or hvd.local_rank() == 0:
            own = self.state.state_dict()
        file = io.BytesIO()
        torch.save({"weights": [part.clone() for part in _parts(self.model)], "own": own}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        found = torch.load(io.BytesIO(saved), weights_only=True)
        with torch.no_grad():
            for part, weights in zip(_parts(self.model), found["weights"], strict=True):
                part.copy_(weights)
        if self.cell.hook in LOCAL:
            self.optimizer.load_own_state(found["own"])
        elif found["own"] is not None:
            self.state.load_state_dict(found["own"])


def _parts(model: torch.nn.Module) -> list[torch.Tensor]:
    """What this rank has of the parameters."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [each.to_local() if isinstance(each, DTensor) else each for each in parameters]


def _whole(model: torch.nn.Module) -> Branching:
    """The model, without a hook and not sharded."""
    plain = Branching()
    with torch.no_grad():
        for into, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            each = parameter.detach()
            into.copy_(each.full_tensor() if isinstance(each, DTensor) else each)
    return plain


def _train(cell: HookCell, meshes: Any) -> Branching:
    """Trains as a script with this feature does."""
    training = HookedTraining(cell, meshes, make(cell.feature))
    steps = steps_of(dist.get_rank(), cell.hook, cell.feature)
    if cell.feature == "join" and cell.hook == "ddp":
        with Join([training.model]):
            for step in range(steps):
                training.step(step)
        return _whole(training.model)
    if cell.feature == "unfreezing":
        for step in range(UNFROZEN):
            training.step(step)
        model = training.model.module if "ddp" in cell.hook else training.model
        model.requires_grad_(True)
        training = HookedTraining(cell, meshes, model)  # DDP has to be made anew, as torch says, and so have hooks
        for step in range(UNFROZEN, steps):
            training.step(step)
        return _whole(training.model)
    for step in range(steps):
        if step == SAVED and cell.feature == "checkpoint":
            saved = training.saved()
        training.step(step)
    if cell.feature == "join":
        hvd.join()
    if cell.feature == "checkpoint":
        again = HookedTraining(cell, meshes, make(""))
        again.load(saved)
        for step in range(SAVED, steps):
            again.step(step)
        for one, other in zip(_parts(again.model), _parts(training.model), strict=True):
            assert torch.equal(one, other), "the restored training went another way"
    return _whole(training.model)


def _meet(cells: Sequence[HookCell]) -> list[dict[str, torch.Tensor]]:
    """Returns this rank's weights after each of the cells."""
    found = []
    with process_group():
        meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for cell in cells:
            try:
                found.append(_train(cell, meshes).state_dict())
            except Exception as error:
                raise AssertionError(f"{cell}: {error}") from error
    return found


def check(cell: HookCell, weights: Sequence[dict[str, torch.Tensor]]) -> None:
    """Raises `AssertionError` unless the ranks have weights as they should."""
    models = [Branching() for _ in weights]
    for model, state in zip(models, weights, strict=True):
        model.load_state_dict(state)
    expected = reference(cell.hook, cell.feature)
    if cell.codec == "dense":
        for model, right in zip(models, expected, strict=True):
            for one, other in zip(model.parameters(), right.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=str(cell))
        return
    for model in models[1:]:
        for one, other in zip(models[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other), f"{cell}: the ranks disagree"
    begun, learned, reached = quality(Branching()), quality(expected[0]), quality(models[0])
    assert reached < begun - SHARE * (begun - learned), (
        f"{cell}: loss {begun:.3f} -> {reached:.3f}, the reference {learned:.3f}"
    )


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job((2, 2), {**START, "HOROVOD_FUSION_THRESHOLD": "4KiB"}) as running:
        yield running


@pytest.mark.parametrize("chosen", [cover, pytest.param(product, marks=pytest.mark.long)])
def test_hooks_give_what_one_process_computes_whatever_a_script_does(
    job: Job, chosen: Callable[[], list[HookCell]]
) -> None:
    cells = chosen()
    by_rank = job.run(_meet, cells)
    for cell, *weights in zip(cells, *by_rank, strict=True):
        check(cell, weights)


@on_ranks
def test_join_is_refused_where_the_replicas_that_exchange_are_not_all_ranks() -> None:
    with process_group():
        meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        training = HookedTraining(HookCell("local shards", "dense", "join"), meshes, Branching())
        for step in range(2):
            training.step(step)
        if dist.get_rank() < 2:
            with pytest.raises(HorovodInternalError, match=r"cannot take part in process set .* after join\(\)"):
                training.step(2), training.step(3)
        hvd.join()


@on_ranks
def test_shards_that_were_unfrozen_are_unknown_to_the_codec_between_replicas() -> None:
    with process_group():
        meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        training = HookedTraining(HookCell("shards", "dense", "unfreezing"), meshes, make("unfreezing"))
        training.step(0)
        training.model.requires_grad_(True)
        with pytest.raises(ValueError, match=r"unfrozen.*codec between replicas.*new ReplicatedShards"):
            training.step(1)
