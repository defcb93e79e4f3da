"""`jaxlm VERB ...`: finds the verb, reads its words, and ends with the exit code that says how it went."""

import dataclasses
import gc
import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jaxlm.cli.arguments import Parser, Shared, check_taken, extract
from jaxlm.cli.output import Output, abandon, write
from jaxlm.core.errors import CommandError, JaxlmError, in_our_words
from jaxlm.core.paths import check_local
from jaxlm.core.quoting import safe
from jaxlm.core.spelling import nearest


@dataclasses.dataclass(frozen=True)
class Verb:
    """Where a verb lives and what it does. Its module has `add_arguments(parser)` and `run(args, out) -> exit code`."""

    module: str
    help: str
    group: str


VERBS = {
    "train": Verb("jaxlm.cli.train", "train a model; the same workdir resumes", "Train"),
    "launch": Verb("jaxlm.cli.launch", "train with several processes, started again", "Train"),
    "eval": Verb("jaxlm.cli.evaluate", "loss, bits per byte and calibration of a run", "Use a run"),
    "generate": Verb("jaxlm.cli.generate", "write text with a run", "Use a run"),
    "average": Verb(
        "jaxlm.cli.average", "average checkpoints into a run of their own", "Use a run"
    ),
    "report": Verb("jaxlm.cli.report", "draw the plots and write report.html again", "Use a run"),
    "checkpoint": Verb(
        "jaxlm.cli.checkpoint", "list, inspect, compare and verify checkpoints", "Use a run"
    ),
    "replay": Verb("jaxlm.cli.replay", "do one step again and show what it saw", "Use a run"),
    "data": Verb("jaxlm.cli.data", "look at data, tokenise it, check token shards", "Prepare"),
    "tokenizer": Verb("jaxlm.cli.tokenizer", "train, show and compare tokenizers", "Prepare"),
    "import": Verb(
        "jaxlm.cli.importing", "make a run of a model's folder of Hugging Face", "Exchange"
    ),
    "export": Verb(
        "jaxlm.cli.exporting", "write a run's model as such a folder, and compare", "Exchange"
    ),
    "plan": Verb(
        "jaxlm.cli.plan", "memory, time and cost of a run, before it starts", "Understand"
    ),
    "scale": Verb(
        "jaxlm.cli.scale", "the size and tokens that are best for a budget of FLOPs", "Understand"
    ),
    "lr-find": Verb(
        "jaxlm.cli.lr_find", "a range test: at which learning rate the loss falls", "Understand"
    ),
    "check": Verb(
        "jaxlm.cli.check", "try a config on fake devices: same loss, and what is sent", "Understand"
    ),
    "doctor": Verb(
        "jaxlm.cli.doctor", "what is wrong with this machine, and its fix", "Understand"
    ),
    "bench": Verb(
        "jaxlm.cli.bench", "how fast this machine trains, on standard sizes", "Understand"
    ),
    "config": Verb("jaxlm.cli.config", "show, explain, compare or check a config", "Understand"),
}

USAGE = """\
usage: jaxlm VERB [--config=FILE[:ARG]] [--config.a.b=VALUE ...] [--workdir=DIR] [--json] [--quiet] [--trace]
"""


def usage() -> str:
    """The text of `jaxlm --help`."""
    lines = [USAGE]
    for group in dict.fromkeys(verb.group for verb in VERBS.values()):
        lines.append(f"{group}:")
        lines += [
            f"  {name:<10} {verb.help}" for name, verb in VERBS.items() if verb.group == group
        ]
        lines.append("")
    return "\n".join([*lines, "jaxlm VERB --help says what a verb takes."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code. Only a bug of ours shows a traceback, unless `--trace` asks for one."""
    words = list(sys.argv[1:] if argv is None else argv)
    ours = words[: words.index("--")] if "--" in words else words
    out = Output(as_json="--json" in ours, quiet="--quiet" in ours)
    try:
        code = dispatch(words, out)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        abandon(sys.stdout)
        return 73
    except Exception as error:
        known = in_our_words(error, *words[:1])
        if known is None or "--trace" in ours:
            _show_traceback()
        out.error(known or _bug(error))
        return known.code if known else 70


def dispatch(words: list[str], out: Output) -> int:
    """Runs the verb that the words name."""
    if not words or words[0] in ("--help", "-h", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib import metadata  # 16 ms that no verb needs

        print(f"jaxlm {metadata.version('jaxlm')}")
        return 0
    name, *rest = words
    if name not in VERBS:
        raise _unknown_verb(words)
    verb = VERBS[name]
    module = importlib.import_module(verb.module)
    shared, rest = extract(rest)
    parser = Parser(prog=f"jaxlm {name}", description=module.__doc__ or verb.help)
    module.add_arguments(parser)
    parser.add_shared()
    try:
        args, left = parser.read(rest, words)
    except SystemExit as finished:  # --help
        return int(finished.code or 0)
    if left:
        raise parser.unknown(left, args)
    action = getattr(args, "action", None)
    prog = f"{parser.prog} {action}" if action else parser.prog
    check_taken(prog, getattr(args, "withheld", {}), shared, rest)
    args.words = words
    args = _joined(args, shared)
    for flag in ("workdir", "out"):
        if place := getattr(args, flag, None):
            check_local(place, f"--{flag}")
    return module.run(args, out)


def _joined(args: Any, shared: Shared) -> Any:
    for field in dataclasses.fields(shared):
        setattr(args, field.name, getattr(shared, field.name))
    return args


def _unknown_verb(words: list[str]) -> CommandError:
    """Return the error of a first word that is no verb; its fix keeps all other words."""
    name = words[0]
    if name.startswith("-"):
        verb = next((word for word in words if word in VERBS), None)
        moved = [verb, *(word for word in words if word != verb)] if verb else ["--help"]
        return CommandError(
            f"{name} comes before a verb",
            where=f"jaxlm {name}",
            why=f"the verb is the first word; the verbs are {', '.join(VERBS)}",
            fix=shlex.join(["jaxlm", *moved]),
        )
    meant = nearest(name, VERBS)
    return CommandError(
        f"there is no verb {name!r}",
        where=f"jaxlm {name}",
        why=f"the verbs are {', '.join(VERBS)}",
        fix=shlex.join(["jaxlm", meant, *words[1:]]) if meant else "jaxlm --help",
    )


def _show_traceback() -> None:
    """The traceback of the exception at hand; its messages may quote data."""
    write(sys.stderr, "\n".join(map(safe, traceback.format_exc().splitlines())))


def _bug(error: Exception) -> JaxlmError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return JaxlmError(
        f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        where=f"{frame.filename}:{frame.lineno}",
        why="this is a bug in jaxlm, not in what you typed",
        fix="report it with the traceback above and the command line",
    )


def entry() -> None:
    """The console script. What it writes is never writable by everybody, whatever the umask allows."""
    os.umask(os.umask(0o077) | 0o002)
    # Imports and traces make objects and drop few: to look among them for cycles so often took a twentieth of a start.
    gc.set_threshold(100_000, 20, 100)
    sys.exit(main())
