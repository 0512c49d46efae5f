"""What `test_digits.py` runs on each rank: trains, and tells its losses and digests of its parameters."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fusion_rt.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import digits


def trained(arguments: Sequence[str]) -> dict[str, Any]:
    """Trains with the arguments of the demo; losses and digests after each step, and the accuracy."""
    torch.set_num_threads(1)
    losses: list[float] = []
    digests: list[str] = []

    def record(model: torch.nn.Module, loss: float) -> None:
        losses.append(loss)
        content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        digests.append(hashlib.sha256(content).hexdigest())

    result = digits.train(digits.make_parser().parse_args(arguments), record)
    return {"losses": losses, "digests": digests, "accuracy": result.accuracy}


def main() -> None:
    hvd.init()
    print("RESULT " + json.dumps(trained(sys.argv[1:])))


if __name__ == "__main__":
    main()
