"""Collections: samples with scores, what is kept, resuming, and judges that fail."""

import itertools
import json
import os
import pty
import shutil
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jaxlm.cli.main import main
from jaxlm.data import preferred
from jaxlm.data.conversations import Rejected
from jaxlm.recipes.collect import prompts
from jaxlm.recipes.rate import texts
from jaxlm.recipes.use import load
from jaxlm.recipes.use.llm_judge import YesNoModel
from jaxlm.rl import attacks
from tests.faults import harness
from tests.recipes.test_reward import config, reward
from tests.recipes.train.test_reference import pairs, train

pytestmark = pytest.mark.usefixtures("one_device")
__all__ = ["config", "pairs", "reward"]

JUDGE = "def long(completion, **_):\n    return float(len(completion))\n"


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A run that continues text, in rows of 256 tokens when it is used."""
    folder = tmp_path_factory.mktemp("writer")
    run = harness.trained(harness.write_config(folder, {"train.steps": 1}), folder / "run")
    settings = json.loads((run / "config.json").read_text())
    settings["data"]["sequence"] = 256  # its step has the rows, and so the program, of other tests
    (run / "config.json").write_text(json.dumps(settings))
    return run


@pytest.fixture(scope="module")
def words(writer):
    """The first words of a collection in a folder."""
    folder = writer.parent
    (folder / "judge.py").write_text(JUDGE)
    lines = [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(20)]
    lines.append(lines[0])
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (folder / "prompts.jsonl").write_text(text)
    flags = ["--samples=4", "--max_tokens=8", "--slots=4"]
    return ["collect", f"--workdir={writer}", f"--prompts={folder}/prompts.jsonl", *flags]


def read(folder, name="samples.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def collected(words, writer, tmp_path_factory):
    out = tmp_path_factory.mktemp("collected") / "out"
    judge = f"--judge={writer.parent}/judge.py:long"
    assert main([*words, judge, f"--out={out}", "--keep=pairs"]) == 0
    return out


def test_each_sample_has_its_draw_and_its_score_and_pairs_are_read_as_data(collected, capsys):
    lines = read(collected)
    assert [(each["prompt"], each["sample"]) for each in lines] == [
        (f"{n}+2=", sample) for n in range(20) for sample in range(4)
    ]
    assert len({each["seed"] for each in lines}) == len(lines)
    for each in lines:
        assert each["score"] == len(each["text"])
        assert len(each["ids"]) == len(each["log_probabilities"]) <= 8
        assert max(each["log_probabilities"]) <= 0
    assert len({each["text"] for each in lines}) > 40
    for record in read(collected, "kept.jsonl"):
        assert record["chosen_score"] > record["rejected_score"]
        preferred.parse(record, "pairs", ("assistant",))


def test_a_collection_that_was_cut_resumes_to_the_same_bytes(
    words, writer, collected, tmp_path, capfd
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "collect.json").write_bytes((collected / "collect.json").read_bytes())
    whole = (collected / "samples.jsonl").read_bytes()
    (out / "samples.jsonl").write_bytes(whole[: 3 * len(whole) // 4])
    command = [*words, f"--judge={writer.parent}/judge.py:long", f"--out={out}"]
    assert main([*command, "--keep=pairs"]) == 0
    for name in ("samples.jsonl", "kept.jsonl"):
        assert (out / name).read_bytes() == (collected / name).read_bytes()
    capfd.readouterr()
    assert main([*command, "--keep=all", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["kept"] == 80
    assert main([*command, "--seed=1"]) == 2
    assert f"--out={out}-2" in capfd.readouterr().err


def test_the_truth_of_the_best_of_n_is_a_table_and_a_page(
    words, writer, collected, tmp_path, capfd
):
    out = tmp_path / "out"
    shutil.copytree(collected, out)
    (tmp_path / "truth.py").write_text("def short(completion, **_):\n    return -len(completion)\n")
    judge, truth = f"--judge={writer.parent}/judge.py:long", f"--truth={tmp_path}/truth.py:short"
    command = [*words, judge, truth, f"--out={out}"]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    best = answer["best_of_n"]
    assert [each["samples"] for each in best] == [1, 2, 4]
    lengths = [
        max(len(each["text"]) for each in group)
        for _, group in itertools.groupby(read(out), key=lambda each: each["id"])
    ]
    assert best[-1]["score"] == pytest.approx(sum(lengths) / 20)
    for each in best:
        assert each["truth"] == pytest.approx(-each["score"])
    assert (out / "samples.jsonl").read_bytes() == (collected / "samples.jsonl").read_bytes()
    page = (out / "best_of_n.html").read_text()
    assert "over-optimized: the truth is highest for n = 1" in page
    assert page.count("<svg") == 2
    assert main(command) == 0
    assert "over-optimized" in capfd.readouterr().out
    assert main([*words, truth, "--ask", f"--out={out}"]) == 2
    assert "leave out --truth" in capfd.readouterr().err


@pytest.mark.slow
def test_models_judge_by_the_ids_of_their_training(words, writer, reward, tmp_path):
    for judge in (f"reward:{reward}", f"judge:{writer}"):
        out = tmp_path / judge[:5]
        assert main([*words, f"--judge={judge}", f"--out={out}", "--samples=2"]) == 0
        lines = read(out)
        assert len({each["score"] for each in lines if each["score"] is not None}) > 10
        assert all(each["text"] for each in lines if each["score"] is not None)


@pytest.mark.parametrize("read", ["collect", "rate", "attacks"])
@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0c"])
def test_a_line_of_prompts_ends_with_a_line_feed_alone(tmp_path, read, mark):
    """JSON allows U+2028 in a text, and web pages have it."""
    text = f"one{mark}two"
    lines = [json.dumps({"prompt": each}, ensure_ascii=False) for each in (text, "three")]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes("\r\n".join(lines).encode())
    expected = [json.loads(each)["prompt"] for each in lines]
    if read == "collect":
        asked = prompts.read([str(file)], is_chat=False, left_out=Counter())
        assert [each.messages for each in asked] == expected
        plain = tmp_path / "prompts.txt"
        plain.write_bytes(f"{text}\nthree\n".encode())
        asked = prompts.read([str(plain)], is_chat=False, left_out=Counter())
        assert [each.messages for each in asked] == expected
    elif read == "rate":
        assert texts.read_prompts(file) == expected
    else:
        answered = "".join(f'{each[:-1]}, "answer": "1"}}\n' for each in lines)
        file.write_bytes(answered.encode())
        assert [each.prompt for each in attacks.read_questions(file)] == expected


@pytest.mark.slow
def test_a_judge_reads_a_question_as_its_model_reads_prompts(tmp_path):
    settings = {"train.steps": 2, "objective.name": "prefix", "data.sequence": 64}
    run = harness.trained(harness.write_config(tmp_path, settings), tmp_path / "run")
    judge, question = YesNoModel(str(run), "--judge"), "Is it good?"
    opened = load.load_run(run)
    model = opened.model.blueprint.merge(opened.params)
    yes, no = (opened.tokenizer.encode(word)[0] for word in ("Yes", "No"))
    row = jnp.array([[*opened.tokenizer.before, *opened.tokenizer.encode(question)]])

    def odds(*, is_both_ways):
        slots = jnp.arange(row.shape[1])[None]
        visible = jnp.full_like(slots, row.shape[1] - 1) if is_both_ways else None
        hidden = model.hidden(row, positions=slots, visible_until=visible).values
        logits = model.logits(hidden)[0, -1]
        return float(logits[yes] - logits[no])

    with jax.set_mesh(opened.model.mesh):
        both_ways, causal = odds(is_both_ways=True), odds(is_both_ways=False)
    assert judge.odds([question])[0] == pytest.approx(both_ways, abs=1e-5)
    assert abs(both_ways - causal) > 1e-3


@pytest.mark.slow
def test_a_judge_that_sees_two_answers_has_no_preference_for_a_place(
    words, writer, tmp_path, capfd
):
    judge = f"--judge=compare:{writer}"
    assert main([*words, judge, f"--out={tmp_path}/out", "--samples=2"]) == 0
    lines = read(tmp_path / "out")
    for one, other in zip(lines[::2], lines[1::2], strict=True):
        assert one["score"] == -other["score"]
        assert (one["score"] == 0) == (one["text"] == other["text"])
    assert any(each["score"] for each in lines)
    assert main([*words, judge, f"--out={tmp_path}/one", "--samples=1"]) == 2
    assert "--samples=2" in capfd.readouterr().err
    asked = words[2].replace("--prompts", "--text")
    command = ["eval", f"--workdir={writer}", asked, "--max_tokens=4", "--json", judge]
    assert main([*command, f"--against={writer}"]) == 0
    answer = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (answer["win_rate"]["mean"], answer["ties"]) == (0.5, 20)
    assert 0 <= answer["orders_agree"] <= 1


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--judge=numbre"], 2, "--judge=number"),
        (["--judge=ended", "--max_tokens=300"], 65, "--max_tokens="),
        (["--judge=reward:WRITER@99"], 66, "fix    --judge=reward:"),
        (["--judge=reward:WRITER"], 2, "--config.objective.name=reward"),
        (["--judge=ended", "--prompts=TMP/unanswered.json"], 66, "unanswered.jsonl"),
        (["--judge=ended", "--prompts=CHAT"], 65, 'one prompt a line: {"prompt": "1+1="'),
        (["--critique=missing.txt"], 66, "echo"),
        (["--critique=EMPTY"], 65, "echo"),
        (["--judge=number", "--prompts=UNANSWERED"], 65, "--judge=ended"),
        (["--judge=FAILS"], 65, "have no score"),
        ([], 2, "--judge=ended"),
    ],
)
def test_each_unusable_input_names_its_fix(words, writer, tmp_path, capfd, flags, code, text):
    (tmp_path / "fails.py").write_text("def f(completion, **_):\n    return None\n")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "unanswered.jsonl").write_text('{"prompt": "1"}\n')
    places = {
        "WRITER": str(writer),
        "CHAT": f"{tmp_path}/chat.jsonl",
        "TMP": f"{tmp_path}",
        "UNANSWERED": f"{tmp_path}/unanswered.jsonl",
        "FAILS": f"{tmp_path}/fails.py:f",
        "EMPTY": f"{tmp_path}/empty.txt",
    }
    for name, place in places.items():
        flags = [each.replace(name, place) for each in flags]
    is_named = any(each.startswith("--prompts") for each in flags)
    first = [each for each in words if not (is_named and each.startswith("--prompts"))]
    assert main([*first, *flags, f"--out={tmp_path}/out"]) == code
    assert text in capfd.readouterr().err


def test_the_best_answer_has_ended_and_ties_make_no_pair():
    from jaxlm.recipes.collect.keeping import select

    def line(prompt, text, score, reason="eos_token"):
        return {"id": prompt, "prompt": prompt, "text": text, "score": score, "reason": reason}

    lines = [
        *(line("a", "cut", 9.0, "length"), line("a", "x", 1.0), line("a", "y", 1.0)),
        *(line("b", "x", 2.0), line("b", "y", 3.0), line("b", "z", 1.0), line("b", "?", None)),
        line("c", "cut", 1.0, "length"),
    ]
    left_out = Counter()
    best = select(lines, "best", "best", left_out)
    assert [each["completion"] for each in best] == ["x", "y"]
    assert left_out == {"without a scored answer that ended": 1}
    left_out = Counter()
    pairs = select(lines, "pairs", "best", left_out)
    assert [(each["chosen"], each["rejected"]) for each in pairs] == [("y", "z")]
    assert left_out["with equal scores"] == 1
    every = select(lines, "pairs", "all", Counter())
    assert len(every) == 3


def test_the_seed_of_a_draw_is_by_the_rule_of_rollouts_and_of_its_own_prompt():
    from jaxlm.recipes.collect.prompts import CollectPrompt, seeds
    from jaxlm.rl.rollout import root_key

    asked = [CollectPrompt(text, None, {}) for text in "abc"]
    draws = [(prompt, sample) for prompt in asked for sample in range(2)]
    drawn = seeds(draws, 3)
    key = root_key(3, "collect")
    for place in (int(asked[1].id[:8], 16), 1):
        key = jax.random.fold_in(key, place)
    assert drawn[3] == int(jax.random.bits(key))
    assert seeds(draws[::-1][:4], 3) == drawn[:1:-1]
    others = [seeds(draws, 3, "critique 0"), seeds(draws, 4)]
    assert len({*drawn, *others[0], *others[1]}) == 18
    assert seeds([], 3) == []


@pytest.fixture(scope="module")
def principles(words, tmp_path_factory):
    file = tmp_path_factory.mktemp("principles") / "principles.txt"
    file.write_text("".join(f"principle {n}\n\n" for n in range(4)))
    return file


@pytest.mark.slow
def test_a_run_criticizes_and_revises_its_answers_by_drawn_principles(
    words, writer, principles, tmp_path, capfd
):
    command = [*words[:3], f"--critique={principles}", "--samples=2", "--max_tokens=6"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*command, f"--out={whole}", "--keep=pairs"]) == 0
    lines = read(whole)
    assert [each["role"] for each in lines] == ["draft", "revision"] * 40
    drawn = {step["principle"] for each in lines[1::2] for step in each["steps"]}
    assert drawn == {f"principle {n}" for n in range(4)}
    revised = [each for each in lines[1::2] if not each["problem"]]
    for each in revised:
        (step,) = each["steps"]
        assert step["revision"] == each["text"].strip()
        assert step["critique"]
        assert len(each["ids"]) == len(each["log_probabilities"])
    assert len({each["seed"] for each in lines}) == 80
    for draft, revision in zip(lines[::2], lines[1::2], strict=True):
        if revision["problem"]:
            assert revision["score"] is None
        else:
            assert draft["text"].strip()
    for record in (records := read(whole, "kept.jsonl")):
        preferred.parse(record, "pairs", ("assistant",))
    cut.mkdir()
    (cut / "collect.json").write_bytes((whole / "collect.json").read_bytes())
    content = (whole / "samples.jsonl").read_bytes()
    (cut / "samples.jsonl").write_bytes(content[: len(content) // 2])
    capfd.readouterr()
    assert main([*command, f"--out={cut}", "--keep=pairs", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert (cut / "samples.jsonl").read_bytes() == content
    assert answer["kept"] == len(records)
    assert answer["kept"] + sum(answer["left_out"].values()) - 1 == 40  # a prompt is repeated
    principles.write_text("another\n")
    assert main([*command, f"--out={cut}"]) == 2
    assert "principles" in capfd.readouterr().err


def test_a_judge_scores_drafts_and_revisions(words, writer, principles, tmp_path):
    command = [*words[:3], f"--critique={principles}", "--samples=1", "--max_tokens=6"]
    flags = [f"--judge={writer.parent}/judge.py:long", "--keep=pairs", f"--out={tmp_path}/out"]
    assert main([*command, "--rounds=2", *flags]) == 0
    lines = read(tmp_path / "out")
    assert all(each["score"] == len(each["text"]) for each in lines if not each["problem"])
    assert {len(each["steps"]) for each in lines[1::2] if not each["problem"]} == {2}
    for record in read(tmp_path / "out", "kept.jsonl"):
        assert record["chosen_score"] > record["rejected_score"]


def test_revisions_are_chosen_over_drafts_that_they_change():
    from jaxlm.recipes.collect.keeping import select_revisions

    def line(text, problem="", reason="eos_token"):
        draft = {"id": text, "prompt": "q", "reason": reason, "problem": problem}
        return [draft | {"text": text, "problem": ""}, draft | {"text": f"{text}!".strip("=!")}]

    lines = [*line("a="), *line("b", "too long"), *line("c", reason="length"), *line("same")]
    left_out = Counter()
    (record,) = select_revisions(lines, "pairs", left_out)
    assert (record["chosen"], record["rejected"]) == ("a", "a=")
    assert left_out == {"without a revision that ended": 2, "that the revision repeats": 1}
    assert select_revisions(lines, "best", Counter())[0]["completion"] == "a"


def test_a_person_chooses_by_single_keys_that_are_saved_and_taken_back(tmp_path):
    from jaxlm.recipes.collect import ask
    from jaxlm.recipes.rate.texts import TextPair, read_ratings

    user = [{"role": "user", "content": "q1"}]
    asked = [
        (TextPair("q0", "yes", "no"), "q0"),
        (TextPair("q1", "one", "two"), user),
        (TextPair("q2", "same", "same"), "q2"),
        (TextPair("q3", "\x1b[2Jx", "y"), "q3"),
    ]
    file, shown = tmp_path / "ratings.jsonl", []

    def answer(keys):
        master, slave = pty.openpty()
        try:
            with ask.keys(slave) as read_key:
                os.write(master, keys)
                return ask.ask(asked, "r@1", file, "eve", read_key=read_key, say=shown.append)
        finally:
            os.close(master)
            os.close(slave)

    assert answer(b"?1u2q") == 1
    assert [each.choice for each in read_ratings(file)] == ["b"]
    assert answer(b"1tq") == 3
    assert [each.choice for each in read_ratings(file)] == ["b", "a", "tie"]
    assert "\x1b" not in "".join(shown)
    first, second, tie = read(tmp_path, "ratings.jsonl")
    assert preferred.parse(first, "pairs", ("assistant",)).messages[-1]["content"] == "no"
    assert preferred.parse(second, "pairs", ("assistant",)).messages[:-1] == user
    with pytest.raises(Rejected, match="tie"):
        preferred.parse(tie, "pairs", ("assistant",))


def test_a_person_is_asked_in_a_terminal_alone(words, tmp_path, capfd):
    assert main([*words, "--ask", f"--out={tmp_path}/out"]) == 2
    assert "in a terminal" in capfd.readouterr().err


@pytest.mark.slow
def test_a_win_rate_has_an_interval_and_a_run_ties_with_itself(writer, words, reward, capfd):
    asked = words[2].replace("--prompts", "--text")
    command = ["eval", f"--workdir={writer}", asked, "--max_tokens=8", "--json"]
    judge = f"--judge={writer.parent}/judge.py:long"
    assert main([*command, judge, f"--against={writer}"]) == 0
    answer = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (answer["win_rate"]["mean"], answer["ties"], answer["prompts"]) == (0.5, 20, 20)
    assert main([*command, judge]) == 2
    assert "--against=RUN" in capfd.readouterr().err


@pytest.mark.slow
def test_the_win_rates_of_two_runs_add_up_to_one(writer, words, capfd):
    other = writer.parent / "other"
    assert train(writer.parent / "config.py", other, "--config.seed=1") == 0
    prompts, answers = words[2].replace("--prompts", "--text"), []
    for run, against in ((writer, other), (other, writer)):
        flags = [prompts, "--max_tokens=8", "--samples=3", f"--judge={writer.parent}/judge.py:long"]
        capfd.readouterr()
        assert main(["eval", f"--workdir={run}", f"--against={against}", *flags, "--json"]) == 0
        answers.append(json.loads(capfd.readouterr().out.splitlines()[-1]))
    one, two = answers
    assert one["win_rate"]["mean"] + two["win_rate"]["mean"] == pytest.approx(1)
    assert (one["wins"], one["ties"]) == (two["losses"], two["ties"])
    assert one["wins"] + one["ties"] + one["losses"] == 60
    assert one["win_rate"]["low"] < one["win_rate"]["mean"] < one["win_rate"]["high"]
