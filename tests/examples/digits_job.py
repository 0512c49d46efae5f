"""What `test_digits.py` runs on each rank: trains, and prints its losses and digests of its parameters."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

import fusion_rt.torch as hvd

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import digits


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    losses: list[float] = []
    digests: list[str] = []

    def record(model: torch.nn.Module, loss: float) -> None:
        losses.append(loss)
        content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        digests.append(hashlib.sha256(content).hexdigest())

    result = digits.train(digits.make_parser().parse_args(), record)
    print("RESULT " + json.dumps({"losses": losses, "digests": digests, "accuracy": result.accuracy}))


if __name__ == "__main__":
    main()
