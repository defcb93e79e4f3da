"""Print the test files that a change can break, by the import graph.

    python scripts/changed_tests.py            # changes since HEAD, untracked files included
    python scripts/changed_tests.py main       # changes since a commit or branch

A test file is selected if it changed, or if a module that it imports, directly or through other
modules, changed. Imports inside functions are followed in tests only, because a verb of the command
line imports its recipe when it runs: else each test that runs a command would depend on all code.
A change of `jaxlm/cli` selects tests/cli. All tests are selected if a file changed that no import
shows: pyproject.toml, conftest.py, configs, templates.
"""

import argparse
import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERYTHING = ("pyproject.toml", "scripts/constraints.txt", "scripts/setup.sh", "configs/")
NO_TEST = (".md", ".png")  # documents have tests in tests/house, which runs in any case
ALWAYS = ("tests/house",)


def main() -> int:
    """Print the selected test files, one a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ref", nargs="?", default="HEAD", help="commit to compare with (HEAD)")
    args = parser.parse_args()
    print("\n".join(selected(changed_files(args.ref))))
    return 0


def changed_files(ref: str) -> list[str]:
    """Return the paths that differ from a commit, and untracked files."""
    commands = (
        ["git", "diff", "--name-only", ref],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    outputs = [
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for command in commands
    ]
    return [line for output in outputs for line in output.splitlines()]


def selected(changed: list[str]) -> list[str]:
    """Return the test files and folders that a change of these paths can break."""
    if not changed:
        return []
    code = [path for path in changed if not path.endswith(NO_TEST)]
    if any(path.startswith(EVERYTHING) or path.endswith("conftest.py") for path in code):
        return ["tests"]
    if any(path.startswith("jaxlm/") and not path.endswith(".py") for path in code):
        return ["tests"]
    files = {_module(path): path for top in ("jaxlm", "tests") for path in _sources(top)}
    imports = {name: _imports(path, name, files) for name, path in files.items()}
    names = {_module(ROOT / path) for path in code}
    tests = [
        path
        for name, path in files.items()
        if path.name.startswith("test_") and names & _closure(name, imports)
    ]
    if any(path.startswith("jaxlm/cli/") for path in code):
        tests.append(ROOT / "tests/cli")
    scripts = {Path(path).stem for path in code if path.startswith("scripts/")}
    tests += [
        path
        for path in (ROOT / "tests/scripts").glob("test_*.py")
        if scripts and any(script in path.read_text(encoding="utf-8") for script in scripts)
    ]
    return sorted({*ALWAYS, *(str(path.relative_to(ROOT)) for path in tests)})


def _sources(top: str) -> list[Path]:
    return sorted((ROOT / top).rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, name: str, files: dict[str, Path]) -> set[str]:
    """Return the modules of the project that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if name.startswith("tests.") else iter(_top_level(tree.body))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names & files.keys()


def _top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements that run when a module is imported."""
    nested = [
        statement
        for node in body
        if isinstance(node, ast.If | ast.Try | ast.With)
        for statement in _top_level([*node.body, *getattr(node, "orelse", [])])
    ]
    return [*body, *nested]


def _closure(name: str, imports: dict[str, set[str]]) -> set[str]:
    """Return a module and all modules that it imports, directly or through others."""
    reached, pending = {name}, [name]
    while pending:
        new = imports[pending.pop()] - reached
        reached |= new
        pending += new
    return reached


if __name__ == "__main__":
    sys.exit(main())
