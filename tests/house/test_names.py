"""The same name does not stand for two classes."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxlm"
SHARED = {"Span"}  # a duration of the config, and the objective that cuts out spans of tokens


def test_a_class_name_stands_for_one_thing():
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert set(twice) == SHARED, twice
