"""Adapters of jaxlm compared with PEFT, in both directions: the largest difference of the logits.

The script runs in jaxlm's environment and calls itself with the interpreter of another one, which
has torch 2.13, transformers 5 and PEFT 0.21:

    python -m venv peft && peft/bin/pip install torch==2.13.0 transformers==5.* peft==0.21.2
    python scripts/parity/peft_adapters.py --peft_python=peft/bin/python --out=runs/peft

For each case PEFT makes a random model and a random adapter, jaxlm imports both, and the logits of
the adapter on its base and of the merged model are compared (`in`, `merged`). Then jaxlm trains an
adapter for that model and exports it, and PEFT loads it (`out`); `again` is PEFT's folder after an
import and an export, in tensors that differ. The exit code is 1 if a difference exceeds 1e-5 of the
largest logit.
"""

import argparse
import contextlib
import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

CASES = [
    ("llama", "lora"),
    ("llama", "rslora"),
    ("llama", "dora"),
    ("llama", "pissa"),
    ("llama", "dora pissa"),  # read as DoRA; trained here from PiSSA's first values
    ("llama", "ia3"),
    ("gpt2", "lora"),
    ("gpt2", "rslora"),
    ("gpt2", "dora"),
    ("gpt2", "pissa"),
    ("gpt2", "dora pissa"),
    ("gpt2", "ia3"),
    ("llama", "prefix"),
    ("llama", "prompt"),
    ("gpt2", "prefix"),
    ("gpt2", "prompt"),
    ("gpt_neox", "prefix"),
    ("phi3", "lora"),
    ("gpt_neox", "lora"),
]
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
IA3 = {  # targets, and those of them whose inputs are scaled
    "llama": (["k_proj", "v_proj", "down_proj"], ["down_proj"]),
    "gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]),
}
OUTSIDE = {"llama": "model.norm", "gpt2": "ln_f", "phi3": "model.norm", "gpt_neox": None}
VOCAB, WIDTH, LAYERS, HEADS = 320, 32, 2, 4
VIRTUAL = {"prefix": "PrefixTuningConfig", "prompt": "PromptTuningConfig"}
TOLERANCE = 1e-5
IDS = np.random.default_rng(0).integers(0, 250, (3, 40))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peft_python", help="interpreter of the environment with PEFT")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--make", nargs=2, metavar=("FAMILY", "ARM"), help="of the script itself")
    parser.add_argument("--logits", nargs=2, metavar=("BASE", "ADAPTER"), help="the same")
    parser.add_argument("--only", help="family/arm")
    args = parser.parse_args()
    if args.make:
        family, arm = args.make
        make(family, arm, args.out)
        return 0
    if args.logits:
        np.savez(args.out, logits=peft_logits(*args.logits))
        return 0
    worst = 0.0
    for family, arm in CASES:
        if args.only in (None, f"{family}/{arm}"):
            row = compare(args.peft_python, family, arm, args.out / f"{family}-{arm}")
            print(
                f"{family:9} {arm:10}", *(f"{name} {row[name]:<9.2g}" for name in row), flush=True
            )
            worst = max(worst, row["in"], row["merged"], row["out"])
    return int(not worst <= TOLERANCE)


def compare(peft_python: str, family: str, arm: str, folder: Path) -> dict[str, float]:
    """Return the differences of a case over the largest logit; `effect` is that of the adapter."""
    from safetensors.numpy import load_file

    from jaxlm.cli.main import main as jaxlm

    def other(*words: object) -> None:
        subprocess.run([peft_python, __file__, *map(str, words)], check=True, timeout=300)

    def call(*words: object) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            code = jaxlm([*map(str, words), "--quiet"])
        assert code == 0, words

    folder.mkdir(parents=True)
    other(f"--out={folder}", "--make", family, arm)
    base, tuned, trained = (folder / name for name in ("base", "tuned", "trained"))
    call("import", f"--from={folder / 'hf'}", f"--workdir={base}")
    call("import", f"--adapter={folder / 'peft'}", f"--workdir={tuned}", f"--init_from={base}")
    expected = np.load(folder / "logits.npz")["logits"]
    size = np.abs(expected).max()
    row = {
        "effect": np.abs(expected - logits(base)).max() / size,
        "in": np.abs(expected - logits(tuned, is_merged=False)).max() / size,
        "merged": np.abs(expected - logits(tuned)).max() / size,
    }
    returned = folder / "again"
    call("export", f"--workdir={tuned}", "--to=peft", f"--out={returned}")
    one, two = (
        load_file(each / "adapter_model.safetensors") for each in (folder / "peft", returned)
    )
    row["again"] = sum(
        key not in one or key not in two or not np.array_equal(one[key], two[key])
        for key in one.keys() | two.keys()
    )
    tune = {"name": arm, "at": ["*/attention/*", "*/mlp/*"], "rank": 2}
    if arm == "rslora":
        tune |= {"name": "lora", "scale": "root"}
    if arm == "pissa":
        tune |= {"name": "lora", "init": "pissa"}
    if arm == "dora pissa":
        tune |= {"name": "dora", "init": "pissa"}
    if arm == "ia3":
        tune = {"name": "ia3"}
    if arm in VIRTUAL:
        tune = {"name": arm, "length": 5, "also": ["*norm/scale"]}
    (folder / "config.json").write_text(json.dumps({"tune": tune}))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    call(
        *("train", f"--config={folder / 'config.json'}", f"--init_from={base}"),
        *(f"--workdir={trained}", f"--config.data.train={folder / 'text.txt'}"),
        *("--config.train.steps=8", "--config.train.batch=4", "--config.data.sequence=32"),
        *("--config.optim.lr=0.005", "--config.schedule.name=constant", "--config.eval.batches=1"),
        *("--config.data.validation=tail:20%", "--config.sample.max_tokens=8"),
    )
    call("export", f"--workdir={trained}", "--to=peft", f"--out={folder / 'ours'}")
    call("export", f"--workdir={base}", f"--out={folder / 'exported'}")
    other(f"--out={folder / 'ours.npz'}", "--logits", folder / "exported", folder / "ours")
    theirs, ours = np.load(folder / "ours.npz")["logits"], logits(trained, is_merged=False)
    row["out"] = np.abs(theirs - ours).max() / np.abs(theirs).max()
    row["trained"] = np.abs(ours - logits(base)).max() / np.abs(theirs).max()
    return row


def logits(workdir: Path, *, is_merged: bool = True) -> np.ndarray:
    """Return the logits of a run of jaxlm."""
    import jax

    from jaxlm.recipes.use import load

    opened = load.load_run(workdir, is_merged=is_merged)
    positions = np.broadcast_to(np.arange(IDS.shape[1]), IDS.shape)

    @jax.jit
    def computed(params: Any, tokens: jax.Array) -> jax.Array:
        model = opened.model.blueprint.merge(params)
        return model.logits(model.hidden(tokens, positions=positions).values)

    with jax.set_mesh(opened.model.mesh), jax.default_matmul_precision("highest"):
        return np.asarray(computed(opened.params, IDS))


def make(family: str, arm: str, folder: Path) -> None:
    """Write a random model, a random adapter of PEFT, and the logits of both together."""
    import torch
    import transformers

    peft = importlib.import_module("peft")
    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    common = {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": None}
    model = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**common, **sizes, **heads)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB, n_positions=64, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS
            )
        ),
        "phi3": lambda: transformers.Phi3ForCausalLM(
            transformers.Phi3Config(**common, **sizes, **heads)
        ),
        "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(**common, **sizes, num_attention_heads=HEADS)
        ),
    }[family]()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.add_(torch.randn_like(value) * (0.1 if value.ndim > 1 else 0.05))
            assert name
    model.save_pretrained(folder / "hf")
    write_tokenizer(folder / "hf")
    if arm in VIRTUAL:
        config = virtual_config(family, arm)
    elif arm == "ia3":
        targets, inputs = IA3[family]
        config = peft.IA3Config(target_modules=targets, feedforward_modules=inputs)
    else:
        config = peft.LoraConfig(
            r=4,
            lora_alpha=6,
            target_modules=TARGETS[family],
            use_dora=arm.startswith("dora"),
            use_rslora=arm == "rslora",
            init_lora_weights="pissa" if arm == "pissa" else True,
            modules_to_save=None
            if OUTSIDE[family] is None or arm == "pissa"
            else [OUTSIDE[family]],
            fan_in_fan_out=family == "gpt2",
        )
    adapted = peft.get_peft_model(model, config)
    first: dict[str, Any] = {}
    if arm == "pissa":  # saved as an adapter of the original base, of twice the rank
        config.init_lora_weights = True
        adapted.save_pretrained(folder / "first")
        first = {"path_initial_model_for_weight_conversion": str(folder / "first")}
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
    if first:
        config.init_lora_weights = "pissa"
    adapted.save_pretrained(folder / "peft", **first)
    adapted.eval()
    with torch.no_grad():
        np.savez(folder / "logits.npz", logits=_of_text(adapted))


def virtual_config(family: str, arm: str) -> Any:
    """Return PEFT's settings of virtual tokens, and of a module that is trained whole."""
    kind = getattr(importlib.import_module("peft"), VIRTUAL[arm])
    whole = None if OUTSIDE[family] is None else [OUTSIDE[family]]
    return kind(num_virtual_tokens=5, task_type="CAUSAL_LM", modules_to_save=whole)


def peft_logits(base: str, adapter: str) -> np.ndarray:
    """Return the logits of an adapter that PEFT loads; each of its keys must be of the model."""
    import torch
    import transformers
    from safetensors.torch import load_file

    peft = importlib.import_module("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, adapter).eval()
    state = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    stored = load_file(f"{adapter}/adapter_model.safetensors")
    assert state.keys() == stored.keys(), state.keys() ^ stored.keys()
    assert all(torch.equal(state[key], stored[key]) for key in stored)
    with torch.no_grad():
        return _of_text(adapted)


def _of_text(model: Any) -> np.ndarray:
    """Return the logits at the ids, without those at virtual tokens."""
    import torch

    return model(torch.tensor(IDS)).logits[:, -IDS.shape[1] :].numpy()


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(alphabet)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    built.add_special_tokens(["<s>", "</s>"])
    built.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    sys.exit(main())
