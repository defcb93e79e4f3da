"""Time of rollouts whose slots are filled again, against one batch of slots after another.

    python scripts/bench_rollouts.py [--slots=64] [--samples=512] [--turns=3]

Samples end by chance, with about an eighth of it at each token, after at most 64. Both ways run the
same programs in turns; seconds are those of the processor.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from jaxlm.core.precision import Precision
from jaxlm.data.tokenizer import Characters
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.rl.rollout import RolloutSampler, RolloutSizes, root_key, row_keys

PROMPT, MAX_TOKENS = 8, 64


def main() -> None:
    """Measure both ways in turns and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    heads = max(args.width // 64, 1)
    family = Llama(
        vocab=320,
        width=args.width,
        depth=4,
        heads=heads,
        kv_heads=heads,
        hidden=4 * args.width,
    )
    blueprint = Blueprint(family.build(), Precision.float32())
    params = jax.tree.map(lambda x: x / 16, blueprint.init(jax.random.key(0)))
    sampler = RolloutSampler(
        blueprint,
        Characters("abcdefg"),
        RolloutSizes(args.slots, PROMPT, MAX_TOKENS),
        temperature=1.0,
    )
    prompts = [np.arange(PROMPT, dtype=np.int32)] * args.samples
    keys = row_keys(root_key(0), 0, args.samples, 1)

    def filled() -> list[int]:
        return [len(each.ids) for each in sampler.draw(params, prompts, keys)]

    def batches() -> list[int]:
        lengths = []
        for first in range(0, args.samples, args.slots):
            part = slice(first, first + args.slots)
            lengths += [len(each.ids) for each in sampler.draw(params, prompts[part], keys[part])]
        return lengths

    seconds: dict[str, list[float]] = {"filled": [], "batches": []}
    passes = {}
    for turn in range(args.turns + 1):  # the first one compiles
        for way in (filled, batches):
            begun, before = time.process_time(), sampler.passes
            lengths = way()
            if turn:
                seconds[way.__name__].append(time.process_time() - begun)
            passes[way.__name__] = sampler.passes - before
    print(f"{args.samples} samples of {np.mean(lengths):.1f} tokens, the longest {max(lengths)}")
    for name, each in seconds.items():
        print(f"{name}: {statistics.median(each):.2f} s, {passes[name]} passes")
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    print(f"batches / filled: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
