"""GGUF files made on the spot, as llama.cpp's own conversion lays them out."""

import re
from pathlib import Path

import gguf
import numpy as np

from jaxlm.models.families.gemma import Gemma, Gemma2, Gemma3
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mixtral
from jaxlm.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from jaxlm.nn.rotary import LinearScaling, Llama3Scaling, YarnScaling
from tests.parity import weights

# Of llama.cpp's names those that another word of transformers stands for.
WORDS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
NAMES = {
    Llama: "llama",
    Mixtral: "llama",
    Qwen2: "qwen2",
    Qwen3: "qwen3",
    Qwen3Moe: "qwen3moe",
    Gemma: "gemma",
    Gemma2: "gemma2",
    Gemma3: "gemma3",
}


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp rotates them: neighbours instead of halves."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def tensors(family) -> dict[str, np.ndarray]:
    """The weights of tests.parity.weights by llama.cpp's names."""
    arrays: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    is_sandwich = isinstance(family, Gemma2)
    for each in weights.tensors(family):
        array = weights.weight(each.name, each.shape)
        layer, stem, kind = re.fullmatch(
            r"(?:model\.layers\.(\d+)\.)?(.*)\.(\w+)", each.name
        ).groups()
        expert = re.fullmatch(r".*\.experts\.\d+\.(\w+)", stem)
        if expert:
            name = f"blk.{layer}.ffn_{EXPERTS[expert[1]]}_exps.{kind}"
            experts.setdefault(name, []).append(array)
            continue
        word = WORDS[stem]
        if is_sandwich and stem == "post_attention_layernorm":
            word = "post_attention_norm"
        if NAMES[type(family)] == "llama" and word in ("attn_q", "attn_k"):
            array = permuted(array, family.heads if word == "attn_q" else family.kv_heads)
        if isinstance(family, Gemma) and stem.endswith("norm"):
            array = array + np.float32(1)
        arrays[f"blk.{layer}.{word}.{kind}" if layer else f"{word}.{kind}"] = array
    return arrays | {name: np.stack(parts) for name, parts in experts.items()}


def settings(writer: gguf.GGUFWriter, family) -> None:
    """The metadata of a model, as llama.cpp's conversion writes it."""
    writer.add_name("a test")
    writer.add_context_length(family.max_positions)
    writer.add_embedding_length(family.width)
    writer.add_block_count(family.depth)
    writer.add_feed_forward_length(family.size_of_hidden)
    writer.add_head_count(family.heads)
    writer.add_head_count_kv(family.kv_heads)
    writer.add_key_length(family.size_of_head)
    writer.add_value_length(family.size_of_head)
    writer.add_rope_dimension_count(family.size_of_head)
    writer.add_layer_norm_rms_eps(family.norm_eps)
    writer.add_rope_freq_base(family.rope_theta)
    writer.add_file_type(0)
    match family.rope_scaling:
        case LinearScaling(factor=factor):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(factor)
        case YarnScaling(factor=factor, original=original):
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(factor)
            writer.add_rope_scaling_orig_ctx_len(original)
    if isinstance(family, Mixtral):
        writer.add_expert_count(family.experts)
        writer.add_expert_used_count(family.top_k)
    if isinstance(family, Qwen3Moe):
        writer.add_expert_feed_forward_length(family.hidden)
    if isinstance(family, Gemma2):
        writer.add_sliding_window(family.window)
        if family.attention_softcap is not None:
            writer.add_attn_logit_softcapping(family.attention_softcap)
        if family.logit_softcap is not None:
            writer.add_final_logit_softcapping(family.logit_softcap)


def frequencies(family) -> np.ndarray:
    """Divisors of the frequencies of Llama 3.1 in llama.cpp."""
    scaling, size = family.rope_scaling, family.size_of_head
    whole = family.rope_theta ** (-np.arange(0, size, 2, np.float32) / size)
    factors = []
    for wave in 2 * np.pi / whole:
        low, high = scaling.original / scaling.low, scaling.original / scaling.high
        smooth = (scaling.original / wave - scaling.low) / (scaling.high - scaling.low)
        between = 1 / ((1 - smooth) / scaling.factor + smooth)
        factors.append(1.0 if wave < high else scaling.factor if wave > low else between)
    return np.array(factors, np.float32)


def tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Pieces as Llama 2 has them: bytes, and letters with their pairs."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    letters = ["\u2581", *"abcdefghij", "ab", "\u2581ab", "cd"]
    texts, kinds = texts + letters, kinds + [1] * len(letters)
    rest = [f"<unused{number}>" for number in range(vocab - len(texts))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*texts, *rest][:vocab])
    writer.add_token_scores([-float(number) for number in range(vocab)])
    writer.add_token_types([*kinds, *[5] * len(rest)][:vocab])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def quantised(numbers: np.ndarray, storage: str) -> np.ndarray:
    """Stored rows by the package's quantizer, or else blocks of random bits with finite scales."""
    kind = gguf.GGMLQuantizationType[storage]
    if storage not in HALVES:
        return gguf.quants.quantize(numbers, kind)
    draw = np.random.default_rng(numbers.size)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    codes = draw.integers(0, 256, (*numbers.shape[:-1], numbers.shape[-1] // block, size), np.uint8)
    for place in HALVES[storage]:
        scales = draw.normal(size=(*codes.shape[:-1], 1)).astype(np.float16)
        codes[..., place : place + 2] = scales.view(np.uint8)
    return codes.reshape(*numbers.shape[:-1], -1)


def write(
    path: Path, family, *, storage: str = "F32", change=lambda writer: None, drop: tuple = ()
) -> dict[str, np.ndarray]:
    """Write a file with matrices in this storage, if it fits; return its tensors by name.

    Args:
      path: the file.
      family: the model family.
      storage: storage of the matrices.
      change: receives the writer before the end, to change the metadata.
      drop: names of tensors to leave out.
    """
    kind = gguf.GGMLQuantizationType[storage]
    writer = gguf.GGUFWriter(path, NAMES[type(family)])
    settings(writer, family)
    tokenizer(writer, family.vocab)
    arrays = tensors(family)
    if isinstance(family.rope_scaling, Llama3Scaling):
        arrays["rope_freqs.weight"] = frequencies(family)
    stored = {}
    for name, array in arrays.items():
        is_matrix = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        as_kind = kind if is_matrix else gguf.GGMLQuantizationType.F32
        stored[name] = quantised(array, as_kind.name)
        if name not in drop:
            writer.add_tensor(name, stored[name], raw_dtype=as_kind)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
