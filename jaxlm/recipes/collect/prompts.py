"""Prompts of a collection: texts or messages, each with its reference answer."""

import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlm.core import random
from jaxlm.core.errors import DataError
from jaxlm.data import conversations
from jaxlm.data.conversations import Rejected
from jaxlm.data.documents import matching_files

EXAMPLE = '{"prompt": "1+1=", "answer": "2"}'


Messages = str | list[dict[str, Any]]


class CollectPrompt(NamedTuple):
    """A prompt; `messages` is a text without a chat template.

    `info` is the field of that name of its line.
    """

    messages: Messages
    answer: str | None
    info: Any

    @property
    def id(self) -> str:
        """Return a digest of the prompt and its answer."""
        content = json.dumps([self.messages, self.answer], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def text(self) -> str:
        """Return the text that rewards receive: that of the last message."""
        return self.messages if isinstance(self.messages, str) else self.messages[-1]["content"]

    @property
    def question(self) -> str:
        """Return the text of all messages, which a model that judges reads."""
        if isinstance(self.messages, str):
            return self.messages
        return "\n".join(str(each["content"]) for each in self.messages)


def seeds(
    draws: Sequence[tuple[CollectPrompt, int]], seed: int, name: str = "collect"
) -> list[int]:
    """Return the seed of each draw, by the rule of rollouts, see `random.draw_keys`.

    The number of a prompt is from its id, so that other prompts and their order change no draw.

    Args:
      draws: prompt and number of the sample of each.
      seed: of the collection.
      name: stream of what is drawn; those of a critique differ from those of the answer.
    """
    if not draws:
        return []
    numbers = np.array([int(prompt.id[:8], 16) for prompt, _ in draws], np.uint32)
    samples = np.array([sample for _, sample in draws], np.uint32)
    keys = random.draw_keys(random.stream(jax.random.key(seed), name), numbers, samples)
    return jax.vmap(jax.random.bits)(keys).tolist()


def read(globs: Sequence[str], *, is_chat: bool, left_out: Counter[str]) -> list[CollectPrompt]:
    """Return the prompts of files of JSON lines, or with a prompt on each line; each once.

    Args:
      globs: the files.
      is_chat: a text is the message of a user.
      left_out: counts of prompts that are left out, by reason.

    Raises:
      InputMissing: if there are no files.
      DataError: if a line has no prompt, or no file has any.
    """
    files = sorted({path for each in globs for path in matching_files(each, "--prompts")})
    prompts: dict[str, CollectPrompt] = {}
    for path in files:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            is_json = path.endswith(".jsonl")
            each = _parsed(line, f"{path}:{number}") if is_json else CollectPrompt(line, None, {})
            if is_chat and isinstance(each.messages, str):
                each = each._replace(messages=[{"role": "user", "content": each.messages}])
            left_out["repeated"] += each.id in prompts
            prompts.setdefault(each.id, each)
    if not prompts:
        raise DataError(
            "the files have no prompt",
            where=f"--prompts={globs[0]}",
            why="all of their lines are empty",
            fix=f"echo '{EXAMPLE}' > {shlex.quote(files[0])}",
        )
    return list(prompts.values())


def _parsed(line: str, place: str) -> CollectPrompt:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(conversations.described(record))
        prompt, answer = record.get("prompt"), record.get("answer")
        if isinstance(prompt, list):
            # A turn of an assistant behind the prompt makes it a whole conversation.
            asked = {"prompt": prompt, "completion": "a"}
            messages = conversations.parse(asked, "completion", ("assistant",)).messages
            prompt = list(messages[:-1])
        if prompt is None:
            raise ValueError(conversations.described(record))
        if not prompt or not isinstance(prompt, str | list):
            raise ValueError(f"prompt is {prompt!r}")
        if answer is not None:
            answer = str(answer)
    except (ValueError, RecursionError, Rejected) as error:
        fix = f"one prompt a line: {EXAMPLE}"
        raise DataError("a line has no prompt", where=place, why=str(error), fix=fix) from error
    return CollectPrompt(prompt, answer, record.get("info"))
