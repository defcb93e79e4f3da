"""Rewards that run a completion as a program, in the sandbox of `evals.code`.

A program that fails, exits or exceeds its time earns 0. Tests that are no Python are unscorable.

Example:
  >>> source("so:\\n```python\\nx = 1\\n```\\nand that is it"), source("x = 1")
  ('x = 1\\n', 'x = 1')
"""

import ast
import doctest
import re
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.evals import code
from jaxlm.rl.reward_config import PROGRAMS, RewardConfig
from jaxlm.rl.verifiers import Sample, Unscorable

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def check_sandbox(settings: RewardConfig) -> None:
    """Raise ConfigError if programs need namespaces that are not permitted."""
    if settings.sandbox == "auto" and not code.namespaces():
        raise ConfigError(
            "completions cannot be run in a sandbox here",
            where="reward.sandbox = auto",
            why="the kernel gives this user no namespaces (unshare --user --mount fails), so a "
            "program could read and change your files",
            fix="--config.reward.sandbox=process    # limits alone, which stop accidents",
        )


def source(completion: str) -> str:
    """Return the program of a completion: its last fenced block, else all of it."""
    blocks = _BLOCK.findall(completion)
    return str(blocks[-1]) if blocks else completion


def passed(name: str, sample: Sample, settings: RewardConfig) -> float:
    """Return 1 if the program of a completion passes its tests.

    `info` has `start`, a text before the program, and `tests` or, for the reward `doctest`,
    `doctest`; without them the answer has the tests. Raises Unscorable if there are none.
    """
    info: Any = sample.info if isinstance(sample.info, dict) else {}
    text = info.get(PROGRAMS[name], sample.answer)
    text = "\n".join(map(str, text)) if isinstance(text, list) else text
    if not isinstance(text, str) or not text.strip():
        raise Unscorable("the prompt has no tests")
    tests, examples = text, []
    try:
        if name == "doctest":
            read = doctest.DocTestParser().get_examples(text)
            examples = [(each.source, each.want, each.exc_msg) for each in read]
            tests = ""
        for part in (tests, *(example[0] for example in examples)):
            ast.parse(part)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise Unscorable(f"the tests are no Python: {error}".partition("\n")[0]) from error
    if not tests and not examples:
        raise Unscorable("the prompt has no examples, which begin with >>>")
    result = code.outcome(
        f"{info.get('start', '')}{source(sample.completion)}\n",
        settings.seconds,
        tests=tests,
        examples=examples,
        memory=settings.bytes,
    )
    return float(result == code.PASSED)
