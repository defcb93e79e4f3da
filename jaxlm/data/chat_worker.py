"""Worker process that renders a chat template under limits; run as a script, never imported.

One JSON request on stdin, one JSON answer on stdout. The jinja2 sandbox keeps a template from
changing its inputs and from reaching Python's internals; the operating system limits CPU time and
memory.
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
    """`{% generation %}`, which marks assistant text; the rendered text is unchanged."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Return the statements up to `{% endgeneration %}`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the jinja2 environment in which transformers renders chat templates."""

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
    return sandbox


def limit(kind: int, most: int) -> None:
    """Set a resource limit of this process, if the system has it."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, most))


def main() -> None:
    """Answer one request with `texts` or `error`."""
    request = json.load(sys.stdin)
    limit(resource.RLIMIT_CPU, request["seconds"])
    limit(resource.RLIMIT_AS, request["bytes"])
    try:
        template = environment().from_string(request["template"])
        texts = [
            template.render(messages=messages, **request["variables"])
            for messages in request["conversations"]
        ]
        answer = json.dumps({"texts": texts})
    except Exception as error:  # a template may raise anything
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
