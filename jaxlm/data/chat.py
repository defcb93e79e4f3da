"""Rendering of conversations by a chat template.

Example:
  >>> template = ChatTemplate("{{ messages[0].content }}{{ e }}", {"e": "</s>"}, is_trusted=True)
  >>> render_chat([[{"role": "user", "content": "hi"}]], template)
  ['hi</s>']
"""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxlm.core.errors import DataError
from jaxlm.data.sandbox import SandboxProcess

MAX_CHARACTERS = 2**20  # of a template, twenty times the largest in use
TODAY = datetime.date(2024, 7, 26)  # for templates by today's date, as the fallback of Llama 3
Message = Mapping[str, Any]  # with at least `role` and `content`


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template over `messages`, as transformers uses it. Raise DataError if too large."""

    source: str
    tokens: Mapping[str, str]  # texts of the model's named tokens, such as `bos_token`
    where: str = "chat template"  # file name in errors
    is_trusted: bool = False  # render in this process; not for templates that come with a model
    fix: str = "leave out --chat"  # in errors

    def __post_init__(self) -> None:
        if len(self.source) > MAX_CHARACTERS:
            raise _refused(self, f"it has {len(self.source):,} characters")


class RenderRequest(NamedTuple):
    """Messages to render: whole and their beginnings."""

    messages: Sequence[Message]
    variables: Mapping[str, Any]
    stops: Sequence[tuple[int, bool]]  # number of messages, and add_generation_prompt


class Refusal(NamedTuple):
    """The reason for which a template did not render a text."""

    why: str


class Renderer:
    """A template in a process of its own, which renders request after request.

    Args:
      template: jinja2's immutable sandbox renders it in every case. One that is not trusted runs in
        another process, with `SECONDS` of CPU time a request and `MEMORY`.
      marks: texts that are written around `{% generation %}`.
      variables: more variables of the template, as JSON values.
    """

    def __init__(
        self, template: ChatTemplate, marks: tuple[str, str] = ("", ""), **variables: Any
    ) -> None:
        self._template, self._marks = template, marks
        self._variables = {"tools": None, "documents": None, **template.tokens, **variables}
        head = {
            "template": template.source,
            "variables": self._variables,
            "marks": marks,
            "date": TODAY.isoformat(),  # on every day, so that a run answers the same
        }
        self._process = None if template.is_trusted else SandboxProcess(head)

    def __enter__(self) -> "Renderer":
        if self._process is not None:
            self._process.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.__exit__()

    def render(self, items: Sequence[RenderRequest]) -> list[list[str | Refusal]]:
        """Return the texts of each item.

        Raise DataError if the template is invalid or exceeds a limit.
        """
        answer = self._rendered(items) if self._process is None else self._process.request(items)
        if isinstance(answer, dict):
            raise _refused(self._template, answer["error"])
        return [[t if isinstance(t, str) else Refusal(*t) for t in texts] for texts in answer]

    def _rendered(self, items: Sequence[RenderRequest]) -> Any:
        from jaxlm.data import chat_worker

        try:
            options = self._variables, self._marks, TODAY.isoformat()
            render = chat_worker.compiled(self._template.source, *options)
            return [render(item) for item in items]
        except Exception as error:  # a template may raise anything
            return {"error": f"{type(error).__name__}: {error}"[:1000]}


def render_chat(
    conversations: Sequence[Sequence[Message]],
    template: ChatTemplate,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[str]:
    """Return the text of each conversation.

    Args:
      add_generation_prompt: end with the header of the assistant's next message.
      variables: more variables of the template, as JSON values.

    Raises:
      DataError: if the template is invalid, refuses a conversation, leaves the sandbox or exceeds a
        limit.
    """
    with Renderer(template, **variables) as renderer:
        items = [
            RenderRequest(each, {}, [(len(each), add_generation_prompt)]) for each in conversations
        ]
        texts = [text for texts in renderer.render(items) for text in texts]
    for text in texts:
        if isinstance(text, Refusal):
            raise _refused(template, text.why)
    return texts  # type: ignore[return-value]


def _refused(template: ChatTemplate, why: str) -> DataError:
    return DataError(
        "a chat template cannot be rendered", where=template.where, why=why, fix=template.fix
    )
