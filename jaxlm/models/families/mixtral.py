"""Mixtral (arXiv:2401.04088) and its fine-grained kin, DeepSeekMoE (arXiv:2401.06066): a Llama whose MLPs are experts."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from jaxlm.core.config import setting
from jaxlm.models.config import Decoder
from jaxlm.models.families import rotated
from jaxlm.models.families.hub import Attributes, Hub, Row, uncomputed
from jaxlm.models.families.rotated import Rotated
from jaxlm.nn.config import BlockConfig, MlpConfig, MoeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixtral(Rotated):
    """A Llama-style decoder with a mixture of experts in every layer but the first `dense_depth`."""

    family: Literal["mixtral"] = "mixtral"
    experts: int = setting(8, "experts of a layer", low=1)
    top_k: int = setting(2, "experts that see a token", low=1)
    hidden: int = setting(  # type: ignore[assignment]
        1408, "hidden units of each expert", low=1
    )
    shared: int = setting(
        0, "hidden units of the experts that see all tokens, all together; 0 has none", low=0
    )
    dense_depth: int = setting(0, "layers at the start whose MLP is dense", low=0)
    dense_hidden: int = setting(4096, "hidden units of the dense layers", low=1)
    router: Literal["softmax", "sigmoid"] = setting(
        "softmax", "how the router's logits become scores"
    )
    normalised: bool = setting(
        True, "the scores of a token's experts are divided by their sum before they weigh"
    )
    scale: float = setting(1.0, "what the weights of a token's experts are multiplied by", above=0)
    balance_loss: float = setting(
        0.01, "weight of the loss that spreads tokens over experts, in each layer", low=0
    )
    balance_bias: float = setting(
        0.0,
        "by how much a bias on the scores moves in each step to spread tokens (arXiv:2408.15664); 0 has none",
        low=0,
    )
    router_z: float = setting(
        0.0, "weight of the squared log normalizer of the router (arXiv:2202.08906)", low=0
    )
    capacity: float | None = setting(
        None,
        "tokens of a row that an expert takes, over the even share; later ones are dropped. None drops none",
        above=0,
    )

    ABSENT: ClassVar[dict[str, Any]] = {
        "context": 131_072,
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    HUB: ClassVar[Hub] = Hub(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        rows=(
            *rotated.STREAM,
            *rotated.NORMS,
            *rotated.ATTENTION,
            Row(
                "model.layers.{i}.block_sparse_moe.gate.weight",
                ("mlp/router/weight",),
                "transposed",
            ),
            *(
                Row(
                    f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{theirs}.weight",
                    (f"mlp/{ours}/weight",),
                    "transposed",
                )
                for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
            ),
        ),
    )

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Heads share the width and the keys evenly, and rotate in pairs; a token's experts exist; some layer has them."""
        yield from super().problems()
        if self.top_k > self.experts:
            yield (
                "top_k",
                f"a token cannot see top_k = {self.top_k} of experts = {self.experts}",
                f"--config.model.top_k={self.experts}",
            )
        if self.dense_depth >= self.depth:
            yield (
                "dense_depth",
                f"dense_depth = {self.dense_depth} of depth = {self.depth} layers leaves none to the experts",
                f"--config.model.dense_depth={self.depth - 1}",
            )

    def block(self) -> BlockConfig:
        """A layer of experts."""
        experts = MoeConfig(
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            shared=self.shared,
            activation=self.activation,
            router=self.router,
            normalised=self.normalised,
            scale=self.scale,
            balance=self.balance_loss,
            router_z=self.router_z,
            bias_rate=self.balance_bias,
            capacity=self.capacity,
        )
        return BlockConfig(
            attention=self.attention(), mlp=experts, norm=self.norm, dropout=self.dropout
        )

    def build(self) -> Decoder:
        """The blocks, the dense ones first."""
        hidden = MlpConfig(hidden=self.dense_hidden, activation=self.activation, gated=True)
        dense = dataclasses.replace(self.block(), mlp=hidden)
        return dataclasses.replace(super().build(), prefix=(dense,) * self.dense_depth)

    @classmethod
    def from_hub(cls, given: Attributes) -> Self:
        """The family as a config.json describes it.

        The weight of the balance loss is of training, and transformers' is of another scale: ours stays as it is.
        """
        given.must("sliding_window", None)
        given.ignore("router_aux_loss_coef")
        return cls(
            **cls.shared_settings(given),
            experts=given.take("num_local_experts", 8),
            top_k=given.take("num_experts_per_tok", 2),
        )

    def to_hub(self) -> dict[str, Any]:
        """The attributes of config.json. Raises ConfigError where the model is none that transformers computes."""
        refuse_others(self, normalised=True)
        return super().to_hub() | {
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "sliding_window": None,
        }


def refuse_others(config: Mixtral, **computed: Any) -> None:
    """Raises ConfigError where experts are used in a way that an architecture of transformers does not know."""
    wanted = {"shared": 0, "dense_depth": 0, "router": "softmax", "scale": 1.0, "balance_bias": 0.0}
    wanted |= {"capacity": None, **computed}
    wrong = [
        f"{name} = {getattr(config, name)!r} where it computes {value!r}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if wrong:
        raise uncomputed(config.HUB, "\n".join(wrong))


SIZES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": dict(
        vocab=32_000,
        context=32_768,
        depth=32,
        width=4096,
        heads=32,
        kv_heads=8,
        experts=8,
        top_k=2,
        hidden=14_336,
        # Published is 0.02, for all layers pooled and k where the load is even; ours is 1 there, in each of 32 layers.
        balance_loss=0.02 * 2 / 32,
        rope_theta=1e6,
    ),
    "deepseek-moe-16b": dict(
        vocab=102_400,
        context=4096,
        depth=28,
        width=2048,
        heads=16,
        kv_heads=16,
        experts=64,
        top_k=6,
        hidden=1408,
        shared=2816,
        dense_depth=1,
        dense_hidden=10_944,
        normalised=False,
        balance_loss=0.001,
        norm_eps=1e-6,
    ),
}
