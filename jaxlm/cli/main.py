"""Command `jaxlm VERB ...`: find the verb, parse its words, return its exit code."""

import dataclasses
import gc
import importlib
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from jaxlm.cli.arguments import Parser, check_taken, extract
from jaxlm.cli.output import Output, abandon, write
from jaxlm.core import huge_pages, shipped
from jaxlm.core.disk import check_local
from jaxlm.core.errors import CommandError, JaxlmError, as_jaxlm_error
from jaxlm.core.nearest import nearest_word
from jaxlm.core.problems import RenamedSetting
from jaxlm.core.quoting import safe


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb. Its module has `add_arguments(parser)` and, unless it adds actions, `run(args, out)`.

    `run`, or the function of the action, returns the exit code.
    """

    module: str
    help: str


GROUPS = {  # group: verb: module of jaxlm.cli, help
    "Train": {
        "train": ("train", "train a model; the same workdir resumes"),
        "launch": ("launch", "train with several processes and restart them"),
        "teach": ("teach", "store a teacher's likeliest ids on the training data, to distil from"),
        "sweep": ("sweep", "train all combinations of settings and compare the runs"),
    },
    "Use a run": {
        "runs": ("runs", "list the runs in a folder"),
        "compare": ("compare", "settings, results and curves of several runs"),
        "collect": ("collect", "sample answers to prompts, score them, keep the best or pairs"),
        "rate": ("rate", "rate texts of two runs on a local page that hides their names"),
        "eval": ("evaluate", "loss, bits per byte and calibration of a run"),
        "generate": ("generate", "generate text with a run"),
        "serve": ("serve", "serve a run over HTTP, with OpenAI's API"),
        "average": ("average", "average checkpoints into a new run"),
        "merge": ("merge", "merge an adapter into its base, a new run"),
        "quantize": ("quantize", "quantize the weights into a new run, and measure the change"),
        "prune": ("prune", "remove layers into a new run, and measure the value of each layer"),
        "report": ("report", "draw the plots and write report.html again"),
        "checkpoint": ("checkpoint", "list, inspect, diff and verify checkpoints"),
        "replay": ("replay", "replay one step and show its data"),
    },
    "Prepare": {
        "init": ("init", "write a first config for your own text"),
        "data": ("data", "inspect, clean and tokenize data, check token shards"),
        "tokenizer": ("tokenizer", "train, show and compare tokenizers"),
        "reward": ("reward", "test rewards on wrong completions before a run"),
    },
    "Exchange": {
        "import": ("importing", "import a Hugging Face or GGUF model"),
        "export": ("exporting", "export a run's model and compare the logits"),
    },
    "Understand": {
        "plan": ("plan", "memory, time and cost of a run, before it starts"),
        "scale": ("scale", "the best model size and number of tokens for a FLOPs budget"),
        "lr-find": ("lr_find", "range test for the learning rate"),
        "check": ("check", "compare losses and collectives of a config on fake devices"),
        "doctor": ("doctor", "problems of this machine and their fixes"),
        "bench": ("bench", "training speed of this machine on standard sizes"),
        "config": ("config", "show, explain, compare or check a config"),
        "completion": ("completion", "completion script for bash, zsh or fish"),
        "docs": ("docs", "the pages of the manual"),
    },
}
VERBS = {
    name: Verb(f"jaxlm.cli.{module}", text)
    for verbs in GROUPS.values()
    for name, (module, text) in verbs.items()
}

COMPUTING = {  # verbs that read all weights of a model many times
    *("train", "launch", "teach", "sweep", "collect", "eval", "generate", "serve", "quantize"),
    *("prune", "replay", "lr-find", "bench"),
}

# Commands that are not runs, and continue where an earlier process of them ended.
CONTINUED = {"data run", "data mix", "teach", "collect", "rate", "eval", "sweep", "scale"}

USAGE = """\
usage: jaxlm VERB [--config=FILE|NAME[:ARG]] [--config.a.b=VALUE ...] [--workdir=DIR]
                  [--json] [--quiet] [--trace]
"""


def usage() -> str:
    """Return the text of `jaxlm --help`."""
    lines = [USAGE]
    for group, verbs in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<10} {text}" for name, (_, text) in verbs.items()), ""]
    return "\n".join([*lines, "jaxlm VERB --help shows the flags of a verb."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Only a bug in jaxlm shows a traceback, unless `--trace` is set.

    Example:
      >>> main(["--version"])
      jaxlm ...
      0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    warnings.formatwarning = _format_warning
    ours = words[: words.index("--")] if "--" in words else words
    out = Output(as_json="--json" in ours, quiet="--quiet" in ours)
    try:
        code = dispatch(words, out)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        continues = {words[0], " ".join(words[:2])} & CONTINUED
        more = ": the same command continues" if continues else ""
        print(f"interrupted{more}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        abandon(sys.stdout)
        return 73
    except Exception as error:
        known = as_jaxlm_error(error, *words[:1])
        if known is None or "--trace" in ours:
            # Messages in the traceback may quote data.
            write(sys.stderr, "\n".join(map(safe, traceback.format_exc().splitlines())))
        writes_out = any(word.partition("=")[0] == "--out" for word in ours)
        out.error(known or _bug(error), "--out" if writes_out else "--workdir")
        return known.code if known else 70


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None
) -> str:
    """Format a warning to users as one line of text, any other one with its place in the code."""
    is_for_users = issubclass(category, RenamedSetting)
    place = "caution" if is_for_users else f"{filename}:{lineno}: {category.__name__}"
    return f"{place}: {message}\n"


def dispatch(words: list[str], out: Output) -> int:
    """Run the verb of a command line."""
    if not words or words[0] in ("--help", "-h") or words == ["help"]:
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib import metadata  # takes 16 ms and only this flag needs it

        print(f"jaxlm {metadata.version('jaxlm')}")
        return 0
    name, *rest = words
    if name == "help":
        name, *rest = words = [*rest, "--help"]
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
        raise parser.unknown(left, args, words)
    action = getattr(args, "action", None)
    prog = f"{parser.prog} {action}" if action else parser.prog
    check_taken(prog, getattr(args, "withheld", {}), shared, rest)
    args.words = words
    vars(args).update(vars(shared))
    for flag in ("workdir", "out"):
        is_read = flag == "workdir" and getattr(module, "READS_STORES", False)
        if (path := getattr(args, flag, None)) and not is_read:
            check_local(path, f"--{flag}")
    return (getattr(args, "run_action", None) or module.run)(args, out)


def _unknown_verb(words: list[str]) -> CommandError:
    """Return the error of an unknown verb; its fix keeps all other words."""
    name, *rest = words
    why = f"the verbs are {', '.join(VERBS)}"
    if name.startswith("-"):
        verb = next((word for word in words if word in VERBS), None)
        moved = [verb, *(word for word in words if word != verb)] if verb else ["--help"]
        what, why = f"{name} comes before a verb", f"the verb is the first word; {why}"
    else:
        what, meant = f"there is no verb {name!r}", nearest_word(name, VERBS)
        moved = [meant, *rest] if meant else ["--help"]
        if shipped.find(name):
            moved = ["train", f"--config={name}", f"--workdir=runs/{name}", *rest]
            why = "it is a config, which a verb reads"
    fix = shlex.join(["jaxlm", *moved])
    return CommandError(what, where=f"jaxlm {name}", why=why, fix=fix)


def _bug(error: Exception) -> JaxlmError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what, where = str(error).partition("\n")[0], f"{frame.filename}:{frame.lineno}"
    why = "this is a bug in jaxlm, not an error in the command line"
    fix = "report it with the traceback above and the command line"
    return JaxlmError(f"{type(error).__name__}: {what}", where=where, why=why, fix=fix)


def entry() -> None:
    """Run the console script. Its files are never world-writable, for any umask."""
    if sys.argv[1:2] and sys.argv[1] in COMPUTING:
        huge_pages.use()
    os.umask(os.umask(0o077) | 0o002)
    # Imports and traces create many objects and free few: at the default thresholds, garbage
    # collection took a twentieth of a start.
    gc.set_threshold(100_000, 20, 100)
    sys.exit(main())
