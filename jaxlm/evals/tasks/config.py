"""Task files: the definition of a task in TOML, checked before anything is computed.

Example:
  >>> text = 'kind = "pair"\\nitems = "a.jsonl"\\ngood = "{{ yes }}"\\nbad = "{{ no }}"'
  >>> task = parsed(text, Path("grammar.toml"))
  >>> task.name, task.kind.templates()
  ('grammar', {'good': '{{ yes }}', 'bad': '{{ no }}'})
"""

import dataclasses
import math
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal

from jaxlm.core.errors import ConfigError, DataError, InputMissing, not_installed
from jaxlm.core.nearest import nearest_word
from jaxlm.corpus.filters.linear import LinearClassifier
from jaxlm.evals.metrics import METRICS, needs_sacrebleu
from jaxlm.evals.tasks import lm_eval_yaml, synthetic

Form = Literal["cloze", "letters"]
TEMPLATES = ("id", "group", "subset")  # of every kind
MAX_SAMPLES = 1000  # of an item
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _json(expression: str) -> str:
    """Return the template that gives the value of an expression as JSON."""
    return "{{ (" + expression + ") | tojson }}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompted:
    """Settings of tasks with a prompt and examples.

    `examples` is a file of JSON lines from which examples are drawn, by default the items.
    `delimiter` joins a context and its answer, `between` joins examples, and `preamble` is the
    text before the first.
    """

    context: str
    delimiter: str = " "
    preamble: str = ""
    between: str = "\n\n"
    examples: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Prompted):
    """Selection of a choice by its log-likelihood after a context.

    `choices` are templates, or one Jinja expression of a list of texts. `answer` is a Jinja
    expression of the index of the right choice, or its text. `letters` is the context of the
    letters form, a template with the further variables `context` and `options`. `unconditional` is
    the context of the log-likelihood that pointwise mutual information subtracts.
    """

    name: ClassVar[str] = "choice"
    choices: str | tuple[str, ...]
    answer: str
    letters: str = "{{ context }}\n{{ options }}\nAnswer:"
    unconditional: str = ""

    def templates(self) -> dict[str, str]:
        """Return the templates of an item by name."""
        named = {"context": self.context, "answer": _json(self.answer)}
        if isinstance(self.choices, str):
            return {**named, "choices": _json(self.choices)}
        return named | {f"choices[{n}]": each for n, each in enumerate(self.choices)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(Prompted):
    """Comparison of a generated answer with a reference.

    `answer` is a template of the reference. Generation ends at an end token, at one of `stop` or
    after `max_tokens`. `extract` is a regular expression whose last match, or its first group with
    a text, is compared; by default the whole text. `match` is that of `jaxlm eval --verify`.
    `metrics` are further ones of `jaxlm.evals.metrics`. `refusals` are regular expressions of
    refused answers, and `listed` are words and phrases that are looked for in answers. `classifier`
    is the folder of a classifier, relative to the file, and `label` one of its labels. If there is
    a `program_end`, `program_start`, the answer and `program_end` are run as a Python program.
    `samples` further answers are drawn at `temperature`, for pass@k: the probability that one of k
    is right, or passes.
    """

    name: ClassVar[str] = "answer"
    answer: str
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    extract: str = ""
    match: Literal["exact", "number"] = "exact"
    metrics: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    classifier: str = ""
    label: str = ""
    program_start: str = ""
    program_end: str = ""
    samples: int = 0
    temperature: float = 1.0

    def templates(self) -> dict[str, str]:
        """Return the templates of an item by name."""
        program = {name: getattr(self, name) for name in ("program_start", "program_end")}
        named = {"context": self.context, "answer": self.answer}
        return named | (program if self.program_end else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Comparison of the log-likelihoods of two texts, where `good` should be likelier."""

    name: ClassVar[str] = "pair"
    good: str
    bad: str

    def templates(self) -> dict[str, str]:
        """Return the templates of an item by name."""
        return {"good": self.good, "bad": self.bad}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Log-likelihood of texts, in bits per byte."""

    name: ClassVar[str] = "text"
    text: str = "{{ text }}"

    def templates(self) -> dict[str, str]:
        """Return the templates of an item by name."""
        return {"text": self.text}


Kind = Choice | Answer | Pair | Text
KINDS: dict[str, type[Kind]] = {each.name: each for each in (Choice, Answer, Pair, Text)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task: its items and the kind of its question.

    `items` is a file of JSON lines, relative to the task file. `id`, `group` and `subset` are
    templates: items of a group are not independent of each other, and results are also given by
    subset. Without `id`, an item is named by the number of its line. `invalid` refuses a file with
    an item that makes no question, or leaves such items out and counts them.
    """

    path: Path
    name: str
    kind: Kind
    items: str
    version: int = 1
    id: str = ""
    group: str = ""
    subset: str = ""
    invalid: Literal["refuse", "skip"] = "refuse"

    @property
    def file(self) -> Path:
        """File of the items."""
        return self.path.parent / self.items

    @property
    def made(self) -> str | None:
        """Name of the program that makes the items; None for items of a file."""
        is_synthetic = self.items.startswith(synthetic.PREFIX)
        return self.items.removeprefix(synthetic.PREFIX) if is_synthetic else None

    def classifier(self) -> tuple[LinearClassifier, int] | None:
        """Return the classifier of the answers and the index of its label; None without one.

        Raises InputMissing if the folder has none, DataError if it is damaged or lacks the label.
        """
        if not isinstance(self.kind, Answer) or not self.kind.classifier:
            return None
        where = f"{self.path}, classifier"
        model = LinearClassifier.read(self.path.parent / self.kind.classifier, where)
        if self.kind.label not in model.labels:
            labels = ", ".join(model.labels)
            raise invalid(self.path, f"label is {self.kind.label!r}, and must be one of {labels}")
        return model, model.labels.index(self.kind.label)

    def templates(self) -> dict[str, str]:
        """Return all templates of an item by name."""
        shared = {name: getattr(self, name) for name in TEMPLATES}
        return {name: text for name, text in shared.items() if text} | self.kind.templates()

    def definition(self) -> dict[str, Any]:
        """Return all settings that determine requests and scores, as JSON values."""
        shared = {name: getattr(self, name) for name in ("name", "version", *TEMPLATES)}
        return {**shared, "kind": self.kind.name, **dataclasses.asdict(self.kind)}


def read(path: Path, flag: str = "--tasks") -> Task:
    """Return the task of a file; `flag` names it, for errors.

    `made:NAME` is a task whose items a program makes.

    Raises InputMissing if there is no such file or a package is missing, ConfigError if there is no
    such synthetic task, DataError if the file is no valid task.
    """
    if (text := str(path)).startswith(synthetic.PREFIX):
        name = text.removeprefix(synthetic.PREFIX)
        if name in synthetic.TASKS:
            return parsed(synthetic.definition(name), path)
        meant = nearest_word(name, list(synthetic.TASKS)) or next(iter(synthetic.TASKS))
        raise ConfigError(
            f"no synthetic task has the name {name!r}",
            where=f"{flag}={path}",
            why=f"they are {', '.join(synthetic.TASKS)}",
            fix=f"correct the name, for example {synthetic.PREFIX}{meant}",
        )
    if not path.is_file():
        raise InputMissing(
            f"the task file {path} does not exist",
            where=f"{flag}={path}",
            why="a task is a file of TOML or YAML; see `jaxlm docs evaluation`",
            fix="find . -name '*.toml'",
        )
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix not in lm_eval_yaml.SUFFIXES:
            return parsed(text, path)
        return _task(lm_eval_yaml.settings(text), path)
    except UnicodeDecodeError as error:
        raise invalid(path, f"it is not UTF-8: {error}") from error
    except ValueError as error:
        raise invalid(path, str(error)) from error


def parsed(text: str, path: Path) -> Task:
    """Return the task of the content of a file. Raises DataError if it is not valid."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise invalid(path, f"it is not TOML: {error}") from error
    return _task(raw, path)


def _task(raw: dict[str, Any], path: Path) -> Task:
    """Return the task of the settings of a file. Raises DataError if one is not valid."""
    label = raw.pop("kind", None)
    if not isinstance(label, str) or label not in KINDS:
        raise invalid(path, f"kind is {label!r}, and must be one of {', '.join(KINDS)}")
    kind = KINDS[label]
    specific = {field.name for field in dataclasses.fields(kind)}
    shared = {field.name for field in dataclasses.fields(Task)} - {"path", "kind"}
    for name in raw.keys() - specific - shared:
        nearest = nearest_word(name, sorted(specific | shared))
        meant = f"; the nearest setting is {nearest}" if nearest else ""
        raise invalid(path, f"{name} is not a setting of a task of kind {label}{meant}")
    raw.setdefault("name", path.stem)
    built = _built(kind, {name: raw[name] for name in raw.keys() & specific}, path)
    task: Task = _built(
        Task, {n: raw[n] for n in raw.keys() & shared} | {"path": path, "kind": built}, path
    )
    if isinstance(built, Answer):
        _check_answer(built, path)
    if not task.name or not set(task.name) <= set(_NAME):
        raise invalid(path, f"name is {task.name!r}; it may have letters, digits, -, _ and .")
    return task


def _check_answer(kind: Answer, path: Path) -> None:
    if kind.max_tokens < 1:
        raise invalid(path, f"max_tokens is {kind.max_tokens}, and must be at least 1")
    if not 0 <= kind.samples <= MAX_SAMPLES:
        raise invalid(path, f"samples is {kind.samples}, and must be from 0 to {MAX_SAMPLES}")
    if not 0 < kind.temperature < math.inf:
        raise invalid(path, f"temperature is {kind.temperature}, and must be positive")
    for name, patterns in (("extract", (kind.extract,)), ("refusals", kind.refusals)):
        try:
            list(map(re.compile, patterns))
        except re.error as error:
            raise invalid(path, f"{name} has no regular expression: {error}") from error
    if bool(kind.classifier) != bool(kind.label):
        raise invalid(path, "classifier and label need each other")
    if unknown := [name for name in kind.metrics if name not in METRICS]:
        raise invalid(path, f"metrics has {unknown[0]!r}, and must be of {', '.join(METRICS)}")
    if needs_sacrebleu(kind.metrics):
        what = f"the metrics {', '.join(kind.metrics)}"
        raise not_installed(what, "sacrebleu", "evals", where=f"{path}, metrics")


_NAME = f"{LETTERS}{LETTERS.lower()}0123456789-_."


def _built(kind: type, values: dict[str, Any], path: Path) -> Any:
    """Return a section of the task file; lists become tuples. Raises DataError."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in values:
            if field.default is dataclasses.MISSING:
                raise invalid(path, f"it has no {field.name}")
            continue
        value, hint = values[field.name], hints[field.name]
        if isinstance(value, list) and all(isinstance(each, str) for each in value) and value:
            values[field.name] = value = tuple(value)
        if typing.get_origin(hint) is Literal:
            if value not in typing.get_args(hint):
                choices = ", ".join(typing.get_args(hint))
                raise invalid(path, f"{field.name} is {value!r:.60}, and must be one of {choices}")
            continue
        allowed = {typing.get_origin(each) or each for each in _members(hint)}
        if allowed == {float} and type(value) is int:
            values[field.name] = value = float(value)
        if field.name not in ("path", "kind") and type(value) not in allowed:
            expected = " or ".join(sorted(_TYPES[each] for each in allowed))
            raise invalid(path, f"{field.name} is {value!r:.60}, and must be {expected}")
    return kind(**values)


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


_TYPES = {str: "text", int: "an integer", float: "a number", tuple: "a list of texts"}


def invalid(path: Path, why: str) -> DataError:
    """Return the error of a task file."""
    return DataError(
        "a task file is not valid", where=str(path), why=why, fix="correct the file and try again"
    )
