"""Gradients and hosts for tests of tuning."""

from __future__ import annotations

from typing import Any

from fusion_rt import wire
from fusion_rt.choice.candidates import Setting
from fusion_rt.torch.autotune.director import Circumstances
from fusion_rt.units import KIB, MIB

DEFAULT = Setting(16 * MIB, 256 * KIB, 16 * MIB, 2, "auto")
TENSORS = tuple(wire.TensorSpec(f"w{n}", "float32", (512, 512)) for n in range(24))  # 1 MiB each


def circumstances(**changes: Any) -> Circumstances:
    """Four hosts with two ranks each, on links of 1 Gbit/s."""
    values: dict[str, Any] = {
        "slots": (2, 2, 2, 2),
        "latency": 1e-4,
        "seconds_per_byte": 8e-9,
        "threshold": DEFAULT.threshold,
        "group": "optimizer.1",
        "reduction": wire.Reduction(),
        "tensors": TENSORS,
        **changes,
    }
    return Circumstances(**values)
