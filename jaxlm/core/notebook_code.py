"""Classes of a notebook or module as parts of a run: their names, which `core.user_code` reads.

A part is read again by other processes and later commands, so its code must be a file. A class of a
cell, or of the script that runs, gets one: the imports, classes, functions and constants of its
cell, with the imports of other cells that it uses, in the cache.

Example:
  >>> own_imports = imports(["import jax", "import flax, optax as o"], {"o", "jax"})
  >>> own_imports
  ['import jax', 'import optax as o']
"""

import ast
import linecache
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from jaxlm.core import disk
from jaxlm.core.errors import ConfigError

CELLS = "own/cells"  # in the cache
KEPT = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef


def named(part: type) -> str:
    """Return `FILE.py:CLASS` or `MODULE:CLASS` of a class, which becomes a file if it is in none.

    Raises ConfigError if the source of the class is not known.
    """
    module = part.__module__
    if module != "__main__":
        file = Path(getattr(sys.modules[module], "__file__", None) or "")
        is_here = "." not in module and file.parent == Path.cwd()
        return f"{file.name if is_here else module}:{part.__qualname__}"
    text = "".join(_lines(part))
    if not text or "." in part.__qualname__:
        raise ConfigError(
            f"the source of {part.__name__} is not known",
            where=f"{part.__module__}.{part.__qualname__}",
            why="it is not at the top of a cell or a file, and a run keeps the code of its parts",
            fix=f"%%writefile mine.py    # then name it as 'mine.py:{part.__name__}'",
        )
    nodes = [each for each in _parsed(text) if isinstance(each, KEPT) or _is_constant(each)]
    names = {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}
    history = getattr(sys.modules["__main__"], "In", ())  # the cells of IPython
    bound = {name for node in nodes for name, _ in _imported(node)}
    lines = [*imports(history, names - bound), *(ast.unparse(node) for node in nodes)]
    path = disk.user_cache() / CELLS / f"{part.__name__}.py"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk.replace(path, ("\n".join(lines) + "\n").encode())
    return f"{path}:{part.__name__}"


def imports(cells: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the import statements of cells that bind these names, in their order."""
    statements: dict[str, str] = {}
    for cell in cells:
        for node in _parsed(cell):
            statements |= {name: text for name, text in _imported(node) if name in names}
    return list(dict.fromkeys(statements.values()))


def _lines(part: type) -> list[str]:
    """Return the lines of the cell or file of a class, by the file name of one of its methods."""
    methods = (each for each in vars(part).values() if isinstance(each, types.FunctionType))
    codes = (each.__code__ for each in methods)  # without those that `dataclass` makes
    written = (code for code in codes if code.co_qualname.startswith(f"{part.__qualname__}."))
    return next((linecache.getlines(code.co_filename) for code in written), [])


def _parsed(cell: str) -> list[ast.stmt]:
    """Return the statements of a cell, without its commands; none if it is no Python."""
    lines = ["" if line.startswith(("%", "!")) else line for line in cell.splitlines()]
    try:
        return ast.parse("\n".join(lines)).body
    except SyntaxError:
        return []


def _imported(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield each name that a statement imports, and the statement that imports it alone."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return
    for alias in node.names:
        one: ast.stmt = ast.Import([alias])
        if isinstance(node, ast.ImportFrom):
            one = ast.ImportFrom(node.module, [alias], node.level)
        yield alias.asname or alias.name.partition(".")[0], ast.unparse(one)


def _is_constant(node: ast.stmt) -> bool:
    """Return whether a statement assigns a literal."""
    if not isinstance(node, ast.Assign):
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True
