"""The suites of `python -m benchmarks`, and their commands. No suite is imported before it runs."""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A command of a suite: arguments of its module, all but `--out FILE`.

    Attributes:
        lab: it makes network namespaces, which only root can.
    """

    arguments: tuple[str, ...] = ()
    lab: bool = False


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        about: description in a few words.
        minutes: approximate duration of all parts on two cores.
        full, quick: its parts. Quick ones show that it runs, and not how fast anything is.
        module: of `benchmarks`, if its name is not the suite's.
        common: its raw results are in the common form; those of simulations, which have no samples, are not.
    """

    about: str
    minutes: int
    full: tuple[Part, ...]
    quick: tuple[Part, ...]
    module: str = ""
    common: bool = True


def _part(text: str, lab: bool = False) -> Part:
    """Makes a part from its arguments as they would be typed."""
    return Part(tuple(shlex.split(text)), lab)


def _lab(text: str) -> Part:
    return _part(text, lab=True)


SUITES = {
    "allreduce": Suite(
        "all-reduce by size, ranks and hosts, beside gloo and Horovod", 15,
        (_part("--ranks 2,4"), _lab("--hosts 2,4 --ranks 2,4"), _lab("--hosts 4 --rate 1gbit --rounds 5")),
        (_part("--ranks 2 --sizes 4,65536,1048576 --rounds 3"),),
    ),
    "backend": Suite(
        "torch.distributed's operations by backend fusion, beside gloo", 20,
        (_part("--ranks 2,4"), _lab("--hosts 2 --ranks 2,4")),
        (_part("--ranks 2 --sizes 4,1048576 --rounds 3"),),
    ),
    "backend_step": Suite(
        "steps of DDP and FSDP2 by backend fusion, beside gloo; DDP with top-k on a slow network", 10,
        (
            _part("--ranks 2,4"), _lab("--hosts 2"),
            _lab("--models ddp-topk --hosts 2 --rate 100mbit --steps 1 --rounds 5"),
        ),
        (_part("--models ddp --steps 2 --rounds 2"),),
    ),
    "startup": Suite(
        "a hello-world, beside torchrun and horovodrun", 2, (_part("--rounds 7"),), (_part("--rounds 1"),)
    ),
    "step": Suite(
        "a training step of 25 M parameters, beside DDP, its hooks and Horovod; CPU; Python in workers", 15,
        (
            _part("--ranks 2"), _part("--ranks 4 --steps 5"), _lab("--hosts 2 --steps 5"),
            _lab("--hosts 4 --rate 1gbit --steps 2 --rounds 5"),
        ),
        (_part("--steps 2 --rounds 2 --runtimes 'fusion_rt;no communication;DDP'"),),
    ),
    "overlap": Suite(
        "what of communication is exposed, with each way of overlap, beside DDP", 8,
        (_part("--overlap --rounds 7 --steps 5"),
         _lab("--overlap --hosts 4 --rate 1gbit --compute 1.5 --steps 3 --rounds 5")),
        (_part("--overlap --compute 0.1 --steps 2 --rounds 2"),),
        "step",
    ),
    "priority": Suite(
        "each way of overlap with the priorities of buckets and without", 10,
        (_part("--overlap --priority --rounds 7 --steps 5"),
         _lab("--overlap --priority --hosts 4 --rate 1gbit --compute 1.5 --steps 3 --rounds 5")),
        (_part("--overlap --priority --compute 0.1 --steps 2 --rounds 2"),),
        "step",
    ),
    "shard_mirrors": Suite(
        "what mirrors of parameter shards cost that are told of each update", 3,
        (_lab(""),), (_lab("--parameters 100000 --rounds 1"),),
    ),
    "topk": Suite(
        "selection of the largest elements, beside torch.topk", 2,
        (_part(""),), (_part("--elements 1000000 --rounds 3"),),
    ),
    "kernels": Suite(
        "reductions and conversions in memory, beside numpy", 3,
        (_part(""),), (_part("--elements 200000 --rounds 3 --threads 1 --dtypes float32"),),
    ),
    "footprint": Suite(
        "what an idle daemon takes, and large models with every codec and algorithm", 40,
        (_part("--seconds 20"), _lab("--parameters 1e8")),
        (_part("--seconds 2"), _lab("--parameters 4e6 --codecs topk --algorithms bsp --steps 3")),
    ),
    "sparse": Suite(
        "bytes that a host sends with top-k, on 2 to 8 hosts", 3,
        (_lab(""),), (_lab("--hosts 2 --steps 2 --elements 200000"),),
    ),
    "convergence": Suite(
        "loss with every codec, by steps and by bytes", 90,
        (_part(""),), (_part("--models digits --codecs dense,topk-1% --seeds 1 --steps 20"),),
    ),
    "slow_network": Suite(
        "4 hosts at 100 Mbit/s, beside DDP and its hooks", 30,
        (_lab(""),),
        (_lab("--parts times --steps 1 --rounds 2 --width 64 --layers 1 --rate 1gbit"),),
    ),
    "distance": Suite(
        "all-reduce over 20 to 80 ms with losses, beside gloo; the order of the ring with one slow pair", 90,
        (_lab(""),),
        (_lab("--parts hosts --trips 20 --losses 0 --controls cubic --sizes 1000000 --rounds 1"),),
    ),
    "bucket_sizes": Suite(
        "a step by the size of buckets, on 4 hosts at 50 Mbit/s to 1 Gbit/s, beside DDP", 60,
        (_lab(""),), (_lab("--quick"),),
    ),
    "low_bandwidth": Suite(
        "loss by bytes and by seconds on 4 hosts at 10 and 100 Mbit/s; learners that are slow, or killed", 120,
        (_lab(""),), (_lab("--quick"),),
    ),
    "straggler": Suite(
        "every algorithm, with one slow worker", 35,
        (_part(""),), (_part("--seconds 2 --families bsp,asp --seeds 1"),),
    ),
    "networks": Suite(
        "central server, shards, all-reduce, gossip on four networks", 25,
        (_lab(""),), (_lab("--quick"),),
    ),
    "algorithms": Suite(
        "the loss in the end with every algorithm", 60,
        (_part(""),), (_part("--models digits --algorithms allreduce,bsp --seeds 1 --steps 20"),),
    ),
    "solvers": Suite(
        "the classical solvers, bound by computation and by communication", 10,
        (_part(""),), (_part("--seconds 1"),),
    ),
    "kfac": Suite(
        "loss by steps with K-FAC, LARS and LAMB, beside SGD", 3,
        (_part(""),), (_part("--seeds 1 --steps 10"),),
    ),
    "gossip": Suite(
        "mixing without gradients: the mean, and how fast ranks come together", 2,
        (_part(""),), (_part("--exchanges 20"),),
    ),
    "encryption": Suite(
        "what encryption costs between hosts", 10,
        (_lab(""),), (_lab("--rates unshaped --rounds 1"),),
    ),
    "cores": Suite(
        "all-reduce on one host and between hosts, encrypted or not, beside gloo; the busiest thread", 5,
        (_part(""),), (_part("--sizes 4,1048576 --rounds 2 --places 1"),),
    ),
    "detection": Suite(
        "how soon all know that a worker, a daemon or a host is lost", 5,
        (_lab(""),), (_lab("--rounds 1"),),
    ),
    "late_rank": Suite(
        "memory of daemons while a rank is late, with 40 GiB of all-reduces under way", 5,
        (_lab("--gib 40 --late 60"),), (_lab("--gib 1 --late 5"),),
    ),
    "recovery": Suite(
        "what a loss costs those who are left, and a newcomer the others, with a fault every 20 s", 12,
        (_lab(""),), (_lab("--ranks 4 --seconds 40"),),
    ),
    "elastic": Suite(
        "what changes of membership cost", 15, (_lab(""),), (_lab("--samples 1200"),),
    ),
    "autotune": Suite(
        "settings found by --autotune and --auto, beside the best of a sweep", 30, (_lab(""),), (_lab("--quick"),),
    ),
    "scale": Suite(
        "steps of 2 to 4,096 nodes, predicted from costs that are measured here", 5,
        (_part(""),), (_part("--quick"),), common=False,
    ),
    "control": Suite(
        "the cost of control by the number of hosts, in virtual time", 20,
        (_part("--control"),), (_part("--control --nodes 4,8"),), "scale",
    ),
    "processes": Suite(
        "jobs of 8, 24 and 64 hosts as processes of this machine, with losses", 15,
        (_part("--processes 8,24,64"),), (_part("--processes 3"),), "scale",
    ),
    "tracing": Suite(
        "what recording costs: a step with it and without", 5,
        (_part(""),), (_part("--steps 2 --rounds 3"),),
    ),
    "trace_tools": Suite(
        "time and memory of each tool of fusion-trace on a large job", 5,
        (_part(""),), (_part("--steps 50"),),
    ),
    "whatif": Suite(
        "what fusion-trace predicts, beside jobs that were run", 10,
        (_lab(""),), (_lab("--quick"),), common=False,
    ),
}  # fmt: skip


def module(name: str) -> str:
    """Returns the module of a suite, for `python -m`."""
    return f"benchmarks.{SUITES[name].module or name}"


def missing(name: str) -> str:
    """Returns a sentence that says why a suite cannot run here; empty if its module is there."""
    if importlib.util.find_spec(module(name)) is None:
        return f"There is no {module(name).replace('.', '/')}.py in this version, so {name} cannot be measured."
    return ""
