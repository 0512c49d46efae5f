"""fusion_rt: a tensor-fusion runtime for training PyTorch models on ordinary machines.

The package a training script imports. `fusion_rt.torch` holds the Horovod-compatible API; the flat modules here are
what the worker, the launcher (`fusion_rt.runner`) and the daemon (`fusiond`) share, and import neither of them nor
torch.
"""

__version__ = "0.1.0"
