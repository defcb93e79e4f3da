"""Names of tensors and settings in GGUF and in Hugging Face folders, both ways. Free of JAX.

llama.cpp's rotary embedding pairs neighboring dimensions (interleaved), transformers' pairs the
halves of a head, so some architectures store the rows of queries and keys in another order. And
Gemma's norm scales are stored here with the 1 added that transformers adds.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxlm.core.errors import DataError
from jaxlm.models.families import rope
from jaxlm.models.families.hub import MAX_NESTING, Attributes
from jaxlm.nn.rotary import Llama3Scaling, Rope

LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
THEIR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROUTER = "ffn_gate_inp.weight"
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{e}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{e}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{e}.w3",
}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of llama.cpp: transformers' model_type, and the tensors of a layer."""

    model_type: str
    layer: dict[str, str]
    is_interleaved: bool = False
    counts_from_zero: bool = False  # norm scales include the 1 that Gemma adds in transformers

    def theirs(self, name: str) -> str:
        """Return the Hugging Face name, with {e} for the expert; unknown names stay unchanged."""
        match = LAYER.fullmatch(name)
        if match is None:
            return OUTSIDE.get(name, name)
        layer, stem, kind = match.groups()
        return f"model.layers.{layer}.{self.layer[stem]}.{kind}" if stem in self.layer else name

    def own(self, theirs: str) -> tuple[str, int] | None:
        """Return llama.cpp's name of a Hugging Face tensor and its expert (0), or None."""
        match = THEIR_LAYER.fullmatch(theirs)
        if match is None:
            return next(((name, 0) for name, each in OUTSIDE.items() if each == theirs), None)
        layer, stem, kind = match.groups()
        expert = EXPERT.search(stem)
        stem, number = EXPERT.sub(".experts.{e}.", stem), int(expert[1]) if expert else 0
        names = (f"blk.{layer}.{name}.{kind}" for name, each in self.layer.items() if each == stem)
        return next(((name, number) for name in names), None)

    def rotated(self, name: str) -> str | None:
        """Return "q" or "k" if the tensor's rows are queries or keys in another order."""
        match = LAYER.fullmatch(name) if self.is_interleaved else None
        return match[2][-1] if match is not None and match[2] in ("attn_q", "attn_k") else None

    def is_scale(self, name: str) -> bool:
        """Return True if the tensor is a norm scale that includes Gemma's 1."""
        return self.counts_from_zero and name.endswith("norm.weight")

    def is_exact(self, name: str, dimensions: int) -> bool:
        """Return True if llama.cpp requires float32: vectors, and the router of experts."""
        return dimensions == 1 or name.endswith(ROUTER)


LLAMA = ATTENTION | NORMS | MLP
GEMMA2 = ATTENTION | SANDWICH | MLP
ARCHITECTURES = {
    "llama": Architecture(model_type="llama", layer=LLAMA, is_interleaved=True),
    "llama with experts": Architecture(
        model_type="mixtral", layer=ATTENTION | NORMS | MIXTRAL, is_interleaved=True
    ),
    "qwen2": Architecture(model_type="qwen2", layer=LLAMA),
    "qwen3": Architecture(model_type="qwen3", layer=LLAMA),
    "qwen3moe": Architecture(model_type="qwen3_moe", layer=ATTENTION | NORMS | QWEN_EXPERTS),
    "gemma": Architecture(model_type="gemma", layer=LLAMA, counts_from_zero=True),
    "gemma2": Architecture(model_type="gemma2", layer=GEMMA2, counts_from_zero=True),
    "gemma3": Architecture(model_type="gemma3_text", layer=GEMMA2, counts_from_zero=True),
}


def named_after(model_type: str) -> str | None:
    """Return the name here of the architecture for a model_type of transformers; else None.

    A Mistral is a Llama in llama.cpp, except for its window, which a file cannot state.
    """
    target = "llama" if model_type == "mistral" else model_type
    return next((name for name, each in ARCHITECTURES.items() if each.model_type == target), None)


WHAT = "a GGUF's metadata"
# Keys that do not change the model's computation; the tokenizer's are read with the tokenizer.
NEUTRAL = ("general.", "tokenizer.", "quantize.", "imatrix.", "mradermacher.")
# Layers of the sizes that scale attention scores by width / heads.
LARGEST_SIZES = {"gemma2": 46, "gemma3": 62}


def architecture(metadata: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture that the metadata names. Raises DataError if it is unknown."""
    name = metadata.get("general.architecture")
    is_part = metadata.get("split.count", 1) not in (0, 1)
    if is_part or metadata.get("general.type", "model") != "model":
        raise DataError(
            "a GGUF is not a complete model",
            where=where,
            why="the file is one part of a split model, or an adapter",
            fix="merge the parts of a split model with llama-gguf-split --merge",
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        name = "llama with experts"
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise DataError(
            f"GGUF architecture {name!r:.60} is not known",
            where=where,
            why=f"known are {', '.join(each for each in ARCHITECTURES if ' ' not in each)}",
            fix="import the folder that the GGUF was converted from: folders support more families",
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
    """Convert the metadata to the attributes of config.json.

    Args:
      metadata, where: metadata of the file, and its name in errors.
      vocab: rows of the embedding.
      is_tied: whether the file has no output matrix of its own.
      frequencies: divisors of the rotary frequencies, float32 [head_dim / 2], if the file has them.

    Raises DataError, listing everything that is missing or not understood.
    """
    arch = architecture(metadata, where)
    prefix = f"{metadata['general.architecture']}."
    used = {key: value for key, value in metadata.items() if not key.startswith(NEUTRAL)}
    settings = {key.removeprefix(prefix): value for key, value in used.items()}
    reader = Attributes(settings, where, what=WHAT)
    reader.ignore("vocab_size", "split.count", "split.no", "split.tensors.count")
    heads, width = reader.get("attention.head_count"), reader.get("embedding_length")
    depth = reader.get("block_count", most=MAX_NESTING)
    size = reader.get("attention.key_length", max(1, width // heads))
    reader.expect("attention.value_length", size)
    reader.expect("rope.dimension_count", size)
    theta = reader.get("rope.freq_base", 10_000.0, kind=float)
    context = reader.get("context_length")
    config: dict[str, Any] = {
        "model_type": arch.model_type,
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "intermediate_size": reader.get("feed_forward_length", width),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.get("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": context,
        "rms_norm_eps": reader.get("attention.layer_norm_rms_epsilon", kind=float),
        "rope_theta": theta,
        "rope_scaling": _scaling(reader, context, theta, size, frequencies),
        "tie_word_embeddings": is_tied,
    }
    if arch.model_type in ("mixtral", "qwen3_moe"):
        config |= _experts(reader, arch.model_type)
    if arch.model_type in ("gemma2", "gemma3_text"):
        reader.ignore("attention.sliding_window_pattern")
        is_largest = LARGEST_SIZES[prefix[:-1]] == depth
        config |= {
            "sliding_window": reader.get("attention.sliding_window", 4096),
            "query_pre_attn_scalar": width // heads if is_largest else size,
            "attn_logit_softcapping": reader.get("attn_logit_softcapping", None, kind=float),
            "final_logit_softcapping": reader.get("final_logit_softcapping", None, kind=float),
        }
    if arch.model_type == "gemma3_text":
        config["rope_local_base_freq"] = reader.get("rope.freq_base_swa", 10_000.0, kind=float)
    reader.check()
    return config


def _experts(reader: Attributes, kind: str) -> dict[str, Any]:
    count, used = reader.get("expert_count"), reader.get("expert_used_count")
    if kind == "mixtral":
        return {"num_local_experts": count, "num_experts_per_tok": used}
    reader.expect("expert_gating_func", 1)  # softmax
    return {
        "num_experts": count,
        "num_experts_per_tok": used,
        "moe_intermediate_size": reader.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _scaling(
    reader: Attributes, context: int, theta: float, size: int, frequencies: np.ndarray | None
) -> dict[str, Any] | None:
    """Return the rope_scaling of config.json."""
    reader.ignore("rope.scaling.finetuned")
    kind = reader.get("rope.scaling.type", "none", kind=str)
    reader.expect("rope.scaling.attn_factor", 1.0)
    if frequencies is not None:
        reader.expect("rope.scaling.type", "none")
        return _blended(reader, theta, size, frequencies)
    if kind == "none":
        reader.expect("rope.scaling.factor", 1.0, 0.0)
        return None
    factor = reader.get("rope.scaling.factor", kind=float)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    original = reader.get("rope.scaling.original_context_length", context)
    reader.expect("rope.scaling.type", "linear", "yarn")
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            scaling[ours] = reader.get(f"rope.scaling.{theirs}", None, kind=float)
    return scaling


def _blended(
    reader: Attributes, theta: float, size: int, frequencies: np.ndarray
) -> dict[str, Any] | None:
    """Return Llama 3.1's rope scaling; a file holds only the divisor of each frequency.

    The largest divisor is that of the low frequencies. Context lengths and the low and high factors
    matter only by their ratios, so with factors 1 and 4 the original context length is searched.
    """
    if theta <= 1 or frequencies.shape != (size // 2,):
        reader.note(f"rope_freqs.weight has the shape {list(frequencies.shape)}, and heads {size}")
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
    reader.note("rope_freqs.weight holds divisors that are not Llama 3.1's scaling")
    return None


def metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert the attributes of a config.json to metadata; the inverse of `attributes`.

    Attributes that a file cannot state are left out; reading the metadata back shows which.
    """
    size, experts = config["head_dim"], config.get("num_local_experts", config.get("num_experts"))
    settings = {
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
        settings |= {
            "rope.scaling.type": kind,
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling.get("original_max_position_embeddings"),
            "rope.scaling.yarn_beta_fast": scaling.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": scaling.get("beta_slow"),
        }
    prefix = name.partition(" ")[0]
    return {"general.architecture": prefix} | {
        f"{prefix}.{key}": value for key, value in settings.items() if value is not None
    }


def frequencies(config: Mapping[str, Any]) -> np.ndarray | None:
    """Return Llama 3.1's divisors of the rotary frequencies, float32 [head_dim / 2], or None.

    A file stores them as a tensor.
    """
    rotary = rope.read(Attributes(config, "GGUF"))
    if not isinstance(rotary.scaling, Llama3Scaling):
        return None
    return (1 / np.array(rotary.factors(config["head_dim"]))).astype(np.float32)
