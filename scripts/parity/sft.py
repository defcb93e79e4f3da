"""Fine-tuning of jaxlm compared with TRL and PEFT: the loss and the gradient of each trained leaf.

The script runs in jaxlm's environment and calls itself with the interpreter of another one, see
`peft_adapters.py`, which needs TRL 1.16 too:

    python scripts/parity/sft.py --peft_python=peft/bin/python --out=runs/sft

TRL's `SFTTrainer` computes the loss of documents with masks of assistant tokens in float64, with
packing off and on, and torch its gradients; PEFT has no virtual tokens before each document of a
packed row, so that prefix and prompt are compared with TRL's unpacked documents. jaxlm imports the
model and the adapter, and computes both in float32. A row shows the relative difference of the loss
and, over all trained tensors, the largest difference of a gradient over the largest element of that
gradient. The exit code is 1 if a difference exceeds 1e-4.
"""

import argparse
import contextlib
import importlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft_adapters

FAMILIES = ("llama", "gpt2")
METHODS = ("full", "lora", "rslora", "dora", "ia3", "prefix", "prompt")
TOLERANCE = 1e-4
SEQUENCE = 64
_DRAW = np.random.default_rng(1)
DOCUMENTS = [_DRAW.integers(0, 250, size).tolist() for size in (40, 21, 33, 17, 29, 34)]
# A first token is no target here; PEFT would predict it from the last virtual token of a prompt.
MASKS = [[0, *(_DRAW.random(len(each) - 1) < 0.6).astype(int).tolist()] for each in DOCUMENTS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peft_python", help="interpreter of the environment with TRL and PEFT")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--make", metavar="FAMILY", help="of the script itself")
    parser.add_argument("--only", help="methods, joined by commas")
    args = parser.parse_args()
    methods = args.only.split(",") if args.only else METHODS
    if args.make:
        for method in methods:
            make(args.make, method, args.out / f"{args.make}-{method}")
        return 0
    worst = 0.0
    for family in FAMILIES:
        command = [args.peft_python, __file__, f"--out={args.out}", f"--make={family}"]
        command += [f"--only={','.join(methods)}"]
        subprocess.run(command, check=True, timeout=1200)
        base = args.out / f"{family}-base"
        source = args.out / f"{family}-{methods[0]}" / "hf"
        jaxlm("import", f"--from={source}", f"--workdir={base}")
        for method in methods:
            for packing, (loss, gradient, count) in compare(args.out, family, method).items():
                print(
                    f"{family:6} {method:7} {packing:9} loss {loss:<8.1e} "
                    f"gradient {gradient:<8.1e} of {count} tensors",
                    flush=True,
                )
                worst = max(worst, loss, gradient)
    return int(not worst <= TOLERANCE)


def jaxlm(*words: object) -> None:
    from jaxlm.cli.main import main as command

    with contextlib.redirect_stdout(io.StringIO()):
        code = command([*map(str, words), "--quiet"])
    assert code == 0, words


def compare(out: Path, family: str, method: str) -> dict[str, tuple[float, float, int]]:
    """Return the differences of loss and gradients, and the number of tensors, by packing."""
    folder, base = out / f"{family}-{method}", out / f"{family}-base"
    workdir = base
    if method != "full":
        workdir = folder / "tuned"
        words = f"--adapter={folder / 'peft'}", f"--workdir={workdir}", f"--init_from={base}"
        jaxlm("import", *words)
    rows = {}
    for packing in ("unpacked", "packed"):
        expected = dict(np.load(folder / f"{packing}.npz"))
        loss, gradients = ours(workdir, is_packed=packing == "packed")
        reference = float(expected.pop("loss"))
        assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
        largest = max(
            np.abs(gradients[key].reshape(value.shape) - value).max() / np.abs(value).max()
            for key, value in expected.items()
        )
        rows[packing] = abs(loss - reference) / reference, float(largest), len(expected)
    return rows


def ours(workdir: Path, *, is_packed: bool) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of a run of jaxlm and its gradients by the names that torch has."""
    import dataclasses

    import jax

    from jaxlm.checkpoint.hub_tensors import layout
    from jaxlm.core import tree
    from jaxlm.objectives.build import build
    from jaxlm.objectives.config import Causal, LossConfig
    from jaxlm.recipes.exchange import adapter_places as peft
    from jaxlm.recipes.exchange import virtual_tensors
    from jaxlm.recipes.use import load
    from jaxlm.tune.config import PrefixTuning, PromptTuning

    opened = load.load_run(workdir, is_merged=False)
    objective, batch = build(Causal(), LossConfig()), rows_of(is_packed=is_packed)

    def mean_loss(params: Any) -> jax.Array:
        model = opened.model.blueprint.merge(params)
        total = objective.loss(model, batch, None, None).objective
        return total.total / total.weight

    with jax.set_mesh(opened.model.mesh), jax.default_matmul_precision("highest"):
        loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(opened.params)
    leaves = tree.leaves(gradient)
    decoder = opened.model.blueprint.config
    tensors = layout(decoder, dataclasses.replace(opened.run.model, vocab=decoder.vocab).HUB)

    def whole(part: Any) -> np.ndarray:
        return peft.at(leaves[part.path], part)

    if not opened.model.base:
        return float(loss), {each.name: each.joined(whole) for each in tensors}
    gradients = {
        each.name: each.joined(whole)
        for each in tensors
        if each.parts[0].path not in opened.model.base
    }
    if isinstance(opened.run.tune, PrefixTuning | PromptTuning):
        _, virtual = virtual_tensors.written(opened.run.tune, decoder, leaves)
        return float(loss), {
            f"base_model.{name}": each for name, each in gradients.items()
        } | virtual
    gradients = {f"{peft.PREFIX}{name}": each for name, each in gradients.items()}
    for place in peft.places(tensors).values():

        def leaf(name: str, part: Any) -> np.ndarray:
            return peft.at(leaves[peft.leaf(part, name)], part)

        first = place.weight.parts[0]
        if peft.leaf(first, "lora_a") in leaves:
            # One A of a fused projection is a copy in each part here: its gradient is the sum.
            each = [leaf("lora_a", part).reshape(place.inputs, -1) for part in place.weight.parts]
            gradients[place.key(peft.LORA_A)] = np.sum(each, 0).T
            outputs = place.outputs(peft.LORA_B, each[0].shape[1])
            gradients[place.key(peft.LORA_B)] = outputs.joined(lambda part: leaf("lora_b", part))
        if peft.leaf(first, "magnitude") in leaves:
            gradients[place.key(peft.MAGNITUDE)] = place.outputs(peft.MAGNITUDE).joined(
                lambda part: leaf("magnitude", part)
            )
        if peft.leaf(first, "ia3") in leaves:
            parts = [leaf("ia3", part).reshape(-1) for part in place.weight.parts]
            gradients[place.key(peft.IA3)] = np.concatenate(parts)
    return float(loss), gradients


def rows_of(*, is_packed: bool) -> Any:
    """Return the documents as rows, two in each if packed; a target is the next token's."""
    import jax.numpy as jnp

    from jaxlm.data.batch import Tokens

    each = 2 if is_packed else 1
    rows = [range(first, first + each) for first in range(0, len(DOCUMENTS), each)]
    tokens, targets, segments, positions = (
        np.zeros((len(rows), SEQUENCE), np.int32) for _ in range(4)
    )
    weights = np.zeros((len(rows), SEQUENCE), np.float32)
    for row, numbers in enumerate(rows):
        start = 0
        for segment, number in enumerate(numbers, start=1):
            ids, mask = DOCUMENTS[number], MASKS[number]
            stop = start + len(ids)
            tokens[row, start:stop], segments[row, start:stop] = ids, segment
            positions[row, start:stop] = range(len(ids))
            targets[row, start : stop - 1], weights[row, start : stop - 1] = ids[1:], mask[1:]
            start = stop
    fields: Any = map(jnp.asarray, (tokens, targets, weights, segments, positions))
    return Tokens(*fields)


def make(family: str, method: str, folder: Path) -> None:
    """Write a random model and adapter, and the loss and gradients of TRL's trainer."""
    import torch
    import transformers
    from safetensors.torch import load_file

    datasets, peft, trl = map(importlib.import_module, ("datasets", "peft", "trl"))
    folder.mkdir(parents=True)
    peft_adapters.make(family, "lora" if method == "full" else method, folder)
    documents = datasets.Dataset.from_dict({"input_ids": DOCUMENTS, "assistant_masks": MASKS})
    for packing in ("unpacked", "packed"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "hf", dtype=torch.float32
        )
        if method in peft_adapters.VIRTUAL:  # PEFT loads these for inference alone
            model = peft.get_peft_model(model, peft_adapters.virtual_config(family, method))
            stored = load_file(folder / "peft" / "adapter_model.safetensors")
            with torch.no_grad():
                for name, value in model.named_parameters():
                    if value.requires_grad:
                        value.copy_(stored[key(name)])
        elif method != "full":
            model = peft.PeftModel.from_pretrained(model, folder / "peft", is_trainable=True)
        arguments = trl.SFTConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            packing=packing == "packed" and method not in peft_adapters.VIRTUAL,
            max_length=SEQUENCE,
            per_device_train_batch_size=len(DOCUMENTS),
            report_to="none",
        )
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=documents,
            processing_class=transformers.AutoTokenizer.from_pretrained(folder / "hf"),
        )
        (batch,) = trainer.get_train_dataloader()
        labels = int((batch["labels"][..., 1:] != -100).sum())
        assert labels == sum(sum(mask[1:]) for mask in MASKS), labels
        model = trainer.model.double().eval()  # no dropout
        loss = trainer.compute_loss(model, dict(batch))
        loss.backward()
        gradients = {
            key(name): value.grad.numpy()
            for name, value in model.named_parameters()
            if value.requires_grad
        }
        np.savez(folder / f"{packing}.npz", loss=loss.item(), **gradients)


def key(name: str) -> str:
    """Return the key of a parameter of PEFT in its file."""
    if name.startswith("prompt_encoder."):
        return "prompt_embeddings"
    for part in (".modules_to_save", ".default"):
        name = name.replace(part, "")
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


if __name__ == "__main__":
    sys.exit(main())
