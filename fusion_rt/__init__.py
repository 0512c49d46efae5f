"""fusion_rt: a tensor-fusion runtime for training PyTorch models on ordinary machines.

Training scripts import this package. `fusion_rt.torch` holds the Horovod-compatible API; the flat modules here are
shared by the worker, the launcher (`fusion_rt.runner`) and the daemon (`fusiond`), and import none of these, nor torch.
`fusion_rt.run` starts a job from a program.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fusion_rt.run_function import run as run
else:

    def __getattr__(name: str) -> object:
        if name == "run":  # imported when it is used: workers and daemons never do
            from fusion_rt.run_function import run

            return run
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
