"""Write a first config for your own text, with sizes that the planner predicts for a machine.

jaxlm init --data='texts/*.txt'                        about an hour on this machine
jaxlm init --data=texts --minutes=15 --on=t4           what a T4 trains in 15 minutes
jaxlm init --data=texts --params=30M --on=h100         30M parameters, 20 tokens per parameter

In a terminal it prompts for values that no flag sets. The file is a program to change: each group
of settings has a reason. --on takes the machines of `jaxlm plan`.
"""

import math
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.output import Output, table
from jaxlm.cli.plan import named_machine, set_machine
from jaxlm.core.errors import CommandError, DataError, NotWritable
from jaxlm.monitor import formatting
from jaxlm.monitor.chips import MEMORY

UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
CHAT = "--config.data.kind=chat"
PAIRS = "--config.data.kind=pairs"
MAX_DROPPED = "--config.data.max_dropped"
FINETUNE = (
    "jaxlm train --config={} --init_from=runs/base --config.data.train={}{}"
    " --workdir=runs/{}    # runs/base: a run, or a folder of transformers"
)


def add_arguments(parser: Parser) -> None:
    parser.withhold("the config is what this command writes")
    add_flag(parser, "--data", "GLOB", [], "text to train on, a folder or a glob; repeatable")
    add_flag(parser, "--text_key", "FIELD", "text", "field of a record with its text")
    add_flag(parser, "--params", "N", str, "parameters, as 30M (as many as the time allows)")
    add_flag(parser, "--minutes", "N", str, "minutes of training (60; with --params no limit)")
    add_flag(parser, "--on", "MACHINE", str, "machine, as in `jaxlm plan` (this one)")
    add_flag(parser, MEMORY, "SIZE", str, "memory of one GPU that is not in the table, as 24GB")
    add_flag(parser, "--out", "FILE", "my_config.py", "config file to write")


def run(args: Any, out: Output) -> int:
    target = Path(args.out)
    if target.exists():
        what, where = f"{target} exists", f"--out={target}"
        why = "it may have changes of your own"
        raise CommandError(
            what,
            where=where,
            why=why,
            fix=f"--out={shlex.quote(str(target.with_stem(f'{target.stem}-2')))}",
        )
    if sys.stdin.isatty() and not args.json:
        _ask(args)
    if not args.data:
        what, where = "--data is needed", f"jaxlm {shlex.join(args.words)}"
        why = "a first config is sized for a text"
        raise CommandError(what, where=where, why=why, fix="--data='texts/*.txt'")
    minutes = None if args.minutes is None else _minutes(args.minutes)
    patterns = tuple(_pattern(each) for each in args.data)
    set_machine(args)

    from jaxlm.data.records import note_of_table
    from jaxlm.recipes.plan import starter

    request = starter.StarterRequest(
        data=patterns,
        text_key=args.text_key,
        machine=named_machine(args, 1, []),
        parameters=None if args.params is None else _parameters(args.params),
        minutes=minutes,
    )
    try:
        made = starter.plan_starter(request)
    except DataError as error:
        first, *others = error.fix.replace("--config.data.text_key=", "--text_key=").splitlines()
        text = shlex.quote(",".join(patterns))
        if first.startswith(CHAT):  # a model is fine-tuned on conversations
            first = FINETUNE.format("finetune/lora", text, first.removeprefix(CHAT), "chat")
        elif first.startswith(PAIRS):
            first = FINETUNE.format("preference/dpo", text, "", "dpo")
        lines = [first, *others]
        if any(each.startswith(MAX_DROPPED) for each in lines):  # a setting of the training alone
            lines = [f"correct {error.where}"]
        error.fix = "\n".join(lines)
        raise
    words = [f"--data={each}" for each in args.data]
    text_key = None if args.text_key == "text" else args.text_key
    named = {
        "text_key": text_key,
        "params": args.params,
        "minutes": args.minutes,
        "on": args.on,
        "memory": args.memory,
    }
    words += [f"--{name}={value}" for name, value in named.items() if value is not None]
    command = shlex.join(["jaxlm", "init", *words])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(starter.config_file(made, args.out, command), encoding="utf-8")
    except OSError as error:
        why = f"{type(error).__name__}: {error.strerror}"
        fix = f"--out={target.name}"
        raise NotWritable(f"{target} cannot be written", where="--out", why=why, fix=fix) from error
    answer = {
        "notes": [note for note in map(note_of_table, patterns) if note],
        "config": args.out,
        "parameters": made.parameters,
        "tokens": made.run.pace.tokens(made.run.train.steps),
        "epochs": made.epochs,
        "minutes": None if made.minutes is None else [*made.minutes],
        "settings": made.settings,
        "risks": made.plan.risks,
    }
    return out.result(answer, _lines(answer, made.text_bytes, starter.predicted_time(made)))


def _lines(answer: dict[str, Any], text_bytes: int, time: str) -> list[str]:
    count, file = formatting.count, shlex.quote(answer["config"])
    workdir = shlex.quote(f"runs/{Path(answer['config']).stem}")
    epochs = f"{answer['epochs']:.2g} times the text of {formatting.size(text_bytes)}"
    rows = [
        ("wrote", answer["config"]),
        ("model", f"{count(answer['parameters'])} parameters"),
        ("data", f"{count(answer['tokens'])} tokens, about {epochs}"),
        ("time", f"predicted: {time}"),
        *(("note", note) for note in answer["notes"]),
        *(("risks", risk) for risk in answer["risks"]),
        ("next", f"jaxlm train --config={file} --workdir={workdir}"),
    ]
    return table(rows)


def _ask(args: Any) -> None:
    """Fill flags that were not given from the terminal; an empty answer keeps the default."""
    if not args.data:
        args.data = [text] if (text := input("text to train on, a folder or a glob: ")) else []
    if args.minutes is None and args.params is None and (text := input("minutes [60]: ").strip()):
        args.minutes = text


def _minutes(text: str) -> float:
    """Return a number of minutes. Raises CommandError unless it is positive and finite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value < float("inf"):
        return value
    what, where = f"{text} is not a number of minutes", f"--minutes={text}"
    raise CommandError(what, where=where, why="it must be above 0", fix="--minutes=60")


def _pattern(text: str) -> str:
    """Return a glob of the text files of a folder; any other pattern as it is."""
    from jaxlm.data import documents

    folder = Path(text)
    globs = documents.text_globs(folder) if folder.is_dir() else []
    return globs[0] if len(globs) == 1 else text


def _parameters(text: str) -> float:
    """Return a number of parameters. Raises CommandError."""
    text = text.replace("K", "k")
    scale = UNITS.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if text[-1:] in UNITS else text) * scale
    except ValueError:
        value = math.nan
    if 1e5 <= value <= 1e12:
        return value
    what, where = f"{text} is not a number of parameters", f"--params={text}"
    why = "it is a number from 100k to 1000B, such as 30M"
    nearest = "30M" if math.isnan(value) else "100k" if value < 1e5 else "1000B"
    raise CommandError(what, where=where, why=why, fix=f"--params={nearest}")
