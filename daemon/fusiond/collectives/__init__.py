"""Collectives between nodes: each is an `Exchange`, a state machine without I/O that runs one operation on one node."""
