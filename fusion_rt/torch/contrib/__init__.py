"""Optimizers and preconditioners that use the public operations: K-FAC, LARS and LAMB."""
