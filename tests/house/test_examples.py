"""Each public module shows how it is used, by an example that runs.

A module `jaxlm.*` is public if a user's program imports from it: a Python block of README.md or of
a page of jaxlm/docs, a file of configs/, or a code cell of colab/*.ipynb. `import jaxlm.a.b` and
`from jaxlm.a.b import name` count for `jaxlm.a.b`; `from jaxlm.a import b` counts for `jaxlm.a.b`
if that is a module. Packages, whose `__init__.py` is empty, do not count. Code that is not Python
by itself, such as a block with "..." for an argument list, is skipped.
"""

import ast
import doctest
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def module_name(path: Path) -> str:
    """The dotted name of a module below the root."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {
    module_name(path): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "jaxlm").rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
}


def programs() -> Iterator[str]:
    """The Python that users read: blocks of the pages, config files, cells of the notebooks."""
    for path in (ROOT / "README.md", *sorted((ROOT / "jaxlm/docs").glob("*.md"))):
        for indent, block in BLOCK.findall(path.read_text(encoding="utf-8")):
            yield re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)
    for path in sorted((ROOT / "configs").rglob("*.py")):
        yield path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "colab").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                # A line of the shell or a magic becomes an empty block: its place may need one.
                yield re.sub(
                    r"^(\s*)[!%].*", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE
                )


def imported(program: str) -> set[str]:
    """The modules of jaxlm that a program imports from."""
    try:
        tree = ast.parse(program)
    except SyntaxError:
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & MODULES.keys()


def public() -> set[str]:
    """The modules that users import from."""
    return set().union(*map(imported, programs()))


def test_what_a_program_imports_is_found_in_each_form():
    program = """
import jaxlm.core.span
from jaxlm.core import config, nothing
from jaxlm.optim.config import AdamW
from jaxlm import train
def later():
    from jaxlm.core.mean import Mean
"""
    assert imported(program) == {
        *("jaxlm.core.span", "jaxlm.core.config", "jaxlm.optim.config", "jaxlm.core.mean")
    }
    assert imported("from jaxlm.core.mean import ...") == set()


def test_pages_configs_and_notebooks_are_all_read():
    assert {"jaxlm.core.config", "jaxlm.recipes.config"} <= public()
    assert len(public()) >= 10


@pytest.mark.parametrize("name", sorted(public()))
def test_a_public_module_has_an_example(name):
    assert ">>> " in MODULES[name], "add a short Example: with >>> to the module's docstring"


@pytest.mark.parametrize("name", [name for name, text in MODULES.items() if ">>> " in text])
def test_the_examples_of_a_module_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=OPTIONS, report=False)
    assert result.attempted > 0, "the >>> is outside of the docstrings"
    assert result.failed == 0, "see the captured output"
