"""Names and docstrings."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "jaxlm").rglob("*.py"))
BANNED = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager"}
ABSTRACT = re.compile(r"Protocol|(abc\.)?ABC$")
MACHINE = re.compile(r"/(work|root|home/\w+|tmp/v)/|/Users/\w+/")


def files() -> list[Path]:
    """The text files of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    paths = [ROOT / name for name in names] or [
        path
        for top in ("jaxlm", "tests", "scripts", "configs", "colab")
        for path in (ROOT / top).rglob("*")
    ]
    return [
        path
        for path in paths
        if path.is_file() and path.suffix not in (".png", ".npz", ".gz", ".zst", ".parquet")
    ]


def test_no_file_or_folder_has_a_name_that_says_nothing():
    named = [
        path
        for path in files()
        if BANNED
        & {re.sub(r"^test_", "", part) for part in path.relative_to(ROOT).with_suffix("").parts}
    ]
    assert named == []


def public(body: list[ast.stmt]) -> list[ast.FunctionDef | ast.ClassDef]:
    """The public functions and classes of a body."""
    nodes = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node for node in nodes if not node.name.startswith("_")]


def undocumented(tree: ast.Module) -> list[str]:
    """Public names without a docstring.

    A method may have none if a documented Protocol or ABC of its module declares it.
    """
    classes = [node for node in public(tree.body) if isinstance(node, ast.ClassDef)]
    protocols = [c for c in classes if any(ABSTRACT.match(ast.unparse(base)) for base in c.bases)]
    promised = {f.name for c in protocols for f in public(c.body) if ast.get_docstring(f)}
    silent = [node.name for node in public(tree.body) if not ast.get_docstring(node)]
    for c in classes:
        silent += [
            f"{c.name}.{f.name}"
            for f in public(c.body)
            if not ast.get_docstring(f) and (f.name not in promised or c in protocols)
        ]
    return silent


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_everything_public_is_documented(path):
    if path.name == "__init__.py" and path != ROOT / "jaxlm/__init__.py":  # that has what is public
        assert path.read_text() == "", "an __init__.py is empty"
        return
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    # The docstring of cli.main.Verb describes these two.
    verb = {"add_arguments", "run"} if path.parent.name == "cli" else set()
    assert set(undocumented(tree)) - verb == set()


def test_a_silent_method_is_found_unless_a_protocol_spoke_for_it():
    tree = ast.parse(
        """
class Sink(Protocol):
    def write(self):
        "Writes."
class File:
    "A file."
    def write(self): ...
    def close(self): ...
    def _hide(self): ...
"""
    )
    assert undocumented(tree) == ["Sink", "File.close"]


def test_nothing_knows_the_machine_it_was_written_on():
    knowing = [
        str(path.relative_to(ROOT))
        for path in files()
        if path != Path(__file__)
        and MACHINE.search(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert knowing == []


def test_the_root_holds_only_what_the_house_allows():
    allowed = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "jaxlm",
        "configs",
        "tests",
        "scripts",
        "colab",
    }
    tops = {path.relative_to(ROOT).parts[0] for path in files()}
    assert {top for top in tops if not top.startswith(".")} <= allowed
