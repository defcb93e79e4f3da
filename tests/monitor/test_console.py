import io

import pytest

from jaxlm.monitor.console import COLUMNS, Console

TRAIN = {
    "step": 120,
    "time_unix": 1e9,
    "split": "train",
    "loss_nats": 2.345678,
    "learning_rate": 3e-4,
    "grad_norm": 0.87654,
    "tokens_per_second": 12_345.6,
    "mfu": None,
    "peak_bytes": 3 * 2**28,
    "data_wait_seconds": 0.0012,
    "elapsed_seconds": 61.0,
    "left_seconds": 125.0,
}
VAL = {
    "step": 120,
    "time_unix": 1e9,
    "split": "val",
    "loss_nats": 2.5,
    "bits_per_byte": 1.7321,
    "perplexity": 12.18,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines(*records):
    screen = io.StringIO()
    with Console(screen, total=200) as console:
        for record in records:
            console.write(record)
    return screen.getvalue().splitlines()


def test_a_row_stands_under_its_heads():
    head, row = lines(TRAIN)
    assert row.split() == "120 2.3457 - 0.0003 0.877 12.3k - 768 MiB 1.2ms 1:01 2:05".split()
    end = 0
    for column in COLUMNS:
        end += column.width
        assert head[:end].endswith(column.head)
        assert row[end - 1] != " "
        end += 1


def test_an_evaluation_stands_in_its_own_column_with_its_figures():
    head, _, row = lines(TRAIN, VAL)
    assert head.index("eval") + 4 == row.index("2.5000") + 6
    assert row.endswith("val, bits/byte 1.732, perplexity 12.18")


def test_the_heads_come_again():
    assert sum("tok/s" in line for line in lines(*[TRAIN] * 61)) == 3


def test_a_log_has_no_escape_codes_and_no_bar():
    text = "\n".join(lines(TRAIN, VAL))
    assert text.isascii()
    assert "\x1b" not in text


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_notebook_that_asks_for_colour_gets_plain_rows(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert "\x1b" not in "\n".join(lines(TRAIN, VAL))


def test_the_bar_is_gone_once_the_last_step_is_shown(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with Console(screen, total=200) as console:
        console.write(TRAIN)
        console.write(TRAIN | {"step": 200})
        before = len(screen.getvalue())
        console.say("done")
        assert screen.getvalue()[before:] == "done\n"


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    with Console(screen, total=200) as console:
        console.write(TRAIN)
        console.write(TRAIN | {"step": 150})
    assert "150/200 steps" in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("\x1b[2K")


def test_the_log_file_gets_the_lines_of_the_screen_plain(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    log = io.StringIO()
    with Console(Terminal(), log=log, total=200) as console:
        console.block("a run", [("model", "llama\n4M parameters"), ("devices", "8 cpu")])
        console.write(TRAIN)
    assert log.getvalue().splitlines()[:4] == [
        "a run",
        "  model    llama",
        "           4M parameters",
        "  devices  8 cpu",
    ]
    assert "\x1b" not in log.getvalue()


def test_no_screen_is_silent_and_still_logs():
    log = io.StringIO()
    with Console(None, log=log, total=1) as console:
        console.write(TRAIN)
    assert "2.3457" in log.getvalue()


def test_brackets_in_text_are_no_markup():
    screen = io.StringIO()
    Console(screen, total=1).say("[bold]x[/bold] [3]")
    assert screen.getvalue() == "[bold]x[/bold] [3]\n"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_long_wait_is_named_and_timed(kind, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    screen = kind()
    with Console(screen, total=1).timer("compiling"):
        pass
    assert "compiling: 0.0s" in screen.getvalue()


def test_a_wait_that_fails_leaves_the_terminal_clean():
    screen = Terminal()
    with pytest.raises(ValueError, match="no"), Console(screen, total=1).timer("compiling"):
        raise ValueError("no")
    assert "compiling: " not in screen.getvalue()
