"""Items of a task: records of its file, rendered by its templates and checked, and few-shot draws.

Example:
  >>> drawn("q7", ["q1", "q2", "q7", "q9"], 2, seed=0)
  ['q2', 'q9']
"""

import dataclasses
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.data import formats
from jaxlm.data.formats import ReadOptions, RecordFault
from jaxlm.data.sandbox import SandboxProcess
from jaxlm.evals.tasks import made
from jaxlm.evals.tasks.config import LETTERS, Answer, Choice, Pair, Prompted, Task

MAX_BYTES = 2**20  # of the texts of an item
RENDERED_AT_ONCE = 1000  # records of a request to the sandbox


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A rendered and checked item.

    Attributes:
      id: unique name.
      group: items of one group are not independent; the id without groups.
      subset: name of the part of the task whose results are given separately; empty without.
      context: text before the answer.
      choices: texts to compare; of a pair, the good one and the bad one; of a text, itself; of
        a question with a generated answer, the reference.
      answer: index of the right choice.
      record: the fields of the item, for further templates.
      program: source before and after a generated answer that is run; empty for others.
    """

    id: str
    group: str
    subset: str
    context: str
    choices: tuple[str, ...]
    answer: int
    record: Mapping[str, Any]
    program: tuple[str, str] = ("", "")

    @property
    def gold(self) -> str:
        """Text of the right choice."""
        return self.choices[self.answer]


def read(task: Task, file: Path, setting: str = "items") -> list[Item]:
    """Return all items of a file; raises as `read_counted`."""
    return read_counted(task, file, setting)[0]


def read_counted(task: Task, file: Path, setting: str = "items") -> tuple[list[Item], int]:
    """Return all items of a file, and the number of those that `task.invalid` leaves out.

    Raises:
      InputMissing: if the file does not exist.
      DataError: if a record is damaged, or an item makes no question and `task.invalid` refuses it.
    """
    program = task.made if file == task.file else None
    if program is None and not file.is_file():
        raise InputMissing(
            f"the {setting} of a task do not exist",
            where=f"{task.path}, {setting}",
            why=f"there is no file {file}",
            fix=f"find . -name '*{file.suffix}'",
        )
    items: list[Item] = []
    seen: Counter[str] = Counter()
    left_out = 0
    with SandboxProcess({"templates": task.templates()}) as sandbox:
        records = _records(file) if program is None else made.records(program)
        for batch in _batches(records):
            texts = sandbox.request([record for _, record in batch])
            if isinstance(texts, dict):
                raise DataError(
                    "the templates of a task cannot be rendered",
                    where=str(task.path),
                    why=texts["error"],
                    fix="correct the template and try again",
                )
            for (number, record), rendered in zip(batch, texts, strict=True):
                where = formats.place(str(file), number)
                try:
                    item = _item(task, rendered, record, number, where)
                except DataError:
                    if task.invalid == "refuse":
                        raise
                    left_out += 1
                    continue
                seen[item.id] += 1
                if seen[item.id] > 1:
                    raise wrong_item(where, f"the id {item.id!r} occurs twice")
                items.append(item)
    if not items:
        why = f"all {left_out} records make no question" if left_out else "it has no records"
        raise wrong_item(str(file), why)
    return items, left_out


def limited(items: Sequence[Item], limit: int | None) -> list[Item]:
    """Return the `limit` items whose ids have the lowest hashes, in their order; None for all."""
    if limit is None or limit >= len(items):
        return list(items)
    order = sorted(items, key=lambda item: hashlib.sha256(item.id.encode()).digest())
    chosen = {item.id for item in order[:limit]}
    return [item for item in items if item.id in chosen]


def digest(items: Sequence[Item]) -> str:
    """Return a sha256 of everything in the items that determines requests and scores."""
    total = hashlib.sha256()
    for item in items:
        fields = [item.id, item.group, item.subset, item.context, item.choices, item.answer]
        fields += [item.program] if item.program[1] else []
        total.update(json.dumps(fields).encode() + b"\n")
    return total.hexdigest()


def drawn(name: str, candidates: Sequence[str], count: int, *, seed: int) -> list[str]:
    """Return the ids of an item's examples: a function of seed, id and candidates.

    Args:
      name: id of the item, which is not an example of itself.
      candidates: ids of all examples.
      count: number of examples; fewer are returned only if there are not as many.
      seed: seed of the draw.
    """
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    draw = random.Random(int.from_bytes(key[:8], "big"))
    chosen = draw.sample(range(len(candidates)), min(count + 1, len(candidates)))
    return [candidates[n] for n in chosen if candidates[n] != name][:count]


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and fields of each record."""
    kind = formats.FORMATS.get(formats.kind_of(file.name))
    if kind is None:
        raise wrong_item(str(file), "items are JSON lines or Parquet, by the suffix of the file")
    with open(file, "rb") as opened:
        stream = formats.unpacked(opened, file.name) if kind.is_lines else opened
        for record in kind.read(stream, ReadOptions(str(file))):
            where = formats.place(str(file), record[0])
            if isinstance(record[1], RecordFault):
                raise wrong_item(where, f"{record[1].kind}: {record[1].error}")
            if not isinstance(record[1], dict):
                raise wrong_item(where, f"it is {type(record[1]).__name__}, not an object")
            yield record[0], record[1]


def _batches(records: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for record in records:
        batch.append(record)
        if len(batch) == RENDERED_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _item(
    task: Task, rendered: Mapping[str, Any], record: dict[str, Any], number: int, where: str
) -> Item:
    """Return an item. Raises DataError if a template failed or the item makes no question."""
    for name, text in rendered.items():
        if not isinstance(text, str):
            known = ", ".join(map(str, record))
            raise wrong_item(where, f"the template {name} fails: {text[0]}; fields: {known:.300}")
        if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
            raise wrong_item(where, f"{name} has a lone surrogate, which is no character")
    if (size := sum(map(len, rendered.values()))) > MAX_BYTES:
        raise wrong_item(where, f"its texts have {size:,} characters; at most {MAX_BYTES:,}")
    name = rendered.get("id") or str(number)
    context, answer = rendered.get("context", ""), 0
    match task.kind:
        case Choice():
            choices = _choices(task.kind, rendered, where)
            answer = _answer(json.loads(rendered["answer"]), choices, where)
        case Answer():
            choices = (rendered["answer"],)
        case Pair():
            choices = (rendered["good"], rendered["bad"])
        case _:
            choices = (rendered["text"],)
    for number, choice in enumerate(choices):
        if not choice:
            raise wrong_item(where, f"the text of choice {number} is empty")
    if len(set(choices)) < len(choices):
        raise wrong_item(where, f"two choices are equal: {', '.join(map(repr, choices)):.200}")
    return Item(
        id=name,
        group=rendered.get("group") or name,
        subset=rendered.get("subset", ""),
        context=context,
        choices=choices,
        answer=answer,
        record=record if isinstance(task.kind, Prompted) else {},
        program=(rendered.get("program_start", ""), rendered.get("program_end", "")),
    )


def _choices(kind: Choice, rendered: Mapping[str, str], where: str) -> tuple[str, ...]:
    if "choices" not in rendered:
        return tuple(rendered[f"choices[{n}]"] for n in range(len(kind.choices)))
    values = json.loads(rendered["choices"])
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise wrong_item(where, f"choices = {kind.choices!r} is not a list of texts")
    if not 2 <= len(values) <= len(LETTERS):
        raise wrong_item(where, f"it has {len(values)} choices, and needs 2 to {len(LETTERS)}")
    return tuple(values)


def _answer(value: Any, choices: tuple[str, ...], where: str) -> int:
    """Return the index of the right choice from an index or a text."""
    if isinstance(value, str) and value in choices:
        return choices.index(value)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(choices):
        why = f"the answer is {value!r:.60}, and must be an index below {len(choices)} or a choice"
        raise wrong_item(where, why)
    return value


def wrong_item(where: str, why: str) -> DataError:
    """Return the error of an item."""
    return DataError(
        "an item of a task is not valid",
        where=where,
        why=why,
        fix='correct the item\ninvalid = "skip"    # in the task file, leaves such items out',
    )
