"""Weights that need no file: made from their names, the same for transformers and for us."""

import zlib

import numpy as np

from jaxlm.checkpoint.hub_folder import write_json, write_tensors
from jaxlm.checkpoint.hub_tensors import Reader, layout
from jaxlm.core import tree
from jaxlm.models.families.bert import BERT, RoBERTa
from jaxlm.models.families.cohere import Cohere
from jaxlm.models.families.deepseek import DeepSeekV2, DeepSeekV3
from jaxlm.models.families.gemma import Gemma, Gemma2, Gemma3
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama, OLMo2, SmolLM3
from jaxlm.models.families.mistral import Mistral, Mixtral
from jaxlm.models.families.modernbert import ModernBERT
from jaxlm.models.families.neox import NeoX
from jaxlm.models.families.phi3 import Phi3
from jaxlm.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from jaxlm.models.families.t5 import T5
from jaxlm.nn.rotary import LinearScaling, Llama3Scaling, LongScaling, YarnScaling

VOCAB, WIDTH, DEPTH, HEADS, LENGTH = 61, 32, 3, 4, 17
SIZES = dict(vocab=VOCAB, width=WIDTH, depth=DEPTH, heads=HEADS)
GROUPED = SIZES | dict(kv_heads=2, hidden=48, max_positions=64)
LATENT = SIZES | dict(
    kv_rank=20,
    nope_dim=4,
    rope_dim=8,
    value_dim=5,
    max_positions=64,
    experts=8,
    top_k=3,
    hidden=12,
    shared=24,
    dense_depth=1,
    dense_hidden=40,
)

# Of every family one, and one more for each setting that changes what is computed.
FAMILIES = {
    "gpt2": GPT2(**SIZES, max_positions=32),
    "gpt2, untied, exact gelu": GPT2(
        **SIZES, max_positions=32, tied=False, activation="gelu", hidden=40
    ),
    "neox": NeoX(**SIZES, max_positions=64, rotary_fraction=0.5),
    "neox, one after the other": NeoX(**SIZES, max_positions=64, parallel=False, rope_theta=500.0),
    "llama": Llama(**GROUPED),
    "llama, one key head, tied": Llama(**GROUPED | dict(kv_heads=1), tied=True, head_dim=12),
    "llama, scaling of 3.1": Llama(
        **GROUPED, rope_scaling=Llama3Scaling(factor=4.0, original=32), rope_theta=100.0
    ),
    "llama, linear scaling": Llama(**GROUPED, rope_scaling=LinearScaling(factor=4.0)),
    "llama, yarn": Llama(**GROUPED, rope_scaling=YarnScaling(original=16), rope_theta=100.0),
    "mistral": Mistral(**GROUPED, window=5),
    "qwen2": Qwen2(**GROUPED, tied=True),
    "qwen3": Qwen3(**GROUPED, head_dim=12),
    "smollm3": SmolLM3(**GROUPED, nope_every=2, tied=True),
    "gemma": Gemma(**GROUPED, head_dim=12),
    "gemma2": Gemma2(
        **GROUPED, head_dim=12, window=5, query_scale=20, attention_softcap=2.0, logit_softcap=3.0
    ),
    "gemma3": Gemma3(
        **GROUPED | dict(depth=7),
        head_dim=12,
        window=5,
        query_scale=20,
        rope_scaling=LinearScaling(factor=8.0),
    ),
    "phi3": Phi3(**GROUPED),
    "phi3, of 128k": Phi3(
        **GROUPED,
        rope_scaling=LongScaling(
            short=(1.0, 1.2, 1.5, 2.0), long=(1.0, 3.0, 7.0, 9.0), original=9, factor=64 / 9
        ),
    ),
    "phi3, in part and a window": Phi3(**GROUPED, rotary_fraction=0.5, window=5),
    "olmo2": OLMo2(**GROUPED),
    "mixtral": Mixtral(**GROUPED, experts=4, top_k=2),
    "qwen3_moe": Qwen3Moe(**GROUPED, head_dim=12, experts=4, top_k=2, normalize_top_k=False),
    "qwen3_moe, normalize_top_k": Qwen3Moe(**GROUPED, head_dim=12, experts=4, top_k=2),
    "deepseek_v2": DeepSeekV2(**LATENT),
    "deepseek_v2, queries of a latent, groups, yarn": DeepSeekV2(
        **LATENT,
        query_rank=18,
        groups=4,
        top_groups=2,
        scale=4.0,
        rope_theta=100.0,
        mscale=0.707,
        rope_scaling=YarnScaling(factor=8.0, original=16, magnitude=1.0),
    ),
    "deepseek_v3": DeepSeekV3(**LATENT, query_rank=18, groups=4, top_groups=2),
    "deepseek_v3, queries of the stream, halves, yarn": DeepSeekV3(
        **LATENT | dict(dense_depth=2),
        groups=1,
        top_groups=1,
        normalize_top_k=False,
        interleaved=False,
        rope_theta=100.0,
        mscale=1.0,
        rope_scaling=YarnScaling(factor=8.0, original=16, magnitude=0.9),
        tied=True,
    ),
    "cohere": Cohere(**GROUPED, logit_scale=0.25),
    "cohere, untied": Cohere(**GROUPED, tied=False, rope_theta=100.0, logit_scale=0.5),
    "bert": BERT(**SIZES, max_positions=32),
    "roberta": RoBERTa(**SIZES, max_positions=32, padding=1),
    "modernbert": ModernBERT(
        **SIZES | dict(depth=4), hidden=48, max_positions=64, window=2, local_rope_theta=100.0
    ),
    "modernbert, untied": ModernBERT(
        **SIZES, hidden=48, max_positions=64, window=3, global_every=2, tied=False
    ),
    "t5": T5(**SIZES, hidden=40, buckets=8, max_distance=12),
    "t5, version 1.1": T5(
        **SIZES | dict(depth=2),
        decoder_depth=1,
        head_dim=12,
        hidden=40,
        activation="gelu_tanh",
        gated=True,
        tied=False,
    ),
    "t5, ul2": T5(**SIZES | dict(depth=1), hidden=40, activation="silu", gated=True, tied=False),
}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32, uniform between -0.35 and 0.35; plus one for norms; a tenth for routers.

    Drawn, as sums of regular numbers cancel, and a norm after a part magnifies rounding errors.
    """
    draw = np.random.RandomState(
        zlib.crc32(name.encode())
    )  # its numbers are the same in every numpy
    is_scale = len(shape) == 1 and name.endswith("weight")
    share = 0.1 if name.endswith("correction_bias") else 1.0  # or some would never be chosen
    return (share * draw.uniform(-0.35, 0.35, shape) + is_scale).astype(np.float32)


def tokens() -> np.ndarray:
    """Two rows of ids."""
    return (np.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCAB).astype(np.int32)


def source() -> np.ndarray:
    """Return two rows of other ids, for an encoder."""
    return (np.arange(2 * LENGTH)[::-1].reshape(2, LENGTH)[:, :11] * 5 % VOCAB).astype(np.int32)


def forward(model, family):
    """The logits of the tokens."""
    ids = tokens()
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ids.shape)
    more = {"source": source()} if isinstance(family, T5) else {}
    return model(ids, positions=positions, **more)


def tensors(family):
    """Return the mapping of every Hugging Face tensor to our parameters."""
    return layout(family.build(), family.HUB)


def params(family, shapes):
    """Our tree, filled with the weights of these names."""
    named = {each.name: weight(each.name, each.shape) for each in tensors(family)}
    reader = Reader(tensors(family), lambda name, within: named[name][within])

    def leaf(path, like):
        whole = tuple(slice(0, size) for size in like.shape)
        return reader.leaf(path, like.shape, whole, np.dtype(np.float32))

    return tree.map_with_path(leaf, shapes)


def theirs(family, ours) -> dict[str, np.ndarray]:
    """A tree of ours as arrays by Hugging Face name, laid out as there."""
    leaves = {path: np.asarray(leaf) for path, leaf in tree.leaves(ours).items()}
    return {
        each.name: each.joined(lambda part: leaves[part.path][part.lead])
        for each in tensors(family)
    }


def gradients(family, ours) -> dict[str, np.ndarray]:
    """Gradients that transformers computes too: it has none for a bias on the choice of experts."""
    named = theirs(family, ours)
    return {name: each for name, each in named.items() if not name.endswith("correction_bias")}


def is_nothing(gradient: float, largest: float) -> bool:
    """Return if a gradient is zero except for rounding.

    A bias of keys adds the same to all scores of a query if no key is rotated.
    """
    return gradient < 1e-12 * largest


def write(folder, family, dtype=np.float32) -> None:
    """The folder of such a model, as jaxlm exports it."""
    named = {
        "architectures": [family.HUB.architecture],
        "model_type": family.HUB.model_type,
        "pad_token_id": None,  # transformers gives its row no gradient
    }
    write_json(folder / "config.json", named | family.to_hub())
    write_tensors(
        folder, tensors(family), lambda each: weight(each.name, each.shape), np.dtype(dtype)
    )
