"""Sandbox of templates, and the worker process that renders them under limits.

As a script it takes JSON lines on stdin, the template first and then requests, and gives one JSON
line for each request on stdout; it imports nothing of jaxlm. The jinja2 sandbox keeps a template
from changing its inputs and from reaching Python's internals; the operating system limits CPU time
and memory.
"""

import contextlib
import datetime
import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Messages, more variables, and (messages that are read, add_generation_prompt) of each text.
Item = tuple[Sequence[Any], Mapping[str, Any], Sequence[tuple[int, bool]]]


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks assistant text; `marks` are written around it."""

    tags = {"generation"}
    marks = ("", "")

    def parse(self, parser: Any) -> Any:
        """Return the statements up to `{% endgeneration %}`."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opens, closes = (nodes.Output([nodes.TemplateData(mark)]) for mark in self.marks)
        return [opens, *body, closes]


def compiled(
    template: str, variables: Mapping[str, Any], marks: tuple[str, str], date: str
) -> Callable[[Item], list[Any]]:
    """Return the renderer of a template in the environment of transformers, without limits.

    It returns the texts of an item; a text that the template refuses is [why]. `date`, in ISO
    format, is that of `strftime_now`.
    """
    today = datetime.datetime.fromisoformat(date)

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    generation = type("Generation", (Generation,), {"marks": marks})
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = as_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = today.strftime
    source = sandbox.from_string(template)

    def text(messages: Sequence[Any], asks: bool, more: Mapping[str, Any]) -> Any:
        context = {**variables, **more, "messages": messages, "add_generation_prompt": asks}
        try:
            return source.render(context)
        except Exception as error:  # a template may raise anything
            return [f"{type(error).__name__}: {error}"[:1000]]

    def render(item: Item) -> list[Any]:
        messages, more, stops = item
        return [text(messages[:stop], asks, more) for stop, asks in stops]

    return render


def compiled_fields(templates: Mapping[str, str]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the renderer of named templates over the fields of a record, without limits.

    It returns a text for each template, or [why] for one that fails. An unknown field is an error.
    Texts keep their last line break.
    """
    sandbox = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )

    def as_json(value: Any) -> str:
        if isinstance(value, jinja2.Undefined):
            str(value)  # raises the error that names the field
        return json.dumps(value, ensure_ascii=False)

    sandbox.filters["tojson"] = as_json
    sources = {name: sandbox.from_string(source) for name, source in templates.items()}

    def text(source: jinja2.Template, record: Mapping[str, Any]) -> Any:
        try:
            return source.render(record)
        except Exception as error:  # a template may raise anything
            return [f"{type(error).__name__}: {error}"[:1000]]

    return lambda record: {name: text(source, record) for name, source in sources.items()}


def _renderer(head: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return the renderer of named templates, or of a chat template."""
    if "templates" in head:
        return compiled_fields(head["templates"])
    return compiled(head["template"], head["variables"], tuple(head["marks"]), head["date"])


def main() -> None:
    """Answer each request, a list of items, with their texts or with one error for all."""
    head = json.loads(sys.stdin.readline())
    with contextlib.suppress(ValueError, OSError):  # not every system has it
        resource.setrlimit(resource.RLIMIT_AS, (head["bytes"], head["bytes"]))
    render = None
    for line in sys.stdin:
        with contextlib.suppress(ValueError, OSError):
            used = resource.getrusage(resource.RUSAGE_SELF)
            most = int(used.ru_utime + used.ru_stime) + 1 + head["seconds"]
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        try:
            render = render or _renderer(head)
            answer = json.dumps([render(item) for item in json.loads(line)])
        except Exception as error:  # of the template itself
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
