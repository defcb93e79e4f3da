"""`jaxlm import --from=FILE.gguf` makes the run of a folder with the same numbers, or none."""

import json

import gguf
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.models.families.llama import Llama
from tests.checkpoint import ggufs
from tests.cli.test_exchange import call
from tests.parity import weights

LLAMA = Llama(vocab=300, width=64, depth=2, heads=4, kv_heads=2, hidden=96, max_positions=64)
TEXT = "ab cd aab \u6f22\U0001f600 efgh"


def dequantised(stored: dict[str, np.ndarray], storage: str) -> dict[str, np.ndarray]:
    """Tensors of a file by llama.cpp's names, as the format's own package dequantizes them."""
    kind = gguf.GGMLQuantizationType[storage]
    return {
        name: gguf.quants.dequantize(array, kind) if array.dtype == np.uint8 else array
        for name, array in stored.items()
    }


def folder_of(path, stored: dict[str, np.ndarray], source: Gguf) -> None:
    """A Hugging Face folder with these numbers, under the names and in transformers' order."""
    path.mkdir()
    weights.write(path, LLAMA)
    tensors = load_file(path / "model.safetensors")
    order = ggufs.tensors(LLAMA)
    assert order.keys() == stored.keys()
    for name, array in stored.items():
        theirs = source._architecture.theirs(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = LLAMA.heads if "attn_q" in name else LLAMA.kv_heads
            # The inverse of the permutation, from its definition.
            array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        tensors[theirs] = np.ascontiguousarray(array, np.float32)
    save_file(tensors, path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes(source.read(name, 2**20))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_logits_are_those_of_the_same_numbers_in_a_folder(storage, capsys, tmp_path):
    file = tmp_path / "model.gguf"
    stored = ggufs.write(file, LLAMA, storage=storage)
    folder_of(tmp_path / "folder", dequantised(stored, storage), Gguf(file))
    (tmp_path / "text.txt").write_text(TEXT * 20)
    losses, samples = [], []
    for source, run in ((file, "a"), (tmp_path / "folder", "b")):
        workdir = f"--workdir={tmp_path / run}"
        assert call(capsys, "import", f"--from={source}", workdir)[0] == 0
        words = ("eval", workdir, f"--text={tmp_path / 'text.txt'}", "--batch=4")
        code, answer, _ = call(capsys, *words)
        assert code == 0
        losses.append(answer["loss_nats"])
        words = ("generate", workdir, f"--prompt={TEXT}", "--temperature=0", "--max_tokens=8")
        code, answer, _ = call(capsys, *words)
        samples.append(answer["samples"][0]["ids"])
    assert losses[0] == losses[1]
    assert samples[0] == samples[1] != []


def test_a_quantised_file_comes_in_with_its_tokenizer(capsys, tmp_path):
    file, run = tmp_path / "model.gguf", tmp_path / "run"
    ggufs.write(file, LLAMA, storage="Q8_0")
    code, answer, _ = call(capsys, "import", f"--from={file}", f"--workdir={run}")
    assert (code, answer["family"], answer["dtype"]) == (0, "llama", "float32")
    assert answer["tensors"] == len(weights.tensors(LLAMA))
    config = json.loads((run / "config.json").read_text())
    assert config["model"] == {
        **config["model"],
        "width": 64,
        "norm_eps": 1e-5,
        "max_positions": 64,
    }
    code, shown, _ = call(capsys, "tokenizer", "show", str(run / "tokenizer"), f"--text={TEXT}")
    tokenizer = tokenizers.Tokenizer.from_file(str(run / "hub/tokenizer.json"))
    assert shown["ids"] == tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert shown["lossless"]
    settings = json.loads((run / "hub/tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert settings["add_bos_token"] is True


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("drop", "change", "expected"),
    [
        (
            ("blk.1.attn_q.weight", "output_norm.weight"),
            lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)),
            [
                "missing     model.layers.1.self_attn.q_proj.weight [64, 64]",
                "missing     model.norm.weight [64]",
                "unexpected  model.layers.0.self_attn.q_proj.bias",
            ],
        ),
        (
            (),
            lambda writer: writer.add_tensor("blk.0.attn_rot_embd", np.ones(8, np.float32)),
            ["unexpected  blk.0.attn_rot_embd"],
        ),
        (
            ("blk.0.ffn_up.weight",),
            lambda writer: writer.add_tensor("blk.0.ffn_up.weight", np.ones((64, 96), np.float32)),
            ["shape       model.layers.0.mlp.up_proj.weight: got [64, 96], want [96, 64]"],
        ),
        (
            ("blk.0.ffn_up.weight",),
            lambda writer: writer.add_tensor("blk.0.ffn_up.weight", np.ones((96, 64), np.int32)),
            ["dtype       model.layers.0.mlp.up_proj.weight: got GGML's 26, want F32"],
        ),
    ],
)
def test_a_file_that_does_not_fit_its_settings_is_refused_with_the_whole_list(
    drop, change, expected, capsys, tmp_path
):
    file, run = tmp_path / "model.gguf", tmp_path / "run"
    ggufs.write(file, LLAMA, drop=drop, change=change)
    code, answer, printed = call(capsys, "import", f"--from={file}", f"--workdir={run}")
    assert code == 65
    for line in expected:
        assert line in printed
    assert answer["error"]["what"].startswith(f"{len(expected)} tensors")
    assert not run.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("harm", "code"),
    [
        (lambda content: content[:1000], 65),
        (lambda content: content[:-4096], 65),
        (lambda content: b"\x80\x04\x95" + content[3:], 65),
        (lambda content: content.replace(b"llama.block_count", b"llama.block_cOunt"), 65),
        (
            lambda content: content.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"),
            65,
        ),
        (None, 66),
    ],
)
def test_a_file_that_is_no_model_is_refused_and_nothing_is_made(harm, code, capsys, tmp_path):
    file, run = tmp_path / "model.gguf", tmp_path / "run"
    ggufs.write(file, LLAMA)
    if harm is None:
        file.unlink()
    else:
        content = file.read_bytes()
        assert harm(content) != content
        file.write_bytes(harm(content))
    exit_code, answer, _ = call(capsys, "import", f"--from={file}", f"--workdir={run}")
    assert (exit_code, answer["error"]["code"]) == (code, code)
    assert not run.exists()


def test_more_ids_than_rows_are_refused(capsys, tmp_path):
    file = tmp_path / "model.gguf"
    ggufs.write(
        file,
        LLAMA,
        drop=("token_embd.weight",),
        change=lambda writer: writer.add_tensor(
            "token_embd.weight", np.ones((290, 64), np.float32)
        ),
    )
    code, answer, _ = call(capsys, "import", f"--from={file}", f"--workdir={tmp_path / 'run'}")
    assert code == 65
    assert "300 ids and the embedding 290 rows" in answer["error"]["what"]
