"""Settings found while a job trains: measured (`--autotune`), or predicted and then measured (`--auto`).

All of it is decided by the worker of the lowest rank, and reaches the others as the `Tuning` of a plan: that is agreed
upon anyway, names its own end (`Tuning.steps`), and is the same on all nodes from the first chunk to the last. So
tuning costs no collective operation but a plan for each sample. `replanning` is all that an exchange sees of it.
"""
