"""Items of tasks in the training data of a run, and scores with and without them."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import InputMissing
from jaxlm.data import formats, parts, shards
from jaxlm.data.parts import Part
from jaxlm.data.records import LeftOut
from jaxlm.evals import contamination
from jaxlm.evals.tasks import config, items
from jaxlm.evals.tasks.config import Prompted
from jaxlm.monitor import sinks
from jaxlm.recipes.use import load

FILE = "contamination.json"  # in the folder of a task's results
SHOWN = 5  # documents of an item
EVERY = 100_000  # documents between two log lines


def training_parts(workdir: Path) -> list[Part]:
    """Return the training data of a run: files, or token shards.

    Raises InputMissing if they are not found from the current directory.
    """
    data = load.read_config(workdir).data
    try:
        return parts.find_parts(data)[0]
    except InputMissing as error:
        raise InputMissing(
            "the training data of the run is not found",
            where=f"{workdir}/config.json, data.train = {','.join(data.train)}",
            why=f"{error.what}; {error.why}",
            fix="run the same command in the directory where the run was trained",
        ) from error


def check_tasks(
    training: Sequence[Part],
    tasks: Sequence[str],
    results: dict[str, Any],
    say: Log = lambda _: None,
) -> dict[str, Any]:
    """Return scores on items that the training data contains and on others, by task.

    The scores and the documents of each contaminated item are written to `contamination.json` in
    the folder of the task's results. Contexts and right answers are searched for, without examples.

    Args:
      training: the training data.
      tasks: task files.
      results: results of the tasks by name, with their folders.
      `say`: receives log lines.
    """
    samples, indices = {}, {}
    for path in tasks:
        task = config.read(Path(path))
        lines = sinks.read(Path(results[task.name]["folder"]) / "samples.jsonl", {})
        scored = {line["id"] for line in lines}
        join = task.kind.delimiter if isinstance(task.kind, Prompted) else ""
        texts = {
            item.id: f"{item.context}{join}{item.gold}"
            for item in items.read(task, task.file)
            if item.id in scored
        }
        samples[task.name] = lines
        indices[task.name] = contamination.ItemIndex(texts)
    touched: dict[str, dict[str, list[str]]] = {name: {} for name in indices}
    counts: Counter[tuple[str, str]] = Counter()
    number = 0
    for number, (place, text) in enumerate(documents(training), 1):
        for name, index in indices.items():
            for item in index.items_in(text):
                counts[name, item] += 1
                if len(places := touched[name].setdefault(item, [])) < SHOWN:
                    places.append(place)
        if number % EVERY == 0:
            say(f"{number:,} documents compared with the items")
    answer = {}
    for name, index in indices.items():
        summary = {
            "documents": number,
            "words": contamination.WORDS,
            "too_short": len(index.too_short),
            **contamination.scores(samples[name], set(touched[name])),
        }
        listed = {
            item: {"documents": counts[name, item], "first": places}
            for item, places in touched[name].items()
        }
        content = json.dumps(summary | {"items": listed}, indent=1, ensure_ascii=False)
        file = Path(results[name]["folder"]) / FILE
        sinks.replace(file, content.encode(errors="replace") + b"\n")
        first = next(iter(listed.items()), None)
        answer[name] = summary | {"file": str(file), "first": first}
    return answer


def documents(training: Sequence[Part]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each training document."""
    for part in training:
        if part.corpus is not None:
            for document in part.documents(LeftOut()):
                yield formats.place(document.file, document.record), document.text
            continue
        stored = shards.open_folders(part.folders)
        tokenizer = stored.tokenizer
        for first in range(stored.documents):
            size = int(stored.lengths(first, first + 1)[0])
            yield (
                formats.place(*stored.origin(first)),
                tokenizer.decode(stored.read(first, 0, size).tolist()),
            )
