"""The tests of torch's that pass with gloo and are not expected to pass with fusion, each with its reason."""

from __future__ import annotations

EXCEPTIONS: dict[str, str] = {
    "test_ddp_comparison": "a defect that is not fixed yet: the first backward pass of DDP under RPC's distributed "
    "autograd does not end; with uneven inputs, and with a model that RPC spreads, it does",
}
"""By the name of the test."""
