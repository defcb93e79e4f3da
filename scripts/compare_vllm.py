"""Compare log-probabilities and continuations of an exported model in vLLM with jaxlm's.

    python scripts/compare_vllm.py exported --ours=a.npz               # with jaxlm, without vLLM
    python scripts/compare_vllm.py exported --ours=a.npz --with_vllm   # with vLLM, without jaxlm

The two need different versions of common packages, so each runs in an environment of its own, the
first one first. vLLM computes in float32, or in --dtype, reads the prompt with its paged kernels,
and continues it with its cache. Ours is in float32, and the matrices of a quantized folder are
dequantized: vLLM differs by the rounding of another dtype, and of inputs of products.
"""

import argparse
import json
from pathlib import Path

import numpy as np

TOKENS = 192  # of the prompt
MORE = 32  # that are drawn greedily after it


def ours(folder: Path, place: Path) -> None:
    """Write ids of a prompt [T], following ids [N], and log-probabilities [T + N - 1, V].

    The log-probabilities are those of all ids but the first.
    """
    import jax
    import jax.numpy as jnp
    import tokenizers
    from opened import opened

    from jaxlm.checkpoint.hub_folder import Folder
    from jaxlm.checkpoint.quantized_folder import open_quantized
    from jaxlm.core.precision import Precision

    blueprint, params = opened(open_quantized(Folder(folder)), Precision.float32())
    text = Path(json.__file__).read_text()[:4000]
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:TOKENS]

    @jax.jit
    def likely(tokens: jax.Array) -> jax.Array:
        model = blueprint.merge(params)
        hidden = model.hidden(tokens[None], positions=jnp.arange(len(tokens))[None])
        return jax.nn.log_softmax(model.logits(hidden.values)[0])

    # A token at a time over rows of one length: what comes later does not count for what came
    # before.
    tokens = np.zeros(TOKENS + MORE, np.int32)
    tokens[:TOKENS] = ids
    for at in range(TOKENS, TOKENS + MORE):
        tokens[at] = likely(tokens)[at - 1].argmax()
    np.savez(place, ids=tokens[:TOKENS], follow=tokens[TOKENS:], likely=likely(tokens)[:-1])


def theirs(folder: Path, place: Path, dtype: str) -> dict[str, float | int | bool]:
    """Deviations of vLLM's log-probabilities of the prompt and of its draws from ours."""
    import vllm

    made = np.load(place)
    model = vllm.LLM(
        str(folder), dtype=dtype, max_model_len=TOKENS + MORE, enforce_eager=True,
        max_logprobs=made["likely"].shape[1],
    )  # fmt: skip
    asked = vllm.SamplingParams(
        temperature=0, max_tokens=MORE, ignore_eos=True, prompt_logprobs=20, logprobs=20
    )
    (result,) = model.generate([vllm.TokensPrompt(prompt_token_ids=made["ids"].tolist())], asked)
    drawn = list(result.outputs[0].token_ids)
    same = next(
        (n for n, (a, b) in enumerate(zip(drawn, made["follow"], strict=True)) if a != b), MORE
    )
    rows = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs[: min(same + 1, MORE)]]
    far = [
        abs(each.logprob - made["likely"][at, token])
        for at, row in enumerate(rows)
        for token, each in row.items()
    ]
    return {
        "tokens": len(rows),
        "log_probabilities": len(far),
        "largest_difference": float(max(far)),
        "mean_difference": float(np.mean(far)),
        "largest": float(np.abs(made["likely"]).max()),
        "same_ids": same,
        "of": MORE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--with_vllm", action="store_true")
    parser.add_argument("--dtype", default="float32", help="in which vLLM computes")
    args = parser.parse_args()
    if args.with_vllm:
        print(json.dumps(theirs(args.folder, args.ours, args.dtype)))
    else:
        ours(args.folder, args.ours)


if __name__ == "__main__":
    main()
