"""ModernBERT (arXiv:2412.13663): rotary positions, two layers in three with a window, layer norms before each part, a gated GELU."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Encoder, HeadConfig
from jaxlm.models.families import setting_docs
from jaxlm.models.families.hub import MAX_NESTING, Attributes, Hub, TensorMapping, linears, norms
from jaxlm.models.families.llama_like import ACTIVATIONS, THEIRS
from jaxlm.models.families.sizes import gated_hidden, uneven
from jaxlm.nn.config import Activation, AttentionConfig, BlockConfig, Init, MlpConfig, NormConfig
from jaxlm.nn.rotary import Rope

LOCAL, WHOLE = "sliding_attention", "full_attention"  # transformers' words for kinds of layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBERT:
    """A ModernBERT-style encoder."""

    family: Literal["modernbert"] = "modernbert"
    vocab: int | Literal["auto"] = setting("auto", **setting_docs.VOCAB)
    context: int = setting(8192, **setting_docs.CONTEXT)
    depth: int = setting(22, "layers", low=2)
    width: int = setting(768, **setting_docs.WIDTH)
    heads: int = setting(12, **setting_docs.HEADS)
    hidden: int | Literal["auto"] = setting("auto", **setting_docs.GATED_HIDDEN)
    activation: Activation = setting("gelu", "activation of the MLP's gate and of the head")
    global_every: int = setting(
        3, "of so many layers the first sees all, the others a window", low=1
    )
    window: int = setting(64, "tokens that a local layer sees to either side", unit="tokens", low=0)
    rope_theta: float = setting(160_000.0, **setting_docs.GLOBAL_ROPE_THETA)
    local_rope_theta: float = setting(10_000.0, **setting_docs.LOCAL_ROPE_THETA)
    norm_eps: float = setting(1e-5, **setting_docs.LAYER_NORM_EPS)
    tied: bool = setting(True, **setting_docs.TIED)
    dropout: float = setting(0.0, **setting_docs.OUTPUT_DROPOUT)
    init: Init = setting("normal", **setting_docs.INIT)
    init_std: float = setting(0.02, **setting_docs.INIT_STD)

    HUB: ClassVar[Hub] = Hub(
        model_type="modernbert",
        architecture="ModernBertForMaskedLM",
        rows=(
            TensorMapping("model.embeddings.tok_embeddings.weight", ("embedding/table",)),
            *norms("model.embeddings.{}", norm="embedding_norm"),
            *norms("model.{}", final_norm="final_norm"),
            *linears("head.{}", dense="head/dense"),
            *norms("head.{}", norm="head/norm"),
            TensorMapping("decoder.bias", ("head/bias",)),
            TensorMapping("decoder.weight", ("unembedding/weight",), "transposed"),
            *norms("model.layers.{i}.{}", attn_norm="attention_norm", mlp_norm="mlp_norm"),
            TensorMapping(
                "model.layers.{i}.attn.Wqkv.weight",
                tuple(f"attention/{name}/weight" for name in ("query", "key", "value")),
                "transposed",
            ),
            TensorMapping(
                "model.layers.{i}.attn.Wo.weight", ("attention/out/weight",), "transposed"
            ),
            TensorMapping(
                "model.layers.{i}.mlp.Wi.weight", ("mlp/gate/weight", "mlp/up/weight"), "transposed"
            ),
            TensorMapping("model.layers.{i}.mlp.Wo.weight", ("mlp/down/weight",), "transposed"),
        ),
        buffers=("rotary_emb.inv_freq",),
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width evenly, and rotate in pairs."""
        found = list(uneven("width", self.width, "heads", self.heads))
        yield from found
        if not found and (size := self.width // self.heads) % 2:
            yield (
                "width",
                f"a head of {size} cannot be rotated in pairs",
                f"--config.model.width={self.heads * (size + 1)}",
            )

    @property
    def size_of_hidden(self) -> int:
        """hidden, with `auto` filled in."""
        return gated_hidden(self.width) if self.hidden == "auto" else self.hidden

    def build(self) -> Encoder:
        """The blocks. `vocab` must be a number by now."""
        assert self.vocab != "auto"
        norm = NormConfig(kind="layer", eps=self.norm_eps)
        attention = AttentionConfig(
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.width // self.heads,
            rotary=Rope(theta=self.rope_theta),
        )
        whole = BlockConfig(
            attention=attention,
            mlp=MlpConfig(hidden=self.size_of_hidden, activation=self.activation, gated=True),
            norm=norm,
            dropout=self.dropout,
        )
        local = dataclasses.replace(
            whole,
            attention=dataclasses.replace(
                attention, rotary=Rope(theta=self.local_rope_theta), window=self.window + 1
            ),
        )
        return Encoder(
            vocab=self.vocab,
            width=self.width,
            depth=self.depth,
            # The first reads what the embedding's norm has made.
            prefix=(dataclasses.replace(whole, residual="pre_mlp"),),
            pattern=(*(local,) * (self.global_every - 1), whole),
            final_norm=norm,
            head=HeadConfig(activation=self.activation, norm=norm, bias=False),
            embedding_norm=norm,
            tied=self.tied,
            dropout=self.dropout,
            init=self.init,
            init_std=self.init_std,
        )

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it.

        transformers 4 has a base for each kind of layer, transformers 5 both in `rope_parameters`.
        """
        for name, value in (
            ("norm_bias", False),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("classifier_bias", False),
            ("decoder_bias", True),
        ):
            given.expect(name, value)
        given.ignore(*_UNUSED)
        activation = given.choose("hidden_activation", ACTIVATIONS, "gelu")
        if given.choose("classifier_activation", ACTIVATIONS, "gelu") != activation:
            given.reject("classifier_activation", "that of the MLP")
        depth = given.get("num_hidden_layers", most=MAX_NESTING)
        every = given.get("global_attn_every_n_layers", 3)
        kinds = given.get("layer_types", _kinds(depth, every), kind=list)
        every = next((n for n, kind in enumerate(kinds) if n and kind == WHOLE), every)
        if kinds != _kinds(depth, every):
            given.reject("layer_types", f"one {WHOLE} before each {every - 1} {LOCAL}")
        theta, local_theta = cls._bases(given)
        return cls(
            vocab=given.get("vocab_size"),
            context=given.get("max_position_embeddings", 8192),
            depth=depth,
            width=given.get("hidden_size"),
            heads=given.get("num_attention_heads"),
            hidden=given.get("intermediate_size"),
            activation=activation,
            global_every=every,
            window=given.get("local_attention", 128) // 2,
            rope_theta=theta,
            local_rope_theta=local_theta,
            norm_eps=given.get("norm_eps", 1e-5, kind=float),
            tied=given.get("tie_word_embeddings", True, kind=bool),
        )

    @staticmethod
    def _bases(given: Attributes) -> tuple[float, float]:
        """The rotary bases of global and of local layers."""
        theta = given.get("global_rope_theta", 160_000.0, kind=float)
        local_theta = given.get("local_rope_theta", 10_000.0, kind=float)
        both = given.split("rope_parameters", WHOLE, LOCAL)
        if both is not None:
            for each in both:
                each.expect("rope_type", "default")
            theta = both[0].get("rope_theta", theta, kind=float)
            local_theta = both[1].get("rope_theta", local_theta, kind=float)
            for each in both:
                each.note_unused()
        return theta, local_theta

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json."""
        return dict(
            vocab_size=self.build().vocab,
            max_position_embeddings=self.context,
            num_hidden_layers=self.depth,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            intermediate_size=self.size_of_hidden,
            hidden_activation=THEIRS[self.activation],
            classifier_activation=THEIRS[self.activation],
            global_attn_every_n_layers=self.global_every,
            local_attention=2 * self.window,
            global_rope_theta=self.rope_theta,
            local_rope_theta=self.local_rope_theta,
            norm_eps=self.norm_eps,
            norm_bias=False,
            attention_bias=False,
            mlp_bias=False,
            classifier_bias=False,
            decoder_bias=True,
            tie_word_embeddings=self.tied,
            initializer_range=self.init_std,
        )


def _kinds(depth: int, every: int) -> list[str]:
    return [LOCAL if number % every else WHOLE for number in range(depth)]


# How it was trained, what only a model that classifies reads, and what the authors' files say without a use.
_UNUSED = (
    "embedding_dropout",
    "mlp_dropout",
    "classifier_pooling",
    "cls_token_id",
    "sep_token_id",
    "deterministic_flash_attn",
    "sparse_prediction",
    "sparse_pred_ignore_index",
    "repad_logits_with_grad",
    "reference_compile",
    "initializer_cutoff_factor",
    "layer_norm_eps",
    "position_embedding_type",
)

SIZES: dict[str, dict[str, Any]] = {
    "modernbert-base": dict(vocab=50_368, hidden=1152),
    "modernbert-large": dict(vocab=50_368, depth=28, width=1024, heads=16, hidden=2624),
}
