"""Exchanges at `step()`: at homes, which take the steps, or of local steps."""
