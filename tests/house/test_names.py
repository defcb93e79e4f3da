"""Classes: a name stands for one of them, and constructors take at most six arguments."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "jaxlm"
SHARED = {"Span"}  # a duration of the config, and the objective that cuts out spans of tokens
MOST = 6
ACTING = {"Callable", "GradientTransformation", "Log", "Mesh"}  # types of others that do something
EXCEPTIONS = {"Programs": "compiled functions of one cache, which `slots.build` returns"}


def is_record(node):
    decorators = map(ast.unparse, node.decorator_list)
    return any("dataclass" in each for each in decorators) or any(
        ast.unparse(each) == "NamedTuple" for each in node.bases
    )


def named(annotation):
    """Return the names in an annotation, also in one that is a string."""
    names = set()
    for node in ast.walk(annotation):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.Constant(value=str(text)) if text.isidentifier():
                names.add(text)
    return names


def classes_of(source):
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def wide(classes):
    """Return the classes that take or hold too much, with how many arguments or collaborators.

    A collaborator is a function, or an object that is no record.
    """
    acting = ACTING | {node.name for node in classes if not is_record(node)}
    counts = []
    for node in classes:
        for function in node.body:
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                taken = function.args
                taken = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]
                counts.append((node.name, len(taken) - len(["self"])))
        if is_record(node):
            fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
            held = sum(bool(named(each.annotation) & acting) for each in fields)
            counts.append((node.name, held))
    return {name: count for name, count in counts if count > MOST}


@pytest.fixture(scope="module")
def classes():
    """The classes of each file of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {
        path.relative_to(PACKAGE).as_posix(): classes_of(path.read_text(encoding="utf-8"))
        for path in paths
    }


def test_a_class_name_stands_for_one_thing(classes):
    places = defaultdict(list)
    for file, nodes in classes.items():
        for node in nodes:
            if not node.name.startswith("_"):
                places[node.name].append(file)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert set(twice) == SHARED, twice


def test_constructors_take_at_most_six_arguments_and_records_hold_six_collaborators(classes):
    assert wide([node for nodes in classes.values() for node in nodes]).keys() == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "source",
    [
        "class Wide:\n  def __init__(self, a, b, c, d, *, e, f, g): ...",
        "class Tool: ...\n@dataclass\nclass Wide:\n  a: Tool\n  b: Tool\n  c: 'Tool'\n"
        "  d: Callable[[], int]\n  e: Tool | None\n  f: list[Tool]\n  g: module.Tool",
    ],
)
def test_a_wide_class_is_found(source):
    assert wide(classes_of(source)) == {"Wide": MOST + 1}
    assert wide(classes_of(source.replace("g: module.Tool", "g: int").replace(", g", ""))) == {}
