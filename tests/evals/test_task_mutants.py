"""Seeded faults of tasks: each is caught by a named test.

Those of the packing of rows are in tests/recipes/use/test_tasks.py, with a model.
"""

import pytest

from jaxlm.evals import statistics
from jaxlm.evals.tasks import items, requests, results
from jaxlm.recipes.compare import tasks as comparison
from tests.evals import test_statistics, test_tasks
from tests.mutation import mutate
from tests.recipes.compare import test_tasks as test_comparison


def border(folder, capsys):
    for context, answer, scored in (("a", " yes", b" yes"), ("a\u00fc", "\u00fcb", b"\xc3\xbcb")):
        test_tasks.test_scoring_begins_at_the_token_with_the_first_byte_of_the_answer(
            context, answer, scored, False
        )


def examples(folder, capsys):
    test_tasks.test_an_item_is_asked_with_examples_that_its_id_draws(folder)


def chat(folder, capsys):
    test_tasks.test_a_chat_makes_the_context_a_turn_and_scores_the_whole_answer(folder)


def picks(folder, capsys):
    test_tasks.test_the_pick_of_each_normalization_is_that_of_its_formula(folder)


def crossings(folder, capsys):
    test_tasks.test_every_item_whose_border_is_inside_a_token_is_counted(folder)


def windows(folder, capsys):
    test_tasks.test_windows_of_a_text_score_each_token_once(17)


def coverage(folder, capsys):
    test_statistics.test_95_of_100_clustered_intervals_contain_the_share()


def paired_coverage(folder, capsys):
    test_statistics.test_95_of_100_intervals_of_a_paired_difference_contain_it(1)


def pairing(folder, capsys):
    answers = test_comparison.drawn_answers()
    test_comparison.test_items_are_paired_by_id_in_any_order(folder, capsys, answers)


def p_values(folder, capsys):
    test_comparison.test_p_values_are_adjusted_for_the_number_of_tasks(folder, capsys)


def limits(folder, capsys):
    test_tasks.test_a_limit_draws_by_ids_and_keeps_the_order(folder)


# Name: the object, its function, the text that changes, the text of the fault, and the check.
MUTANTS = {
    "scoring begins one token late": (
        *(requests, "_border", "return index, bool", "return index + 1, bool"),
        border,
    ),
    "scoring begins one token early": (
        *(requests, "_border", "return index, bool", "return index - 1, bool"),
        border,
    ),
    "the border is of characters": (
        *(requests, "_border", "len(text[:border].encode())", "border"),
        border,
    ),
    "no start token": (
        *(requests, "encode", "before = tokenizer.before or", "before = () and"),
        border,
    ),
    "two start tokens": (requests, "encode", "(*before, *ids)", "(*before, *before, *ids)", border),
    "two start tokens of a chat": (
        *(requests, "encode_chats", "if tokenizer.before and", "if False and"),
        chat,
    ),
    "crossings are not counted": (
        *(requests, "_border", "bool(starts[index] < place)", "False"),
        crossings,
    ),
    "an item is its own example": (
        *(requests.Prompter, "_drawn", "if each.id != item.id", "if True"),
        examples,
    ),
    "examples do not depend on the id": (
        *(requests.Prompter, "_drawn", "drawn(item.id,", "drawn('',"),
        examples,
    ),
    "bytes are characters": (results, "_choice", "len(each.encode())", "len(each)", picks),
    "tokens are bytes": (results, "_choice", "zip(nats, tokens,", "zip(nats, sizes,", picks),
    "bytes are tokens": (
        *(results, "_choice", "n / size for n, size in zip(nats, sizes,", "n / size for n, size in"
          " zip(nats, tokens,"),
        picks,
    ),
    "the sign of the PMI": (results, "_choice", "n - m for", "n + m for", picks),
    "the least likely choice": (results, "_choice", "min(range", "max(range", picks),
    "windows score a token twice": (
        *(requests, "windows", "ids[start : start + slots + 1], 1", "ids[start - 1 : start + "
          "slots], 1"),
        windows,
    ),
    "pairs by place": (
        *(comparison, "pair", "result_b.samples[item]) for item in shared", "other) for item, other"
          " in zip(shared, result_b.samples.values(), strict=True)"),
        pairing,
    ),
    "errors that are not clustered": (
        *(statistics, "_clustered", "np.bincount(index_n, (value_n - mean) * weight_n)", "(value_n"
          " - mean) * weight_n"),
        coverage,
    ),
    "intervals of separate samples": (
        *(statistics, "_agresti_min", "changed - (rises - falls) ** 2 / size", "items / 2"),
        paired_coverage,
    ),
    "a test with one side": (statistics, "mcnemar", "2 * float", "float", p_values),
    "p-values that are not adjusted": (
        *(statistics, "holm", "np.arange(len(order), 0, -1)", "1"),
        p_values,
    ),
    "the first items of the file": (
        *(items.StoredItems, "limited", 'np.argsort(self._digests, kind="stable")', "np.arange("
          "len(self))"),
        limits,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_fault_is_caught(name, tmp_path, monkeypatch, capsys):
    owner, function, old, new, check = MUTANTS[name]
    (tmp_path / "without").mkdir()
    check(tmp_path / "without", capsys)
    mutate(monkeypatch, owner, function, old, new)
    (tmp_path / "with").mkdir()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(tmp_path / "with", capsys)
