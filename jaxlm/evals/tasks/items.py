"""Items of a task: records of its file, rendered by its templates and checked, and few-shot draws.

Example:
  >>> drawn("q7", 9, 3, seed=0)
  [5, 8, 7]
"""

import array
import dataclasses
import hashlib
import json
import random
import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Int

from jaxlm.core.errors import DataError, InputMissing
from jaxlm.core.nearest import nearest_word
from jaxlm.data import formats
from jaxlm.data.formats import ReadOptions, RecordFault
from jaxlm.data.sandbox import SandboxProcess
from jaxlm.evals.tasks import synthetic
from jaxlm.evals.tasks.config import LETTERS, Answer, Choice, Pair, Prompted, Task

MAX_BYTES = 2**20  # of the texts of an item
RENDERED_AT_ONCE = 100  # records of a request to the sandbox
DIGEST_BYTES = 16  # of an id
UNKNOWN_FIELD = re.compile(r"UndefinedError: '(\w+)' is undefined")
SKIP = 'invalid = "skip"    # in the task file, leaves such items out'


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
      number: number of the record in its file.
    """

    id: str
    group: str
    subset: str
    context: str
    choices: tuple[str, ...]
    answer: int
    record: Mapping[str, Any]
    program: tuple[str, str] = ("", "")
    number: int = 0

    @property
    def gold(self) -> str:
        """Text of the right choice."""
        return self.choices[self.answer]


class StoredItems(Sequence[Item]):
    """Checked items in a temporary file; memory holds a place and a digest of the id of each.

    `left_out` is the number of records that `task.invalid` leaves out.

    Args:
      task: the task.
      file: the file of the records.
      setting: setting of the task that names the file, for errors.

    Raises: as `checked`.
    """

    def __init__(self, task: Task, file: Path, setting: str = "items"):
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed with this object
        weakref.finalize(self, self._file.close)
        self._places, digests = array.array("q"), bytearray()
        self.left_out = 0
        first: DataError | None = None
        for item in checked(task, file, setting):
            if isinstance(item, DataError):
                first = first or item
                self.left_out += 1
                continue
            self._places.append(self._file.tell())
            self._file.write(json.dumps(vars(item)).encode() + b"\n")
            digests += _digest(item.id)
        if not self._places and first is None:
            raise wrong_item(str(file), "it has no records", "write one record a line")
        if not self._places and first is not None:
            why = f"all {self.left_out} records make no question; {first.where}: {first.why}"
            raise wrong_item(str(file), why, first.fix.splitlines()[0])
        self._digests = np.frombuffer(digests, f"V{DIGEST_BYTES}")
        self._check_unique(file)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        self._file.seek(self._places[index])
        fields = json.loads(self._file.readline())
        lists = {name: tuple(fields[name]) for name in ("choices", "program")}
        return Item(**fields | lists)

    def limited(self, limit: int | None) -> Int[np.ndarray, "n"]:
        """Return the indices of the `limit` items whose ids have the lowest hashes, in order."""
        order = np.argsort(self._digests, kind="stable")
        return np.sort(order[: len(self) if limit is None else limit])

    def _check_unique(self, file: Path) -> None:
        order = np.argsort(self._digests, kind="stable")
        sorted_digests = self._digests[order]
        repeated = order[1:][sorted_digests[1:] == sorted_digests[:-1]]
        if len(repeated):
            item = self[int(repeated.min())]
            where = formats.place(str(file), item.number)
            raise wrong_item(where, f"the id {item.id!r} occurs twice")


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()[:DIGEST_BYTES]


def read(task: Task, file: Path, setting: str = "items") -> list[Item]:
    """Return all items of a file; raises as `StoredItems`."""
    return list(StoredItems(task, file, setting))


def checked(task: Task, file: Path, setting: str = "items") -> Iterator[Item | DataError]:
    """Yield the items of a file, and the error of each record that `task.invalid` leaves out.

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
    with SandboxProcess({"templates": task.templates()}) as sandbox:
        records = _records(file) if program is None else synthetic.records(program)
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
                    yield _item(task, rendered, record, number, where)
                except DataError as error:
                    if task.invalid == "refuse":
                        raise
                    yield error


def digest(items: Iterable[Item]) -> str:
    """Return a sha256 of everything in the items that determines requests and scores."""
    total = hashlib.sha256()
    for item in items:
        fields = [item.id, item.group, item.subset, item.context, item.choices, item.answer]
        fields += [item.program] if item.program[1] else []
        total.update(json.dumps(fields).encode() + b"\n")
    return total.hexdigest()


def drawn(name: str, candidates: int, count: int, *, seed: int) -> list[int]:
    """Return numbers of an item's examples: a function of seed, id and the number of candidates.

    Args:
      name: id of the item.
      candidates: number of candidates.
      count: number of examples; fewer are returned only if there are not as many.
      seed: seed of the draw.
    """
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    draw = random.Random(int.from_bytes(key[:8], "big"))
    return draw.sample(range(candidates), min(count, candidates))


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
            why = f"the template {name} fails: {text[0]}; fields: {known:.300}"
            unknown = UNKNOWN_FIELD.match(text[0])
            if unknown is None or unknown[1] in record:
                raise wrong_item(where, why)
            near = nearest_word(unknown[1], map(str, record))
            better = f"{near} in place of {unknown[1]}" if near else f"its fields are {known:.300}"
            raise wrong_item(where, why, f"correct the template {name}: {better}\n{SKIP}")
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
    if "" in choices:
        raise wrong_item(where, f"the text of choice {choices.index('')} is empty")
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
        number=number,
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


def wrong_item(where: str, why: str, fix: str = f"correct the item\n{SKIP}") -> DataError:
    """Return the error of an item."""
    return DataError("an item of a task is not valid", where=where, why=why, fix=fix)
