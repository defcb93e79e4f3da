"""Conversations as the text that a model was trained to read them in, by its chat template."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError

LARGEST = 2**20  # characters of a template; the largest in use have a twentieth of it
SECONDS = 10  # of the processor, for one call
MEMORY = 2**30  # bytes of a rendering process
WORKER = Path(__file__).with_name("chat_worker.py")
Message = Mapping[str, Any]  # a role, and a content


class ChatTemplate:
    """A Jinja template over `messages`, as transformers renders it.

    It comes with somebody else's model, so it is rendered by jinja2's immutable sandbox in a process of its own, with
    `SECONDS` of the processor and `MEMORY`: one that loops without end, or reaches for what is behind a value, is refused.

    Args:
      source: the template.
      tokens: the texts of the model's named tokens, such as `bos_token`.
      where: for errors.

    Raises:
      DataError: where it is too large.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], where: str = "chat template"):
        self.source, self.tokens, self._where = source, dict(tokens), where
        if len(source) > LARGEST:
            raise self._refused(f"it has {len(source):,} characters")

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        add_generation_prompt: bool = True,
        **given: Any,
    ) -> list[str]:
        """The text of each conversation; `add_generation_prompt` lets the assistant speak next.

        `given` are further variables of the template, as far as JSON holds them.

        Raises:
          DataError: where it is no template, refuses a conversation, does what is not allowed, or takes too much.
        """
        request = {
            "template": self.source,
            "conversations": conversations,
            "given": {
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self.tokens,
                **given,
            },
            "seconds": SECONDS,
            "bytes": MEMORY,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(WORKER)],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=6 * SECONDS,  # a busy machine gives it less than a whole processor
            )
        except subprocess.TimeoutExpired as error:
            raise self._refused(f"it was not done after {6 * SECONDS} seconds") from error
        if done.returncode or not done.stdout:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise self._refused(
                f"it needs more than {SECONDS} seconds or {MEMORY / 2**30:g} GiB"
                if done.returncode < 0
                else f"its process ended with {done.returncode}: {said[-1] if said else ''}"
            )
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise self._refused(answer["error"])
        return answer["texts"]

    def _refused(self, why: str) -> DataError:
        return DataError(
            "a chat template cannot be rendered",
            where=self._where,
            why=why,
            fix="leave --chat out",
        )
