"""A run made a folder of Hugging Face, read back and compared before it is called finished."""

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxlm.checkpoint import hub_digests
from jaxlm.checkpoint.hub_folder import SHARD_BYTES, Folder, write_json, write_tensors
from jaxlm.checkpoint.hub_tensors import Part, layout
from jaxlm.core import tree
from jaxlm.core.errors import CommandError, JaxlmError, cannot_write
from jaxlm.data import tokenizer_json
from jaxlm.data.hub_tokenizer import Imported
from jaxlm.models import cost
from jaxlm.models.build import Blueprint
from jaxlm.models.families.hub import uncomputed
from jaxlm.objectives.config import Causal
from jaxlm.parallel import rules
from jaxlm.recipes import assembly, foreign, importing, trained
from jaxlm.recipes.trained import Trained, Weights
from jaxlm.train.rundir import IMPORTED

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[Dtype, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
TOLERANCE = 1e-5  # of the largest logit: what was written is read back by the same arithmetic
GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
LENGTH = 256  # of the rows of text that both are compared on, at most


class Different(JaxlmError):
    """What was written does not compute what the run computes."""

    code = 1
    kind = "not the same"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is exported, and where to."""

    workdir: Path
    out: Path
    step: int | None = None
    best: bool = False
    weights: Weights = "raw"
    dtype: Dtype | None = None  # None is that of the model it was imported from, else float32
    shard_bytes: int = SHARD_BYTES
    cpu_devices: int | None = None


def export_model(options: Options, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Writes a run's model as transformers saves one, reads it back, and compares logits on real text.

    The folder has its name once both agree; until then it is beside it, as NAME.partial.

    Raises:
      ConfigError: where no architecture of transformers computes the model.
      Different: where what was written gives other logits.
    """
    if options.out.exists():
        raise CommandError(
            "the folder is already there",
            where=f"--out={options.out}",
            why="nothing is overwritten",
            fix=f"--out={options.out}-2",
        )
    opened = trained.open_run(
        options.workdir,
        step=options.step,
        best=options.best,
        weights=options.weights,
        cpu_devices=options.cpu_devices,
        say=say,
    )
    opened = _without_heads(opened, say)
    decoder = opened.model.blueprint.config
    family = dataclasses.replace(opened.run.model, vocab=decoder.vocab)
    dtype = options.dtype or _imported(options.workdir).get("dtype", "float32")
    attributes = _attributes(family, dtype, opened)
    if decoder.width_ratio != 1:
        why = f"its logits are divided by {decoder.width_ratio:g}, as mup.base_width = {opened.run.mup.base_width} asks"
        raise uncomputed(family.HUB, why)
    tensors = layout(decoder, family.HUB)
    partial = options.out.with_name(f"{options.out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_json(partial / "config.json", attributes)
        _write_beside(partial, options, opened, attributes, say)
    except OSError as error:
        raise cannot_write("the folder", partial, error, fix="--out=another/folder") from error
    leaves = tree.leaves(opened.params)
    files = write_tensors(
        partial,
        tensors,
        lambda theirs: theirs.joined(lambda part: _array(leaves, part)),
        DTYPES[dtype],
        shard_bytes=options.shard_bytes,
    )
    parity = compare(partial, opened, DTYPES[dtype])
    answer = {
        "out": str(options.out),
        "architecture": family.HUB.architecture,
        "step": opened.step,
        "dtype": dtype,
        "parameters": cost.parameters(decoder),
        "tensors": len(tensors),
        "files": len(set(files.values())),
        "parity": parity,
    }
    write_json(partial / "parity.json", parity)
    (partial / "README.md").write_text(_card(answer, opened))
    hub_digests.write(partial)
    _check_parity(parity, partial)
    os.replace(partial, options.out)
    return answer


def _check_parity(parity: dict[str, Any], partial: Path) -> None:
    """Raises Different where what was written is not the run."""
    report = "the folder was left for you to look at; this is a fault of jaxlm: please report it"
    difference, tolerance = parity["largest_difference"], parity["tolerance"]
    if not math.isfinite(difference):
        raise Different(
            "what was written gives logits that are no numbers",
            where=str(partial),
            why=f"weights of the run are none, or lie beyond what {parity['dtype']} holds",
            fix="--dtype=bfloat16",
        )
    if difference > tolerance:
        raise Different(
            "what was written gives other logits than the run",
            where=str(partial),
            why=f"they differ by {difference:.3g}, and {tolerance:.3g} is allowed",
            fix=report,
        )
    if not parity["is_bit_identical"]:
        raise Different(
            "what was written holds other weights than the run",
            where=str(partial),
            why="the logits of the text that was tried agree, which does not meet every weight",
            fix=report,
        )


def _without_heads(opened: Trained, say: Callable[[str], None]) -> Trained:
    """The model that predicts the next token alone."""
    heads = opened.model.blueprint.config.heads
    if not heads:
        return opened
    say(f"left out: {len(heads)} heads for tokens beyond the next, which the form has no names for")
    run = dataclasses.replace(opened.run, objective=Causal())
    vocab = opened.model.blueprint.config.vocab
    return dataclasses.replace(
        opened,
        run=run,
        model=assembly.assemble(run, vocab, opened.model.mesh),
        params={name: part for name, part in opened.params.items() if name != "heads"},
    )


def compare(folder: Path, opened: Trained, dtype: np.dtype) -> dict[str, Any]:
    """The largest difference between the logits of what lies in a folder and of the run, on Python's own source.

    Theirs are of the model that the folder's config.json describes. The run's parameters are rounded to the folder's dtype first, which is what a folder can hold; what the rounding
    itself does to the logits is told beside it.
    """
    model = opened.model
    read = Folder(folder)
    family, _ = foreign.described(read, lambda _: None)
    described = dataclasses.replace(opened.run, model=family)
    written = assembly.assemble(described, model.blueprint.config.vocab, model.mesh)
    decoder, placed = family.build(), assembly.placed(written)
    with read.opened() as fetch, jax.set_mesh(model.mesh):
        tensors = layout(decoder, family.HUB)
        theirs = importing.load(tensors, fetch, placed)
        unrounded = {part.path for each in tensors if each.is_exact for part in each.parts}

        def held(path: str, leaf: jax.Array) -> jax.Array:
            return leaf if path in unrounded else leaf.astype(dtype).astype(leaf.dtype)

        rounded = tree.map_with_path(held, opened.params)
        tokens, places = _text(opened)
        logits, their_logits = (
            jax.jit(functools.partial(_logits, each, is_paired=opened.run.is_paired))
            for each in (model.blueprint, written.blueprint)
        )
        ours, exact = (np.asarray(logits(p, tokens, places)) for p in (rounded, opened.params))
        read_back = np.asarray(their_logits(theirs, tokens, places))
    is_same = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(theirs), strict=True)
    )
    return {
        "tokens": int(tokens.size),
        "largest_difference": float(np.abs(ours - read_back).max()),
        "tolerance": TOLERANCE * float(np.abs(ours).max()),
        "is_bit_identical": is_same,
        "largest_difference_by_rounding": float(np.abs(ours - exact).max()),
        "dtype": dtype.name,
    }


def _text(opened: Trained) -> tuple[jax.Array, jax.Array]:
    """Real text that is always there: the source of Python's own json package, as rows of ids."""
    limit = min(LENGTH, opened.run.model.context)
    text = Path(json.__file__).read_text()
    ids = opened.tokenizer.encode(text)
    rows = max(2, rules.split(opened.model.mesh, "batch"))
    length = min(limit, len(ids) // rows)
    tokens = np.array(ids[: rows * length], np.int32).reshape(rows, length)
    places = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return jnp.asarray(tokens), jnp.asarray(places)


def _logits(
    blueprint: Blueprint, params: Any, tokens: jax.Array, places: jax.Array, *, is_paired: bool
) -> jax.Array:
    model = blueprint.merge(params)
    more = {"source": tokens} if is_paired else {}
    return model.logits(model(tokens, positions=places, **more).values)


def _array(leaves: dict[str, jax.Array], part: Part) -> np.ndarray:
    leaf = leaves[part.path]
    return np.asarray(leaf[part.lead] if part.lead else leaf)


def _imported(workdir: Path) -> dict[str, Any]:
    """What is known of a run that was imported; nothing of another."""
    place = workdir / IMPORTED
    return json.loads(place.read_text()) if place.is_file() else {}


def _attributes(family: Any, dtype: str, opened: Trained) -> dict[str, Any]:
    tokenizer, own = opened.tokenizer, family.to_hub()
    pad = own.get("pad_token_id", tokenizer.pad)
    if pad != tokenizer.pad and not isinstance(tokenizer, Imported):
        # transformers counts positions from it, and gives them to no token that is it.
        raise uncomputed(
            family.HUB, f"padding = {pad}, and the tokenizer pads with {tokenizer.pad}"
        )
    return own | {
        "architectures": [family.HUB.architecture],
        "model_type": family.HUB.model_type,
        "torch_dtype": dtype,
        "bos_token_id": tokenizer.before[0] if tokenizer.before else None,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": pad,
    }


def _write_beside(
    folder: Path,
    options: Options,
    opened: Trained,
    attributes: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """The tokenizer, what came with an imported model, and the ids that generation begins and ends with."""
    ids = {name: id_ for name, id_ in attributes.items() if name in GENERATION and id_ is not None}
    if len(ends := opened.tokenizer.ends) > 1:
        ids["eos_token_id"] = list(ends)
    write_json(folder / "generation_config.json", ids)
    kept = options.workdir / importing.FOLDER
    if kept.is_dir():
        for name in importing.BESIDE:
            if name != "config.json" and (kept / name).is_file():
                shutil.copyfile(kept / name, folder / name)
        return
    content = tokenizer_json.as_json(opened.tokenizer)
    if content is None:
        say(
            "the tokenizer is not exported: it has special tokens of jaxlm's names, and its ids are moved up behind jaxlm's"
        )
        return
    (folder / "tokenizer.json").write_bytes(content)
    write_json(folder / "tokenizer_config.json", tokenizer_json.settings(opened.tokenizer))


def _card(answer: dict[str, Any], opened: Trained) -> str:
    run, parity = opened.run, answer["parity"]
    return f"""---
library_name: transformers
---
# {answer["architecture"]} by jaxlm

{answer["parameters"]:,} parameters, {answer["dtype"]}; step {answer["step"]} of a run of {run.train.steps} steps of
{run.tokens_per_step:,} tokens, rows of {run.data.sequence}, seed {run.seed}, {run.optim.name} at {run.optim.lr:g}.

Read back after it was written: on {parity["tokens"]} tokens of real text the logits differ by
{parity["largest_difference"]:.3g} at most; rounding to {parity["dtype"]} moved them by {parity["largest_difference_by_rounding"]:.3g}.
"""
