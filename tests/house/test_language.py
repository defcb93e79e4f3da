"""The language of the product: a list of words, docstrings that start well, American spelling.

See .github/CONTRIBUTING.md.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = sorted((ROOT / "jaxlm").rglob("*.py"))
CHECKED = ("jaxlm/**/*.py", "tests/**/*.py", "scripts/**/*.py", "configs/**/*.py")
SOURCES = sorted(
    path
    for pattern in CHECKED
    for path in ROOT.glob(pattern)
    if path != Path(__file__)  # it has the words
)
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests/faults/README.md",
    *sorted((ROOT / "jaxlm").rglob("*.md")),
]
WORDS = (
    "told|tell|tells|said|say|says|goes on|go on|gone on|going on|lies|nobody|somebody|beside"
    "|of which|so many"
    "|what it is that|hears|crew|dealt|undeal|none is|anew|whoever|whatever|asks|knows|nor|alike"
)
BANNED = re.compile(rf"(?<![\w`.\-/])({WORDS})(?![\w`\-/(])", re.IGNORECASE)
STEMS = (
    "normal|quant|token|regular|serial|initial|optim|general|organ|recogn|minim|maxim|summar|util"
    "|parallel|special|synchron|visual|standard|local|memor|vector|central|equal|emphas|material"
    "|custom"
)
BRITISH = re.compile(
    rf"\b\w*({STEMS})is(e|es|ed|er|ers|ing|ation|ations)\b"
    r"|\b\w*(colour|behaviour|neighbour|favour|licence)\w*",
    re.IGNORECASE,
)
OPENINGS = re.compile(r"(What|Whether|How|Where|Which|Who|Whose|That|Of|As|So|Nothing|None)\b")
# Names of arguments and local variables that do not describe their value.
VAGUE = set("found given wanted kept told own at there crew wish dealt beside again".split())
WIDTH = 100  # columns of code and prose; a row of a Markdown table may be longer
CODE = re.compile(r"`[^`]+`|<!--.*?-->")
MANY = 4  # arguments of a public function beyond which its docstring has an Args section
# Spellings that configs and files of users contain.
EXCEPTIONS = {
    "at": "a setting of an adapter: the places it changes",
    "licence": "a stage of a corpus recipe",
    "licences": "a setting of a corpus mix",
    "normalise": "the former name of a stage of a corpus recipe",
    "normalised": "the former name of a model setting",
    "regularisation": "the former name of a section of the config",
    "neighbours": "a value of the former model.pairs",
}


def texts(path: Path) -> list[tuple[int, str]]:
    """Lines and contents of the strings and comments of a Python file, or of a document."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":  # names in code are not words
        return [(n, CODE.sub("", line)) for n, line in enumerate(source.splitlines(), 1)]
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    return [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in kinds
    ]


def misspoken(text: str) -> list[str]:
    """The words of a text that the style sheet excludes."""
    words = [match[0] for match in [*BANNED.finditer(text), *BRITISH.finditer(text)]]
    return [word for word in words if word.lower() not in EXCEPTIONS]


def openings(nodes: list[ast.AST]) -> list[str]:
    """First words of docstrings that start with a relative clause."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return [doc.splitlines()[0] for doc in docs if OPENINGS.match(doc)]


def vague(nodes: list[ast.AST]) -> list[str]:
    """Arguments and local variables with a name that does not describe their value, by line."""
    names = [(n.lineno, n.arg) for n in nodes if isinstance(n, ast.arg)]
    names += [
        (n.lineno, n.id) for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    return [f"{line}: name {name!r}" for line, name in names if name in VAGUE - EXCEPTIONS.keys()]


def unexplained(nodes: list[ast.AST]) -> list[str]:
    """Public functions of many arguments whose docstring has no Args section, by line.

    Arguments of a test are fixtures and parameters.
    """
    wrong = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "test_")):
            doc = ast.get_docstring(node)
            arguments = [
                a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            ]
            count = len([a for a in arguments if a not in ("self", "cls")])
            if doc and count > MANY and "Args:" not in doc:
                wrong.append(
                    f"{node.lineno}: {node.name} has {count} arguments and no Args section"
                )
    return wrong


def violations(path: Path) -> list[str]:
    """Everything in a file that the style sheet excludes, by line."""
    source = path.read_text(encoding="utf-8")
    wrong = [f"{line}: {word}" for line, text in texts(path) for word in misspoken(text)]
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(source)))
        wrong += openings(nodes) + vague(nodes) + unexplained(nodes)
    lines = enumerate(source.splitlines(), 1)
    wrong += [
        f"{n}: {len(line)} columns"
        for n, line in lines
        if len(line) > WIDTH and not (path.suffix == ".md" and line.startswith("|"))
    ]
    return wrong


@pytest.mark.parametrize("path", [*SOURCES, *DOCUMENTS], ids=str)
def test_the_language_is_plain(path):
    assert violations(path) == []


def test_words_of_the_list_are_found_and_names_in_code_are_not():
    assert misspoken("Nobody is told.") == ["Nobody", "told"]
    assert misspoken("It was initialised, so many times, in colour.") == [
        "so many",
        "initialised",
        "colour",
    ]
    assert misspoken("reads `told`, beside-the-point, told() and data.told") == []
    source = 'def f(a, b, c, d, e):\n    "What it does."\n    found = a\n'
    nodes = list(ast.walk(ast.parse(source)))
    assert openings(nodes) == ["What it does."]
    assert vague(nodes) == ["3: name 'found'"]
    assert unexplained(nodes) == ["1: f has 5 arguments and no Args section"]
    assert unexplained(list(ast.walk(ast.parse(source.replace("def f", "def test_f"))))) == []


def test_the_exceptions_are_few_and_used():
    assert len(EXCEPTIONS) <= 10
    everything = "\n".join(path.read_text(encoding="utf-8").lower() for path in PRODUCT)
    assert [word for word in EXCEPTIONS if word not in everything] == []
