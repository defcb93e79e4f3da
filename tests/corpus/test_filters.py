"""Removals of each rule, just within and just beyond its threshold, by the command."""

from pathlib import Path

import pytest

from jaxlm.cli.main import main
from tests.corpus.recipes import kept, lines, prose, removed, run, write_lines


def reasons(capsys, texts, *words, **fields):
    """Why each text was removed; `kept` where it was not."""
    rows = [{"text": text, **fields} if isinstance(text, str) else text for text in texts]
    write_lines(Path("in/a.jsonl"), rows)
    run(capsys, "--config.source=in/a.jsonl", "--config.dedup=()", *words)
    fate = {row["record"]: name for name, removals in removed().items() for row in removals}
    return [fate.get(number, "kept") for number in range(1, len(rows) + 1)]


def test_normalised_text_has_one_form(capsys):
    text = "cafe\u0301\r\nnext \t\u2028last\u200b\x07\n\n\n\n\n\nend\n\n\n"
    assert reasons(capsys, [text, "as it is"], "--config.stages=normalize") == ["kept", "kept"]
    assert kept() == ["caf\u00e9\nnext\nlast\n\n\nend\n", "as it is"]


def test_mojibake_is_undone_and_what_is_right_stays(capsys):
    meant = "\u201cna\u00efve\u201d caf\u00e9s cost 3 \u20ac"
    broken = meant.encode().decode("cp1252", errors="ignore")
    reasons(capsys, [f"fine\n{broken}", meant], "--config.stages=mojibake")
    assert kept()[1] == meant
    assert "caf\u00e9s cost 3 \u20ac" in kept()[0]
    assert kept()[0].startswith("fine\n")


def test_length_is_between_two_limits(capsys):
    outcome = reasons(
        capsys,
        ["a" * 9, "a" * 10, "a" * 20, "a" * 21],
        *("--config.stages=length", "--config.length.least=10", "--config.length.most=20"),
    )
    assert outcome == ["length.short", "kept", "kept", "length.long"]


WORDS = prose(1, words=96).replace("\n", " ").split()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" ".join(WORDS), "kept"),
        (" ".join(WORDS[:49]), "gopher.words"),
        (" ".join(WORDS[:50]), "kept"),
        (" ".join(["an"] * 60 + ["the", "of"]), "gopher.word_length"),
        (" ".join(["extraordinarily"] * 60 + ["the", "of"]), "gopher.word_length"),
        (" ".join([*WORDS, *["#tag"] * 12]), "gopher.symbols"),
        (" ".join([*WORDS, *["#tag"] * 9]), "kept"),
        (" ".join([*WORDS, *["so..."] * 12]), "gopher.symbols"),
        ("\n".join(f"- {' '.join(WORDS)}" for _ in range(10)), "gopher.bullets"),
        ("\n".join([*(f"- {' '.join(WORDS)}" for _ in range(9)), "last"]), "kept"),
        (
            "\n".join([*(f"{' '.join(WORDS)}..." for _ in range(4)), *[" ".join(WORDS)] * 6]),
            "gopher.ellipses",
        ),
        ("\n".join([*(f"{' '.join(WORDS)}..." for _ in range(3)), *[" ".join(WORDS)] * 7]), "kept"),
        (" ".join([*WORDS[:80], *["12345"] * 21]), "gopher.alphabetic"),
        (" ".join([*WORDS[:80], *["12345"] * 20]), "kept"),
        (" ".join(["stone", "river", "water"] * 30), "gopher.stop_words"),
        (" ".join(["stone", "river", "water"] * 30 + ["That,", "with."]), "kept"),
        (" ".join(["stone", "river", "water"] * 30 + ["that", "that"]), "gopher.stop_words"),
    ],
)
def test_gophers_rules_hold_at_their_thresholds(capsys, text, reason):
    assert reasons(capsys, [text], "--config.stages=gopher") == [reason]


def test_gophers_rules_of_repetition_name_what_is_repeated(capsys):
    lines_ = [prose(n, words=12) for n in range(40)]
    texts = [
        "\n".join(lines_),
        "\n".join([*lines_[:20], *["ok"] * 12]),
        "\n".join([*lines_[:10], *lines_[:3]]),
        "\n\n".join([*("\n".join(lines_[at : at + 4]) for at in range(0, 40, 4)), *["ok"] * 6]),
        " ".join([*" ".join(lines_[:10]).split(), *["buy now"] * 60]),
        " ".join(lines_[:10] + [f"{lines_[0]} {word}" for word in ("red", "blue")]),
    ]
    outcome = reasons(capsys, texts, "--config.stages=repetition")
    assert outcome == [
        "kept",
        "repetition.lines",
        "repetition.line_characters",
        "repetition.paragraphs",
        "repetition.top_2_gram",
        "repetition.repeated_5_grams",
    ]


def test_shares_of_repetition_are_those_counted_by_hand():
    import numpy as np

    from jaxlm.corpus.filters.heuristics import repeated, top_share
    from jaxlm.corpus.ngrams import hashed

    assert repeated(["ab", "c", "ab", "ab"]) == (0.5, 4 / 7)
    words = "to be or not to be".split()
    sizes = np.array([len(word) for word in words])
    # "to be" stands twice: 8 of the 13 characters.
    assert top_share(hashed(words), sizes, 2, 13) == 8 / 13
    assert top_share(hashed(words), sizes, 3, 13) == 0


def test_the_rules_of_c4_cut_lines_and_then_pages(capsys):
    sentences = [f"{sentence}" for sentence in prose(1).split("\n")]
    page = "\n".join(sentences[:6])
    texts = [
        f"Menu\n{page}\nHome About\nPlease turn on JavaScript to see this.\n"
        "We uses cookies here.\nIt ends so...",
        f"{page}[1][citation needed]\nTrue [2] so far.",
        page.replace(".", ""),
        "\n".join(sentences[:4]),
        f"{page}\nvar a = {{}};",
        f"{page}\nLorem ipsum dolor sit amet.",
    ]
    outcome = reasons(capsys, texts, "--config.stages=c4")
    assert outcome == ["kept", "kept", "c4.sentences", "c4.sentences", "c4.brace", "c4.lorem_ipsum"]
    assert kept() == [page, f"{page}\nTrue  so far."]


def test_finewebs_rules_find_lists(capsys):
    sentences = prose(1, words=120).split("\n")
    texts = [
        "\n".join(sentences),
        "\n".join([sentences[0], *(line[:-1] for line in prose(2, words=120).split("\n"))]),
        "\n".join([*sentences[:3], *(f"Item number {n}." for n in range(7))]),
        "\n".join([*sentences, sentences[0], sentences[1]]),
    ]
    outcome = reasons(capsys, texts, "--config.stages=fineweb")
    assert outcome == [
        "kept",
        "fineweb.punctuation",
        "fineweb.short_lines",
        "fineweb.duplicated_lines",
    ]


def test_languages_are_told_apart(capsys):
    texts = [
        "The committee will meet again next week to discuss what should happen with the old "
        "bridge.",
        "Die Kinder spielen im Garten, w\u00e4hrend ihre Gro\u00dfmutter am Fenster sitzt und "
        "ein Buch liest.",
        "Les enfants jouent dans le jardin pendant que leur grand-m\u00e8re lit un livre "
        "pr\u00e8s de la fen\u00eatre.",
        "\u5b50\u4f9b\u305f\u3061\u306f\u5ead\u3067\u904a\u3093\u3067\u3044\u307e\u3059\u3002"
        "\u7956\u6bcd\u306f\u7a93\u306e\u305d\u3070"
        "\u3067\u672c\u3092\u8aad\u3093\u3067\u3044\u307e\u3059\u3002",
        "8471 2094 5561",
    ]
    words = ["--config.stages=language", "--config.language.keep=en,de"]
    assert reasons(capsys, texts, *words)[:4] == [
        "kept",
        "kept",
        "language.other",
        "language.other",
    ]
    assert [row["meta"]["language"] for row in lines("kept/*.jsonl")][:2] == ["en", "de"]
    assert removed()["language.other"][0]["detail"].startswith("fr, ")


def test_a_language_that_nobody_knows_is_refused(capsys):
    write_lines(Path("in/a.jsonl"), [{"text": "x"}])
    words = ["--config.source=in/a.jsonl", "--config.stages=language", "--config.language.keep=xx"]
    error = run(capsys, *words, code=2)["error"]
    assert "'xx'" in error["what"]


def test_code_must_parse_and_be_written_by_people(here, capsys):
    files = {
        "fine.py": "def f():\n    return '\\d'\n",
        "broken.py": "def f(:\n",
        "made.py": "# Generated by a tool.\nx = 1\n",
        "long.c": f"int a[] = {{{'1, ' * 400}}};\n",
        "wide.js": "\n".join([f"call({'a' * 110});"] * 5),
        "table.c": "{ },\n" * 50,
        "deep.py": "x = " + "(" * 3000 + ")" * 3000,
        "notes.txt": "def f(:\n",
    }
    (here / "in").mkdir()
    for name, text in files.items():
        (here / "in" / name).write_text(text)
    run(capsys, "--config.source=in/*", "--config.stages=code", "--config.dedup=()")
    outcome = {row["file"]: name for name, rows in removed().items() for row in rows}
    assert outcome == {
        "in/broken.py": "code.syntax",
        "in/made.py": "code.generated",
        "in/long.c": "code.long_line",
        "in/wide.js": "code.long_lines",
        "in/table.c": "code.alphanumeric",
        "in/deep.py": "code.long_line",
    }


def test_urls_of_a_list_are_removed_by_domain_and_by_start(here, capsys):
    (here / "list.txt").write_text("# mine\nbad.example\nhttps://Mixed.example/private/\n\n")
    urls = {
        "http://bad.example/": "urls.domain",
        "https://www.BAD.example:8080/x?y": "urls.domain",
        "http://notbad.example/": "kept",
        "http://bad.example.org/": "kept",
        "http://mixed.example/private/a": "urls.start",
        "http://mixed.example/public": "kept",
        "http://[broken": "urls.malformed",
        "": "kept",
    }
    rows = [{"text": "x", "url": url} for url in urls]
    outcome = reasons(
        capsys,
        [*rows, {"text": "no url"}],
        "--config.stages=urls",
        "--config.urls.blocked=list.txt",
    )
    assert outcome == [*urls.values(), "kept"]


def test_documents_that_share_words_with_an_evaluation_set_are_named(here, capsys):
    question = (
        "Which of the seven rivers in the story did the old miller cross before dawn on Tuesday?"
    )
    write_lines(here / "eval/quiz.jsonl", [{"text": "too short"}, {"text": question}])
    shared = "WHICH of the seven rivers, in the story, did the old miller cross"  # 13 words
    texts = [f"{prose(1)} {shared}! {prose(2)}", f"{prose(1)} {shared[:-6]} {prose(2)}", prose(3)]
    words = ["--config.stages=decontaminate", "--config.decontaminate.against=eval/*.jsonl"]
    assert reasons(capsys, texts, *words) == ["decontaminate.shared", "kept", "kept"]
    detail = removed()["decontaminate.shared"][0]["detail"]
    assert "eval/quiz.jsonl, record 2: which of the seven" in detail
    other = "And what did the second ferryman bring to the younger of both sisters that evening?"
    write_lines(here / "eval/story.jsonl", [{"text": other}])
    write_lines(here / "in/b.jsonl", [{"text": f"{other} {question}"}])
    source = ("--config.source=in/*.jsonl", "--config.dedup=()")
    report = run(capsys, *source, *words, "--out=both")
    assert report["notes"] == {
        "decontaminate: documents that share with eval/quiz.jsonl": 2,
        "decontaminate: documents that share with eval/story.jsonl": 1,
    }
    assert report["evaluations"] == {"records": 3, "too_short": 1}
    output = "1 of 3 records of the evaluation sets are shorter than a run of words"
    assert output in (here / "both/report.html").read_text()
    assert main(["data", "run", "--config=recipe.py", "--out=third", *source, *words]) == 0
    assert output in capsys.readouterr().out


def test_an_evaluation_set_that_cannot_be_compared_is_refused(here, capsys):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    words = [
        "--config.source=in/a.jsonl",
        "--config.stages=decontaminate",
        "--config.decontaminate.against=eval.jsonl",
    ]
    write_lines(here / "eval.jsonl", [{"question": "x"}])
    assert "record 1" in run(capsys, *words, code=65)["error"]["where"]
    write_lines(here / "eval.jsonl", [{"text": "one two three"}])
    error = run(capsys, *words, code=65)["error"]
    write_lines(here / "eval.jsonl", [{"text": "one two three four five"}])
    run(capsys, *words, error["fix"])


def test_a_changed_evaluation_set_is_another_recipe(here, capsys):
    write_lines(here / "in/a.jsonl", [{"text": prose(1)}])
    words = [
        "--config.source=in/a.jsonl",
        "--config.stages=decontaminate",
        "--config.decontaminate.against=eval.jsonl",
    ]
    write_lines(here / "eval.jsonl", [{"text": prose(2)}])
    run(capsys, *words)
    write_lines(here / "eval.jsonl", [{"text": prose(1)}])
    assert run(capsys, *words, code=2)["error"]["why"].endswith("side differ")


def test_every_stage_has_its_maker():
    from typing import get_args

    from jaxlm.corpus.config import StageName
    from jaxlm.corpus.stages import MAKERS

    assert set(MAKERS) == set(get_args(StageName))
