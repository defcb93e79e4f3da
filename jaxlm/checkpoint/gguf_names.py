"""The names of tensors in llama.cpp and in Hugging Face, and how their numbers differ.

llama.cpp's rotary embedding pairs neighboring dimensions (interleaved), transformers' pairs the
halves of a head, so some architectures store the rows of queries and keys in another order. And
Gemma's norm scales are stored here with the 1 added that transformers adds. Free of JAX.
"""

import dataclasses
import re

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
    is_rotated_by_neighbours: bool = False
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
            name = next((name for name, each in OUTSIDE.items() if each == theirs), None)
            return None if name is None else (name, 0)
        layer, stem, kind = match.groups()
        expert = EXPERT.search(stem)
        stem = EXPERT.sub(".experts.{e}.", stem)
        name = next((name for name, each in self.layer.items() if each == stem), None)
        return (
            None
            if name is None
            else (f"blk.{layer}.{name}.{kind}", int(expert[1]) if expert else 0)
        )

    def rotated(self, name: str) -> str | None:
        """Return "q" or "k" if the tensor's rows are queries or keys in another order."""
        match = LAYER.fullmatch(name) if self.is_rotated_by_neighbours else None
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
    "llama": Architecture(model_type="llama", layer=LLAMA, is_rotated_by_neighbours=True),
    "llama with experts": Architecture(
        model_type="mixtral", layer=ATTENTION | NORMS | MIXTRAL, is_rotated_by_neighbours=True
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
