"""Gradients of a node's ranks combined on their devices, so that one contribution of the node goes to its daemon.

`ledger.py`: which steps are reduced so, agreed upon by the ranks of the node. `groups.py`: groups that combine tensors
(NCCL, or gloo). `reduction.py`: their use in an exchange. docs/design/gpu.md, "Node first", says why.
"""
