"""Base of families with routed experts: their settings and layers. Free of JAX."""

import dataclasses
from typing import Any, ClassVar, Literal

from jaxlm.core.config import setting
from jaxlm.models.config import DecoderConfig
from jaxlm.models.families import setting_docs
from jaxlm.models.families.family import Problems, problem
from jaxlm.models.families.hub import TensorMapping, uncomputed
from jaxlm.models.families.llama_like import GatedDecoder
from jaxlm.nn.config import BlockConfig, MlpConfig, MoeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(GatedDecoder):
    """A decoder with a mixture of experts in every layer but the first `dense_depth`."""

    experts: int = setting(8, **setting_docs.EXPERTS)
    top_k: int = setting(2, **setting_docs.TOP_K)
    hidden: int = setting(1408, **setting_docs.EXPERT_HIDDEN)  # type: ignore[assignment]
    shared: int = setting(0, **setting_docs.SHARED)
    dense_depth: int = setting(0, **setting_docs.DENSE_DEPTH)
    dense_hidden: int = setting(4096, "hidden units of the dense layers", low=1)
    router: Literal["softmax", "sigmoid"] = setting("softmax", **setting_docs.ROUTER)
    normalize_top_k: bool = setting(True, **setting_docs.NORMALIZED)
    scale: float = setting(1.0, **setting_docs.EXPERT_SCALE)
    balance_loss: float = setting(0.01, **setting_docs.BALANCE_LOSS)
    balance_bias: float = setting(0.0, **setting_docs.BALANCE_BIAS)
    router_z: float = setting(
        0.0,
        "coefficient of the squared log normalizer of the router (arXiv:2202.08906), "
        "a mean over all tokens but padding",
        low=0,
    )
    capacity: float | None = setting(
        None,
        "capacity factor: tokens of a row that an expert takes, over the even share; later ones "
        "are dropped. None drops none",
        above=0,
    )

    # Settings for which the architecture of transformers computes one value only.
    COMPUTED: ClassVar[dict[str, Any]] = dict(
        shared=0, dense_depth=0, router="softmax", scale=1.0, balance_bias=0.0
    )

    def problems(self) -> Problems:
        """Yield a problem unless a token's experts exist and some layer has experts."""
        yield from super().problems()
        if self.top_k > self.experts:
            why = f"a token cannot see top_k = {self.top_k} of experts = {self.experts}"
            yield problem("top_k", why, self.experts)
        if self.dense_depth >= self.depth:
            layers = f"dense_depth = {self.dense_depth} of depth = {self.depth} layers"
            yield problem("dense_depth", f"{layers} leaves none to the experts", self.depth - 1)

    def mixture(self) -> MoeConfig:
        """Return the experts of a layer."""
        return MoeConfig(
            experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            shared=self.shared,
            activation=self.activation,
            router=self.router,
            normalize_top_k=self.normalize_top_k,
            scale=self.scale,
            balance=self.balance_loss,
            router_z=self.router_z,
            bias_rate=self.balance_bias or None,
            capacity=self.capacity,
        )

    def block(self) -> BlockConfig:
        """Return a layer of experts."""
        return dataclasses.replace(super().block(), mlp=self.mixture())

    def build(self) -> DecoderConfig:
        """Return the model's config, the dense layers first."""
        hidden = MlpConfig(hidden=self.dense_hidden, activation=self.activation, gated=True)
        dense = dataclasses.replace(self.block(), mlp=hidden)
        return dataclasses.replace(super().build(), prefix=(dense,) * self.dense_depth)

    def to_hub(self) -> dict[str, Any]:
        """Return the attributes of config.json. Raises ConfigError if it cannot hold the model."""
        wrong = [
            f"{name} = {getattr(self, name)!r} where it computes {value!r}"
            for name, value in {"capacity": None, **self.COMPUTED}.items()
            if getattr(self, name) != value
        ]
        if wrong:
            raise uncomputed(self.HUB, "\n".join(wrong))
        return super().to_hub()


# Qwen's tensor names, which DeepSeek uses too.
ROUTED = (
    TensorMapping("model.layers.{i}.mlp.gate.weight", ("mlp/router/weight",), "transposed"),
    *(
        TensorMapping(
            f"model.layers.{{i}}.mlp.experts.{{e}}.{name}_proj.weight",
            (f"mlp/{name}/weight",),
            "transposed",
        )
        for name in ("gate", "up", "down")
    ),
)
