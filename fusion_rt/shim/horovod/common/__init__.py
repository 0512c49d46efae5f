"""What Horovod's frameworks have in common, as far as scripts for PyTorch import it."""
