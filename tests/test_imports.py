"""The direction of imports (docs/design.md): `fusion_rt.torch`, `fusion_rt.runner`, `fusiond` and `fusion_trace` use
the shared modules of `fusion_rt`, never each other; nothing shared uses them; and only `fusion_rt.torch`, and
`fusion_rt.c10d` above it, import torch, which takes seconds that neither the daemon nor the launcher may pay.
"""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.for_each import for_each

ROOT = Path(__file__).resolve().parent.parent
ROOTS = {
    "fusion_rt": ROOT / "fusion_rt",
    "fusiond": ROOT / "daemon" / "fusiond",
    "fusion_trace": ROOT / "tools" / "fusion_trace",
}

# Every module belongs to the area with the longest matching name; `fusion_rt` alone is what all of them share.
AREAS = (
    "fusion_rt",
    "fusion_rt.launchers",
    "fusion_rt.torch",
    "fusion_rt.c10d",
    "fusion_rt.integrations",
    "fusion_rt.runner",
    "fusion_rt.shim",
    "fusiond",
    "fusiond.algorithms.shard_optimizer",
    "fusion_trace",
)
ALLOWED = {
    "fusion_rt": {"fusion_rt"},
    "fusion_rt.launchers": {"fusion_rt", "fusion_rt.launchers"},
    "fusion_rt.torch": {"fusion_rt", "fusion_rt.launchers", "fusion_rt.torch", "torch"},
    "fusion_rt.c10d": {"fusion_rt", "fusion_rt.launchers", "fusion_rt.torch", "fusion_rt.c10d", "torch"},
    "fusion_rt.integrations": {
        "fusion_rt",
        "fusion_rt.launchers",
        "fusion_rt.torch",
        "fusion_rt.c10d",
        "fusion_rt.integrations",
        "torch",
    },
    "fusion_rt.runner": {"fusion_rt", "fusion_rt.runner"},
    "fusion_rt.shim": {
        "fusion_rt",
        "fusion_rt.launchers",
        "fusion_rt.runner",
        "fusion_rt.shim",
        "fusion_rt.torch",
        "torch",
    },
    "fusiond": {"fusion_rt", "fusiond", "fusiond.algorithms.shard_optimizer"},
    # The one module of the daemon that may import torch: late, for the optimizers of shards.
    "fusiond.algorithms.shard_optimizer": {"fusion_rt", "fusiond", "torch"},
    "fusion_trace": {"fusion_rt", "fusion_trace"},
}


def area_of(module: str) -> str | None:
    """The area a dotted name belongs to, "torch" for torch itself, None for everything this test does not guard."""
    matching = [area for area in (*AREAS, "torch") if module == area or module.startswith(area + ".")]
    return max(matching, key=len, default=None)


def modules() -> dict[str, Path]:
    """Dotted name of every module of the project, and its file."""
    found = {}
    for package, folder in ROOTS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *parts))] = path
    return found


def imported_names(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything `source` imports, wherever in it the import stands.

    `from a import b` gives `a.b`, since b may be a module. Imports by a literal name (`import_module("a.b")`,
    `__import__("a")`) count. `package` is what relative imports start from.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            target = node.args[0]
            if name in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield node.lineno, str(target.value)


def violations(module: str, path: Path, source: str) -> list[str]:
    area = area_of(module)
    assert area is not None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return [
        f"{path}:{line}: {module} (area {area}) imports {name}"
        for line, name in imported_names(source, package)
        if (target := area_of(name)) is not None and target not in ALLOWED[area]
    ]


def test_imports_point_one_way() -> None:
    wrong = [text for name, path in modules().items() for text in violations(name, path, path.read_text())]
    assert not wrong, "\n".join(wrong)


@for_each(
    ("module", "source"),
    [
        ("fusion_rt.client", "import torch"),
        ("fusion_rt.client", "def late():\n    from torch import nn"),
        ("fusion_rt.client", "from fusion_rt import torch"),
        ("fusion_rt.client", "from . import runner"),
        ("fusion_rt.client", "import fusiond.host.loop"),
        ("fusion_rt.kernels.cpu", "from ..torch import ops"),
        ("fusion_rt.runner.command.cli", "from fusiond.app import cli"),
        ("fusion_rt.torch.ops", "from ..runner import cli"),
        ("fusion_trace.cli", "from fusiond.control import planning"),
        ("fusiond.host.loop", "import importlib\nimportlib.import_module('fusion_rt.torch')"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert len(violations(module, Path("example.py"), source)) == 1


@for_each(
    ("module", "source"),
    [
        ("fusion_rt.torch.ops", "import torch\nfrom fusion_rt import client\nfrom . import handles"),
        ("fusiond.host.loop", "from fusion_rt.wire import Ready\nfrom . import plan\nimport torchlike"),
        ("fusion_rt.kernels.cpu", "from . import team\nfrom .. import settings"),
    ],
)
def test_a_right_import_is_left_alone(module: str, source: str) -> None:
    assert violations(module, Path("example.py"), source) == []


@for_each("area", ["fusiond", "fusion_rt.runner", "fusion_trace"])
def test_importing_all_of_it_leaves_torch_out(area: str) -> None:
    names = [name for name in modules() if area_of(name) == area and not name.endswith("__main__")]
    assert any(name.endswith(".cli") for name in names), f"{area} has no command line module"
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names}]; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"importing {area} imports torch, or fails:\n{done.stderr}"


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    present = {name for name, path in modules().items() if path.name == "__init__.py"}
    with_code = {name.rpartition(".")[0] for name, path in modules().items() if path.name != "__init__.py"}
    assert listed == present
    assert with_code <= present, f"folders with modules but no __init__.py: {sorted(with_code - present)}"


def test_the_version_is_the_one_installed() -> None:
    import fusion_rt

    assert fusion_rt.__version__ == importlib.metadata.version("fusion_rt")
