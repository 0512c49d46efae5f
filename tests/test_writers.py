"""One module opens files for writing, since it knows what others may have planted under their names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("fusion_rt", "daemon/fusiond", "tools/fusion_trace")
WRITERS = "fusion_rt/host/private_files.py"
# Functions that may open a file for writing beside it, and why others cannot have planted that one.
ALLOWED = {
    "fusion_rt/settings_page.py:main": "it writes a page of this source tree, on a developer's command",
    "tools/fusion_trace/export/output_file.py:opened": "it compresses into what `open_private` has opened",
    "daemon/fusiond/host/watchdog.py:_without_waiting": "it opens a descriptor of this process again",
    "daemon/fusiond/host/leftovers.py:_remove": "it locks a file that is there, and writes nothing",
}
_OPENERS = {"open", "io.open", "gzip.open", "bz2.open", "lzma.open", "gzip.GzipFile", "zipfile.ZipFile", "np.memmap"}
_ALWAYS = {
    "tempfile.mkstemp", "tempfile.NamedTemporaryFile", "tempfile.TemporaryFile", "logging.FileHandler", "os.mknod",
    "os.symlink", "os.link", "os.truncate", "np.save", "np.savez", "np.savetxt", "torch.save", "shutil.copy",
    "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move",
}  # fmt: skip
_METHODS = {"write_text", "write_bytes", "touch", "tofile", "symlink_to", "hardlink_to", "write_html", "to_csv"}


def opens_for_writing(call: ast.Call) -> bool:
    """Tells whether a call may write to a file that it names: `os.open` by its flags, other ones by their mode, and one
    that is not written down counts as well."""
    name = ast.unparse(call.func)
    if name in _ALWAYS or name.rpartition(".")[2] in _METHODS:
        return True
    if name == "os.open":
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND"))
    named = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    if name in _OPENERS:
        modes = named or call.args[1:2]
        if ast.unparse(call.args[0]).startswith("open_private("):
            return False
    elif name.endswith(".open"):  # of a path; or of a codec, for instance, without a text
        modes = named or [each for each in call.args[:1] if isinstance(each, ast.Constant)]
    else:
        return False
    return any(not isinstance(mode, ast.Constant) or set("wax+") & set(str(mode.value)) for mode in modes)


def is_opener(node: ast.expr) -> bool:
    """Tells whether a function that may write is given to somebody else, who calls it."""
    if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return False
    return ast.unparse(node) in _OPENERS | _ALWAYS


def writers() -> Iterator[str]:
    """Yields the functions of the product that open files for writing, with their lines."""
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
            for node in ast.walk(tree):
                call = called.get(id(node))
                if opens_for_writing(call) if call else isinstance(node, ast.expr) and is_opener(node):
                    around = [each.name for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)]
                    yield f"{path.relative_to(ROOT)}:{around[-1] if around else ''}"


def test_one_module_opens_files_for_writing() -> None:
    found = {writer for writer in writers() if not writer.startswith(WRITERS)}
    assert found == ALLOWED.keys(), "write by fusion_rt.host.private_files, which follows no link"


def test_what_writes_is_found() -> None:
    def is_writer(text: str) -> bool:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        return opens_for_writing(call)

    for text in (
        "open(path, 'w')", "open(path, mode='ab')", "open(path, mode)", "gzip.open(path, 'wt')", "path.write_text('')",
        "os.open(path, os.O_RDWR | os.O_NOFOLLOW)", "tempfile.mkstemp()", "shutil.copyfile(a, b)", "path.touch()",
        "np.savez(path, a)", "path.open('w')",
    ):  # fmt: skip
        assert is_writer(text), text
    for text in ("open(path)", "open(path, 'rb')", "os.open(path, os.O_RDONLY)", "codec.open(layout, 1)", "a.copy()",
                 "open(open_private(path), 'wb')", "os.fdopen(fd, 'wb')"):  # fmt: skip
        assert not is_writer(text), text
