"""Updates that are applied later than `step()`: when the next forward pass needs them, or one step late.

`later.py` is the strategy that does so, `flights.py` about what it has under way, `guards.py` about what is in `p.grad`
meanwhile, `updates.py` about the steps of the script's optimizer, and `uses.py` about which module needs which
parameter. docs/overlap.md says what a script sees.
"""
