"""Grammars that limit which texts are drawn: JSON schemas, regular expressions, choices, Lark.

llguidance computes which ids may follow. A grammar comes from a client, so its size, its tables
and the work of a step are limited, and nothing that it refers to is fetched.

Example:
  >>> from jaxlm.data.tokenizer import Bytes
  >>> tokenizer = Bytes()
  >>> with GrammarCompiler(tokenizer, tokenizer.size) as compiler:
  ...     matcher = compiler.compile(GrammarSource("regex", "[ab]c"), tokenizer.ends).start()
  >>> [tokenizer.decode([token]) for token in allowed_ids(matcher.mask())]
  ['a', 'b']
  >>> [matcher.accept(token) for token in tokenizer.encode("ac")], matcher.is_complete
  ([True, True], True)
"""

import collections
import concurrent.futures
import dataclasses
import json
import re
import threading
from typing import Any, Literal, Self

import numpy as np

from jaxlm.data.tokenizer import Bytes, Tokenizer
from jaxlm.generate.config import GenerateConfig

MAX_TEXT = 64 * 2**10  # bytes of a grammar
COMPILE_SECONDS = 5.0
# Definitions that refer to each other recurse in the compiler: 1,000 of them end a process whose
# thread has the usual 8 MiB (llguidance 1.9); 64 KiB of text need less than 64.
STACK_BYTES = 64 * 2**20
MAX_ITEMS, MAX_STEP_ITEMS = 50_000, 4_000  # of a grammar, and of the work for one id
# Work on expressions, at first and for one id: with ten times as much, the first mask of
# `(a{1000}){1000}` takes a second, in which no other request gets a token.
FUEL, STEP_FUEL = 100_000, 10_000
KEPT = 64  # compiled grammars, for requests with the same one
# Without a bound, a small model writes white space until its last token.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
Kind = Literal["json", "regex", "choice", "lark"]


class GrammarRefused(ValueError):
    """A grammar is wrong, too large, or too complex; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class GrammarSource:
    """A grammar as a client gives it.

    Args:
      kind: `json` for a JSON schema, `regex` for a regular expression of the whole text, `choice`
        for a JSON list of texts, `lark` for a grammar in llguidance's form of Lark.
      text: the schema, expression, list or grammar.
    """

    kind: Kind
    text: str

    @classmethod
    def of(cls, config: GenerateConfig) -> Self | None:
        """Return the grammar of the settings of generation; None without one."""
        if config.json_schema is not None:
            return cls("json", config.json_schema)
        if config.regex is not None:
            return cls("regex", config.regex)
        if config.choice:
            return cls("choice", json.dumps(config.choice))
        return None if config.grammar is None else cls("lark", config.grammar)

    def check(self) -> None:
        """Raise GrammarRefused if the grammar is refused for a tokenizer of bytes."""
        tokenizer = Bytes()
        with GrammarCompiler(tokenizer, tokenizer.size) as compiler:
            compiler.compile(self, tokenizer.ends)


class Matcher:
    """The state of a grammar after the ids of a text."""

    def __init__(self, state: Any, vocab: int):
        self._state, self._words = state, -(-vocab // 32)

    def mask(self) -> np.ndarray:
        """Return the ids that may follow, as bits of uint32 words [ceil(V / 32)], lowest first.

        End ids are among them if the text so far is whole, and alone if the grammar has reached a
        limit: `accept` refuses them then.
        """
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint32)  # of the tokenizer's ids
        return np.pad(bits, (0, max(0, self._words - len(bits))))[: self._words]

    def accept(self, token: int) -> bool:
        """Add an id; return False if it is not allowed, or if the grammar has reached a limit."""
        return not self._state.is_error() and self._state.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Return True if the text is whole and nothing can follow."""
        return self._state.is_stopped() and not self._state.is_error()


class Grammar:
    """A compiled grammar."""

    def __init__(self, state: Any, vocab: int):
        self._state, self._vocab = state, vocab

    def start(self) -> Matcher:
        """Return the state before the first id."""
        return Matcher(self._state.deep_copy(), self._vocab)


class GrammarCompiler:
    """Compiles grammars for the ids of a model, one at a time, in a thread with a large stack.

    Args:
      tokenizer: the tokenizer of the model.
      vocab: number of ids of the model, which may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self._tokenizer, self._vocab = tokenizer, vocab
        self._tries: dict[tuple[int, ...], Any] = {}
        self._kept: collections.OrderedDict[tuple[Any, ...], Grammar] = collections.OrderedDict()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "grammar")
        usual = threading.stack_size(STACK_BYTES)
        try:
            self._pool.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(usual)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def compile(self, source: GrammarSource, ends: tuple[int, ...]) -> Grammar:
        """Return the grammar of a text that one of the ids `ends` ends.

        Raises:
          GrammarRefused: for a wrong grammar, and for one that exceeds a limit.
        """
        if (size := len(source.text.encode())) > MAX_TEXT:
            raise GrammarRefused(f"{size} bytes are more than {MAX_TEXT}")
        task = self._pool.submit(self._compile, source, ends)
        try:
            return task.result(COMPILE_SECONDS)
        except TimeoutError:
            task.cancel()
            raise GrammarRefused(f"it was not compiled in {COMPILE_SECONDS:g} s") from None

    def _compile(self, source: GrammarSource, ends: tuple[int, ...]) -> Grammar:
        place = (source, ends)
        if place not in self._kept:
            self._kept[place] = Grammar(self._state(source, ends), self._vocab)
        self._kept.move_to_end(place)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[place]

    def _state(self, source: GrammarSource, ends: tuple[int, ...]) -> Any:
        import llguidance

        try:
            grammar = _grammar_text(source)
        except ValueError as error:
            raise GrammarRefused(str(error)) from None
        limits = llguidance.LLParserLimits(
            max_grammar_size=MAX_ITEMS,
            step_max_items=MAX_STEP_ITEMS,
            initial_lexer_fuel=FUEL,
            step_lexer_fuel=STEP_FUEL,
        )
        state = llguidance.LLMatcher(self._trie(ends), grammar, log_level=0, limits=limits)
        if state.is_error():
            raise GrammarRefused(" ".join(state.get_error().split())[:500])
        return state

    def _trie(self, ends: tuple[int, ...]) -> Any:
        """Return llguidance's tokenizer, with the ids that end a text."""
        if ends not in self._tries:
            import llguidance

            adapter = llguidance.TokenizerWrapper(_TokenizerAdapter(self._tokenizer))
            self._tries[ends] = llguidance.LLTokenizer(
                adapter, n_vocab=self._vocab, eos_token=[*ends]
            )
        return self._tries[ends]


class _TokenizerAdapter:
    """The fields of a tokenizer that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer):
        self.eos_token_id, self.bos_token_id = tokenizer.eos, None
        self.tokens = tokenizer.table
        self.special_token_ids = np.flatnonzero(~tokenizer.is_text).tolist()
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


def _grammar_text(source: GrammarSource) -> str:
    """Return the grammar in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher

    if source.kind == "json":
        return LLMatcher.grammar_from_json_schema(
            source.text, defaults={"whitespace_pattern": WHITESPACE}
        )
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    if source.kind == "lark":
        return LLMatcher.grammar_from_lark(source.text)
    # An expression: its alternatives are one lexeme, those of Lark would be items of the parser.
    return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(source.text))))


def allowed_ids(mask: np.ndarray) -> list[int]:
    """Return the ids of a mask's bits, in increasing order."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
