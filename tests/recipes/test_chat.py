"""Training on conversations by the command line: loss, resuming, answers, and refusals."""

import itertools
import json
import random
import re

import numpy as np
import pytest

from jaxlm.cli.main import main
from jaxlm.core.load import load
from jaxlm.data import chat_templates, dataset
from jaxlm.data.chat_tokenizer import ChatTokenizer
from jaxlm.data.config import DataConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.train.run import _row_warnings
from jaxlm.recipes.use import generate
from tests.faults import harness
from tests.recipes.train.test_run import final_state

pytestmark = pytest.mark.usefixtures("one_device")


def conversations():
    """Sums of digits, and a second exchange that is always the same."""
    draw = random.Random(0)
    for number in range(200):
        a, b = draw.randrange(5), draw.randrange(5)
        turns = [("user", f"{a}+{b}?"), ("assistant", str(a + b)), ("user", "Sure? \u20ac")]
        messages = [{"role": role, "content": text} for role, text in turns]
        answer = {"role": "assistant", "content": "Yes.", "weight": 0.5}
        yield [*messages, answer] if number % 3 else messages[:2]


def write(path, turns):
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    return str(path)


def chat_config(folder, sequence, **settings):
    """Return the path of a config that trains on conversations without dropout."""
    chats = {
        "data.train": (write(folder / "chat.jsonl", conversations()),),
        "data.kind": "chat",
        "data.sequence": sequence,
        "data.packing": "concat",
        "model.dropout": 0.0,
    }
    return harness.write_config(folder, chats | settings)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    settings = {"optim.lr": 1e-2, "train.steps": 40, "checkpoint.every": 20}
    return chat_config(tmp_path_factory.mktemp("chats"), 96, **settings)


@pytest.fixture(scope="module")
def unbroken(config, tmp_path_factory):
    return harness.trained(config, tmp_path_factory.mktemp("runs") / "unbroken")


def test_the_loss_of_answers_falls(unbroken):
    losses = [r["loss_nats"] for r in harness.records(unbroken) if r["split"] == "train"]
    assert losses[-1] < 0.4 * losses[0]


@pytest.mark.slow
def test_a_resumed_run_is_the_same(config, unbroken, tmp_path):
    workdir = tmp_path / "broken"
    assert main(harness.words(config, workdir, "--stop_at=25")) == 0
    assert main(harness.words(config, workdir)) == 0
    assert harness.losses(workdir) == harness.losses(unbroken)
    one, other = final_state(workdir), final_state(unbroken)
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])


def test_speed_counts_every_token_that_is_read_and_not_only_those_trained_on(unbroken):
    """Peers print it so; model FLOPs follow it, and neither counts padding."""
    rows = [r for r in harness.records(unbroken) if r["split"] == "train"]
    slots = 8 * 96
    for before, row in itertools.pairwise(rows[:8]):
        read = row["tokens_per_second"] * row["step_seconds"]
        assert read == pytest.approx(round(read))
        assert 0.5 * slots < read < slots
        weight, trained = row["tokens"] - before["tokens"], row["trained_share"] * read
        assert trained == pytest.approx(round(trained))
        assert 0.5 * trained < weight < trained, "some turns have half the weight"
    each = {round(r["flops_per_second"] / r["tokens_per_second"]) for r in rows}
    assert len(each) == 1


def test_the_ids_of_a_prompt_are_a_prefix_of_those_trained_on(config, unbroken):
    settings = json.loads((unbroken / "config.json").read_text())["data"]
    names = ("train", "kind", "tokenizer", "sequence")
    data = dataset.open_data(
        DataConfig(**{n: tuple(v) if isinstance(v := settings[n], list) else v for n in names}),
        seed=0,
    )
    template = generate.template_of(unbroken)
    assert chat_templates.digest(template) == chat_templates.digest(data.template)
    tokenizer = ChatTokenizer(data.tokenizer, template)
    assert tokenizer.ends == (2,)
    shards = data.train.shards
    asked = [[], *conversations()]  # lines count from 1
    for document in range(20):
        (length,) = shards.lengths(document, document + 1)
        ids = shards.read(document, 0, length).tolist()
        messages = asked[shards.origin(document)[1]]
        prompt = tokenizer.encode(messages[0]["content"])
        assert ids[: len(prompt)] == prompt
        trained = shards.weights(document, 0, length) > 0
        assert trained.argmax() == len(prompt)


def test_a_trained_model_answers_and_ends_by_itself(unbroken, capsys):
    words = ["generate", f"--workdir={unbroken}", "--chat", "--prompt=Sure? \u20ac", "--json"]
    assert main([*words, "--temperature=0", "--max_tokens=12"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["finish_reason"] == "eos_token"


def test_conversations_without_an_answer_end_before_the_first_step(config, tmp_path, capsys):
    turns = [[{"role": "user", "content": "a"}]] * 5
    train = write(tmp_path / "none.jsonl", turns)
    assert main(harness.words(config, tmp_path / "run", f"--config.data.train={train}")) == 65
    errors = capsys.readouterr().err
    assert "no conversation has an answer" in errors
    assert not (tmp_path / "run/checkpoints").exists()
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 500}]] * 5
    train = write(tmp_path / "long.jsonl", turns)
    flags = (f"--config.data.train={train}", "--config.data.validation=()")
    assert main(harness.words(config, tmp_path / "run", *flags)) == 65
    assert "5 longer than a row" in capsys.readouterr().err


def test_a_conversation_past_the_positions_of_the_model_is_a_warning(config):
    def warnings(positions):
        run = load(Run, str(config), [("model.max_positions", positions)]).value
        return list(_row_warnings(run, setup.open_data(run)))

    (line,) = warnings("32")
    assert re.search(r"a conversation has \d+ tokens, and the model 32 positions", line)
    assert warnings("96") == []


def test_rows_of_text_past_the_positions_of_the_model_are_a_warning(tmp_path):
    config = harness.write_config(tmp_path, {"data.sequence": 96})

    def warnings(positions):
        run = load(Run, str(config), [("model.max_positions", positions)]).value
        return list(_row_warnings(run, setup.open_data(run)))

    (line,) = warnings("64")
    assert "a row has 96 tokens, and the model 64 positions (model.max_positions)" in line
    assert "--config.data.sequence=64" in line
    assert warnings("96") == []
