"""Task files, items, the border by bytes, packing, and draws of examples."""

import ast
import dataclasses
import datetime
import json
import math
import random
import textwrap
import tracemalloc
from pathlib import Path

import pytest

from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import chat_templates, sandbox
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.documents import Corpus
from jaxlm.data.tokenizer import Bytes, Tokenizer
from jaxlm.evals import samples
from jaxlm.evals.tasks import answers, config, items, packing, requests, results, synthetic
from jaxlm.evals.tasks.requests import Examples, Prompter, ScoringRequest
from jaxlm.generate.sampler import Continuation

CHOICE = """
kind = "choice"
items = "q.jsonl"
id = "{{ key }}"
group = "{{ text }}"
context = "Q: {{ q }}\\nA:"
choices = "options"
answer = "right if right is number else options.index(right)"
"""
RECORDS = [
    {
        "key": f"k{n}",
        "q": f"what is {n}",
        "options": ["no", f"it is {n}", "x"],
        "right": f"it is {n}",
        "text": n % 3,
    }
    for n in range(9)
]


def task_in(folder, text=CHOICE, records=RECORDS):
    (folder / "q.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (folder / "q.toml").write_text(text)
    return config.read(folder / "q.toml")


def text_of(request):
    return Bytes().decode(request.ids[: request.begin]), Bytes().decode(
        request.ids[request.begin :]
    )


def test_an_item_is_asked_with_examples_that_its_id_draws(tmp_path):
    task = task_in(tmp_path)
    every = items.read(task, task.file)
    ask = Prompter(task, Bytes(), Examples(every, 2)).questions
    first, *_ = questions = ask(every)
    assert [each.shots for each in questions] == [ask([item])[0].shots for item in every]
    assert all(len(set(q.shots)) == 2 and q.item.id not in q.shots for q in questions)
    assert len({each.shots for each in questions}) > 5
    solved = "".join(f"Q: what is {n[1:]}\nA: it is {n[1:]}\n\n" for n in first.shots)
    assert [text_of(each) for each in first.requests] == [
        (f"{solved}Q: what is 0\nA:", f" {choice}") for choice in ("no", "it is 0", "x")
    ]
    assert [text_of(each) for each in first.unconditional] == [
        ("", " no"),
        ("", " it is 0"),
        ("", " x"),
    ]
    lettered = Prompter(task, Bytes(), form="letters").questions(every[:1])[0]
    assert text_of(lettered.requests[1]) == (
        "Q: what is 0\nA:\nA. no\nB. it is 0\nC. x\nAnswer:", " B"
    )  # fmt: skip
    assert lettered.unconditional == ()


class Merging(Tokenizer):
    """Bytes and three longer tokens, the longest first."""

    def __init__(self):
        super().__init__([*Bytes().table, b": ", b" yes", "\u00fc".encode() + b"b"])

    def encode_many(self, texts):
        return [self._ids(text.encode()) for text in texts]

    def _ids(self, text):
        ids = []
        while text:
            best = max((t for t in self.table if t and text.startswith(t)), key=len)
            ids.append(self.table.index(best))
            text = text[len(best) :]
        return ids

    def serialize(self):
        return b"merging"


@pytest.mark.parametrize(
    ("context", "answer", "scored", "spans"),
    [
        ("a", " yes", b" yes", False),
        ("a:", " yes", b": yes", True),  # the token of the colon also holds the space
        ("a", "b", b"b", False),
        ("\u00fc", "b", "\u00fcb".encode(), True),
        ("a\u00fc", "\u00fcb", "\u00fcb".encode(), False),
        ("", "yes", b"yes", False),
    ],
)
def test_scoring_begins_at_the_token_with_the_first_byte_of_the_answer(
    context, answer, scored, spans
):
    tokenizer = Merging()
    (request,) = requests.encode(tokenizer, [(context, answer)])
    assert b"".join(tokenizer.table[i] for i in request.ids[request.begin :]) == scored
    assert request.spans_border == spans
    assert request.ids[0] == tokenizer.before[0]


def test_every_item_whose_border_is_inside_a_token_is_counted(tmp_path):
    text = CHOICE.replace("delimiter", "#").replace("A:", "A")
    task = task_in(tmp_path, f'delimiter = ": "\n{text}')
    questions = Prompter(task, Merging()).questions(items.read(task, task.file))
    task = task_in(tmp_path)
    crossing = Prompter(task, Merging()).questions(items.read(task, task.file))
    for each, expected in ((questions, 0), (crossing, len(RECORDS))):
        lines = [results.sample(task, question, [1.0, 2.0, 3.0], []) for question in each]
        assert results.summary(lines)["spans_border"] == expected
    # The token of the border is scored, and so is all of every choice.
    for question in crossing:
        for choice, request in zip(question.choices, question.requests, strict=True):
            scored = b"".join(Merging().table[i] for i in request.ids[request.begin :])
            assert scored.decode() == f": {choice}"


def test_a_chat_makes_the_context_a_turn_and_scores_the_whole_answer(tmp_path):
    tokenizer = Bytes()
    template = chat_templates.chatml(tokenizer)
    chat = ChatTokenizer(tokenizer, template)
    task = task_in(tmp_path)
    every = items.read(task, task.file)
    prompter = Prompter(task, tokenizer, chat=chat)
    (question,) = prompter.questions(every[:1])
    prompt = tuple(chat.encode("Q: what is 0\nA:"))
    assert [each.ids[: each.begin] for each in question.requests] == [prompt] * 3
    assert text_of(question.requests[1])[1] == "it is 0"
    # Examples with their answers are in the turn, and there the delimiter is.
    (question,) = Prompter(task, tokenizer, Examples(every, 1), chat=chat).questions(every[:1])
    number = question.shots[0][1:]
    prompt = f"Q: what is {number}\nA: it is {number}\n\nQ: what is 0\nA:"
    assert list(question.requests[1].ids) == [*chat.encode(prompt), *tokenizer.encode("it is 0")]
    twice = dataclasses.replace(template, source="{{ bos_token }}" + template.source)
    with pytest.raises(DataError, match="two start tokens"):
        requests.encode_chats(ChatTokenizer(tokenizer, twice), tokenizer, [("a", "b")])


@pytest.mark.parametrize(
    ("extract", "match", "text", "metrics"),
    [
        ("", "exact", " seven\n", {"exact_match": 1.0}),
        ("", "number", "so it is 7.0", {"exact_match": 0.0}),
        (
            "is (\\w+)",
            "exact",
            "it is six, no, it is seven",
            {"exact_match": 1.0, "extracted": 1.0},
        ),
        ("is (\\w+)", "exact", "seven", {"exact_match": 0.0, "extracted": 0.0}),
    ],
)
def test_the_extracted_part_of_an_answer_is_compared(extract, match, text, metrics):
    kind = config.Answer(context="", answer="", extract=extract, match=match)
    answer = Continuation("", [7], text, None, "length")
    assert answers.judged(kind, answer, "seven")["metrics"] == metrics


def test_drawn_answers_give_unbiased_estimates_of_pass_at_k():
    kind = config.Answer(context="", answer="", samples=12)
    texts = ["7"] * 3 + ["8"] * 9
    greedy, *drawn = (Continuation("", [7], text, None, "length") for text in ["8", *texts])
    line = answers.judged(kind, greedy, "7", drawn=drawn)
    assert line["metrics"] == {
        "exact_match": 0.0,
        "pass_at_1": pytest.approx(3 / 12),
        "pass_at_10": 1.0,  # 9 wrong ones are fewer than 10
        "pass_at_12": 1.0,
    }
    assert [each["right"] for each in line["drawn"]] == [True] * 3 + [False] * 9
    programs = answers.judged(kind, greedy, "7", ("x = ", "assert x == 7"), drawn[2:4])
    assert [each["outcome"] for each in programs["drawn"]] == ["passed", "AssertionError"]
    assert programs["metrics"]["pass_at_2"] == 1.0


@pytest.mark.parametrize(
    ("line", "why"),
    [("samples = -1", "must be from 0 to 1000"), ("temperature = 0", "must be positive")],
)
def test_wrong_settings_of_drawn_answers_are_refused(line, why):
    text = 'kind = "answer"\nitems = "a.jsonl"\ncontext = "a"\nanswer = "b"\n'
    assert config.parsed(f"{text}temperature = 2", Path("a.toml")).kind.temperature == 2.0
    with pytest.raises(DataError) as error:
        config.parsed(text + line, Path("a.toml"))
    assert why in error.value.why


def test_memory_holds_no_texts_of_items_and_samples(tmp_path):
    peaks = []
    for count in (200, 2000):
        records = [{"key": f"k{n}", "text": f"{n} {'word ' * 400}"} for n in range(count)]
        text = 'kind = "text"\nitems = "q.jsonl"\nid = "{{ key }}"'
        task = task_in(tmp_path, text, records=records)
        del records
        tracemalloc.start()
        every = items.StoredItems(task, task.file)
        items.digest(every)
        with samples.SampleFile(tmp_path / f"{count}.jsonl") as file:
            for item in every:
                shared = {"id": item.id, "group": item.id, "weight": 1.0}
                file.append([{**shared, "text": item.gold, "metrics": {"bits_per_byte": 1.0}}])
            assert results.summary(file.each())["items"] == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100 * 1800  # bytes; the texts have 3.6 million


def test_an_end_token_is_in_front_of_a_text_only_if_nothing_else_is():
    tokenizer = Merging()
    tokenizer.before = ()
    alone, after = requests.encode(tokenizer, [("", "yes"), ("a", "b")])
    assert (alone.ids[0], alone.begin, after.begin) == (tokenizer.eos, 1, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"options": ["it is 0"] * 2}, "two choices are equal"),
        ({"options": ["", "it is 0"]}, "choice 0 is empty"),
        ({"right": "no such"}, "is not in list"),
        ({"options": "it is 0"}, "not a list of texts"),
        ({"key": "k1"}, "occurs twice"),
        ({"q": "a" * (items.MAX_BYTES + 1)}, "at most 1,048,576"),
        ({"q": "a\ud800"}, "lone surrogate"),
        ({"options": ["it is 0"]}, "2 to 26"),
        ({"right": 7}, "must be an index below 3 or a choice"),
        ({"right": 3}, "must be an index below 3 or a choice"),
        ({"right": -1}, "must be an index below 3 or a choice"),
    ],
)
def test_an_item_that_makes_no_question_is_named_by_its_line(change, why, tmp_path):
    task = task_in(tmp_path, records=[RECORDS[0] | change, *RECORDS[1:]])
    with pytest.raises(DataError) as error:
        items.read(task, task.file)
    assert why in error.value.why
    assert "q.jsonl, line " in error.value.where


def test_items_that_make_no_question_are_left_out_and_counted_if_the_task_says_so(tmp_path):
    records = [RECORDS[0] | {"right": "no such"}, *RECORDS[1:]]
    task = task_in(tmp_path, f'invalid = "skip"\n{CHOICE}', records=records)
    valid = items.StoredItems(task, task.file)
    assert (len(valid), valid.left_out) == (len(RECORDS) - 1, 1)
    task = task_in(tmp_path, f'invalid = "skip"\n{CHOICE}', records=records[:1])
    with pytest.raises(DataError, match="all 1 records make no question") as error:
        items.read(task, task.file)
    assert "is not in list" in error.value.why
    assert error.value.fix == "correct the item"
    with pytest.raises(DataError, match="it has no records") as error:
        items.read(task_in(tmp_path, records=[]), task.file)
    assert error.value.fix == "write one record a line"


@pytest.mark.parametrize(
    ("name", "better"),
    [("optoins", "options in place of optoins"), ("y", "its fields are key, q, options, right,")],
)
def test_a_template_of_a_field_that_the_record_lacks_is_to_be_corrected(name, better, tmp_path):
    text = CHOICE.replace('"options"', f'"{name}"')
    task = task_in(tmp_path, text)
    with pytest.raises(DataError) as error:
        items.read(task, task.file)
    first, second = error.value.fix.splitlines()
    assert first.startswith(f"correct the template choices: {better}")
    assert second == items.SKIP
    task = task_in(tmp_path, f'invalid = "skip"\n{text}')
    with pytest.raises(DataError, match="all 9 records make no question") as error:
        items.read(task, task.file)
    assert f"'{name}' is undefined" in error.value.why
    assert error.value.fix == first


def test_an_empty_reference_and_two_equal_texts_make_no_question(tmp_path):
    written = 'kind = "answer"\nitems = "q.jsonl"\ncontext = "{{ q }}"\nanswer = "{{ right }}"'
    pair = 'kind = "pair"\nitems = "q.jsonl"\ngood = "{{ q }}"\nbad = "what is 0"'
    for text, why in ((written, "is empty"), (pair, "two choices are equal")):
        task = task_in(tmp_path, text, records=[RECORDS[0] | {"right": ""}])
        with pytest.raises(DataError, match="an item of a task is not valid") as error:
            items.read(task, task.file)
        assert why in error.value.why
        assert 'invalid = "skip"' in error.value.fix


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
    ],
)
def test_a_template_without_end_is_stopped_at_its_limits(template, tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    task = task_in(tmp_path, CHOICE.replace("{{ q }}", template, 1))
    with pytest.raises(DataError) as error:
        items.read(task, task.file)
    whole = f"{error.value.what} {error.value.why}"
    assert "cannot be rendered" in whole or "the template context fails" in whole


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("{{ q }}", "{{ nothing }}", "'nothing' is undefined"),
        ("{{ q }}", "{{ q.__class__.__mro__ }}", "unsafe"),
        ("{{ q }}", "{% for i in range(99999999) %}{% endfor %}", "Range too big"),
        ("{{ q }}", "{{ q", "expected token"),
        ("context", "contxt", "the nearest setting is context"),
        ('"options"', "3", "choices is 3, and must be a list of texts or text"),
        ("choice", "choise", "must be one of choice, answer, pair, text"),
        ("answer =", "# answer =", "it has no answer"),
        ("kind", "name = 'a/b'\nkind", "may have letters"),
        ("kind", "extract = '('\nkind", "extract is not a setting"),
        ("[", "[", ""),
    ],
)  # fmt: skip
def test_a_wrong_task_file_is_refused(old, new, why, tmp_path):
    if not why:
        text, why = "kind = [", "it is not TOML"
    else:
        text = CHOICE.replace(old, new, 1)
    with pytest.raises(DataError) as error:
        task = task_in(tmp_path, text)
        items.read(task, task.file)
    assert why in error.value.why


YAML = r"""
task: q
dataset_path: json
dataset_kwargs: {data_files: {test: q.jsonl, train: shots.jsonl}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "Q: {{ q }}\nA:"
doc_to_choice: "{{options}}"
doc_to_target: "{{options.index(right)}}"
metric_list: [{metric: acc}]
metadata: {version: 1.0}
"""


def yaml_task(folder, text):
    task_in(folder)
    (folder / "q.yaml").write_text(text)
    return config.read(folder / "q.yaml")


def test_yaml_of_lm_eval_is_the_task_that_toml_describes(tmp_path):
    task, expected = yaml_task(tmp_path, YAML), task_in(tmp_path)
    kind = dataclasses.replace(expected.kind, examples="shots.jsonl")
    index = "(options.index(right)) | int if ((options.index(right)) | string).isdigit()"
    assert task.kind == dataclasses.replace(kind, answer=f"{index} else (options.index(right))")
    assert (task.name, task.version, task.items) == ("q", 1, "q.jsonl")
    of_task, of_expected = (items.read(each, each.file) for each in (task, expected))
    assert [each.context for each in of_task] == [each.context for each in of_expected]
    written = YAML.replace("multiple_choice", "generate_until").replace(
        'doc_to_choice: "{{options}}"', 'generation_kwargs: {until: ["\\n"], do_sample: false}'
    )
    kind = yaml_task(tmp_path, written.replace('"{{options.index(right)}}"', "right")).kind
    assert (kind.answer, kind.stop, kind.max_tokens) == ("{{ right }}", ("\n",), 256)


@pytest.mark.parametrize(
    ("target", "answer"),
    [("right", 0), ("{{right}}", 1), ("{{ right }}", 1), ("{{ right | string }}", 1), (2, 2)],
)
def test_digits_of_a_template_are_the_index_and_those_of_a_field_the_choice(
    target, answer, tmp_path
):
    """lm-eval reads them so. The first choice is 1, and the second one has index 1."""
    text = YAML.replace('"{{options.index(right)}}"', f'"{target}"' if answer != 2 else "2")
    task = yaml_task(tmp_path, text)
    record = {"q": "?", "options": ["1", "2", "3"], "right": "1"}
    (tmp_path / "q.jsonl").write_text(json.dumps(record))
    assert [each.answer for each in items.read(task, task.file)] == [answer]


GENERATED = YAML.replace("multiple_choice", "generate_until").replace(
    'doc_to_choice: "{{options}}"', "generation_kwargs: {do_sample: false, top_p: 1}"
)


@pytest.mark.parametrize(
    ("regex", "text", "expected"),
    [
        (r"""regex_pattern: "A: (\\w+)" """, "A: 5\nB\nA: 7", "5"),
        (r"""regex_pattern: "A: (\\w+)", group_select: -1""", "A: 5\nB\nA: 7", "7"),
        (r"""regex_pattern: "[0-9]+" """, "so 5 and 7", "5"),
        (r"""regex_pattern: "(?i)a: (?P<a>x|xy)(?P=a)" """, "A: XY a: xyxy A: xx", "xy"),
        ("fallback: '-'", "9 #### -5, #### 7", "-5,"),
        (r"""regex_pattern: "(-?[0-9.]{2,})|(-?[0-9]+)", group_select: -1""", "10 or 5", "5"),
        (r"""regex_pattern: "(-?[0-9.]{2,})|(-?[0-9]+)" """, "5 or 10", "5"),
    ],
)
def test_a_regex_of_lm_eval_takes_the_match_that_lm_eval_takes(regex, text, expected, tmp_path):
    """The first match by default, and of several groups the first with a text."""
    filters = f"filter_list: [{{name: a, filter: [{{function: regex, {regex}}}]}}]\n"
    kind = yaml_task(tmp_path, GENERATED + filters).kind
    assert answers.extracted(text, kind.extract) == expected
    assert answers.extracted("none", kind.extract) is None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("top_p: 1", "num_beams: 4", "does not read generation_kwargs.num_beams"),
        ("{data_files", "{field: data, data_files", "does not read dataset_kwargs.field"),
        (
            "metric_list",
            "filter_list: [{filter: [{function: regex, group_select: 2}]}]\nmetric_list",
            "group_select: 2",
        ),
    ],
)
def test_settings_of_lm_eval_that_change_answers_are_read_or_refused(old, new, why, tmp_path):
    with pytest.raises(DataError) as error:
        yaml_task(tmp_path, GENERATED.replace(old, new, 1))
    assert why in error.value.why


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"Q: {{ q }}', "!function utils.text  # ", "it has code, which is not run"),
        ("metric_list", "process_docs: x\nmetric_list", "does not read process_docs"),
        ("dataset_path: json", "dataset_path: allenai/ai2_arc", "no set is downloaded"),
        ("multiple_choice", "loglikelihood", "output_type is 'loglikelihood'"),
        ('"{{options}}"', "'{{a}} {{b}}'", "one expression in braces"),
        ("q.jsonl", "3", "not a file for each split"),
    ],
)
def test_v18_yaml_with_code_or_a_set_of_the_hub_is_refused(old, new, why, tmp_path):
    with pytest.raises(DataError) as error:
        yaml_task(tmp_path, YAML.replace(old, new, 1))
    assert why in error.value.why


def solved(name, question):
    words = question[5:-1].split()
    match name:
        case "sums":
            return str(sum(map(int, question.split(" + "))))
        case "copy":
            return " ".join(words)
        case "sort":
            return " ".join(sorted(words))
        case "dates":
            begin, days = datetime.date.fromisoformat(question[:10]), int(question.split()[2])
            return str(begin + datetime.timedelta(days))
        case "retrieval":
            *lines, last = question.splitlines()
            return dict(line.split(" = ") for line in lines)[last]
    while any(pair in question for pair in ("()", "[]", "{}")):
        question = question.replace("()", "").replace("[]", "").replace("{}", "")
    return {"(": ")", "[": "]", "{": "}"}[question[-1]]


@pytest.mark.parametrize("name", [name for name in synthetic.TASKS if name != "functions"])
def test_a_made_task_has_the_right_answers_and_the_same_items_each_time(name):
    task = config.read(Path(f"made:{name}"))
    every = items.read(task, task.file)
    assert len(every) == synthetic.ITEMS
    assert list(synthetic.records(name)) == list(synthetic.records(name))
    assert all(item.gold == solved(name, item.record["q"]) for item in every)
    assert len({item.subset for item in every}) > 2


def test_functions_are_those_of_files_that_no_run_on_the_library_reads():
    task = config.read(Path("made:functions"))
    every = items.read(task, task.file)
    assert len(every) > 100
    assert {item.subset for item in every} == {"1 line", "2 to 4 lines", "5 to 10 lines"}
    trained = Corpus.find(("stdlib:train",), "text", "data.train")
    library = "\n".join(file.read_text(errors="ignore") for file in trained.files)
    assert sum(item.record["q"] in library for item in every) < 0.02 * len(every)
    for item in every:
        body = item.choices[item.answer]
        ast.parse(textwrap.dedent(item.record["q"] + body))
        assert item.choices.count(body) == 1


def test_a_made_task_of_another_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError) as error:
        config.read(Path("made:sum"))
    assert "made:sums" in error.value.fix


def test_a_limit_draws_by_ids_and_keeps_the_order(tmp_path):
    task = task_in(tmp_path)
    every = items.StoredItems(task, task.file)
    drawn = every.limited(4)
    assert len(drawn) == 4
    assert drawn.tolist() == sorted(drawn)
    some = {every[n].id for n in drawn}
    turned = items.StoredItems(task_in(tmp_path, records=RECORDS[::-1]), task.file)
    assert {turned[n].id for n in turned.limited(4)} == some
    assert items.digest(every) != items.digest(turned)
    assert every.limited(None).tolist() == list(range(len(every)))


def test_rows_hold_every_request_once_and_none_is_longer():
    lengths = [(n * 7919) % 60 + 1 for n in range(200)]
    sizes = [(length, length // 2) for length in lengths]
    rows = packing.packed(sizes, packing.RowShape(64, 64))
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
    assert len(rows) < 1.1 * sum(lengths) / 64
    rows = packing.packed(sizes, packing.RowShape(64, 30))
    assert sorted(index for row in rows for index in row) == list(range(200))
    assert all(sum(sizes[index][1] for index in row) <= 30 for row in rows)


def test_the_shape_of_rows_wastes_few_slots():
    def shape_of(length, count, limit=1024, parts=1):
        sizes = packing.Sizes()
        requests = [
            [ScoringRequest(tuple(range(length + 1)), length - 9, False)] for _ in range(count)
        ]
        slots = sum(sizes.add(packing.groups(each, 1024, is_shared=True)) for each in requests)
        assert slots == count * length
        return sizes.shape(limit, parts)

    assert shape_of(300, 1000) == (1024, 64)  # three in a row
    assert shape_of(30, 1000) == (512, 256)  # 17 in a row
    assert shape_of(300, 1) == (512, 32)
    assert shape_of(900, 1000) == (1024, 32)
    assert shape_of(300, 1000, limit=400) == (400, 32)
    assert shape_of(300, 1000, parts=2) == (1024, 64)


@pytest.mark.parametrize("count", [1, 8, 9, 16, 17, 40])
def test_windows_of_a_text_score_each_token_once(count):
    text = ScoringRequest(tuple(range(count + 1)), 1, False)
    parts = requests.windows(text, 8)
    assert [i for each in parts for i in each.ids[each.begin :]] == list(text.ids[1:])
    assert all(len(each.ids) <= 9 for each in parts)


def test_the_pick_of_each_normalization_is_that_of_its_formula(tmp_path):
    options = ["\u00fc\u00fc\u00fc", "it is 0", "x"]  # 6 bytes, 3 characters, 4 tokens
    task = task_in(tmp_path, records=[RECORDS[0] | {"options": options}])
    (question,) = Prompter(task, Merging()).questions(items.read(task, task.file))
    tokens = [each.tokens for each in question.requests]
    draw = random.Random(0)
    for _ in range(40):
        nats, alone = ([draw.uniform(1, 9) for _ in options] for _ in range(2))
        picks = results.sample(task, question, nats, alone)["picks"]
        scores = {
            "accuracy": nats,
            "accuracy_bytes": [nats[n] / len(options[n].encode()) for n in range(3)],
            "accuracy_tokens": [nats[n] / tokens[n] for n in range(3)],
            "accuracy_pmi": [nats[n] - alone[n] for n in range(3)],
        }
        assert picks == {name: scores[name].index(min(scores[name])) for name in scores}


def test_choices_are_picked_by_every_normalization(tmp_path):
    task = task_in(tmp_path)
    question = Prompter(task, Bytes()).questions(items.read(task, task.file)[:1])[0]
    line = results.sample(task, question, [4.0, 9.0, 5.0], [1.0, 8.5, 1.0])
    assert line["picks"] == {
        "accuracy": 0,  # 4
        "accuracy_bytes": 1,  # 9 / 7
        "accuracy_tokens": 1,  # 9 / 8
        "accuracy_pmi": 1,  # 0.5
    }
    assert line["metrics"]["accuracy"] == 0.0
    assert line["metrics"]["accuracy_bytes"] == 1.0
    assert results.is_finite(line)
    assert not results.is_finite(results.sample(task, question, [4.0, math.nan, 5.0], []))
    figures = results.summary([line, line | {"id": "b", "group": "b"}])
    assert figures["metrics"]["accuracy_pmi"]["chance"] == pytest.approx(1 / 3)
