"""Synthetic tasks, whose items a program makes: no file is needed, and every right answer is known.

The functions of `made:functions` are those of the Python that runs the program; all other items are
the same everywhere.

Example:
  >>> record = TASKS["sums"].record(random.Random(0))
  >>> record["q"], record["a"], record["digits"]
  ('63 + 15', '78', 2)
"""

import ast
import datetime
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxlm.data.documents import Corpus

PREFIX = "made:"  # of the names of such tasks
ITEMS = 400  # of a task
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jon Kim Lea Max Nina Otto Pia".split()
WORDS = "apple bread chair door earth field glass house ink jar key lamp milk nest oil pen".split()
PAIRS = {"(": ")", "[": "]", "{": "}"}
HELD_OUT = ("stdlib:validation",)  # files that no run on stdlib:train reads
BODY_LINES = 10  # of a function, at most
BODIES = 4  # choices

ANSWER = """
kind = "answer"
context = "{{ q }} ="
answer = "{{ a }}"
stop = ["\\n"]
max_tokens = 32
subset = "{{ SUBSET }}"
"""
CHOICE = """
kind = "choice"
context = "{{ q }}"
choices = [")", "]", "}"]
answer = "a"
delimiter = ""
subset = "depth {{ depth }}"
"""
FUNCTION = """
kind = "choice"
context = "{{ q }}"
choices = "bodies"
answer = "a"
delimiter = ""
subset = "{{ lines }}"
"""


class Made(NamedTuple):
    """A task as the text of a task file, and the function that draws a record.

    `items` is the number of different records.
    """

    text: str
    record: Callable[[random.Random], dict[str, Any]]
    items: Callable[[], int] = lambda: ITEMS


def _sum(draw: random.Random) -> dict[str, Any]:
    digits = draw.randint(1, 3)
    first, second = (draw.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    return {"q": f"{first} + {second}", "a": str(first + second), "digits": digits}


def _copy(draw: random.Random) -> dict[str, Any]:
    words = draw.choices(WORDS, k=draw.choice((2, 4, 8)))
    return {"q": f"copy({' '.join(words)})", "a": " ".join(words), "words": len(words)}


def _sort(draw: random.Random) -> dict[str, Any]:
    words = draw.sample(WORDS, draw.choice((2, 4, 6)))
    answer = " ".join(sorted(words))
    return {"q": f"sort({' '.join(words)})", "a": answer, "words": len(words)}


def _brackets(draw: random.Random) -> dict[str, Any]:
    """Return an open text of brackets; the answer closes the innermost one."""
    text, open_ones = draw.choice("([{"), []
    open_ones.append(text)
    while len(text) < draw.randint(4, 12) or not open_ones:
        if open_ones and draw.random() < 0.4:
            text += PAIRS[open_ones.pop()]
        else:
            open_ones.append(draw.choice("([{"))
            text += open_ones[-1]
    return {"q": text, "a": PAIRS[open_ones[-1]], "depth": min(len(open_ones), 4)}


def _date(draw: random.Random) -> dict[str, Any]:
    begin = datetime.date(1990, 1, 1) + datetime.timedelta(draw.randrange(20_000))
    days = draw.choice((1, 7, 30))
    end = begin + datetime.timedelta(days)
    return {"q": f"{begin} + {days} days", "a": str(end), "days": days}


def _retrieval(draw: random.Random) -> dict[str, Any]:
    """Return lines of codes by name and a question about one, at a depth in per cent."""
    names = draw.sample(NAMES, 9)
    codes = {name: draw.randrange(1000, 10_000) for name in names}
    place = draw.choice((0, 4, 8))
    lines = "\n".join(f"code of {name} = {code}" for name, code in codes.items())
    asked = names[place]
    question = f"{lines}\ncode of {asked}"
    return {"q": question, "a": str(codes[asked]), "percent": 100 * place // 8}


class Function(NamedTuple):
    """A function of a file: its head with the docstring, and its body, as lines."""

    head: str
    body: str

    @property
    def lines(self) -> int:
        """Lines of the body."""
        return self.body.count("\n")


def functions_of(source: str) -> Iterator[Function]:
    """Yield the functions of a program that have a docstring and a short body.

    Example:
      >>> list(functions_of("def f(x):\\n    'Return x.'\\n    return x\\n"))
      [Function(head="def f(x):\\n    'Return x.'\\n", body='    return x\\n')]
    """
    lines = source.splitlines(keepends=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the library's own texts
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        first, last = node.body[0].end_lineno, node.end_lineno
        assert first is not None
        assert last is not None
        if 0 < last - first <= BODY_LINES:
            yield Function("".join(lines[node.lineno - 1 : first]), "".join(lines[first:last]))


@functools.cache
def _held_out() -> tuple[Function, ...]:
    """Return the functions of the held-out files of Python's library, each head and body once."""
    files = Corpus.find(HELD_OUT, "text", "made:functions").files
    functions = [each for file in files for each in functions_of(file.read_text("utf-8"))]
    heads = {each.head: each for each in functions}
    return tuple({each.body: each for each in heads.values()}.values())


def _function(draw: random.Random) -> dict[str, Any]:
    """Return the head and docstring of a function, and bodies of it and of three others."""
    right, *others = draw.sample(_held_out(), BODIES)
    bodies = [right.body, *(each.body for each in others)]
    draw.shuffle(bodies)
    size = "1 line" if right.lines == 1 else "2 to 4 lines" if right.lines <= 4 else "5 to 10 lines"
    return {"q": right.head, "a": bodies.index(right.body), "bodies": bodies, "lines": size}


TASKS = {
    "sums": Made(ANSWER.replace("SUBSET", "digits"), _sum),
    "copy": Made(ANSWER.replace("SUBSET", "words"), _copy),
    "sort": Made(ANSWER.replace("SUBSET", "words"), _sort),
    "brackets": Made(CHOICE, _brackets),
    "dates": Made(ANSWER.replace("SUBSET", "days"), _date),
    "retrieval": Made(ANSWER.replace("SUBSET", "percent"), _retrieval),
    "functions": Made(FUNCTION, _function, lambda: len(_held_out())),
}


def definition(name: str) -> str:
    """Return the text of a synthetic task as a task file."""
    return f'name = "made-{name}"\nitems = "{PREFIX}{name}"\n{TASKS[name].text}'


def records(name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the fields of each record; no question is repeated."""
    draw, seen, count = random.Random(name), set[str](), TASKS[name].items()
    while len(seen) < count:
        record = TASKS[name].record(draw)
        if record["q"] not in seen:
            seen.add(record["q"])
            yield len(seen), record
