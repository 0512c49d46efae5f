"""A network spread over ranks is the network: on every grid, training gives what one process without any of it gets."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fusion_rt.torch as hvd
from tests.harness import Job, run_scripts

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
JOINT = 64  # images in a step, of all replicas together
SHORT, LONG = 1, 4  # epochs of 22 steps

sys.path.insert(0, str(EXAMPLES))
import digits  # noqa: E402
import pipeline  # noqa: E402


@dataclass(frozen=True)
class Trained:
    """What a rank found.

    Attributes:
        place: (stage, replica, part) of this rank.
        parameters: its own, by their names in the whole network, after the last step.
        digests: of its parameters after each step.
        accuracy: share of the test images that are read correctly.
    """

    place: tuple[int, int, int]
    parameters: dict[str, np.ndarray]
    digests: list[str]
    accuracy: float


def options_of(*arguments: str, epochs: int, batch_size: int) -> argparse.Namespace:
    return pipeline.make_parser().parse_args([*arguments, "--epochs", str(epochs), "--batch-size", str(batch_size)])


def place_of(stage: int = 0, stages: int = 1, replica: int = 0, replicas: int = 1) -> pipeline.Place:
    """A place in a grid without parts, whose process sets are not for use."""
    none = hvd.ProcessSet([])
    return pipeline.Place(stage, replica, 0, stages, replicas, 1, none, none, None, None)


def train(options: argparse.Namespace) -> Trained:
    """What the ranks run."""
    torch.set_num_threads(1)
    digests: list[str] = []
    parameters: dict[str, np.ndarray] = {}

    def record(model: torch.nn.Module) -> None:
        parameters.update({name: p.detach().numpy().copy() for name, p in model.named_parameters()})
        digests.append(hashlib.sha256(b"".join(value.tobytes() for value in parameters.values())).hexdigest())

    result = pipeline.train(options, record)
    place = result.place
    return Trained((place.stage, place.replica, place.part), parameters, digests, result.accuracy)


def train_alone(epochs: int) -> dict[str, np.ndarray]:
    """Parameters of the same network after plain training in this process, with the replicas' batches put together."""
    options = options_of(epochs=epochs, batch_size=JOINT)
    model = pipeline.make_stage(options, place_of())
    images, labels = digits.load()[0].tensors
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, nesterov=True)
    batches = [batch for epoch in range(epochs) for batch in pipeline.batches(options, place_of(), epoch, len(images))]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, len(batches), pct_start=0.2, cycle_momentum=False
    )
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def put_together(ranks: list[Trained]) -> dict[str, np.ndarray]:
    """Parameters of the whole network, from the stages and parts of the first replica."""
    whole: dict[str, np.ndarray] = {}
    shares: dict[str, list[np.ndarray]] = {}
    for rank in sorted((rank for rank in ranks if rank.place[1] == 0), key=lambda rank: rank.place):
        for name, value in rank.parameters.items():
            shares.setdefault(name, []).append(value)
    for name, values in shares.items():
        if len(values) > 1 and name.endswith(("up_weight", "up_bias", "down_weight")):
            whole[name] = np.concatenate(values, axis=1 if name.endswith("down_weight") else 0)
        else:
            assert all(np.array_equal(value, values[0]) for value in values), f"parts differ in {name}"
            whole[name] = values[0]
    return whole


def assert_same(ranks: list[Trained], alone: dict[str, np.ndarray]) -> None:
    whole = put_together(ranks)
    assert whole.keys() == alone.keys()
    for name, expected in alone.items():
        np.testing.assert_allclose(whole[name], expected, rtol=0, atol=1e-5, err_msg=name)
    for rank in ranks:
        other = next(other for other in ranks if other.place == (rank.place[0], 0, rank.place[2]))
        assert rank.digests == other.digests, "replicas have the same bits after each step"
        assert len(set(rank.digests)) == len(rank.digests), "every step changes something"
        assert rank.accuracy == ranks[0].accuracy


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    return train_alone(SHORT)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two nodes of two ranks."""
    with Job((2, 2), {"HOROVOD_START_TIMEOUT": "120"}) as running:
        yield running


# --- parts, in this process -------------------------------------------------------------------------------------------


def test_gpipe_passes_all_micro_batches_forward_first() -> None:
    passes = pipeline.schedule("gpipe", place_of(stage=0, stages=2), 3)
    assert passes == [(kind, number) for kind in ("forward", "backward") for number in range(3)]


def test_1f1b_alternates_and_keeps_no_more_than_there_are_stages_to_come() -> None:
    assert pipeline.schedule("1f1b", place_of(stage=1, stages=2), 2) == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1),
    ]  # fmt: skip
    for stages in (1, 3, 5):
        for stage in range(stages):
            for micro_batches in (1, 2, 4, 9):
                passes = pipeline.schedule("1f1b", place_of(stage=stage, stages=stages), micro_batches)
                for kind in ("forward", "backward"):
                    assert [number for what, number in passes if what == kind] == list(range(micro_batches))
                kept = np.cumsum([1 if kind == "forward" else -1 for kind, _ in passes])
                assert kept.max() == min(stages - stage, micro_batches)
                assert all(passes.index(("forward", m)) < passes.index(("backward", m)) for m in range(micro_batches))


def test_each_layer_is_in_one_stage_with_the_same_parameters_as_in_the_whole() -> None:
    options = options_of(epochs=1, batch_size=JOINT)
    whole = pipeline.make_stage(options, place_of()).state_dict()
    for stages in (2, 3, 4):
        parts = [pipeline.make_stage(options, place_of(stage, stages)).state_dict() for stage in range(stages)]
        assert [name for part in parts for name in part] == list(whole)
        assert all(torch.equal(value, whole[name]) for part in parts for name, value in part.items())
    with pytest.raises(SystemExit, match="4 blocks of 256 hidden units do not suffice for 5 stages of 1 parts"):
        pipeline.make_stage(options, place_of(0, 5))


def test_replicas_share_out_a_batch() -> None:
    joint = pipeline.batches(options_of(epochs=3, batch_size=8), place_of(), 2, 50)
    shares = [
        pipeline.batches(options_of(epochs=3, batch_size=4), place_of(replica=replica, replicas=2), 2, 50)
        for replica in range(2)
    ]
    assert [len(batch) for batch in joint] == [8] * 6
    for batch, *parts in zip(joint, *shares, strict=True):
        assert sorted(torch.cat(parts).tolist()) == sorted(batch.tolist())
    assert len(set(torch.cat(joint).tolist())) == 48


# --- on four ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_two_stages_of_two_replicas_train_as_one_process_does(job: Job) -> None:
    ranks = job.run(train, options_of("--stages", "2", epochs=LONG, batch_size=JOINT // 2))
    assert [rank.place for rank in ranks] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert not ranks[0].parameters.keys() & ranks[2].parameters.keys(), "no rank has the whole network"
    assert_same(ranks, train_alone(LONG))
    assert ranks[0].accuracy > 0.95


@pytest.mark.multiprocess
def test_both_schedules_give_the_same_bits(job: Job, alone: dict[str, np.ndarray]) -> None:
    ran = [
        job.run(train, options_of("--stages", "2", "--schedule", kind, epochs=SHORT, batch_size=JOINT // 2))
        for kind in ("gpipe", "1f1b")
    ]
    assert [rank.digests for rank in ran[0]] == [rank.digests for rank in ran[1]]
    assert_same(ran[1], alone)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("stages", "parts"),
    [pytest.param(4, 1, id="four stages"), pytest.param(2, 2, id="two stages of two parts"),
     pytest.param(1, 2, id="two replicas of two parts")],
)  # fmt: skip
def test_other_grids_train_as_one_process_does(job: Job, alone: dict[str, np.ndarray], stages: int, parts: int) -> None:
    arguments = ["--stages", str(stages), "--tensor-parallel", str(parts), "--schedule", "1f1b"]
    replicas = 4 // (stages * parts)
    ranks = job.run(train, options_of(*arguments, epochs=SHORT, batch_size=JOINT // replicas))
    assert len({rank.place for rank in ranks}) == 4
    assert_same(ranks, alone)


@pytest.mark.multiprocess
def test_options_that_do_not_fit_are_refused_on_every_rank(job: Job) -> None:
    def refused(*arguments: str) -> set[str]:
        return set(job.run(refusal, options_of(*arguments, epochs=SHORT, batch_size=JOINT)))

    assert refused("--stages", "3") == {
        "4 ranks cannot be divided into 3 stages of 1 parts; start a multiple of stages times parts, both at least 1"
    }
    assert refused("--stages", "2", "--micro-batches", "5") == {
        "a batch of 64 cannot be divided into 5 equal micro-batches; see --batch-size and --micro-batches"
    }


def refusal(options: argparse.Namespace) -> str:
    try:
        pipeline.train(options)
    except SystemExit as error:
        return str(error)
    return "trained"


@pytest.mark.multiprocess
def test_the_script_says_how_well_it_reads() -> None:
    arguments = ["--stages", "2", "--epochs", "2"]
    printed, nothing = run_scripts(ROOT, EXAMPLES / "pipeline.py", *arguments)
    assert nothing == "", "only rank 0 prints"
    lines = [line for line in printed.splitlines() if line]
    found = re.fullmatch(r"accuracy +([\d.]+)% of the test images", lines[-3])
    assert found is not None, lines
    assert float(found[1]) > 85
    assert re.search(r"samples/s on 2 x 1 x 1 ranks .*, rank 0 with 70,592 parameters", lines[-2])
    assert re.search(r"waiting +[\d.]+ ms of rank 0's step .* at least 20\.0% if stages are equal", lines[-1])
