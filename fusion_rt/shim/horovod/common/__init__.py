"""The common part of Horovod's frameworks, as far as scripts for PyTorch import it."""
