"""Rendering of conversations by a chat template.

Example:
  >>> template = ChatTemplate("{{ messages[0].content }}{{ e }}", {"e": "</s>"}, is_trusted=True)
  >>> render_chat([[{"role": "user", "content": "hi"}]], template)
  ['hi</s>']
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlm.core.errors import DataError

MAX_CHARACTERS = 2**20  # of a template, twenty times the largest in use
SECONDS = 10  # of CPU time for one call
MEMORY = 2**30  # bytes of the rendering process
WORKER = Path(__file__).with_name("chat_worker.py")
Message = Mapping[str, Any]  # with at least `role` and `content`


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template over `messages`, as transformers uses it. Raise DataError if too large."""

    source: str
    tokens: Mapping[str, str]  # texts of the model's named tokens, such as `bos_token`
    where: str = "chat template"  # file name in errors
    is_trusted: bool = False  # render in this process; not for templates that come with a model

    def __post_init__(self) -> None:
        if len(self.source) > MAX_CHARACTERS:
            raise _refused(self, f"it has {len(self.source):,} characters")


def render_chat(
    conversations: Sequence[Sequence[Message]],
    template: ChatTemplate,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[str]:
    """Return the text of each conversation; the only entry to chat templates.

    jinja2's immutable sandbox renders in every case. A template that is not trusted runs in a
    process of its own with `SECONDS` of CPU time and `MEMORY`, once for all conversations.

    Args:
      add_generation_prompt: end with the header of the assistant's next message.
      variables: more variables of the template, as JSON values.

    Raises:
      DataError: if the template is invalid, refuses a conversation, leaves the sandbox or exceeds a
        limit.
    """
    defaults = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    variables = {**defaults, **template.tokens, **variables}
    if template.is_trusted:
        from jaxlm.data import chat_worker

        try:
            return chat_worker.render(template.source, conversations, variables)
        except Exception as error:  # a template may raise anything
            raise _refused(template, f"{type(error).__name__}: {error}"[:1000]) from error
    request: dict[str, Any] = {"template": template.source, "conversations": conversations}
    request |= {"variables": variables, "seconds": SECONDS, "bytes": MEMORY}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(WORKER)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=6 * SECONDS,  # a busy machine gives less than a whole processor
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(template, f"it did not finish in {6 * SECONDS} seconds") from error
    if done.returncode < 0:
        why = f"it needs more than {SECONDS} seconds or {MEMORY / 2**30:g} GiB"
        raise _refused(template, why)
    if done.returncode or not done.stdout:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise _refused(template, f"its process ended with {done.returncode}: {''.join(last)}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise _refused(template, answer["error"])
    return answer["texts"]


def _refused(template: ChatTemplate, why: str) -> DataError:
    return DataError(
        "a chat template cannot be rendered", where=template.where, why=why, fix="leave out --chat"
    )
