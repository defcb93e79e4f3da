"""The metadata of a GGUF as the config.json that transformers would have, and the other way. Free of JAX."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlm.checkpoint.gguf_names import ARCHITECTURES, Architecture
from jaxlm.core.errors import DataError
from jaxlm.models.families import rope
from jaxlm.models.families.hub import MAX_NESTING, Attributes
from jaxlm.nn.rotary import Llama3Scaling, Rope

WHAT = "a GGUF's metadata"
# What does not change what the model computes; the tokenizer's own are read with the tokenizer.
NEUTRAL = ("general.", "tokenizer.", "quantize.", "imatrix.", "mradermacher.")
LARGEST_SIZES = {
    "gemma2": 46,
    "gemma3": 62,
}  # layers of the sizes that scale scores by width / heads


def architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """What llama.cpp calls the model's architecture. Raises DataError where it is none of those known."""
    name = metadata.get("general.architecture")
    if metadata.get("general.type", "model") != "model" or metadata.get("split.count", 1) not in (
        0,
        1,
    ):
        raise DataError(
            "a GGUF is not a whole model",
            where=where,
            why="it is a part of one, or what changes one",
            fix="make one file of several with llama-gguf-split --merge",
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        name = "llama with experts"
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise DataError(
            f"a GGUF of the architecture {name!r:.60} is not known",
            where=where,
            why=f"known are {', '.join(each for each in ARCHITECTURES if ' ' not in each)}",
            fix="import the folder that it was converted from: more families are read from folders",
        )
    return ARCHITECTURES[name]


def attributes(
    metadata: Mapping[str, Any],
    where: str,
    *,
    vocab: int,
    is_tied: bool,
    frequencies: np.ndarray | None,
) -> dict[str, Any]:
    """The attributes of config.json.

    Args:
      metadata: of the file.
      where: for errors.
      vocab: rows of the embedding.
      is_tied: there is no other matrix for the logits.
      frequencies: what rotary frequencies are divided by, float32 [head_dim / 2], where the file says.

    Raises:
      DataError: with everything that is missing, or that is there and not understood.
    """
    found = architecture(metadata, where)
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if not key.startswith(NEUTRAL)}  # fmt: skip
    given = Attributes(own, where, what=WHAT)
    given.ignore("vocab_size", "split.count", "split.no", "split.tensors.count")
    heads, width = given.get("attention.head_count"), given.get("embedding_length")
    depth = given.get("block_count", most=MAX_NESTING)
    size = given.get("attention.key_length", max(1, width // heads))
    given.expect("attention.value_length", size)
    given.expect("rope.dimension_count", size)
    theta = given.get("rope.freq_base", 10_000.0, kind=float)
    context = given.get("context_length")
    config: dict[str, Any] = {
        "model_type": found.model_type,
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "intermediate_size": given.get("feed_forward_length", width),
        "num_attention_heads": heads,
        "num_key_value_heads": given.get("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": context,
        "rms_norm_eps": given.get("attention.layer_norm_rms_epsilon", kind=float),
        "rope_theta": theta,
        "rope_scaling": _scaling(given, context, theta, size, frequencies),
        "tie_word_embeddings": is_tied,
    }
    if found.model_type in ("mixtral", "qwen3_moe"):
        config |= _experts(given, found.model_type)
    if found.model_type in ("gemma2", "gemma3_text"):
        given.ignore("attention.sliding_window_pattern")
        is_largest = LARGEST_SIZES[prefix[:-1]] == depth
        config |= {
            "sliding_window": given.get("attention.sliding_window", 4096),
            "query_pre_attn_scalar": width // heads if is_largest else size,
            "attn_logit_softcapping": given.get("attn_logit_softcapping", None, kind=float),
            "final_logit_softcapping": given.get("final_logit_softcapping", None, kind=float),
        }
    if found.model_type == "gemma3_text":
        config["rope_local_base_freq"] = given.get("rope.freq_base_swa", 10_000.0, kind=float)
    given.check()
    return config


def _experts(given: Attributes, kind: str) -> dict[str, Any]:
    count, used = given.get("expert_count"), given.get("expert_used_count")
    if kind == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": used}
    given.expect("expert_gating_func", 1)  # softmax
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": given.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _scaling(
    given: Attributes, context: int, theta: float, size: int, frequencies: np.ndarray | None
) -> dict[str, Any] | None:
    """How rotary positions are stretched, as config.json says it."""
    given.ignore("rope.scaling.finetuned")
    kind = given.get("rope.scaling.type", "none", kind=str)
    given.expect("rope.scaling.attn_factor", 1.0)
    if frequencies is not None:
        given.expect("rope.scaling.type", "none")
        return _blended(given, theta, size, frequencies)
    if kind == "none":
        given.expect("rope.scaling.factor", 1.0, 0.0)
        return None
    found: dict[str, Any] = {
        "rope_type": kind,
        "factor": given.get("rope.scaling.factor", kind=float),
    }
    original = given.get("rope.scaling.original_context_length", context)
    given.expect("rope.scaling.type", "linear", "yarn")
    if kind == "yarn":
        found["original_max_position_embeddings"] = original
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            found[ours] = given.get(f"rope.scaling.{theirs}", None, kind=float)
    return found


def _blended(
    given: Attributes, theta: float, size: int, frequencies: np.ndarray
) -> dict[str, Any] | None:
    """Llama 3.1's scaling, of which a file holds only what each frequency is divided by.

    What low frequencies are divided by is the largest. Contexts, and the turns that are low and high, only count by their
    ratios, so with turns of 1 and 4 the context is looked for.
    """
    if theta <= 1 or frequencies.shape != (size // 2,):
        given.note(f"rope_freqs.weight has the shape {list(frequencies.shape)}, and heads {size}")
        return None
    factor = float(frequencies.max(initial=1.0))
    for original in (2**power for power in range(4, 24)):
        scaling = Llama3Scaling(factor=max(1.0, factor), original=original)
        expected = 1 / np.array(Rope(theta=theta, scaling=scaling).factors(size))
        if np.allclose(frequencies, expected, rtol=1e-5):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
                "original_max_position_embeddings": original,
            }
    given.note("rope_freqs.weight divides rotary frequencies by what is not Llama 3.1's scaling")
    return None


def metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What `attributes` reads the attributes of a config.json from, by the name of the architecture.

    Attributes that a file has no place for are left out: what is read back says which.
    """
    size, experts = config["head_dim"], config.get("num_local_experts", config.get("num_experts"))
    own = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window") if name in LARGEST_SIZES else None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope.dimension_count": size,
        "rope.freq_base": config["rope_theta"],
        "rope.freq_base_swa": config.get("rope_local_base_freq"),
        "expert_count": experts,
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    scaling = config.get("rope_scaling") or {}
    if (kind := scaling.get("rope_type")) in ("linear", "yarn"):
        own |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling.get("original_max_position_embeddings"),
            "rope.scaling.yarn_beta_fast": scaling.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": scaling.get("beta_slow"),
        }
    prefix = name.partition(" ")[0]
    return {"general.architecture": prefix} | {
        f"{prefix}.{key}": value for key, value in own.items() if value is not None
    }


def frequencies(config: Mapping[str, Any]) -> np.ndarray | None:
    """What rotary frequencies are divided by, float32 [head_dim / 2], where a file says it as a tensor: Llama 3.1's scaling."""
    found = rope.read(Attributes(config, "GGUF"))
    if not isinstance(found.scaling, Llama3Scaling):
        return None
    return (1 / np.array(found.factors(config["head_dim"]))).astype(np.float32)
