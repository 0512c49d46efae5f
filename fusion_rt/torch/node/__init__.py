"""Gradients of a node's ranks combined on their devices, so that one contribution of the node goes to its daemon.

`ledger.py`: which steps are reduced so, agreed upon by the ranks of the node. `groups.py`: what combines tensors (NCCL,
or gloo). `reduction.py`: what an exchange has of both. docs/design/gpu.md, "Node first", says why.
"""
