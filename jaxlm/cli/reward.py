"""Test the rewards of a config on completions that are wrong by design.

jaxlm reward try number rewards.py:shape=0.1 --prompts=FILE
jaxlm reward try --config=FILE --prompts=FILE       the rewards of a config

FILE has JSON lines with prompt, answer and info. Each attack answers every prompt: with nothing,
the prompt, tags, digits, one word, the answers of other prompts, and two programs.
"""

import shlex
from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.output import Output, columns
from jaxlm.core import config
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.core.quoting import printable
from jaxlm.recipes.config import Run
from jaxlm.rl.reward_config import FUNCTIONS_FLAG


def add_arguments(parser: Parser) -> None:
    attempt = parser.add_action("try", _try, "rewards that attacks earn")
    doc = "rewards as in reward.functions (those of the config)"
    attempt.add_argument("rewards", nargs="*", metavar="NAME[=WEIGHT]", help=doc)
    doc = "JSON lines with prompt, answer and info"
    add_flag(attempt, "--prompts", "FILE", str, doc, required=True)
    doc = "tokens of each completion, for rewards of lengths"
    add_flag(attempt, "--tokens", "N", 1, doc, least=1)


def _try(args: Any, out: Output) -> int:
    overrides = list(args.overrides)
    if args.rewards:
        overrides.append(("reward.functions", ",".join(args.rewards)))
    try:
        settings = config.load(Run, args.config or args.workdir, overrides).value.reward
    except ConfigError as error:
        lines = error.fix.splitlines()
        if args.rewards and all(line.startswith(FUNCTIONS_FLAG) for line in lines):
            # They are words of the command line, not a setting.
            others = [word for word in args.words if word not in args.rewards]
            named = [line.removeprefix(FUNCTIONS_FLAG).split(",") for line in lines]
            error.fix = "\n".join(shlex.join(["jaxlm", *others, *each]) for each in named)
            error.where = shlex.join(["jaxlm", *args.words])
        raise
    if not settings.functions:
        raise CommandError(
            "no reward is named",
            where=" ".join(["jaxlm", *args.words]),
            why="the config has no reward.functions",
            fix=f"{FUNCTIONS_FLAG}number=1",
        )

    from jaxlm.rl import attacks
    from jaxlm.rl.rewards import Rewards

    questions = attacks.read_questions(Path(args.prompts))
    with Rewards(settings) as rewards:
        results = attacks.earned(rewards, questions, most_tokens=args.tokens)
    rows = [["attack", "mean reward", "rewarded", "no score", ""]]
    for name, each in results.items():
        mean = "" if each.mean is None else f"{each.mean:.3f}"
        reason = printable(each.problem)[:60]
        rows.append([name, mean, f"{each.share:.1%}", f"{each.unscorable}", reason])
    paid = [name for name, each in results.items() if each.share and name != attacks.ANSWER]
    lines = [f"{len(questions)} prompts, {', '.join(settings.functions)}", *columns(rows, "<>>><")]
    if paid:
        lines.append(f"caution: a wrong completion earns a reward: {', '.join(paid)}")
    if not results[attacks.ANSWER].share:
        lines.append("caution: the right answer earns no reward")
    answer = {
        "rewards": settings.functions,
        "prompts": len(questions),
        "earned": {name: each._asdict() for name, each in results.items()},
        "paid": paid,
    }
    return out.result(answer, lines)
