"""Every error that a user can cause has four parts, in every place that raises it."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlm.cli import docs, main
from jaxlm.core.errors import JaxlmError

ROOT = Path(__file__).parents[2]
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "jaxlm").rglob("*.py"))}
PARTS = {"where", "why", "fix"}
COMMAND_LINE = "".join(path.read_text() for path in (ROOT / "jaxlm/cli").rglob("*.py"))
ACTIONS = set(re.findall(r'add_action\(\s*"([\w-]+)"', COMMAND_LINE))
WORDS = main.VERBS.keys() | ACTIONS | set(docs.topics())


def kinds() -> set[str]:
    """The names of the typed errors, wherever they are defined."""
    classes = [n for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    kinds = {JaxlmError.__name__}
    while more := {each.name for each in classes if kinds & set(map(name, each.bases))} - kinds:
        kinds |= more
    return kinds


def name(node: ast.AST) -> str:
    return getattr(node, "attr", "") or getattr(node, "id", "")


def made() -> Iterator[tuple[str, ast.Call]]:
    """Each place that makes one, and its call."""
    known = kinds()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name(node.func) in known:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def texts(node: ast.AST) -> list[str]:
    """All that is written out of a string, whichever way its conditions go; the rest as {}."""
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.JoinedStr():
            return ["".join(parts) for parts in itertools.product(*map(texts, node.values))]
        case ast.FormattedValue():
            return (
                texts(node.value) if isinstance(node.value, ast.IfExp | ast.JoinedStr) else ["{}"]
            )
        case ast.IfExp():
            return texts(node.body) + texts(node.orelse)
        case ast.BinOp(op=ast.Add()):
            return [a + b for a, b in itertools.product(texts(node.left), texts(node.right))]
    return ["{}"]


def test_every_error_is_made_with_all_four_parts():
    places = list(made())
    assert len(places) > 200, "the errors were found"
    for place, call in places:
        keywords = {each.arg: each.value for each in call.keywords}
        assert keywords.keys() >= PARTS or None in keywords, (
            f"{place} lacks {PARTS - keywords.keys()}"
        )
        empty = [part for part in PARTS & keywords.keys() if "" in texts(keywords[part])]
        assert not empty, f"{place} has an empty {empty}"


@pytest.mark.parametrize("part", sorted(PARTS))
def test_an_error_cannot_be_made_without_a_part(part):
    with pytest.raises(TypeError):
        JaxlmError("what", **dict.fromkeys(PARTS - {part}, "text"))


def fixes(tree: ast.AST) -> list[str]:
    """Values that code passes to a call as its `fix`, or assigns to a variable of this name."""
    fixed = list[ast.expr]()
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg="fix"):
                fixed.append(node.value)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                fixed += [v for n, v in zip(names, values, strict=True) if name(n) == "fix"]
            case ast.Assign(targets=[ast.Name(id="fix")]):
                fixed.append(node.value)
    return [output for each in fixed for output in texts(each)]


def has_two_ways_out(line: str) -> bool:
    return bool(re.search(r"[,;] or |^['-]?--[^#]*; ", line))


def has_prose(line: str) -> bool:
    """Return True if a command or flag of ours is followed by prose, or no shell would parse it.

    Prose are words that are no command, no flag and no comment.
    """
    command = line.partition("    # ")[0]
    first, *words = re.sub(r"'[^']*'|\"[^\"]*\"|(?<=explain )\S+", "{}", command).split() or [""]
    if first.startswith("--"):
        return "(" in first or any(not word.startswith(("--", "{")) for word in words)
    words = [word for word in words if not re.search(r"^[->]|[/.={}]|^[A-Z_]+$", word)]
    return first == "jaxlm" and not WORDS.issuperset(words)


def has_placeholder(line: str) -> bool:
    """Return True if a command or a flag holds a placeholder, or a file that may not exist."""
    command = line.partition("  #")[0].replace("{}", "").replace("--help", "")
    is_pasted = command.startswith(("--", "'--", "jaxlm "))
    return is_pasted and bool(
        re.search(r"[= ][A-Z][A-Z_]+\b(?!=)|\.\.\.|=/a/|configs/\w+\.py", command)
    )


def test_a_fix_holds_no_word_that_stands_for_another():
    for path, tree in TREES.items():
        for line in (line for fix in fixes(tree) for line in fix.splitlines()):
            assert not has_placeholder(line), f"{path.name}: {line}"


@pytest.mark.parametrize(
    "line",
    [
        "jaxlm data run --config=RECIPE --out=out",
        "--from=DIR    # a folder",
        "jaxlm train --config=...",
        "--config=configs/quickstart.py",
        "--out=/a/place",
        "--other=STEP",
    ],
)
def test_a_placeholder_would_be_found(line):
    assert has_placeholder(line)


def test_a_fix_has_one_way_out_a_line_so_that_it_can_be_pasted():
    seen = 0
    for path, tree in TREES.items():
        for line in (line for fix in fixes(tree) for line in fix.splitlines()):
            seen += line.startswith(("--", "jaxlm"))
            assert not has_two_ways_out(line), f"{path.name}: {line}"
            assert not has_prose(line), f"{path.name}: {line}"
    assert seen > 110, "the fixes were found"


@pytest.mark.parametrize(
    "fix",
    [
        'f\'--config.a.b={a}, {f"or --config.c={b}, " if b else ""}or name more files\'',
        "'--config.a=1; --config.b=2'",
        "f'--start_at={step} --force moves the later steps'",
        "'--config.data.tokenizer=bytes' if a else '--config.data.tokenizer=a:4096 trains one'",
        "'jaxlm data tokenize writes train and validation with one tokenizer'",
        "'--config.a=1\\n--config.b=2 or another'",
        "'--config.a=()'",
    ],
)
def test_a_fix_that_cannot_be_pasted_would_be_found(fix):
    lines = [line for output in fixes(ast.parse(f"E(fix={fix})")) for line in output.splitlines()]
    assert any(has_two_ways_out(line) or has_prose(line) for line in lines)
