"""Writes text with a run. Several --prompt are answered as one batch."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxlm.cli.arguments import add_weights, needed_run, withhold
from jaxlm.cli.output import Output
from jaxlm.core import config, problems
from jaxlm.core.errors import CommandError, ConfigError

BETWEEN = "\n---\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    withhold(
        parser, "--config", "--config.a.b", why="it goes by the config that the run was saved with"
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="what to go on from; none starts a document",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a prompt is what a user says, by the imported model's chat template",
    )
    parser.add_argument(
        "--max_tokens", type=int, default=100, metavar="N", help="most new tokens (100)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest (0.8)"
    )
    parser.add_argument("--top_k", type=int, metavar="K", help="draw from the K likeliest")
    parser.add_argument(
        "--top_p", type=float, metavar="P", help="draw from the likeliest that add up to P"
    )
    parser.add_argument(
        "--min_p",
        type=float,
        metavar="P",
        help="draw from those at least P times as likely as the likeliest",
    )
    parser.add_argument(
        "--repetition_penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides positive logits of tokens in prompt or text, multiplies negative (1)",
    )
    parser.add_argument(
        "--presence_penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="taken from logits of tokens in the text (0)",
    )
    parser.add_argument(
        "--frequency_penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="taken from them as often as they are there (0)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a text before this string"
    )
    parser.add_argument(
        "--beams",
        type=int,
        default=1,
        metavar="K",
        help="search for a likely text with K beams, with --temperature=0 (1)",
    )
    parser.add_argument(
        "--length_penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="a beam scores its log-probability over its tokens to this power (1)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        metavar="N",
        help="the same seed draws the same text; once, or once for each prompt (0)",
    )
    parser.add_argument(
        "--prompt_lookup",
        type=int,
        default=0,
        metavar="N",
        help="guess N tokens at a time from what was said before: the same text, sooner where it repeats itself (0)",
    )
    parser.add_argument(
        "--kv_cache_dtype",
        default="auto",
        metavar="NAME",
        help="int8 rounds keys and values, for a cache of a quarter to a half (auto)",
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="print text as it is made, as on a terminal; that of a beam search at its end",
    )
    parser.add_argument(
        "--step", type=int, metavar="STEP", help="a committed step; the newest unless named"
    )
    parser.add_argument(
        "--best", action="store_true", help="the step with the lowest validation loss"
    )
    add_weights(parser)
    parser.add_argument("--cpu_devices", type=int, metavar="N", help="split the CPU into N devices")


class _Page:
    """Texts one below the other, the first that has not ended as it is made."""

    def __init__(self, prompts: Sequence[str], out: Output):
        self._out, self._row = out, 0
        self._waiting, self._ended = list(prompts), [False] * len(prompts)

    def __call__(self, row: int, more: str, is_ended: bool) -> None:
        self._waiting[row] += more
        self._ended[row] = is_ended
        while self._row < len(self._waiting):
            self._out.part(self._waiting[self._row])
            self._waiting[self._row] = ""
            if not self._ended[self._row]:
                return
            self._row += 1
            self._out.part(BETWEEN if self._row < len(self._waiting) else "\n")


def run(args: argparse.Namespace, out: Output) -> int:
    workdir = Path(needed_run(args))
    if args.stream and out.as_json:
        raise CommandError(
            "--stream and --json exclude each other",
            where="--stream",
            why="--json answers with one object, once all is written",
            fix="leave --stream out",
        )
    is_streamed = args.beams == 1 and (args.stream or (sys.stdout.isatty() and not out.as_json))

    from jaxlm.generate.config import GenerateConfig

    lists = {"prompts": args.prompt or [""], "stop": args.stop, "seed": args.seed or [0]}
    flags = {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(GenerateConfig)
        if field.name not in lists
    }
    try:
        settings = config.from_json(GenerateConfig, flags | lists, where="command line")
    except ConfigError as error:  # these settings are flags of the verb
        error.fix = error.fix.replace("--config.", "--")
        if error.fix.startswith(problems.EXPLAIN):
            error.fix = "jaxlm generate --help"
        raise

    from jaxlm.recipes.use.generate import generate

    answer = generate(
        workdir,
        settings,
        step=args.step,
        best=args.best,
        weights=args.weights,
        cpu_devices=args.cpu_devices,
        is_chat=args.chat,
        say=out.say,
        tell=_Page(settings.prompts, out) if is_streamed else None,
    )
    if not is_streamed:
        texts = (sample["prompt"] + sample["text"] for sample in answer["samples"])
        out.result(answer, BETWEEN.join(texts))
    return 0
