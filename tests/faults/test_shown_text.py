"""Text from data does not control the terminal that shows it, and does not fill a log."""

import io
import json
import re
import sys

import pytest

from jaxlm.cli.main import main
from jaxlm.core import quoting
from jaxlm.core.errors import DataError

NASTY = "\x1b]0;owned\x07\x1b[2J\x1b[31m\r\x08\x7f\x9b31m\u202eevil\u2066\u2028\ufeff"
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)


def longest_field(text: str) -> int:
    return max((len(line.encode()) for line in text.splitlines()), default=0)


def test_s12_peek_shows_control_characters_spelt_out_and_two_kilobytes_at_most(tmp_path, capsys):
    (tmp_path / f"a{NASTY}.txt").write_text(f"start {NASTY} end " + "long " * 20_000)
    flags = (
        f"--config.data.train={tmp_path}/*.txt",
        "--config.data.validation=",
        "--config.data.tokenizer=bytes",
        "--config.data.sequence=90000",
    )
    assert main(["data", "peek", *flags]) == 0
    shown = capsys.readouterr()
    assert "\\x1b]0;owned\\x07" in shown.out
    assert "\\u202eevil" in shown.out
    assert "more bytes" in shown.out
    assert not RAW.search(shown.out + shown.err)
    assert longest_field(shown.out) <= 2100
    assert main(["data", "peek", *flags, "--json"]) == 0
    answer = capsys.readouterr().out
    assert answer.isascii()
    texts = [segment["text"] for row in json.loads(answer)["rows"] for segment in row]
    assert max(map(len, texts)) > 80_000


BROKEN = {
    "a record that is no JSON": ("a.jsonl", f'{{"text": "{NASTY}'.encode() + b"x" * 1_000_000),
    "a record without text": ("a.jsonl", json.dumps({NASTY * 9000: 1}).encode()),
    "a file that is no UTF-8": (f"b{NASTY[:20]}.txt", b"fine \xff\xfe\x1b[31m"),
    "a manifest": (
        "manifest.json",
        json.dumps({"format_version": NASTY + "x" * 1_000_000}).encode(),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", BROKEN)
def test_s12_an_error_that_quotes_data_is_escaped_and_short(case, tmp_path, capsys):
    name, content = BROKEN[case]
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(content)
    words = ["data", "check", str(folder)]
    if name != "manifest.json":
        flags = [f"--config.data.train={folder}/*", "--config.data.validation="]
        words = ["data", "stats", *flags, "--config.data.tokenizer=bytes"]
    for trace in ([], ["--trace"]):
        assert main([*words, *trace]) == 65
        shown = capsys.readouterr().err
        assert not RAW.search(shown)
        assert longest_field(shown) <= 2100


def test_s12_every_part_of_every_error_is_escaped_and_at_most_two_kilobytes():
    error = DataError(*[NASTY * 50_000], where=NASTY * 9000, why="\u6f22" * 9000, fix="x" * 9000)
    for part in (error.what, error.where, error.why, error.fix):
        assert not RAW.search(part)
        assert 1900 < len(part.encode()) <= quoting.MAX_BYTES
        assert part.endswith("more bytes")
    assert error.args == (error.what,)


def test_s12_logs_samples_and_generated_text_are_escaped(tmp_path, capsys):
    from jaxlm.cli.output import Output
    from jaxlm.monitor import sinks
    from jaxlm.monitor.console import Console

    log = io.StringIO()
    with Console(sys.stderr, log=log, total=1) as console:
        console.say(f"reading {NASTY}")
        console.block(f"run {NASTY}", [("data", NASTY)])
    Output().result({}, NASTY)
    shown = capsys.readouterr()
    assert "\\x1b[2J" in log.getvalue()
    for text in (log.getvalue(), shown.out, shown.err):
        assert not RAW.search(text)
    with_text = sinks.Jsonl(tmp_path / "samples.jsonl")
    with_text.write({"text": NASTY + "\u6f22\t\n"})
    with_text.close()
    raw = (tmp_path / "samples.jsonl").read_text()
    assert not RAW.search(raw)
    assert "\u6f22" in raw
    assert json.loads(raw)["text"] == NASTY + "\u6f22\t\n"
