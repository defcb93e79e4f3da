"""GPT-NeoX (arXiv:2204.06745) and Pythia (arXiv:2304.01373): attention and MLP side by side, part of each head rotated, layer norms, biases."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import rope, setting_docs
from jaxlm.models.families.hub import (
    MAX_NESTING,
    Attributes,
    Hub,
    TensorMapping,
    linears,
    norms,
    uncomputed,
)
from jaxlm.models.families.llama_like import ACTIVATIONS, THEIRS
from jaxlm.models.families.sizes import uneven
from jaxlm.nn.config import (
    Activation,
    AttentionConfig,
    BlockConfig,
    Init,
    MlpConfig,
    NormConfig,
)
from jaxlm.nn.rotary import NoScaling, Rope, Scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeoX:
    """A GPT-NeoX-style decoder."""

    family: Literal["neox"] = "neox"
    vocab: int | Literal["auto"] = setting("auto", **setting_docs.VOCAB)
    context: int = setting(2048, **setting_docs.CONTEXT)
    depth: int = setting(6, **setting_docs.DEPTH)
    width: int = setting(512, **setting_docs.WIDTH)
    heads: int = setting(8, **setting_docs.HEADS)
    kv_heads: int | Literal["auto"] = setting("auto", **setting_docs.KV_HEADS)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.PLAIN_HIDDEN)
    activation: Activation = setting("gelu", **setting_docs.PLAIN_ACTIVATION)
    parallel: bool = setting(True, "attention and MLP read the same stream; else one by one")
    rope_theta: float = setting(10_000.0, **setting_docs.ROPE_THETA)
    rope_share: float = setting(0.25, **setting_docs.ROPE_SHARE)
    rope_scaling: Scaling = setting(NoScaling(), **setting_docs.ROPE_SCALING)
    norm_eps: float = setting(1e-5, **setting_docs.LAYER_NORM_EPS)
    tied: bool = setting(False, **setting_docs.TIED)
    dropout: float = setting(0.0, **setting_docs.OUTPUT_DROPOUT)
    init: Init = setting("gpt2", **setting_docs.INIT)
    init_std: float = setting(0.02, **setting_docs.INIT_STD)

    HUB: ClassVar[Hub] = Hub(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        rows=(
            TensorMapping("gpt_neox.embed_in.weight", ("embedding/table",)),
            *norms("gpt_neox.{}", final_layer_norm="final_norm"),
            TensorMapping("embed_out.weight", ("unembedding/weight",), "transposed"),
            *norms(
                "gpt_neox.layers.{i}.{}",
                input_layernorm="attention_norm",
                post_attention_layernorm="mlp_norm",
            ),
            *(
                TensorMapping(
                    f"gpt_neox.layers.{{i}}.attention.query_key_value.{kind}",
                    tuple(f"attention/{name}/{kind}" for name in ("query", "key", "value")),
                    "by head",
                )
                for kind in ("weight", "bias")
            ),
            *linears(
                "gpt_neox.layers.{i}.{}",
                **{
                    "attention.dense": "attention/out",
                    "mlp.dense_h_to_4h": "mlp/up",
                    "mlp.dense_4h_to_h": "mlp/down",
                },
            ),
        ),
        buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width and the keys evenly, and what is rotated comes in pairs."""
        found = list(uneven("width", self.width, "heads", self.heads))
        yield from found
        if self.kv_heads != "auto":
            yield from uneven("heads", self.heads, "kv_heads", self.kv_heads)
        dims = self.rotary.dims(self.width // self.heads)
        if not found and (dims < 2 or dims % 2):
            yield (
                "rope_share",
                f"{dims} of {self.width // self.heads} features of a head cannot be rotated in pairs",
                "--config.model.rope_share=0.5",
            )

    @property
    def rotary(self) -> Rope:
        """How heads are rotated."""
        return Rope(theta=self.rope_theta, share=self.rope_share, scaling=self.rope_scaling)

    def build(self) -> Decoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        norm = NormConfig(kind="layer", eps=self.norm_eps, bias=True)
        block = BlockConfig(
            attention=AttentionConfig(
                heads=self.heads,
                kv_heads=self.heads if self.kv_heads == "auto" else self.kv_heads,
                head_dim=self.width // self.heads,
                rotary=self.rotary,
                bias=True,
                out_bias=True,
            ),
            mlp=MlpConfig(
                hidden=4 * self.width if self.hidden == "auto" else self.hidden,
                activation=self.activation,
                gated=False,
                bias=True,
            ),
            norm=norm,
            residual="parallel_norms" if self.parallel else "pre",
            dropout=self.dropout,
        )
        return Decoder(
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            pattern=(block,),
            final_norm=norm,
            tied=self.tied,
            dropout=self.dropout,
            init=self.init,
            init_std=self.init_std,
        )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it."""
        given.expect("attention_bias", True)
        rotary = rope.read(
            given,
            theta=given.get("rotary_emb_base", 10_000.0, kind=float),
            share=given.get("rotary_pct", 0.25, kind=float),
        )
        return cls(
            vocab=given.get("vocab_size"),
            context=given.get("max_position_embeddings", 2048),
            depth=given.get("num_hidden_layers", most=MAX_NESTING),
            width=given.get("hidden_size"),
            heads=given.get("num_attention_heads"),
            hidden=given.get("intermediate_size"),
            activation=given.choose("hidden_act", ACTIVATIONS, "gelu"),
            parallel=given.get("use_parallel_residual", True, kind=bool),
            rope_theta=rotary.theta,
            rope_share=rotary.share,
            rope_scaling=rotary.scaling,  # type: ignore[arg-type]  # of these kinds
            norm_eps=given.get("layer_norm_eps", 1e-5, kind=float),
            tied=given.get("tie_word_embeddings", False, kind=bool),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        if self.kv_heads not in ("auto", self.heads):
            raise uncomputed(self.HUB, f"kv_heads = {self.kv_heads}, and every head has its keys")
        base = rope.written(self.rope_theta, self.rope_scaling)
        return dict(
            vocab_size=self.build().vocab,
            max_position_embeddings=self.context,
            num_hidden_layers=self.depth,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width if self.hidden == "auto" else self.hidden,
            hidden_act=THEIRS[self.activation],
            use_parallel_residual=self.parallel,
            rotary_emb_base=base["rope_theta"],
            rotary_pct=self.rope_share,
            rope_scaling=base["rope_scaling"],
            layer_norm_eps=self.norm_eps,
            tie_word_embeddings=self.tied,
            initializer_range=self.init_std,
            attention_bias=True,
        )


SIZES: dict[str, dict[str, Any]] = {
    "pythia-70m": dict(vocab=50_304, depth=6, width=512, heads=8),
    "pythia-160m": dict(vocab=50_304, depth=12, width=768, heads=12),
    "pythia-410m": dict(vocab=50_304, depth=24, width=1024, heads=16),
    "pythia-1b": dict(vocab=50_304, depth=16, width=2048, heads=8),
    "pythia-1.4b": dict(vocab=50_304, depth=24, width=2048, heads=16),
    "pythia-2.8b": dict(vocab=50_304, depth=32, width=2560, heads=32),
    "pythia-6.9b": dict(vocab=50_432, depth=32, width=4096, heads=32),
    "pythia-12b": dict(vocab=50_688, depth=36, width=5120, heads=40),
    "gpt-neox-20b": dict(vocab=50_432, depth=44, width=6144, heads=64),
}
