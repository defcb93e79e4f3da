"""Renders a chat template in a process of its own, which ends where it takes too much: run as a script, never imported.

A request is one JSON object on stdin, the answer one on stdout. The sandbox of jinja2 lets a template neither change
what it is given nor reach what Python keeps behind a value; seconds and memory are limited by the operating system.
"""

import contextlib
import datetime
import json
import resource
import sys
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote; the text is the same without."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """The statements up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates."""

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = as_json
    found.globals["raise_exception"] = raise_exception
    found.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return found


def limit(kind: int, most: int) -> None:
    """Holds this process to a limit, where the system knows it."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, most))


def main() -> None:
    """Answers one request: `texts`, or `error`."""
    request = json.load(sys.stdin)
    limit(resource.RLIMIT_CPU, request["seconds"])
    limit(resource.RLIMIT_AS, request["bytes"])
    try:
        template = environment().from_string(request["template"])
        texts = [
            template.render(messages=messages, **request["given"])
            for messages in request["conversations"]
        ]
        answer = json.dumps({"texts": texts})
    except Exception as error:  # a template may raise whatever it likes
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
