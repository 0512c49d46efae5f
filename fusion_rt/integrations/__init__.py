"""Adapters for frameworks that call `torch.distributed`: a module for each (docs/frameworks.md).

Each module imports its framework, which nothing else here needs: `lightning.py` has strategies for Lightning, `ray.py`
the trainer of a Ray job. `torchrun.py` is for all of them: it sets the variables in which they look for a
worker's place.
"""
