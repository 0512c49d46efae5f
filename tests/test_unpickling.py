"""Received data is never evaluated where the promise says so: by daemons, launchers of scripts, agents and tools."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUARDED = (
    "daemon/fusiond", "tools/fusion_trace", "fusion_rt/runner", "fusion_rt/launchers", "fusion_rt/wire",
    "fusion_rt/local", "fusion_rt/host", "fusion_rt/codecs", "fusion_rt/core", "fusion_rt/client", "fusion_rt/tracing",
    "fusion_rt/kernels",
)  # fmt: skip
EVALUATING = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "marshal.loads", "eval",
    "exec", "yaml.unsafe_load", "np.load", "torch.load",
}  # fmt: skip
# Functions that unpickle what the job's own user has sent, over the standard input and output of launcher and agents.
ALLOWED = {
    "fusion_rt/runner/agent/function_call.py:main": "it is the worker of `fusion_rt.run`, and calls that function",
    "fusion_rt/runner/command/advise.py:run": "`--advise` reads what its own function has measured",
}


def unpickled(package: str) -> Iterator[str]:
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in EVALUATING:
                around = [each.name for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)]
                yield f"{path.relative_to(ROOT)}:{around[-1] if around else ''}"


def test_no_daemon_launcher_or_tool_evaluates_what_it_receives() -> None:
    assert {found for package in GUARDED for found in unpickled(package)} == ALLOWED.keys()


def test_a_secret_key_goes_to_libzmq_and_nowhere_else() -> None:
    tree = ast.parse((ROOT / "daemon/fusiond/transport/sockets.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for field in ast.iter_child_nodes(node):
            if isinstance(field, ast.Attribute) and field.attr == "_secret" and isinstance(field.ctx, ast.Load):
                assert isinstance(node, ast.Assign), ast.unparse(node)
                assert [ast.unparse(target) for target in node.targets] == ["socket.curve_secretkey"]
    for path in (ROOT / "daemon/fusiond").rglob("*.py"):
        if path.name != "sockets.py":
            assert "._secret" not in path.read_text(encoding="utf-8"), path
            assert "curve_secretkey" not in path.read_text(encoding="utf-8"), path
