"""Output on a terminal: color unless it is refused, and a description of every verb."""

import io
import os
import re

import pytest

from jaxlm.cli import main as command_line
from jaxlm.cli import output
from jaxlm.cli.arguments import Parser
from jaxlm.core.errors import CommandError

ERROR = CommandError("bad", where="a", why="b", fix="c\nd")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, **environment):
    for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(output.sys, "stderr", stream)
    output.Output().error(ERROR)
    return stream.getvalue()


def test_an_error_has_color_on_a_terminal_and_the_same_text(monkeypatch):
    text = shown(monkeypatch, Terminal())
    assert text.startswith("\x1b[1;31mcommand error: bad\x1b[0m\n")
    assert "\x1b[32m  fix    c\x1b[0m\n\x1b[32m         d\x1b[0m\n" in text
    assert re.sub(r"\x1b\[[\d;]*m", "", text) == f"{ERROR}\n"


def test_the_reason_of_an_error_wraps_at_words_on_a_terminal_and_its_fix_does_not(monkeypatch):
    monkeypatch.setattr(output.shutil, "get_terminal_size", lambda: os.terminal_size((40, 20)))
    monkeypatch.setitem(
        globals(), "ERROR", CommandError("a", where="b", why="word " * 10, fix="f " * 30)
    )
    lines = shown(monkeypatch, Terminal(), NO_COLOR="1").splitlines()
    assert lines[2:4] == ["  why    word word word word word word", "         word word word word"]
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("stream", "environment"),
    [(io.StringIO, {}), (Terminal, {"NO_COLOR": "1"}), (Terminal, {"TERM": "dumb"})],
)
def test_a_pipe_and_a_terminal_that_refuses_get_no_color(monkeypatch, stream, environment):
    assert shown(monkeypatch, stream(), **environment) == f"{ERROR}\n"


def test_every_verb_and_action_has_a_description_and_a_help_that_wraps_nowhere(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for name, verb in command_line.VERBS.items():
        module = command_line.importlib.import_module(verb.module)
        parser = Parser(prog=f"jaxlm {name}", description=module.__doc__)
        module.add_arguments(parser)
        parser.add_shared()
        for action, each in {name: parser, **parser.actions}.items():
            assert each.description, f"{name} {action}"
            assert [line for line in each.format_help().splitlines() if len(line) > 100] == []
