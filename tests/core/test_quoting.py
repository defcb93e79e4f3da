"""Laws of text from outside: printable, short, and without secrets."""

import pytest

from jaxlm.core import quoting


def test_what_people_read_stays_as_it_is():
    text = (
        "caf\u00e9 \u6f22\u5b57\u3000\U0001f468\u200d\U0001f469 \u00a0tab\tline\n"
        " \u05e9\u05dc\u05d5\u05dd"
    )
    assert quoting.printable(text) == text
    assert quoting.safe(text) == text


@pytest.mark.parametrize(
    "letter",
    [
        *map(chr, range(9)),
        "\r",
        "\x1b",
        "\x7f",
        "\x9b",
        "\u202e",
        "\u2028",
        "\ud800",
        "\ufeff",
        "\U000e0041",
    ],
)
def test_what_drives_a_terminal_or_hides_is_spelt_out(letter):
    shown = quoting.printable(f"a{letter}b")
    assert shown.isascii()
    assert shown == f"a{letter!r}b".replace("'", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://user:pa:ss@host/x and gs://key@b", "see https://***@host/x and gs://***@b"),
        ("https://h/x?a=1&sig=abc&b=2", "https://h/x?a=1&sig=***&b=2"),
        ("https://h/x?X-Amz-Security-Token=abc", "https://h/x?X-Amz-Security-Token=***"),
        ("--hf_token=abc", "--hf_token=***"),
        ("API_KEY = 'abc' x", "API_KEY = '***' x"),
        ("password=abc", "password=***"),
    ],
)
def test_secrets_become_stars(text, shown):
    assert quoting.redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("--max_token=5", "eos_token=2", "data.tokenizer = 'x'", "tokens=5", "a@b", "seed=0"),
        *("https://host/a@b/c", "data.text_key = 'body'", "https://h/x?monkey=1", "stdlib:train"),
    ],
)
def test_other_words_do_not(text):
    assert quoting.redacted(text) == text
    assert not quoting.holds_secret(text)


def test_a_url_without_its_secret_still_names_its_place():
    assert quoting.without_secret("s3://a:b@h/x?sig=1&y=2") == "s3://h/x?sig=&y=2"
    assert not quoting.holds_secret(quoting.without_secret("s3://a:b@h/x?sig=1&y=2"))


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u6f22", "\U0001f600"])
def test_long_text_is_cut_to_its_bytes_and_says_how_many_are_missing(letter):
    size = len(letter.encode())
    for count in (10, 1999 // size, 2000 // size, 2001 // size + 1, 400_000):
        text = letter * count
        shown = quoting.cut(text)
        assert len(shown.encode()) <= 2000
        if count * size <= 2000:
            assert shown == text
        else:
            shown_part, _, rest = shown.partition(" ... and ")
            missing = int(rest.removesuffix(" more bytes").replace(",", ""))
            assert len(shown_part.encode()) + missing - count * size in range(-3, 1)
