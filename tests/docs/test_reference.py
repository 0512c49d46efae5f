"""The pages of the reference name all that the packages offer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.for_each import for_each

ROOT = Path(__file__).parents[2]
PAGES = {
    "fusion_rt/c10d/__init__.py": ("c10d.md", {"register"}),  # torch calls it
    "fusion_rt/torch/__init__.py": (
        "torch.md",
        # Reductions are in a sentence, and modules have pages of their own.
        {"Adasum", "Average", "Max", "Min", "Product", "Sum", "algorithms", "elastic", "mpi_ops"},
    ),
    "fusion_rt/torch/elastic/__init__.py": ("elastic.md", {"HostsUpdatedInterrupt"}),  # an error, of core.errors
    "fusion_rt/integrations/lightning.py": ("integrations.md", set()),
    "fusion_rt/integrations/ray.py": ("integrations.md", set()),
}


def offered(module: Path) -> set[str]:
    """Names in `__all__`, or else public classes that the module defines."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


@for_each("module", PAGES)
def test_a_page_names_all_that_its_module_offers(module: str) -> None:
    page, left_out = PAGES[module]
    text = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    named = {name for names in re.findall(r"members: \[(.*?)\]", text) for name in names.split(", ")}
    named |= set(re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE))
    assert offered(ROOT / module) - left_out <= named


def test_terms_of_the_glossary_are_in_order_and_defined_once() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    terms = [row.split("|")[1].strip().replace("`", "").lower() for row in text.splitlines()[4:]]
    assert terms == sorted(set(terms))
    assert len(terms) > 30
