"""Turns of a tool or a user after those of the model, as ids that are not trained on.

The ids that the model drew stay as they are. A tool that fails answers with the reason, as text.

Example:
  >>> calculator("so it is <calculator>(34+58)*2</calculator>"), calculator("92")
  ('184', None)
"""

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Int

from jaxlm.core import user_code
from jaxlm.core.errors import ConfigError
from jaxlm.data.chat import ChatTemplate, Renderer, RenderRequest
from jaxlm.data.control_tokens import CLOSES, OPENS, ControlTokens
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.rl.config import RLConfig
from jaxlm.rl.reward_config import RewardConfig
from jaxlm.rl.verifiers import Sample, Unscorable
from jaxlm.rl.workers import Worker

MAX_EXPRESSION = 100  # characters
SHOWN = 100  # characters of a failure
_CALL = re.compile(r"<calculator>((?:(?!<calculator>).)*)</calculator>\s*\Z", re.DOTALL)
_OPERATORS: dict[type, Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Failed(Exception):
    """A tool has no answer; the text is the reason."""


class Ended(NamedTuple):
    """A turn of the model that ended: its sample, tokens of the row so far, and turns so far.

    `sample` has the text of the turn; `is_plain` is of a prompt without a chat template.
    """

    sample: Sample
    tokens: int
    turns: int
    is_plain: bool


class Turns(contextlib.ExitStack):
    """The turns after those of the model, in a `with` block that ends their processes.

    Args:
      settings: turns, their tool and its limits.
      limits: limits of a process of a function of a file.
      tokenizer: the tokenizer.
      template: the chat template; None if all prompts are plain texts.
      longest: most tokens before a turn of the model.

    Raises:
      ConfigError: if the template has no such turn, or the function cannot be used.
    """

    def __init__(
        self,
        settings: RLConfig,
        limits: RewardConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        longest: int,
    ):
        super().__init__()
        self._settings, self._limits, self._longest = settings, limits, longest
        self._tokenizer, self._control = tokenizer, ControlTokens(tokenizer)
        self._template = template
        self._affixes: tuple[str, str] | None = None  # of a turn, by the template
        self._worker: Worker | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.calls = self.failures = self.cut = self.without_room = 0

    def __enter__(self) -> Self:
        for name, digest in self._settings.recorded_files:
            source = user_code.recorded_file(name, digest, f"rl.tool_sources = {name}={digest}")
            function = self._settings.tool.rpartition(":")[2]
            limits = self._limits.seconds, self._limits.bytes
            self._worker = Worker({name: (source, [function])}, *limits)
            self.callback(self._worker.stop)
            # A thread starts the process, and lives as long: it ends with its parent thread.
            self._pool = self.enter_context(ThreadPoolExecutor(1))
            self._pool.submit(self._worker.start).result()
        return self

    def following(self, ended: Sequence[Ended]) -> list[Int[np.ndarray, "n"] | None]:
        """Return the ids after each turn, with the header of the next answer; None for none."""
        return [self._following(each) for each in ended]

    def figures(self, samples: int) -> dict[str, float]:
        """Return the counts since the last call, of a number of samples, and begin again."""
        counts = self.calls, self.failures, self.cut, self.without_room
        self.calls = self.failures = self.cut = self.without_room = 0
        names = "tool_calls", "tool_failures", "tool_texts_cut", "turns_without_room"
        return {n: count / samples for n, count in zip(names, counts, strict=True)}

    def _following(self, ended: Ended) -> np.ndarray | None:
        if ended.turns >= self._settings.turns:
            return None
        try:
            text = self._text(ended.sample)
        except Failed as failure:
            text = f"error: {failure}"[:SHOWN]
            self.failures += 1
        if not text:
            return None
        self.calls += 1
        ids = self._encoded(text, is_plain=ended.is_plain)
        if ended.tokens + len(ids) > self._longest:
            self.without_room += 1
            return None
        return ids

    def _text(self, sample: Sample) -> str | None:
        """Return the text of the tool; None if it is not called. Raise Failed if it fails."""
        if self._worker is None or self._pool is None:
            return calculator(sample.completion)
        request = {"sample": sample._asdict(), "function": self._settings.tool, "is_text": True}
        try:
            return self._pool.submit(self._worker.text, request).result()
        except Unscorable as error:
            raise Failed(str(error)) from None

    def _encoded(self, text: str, *, is_plain: bool) -> np.ndarray:
        text, limit = self._control.guarded(text), self._settings.tool_tokens
        ids = self._ids(text)
        if len(ids) > limit:
            self.cut += 1
            parts = (self._tokenizer.table[number] for number in ids[:limit].tolist())
            text = self._control.guarded(b"".join(parts).decode("utf-8", "ignore"))
        if is_plain:
            return self._ids(text)
        if self._affixes is None:
            self._affixes = self._probed()
        before, after = self._affixes
        return self._ids(f"{before}{text}{after}")

    def _ids(self, text: str) -> np.ndarray:
        return self._control.encode([(text, ())])[0].ids.astype(np.int32)

    def _probed(self) -> tuple[str, str]:
        """Return the text of the template around a turn; the end token of the answer is drawn."""
        assert self._template is not None
        role = self._settings.tool_role
        turns = ("user", "a"), ("assistant", "b"), (role, "c")
        messages = [{"role": who, "content": f"{OPENS}{text}{CLOSES}"} for who, text in turns]
        with Renderer(self._template) as renderer:
            ((text,),) = renderer.render([RenderRequest(messages, {}, [(3, True)])])
        why = "it drops or changes such a turn" if isinstance(text, str) else text.why
        parts = str(text).partition(f"b{CLOSES}")[2].partition(f"{OPENS}c{CLOSES}")
        if not isinstance(text, str) or not parts[1]:
            other = "user" if role == "tool" else "tool"
            raise ConfigError(
                f"the chat template has no turn of {role} after an answer",
                where=self._template.where,
                why=why,
                fix=f"--config.rl.tool_role={other}",
            )
        before, _, after = parts
        match = self._control.pattern.search(before)
        if match and not before[: match.start()].strip():
            before = before[match.end() :]
        return before, after


def calculator(turn: str) -> str | None:
    """Return the value of the expression with which a turn ends; None without one.

    A turn ends with a call if its last text is `<calculator>34+58</calculator>`: numbers, brackets
    and + - * /. Raise Failed if it has no value.
    """
    call = _CALL.search(turn)
    if call is None:
        return None
    expression = call[1].strip()
    if len(expression) > MAX_EXPRESSION:
        raise Failed(f"the expression has more than {MAX_EXPRESSION} characters")
    try:
        value = _value(ast.parse(expression, mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"
    except ZeroDivisionError:
        raise Failed("division by zero") from None
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        raise Failed("this is no expression of numbers and + - * /") from None


def _value(node: Any) -> Fraction:
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATORS:
            return _OPERATORS[type(operation)](_value(operand))
        case ast.Constant(value) if isinstance(value, int | float) and not isinstance(value, bool):
            return Fraction(str(value))
    raise ValueError("another kind of expression")
