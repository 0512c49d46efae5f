"""Hooks of DDP and FSDP2, and local steps over both.

`exchanged.py` is common to the hooks, and `sets.py` has the process sets of groups.
"""
