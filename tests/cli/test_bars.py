"""The bars of long commands: what they show on a terminal, and the lines of a log."""

import io
import re
import sys
import time

import pytest

from jaxlm.cli import bars
from jaxlm.cli.bars import progress_bars
from jaxlm.cli.output import Output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, stream: io.StringIO, quiet: bool = False) -> str:
    """Output while half of 80 MB is done in a third of a second, and the rest is left."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress_bars(Output(as_json=False, quiet=quiet), "of a test: ") as show:
        for done in range(0, 41, 10):
            show("cleaning", done * 10**6, 80 * 10**6)
            time.sleep(0.1)
        show("writing", 1, 2)
        time.sleep(0.2)
    return stream.getvalue()


def test_a_terminal_sees_how_much_is_done_how_fast_and_what_time_is_left(monkeypatch):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(monkeypatch, Terminal()))
    assert "of a test: cleaning" in text
    assert "of a test: writing" in text
    assert "40.0/80.0 MB" in text
    (rate, *_) = sorted(map(float, re.findall(r"([0-9.]+) MB/s", text)), key=lambda r: abs(r - 100))
    assert 30 < rate < 300, "10 MB each tenth of a second"
    assert re.search(r"MB/s +0:00:0[01]", text), "40 MB are left, at 100 MB a second"


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True)])
def test_a_log_of_half_a_second_and_a_quiet_command_see_nothing(monkeypatch, stream, quiet):
    assert shown(monkeypatch, stream, quiet) == ""


def test_a_log_has_a_line_now_and_then_with_the_rate_and_the_time_that_is_left(monkeypatch, capsys):
    monkeypatch.setattr(bars, "LINE_SECONDS", 0.15)
    shown(monkeypatch, io.StringIO())
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 3
    line = re.fullmatch(
        r"of a test: cleaning: ([\d.]+) MiB of 76.3 MiB, ([\d.]+) MiB a second, [\d.:]+s? left",
        lines[-1],
    )
    assert line, lines
    assert 30 < float(line[2]) < 300
