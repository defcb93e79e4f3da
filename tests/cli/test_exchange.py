"""`jaxlm import` and `jaxlm export`: Hugging Face folders come back equal, damaged ones not."""

import hashlib
import json
import random
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.cli.main import main
from jaxlm.core.quoting import printable
from jaxlm.models.families.deepseek import DeepSeekV3
from jaxlm.models.families.gemma import Gemma3
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.qwen import Qwen3Moe
from jaxlm.recipes.exchange import export_formats, export_model, import_model
from tests.faults import harness
from tests.parity import weights

VOCAB = 320
SIZES = dict(vocab=VOCAB, width=32, depth=3, heads=4, kv_heads=2, hidden=48, max_positions=64)
FAMILIES = {
    "llama": Llama(**SIZES),
    "gemma3": Gemma3(**SIZES | dict(depth=7), window=8),
    "qwen3_moe": Qwen3Moe(**SIZES, experts=4, top_k=2),
    "deepseek_v3": DeepSeekV3(
        vocab=VOCAB,
        width=32,
        depth=2,
        heads=4,
        max_positions=64,
        query_rank=16,
        kv_rank=24,
        nope_dim=6,
        rope_dim=4,
        value_dim=8,
        experts=4,
        top_k=2,
        groups=2,
        top_groups=1,
        hidden=24,
        shared=48,
        dense_depth=1,
        dense_hidden=48,
    ),
}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def write_tokenizer(folder, *, begins=True):
    """A byte-level tokenizer without merges, in which texts begin with <s>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(alphabet)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(["<s>", "</s>"])
    if begins:
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    built.save(str(folder / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>"}
    settings = {"bos_token": "<s>", "eos_token": end, "chat_template": "{{ x }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write(folder, name="llama", dtype="float32"):
    folder.mkdir()
    weights.write(folder, FAMILIES[name], DTYPES[dtype])
    write_tokenizer(folder)
    attributes = json.loads((folder / "config.json").read_text()) | {"torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(attributes))
    return folder


def call(capsys, *words):
    code = main([*words, "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out), output.err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "dtype", "mesh"),
    [
        ("llama", "bfloat16", {"data": 1, "fsdp": 4, "tensor": 2}),
        ("gemma3", "float32", {"data": 8}),
        ("qwen3_moe", "bfloat16", {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}),
        ("deepseek_v3", "bfloat16", {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}),
    ],
)
def test_f7_what_is_exported_is_what_was_imported_bit_for_bit(
    capsys, tmp_path, name, dtype, mesh, record_property
):
    source, run, out = write(tmp_path / "source", name, dtype), tmp_path / "run", tmp_path / "out"
    split = [f"--config.mesh.{axis}={ways}" for axis, ways in mesh.items()]
    drawn = json.dumps({"eos_token_id": [257, 256], "temperature": 0.6})
    (source / "generation_config.json").write_text(drawn)
    code, answer, lines = call(capsys, "import", f"--from={source}", f"--workdir={run}", *split)
    assert (code, answer["family"], answer["dtype"]) == (0, name, dtype)
    is_slower = "the run computes in float32; --config.precision.compute=bfloat16" in lines
    assert is_slower == (dtype == "bfloat16")
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert (code, answer["dtype"]) == (0, dtype)
    parity = json.loads((out / "parity.json").read_text())
    assert parity == answer["parity"]
    assert parity["is_bit_identical"]
    assert parity["tokens"] >= 128
    assert parity["largest_difference_by_rounding"] == 0.0
    record_property("F7", f"{name} {parity['tokens']} tokens the same")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, source))
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert ours[key].dtype == array.dtype
        np.testing.assert_array_equal(ours[key], array, err_msg=key)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
    assert after == before | ids
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_layers_that_predict_further_tokens_are_left_out_and_counted(capsys, tmp_path):
    source, run = write(tmp_path / "source", "deepseek_v3"), tmp_path / "run"
    stored = load_file(source / "model.safetensors")
    further = {
        key.replace("layers.1.", "layers.2."): array
        for key, array in stored.items()
        if "layers.1." in key
    }
    further["model.layers.2.eh_proj.weight"] = np.zeros((32, 64), np.float32)
    save_file(stored | further, source / "model.safetensors")
    words = ("import", f"--from={source}", f"--workdir={run}")
    code, answer, _ = call(capsys, *words)
    assert (code, answer["error"]["code"]) == (65, 65)
    assert f"{len(further)} tensors of the folder do not match" in answer["error"]["what"]
    attributes = json.loads((source / "config.json").read_text())
    attributes["num_nextn_predict_layers"] = 1
    (source / "config.json").write_text(json.dumps(attributes))
    code, answer, output = call(capsys, *words)
    assert (code, answer["ignored"]) == (0, sorted(further))
    assert f"not read: {len(further)} tensors of model.layers.2.*" in output
    assert "does not compute" in output
    assert "objective.name=mtp" in output
    assert "eh_proj" not in output


def part_of_a_larger(source, begins):
    """Return the folder as the text part of a Gemma 3 that sees images, and its other parts."""
    path = source / "config.json"
    attributes = json.loads(path.read_text())
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8}
    whole = {"model_type": "gemma3", "vision_config": vision, "mm_tokens_per_image": 4}
    path.write_text(json.dumps(whole | {"text_config": attributes, "eos_token_id": [257, 256]}))
    stored = load_file(source / "model.safetensors")
    before, after = begins
    moved = {after + name.removeprefix(before): array for name, array in stored.items()}
    prefix = after.removesuffix("language_model.")
    others = {
        f"{prefix}{name}": np.zeros((3, 2), np.float32)
        for name in ("vision_tower.a", "vision_tower.b", "multi_modal_projector.c")
    }
    save_file(moved | others, source / "model.safetensors")
    return stored, others


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "begins", [("", "language_model."), ("model.", "model.language_model.")], ids=["4", "5"]
)
def test_the_text_part_of_a_model_that_sees_images_is_a_model(capsys, tmp_path, begins):
    source, run, out = write(tmp_path / "source", "gemma3"), tmp_path / "run", tmp_path / "out"
    stored, others = part_of_a_larger(source, begins)
    words = ("import", f"--from={source}", f"--workdir={run}")
    code, answer, printed = call(capsys, *words)
    assert (code, answer["family"], answer["ignored"]) == (0, "gemma3", sorted(others))
    assert "not read: 2 tensors of" in printed
    assert "vision_tower.*, which is outside Gemma3ForCausalLM" in printed
    assert call(capsys, "export", f"--workdir={run}", f"--out={out}")[0] == 0
    written = load_file(out / "model.safetensors")
    assert written.keys() == stored.keys()
    assert all((written[name] == array).all() for name, array in stored.items())
    attributes = json.loads((out / "config.json").read_text())
    assert (attributes["model_type"], "vision_config" in attributes) == ("gemma3_text", False)


def test_what_is_not_known_of_a_model_that_sees_images_is_refused(capsys, tmp_path):
    source = write(tmp_path / "source", "gemma3")
    part_of_a_larger(source, ("", "language_model."))
    words = ("import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    path = source / "config.json"
    sound = json.loads(path.read_text())
    for changed, why in (
        ({"attention_turned": 1}, "attention_turned = 1 is not known"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False, and True is"),
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": sound["text_config"] | {"depth": 1}}, "depth = 1 is not known"),
    ):
        path.write_text(json.dumps(sound | changed))
        code, answer, _ = call(capsys, *words)
        assert code == 65
        assert why in answer["error"]["why"]
    path.write_text(json.dumps(sound))
    whole = load_file(source / "model.safetensors")
    save_file(whole | {"audio_tower.x": np.zeros(2, np.float32)}, source / "model.safetensors")
    code, answer, _ = call(capsys, *words)
    assert (code, "unexpected  audio_tower.x" in answer["error"]["why"]) == (65, True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: float8"),
        (
            {"topk_method": "greedy"},
            "topk_method = 'greedy', and 'noaux_tc' is what jaxlm computes",
        ),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2, and 4 or None"),
        ({"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_what_latent_attention_here_does_not_compute_is_not_imported(
    capsys, tmp_path, changed, why
):
    source = write(tmp_path / "source", "deepseek_v3")
    attributes = json.loads((source / "config.json").read_text()) | changed
    (source / "config.json").write_text(json.dumps(attributes))
    words = ("import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    code, answer, _ = call(capsys, *words)
    assert code == 65
    assert why in answer["error"]["why"]


@pytest.mark.slow
def test_an_imported_run_goes_on_from_its_own_tokens(capsys, tmp_path):
    source, run = write(tmp_path / "source"), tmp_path / "run"
    assert call(capsys, "import", f"--from={source}", f"--workdir={run}")[0] == 0
    words = ("generate", f"--workdir={run}", "--prompt=def ", "--max_tokens=5", "--temperature=0")
    code, answer, _ = call(capsys, *words)
    assert code == 0
    assert all(0 <= i < 256 for i in answer["samples"][0]["ids"])


def test_an_imported_run_is_evaluated(capsys, tmp_path):
    source, run = write(tmp_path / "source"), tmp_path / "run"
    assert call(capsys, "import", f"--from={source}", f"--workdir={run}")[0] == 0
    text = tmp_path / "text.txt"
    text.write_text("import os\n" * 40)
    words = ("eval", f"--workdir={run}", f"--text={text}", "--batch=8")
    code, answer, _ = call(capsys, *words)
    assert code == 0
    assert answer["tokens"] == 401  # each byte after <s>, and the end
    assert 4 < answer["loss_nats"] < 12
    code, answer, _ = call(capsys, "checkpoint", "verify", f"--workdir={run}")
    assert code == 0
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={run}")
    assert code == 2
    assert "the directory already contains a run" in answer["error"]["what"]


@pytest.mark.few(1)
@pytest.mark.parametrize("point", ["save.files", "save.commit"])
def test_an_import_that_was_killed_is_no_run_and_the_same_command_makes_it_whole(
    capsys, tmp_path, point
):
    source, run = write(tmp_path / "source"), tmp_path / "run"
    words = ["import", f"--from={source}", f"--workdir={run}"]
    assert harness.run(words, f"{point}:sigkill")[0] == -signal.SIGKILL
    left = {path.name for path in run.iterdir()}
    assert "imported.json" in left, "it was killed while it saved"
    assert "config.json" not in left
    assert call(capsys, "generate", f"--workdir={run}")[0] == 66
    code, answer, _ = call(capsys, "train", "--config=configs/quickstart.py", f"--workdir={run}")
    assert (code, answer["error"]["what"]) == (2, "cannot resume from an imported model")
    assert call(capsys, *words)[0] == 0
    assert call(capsys, "checkpoint", "verify", f"--workdir={run}")[0] == 0
    assert call(capsys, "generate", f"--workdir={run}", "--max_tokens=2")[0] == 0
    assert not (run / "quarantine").exists(), "nothing was committed"


@pytest.mark.slow
def test_weights_without_the_config_that_makes_them_a_run_are_kept_and_imported_again(
    capsys, tmp_path
):
    source, run = write(tmp_path / "source"), tmp_path / "run"
    words = ("import", f"--from={source}", f"--workdir={run}")
    assert call(capsys, *words)[0] == 0
    (run / "config.json").unlink()
    assert call(capsys, *words)[0] == 0
    (digests,) = run.glob("quarantine/*/digests.json")
    assert digests.read_bytes() != (run / "checkpoints/0/digests.json").read_bytes()
    (run / "config.json").unlink()
    (run / "imported.json").unlink()  # then it may be anybody's
    code, answer, _ = call(capsys, *words)
    assert (code, answer["error"]["what"]) == (2, "the directory already contains a run")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gemma3"])  # of its own head, and of the embedding
def test_added_tokens_have_the_mean_of_the_others_and_those_stay_as_they_were(
    capsys, tmp_path, name
):
    source, run, out = write(tmp_path / "source", name), tmp_path / "run", tmp_path / "out"
    added = ["<|tool|>", "naïve", *(f"token{i}" for i in range(70))]
    words = [f"--add_token={token}" for token in added]
    mesh = ("--config.mesh.data=1", "--config.mesh.fsdp=4", "--config.mesh.tensor=2")
    code, answer, output = call(
        capsys, "import", f"--from={source}", f"--workdir={run}", *words, *mesh
    )
    assert (code, answer["added_tokens"]) == (0, added)
    assert "72 tokens added; their rows are the mean of the 258 others" in output
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert (code, answer["parity"]["is_bit_identical"]) == (0, True)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    size = 258 + len(added)  # more than the 320 rows that there were
    assert json.loads((out / "config.json").read_text())["vocab_size"] == size
    changed = [key for key in before if before[key].shape != after[key].shape]
    assert len(changed) == (2 if name == "llama" else 1)
    for key in before:
        old, new = before[key], after[key]
        if key in changed:
            mean = old[:258].mean(0, dtype=np.float64).astype(np.float32)
            np.testing.assert_array_equal(new[258:], np.broadcast_to(mean, (72, 32)))
            old, new = old[:258], new[:258]
        np.testing.assert_array_equal(new, old, err_msg=key)
    text = "a naïve call of <|tool|>"
    exported = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = exported.encode(text, add_special_tokens=False).ids
    ours = Folder(out)
    tokenizer = import_model.read_tokenizer(ours)
    assert tokenizer.encode(text) == ids
    assert {258, 259} < set(ids)
    assert tokenizer.decode(ids) == text


def test_a_vocabulary_that_lacks_the_added_tokens_is_not_exported_beside(capsys, tmp_path):
    source = write(tmp_path / "source")
    (source / "vocab.json").write_text('{"a": 0}')
    (source / "merges.txt").write_text("#version: 0.2\n")
    for words, is_exported in (((), True), (("--add_token=<|tool|>",), False)):
        run, out = tmp_path / f"run {is_exported}", tmp_path / f"out {is_exported}"
        assert call(capsys, "import", f"--from={source}", f"--workdir={run}", *words)[0] == 0
        assert call(capsys, "export", f"--workdir={run}", f"--out={out}")[0] == 0
        assert {(out / name).exists() for name in ("vocab.json", "merges.txt")} == {is_exported}


@pytest.mark.few(1)
@pytest.mark.parametrize("token", ["", "a", "<s>"])
def test_a_token_that_is_there_is_not_added(capsys, tmp_path, token):
    source, run = write(tmp_path / "source"), tmp_path / "run"
    code, answer, _ = call(
        capsys, "import", f"--from={source}", f"--workdir={run}", f"--add_token={token}"
    )
    assert code == 2
    assert "is not a new token" in answer["error"]["what"]
    assert not run.exists()


@pytest.mark.parametrize(
    ("begins", "added", "first"),
    [(True, None, [256]), (True, False, []), (False, None, []), (False, True, [256])],
)
def test_a_document_begins_as_the_tokenizer_begins_a_text(tmp_path, begins, added, first):
    source = write(tmp_path / "source")
    write_tokenizer(source, begins=begins)
    if added is not None:
        settings = json.loads((source / "tokenizer_config.json").read_text())
        settings["add_bos_token"] = added
        (source / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = import_model.read_tokenizer(Folder(source))
    assert (list(tokenizer.before), tokenizer.after) == (first, (257,))


@pytest.mark.slow
def test_a_model_of_several_files_is_read_and_written(capsys, tmp_path):
    source, run, out = write(tmp_path / "source"), tmp_path / "run", tmp_path / "out"
    index, tensors = split(source)
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={run}")
    assert (code, answer["tensors"]) == (0, len(tensors))
    answer = export_model.export_model(run, out, dtype="bfloat16", shard_bytes=20_000)
    written = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(written["weight_map"].values())
    assert written["metadata"]["total_size"] == 2 * sum(array.size for array in tensors.values())
    assert len(files) == answer["files"] > 3
    assert answer["parity"]["is_bit_identical"]
    assert answer["parity"]["largest_difference_by_rounding"] > 1e-4
    for file in files:
        for name, array in load_file(out / file).items():
            assert written["weight_map"][name] == file
            np.testing.assert_array_equal(array, tensors[name].astype(ml_dtypes.bfloat16))


def tensors_of(source, change):
    file = source / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


LAYER = "model.layers.1.self_attn.q_proj.weight"


def transposed(tensors):
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)


DAMAGES = {
    "one tensor absent": (lambda tensors: tensors.pop(LAYER), ["missing", LAYER]),
    "one more": (
        lambda tensors: tensors.update(extra=np.ones(3, np.float32)),
        ["unexpected", "extra"],
    ),
    "another shape": (
        lambda tensors: tensors.update({LAYER: np.ones((31, 32), np.float32)}),
        [f"{LAYER}: got [31, 32], want [32, 32]"],
    ),
    "another dtype": (
        lambda tensors: tensors.update({LAYER: np.ones((32, 32), np.int64)}),
        [f"{LAYER}: got I64, want F32, F16, BF16"],
    ),
    "transposed": (transposed, ["up_proj.weight: got [32, 48], want [48, 32]"]),
    "no head": (
        lambda tensors: tensors.pop("lm_head.weight"),
        ["missing", "lm_head.weight [320, 32]"],
    ),
    "several": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if ".0." in name],
        [
            f"model.layers.0.{part}"
            for part in ("mlp.gate_proj", "self_attn.k_proj", "input_layernorm")
        ],
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_f6_a_damaged_folder_is_refused_with_the_whole_list_and_nothing_is_made(
    capsys, tmp_path, damage
):
    change, output = DAMAGES[damage]
    source, run = write(tmp_path / "source"), tmp_path / "run"
    tensors_of(source, change)
    code, answer, printed = call(capsys, "import", f"--from={source}", f"--workdir={run}")
    assert (code, answer["error"]["code"]) == (65, 65)
    for part in output:
        assert part in printed
    error = answer["error"]
    listed = error.get("every", error["why"].splitlines()[1:])
    assert {line.split()[0] for line in listed} <= {"missing", "unexpected", "shape", "dtype"}
    assert error["what"].startswith(f"{len(listed)} tensors")
    assert not run.exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", ["tensors", "index"])
def test_f6_more_than_an_error_has_room_for_is_listed_all_the_same(capsys, tmp_path, wrong):
    source = write(tmp_path / "source")
    if wrong == "index":
        index, _ = split(source)
        names = [f"nowhere.{number}" for number in range(9)]
        index["weight_map"] |= dict.fromkeys(names, "a.safetensors")
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        names = [f"model.more.{number}" for number in range(9)]
        tensors_of(source, lambda tensors: tensors.update(dict.fromkeys(names, tensors[LAYER])))
    words = ("import", f"--from={source}", f"--workdir={tmp_path / 'run'}", "--quiet")
    code, answer, printed = call(capsys, *words)
    assert code == 65
    assert "and 4 more, listed above" in answer["error"]["why"]
    for name in names:
        assert sum(name in line for line in answer["error"]["every"]) == 1
        assert name in printed.partition("and 4 more")[0]


def split(source):
    """The model in two files with an index, as a dict to be harmed."""
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, source / file)
    return {
        "weight_map": {name: file for file, members in parts.items() for name in members}
    }, tensors


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("a name in no file", "nowhere is not in a.safetensors"),
        ("a name left out", "but the index names None"),
        ("two files have it", "is in a.safetensors and in b.safetensors"),
        ("a file that is not there", "there is no c.safetensors"),
        ("no map", "has no weight_map"),
        ("not JSON", "is not a JSON object"),
    ],
)
def test_f6_an_index_that_does_not_match_its_files_is_refused(capsys, tmp_path, harm, message):
    source = write(tmp_path / "source")
    index, tensors = split(source)
    names = index["weight_map"]
    text = None
    if harm == "a name in no file":
        names["nowhere"] = "a.safetensors"
    elif harm == "a name left out":
        names.pop(LAYER)
    elif harm == "two files have it":
        second = [name for name, file in names.items() if file == "b.safetensors"]
        save_file({name: tensors[name] for name in [*second, min(names)]}, source / "b.safetensors")
    elif harm == "a file that is not there":
        names[LAYER] = "c.safetensors"
    elif harm == "no map":
        index = {"weight_map": ["a.safetensors"]}
    else:
        text = "{" * 100_000
    place = source / "model.safetensors.index.json"
    place.write_text(json.dumps(index) if text is None else text)
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert code == (66 if "not there" in harm else 65)
    assert message in answer["error"]["what"] + answer["error"]["why"]


def header(**tensors):
    """A file of safetensors with this header and sixteen bytes of numbers."""
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 16


def tensor(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


LIES = {
    "a header of 2^40 bytes": struct.pack("<Q", 2**40) + b"{}",
    "shorter than its length": b"\1\0\0",
    "an overlap": header(a=tensor(0, 8), b=tensor(4, 12)),
    "a shape that is not its size": header(a=tensor(0, 16, (5,))),
    "cut off": header(a=tensor(0, 64, (16,))),
    "bytes too many": header(a=tensor(0, 8)),
    "a dtype that is none": header(a=tensor(0, 16, (4,), "F31")),
    "a name twice": struct.pack("<Q", 125)
    + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],'
    b'"data_offsets":[8,16]}}'.ljust(125)
    + b"\0" * 16,
    "a pickle": b"\x80\x04\x95",
}


@pytest.mark.few(3)
@pytest.mark.parametrize("lie", LIES)
def test_s3_a_file_that_lies_about_itself_is_refused(capsys, tmp_path, lie):
    source = write(tmp_path / "source")
    (source / "model.safetensors").write_bytes(LIES[lie])
    assert call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")[0] == 65
    assert not (tmp_path / "run").exists()


REFUSE = """
import json, sys, time
from pathlib import Path
from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.core.errors import DataError

for folder in sys.argv[1:]:
    begun, used = time.monotonic(), time.process_time()
    try:
        Folder(Path(folder)).tensors()
    except DataError:
        print(time.monotonic() - begun, time.process_time() - used)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def test_s3_a_lie_costs_at_most_a_second_and_a_hundred_megabytes(tmp_path, record_property):
    """Each; and the process that has met them all held no more at its peak."""
    for name, content in LIES.items():
        source = write(tmp_path / name)
        (source / "model.safetensors").write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, *(tmp_path / name for name in LIES)],
        capture_output=True,
        text=True,
        check=True,
    )
    *seconds, kilobytes = map(float, done.stdout.split())
    took = [harness.Took(*each) for each in zip(seconds[::2], seconds[1::2], strict=True)]
    assert len(took) == len(LIES) >= 7
    slowest = max(took, key=lambda each: each.processor)
    record_property("S3", f"{len(took)} false records, {slowest}, {kilobytes / 1e3:.0f} MB")
    for each in took:
        each.require(1)
    assert kilobytes * 1024 <= 100e6


def flip(path, place):
    """Changes one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


def payload(path):
    """The place of the first bit of a file's numbers, and of that behind the last."""
    return 8 * (8 + struct.unpack("<Q", path.read_bytes()[:8])[0]), 8 * path.stat().st_size


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder that an export wrote, in several files."""
    folder = tmp_path_factory.mktemp("exported")
    source, run = write(folder / "source"), folder / "run"
    import_model.import_model(import_model.ImportOptions(source=source, workdir=run))
    export_model.export_model(run, folder / "out", shard_bytes=20_000)
    return folder / "out"


def test_s3_a_flipped_bit_of_an_exported_payload_is_refused_by_the_files_name(
    capsys, tmp_path, exported
):
    source, run = tmp_path / "source", tmp_path / "run"
    words = ("import", f"--from={source}", f"--workdir={run}")
    draw, struck = random.Random(3), set()
    files = sorted(path.name for path in exported.glob("model-*.safetensors"))
    assert len(files) > 3
    for name in files:
        shutil.copytree(exported, source)
        first, end = payload(source / name)
        flip(source / name, draw.randrange(first, end))
        Folder(source)  # the library finds nothing wrong
        code, answer, _ = call(capsys, *words)
        assert code == 65
        assert answer["error"]["what"] == f"{name} changed since the digest was recorded"
        assert answer["error"]["where"] == str(source / name)
        assert not run.exists()
        shutil.rmtree(source)
        struck.add(name)
    assert len(struck) == len(files)
    shutil.copytree(exported, source)
    code, _, printed = call(capsys, *words)
    assert code == 0
    others = 4  # config.json, generation_config.json, tokenizer.json, tokenizer_config.json
    count = len(files) + 1 + others
    assert f"compared by sha256: {count} of {count} files\n" in printed


def test_s3_what_an_export_writes_down_is_what_sha256sum_compares(exported):
    listed = (exported / "SHA256SUMS").read_text()
    files = {path.name: path for path in exported.iterdir() if path.name != "SHA256SUMS"}
    lines = [line.split("  ") for line in listed.splitlines()]
    assert {name: digest for digest, name in lines} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
    }
    assert {"config.json", "parity.json", "README.md", "tokenizer.json"} < files.keys()


def test_an_export_says_what_generation_begins_and_ends_with_and_what_the_run_was(exported):
    config = json.loads((exported / "config.json").read_text())
    ends = json.loads((exported / "generation_config.json").read_text())
    assert ends == {name: config[name] for name in ends}
    assert {"eos_token_id", "pad_token_id"} <= ends.keys()
    card, parity = (
        (exported / "README.md").read_text(),
        json.loads((exported / "parity.json").read_text()),
    )
    for fact in (f"{config['architectures'][0]} by jaxlm", "step 0", f"{parity['tokens']} tokens"):
        assert fact in card


def test_s3_a_folder_that_says_nothing_of_its_files_is_imported_and_that_is_said(capsys, tmp_path):
    source, run = write(tmp_path / "source"), tmp_path / "run"
    code, _, printed = call(capsys, "import", f"--from={source}", f"--workdir={run}")
    assert code == 0
    output = [line for line in printed.splitlines() if line.startswith("no sha256 to compare with")]
    assert len(output) == 1
    digest = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    (source / "SHA256SUMS").write_text(f"of no form\n{digest} *config.json\n")
    code, _, printed = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'other'}")
    assert code == 0
    assert "compared by sha256: 1 of 4 files; no sha256 is known of tokenizer.json" in printed


def test_s3_a_cache_of_the_hub_names_its_large_files_by_what_they_must_hold(capsys, tmp_path):
    cache = tmp_path / "models--a--b"
    source = cache / "snapshots/1234"
    source.parent.mkdir(parents=True)
    weights = write(source) / "model.safetensors"
    blob = cache / "blobs" / hashlib.sha256(weights.read_bytes()).hexdigest()
    blob.parent.mkdir()
    weights.rename(blob)
    weights.symlink_to(blob)
    whole = blob.read_bytes()
    flip(blob, payload(blob)[1] - 100)
    assert sum(a != b for a, b in zip(whole, blob.read_bytes(), strict=True)) == 1
    words = ("import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    code, answer, _ = call(capsys, *words)
    assert code == 65
    assert answer["error"]["where"] == str(weights)
    assert answer["error"]["fix"].startswith(f"rm {blob}    # ")
    assert not (tmp_path / "run").exists()
    flip(blob, payload(blob)[1] - 100)
    code, _, printed = call(capsys, *words)
    assert code == 0
    assert "compared by sha256: 1 of 4 files; no sha256 is known of config.json" in printed


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["climbs", "absolute", "a link"])
def test_s5_an_index_that_names_a_file_elsewhere_is_refused(capsys, tmp_path, way):
    source, elsewhere = write(tmp_path / "source"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (source / "model.safetensors").rename(elsewhere / "model.safetensors")
    name = {
        "climbs": "../elsewhere/model.safetensors",
        "absolute": str(elsewhere / "model.safetensors"),
    }.get(way, "linked.safetensors")
    if way == "a link":
        (source / name).symlink_to(elsewhere / "model.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {LAYER: name}}))
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert code == 65
    assert "outside the folder" in answer["error"]["what"]


def test_a_folder_in_a_cache_of_the_hub_may_link_to_its_own_blobs(capsys, tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    source = write(cache / "snapshots/1234")
    (cache / "blobs").mkdir()
    for path in list(source.iterdir()):
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    assert call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")[0] == 0


def test_s6_code_that_comes_with_a_model_is_not_run(capsys, tmp_path, monkeypatch):
    source = write(tmp_path / "source")
    attributes = json.loads((source / "config.json").read_text())
    attributes["auto_map"] = {"AutoModelForCausalLM": "modeling.Evil"}
    (source / "config.json").write_text(json.dumps(attributes))
    (source / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setenv("HF_HUB_TRUST_REMOTE_CODE", "1")
    code, _, printed = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert code == 0
    assert "never run" in printed
    assert not (tmp_path / "ran").exists()


def test_s1_a_folder_of_pickles_is_refused_with_the_way_out(capsys, tmp_path):
    source = write(tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert code == 66
    assert "pytorch_model.bin may hold code" in answer["error"]["why"]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("model_type", "mamba", "model type 'mamba' is not known"),
        ("attention_bias", True, "attention_bias = True, and False is what jaxlm computes"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "rope_type = 'dynamic'"),
        ("rope_interleaved", True, "rope_interleaved = True, and False is what jaxlm computes"),
        ("clever_new_part", 3, "clever_new_part = 3 is not known"),
        ("hidden_size", "32", "hidden_size = '32' is no int"),
        ("hidden_size", None, "hidden_size is missing"),
        ("num_key_value_heads", 3, "heads = 4 does not divide by kv_heads = 3"),
    ],
)
def test_attributes_that_are_not_understood_are_refused(
    capsys, tmp_path, attribute, value, message
):
    source = write(tmp_path / "source")
    attributes = json.loads((source / "config.json").read_text()) | {attribute: value}
    (source / "config.json").write_text(json.dumps(attributes))
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert code in (2, 65)
    assert printable(message) in answer["error"]["what"] + answer["error"]["why"]


def test_a_head_that_is_stored_beside_a_tied_embedding_must_be_the_same(capsys, tmp_path):
    source = write(tmp_path / "source")
    attributes = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(attributes))
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run'}")
    assert code == 65
    assert "differs from the embedding" in answer["error"]["what"]
    tensors_of(
        source,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}),
    )
    code, answer, _ = call(capsys, "import", f"--from={source}", f"--workdir={tmp_path / 'run2'}")
    assert (code, answer["ignored"]) == (0, ["lm_head.weight"])


def test_an_export_whose_config_says_something_else_is_not_called_finished(
    capsys, tmp_path, monkeypatch
):
    source, run, out = write(tmp_path / "source"), tmp_path / "run", tmp_path / "out"
    assert call(capsys, "import", f"--from={source}", f"--workdir={run}")[0] == 0
    real = export_formats._attributes
    monkeypatch.setattr(
        export_formats, "_attributes", lambda *args: real(*args) | {"rope_theta": 123.0}
    )
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert code == 1
    assert "other logits" in answer["error"]["what"]
    assert not out.exists()


@pytest.mark.slow
def test_numbers_of_two_dtypes_come_back_whole_whatever_config_json_calls_them(capsys, tmp_path):
    source, run, out = (
        write(tmp_path / "source", dtype="bfloat16"),
        tmp_path / "run",
        tmp_path / "out",
    )
    file = source / "model.safetensors"
    tensors = load_file(file)
    wide = next(name for name in tensors if "mlp" in name)
    tensors[wide] = tensors[wide].astype(np.float32) + 1e-5
    save_file(tensors, file, metadata={"format": "pt"})
    code, answer, output = call(capsys, "import", f"--from={source}", f"--workdir={run}")
    assert (code, answer["dtype"]) == (0, "float32")
    assert "config.json declares 'bfloat16', but the matrices are BF16 and F32" in output
    assert call(capsys, "export", f"--workdir={run}", f"--out={out}")[0] == 0
    back = load_file(out / "model.safetensors")
    assert all(
        np.array_equal(back[name], each.astype(np.float32)) for name, each in tensors.items()
    )


def last_row(array):
    """With another last row: an id that the text which is tried does not have."""
    array = np.array(array)
    array[-1] += 1
    return array


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mlp", lambda array: array * 1.01, "other logits"),
        ("mlp", lambda array: array * np.nan, "not finite"),
        ("embed_tokens", last_row, "other weights"),
    ],
)
def test_an_export_that_reads_back_otherwise_is_not_called_finished(
    capsys, tmp_path, monkeypatch, name, change, message
):
    """The error is raised if no logit differs, or if a logit is no number and so above no limit.

    The config of the model has the keys of SmolLM2's.
    """
    source, run, out = write(tmp_path / "source"), tmp_path / "run", tmp_path / "out"
    attributes = json.loads((source / "config.json").read_text())
    attributes |= {"is_llama_config": True, "rope_interleaved": False}
    (source / "config.json").write_text(json.dumps(attributes))
    assert call(capsys, "import", f"--from={source}", f"--workdir={run}")[0] == 0
    whole = export_formats.write_tensors

    def harmed(folder, tensors, array, dtype, **rest):
        def other(each):
            return change(array(each)) if name in each.name else array(each)

        return whole(folder, tensors, other, dtype, **rest)

    monkeypatch.setattr(export_formats, "write_tensors", harmed)
    code, answer, _ = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert code == 1
    assert message in answer["error"]["what"]
    assert not out.exists()
    assert (tmp_path / "out.partial/parity.json").exists()
