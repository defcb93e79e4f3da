"""Pairs of texts of two runs, to be rated, and the file of ratings."""

import dataclasses
import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlm.core.callbacks import Log
from jaxlm.core.errors import DataError, InputMissing, NotWritable, cannot_write
from jaxlm.evals.ratings import Rating
from jaxlm.monitor import sinks
from jaxlm.monitor.sinks import Jsonl, Shape

if TYPE_CHECKING:
    from jaxlm.generate.config import GenerateConfig

EXAMPLE = "Once upon a time"
OTHER_FILE = "--out=ratings-2.jsonl"
BATCH = 16  # prompts that are continued at a time
SHAPE: Shape = {
    **dict.fromkeys(("id", "run_a", "run_b", "rater", "prompt", "a", "b"), sinks.is_text),
    "order": lambda value: value in ("ab", "ba"),
    "choice": lambda value: value in ("a", "b", "tie", "skip"),
}


class TextPair(NamedTuple):
    """A prompt and the texts with which runs A and B continue it."""

    prompt: str
    a: str
    b: str

    @property
    def id(self) -> str:
        """Return a digest of the three."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file, each once: JSON lines with `prompt`, or lines of text.

    Raises:
      InputMissing: if there is no such file.
      DataError: if a line has no prompt, or the file has none.
    """
    if not file.is_file():
        raise InputMissing(
            "there is no file of prompts",
            where=f"--prompts={file}",
            why="it has JSON lines with a prompt (.jsonl), or a prompt on each line",
            fix=_example(file),
        )
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    is_json = file.suffix == ".jsonl"
    prompts = [
        _prompt(line, f"{file}:{number}") if is_json else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise DataError(
            "the file has no prompt",
            where=f"--prompts={file}",
            why="all of its lines are empty",
            fix=_example(file),
        )
    return list(dict.fromkeys(prompts))


def _example(file: Path) -> str:
    """Return the command that writes a file of one prompt."""
    text = json.dumps({"prompt": EXAMPLE}) if file.suffix == ".jsonl" else EXAMPLE
    return f"echo '{text}' > {shlex.quote(str(file))}"


def _prompt(line: str, place: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
        if isinstance(prompt, str):
            return prompt
        why = f"prompt is {prompt!r}, not a string"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    fix = f'one prompt a line: {{"prompt": "{EXAMPLE}"}}'
    raise DataError("a line has no prompt", where=place, why=why, fix=fix)


def write_texts(
    refs: Sequence[str],
    settings: "GenerateConfig",
    *,
    is_chat: bool = False,
    say: Log = lambda _: None,
) -> tuple[list[str], list[TextPair]]:
    """Return the names RUN@STEP of two runs, and their texts for each prompt.

    Args:
      refs: RUN[@STEP] of both runs.
      settings: prompts and sampling settings, which both runs have.
      is_chat: wrap each prompt as a user turn with the run's chat template.
      `say`: receives log lines.

    Raises:
      InputMissing: if there is no such run or step.
      ConfigError: if a model cannot continue text, or has no template.
    """
    from jaxlm.recipes.use import generate, load

    prompts = settings.prompts
    names: list[str] = []
    texts: list[list[str]] = []
    for ref in refs:
        source = load.open_run_ref(ref, "jaxlm rate", say)
        opened = load.load_run(source.workdir, step=source.step, say=say)
        load.check_generates(opened, is_chat=is_chat)
        template = generate.template_of(source.workdir, say=say) if is_chat else None
        names.append(f"{source.workdir}@{source.step}")
        say(f"{names[-1]}: {len(prompts)} prompts")
        texts.append([])
        for start in range(0, len(prompts), BATCH):
            request = dataclasses.replace(settings, prompts=prompts[start : start + BATCH])
            samples = generate.continue_prompts(opened, request, template)
            texts[-1] += [each.text for each in samples]
    return names, [TextPair(*each) for each in zip(prompts, *texts, strict=True)]


def rating(
    pair: TextPair, names: Sequence[str], order: str, choice: str, rater: str
) -> dict[str, Any]:
    """Return the line of a choice; `chosen` and `rejected` are the texts by preference, if any.

    Args:
      pair: the texts.
      names: RUN@STEP of the runs that wrote them.
      order: `ab` or `ba`, the order in which they were shown.
      choice: `a`, `b`, `tie` or `skip`.
      rater: name of the person.
    """
    record: dict[str, Any] = {
        **{"id": pair.id, **pair._asdict(), "run_a": names[0], "run_b": names[1]},
        **{"order": order, "choice": choice, "rater": rater, "seconds": 0.0, "note": ""},
        "time_unix": time.time(),
    }
    if choice in ("a", "b"):
        rejected = "b" if choice == "a" else "a"
        record |= {"chosen": record[choice], "rejected": record[rejected]}
    return record


def open_ratings(file: Path) -> Jsonl:
    """Open a file of ratings for appending; a torn last line is removed.

    Raises:
      NotWritable: if it cannot be written.
      SaveFailed: if the disk is full.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return Jsonl(file)
    except OSError as error:
        raise cannot_write(file.name, file, error, fix=OTHER_FILE) from error
    except NotWritable as error:
        error.fix = OTHER_FILE
        raise


def read_ratings(file: Path) -> list[Rating]:
    """Return the ratings of a file. Raises InputMissing, DataError."""
    if not file.is_file():
        raise InputMissing(
            "there is no file of ratings",
            where=str(file),
            why="`jaxlm rate A B --prompts=FILE` writes it, a line for each choice",
            fix="find . -name '*ratings*.jsonl'",
        )
    return [
        Rating(
            **{name: record[name] for name in ("id", "run_a", "run_b", "choice", "rater")},
            is_left=record["order"] == "ab",
        )
        for record in sinks.read(file, SHAPE)
    ]
