"""Sandbox of chat templates, and the worker process that renders one under limits.

As a script it takes one JSON request on stdin and gives one JSON answer on stdout, and imports
nothing of jaxlm. The jinja2 sandbox keeps a template from changing its inputs and from reaching
Python's internals; the operating system limits CPU time and memory.
"""

import contextlib
import datetime
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks assistant text; the rendered text is unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Return the statements up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, conversations: Sequence[Any], variables: Mapping[str, Any]) -> list[str]:
    """Render conversations in the environment of transformers, without limits."""

    def as_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = as_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    compiled = sandbox.from_string(template)
    return [compiled.render(messages=messages, **variables) for messages in conversations]


def main() -> None:
    """Answer one request with `texts` or `error`."""
    request = json.load(sys.stdin)
    limits = {resource.RLIMIT_CPU: request["seconds"], resource.RLIMIT_AS: request["bytes"]}
    for kind, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has each
            resource.setrlimit(kind, (most, most))
    try:
        texts = render(request["template"], request["conversations"], request["variables"])
        answer = json.dumps({"texts": texts})
    except Exception as error:  # a template may raise anything
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
