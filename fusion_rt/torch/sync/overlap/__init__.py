"""Updates that are applied later than `step()`: when the next forward pass needs them, or one step late.

`after_step.py` is the schedule that does so, `pending_gradients.py` about those, and about `p.grad` meanwhile,
`updates.py` about the steps of the script's optimizer, and `uses.py` about which module needs which parameter.
docs/overlap.md describes it for scripts.
"""
