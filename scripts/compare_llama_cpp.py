"""Compare ids and logits of an exported model in llama.cpp with jaxlm's.

    python scripts/compare_llama_cpp.py exported --converter=llama.cpp/convert_hf_to_gguf.py
    python scripts/compare_llama_cpp.py exported --gguf=exported.gguf

Needs the `parity` extra, `pip install llama-cpp-python`, and a checkout of llama.cpp for the
converter, or else the GGUF that `jaxlm export` wrote of the same run. It is then read, too, and its
weights and logits compared with those of the folder and of llama.cpp. llama.cpp keeps keys and
values in float32 for this; its GELU is a table of half precision, so that a model with one differs
by more than rounding, and its products of quantized matrices round their inputs to 8 bits.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from opened import opened

from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.checkpoint.hub_folder import Folder
from jaxlm.core.precision import Precision

TOKENS = 256
FLOAT32 = 0  # GGML's number for it


def ours(source: Folder | Gguf, ids: np.ndarray) -> tuple[np.ndarray, Any]:
    """Logits of ids [T], [T, V], and the parameters, in float32."""
    blueprint, params = opened(source, Precision.float32())

    @jax.jit
    def logits(params: Any) -> jax.Array:
        model = blueprint.merge(params)
        return model.logits(model.hidden(ids[None], positions=jnp.arange(len(ids))[None]).values)[0]

    return np.asarray(logits(params)), params


def theirs(path: Path, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a text and their logits, by llama.cpp."""
    import llama_cpp  # from here on it prints

    model = llama_cpp.Llama(
        str(path), n_ctx=2 * TOKENS, logits_all=True, type_k=FLOAT32, type_v=FLOAT32,
        swa_full=True, verbose=False,
    )  # fmt: skip
    ids = model.tokenize(text.encode(), add_bos=True)[:TOKENS]
    model.eval(ids)
    return np.array(ids, np.int32), model.scores[: len(ids)].copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    by = parser.add_mutually_exclusive_group(required=True)
    by.add_argument("--converter", type=Path)
    by.add_argument("--gguf", type=Path)
    args = parser.parse_args()
    text = Path(json.__file__).read_text()[:4000]
    with tempfile.TemporaryDirectory() as name:
        gguf = args.gguf or Path(name) / "model.gguf"
        if args.converter:
            words = [sys.executable, str(args.converter), str(args.folder)]
            subprocess.run([*words, "--outtype=f32", f"--outfile={gguf}"], check=True)
        ids, their_logits = theirs(gguf, text)
        logits, params = ours(Folder(args.folder), ids)
        answer = {
            "tokens": len(ids),
            "largest_difference": float(np.abs(logits - their_logits).max()),
            "largest_logit": float(np.abs(logits).max()),
            "same_ids": ids.tolist() == _ids(args.folder, text)[: len(ids)],
        }
        try:
            reread, read_back = ours(Gguf(gguf), ids)
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(read_back), strict=True)
            answer["read_back"] = float(max(jnp.abs(a - b).max() for a, b in pairs))
            answer |= {"of_file": _difference(reread, their_logits)}
        except Exception as error:  # an architecture that is not read from GGUF
            answer["read_back"] = str(error).splitlines()[0]
    print(json.dumps(answer))


def _difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Return the difference of logits [T, V] of the same weights, and the mean KL to theirs."""
    one, other = (np.asarray(jax.nn.log_softmax(each)) for each in (ours, theirs))
    return {
        "largest_difference": float(np.abs(ours - theirs).max()),
        "kl_mean": float((np.exp(one) * (one - other)).sum(-1).mean()),
        "same_likeliest_id": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }


def _ids(folder: Path, text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


if __name__ == "__main__":
    main()
