"""Additions of MkDocs to docs/: pages made from other files of the repository, and links that lead to them.

Pages link as files do, so that they can be read where they lie: `../SECURITY.md`, `../examples/digits.py`. On the site
the README is the first page, examples are pages that show them, and each command has its help. A link whose text is the
name of a page's file, `[elastic.md](elastic.md)`, has the title of the page there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
WHOLE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
}
SHOWN = {
    ".py": "python",
    ".yaml": "yaml",
    ".sbatch": "bash",
    ".ipynb": "",
    "": "dockerfile",
}  # suffixes of examples, and languages
COMMANDS = {
    "fusionrun": ["fusion_rt.runner"],
    "fusiond": ["fusiond"],
    "fusion-trace": ["fusion_trace"],
}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")
_NAMED = re.compile(r"\[[\w/-]+\.md\](?=\(([^)#\s]+))")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from other files."""
    for source, target in WHOLE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=_relinked(text, ROOT / source, target)))
    for path in _examples():
        text = path.read_text(encoding="utf-8")
        shown = _cells(text) if path.suffix == ".ipynb" else f"```{SHOWN[path.suffix]}\n{text}```\n"
        content = f"---\nhide: [navigation, toc]\n---\n\n# {path.name}\n\n{shown}"  # lines are long
        files.append(File.generated(config, _page_of(path), content=content))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads the links of a page in docs/ to what has become a page."""
    if page.file.src_uri in WHOLE.values() or page.file.generated_by:
        return markdown
    return _relinked(markdown, ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def _examples() -> list[Path]:
    paths = (path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path for path in paths if path.suffix in SHOWN)


def _cells(notebook: str) -> str:
    """Returns the cells of a notebook, one after the other."""
    cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"])
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells) + "\n"


def _page_of(path: Path) -> str:
    return f"{path.relative_to(ROOT)}.md"


def _relinked(text: str, source: Path, target: str) -> str:
    """Returns the text of a file with links to files of the repository turned into links to pages.

    Args:
        text: Markdown.
        source: where it lies.
        target: the page that it becomes, relative to docs/.
    """

    def link(match: re.Match[str]) -> str:
        path = (source.parent / match[1]).resolve()
        if not path.is_relative_to(ROOT):
            return match[1]
        if path.is_relative_to(ROOT / "docs"):
            page = path.relative_to(ROOT / "docs").as_posix()
        elif path.relative_to(ROOT).as_posix() in WHOLE:
            page = WHOLE[path.relative_to(ROOT).as_posix()]
        elif path.is_dir() and path.is_relative_to(ROOT / "examples"):
            page = "examples/index.md"
        elif path in _examples():
            page = _page_of(path)
        else:
            return match[1]
        return os.path.relpath(page, os.path.dirname(target) or ".")

    def title(match: re.Match[str]) -> str:
        first = (source.parent / match[1]).read_text(encoding="utf-8").partition("\n")[0]
        return f"[{first.removeprefix('# ')}]"

    return _LINK.sub(link, _NAMED.sub(title, text))


def _commands() -> str:
    """Returns the page of the commands' help, as they print it."""
    parts = ["# Commands", ""]
    for name, module in COMMANDS.items():
        parts += [f"## {name}", "", "```", _help(module, []), "```", ""]
        for command in _subcommands(module):
            parts += [f"### {name} {command}", "", "```", _help(module, [command]), "```", ""]
    return "\n".join(parts)


def _help(module: list[str], command: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    argv = [sys.executable, "-m", *module, *command, "--help"]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True).stdout.strip("\n")


def _subcommands(module: list[str]) -> list[str]:
    """Returns the names in the box of commands of a command's help."""
    box = re.search(r"Commands ─.*?\n(.*?)╰", _help(module, []), re.DOTALL)
    return re.findall(r"^│ ([a-z-]+) ", box[1], re.MULTILINE) if box else []
