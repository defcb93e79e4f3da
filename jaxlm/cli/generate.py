"""Generate text with a run. Several --prompt are processed as one batch.

jaxlm generate --workdir=runs/a --prompt='Once upon a time'
jaxlm generate --workdir=runs/chat --chat --prompt='Why is the sky blue?' --max_tokens=300
jaxlm generate --workdir=runs/a --prompt=- --temperature=0 < prompt.txt    greedy
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.cli.arguments import ADAPTER, Parser, add_flag, needed_run, selection
from jaxlm.cli.output import Output
from jaxlm.core import config, problems
from jaxlm.core.errors import CommandError, ConfigError, DataError, InputMissing

if TYPE_CHECKING:
    from jaxlm.generate.config import GenerateConfig

EXAMPLES = {"json_schema": '{"type": "object"}', "grammar": 'start: "yes" | "no"'}
BETWEEN = "\n---\n"
FLAGS: tuple[tuple[str, str, Any, str], ...] = (
    ("--max_tokens", "N", 100, "largest number of new tokens"),
    ("--temperature", "X", 0.8, "sampling temperature; 0 is greedy"),
    ("--top_k", "K", int, "number of likeliest tokens to sample from"),
    ("--top_p", "P", float, "total probability of the likeliest tokens to sample from"),
    ("--min_p", "P", float, "smallest probability to sample, relative to the likeliest token"),
    ("--repetition_penalty", "X", 1.0, "factor that lowers the logits of tokens in prompt or text"),
    ("--presence_penalty", "X", 0.0, "penalty subtracted from logits of tokens in the text"),
    ("--frequency_penalty", "X", 0.0, "penalty per occurrence of a token in the text"),
    ("--stop", "TEXT", [], "string that ends a text; repeatable"),
    ("--json_schema", "FILE|JSON", str, "JSON schema that each text matches, or its file"),
    ("--regex", "EXPR", str, "regular expression that each whole text matches"),
    ("--choice", "TEXT", [], "allowed text; each result is one of them; repeatable"),
    ("--grammar", "FILE", str, "file with a Lark grammar that each text matches"),
    ("--beams", "K", 1, "number of beams of a beam search, with --temperature=0"),
    ("--length_penalty", "X", 1.0, "exponent of the length that divides a beam's log-probability"),
    ("--draft", "lookup|heads|RUN", str, "what guesses tokens; no text depends on it"),
    ("--kv_cache_dtype", "NAME", "auto", "KV-cache dtype; int8 uses 2-4x less memory"),
)


def add_arguments(parser: Parser) -> None:
    doc = "text to continue (start of a document), - for standard input; repeatable"
    add_flag(parser, "--prompt", "TEXT", [], doc)
    parser.add_switch("--chat", "treat prompts as user turns of the imported model's template")
    for flag in FLAGS:
        add_flag(parser, *flag)
    doc = "random seed, once or once per prompt (0)"
    parser.add_argument("--seed", type=int, action="append", metavar="N", help=doc)
    parser.add_switch("--stream", "print text while it is generated; beam search: at its end")
    parser.add_run_selection()
    add_flag(parser, *ADAPTER)


def read_settings(args: Any, lists: dict[str, Any], usage: str) -> "GenerateConfig":
    """Return the settings of generation from flags of the verb, and from `lists`.

    Raises ConfigError if a value is wrong; `usage` is the fix if no other value is known.
    """
    from jaxlm.generate.config import GenerateConfig

    names = [field.name for field in dataclasses.fields(GenerateConfig)]
    flags = selection(args, *(name for name in names if name not in lists and name in args))
    try:
        return config.from_json(GenerateConfig, flags | lists, where="command line")
    except ConfigError as error:  # these settings are flags of the verb
        error.fix = error.fix.replace("--config.", "--")
        if error.fix.startswith(problems.EXPLAIN):
            error.fix = usage
        raise


def _file(args: Any, name: str) -> str | None:
    """Return the text of the file that a flag names. Raises InputMissing, DataError."""
    path = getattr(args, name)
    if path is None:
        return None
    if name == "json_schema" and path.lstrip().startswith("{"):
        return path
    if not Path(path).is_file():
        fix = f"echo {shlex.quote(EXAMPLES[name])} > {shlex.quote(path)}"
        what, why = f"the file of --{name} is missing", f"there is no file {path}"
        raise InputMissing(what, where=f"--{name}={path}", why=why, fix=fix)
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        from jaxlm.data.records import not_utf8

        raise not_utf8(path, error, "byte") from None


def _prompts(typed: Sequence[str]) -> list[str]:
    """Return the prompts, with standard input in place of -, without its last line end.

    Raises DataError if that is not UTF-8.
    """
    if "-" not in typed:
        return [*typed] or [""]
    try:
        read = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        from jaxlm.data.records import likely_encoding

        raise DataError(
            "standard input is not UTF-8",
            where=f"--prompt=-, byte {error.start}",
            why=f"0x{error.object[error.start]:02x}: {error.reason}",
            fix=f"convert it before: iconv -f {likely_encoding(error.object)} -t utf-8",
        ) from None
    return [read.removesuffix("\n") if each == "-" else each for each in typed]


class _Stream:
    """Printer of streamed rows, one after the other: a row is held back until earlier rows end."""

    def __init__(self, prompts: Sequence[str], out: Output):
        self._out, self._row = out, 0
        self._waiting, self._ended = list(prompts), [False] * len(prompts)

    def __call__(self, row: int, more: str, is_ended: bool) -> None:
        self._waiting[row] += more
        self._ended[row] = is_ended
        while self._row < len(self._waiting):
            self._out.stream(self._waiting[self._row])
            self._waiting[self._row] = ""
            if not self._ended[self._row]:
                return
            self._row += 1
            self._out.stream(BETWEEN if self._row < len(self._waiting) else "\n")


def run(args: Any, out: Output) -> int:
    workdir = Path(needed_run(args))
    if args.stream and out.as_json:
        what = "--stream and --json exclude each other"
        why = "--json prints one object after all text is generated"
        raise CommandError(what, where="--stream", why=why, fix="leave --stream out")
    is_streamed = args.beams == 1 and (args.stream or (sys.stdout.isatty() and not out.as_json))

    lists = {"prompts": _prompts(args.prompt), "stop": args.stop, "seed": args.seed or [0]}
    lists |= {"choice": args.choice, **{name: _file(args, name) for name in EXAMPLES}}
    settings = read_settings(args, lists, "jaxlm generate --help")
    from jaxlm.recipes.use.generate import generate

    # A text continues its prompt; an answer begins below the question.
    joint = "\n" if args.chat else ""
    show = _Stream([prompt + joint for prompt in settings.prompts], out) if is_streamed else None
    flags = selection(args) | {"is_chat": args.chat, "adapter": args.adapter}
    answer = generate(workdir, settings, say=out.log, on_text=show, **flags)
    if is_streamed:
        return 0
    texts = (sample["prompt"] + joint + sample["text"] for sample in answer["samples"])
    return out.result(answer, BETWEEN.join(texts))
