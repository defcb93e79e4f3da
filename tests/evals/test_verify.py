"""Comparison of answers: the strict grammar of numbers, the last trained turn, and the score."""

import math
import random
from decimal import Decimal

import numpy as np
import pytest

from jaxlm.evals import verify
from jaxlm.evals.verify import MAX_DIGITS, is_match, last_number, last_turn


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs.\nShe makes $18.\n#### 18", "18"),
        ("He makes $70,000 of 200,000.\n#### 70000", "70000"),
        ("#### $1,234.50 for 2 weeks", "1234.50"),  # the first after the mark
        ("#### 1\n#### 2", "2"),
        ("It is 7 of 12\n####", "12"),  # nothing after the mark
        ("the answer is \\boxed{72}.", "72"),
        ("**-3**", "-3"),
        ("a loss of -$3", "-3"),
        ("\u22123 degrees", "-3"),  # the minus sign of Unicode
        ("16-3", "3"),  # a subtraction
        ("(2)-3", "3"),
        ("a range of 5\u20137", "7"),
        (".5", "0.5"),
        ("-.5", "-0.5"),
        ("5.", "5"),
        ("007", "7"),
        ("80%", "80"),
        ("1\u00a0000", "0"),  # a space, even one that does not break, separates
        ("3\u0301", "3"),
    ],
)
def test_a_number_is_read_as_gsm8k_writes_it(text, number):
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "no number",
        "1e5",
        "1E+5",
        "1.5e-5",
        "NaN",
        "inf",
        "-Infinity",
        "0x10",
        "1_000",
        "x2",
        "3rd",
        "12kg",
        "1,23",
        "1234,567",
        ",",
        ".",
        "-",
        "1..2",
        "1.2.3",
        "1,000.5.1",
        "\u0663",
        "\uff15",
        "\u00bd",
        "5\u00b2",
        "\u2167",
        "#### ",
        "__import__('os').getpid()",
        "\x00",
        "\U0001d7d8",
        "9" * (MAX_DIGITS + 1),
        "." + "9" * (MAX_DIGITS + 1),
    ],
)
def test_other_words_are_no_number(text):
    assert last_number(text) is None
    assert not is_match("number", text, text)
    assert is_match("exact", text, f" {text}\n")


def test_a_number_is_found_in_any_form_between_any_words():
    draw = random.Random(0)
    around = ["", "about ", "$", "\u4e2d\u6587 ", "= ", "(", "\\boxed{", "\U0001f600"]
    for _ in range(2000):
        value = Decimal(draw.randrange(-(10**12), 10**12)).scaleb(-draw.randrange(6))
        form = f"{value:,f}" if draw.random() < 0.5 else f"{value:f}"
        marks = draw.choice(["", "12 of 13 are\n#### ", "#### 4\n#### "])
        end = draw.choice(["", ".", ", so", " dollars", "%", "\n", ")", "**"])
        assert last_number(f"{marks}{draw.choice(around)}{form}{end}") == value


def test_any_text_is_read_in_linear_time_without_an_error():
    draw = random.Random(1)
    letters = "0123456789,.-+eE#$_ \n\u2212\u0663\uff15\ufdd0\ud800a"
    for size in (1, 10, 100, 100_000):
        number = last_number("".join(draw.choices(letters, k=size)))
        assert number is None or number.is_finite()
    assert last_number("9," * 200_000) is None
    assert last_number("9" * MAX_DIGITS) == Decimal("9" * MAX_DIGITS)


def test_equal_values_match_as_numbers_and_not_as_text():
    assert is_match("number", "so 1,234.50", "#### 1234.5")
    assert is_match("number", "-0", "0.00")
    assert not is_match("number", "-3", "3")
    assert not is_match("number", "many", "#### 3")
    assert not is_match("exact", "72.0", "72")
    assert not is_match("exact", "a  b", "a b")


TABLE = [b"", b"", *(bytes([i]) for i in range(2, 128))]  # id 0 ends a turn, 1 begins one


def turn(text):
    return [1, *text.encode(), 0]


@pytest.mark.parametrize("after", [[], [10], [0, 10], [1, 1]])
def test_the_last_trained_turn_ends_before_its_end_and_what_follows_it(after):
    ids = np.array([*turn("a?"), *turn("b"), *turn("c?"), *turn("d e"), *after])
    weights = np.zeros(len(ids))
    weights[5:7] = 1
    weights[-4 - len(after) :] = 0.5
    start, text = last_turn(ids, weights, (0,), TABLE)
    assert (ids[:start].tolist(), text) == ([*turn("a?"), *turn("b"), *turn("c?"), 1], "d e")
    weights[start:] = 0
    assert last_turn(ids, weights, (0,), TABLE) == (5, "b")
    assert last_turn(ids, np.zeros(len(ids)), (0,), TABLE) == (0, "")


def test_turns_without_text_between_them_are_separate():
    ids = np.array([*b"ab", 0, *b"cd", 0])
    assert last_turn(ids, np.ones(6), (0,), TABLE) == (3, "cd")
    assert last_turn(np.array([1, 0, 0]), np.ones(3), (0,), TABLE) == (0, "")


def test_the_standard_error_is_that_of_the_means_by_prompt():
    matches = np.array([[True, True], [False, False], [True, False], [False, False]])
    result = verify.score(matches, np.ones((4, 2), bool))
    assert (result.exact_match, result.ended_share) == (0.375, 1.0)
    assert math.isclose(result.standard_error, np.std([1, 0, 0.5, 0], ddof=1) / 2)
    assert verify.score(matches[:1], matches[:1]).standard_error is None
    assert (result.marked_share, verify.score(matches, matches, matches).marked_share) == (
        None,
        0.375,
    )
