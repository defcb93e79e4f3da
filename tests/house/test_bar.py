"""Every line of the bar has a test with its id in its name, in its tier, or a reason why not."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOAK = TESTS.parent / "scripts/soak"
LINES = {"a": 14, "b": 17, "c": 12, "d": 11, "e": 12, "f": 9, "s": 15, "h": 9, "v": 33}
# These may be slow tests, or need what few machines have. All others are part of every run of the
# tests.
NIGHTLY = set("a1 a4 a5 a10 a12 a13 a14 b5 b13 b15 c8 c9 c10 c12 d8 d9 d10 d11 e9 h1 h5".split())
NIGHTLY |= set("v20 v21 v23 v24 v31 v33".split())
SOAKED = {"h3": "--repeat", "s13": "--fuzz", "h9": "--minutes"}  # as long as one likes
SLOW_ANYWAY = {
    "h7": "a ratio of two times, within 3 %, needs an idle machine; scripts/test --slow does it",
}
LATER = {f"pytest.mark.{name}" for name in ("slow", "gpu", "trackers", "atheris")}
EXPLAINED = TESTS / "faults/README.md"
ROW = re.compile(r"^\| ([A-HSV]\d{1,2}) \| (.+) \| (every|slow|gpu) \| (.+) \|$", re.MULTILINE)
WAITING = {
    "b16": "a checkpoint of the previous release: there is none yet; b17 checks the version",
    "s9": "the lines of v are what a server must hold",
}


def ids_of(name: str) -> set[str]:
    """The ids at the start of a test's name: test_f3_e3_unsafe_fields... -> f3, e3."""
    ids = set()
    for part in name.removeprefix("test_").split("_"):
        if not re.fullmatch(r"[a-hsv]\d{1,2}", part):
            break
        ids.add(part)
    return ids


def named_after_lines() -> Iterator[tuple[Path, ast.FunctionDef, bool]]:
    """Return each test that is named after lines: its file, its code, and if it is always slow.

    A test is always slow if no ordinary run has it, with any of its parameters.
    """
    for path in sorted(TESTS.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        values = {
            ast.unparse(node.targets[0]): ast.unparse(node.value)
            for node in module.body
            if isinstance(node, ast.Assign)
        }
        marks = values.get("pytestmark", "")
        for node in module.body:
            is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            if is_test and ids_of(node.name):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                decorators = [
                    values.get(name, name) for name in decorators
                ]  # SLOW = pytest.mark.slow
                is_slow = any(late in decorators or late in marks for late in LATER)
                yield path, node, is_slow


def test_every_line_has_a_test_in_its_tier_or_a_reason():
    covered, in_every_run = set[str](), set[str]()
    for _, node, is_slow in named_after_lines():
        covered |= ids_of(node.name)
        in_every_run |= set() if is_slow else ids_of(node.name)
    expected = {
        f"{group}{number}" for group, last in LINES.items() for number in range(1, last + 1)
    }
    assert sorted(expected - covered - WAITING.keys() - SOAKED.keys()) == []
    assert sorted(covered & WAITING.keys()) == [], "what is tested waits no longer"
    assert sorted(covered - expected) == []
    late = expected - in_every_run - NIGHTLY - SOAKED.keys() - SLOW_ANYWAY.keys() - WAITING.keys()
    assert sorted(late) == [], "a line of every run has slow tests only"
    assert sorted(in_every_run & SLOW_ANYWAY.keys()) == [], "no exception is needed any more"
    assert expected.issuperset(WAITING)


def explained(text: str) -> dict[str, tuple[str, list[str]]]:
    """Ids in the tables of a README, with the tier and the test files of each."""
    rows = {}
    for line, _, tier, files in ROW.findall(text):
        assert line.lower() not in rows, f"two rows explain {line}"
        rows[line.lower()] = tier, re.findall(r"\]\(\.\./(.+?)\)", files)
    return rows


def proofs() -> dict[str, tuple[str, list[str]]]:
    """Ids that tests use, with the tier and the test files of each."""
    files, tiers = dict[str, set[str]](), dict[str, set[str]]()
    for path, node, is_slow in named_after_lines():
        needs_gpu = "pytest.mark.gpu" in path.read_text(encoding="utf-8")
        for line in ids_of(node.name):
            files.setdefault(line, set()).add(path.relative_to(TESTS).as_posix())
            tier = "every" if not is_slow else "gpu" if needs_gpu else "slow"
            tiers.setdefault(line, set()).add(tier)
    return {line: (min(tiers[line]), sorted(files[line])) for line in files}


def test_the_readme_explains_every_id_that_tests_use_and_no_other():
    rows, used = explained(EXPLAINED.read_text(encoding="utf-8")), proofs()
    assert sorted(used.keys() - rows.keys()) == [], "a test uses an id that no row explains"
    assert sorted(rows.keys() - used.keys()) == [], "a row explains an id without a test"
    wrong = {line: (rows[line], used[line]) for line in used if rows[line] != used[line]}
    assert wrong == {}, "tier or test files of a row differ from the tests"


def test_a_row_that_names_another_file_differs():
    row = "| C6 | A rewind. | every | [faults/a.py](../faults/a.py) [b.py](../b.py) |"
    assert explained(f"| id | outcome |\n{row}\n") == {"c6": ("every", ["faults/a.py", "b.py"])}
    with pytest.raises(AssertionError, match="two rows explain C6"):
        explained(f"{row}\n{row}\n")


def test_what_runs_as_long_as_one_likes_is_in_the_soak():
    text = SOAK.read_text()
    for line, flag in SOAKED.items():
        assert f"soak [{flag}" in text or f"soak {flag}" in text, line


def asserts(body: list[ast.stmt], helpers: frozenset[str] = frozenset()) -> bool:
    """Return True if something is asserted for sure: not only in a loop that may be empty.

    `helpers` are functions that assert for sure.
    """
    return any(_asserts(node, helpers) for node in body)


def _asserts(node: ast.stmt, helpers: frozenset[str]) -> bool:
    match node:
        case ast.Assert():
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
            return name in helpers
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))):
            return name.startswith("require")  # a limit of time
        case ast.With():
            raises = any("raises" in ast.unparse(item) for item in node.items)
            return raises or asserts(node.body, helpers)
        case ast.If():
            return asserts(node.body, helpers) and asserts(node.orelse, helpers)
        case ast.Try():
            return asserts([*node.body, *node.finalbody], helpers)
        case ast.For():
            over = node.iter
            is_written_out = isinstance(over, ast.Tuple | ast.List) and bool(over.elts)
            is_constant = re.search(r"\b[A-Z]{2,}\b|^range\(\d", ast.unparse(over))
            return bool(is_written_out or is_constant) and asserts(node.body, helpers)
    return False


@functools.cache
def helpers_of(path: Path) -> frozenset[str]:
    """The functions of a file that assert something for sure."""
    functions = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    )
    return frozenset(node.name for node in functions if asserts(node.body))


# What a test does to a run or a file, and the exit code that only this leads to, which is as good
# as a count. A flipped bit or a bad number has none: 65 and 79 also come of what was wrong before.
STRIKES = {
    r"sigkill": r"SIGKILL|-9\b",
    r"flip": None,
    r"(grads|loss|batch):\w": None,
    r":hang": r"\b76\b",
    r":raise": r"\b7[04]\b",
    r":enospc": r"\b74\b",
}
COUNTS = re.compile(r"(==|>=|>) *[\[({]*(-?[1-9]|[A-Z]{2})|\b[1-9][\d_]* <|\blen\(|SIGKILL|-9\b")
EXIT = re.compile(r"\b(main|run|call)\(|\breturncode\b|\bcodes?\b|\.wait\(")
Top = ast.FunctionDef | ast.Assign


@functools.cache
def named_in(path: Path) -> dict[str, Top]:
    """The functions and the values at the top of a file, by their names."""
    tops: dict[str, Top] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            tops[node.name] = node
        elif isinstance(node, ast.Assign):
            tops |= {ast.unparse(target): node for target in node.targets}
    return tops


def text_of(node: ast.FunctionDef, known: dict[str, Top]) -> list[Top]:
    """A test, and what of its file it names, and what that does."""
    tops, left = list[Top](), [node]
    while left:
        tops.append(left.pop())
        named = {each.id for each in ast.walk(tops[-1]) if isinstance(each, ast.Name)}
        left += [known[n] for n in sorted(named & known.keys()) if known[n] not in tops + left]
    return tops


def strikes(nodes: list[Top]) -> list[str]:
    """The way in which a test breaks something, a key of `STRIKES`."""
    text = "\n".join(map(ast.unparse, nodes))
    return [kind for kind in STRIKES if re.search(kind, text, re.IGNORECASE)]


def counts(nodes: list[Top], struck: list[str]) -> bool:
    """Return True if a number is asserted that would differ if the strike had missed."""
    codes = [STRIKES[kind] for kind in struck if STRIKES[kind]]
    for asserted in (each for node in nodes for each in ast.walk(node)):
        if isinstance(asserted, ast.Assert):
            text = ast.unparse(asserted.test)
            if EXIT.search(text):
                if any(re.search(code, text) for code in codes):
                    return True
            elif COUNTS.search(text):
                return True
    return False


def test_h2_no_test_of_a_line_can_pass_without_an_assertion():
    """It finds one that looked at nothing; the next, one that struck nothing."""
    tests = list(named_after_lines())
    vacuous = [
        f"{path.relative_to(TESTS)}::{node.name}"
        for path, node, _ in tests
        if not asserts(node.body, helpers_of(path))
    ]
    assert len(tests) > 150
    assert vacuous == []
    empty = ast.parse("for each in found:\n    assert each")
    assert not asserts(empty.body), "and it would be found"


def test_h2_a_test_that_breaks_something_asserts_a_count():
    """A reader of the test has to see that it is the right count."""
    struck, uncounted = 0, []
    for path, node, _ in named_after_lines():
        nodes = text_of(node, named_in(path))
        kinds = strikes(nodes)
        struck += bool(kinds)
        if kinds and not counts(nodes, kinds):
            uncounted.append(f"{path.relative_to(TESTS)}::{node.name}")
    assert struck > 40
    assert uncounted == []


@pytest.mark.parametrize(
    ("does", "is_counted"),
    [
        ("flip(run); assert main(run) == 0", False),
        ("flip(run); assert main(run) == 65", False),
        ("flip(run); code, output = start(run); assert code == 65", False),
        ("flip(run); assert len(found) == 12", True),
        ("break_('grads:nan@3'); assert main(run) == 79", False),
        ("break_('grads:nan@3'); assert main(run) == 0; assert skipped == 1", True),
        ("done = run('eval:hang@3'); assert done.returncode == 65", False),
        ("done = run('eval:hang@3'); assert done.returncode == 76", True),
        ("done = run('eval:sigkill@3'); assert done.returncode == -9", True),
        ("done = run('eval:sigkill@3'); assert done.returncode == 1", False),
        ("done = run('save.begin:enospc@3'); assert done.returncode == 74", True),
    ],
)
def test_one_that_shows_nothing_of_what_it_broke_would_be_found(does, is_counted):
    (test,) = ast.parse(f"def test(run):\n    {does}").body
    assert isinstance(test, ast.FunctionDef)
    kinds = strikes([test])
    assert kinds
    assert counts([test], kinds) == is_counted


def test_a_figure_in_the_table_of_lines_is_of_a_test_of_that_line():
    figures = [
        (node.name, call.args[0].value)
        for _, node, _ in named_after_lines()
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) == "record_property"
        and isinstance(call.args[0], ast.Constant)
    ]
    assert len({line for _, line in figures}) > 40
    assert [
        (test, line) for test, line in figures if line.lower() not in {"table", *ids_of(test)}
    ] == []
