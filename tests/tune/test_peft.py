"""Folders of PEFT: what an export writes, what an import reads, and what it refuses."""

import itertools
import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice
from jaxlm.cli.main import main
from jaxlm.core import config, tree
from jaxlm.core.errors import DataError
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import adapter_places, import_model
from jaxlm.recipes.use import adapter, load
from jaxlm.training.rundir import RunDir
from tests.cli.test_exchange import write_tokenizer
from tests.faults import harness
from tests.parity import weights

pytestmark = pytest.mark.usefixtures("one_device", "without_plots")

SETTINGS = {"train.steps": 1, "eval.batches": 1}
LAYER = "base_model.model.model.layers.0."
QUERY = f"{LAYER}self_attn.q_proj."
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def adapted(base, workdir, tune):
    """Write a run with a random adapter."""
    source = load.open_run_ref(str(base), "--init_from", print)
    run = config.from_json(Run, config.to_json(source.run) | {"tune": tune}, where="tune")
    opened = load.load_run(base)
    model = setup.build_sharded_model(run, opened.model.blueprint.config.vocab, opened.model.mesh)
    draw = np.random.default_rng(0)

    def leaf(path, like):
        around = float(path.endswith(("ia3", "magnitude", "scale")))
        return jnp.asarray(around + 0.1 * draw.standard_normal(like.shape), like.dtype)

    params = tree.map_with_path(leaf, model.own(model.blueprint.shapes))
    with RunDir(workdir) as directory:
        directory.write_json(load.BASE, source.record())
        tokenizer = (base / "tokenizer").read_bytes()
        import_model.write(directory, run, params, tokenizer, {"source": "random"})


class Runs(dict):
    """The run directories of a base and of adapters of it by name, each written once asked for."""

    def __init__(self, base, arms):
        super().__init__(base=base)
        self.arms = arms

    def __missing__(self, name):
        self[name] = self["base"].with_name(name)
        adapted(self["base"], self[name], self.arms[name])
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    path = harness.write_config(folder, SETTINGS)
    assert main(harness.words(path, folder / "base")) == 0
    arms = {
        "lora": {"name": "lora", "rank": 2, "also": ["*norm/scale"], "dropout": 0.1},
        "rslora": {"name": "lora", "rank": 2, "scale": "root", "at": ["*/query/*"]},
        "dora": {"name": "dora", "rank": 2},
        "ia3": {"name": "ia3"},
        "bottleneck": {"name": "bottleneck", "hidden": 4},
        "prefix": {"name": "prefix", "length": 3, "also": ["*norm/scale"]},
        "prompt": {"name": "prompt", "length": 3},
    }
    return Runs(folder / "base", arms)


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "hf").mkdir()
    family = GPT2(vocab=320, width=32, depth=2, heads=4, max_positions=64)
    weights.write(folder / "hf", family, np.float32)
    write_tokenizer(folder / "hf")
    assert main(["import", f"--from={folder / 'hf'}", f"--workdir={folder / 'base'}"]) == 0
    arms = {
        "lora": {"name": "lora", "rank": 2},
        "dora": {"name": "dora", "rank": 2, "at": ["*/query/*", "*/down/*"]},
        "pissa": {"name": "lora", "rank": 2, "init": "pissa"},
        "dora_pissa": {"name": "dora", "rank": 2, "init": "pissa"},
        "ia3": {"name": "ia3"},
        "norms": {"name": "lora", "rank": 2, "at": ["*/down/*"], "also": ["*_norm/scale"]},
    }
    return Runs(folder / "base", arms)


def exported(run, out, *flags):
    assert main(["export", f"--workdir={run}", "--to=peft", f"--out={out}", *flags]) == 0
    return json.loads((out / CONFIG).read_text()), load_file(out / TENSORS)


def imported(folder, base, workdir):
    words = [f"--adapter={folder}", f"--init_from={base}", f"--workdir={workdir}"]
    return main(["import", *words])


def leaves(run):
    opened = load.load_run(run, is_merged=False)
    return tree.leaves(opened.model.own(opened.params))


@pytest.mark.few(1)
@pytest.mark.parametrize("arm", ["lora", "rslora", "dora", "ia3", "prefix", "prompt"])
def test_a_folder_is_read_back_bit_for_bit(runs, tmp_path, arm):
    settings, tensors = exported(runs[arm], tmp_path / "peft")
    assert imported(tmp_path / "peft", runs["base"], tmp_path / "run") == 0
    before, after = leaves(runs[arm]), leaves(tmp_path / "run")
    assert before.keys() == after.keys()
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, after[path], err_msg=path)
    new_settings, others = exported(tmp_path / "run", tmp_path / "again")
    assert new_settings == settings
    assert tensors.keys() == others.keys()
    for key, array in tensors.items():
        np.testing.assert_array_equal(array, others[key], err_msg=key)


def test_a_folder_carries_the_chat_template(runs, tmp_path):
    run, template = tmp_path / "run", "{{ messages[0]['content'] }}"
    shutil.copytree(runs["lora"], run)
    (run / "hub").mkdir(exist_ok=True)
    (run / "hub/chat_template.jinja").write_text(template)
    exported(run, tmp_path / "peft")
    assert imported(tmp_path / "peft", runs["base"], tmp_path / "again") == 0
    for folder in ("peft", "again/hub"):
        assert (tmp_path / folder / "chat_template.jinja").read_text() == template


@pytest.mark.slow
def test_a_folder_carries_the_chat_template_and_the_base_answers_with_it(runs, tmp_path, capsys):
    chat, base = tmp_path / "chat.jsonl", f"--workdir={runs['base']}"
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    chat.write_text(json.dumps({"messages": turns}) + "\n")
    words = [f"--config={runs['base'] / 'config.json'}", f"--config.data.train={chat}"]
    words += ["--config.data.kind=chat", "--config.data.validation=()", "--config.data.sequence=96"]
    words += ["--config.tune.name=lora", "--config.tune.rank=2", "--config.train.epochs=1"]
    words += [f"--init_from={runs['base']}", f"--workdir={tmp_path / 'run'}", "--quiet"]
    assert main(["train", *words]) == 0
    exported(tmp_path / "run", tmp_path / "peft")
    template = (tmp_path / "run/hub/chat_template.jinja").read_text()
    assert imported(tmp_path / "peft", runs["base"], tmp_path / "again") == 0
    for folder in ("peft", "again/hub"):
        assert (tmp_path / folder / "chat_template.jinja").read_text() == template
    asked = ["generate", "--chat", "--prompt=1?", "--max_tokens=4", "--temperature=0", "--json"]
    answers = []
    for flags in ([f"--workdir={tmp_path / 'run'}"], [base, f"--adapter={tmp_path / 'peft'}"]):
        capsys.readouterr()
        assert main([*asked, *flags]) == 0
        answers.append(json.loads(capsys.readouterr().out)["samples"])
    assert answers[0] == answers[1]
    assert main([*asked, base]) == 2, "the base has no template"


def test_the_folder_has_the_names_shapes_and_settings_of_peft(runs, tmp_path):
    settings, tensors = exported(runs["lora"], tmp_path / "lora")
    assert tensors[f"{QUERY}lora_A.weight"].shape == (2, 32)
    assert tensors[f"{LAYER}mlp.down_proj.lora_B.weight"].shape == (32, 2)
    assert f"{LAYER}input_layernorm.weight" in tensors
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert settings["target_modules"] == sorted(kinds)
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (2, 32, 0.1)
    assert "model.layers.1.post_attention_layernorm" in settings["modules_to_save"]
    assert settings["base_model_name_or_path"] == str(runs["base"])
    assert (settings["task_type"], settings["fan_in_fan_out"]) == ("CAUSAL_LM", False)
    settings, tensors = exported(runs["rslora"], tmp_path / "rslora")
    assert settings["use_rslora"]
    assert settings["target_modules"] == ["q_proj"]
    settings, tensors = exported(runs["dora"], tmp_path / "dora", "--dtype=bfloat16")
    assert settings["use_dora"]
    assert tensors[f"{QUERY}lora_magnitude_vector"].shape == (32,)
    assert tensors[f"{QUERY}lora_A.weight"].dtype.name == "bfloat16"
    settings, tensors = exported(runs["ia3"], tmp_path / "ia3")
    assert tensors[f"{LAYER}self_attn.k_proj.ia3_l"].shape == (16, 1)
    assert tensors[f"{LAYER}mlp.down_proj.ia3_l"].shape == (1, 64)
    assert settings["feedforward_modules"] == ["down_proj"]


@pytest.mark.slow
def test_virtual_tokens_have_the_layout_and_settings_of_peft(runs, tmp_path, capsys):
    settings, tensors = exported(runs["prefix"], tmp_path / "prefix")
    sizes = ("num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers")
    assert [settings[name] for name in sizes] == [3, 16, 2, 2]
    assert (settings["peft_type"], settings["task_type"]) == ("PREFIX_TUNING", "CAUSAL_LM")
    array = tensors["prompt_embeddings"]
    assert "base_model.model.layers.1.input_layernorm.weight" in tensors
    assert "model.layers.1.input_layernorm" in settings["modules_to_save"]
    for layer, (number, name) in enumerate(itertools.product((0, 1), ("keys", "values"))):
        leaf = leaves(runs["prefix"])[f"stack/0/attention/leading/{name}"][number]
        part = array.reshape(3, 4, 2, 8)[:, layer]
        np.testing.assert_array_equal(part, leaf)
    settings, tensors = exported(runs["prompt"], tmp_path / "prompt")
    assert (settings["peft_type"], settings["token_dim"]) == ("PROMPT_TUNING", 32)
    assert tensors["prompt_embeddings"].shape == (3, 32)
    for field in ("num_transformer_submodules", "field_of_tomorrow", "modules_to_save"):
        (tmp_path / "prompt" / CONFIG).write_text(json.dumps(settings | {field: ["x"]}))
        assert imported(tmp_path / "prompt", runs["base"], tmp_path / "run") == 65
        assert field in capsys.readouterr().err
    (tmp_path / "prompt" / CONFIG).write_text(json.dumps(settings | {"num_virtual_tokens": 4}))
    save_file(tensors | {"more": np.ones(1)}, tmp_path / "prompt" / TENSORS)
    assert imported(tmp_path / "prompt", runs["base"], tmp_path / "run") == 65
    printed = capsys.readouterr().err
    assert "got [3, 32], want [4, 32]" in printed
    assert "unexpected  more" in printed
    save_file({"more": np.ones(1)}, tmp_path / "prompt" / TENSORS)
    assert imported(tmp_path / "prompt", runs["base"], tmp_path / "run") == 65
    assert "missing     prompt_embeddings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("arm", ["lora", "dora", "ia3", "pissa", "dora_pissa"])
def test_adapters_of_a_fused_projection_are_stacked(fused, tmp_path, arm, capsys):
    settings, tensors = exported(fused[arm], tmp_path / "peft")
    place = "base_model.model.transformer.h.0.attn.c_attn."
    if arm == "lora":
        assert "stacked" in capsys.readouterr().out
        assert tensors[f"{place}lora_A.weight"].shape == (6, 32)
        b = tensors[f"{place}lora_B.weight"]
        assert not b[:32, 2:].any()
        assert b[:32, :2].any()
        assert settings["fan_in_fan_out"]
        assert (settings["r"], settings["rank_pattern"]) == (2, {"c_attn": 6})
        assert settings["alpha_pattern"] == {"c_attn": 96}
    if arm == "dora":  # the query alone: keys and values have the norms of the base
        assert tensors[f"{place}lora_magnitude_vector"].shape == (96,)
        assert not tensors[f"{place}lora_B.weight"][32:].any()
    if arm == "ia3":
        assert (tensors[f"{place}ia3_l"][:32] == 1).all()
    assert imported(tmp_path / "peft", fused["base"], tmp_path / "run") == 0
    before, after = (load.load_run(run).params for run in (fused[arm], tmp_path / "run"))
    for path, leaf in tree.leaves(before).items():
        np.testing.assert_allclose(leaf, tree.leaves(after)[path], atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_a_module_trained_in_part_is_saved_whole(fused, tmp_path):
    _, tensors = exported(fused["norms"], tmp_path / "peft")
    base = tree.leaves(load.load_run(fused["base"]).params)
    for layer, name in itertools.product((0, 1), ("1", "2")):
        norm = f"base_model.model.transformer.h.{layer}.ln_{name}"
        leaf = f"stack/0/{'attention' if name == '1' else 'mlp'}_norm"
        np.testing.assert_array_equal(tensors[f"{norm}.bias"], base[f"{leaf}/bias"][layer])
        assert np.any(tensors[f"{norm}.weight"] != base[f"{leaf}/scale"][layer])


@pytest.mark.slow
def test_the_base_of_an_imported_adapter_may_be_a_folder_of_transformers(fused, tmp_path, capsys):
    exported(fused["dora"], tmp_path / "peft")
    run, folder = tmp_path / "run", fused["base"].with_name("hf")
    assert imported(tmp_path / "peft", folder, run) == 0
    assert f"importing {folder} to {run}-base" in capsys.readouterr().out
    assert json.loads((run / "base.json").read_text())["run"] == f"{run}-base"
    before, after = leaves(fused["dora"]), leaves(run)
    for path, leaf in before.items():
        np.testing.assert_allclose(leaf, after[path], atol=1e-6, err_msg=path)


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_of_an_adapter_of_a_tied_base_is_refused(is_tied, tmp_path):
    part = MappedSlice("embedding/table", (), (8, 4), 1)
    saved = {"model.embed_tokens.weight": HFTensor("model.embed_tokens.weight", "same", (part,))}
    options = {"is_tied": is_tied, "folder": tmp_path, "fix": "--init_from=runs/base"}
    if not is_tied:
        assert adapter_places.whole_paths(saved, **options) == ["embedding/table"]
        return
    with pytest.raises(DataError, match="an embedding of its own") as refused:
        adapter_places.whole_paths(saved, **options)
    assert refused.value.fix == "--init_from=runs/base"


@pytest.mark.slow
def test_an_imported_adapter_is_a_run_like_any_other(runs, tmp_path, capsys):
    exported(runs["lora"], tmp_path / "peft")
    run = tmp_path / "run"
    assert imported(tmp_path / "peft", runs["base"], run) == 0
    losses = []
    for workdir in (runs["lora"], run):
        capsys.readouterr()
        assert main(["eval", f"--workdir={workdir}", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss_nats"])
    assert losses[0] == losses[1]
    assert main(["generate", f"--workdir={run}", "--prompt=a", "--max_tokens=3"]) == 0
    assert main(["merge", f"--workdir={run}", f"--out={tmp_path / 'merged'}"]) == 0
    assert main(["export", f"--workdir={run}", f"--out={tmp_path / 'hf'}"]) == 0
    capsys.readouterr()
    assert main(["train", f"--workdir={run}"]) == 2
    assert f"--init_from={run}" in capsys.readouterr().err
    record = json.loads((run / "base.json").read_text())
    (run / "base.json").write_text(json.dumps(record | {"run": str(tmp_path / "gone")}))
    assert main(["train", f"--workdir={run}", f"--init_from={runs['base']}"]) == 0
    assert json.loads((run / "base.json").read_text()) == record
    words = [f"--adapter={tmp_path / 'peft'}", f"--init_from={runs['base']}"]
    words += [f"--workdir={tmp_path / 'x'}", "--config.tune.rank=4"]
    assert main(["import", *words]) == 2
    assert "--config.tune.rank=2" in capsys.readouterr().err


def answers(capsys, *flags):
    """Return the loss and the text of a run."""
    capsys.readouterr()
    assert main(["eval", *flags, "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss_nats"]
    words = ("generate", *flags, "--prompt=a", "--max_tokens=8", "--temperature=0", "--json")
    assert main([*words]) == 0
    return loss, json.loads(capsys.readouterr().out)["samples"]


@pytest.mark.slow
def test_an_adapter_on_a_base_has_the_weights_of_its_run(runs, tmp_path):
    exported(runs["dora"], tmp_path / "peft")
    expected = tree.leaves(load.load_run(runs["dora"]).params)
    for place in (tmp_path / "peft", f"{runs['dora']}@0"):
        opened = load.load_run(runs["base"], adapter=adapter.reader(str(place), print))
        assert opened.run.tune.name == "full"
        for path, leaf in tree.leaves(opened.params).items():
            np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["lora", "bottleneck"])
def test_an_adapter_on_a_base_answers_as_its_run_does(runs, tmp_path, capsys, arm):
    places, base = [f"{runs[arm]}@0"], f"--workdir={runs['base']}"
    expected = answers(capsys, f"--workdir={runs[arm]}")
    assert answers(capsys, base) != expected
    if arm == "lora":
        exported(runs[arm], tmp_path / "peft")
        assert imported(tmp_path / "peft", runs["base"], tmp_path / "run") == 0
        assert answers(capsys, f"--workdir={tmp_path / 'run'}") == expected
        places += [str(tmp_path / "peft"), str(tmp_path / "run")]
    for place in places:
        assert answers(capsys, base, f"--adapter={place}") == expected


def test_an_adapter_of_another_base_is_refused(runs, fused, tmp_path, capsys):
    exported(runs["rslora"], tmp_path / "peft")
    base = f"--workdir={fused['base']}"
    words = ["eval", base, "--text=x", "--weights=ema", f"--adapter={tmp_path / 'peft'}"]
    assert main(words) == 2
    assert "no average" in capsys.readouterr().err
    for place, text in ((tmp_path / "peft", "do not fit"), (runs["lora"], "on another base")):
        assert main(["eval", base, f"--adapter={place}", "--text=x"]) == 65
        output = capsys.readouterr().err
        assert text in output
        assert re.search(rf"fix +--workdir={runs['base']}\b", output)
    base = f"--workdir={runs['lora']}"
    assert main(["generate", base, f"--adapter={runs['dora']}"]) == 2
    assert "jaxlm merge" in capsys.readouterr().err
    base = f"--workdir={runs['base']}"
    assert main(["generate", base, f"--adapter={runs['base']}"]) == 2
    assert "has no adapter" in capsys.readouterr().err
    assert main(["generate", base, f"--adapter={tmp_path / 'none'}"]) == 66
    assert main(["generate", base, f"--adapter={tmp_path}"]) == 66


@pytest.mark.slow
def test_layers_without_an_adapter_get_one_that_changes_nothing(runs, tmp_path, capsys):
    settings, tensors = exported(runs["dora"], tmp_path / "peft")
    first = {key: array for key, array in tensors.items() if "layers.0." in key}
    save_file(first, tmp_path / "peft" / TENSORS)
    (tmp_path / "peft" / CONFIG).write_text(json.dumps(settings | {"layers_to_transform": [0]}))
    assert imported(tmp_path / "peft", runs["base"], tmp_path / "run") == 0
    assert "7 layers have no adapter" in capsys.readouterr().out
    base, after = (
        tree.leaves(load.load_run(each).params) for each in (runs["base"], tmp_path / "run")
    )
    for path, leaf in base.items():
        if path.endswith("weight") and path.startswith("stack"):
            np.testing.assert_allclose(leaf[1], after[path][1], atol=1e-6, err_msg=path)
            assert np.abs(leaf[0] - after[path][0]).max() > 1e-4


FIELDS = {
    "target_parameters": ["experts.gate_up_proj"],
    "layer_replication": [[0, 2]],
    "use_qalora": True,
    "lora_bias": True,
    "bias": "all",
    "init_lora_weights": "pissa",
    "trainable_token_indices": [1],
    "alpha_pattern": {"(a+)+": 3},
    "peft_type": "LOHA",
    "field_of_tomorrow": None,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_changes_the_function_is_refused_by_name(runs, tmp_path, capsys, name):
    settings, _ = exported(runs["rslora"], tmp_path / "peft")
    (tmp_path / "peft" / CONFIG).write_text(json.dumps(settings | {name: FIELDS[name]}))
    assert imported(tmp_path / "peft", runs["base"], tmp_path / "run") == 65
    assert name in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def change(tensors, kind):
    key = f"{QUERY}lora_A.weight"
    if kind == "shape":
        tensors[key] = np.zeros((2, 48), np.float32)
    if kind == "dtype":
        tensors[key] = np.zeros((2, 32), np.int32)
    if kind == "missing":
        del tensors[key]
    if kind == "layer":
        del tensors[key], tensors[f"{QUERY}lora_B.weight"]
    if kind == "unexpected":
        tensors[f"{QUERY}lora_C.weight"] = np.zeros((2, 32), np.float32)
    if kind == "..":
        tensors["base_model.model.model.layers.0/../../x.lora_A.weight"] = np.zeros((2, 2), "f4")
    if kind == "whole":
        tensors["base_model.model.model.norm.weight"] = np.zeros(32, np.float32)


KINDS = {
    "shape": "got [2, 48], want [2, 32]",
    "dtype": "I32",
    "missing": "missing",
    "layer": "missing",
    "unexpected": "lora_C",
    "..": "/../../x",
    "whole": "model.norm.weight",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_does_not_fit_the_base_is_refused(runs, tmp_path, capsys, kind):
    _, tensors = exported(runs["rslora"], tmp_path / "peft")
    change(tensors, kind)
    save_file(tensors, tmp_path / "peft" / TENSORS)
    assert imported(tmp_path / "peft", runs["base"], tmp_path / "run") == 65
    assert KINDS[kind] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_files_that_are_missing_or_may_run_code_are_refused(runs, fused, tmp_path, capsys):
    folder = tmp_path / "peft"
    exported(runs["rslora"], folder)
    assert imported(folder, fused["base"], tmp_path / "run") == 65  # another base
    assert "do not fit the base" in capsys.readouterr().err
    assert imported(folder, runs["lora"], tmp_path / "run") == 2
    assert "has an adapter of its own" in capsys.readouterr().err
    (folder / TENSORS).rename(tmp_path / "elsewhere")
    (folder / TENSORS).symlink_to(tmp_path / "elsewhere")
    assert imported(folder, runs["base"], tmp_path / "run") == 65
    assert "outside the folder" in capsys.readouterr().err
    (folder / TENSORS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    assert imported(folder, runs["base"], tmp_path / "run") == 66
    assert "adapter_model.bin may hold code" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert imported(folder, runs["base"], tmp_path / "run") == 66
    assert "there is no adapter_config.json" in capsys.readouterr().err


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("export", "--workdir=base", "--to=peft", "--out=x"), "has no adapter"),
        (("export", "--workdir=bottleneck", "--to=peft", "--out=x"), "no such adapter"),
        (("export", "--workdir=lora", "--to=peft", "--out=base"), "already exists"),
        (("import", "--workdir=new", "--adapter=x"), "--init_from"),
        (("import", "--workdir=new", "--from=x", "--init_from=base"), "--adapter"),
        (("import", "--workdir=new"), "--from"),
    ],
)
def test_commands_that_cannot_be_followed_are_refused(runs, monkeypatch, capsys, words, text):
    for name in ("lora", "bottleneck"):
        assert runs[name].is_dir()
    monkeypatch.chdir(runs["base"].parent)
    assert main(list(words)) == 2
    assert text in capsys.readouterr().err
