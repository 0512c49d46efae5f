"""torch's compiler skips this package, whichever of the two is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import sys
FIRST
assert rules.check_file(fusion_rt.torch.__file__).skipped
assert not rules.check_file("/home/user/fusion_rt_train.py").skipped
assert [d for d in rules.SKIP_DIRS if "fusion_rt" in d] == [fusion_rt.__path__[0] + "/"]
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("fusion_rt")]
"""
ORDERS = {
    "the compiler is imported last": """
import fusion_rt.torch
assert not [name for name in sys.modules if name.startswith("torch._dynamo.trace_rules")]
import torch._dynamo
from torch._dynamo import trace_rules as rules
""",
    "the compiler is imported first": """
import torch._dynamo
from torch._dynamo import trace_rules as rules
import fusion_rt.torch
""",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_compiler_skips_this_package(order: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHECK.replace("FIRST", ORDERS[order])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
