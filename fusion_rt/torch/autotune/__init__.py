"""Settings found while a job trains: measured (`--autotune`), or predicted and then measured (`--auto`).

Both choose from `candidates`; a `director` applies their choice and measures it, and a judge chooses: `measured` or
`predicted`. The worker of the lowest rank decides, and its choice reaches the others as the `Tuning` of a plan: that is
agreed upon anyway, names its own end (`Tuning.steps`), and is the same on all nodes from the first chunk to the last.
So tuning costs no collective operation but a plan for each sample. `replanning` is all that an exchange sees of it.
"""
