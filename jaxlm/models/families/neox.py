"""GPT-NeoX (arXiv:2204.06745), Pythia (2304.01373): parallel parts, partial rotation, biases."""

import dataclasses
from typing import Any, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import DecoderConfig
from jaxlm.models.families import family as families
from jaxlm.models.families import hub, rope, setting_docs
from jaxlm.models.families.family import ACTIVATIONS, PlainDecoder, Problems, size_table
from jaxlm.models.families.hub import Attributes, ConfigKey, Hub, TensorMapping, linears, norms
from jaxlm.nn.config import Residual
from jaxlm.nn.rotary import NoScaling, Rope, Scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeoX(PlainDecoder):
    """A GPT-NeoX-style decoder."""

    family: Literal["neox"] = "neox"
    max_positions: int = setting(2048, **setting_docs.MAX_POSITIONS)
    depth: int = setting(6, **setting_docs.DEPTH)
    width: int = setting(512, **setting_docs.WIDTH)
    heads: int = setting(8, **setting_docs.HEADS)
    parallel: bool = setting(True, "attention and MLP read the same stream; else in sequence")
    rope_theta: float = setting(10_000.0, **setting_docs.ROPE_THETA)
    rotary_fraction: float = setting(0.25, **setting_docs.ROTARY_FRACTION)
    rope_scaling: Scaling = setting(NoScaling(), **setting_docs.ROPE_SCALING)
    tied: bool = setting(False, **setting_docs.TIED)
    dropout: float = setting(0.0, **setting_docs.OUTPUT_DROPOUT)

    ATTRIBUTES = {
        **families.SIZE_ATTRIBUTES,
        "activation": ConfigKey("hidden_act", "gelu", words=ACTIVATIONS),
        "parallel": ConfigKey("use_parallel_residual", True, kind=bool),
        "rope_theta": ConfigKey("rotary_emb_base", 10_000.0, kind=float),
        "rotary_fraction": ConfigKey("rotary_pct", 0.25, kind=float),
        "norm_eps": ConfigKey("layer_norm_eps", 1e-5, kind=float),
        "tied": ConfigKey("tie_word_embeddings", False, kind=bool),
    }
    CONSTANTS = {"attention_bias": True}
    HUB = Hub(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        mappings=(
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
        buffer_suffixes=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    )
    SIZES = size_table(
        "vocab depth width heads",
        {
            "pythia-70m": (50_304, 6, 512, 8),
            "pythia-160m": (50_304, 12, 768, 12),
            "pythia-410m": (50_304, 24, 1024, 16),
            "pythia-1b": (50_304, 16, 2048, 8),
            "pythia-1.4b": (50_304, 24, 2048, 16),
            "pythia-2.8b": (50_304, 32, 2560, 32),
            "pythia-6.9b": (50_432, 32, 4096, 32),
            "pythia-12b": (50_688, 36, 5120, 40),
            "gpt-neox-20b": (50_432, 44, 6144, 64),
        },
    )

    def problems(self) -> Problems:
        """Yield a problem unless heads share width and keys evenly and rotate in pairs."""
        yield from super().problems()
        size, dims = self.size_of_head, self.rotary.dims(self.size_of_head)
        if not self.width % self.heads and (dims < 2 or dims % 2):
            why = f"{dims} of {size} features of a head cannot be rotated in pairs"
            yield families.problem("rotary_fraction", why, 0.5)

    @property
    def rotary(self) -> Rope:
        """Rotary position embedding of queries and keys."""
        return Rope(theta=self.rope_theta, share=self.rotary_fraction, scaling=self.rope_scaling)

    def build(self) -> DecoderConfig:
        """Return the model's config. `vocab` must be resolved by now."""
        residual: Residual = "parallel_norms" if self.parallel else "pre"
        decoder = self.decoder(rotary=self.rotary)
        return decoder.map_blocks(lambda block: dataclasses.replace(block, residual=residual))

    @classmethod
    def hub_settings(cls, attributes: Attributes) -> dict[str, Any]:
        """Return the settings that a config.json describes."""
        settings = super().hub_settings(attributes)
        theta, share = settings["rope_theta"], settings["rotary_fraction"]
        rotary = rope.read(attributes, theta=theta, share=share)
        read = {"rope_theta": rotary.theta, "rotary_fraction": rotary.share}
        return settings | read | {"rope_scaling": rotary.scaling}

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        if self.kv_heads not in ("auto", self.heads):
            raise hub.uncomputed(
                self.HUB, f"kv_heads = {self.kv_heads}, and every head has its keys"
            )
        scaling = rope.written(self.rope_theta, self.rope_scaling)["rope_scaling"]
        return super().to_hub() | {"rope_scaling": scaling}
