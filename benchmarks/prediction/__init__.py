"""Predictions of steps of any number of nodes, for `benchmarks.scale`."""
