"""`jaxlm.load`: a model in Python, from runs and from other libraries; and the page about it."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

import jaxlm
from jaxlm.cli.docs import page
from jaxlm.cli.main import main
from jaxlm.core.errors import ConfigError, InputMissing, OutOfMemory
from jaxlm.models.families.union import SIZES
from jaxlm.recipes.plan import oom
from jaxlm.recipes.use.untrained import Untrained
from tests.faults import harness

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

TEXT = "some words of a text"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 12 steps that was made from Python."""
    folder = tmp_path_factory.mktemp("api")
    config = harness.write_config(folder)
    result = jaxlm.train(config, workdir=folder / "run", quiet=True)
    assert (result.step, result.complete) == (12, True)
    return folder / "run"


@pytest.fixture(scope="module")
def model(run):
    return jaxlm.load(run)


def test_importing_jaxlm_is_light_and_shows_what_there_is():
    program = "import sys, jaxlm; print(dir(jaxlm), jaxlm.__version__, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    names = (
        "['Callback', 'Config', 'LanguageModel', 'ResumeOptions', '__version__', 'load', 'train']"
    )
    assert done.stdout.strip() == f"{names} {jaxlm.__version__} False", done.stderr
    assert inspect.isfunction(jaxlm.train)
    assert inspect.isfunction(jaxlm.load)
    for function in (jaxlm.train, jaxlm.load):
        described = re.findall(r"^  `?(\w+)`?: ", inspect.getdoc(function), re.MULTILINE)
        assert described == list(inspect.signature(function).parameters)
        assert " at 0x" not in str(inspect.signature(function))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = jaxlm.trian


def log_softmax(model, ids):
    """Return the logits of a text less their log-sum-exp, [tokens, vocabulary] in float64."""
    logits = np.float64(nnx.jit(lambda module, rows: module(rows))(model.model, np.array([ids]))[0])
    return scipy.special.log_softmax(logits, axis=-1)


def test_a_score_is_the_log_softmax_of_the_logits(model):
    scores = model.score(TEXT)
    ids = [*model.tokenizer.before, *model.tokenizer.encode(TEXT)]
    log_p = log_softmax(model, ids)
    expected = [-float(log_p[at, ids[at + 1]]) for at in range(len(ids) - 1)]
    assert scores.nats == pytest.approx(expected, rel=1e-5)
    assert "".join(scores.tokens) == TEXT
    assert scores.ids == ids[1:]
    assert scores.total == pytest.approx(sum(expected), rel=1e-6)
    assert model.score("").nats == []


@pytest.mark.slow
def test_the_last_lens_is_the_output_and_attention_sees_what_was_before(model, monkeypatch):
    inside = model.inspect(TEXT)
    ids = [*model.tokenizer.before, *model.tokenizer.encode(TEXT)]
    assert inside.ids == ids
    np.testing.assert_allclose(inside.lens(-1), log_softmax(model, ids), atol=2e-5)
    layers, heads = model.config.model.depth, model.config.model.heads
    assert inside.attention.shape == (layers, heads, len(ids), len(ids))
    np.testing.assert_allclose(inside.attention.sum(-1), 1, atol=1e-5)
    assert not np.triu(inside.attention, 1).any()
    assert inside.streams.shape == (layers + 1, len(ids), model.config.model.width)
    assert np.abs(inside.lens(0) - inside.lens(-1)).max() > 0.01
    monkeypatch.setitem(vars(model.loaded.model.blueprint), "text_positions", 3)
    with pytest.raises(ConfigError, match="the text has [0-9]+ tokens"):
        model.inspect(TEXT)


@pytest.mark.parametrize("value", [5, None, [], ["a", 5], [[{"role": "user", "content": "a"}]]])
def test_what_is_no_text_is_named(model, value):
    with pytest.raises(TypeError, match="generate takes texts, not "):
        model.generate(value)
    with pytest.raises(TypeError, match="score takes one text at a time, not "):
        model.score(value)


def test_generated_log_probabilities_are_those_of_the_score(model):
    (answer,) = model.generate(TEXT, max_tokens=6, temperature=0)
    scores = model.score(TEXT + answer.text)
    if scores.ids[-6:] == answer.ids:  # else the text has another encoding
        assert scores.nats[-6:] == pytest.approx([-p for p in answer.log_probabilities], rel=1e-4)
    both = model.generate([TEXT, "other"], max_tokens=6, temperature=0)
    assert both[0].ids == answer.ids
    assert [each.prompt for each in both] == [TEXT, "other"]


def test_an_evaluation_is_that_of_the_command(model, run, capsys):
    assert main(["eval", f"--workdir={run}", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert model.evaluate() == expected


def test_conversations_are_evaluated_by_the_template_of_an_adapter(model, tmp_path):
    """`jaxlm eval --adapter` reads them by it too."""
    file = tmp_path / "chat_template.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    lines = []
    adapted = dataclasses.replace(model, adapter=str(tmp_path))
    assert adapted.evaluate(str(tmp_path / "chat.jsonl"), say=lines.append)["tokens"] > 0
    assert f"the text is conversations, which are read by {file}" in lines


@pytest.mark.slow
def test_an_export_is_loaded_and_computes_the_same(model, tmp_path):
    parity = model.export(tmp_path / "hf")["parity"]
    assert parity["is_bit_identical"]
    lines = []
    loaded = jaxlm.load(tmp_path / "hf", say=lines.append)
    assert loaded.score(TEXT).nats == pytest.approx(model.score(TEXT).nats, abs=1e-5)
    assert any("importing" in line for line in lines)
    lines.clear()
    assert jaxlm.load(tmp_path / "hf", say=lines.append).workdir == loaded.workdir
    assert not any("importing" in line for line in lines), "the same files are imported once"


def test_a_step_is_named_after_the_run(run, model):
    assert jaxlm.load(f"{run}@10").step == 10
    assert jaxlm.load(run, step=10).step == 10
    assert model.step == 12


@pytest.mark.slow  # tests/recipes/use/test_generate.py has a fast test of the command
def test_a_grammar_limits_texts(model):
    schema = {"enum": ["yes", "no"]}
    answers = model.generate([TEXT, "other"], json_schema=schema, max_tokens=20, seed=[1, 2])
    assert [each.prompt for each in answers] == [TEXT, "other"]
    for answer in answers:
        assert answer.text in ('"yes"', '"no"')
        assert answer.finish_reason == "eos_token"
        assert model.tokenizer.decode(answer.ids) == answer.text
    (one,) = model.generate(TEXT, choice="only", max_tokens=20)
    assert one.text == "only"


def test_a_grammar_is_refused_before_a_program_is_compiled(model):
    with pytest.raises(ConfigError, match="refused") as caught:
        model.generate(TEXT, json_schema={"type": "nope"})
    assert "Invalid type: nope" in caught.value.why
    assert caught.value.where == "--json_schema"


def test_what_is_wrong_is_an_error_with_a_fix(model, tmp_path):
    with pytest.raises(ConfigError) as caught:
        model.generate(TEXT, max_token=3)
    assert "max_tokens" in caught.value.fix
    with pytest.raises(InputMissing, match="no model"):
        jaxlm.load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no chat template"):
        model.generate(TEXT, chat=True)


@pytest.mark.slow
def test_a_dict_is_a_config_nested_or_by_path(run, tmp_path):
    texts = jaxlm.load(run).config.data.train
    settings = {
        "data": {"train": texts, "tokenizer": "bytes", "validation": []},
        "data.sequence": 32,
        "model.width": 32,
        "model": {"depth": 1, "heads": 2, "kv_heads": 1},
        "sample.prompts": (),
    }
    more = {"train": {"steps": 1, "batch": 2}}
    assert jaxlm.train(settings, settings=more, workdir=tmp_path / "run", quiet=True).complete
    made = jaxlm.load(tmp_path / "run").config
    assert isinstance(made, jaxlm.Config)
    assert (made.model.width, made.model.depth, made.data.sequence) == (32, 1, 32)
    assert (made.train.steps, made.train.batch) == (1, 2)
    command = (tmp_path / "run/command.sh").read_text()
    assert "--config.train.steps=1 --config.train.batch=2" in command
    with pytest.raises(ConfigError, match="witdh"):
        jaxlm.train({"model.witdh": 3}, workdir=tmp_path / "other")


@pytest.fixture
def tiny(monkeypatch):
    """Sizes under their published names that take no time."""
    for name in ("gpt2", "pythia-70m", "bert-base-cased"):
        changes = {"depth": 1, "width": 32, "heads": 2}
        monkeypatch.setitem(SIZES, name, dataclasses.replace(SIZES[name], **changes))


@pytest.mark.slow
def test_a_published_size_is_named_untrained_and_begins_as_a_run_of_its_seed(tiny, run, tmp_path):
    with pytest.warns(Untrained, match="gpt2 is untrained: its .* parameters are random"):
        model = jaxlm.load("gpt2-124m", seed=3)
    assert repr(model).startswith("LanguageModel('gpt2', untrained, gpt2, ")
    assert (model.is_trained, model.step) == (False, 0)
    assert model.model(jnp.zeros((1, 5), int)).shape == (1, 5, 50257)
    assert len(model.score(TEXT).nats) == len(TEXT)
    assert len(model.generate(TEXT, max_tokens=2)[0].ids) == 2
    settings = {"data.tokenizer": "bytes", "data.validation": (), "seed": 3}
    settings |= {"data.sequence": 32, "train.steps": 1, "train.batch": 2, "optim.lr": 1e-30}
    data = jaxlm.load(run).config.data.train
    frozen = {"optim.weight_decay": 0.0, "data.train": list(data), "sample.prompts": ()}
    jaxlm.train("gpt2", settings=settings | frozen, workdir=tmp_path / "run", quiet=True)
    begun = jaxlm.load(tmp_path / "run").params
    assert jax.tree.all(jax.tree.map(jnp.allclose, model.params, begun))


def test_what_an_untrained_model_lacks_is_an_error_with_a_fix(tiny, tmp_path, monkeypatch):
    with pytest.warns(Untrained):
        encoder = jaxlm.load("bert_base_cased")
    for action, fix in (
        (lambda: encoder.generate(TEXT), "jaxlm eval"),
        (lambda: encoder.export(tmp_path / "out"), "jaxlm train --config=bert-base-cased"),
        (lambda: encoder.evaluate(), "evaluate("),
        (lambda: jaxlm.load("gpt2", step=3), "jaxlm.load('gpt2')"),
    ):
        with pytest.raises(ConfigError) as caught:
            action()
        assert fix in caught.value.fix
        if "jaxlm train" in fix:
            assert main(["config", "validate", *shlex.split(caught.value.fix)[2:-1]]) == 0
    with pytest.raises(InputMissing) as missing:
        jaxlm.load("pytia-70m")
    assert missing.value.fix == "jaxlm.load('pythia-70m')"
    monkeypatch.setattr(oom, "memory_limit", lambda run: 1e6)
    with pytest.raises(OutOfMemory, match="do not fit the memory") as large:
        jaxlm.load("gpt2")
    assert main(shlex.split(large.value.fix, comments=True)[1:]) == 0


# Sections of the page that run one after another, after the first.
TOGETHER = {
    "Data from Python": 1,
    "Callbacks": 2,
    "Parts of your own": 2,
    "Use a model": 3,
    "A published size": 3,
    "The module": 4,
    "Inside the model": 4,
    "A loop of your own": 4,
}


def sections():
    """Return the title and the blocks of Python of each section of the page."""
    text = page("python").read_text()
    parts = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return [(name, re.findall(r"```python\n(.*?)```", part, re.DOTALL)) for name, part in parts]


def test_the_programs_of_the_page_are_python_with_names_that_exist():
    """The slow tests run them, in the parts above."""
    assert [name for name, _ in sections()] == ["Train", *TOGETHER], "each is in a part"
    for _, blocks in sections():
        assert blocks
        for block in blocks:
            names = {
                node.attr
                for node in ast.walk(ast.parse(block))
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxlm"
            }
            assert names <= set(dir(jaxlm))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxlm.recipes.use.untrained.Untrained")
@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_the_programs_of_the_page_run_in_order(part, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for path in sorted(Path(jaxlm.__file__).parent.glob("core/*.py"))[:12]:
        (tmp_path / "texts" / f"{path.stem}.txt").write_text(path.read_text())
    names: dict = {}
    for name, blocks in sections():
        if TOGETHER.get(name, part) != part:
            if TOGETHER[name] < part:  # what the program defines before it trains or prints
                exec(re.split(r"^(?:jaxlm\.train|print)\(", blocks[0], flags=re.M)[0], names)
            continue
        for block in blocks:
            if file := re.match(r"# (\w+\.py)\n", block):
                Path(file[1]).write_text(block)
            else:
                exec(block, names)
    assert np.isfinite(names.get("losses", 0.0)).all()
    assert "import os" not in capsys.readouterr().err
