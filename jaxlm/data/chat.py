"""Rendering of conversations by a model's chat template."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError

LARGEST = 2**20  # characters of a template, twenty times the largest in use
SECONDS = 10  # of CPU time for one call
MEMORY = 2**30  # bytes of the rendering process
WORKER = Path(__file__).with_name("chat_worker.py")
Message = Mapping[str, Any]  # with at least `role` and `content`


class ChatTemplate:
    """A Jinja template over `messages`, rendered as transformers does.

    Templates come with models from others, so jinja2's immutable sandbox renders them in a process
    of its own with `SECONDS` of CPU time and `MEMORY`.

    Args:
      source: the template.
      tokens: texts of the model's named tokens, such as `bos_token`.
      where: file name in errors.

    Raises:
      DataError: if the template is too large.
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
        **variables: Any,
    ) -> list[str]:
        """Return the text of each conversation.

        Args:
          conversations: the messages of each.
          add_generation_prompt: end with the header of the assistant's next message.
          variables: more variables of the template, as JSON values.

        Raises:
          DataError: if the template is invalid, refuses a conversation, leaves the sandbox or
            exceeds a limit.
        """
        request = {
            "template": self.source,
            "conversations": conversations,
            "variables": {
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self.tokens,
                **variables,
            },
            "seconds": SECONDS,
            "bytes": MEMORY,
        }
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(WORKER)],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=6 * SECONDS,  # a busy machine gives less than a whole processor
            )
        except subprocess.TimeoutExpired as error:
            raise self._refused(f"it did not finish in {6 * SECONDS} seconds") from error
        if done.returncode or not done.stdout:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise self._refused(
                f"it needs more than {SECONDS} seconds or {MEMORY / 2**30:g} GiB"
                if done.returncode < 0
                else f"its process ended with {done.returncode}: {lines[-1] if lines else ''}"
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
            fix="leave out --chat",
        )
