"""Updates that are applied later than `step()`: when the next forward pass needs them, or one step late.

`optimizer.py` is the distributed optimizer that does so, `exchange.py` and `flights.py` are about what it has under
way, `updates.py` about the steps of the script's optimizer, `uses.py` about which module needs which parameter, and
`watching.py` has the hooks by which modules say that they are about to use, save or load their parameters.
docs/overlap.md says what a script sees.
"""
