import io
import re

import pytest

from jaxlm.monitor.console import COLUMNS, WIDTH, Console

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
    assert row.split() == "120 2.3457 0.000300 0.877 12.3k 768 MiB 1.2ms 1m01s 2m05s".split()
    end = 0
    for column in (each for each in COLUMNS if each.head not in ("mfu", "reward")):
        end += column.width
        assert head[:end].endswith(column.head)
        assert row[end - 1] != " "
        end += 1


def test_a_figure_that_is_known_later_gets_its_column():
    first, _, second, row = lines(TRAIN, TRAIN | {"mfu": 0.41})
    assert ("mfu" in first, "mfu" in second, "41.0%" in row) == (False, True, True)


def test_evaluations_are_aligned_and_the_best_of_each_set_is_named():
    known = {"loss_stderr": 0.044, "share": 0.095, "token_accuracy": 0.5}
    head, _, *rows = lines(
        TRAIN, VAL, VAL | known | {"loss_nats": 2.6}, VAL | known | {"split": "other"}
    )
    assert {row.index("2.") for row in rows} == {head.index("loss") - 2}
    assert [row.index("bits/byte") for row in rows] == [rows[0].index("bits/byte")] * 3
    assert ["best" in row for row in rows] == [True, False, True]
    assert rows[1].endswith("perplexity 12.18    accuracy 50.0%  \u00b10.044 on 9.5%")
    assert max(map(len, [head, *rows])) <= WIDTH


def test_an_evaluation_of_rewards_shows_the_reward_and_no_loss():
    figures = {"loss_nats": -0.832, "reward": 0.832, "pass_1": 0.832, "greedy_pass": 0.977}
    (row,) = lines({"step": 120, "split": "val", "time_unix": 1e9} | figures)
    assert row.split() == "120 - val best reward 0.8320 pass@1 83.2% greedy 97.7%".split()
    _, row = lines(TRAIN | {"loss_nats": -1e-9})
    assert row.split()[1] == "0.0000"


def test_an_evaluation_of_pairs_shows_the_share_that_is_preferred():
    figures = {"loss_nats": 0.693, "preference_accuracy": 0.9, "margin": 0.008}
    (row,) = lines({"step": 10, "split": "val", "time_unix": 1e9} | figures)
    assert row.split() == "10 0.6930 val best preferred 90.0% margin 0.0080".split()


def test_a_long_row_keeps_the_doubt_of_its_loss():
    known = {"loss_stderr": 0.044, "share": 0.095, "token_accuracy": 0.5, "split": "validation"}
    (row,) = lines(VAL | known | {"worse_than": "unigram"})
    assert "worse than unigram" in row
    assert row.endswith("\u00b10.044 on 9.5%")
    assert "accuracy" not in row
    assert len(row) <= WIDTH


def test_a_resumed_run_knows_its_best_evaluation():
    screen = io.StringIO()
    with Console(screen, total=200) as console:
        console.remember([TRAIN, VAL])
        console.write(VAL)
    assert "best" not in screen.getvalue()


def test_the_best_evaluation_is_that_of_as_many_batches_as_the_others():
    last = VAL | {"step": 20, "loss_nats": VAL["loss_nats"] - 0.1}
    rows = lines(VAL, last | {"ranking_loss_nats": VAL["loss_nats"] + 0.1})
    assert ["best" in row for row in rows[-2:]] == [True, False]


def test_a_screen_gets_the_brief_header_and_the_log_all_of_it():
    screens, log = [io.StringIO(), io.StringIO()], io.StringIO()
    for screen in screens:
        console = Console(screen, log=log, total=1, is_verbose=screen is screens[1])
        console.block("run", [("model", "llama"), ("checks", "ok")], brief={"model"})
    assert [screen.getvalue().count("checks") for screen in screens] == [0, 1]
    assert log.getvalue().count("checks") == 2


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
        console.advance(151)
    assert re.search(r"151/200 steps  loss 2\.3457  2m0[45]s left", screen.getvalue())
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
    assert re.search(r"compiling: \S*s\n", screen.getvalue())


def test_a_wait_that_fails_leaves_the_terminal_clean():
    screen = Terminal()
    with pytest.raises(ValueError, match="no"), Console(screen, total=1).timer("compiling"):
        raise ValueError("no")
    assert "compiling: " not in screen.getvalue()
