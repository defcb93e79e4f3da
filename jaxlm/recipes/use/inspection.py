"""The inside of a decoder on one text: residual streams, attention weights, and the logit lens."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxlm.core.errors import ConfigError
from jaxlm.models.build import Model, Params
from jaxlm.models.decoder import Decoder
from jaxlm.nn import intermediates
from jaxlm.recipes.use.load import LoadedRun


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Values inside a model for a text of T tokens, with L layers of N heads."""

    tokens: list[str]
    ids: list[int]
    streams: Float[np.ndarray, "L+1 T D"]  # before the first layer, and after each
    attention: Float[np.ndarray, "L N T T"]  # weight of each key (last axis) for each query
    _unembed: Any

    def lens(self, layer: int) -> Float[np.ndarray, "T V"]:
        """Return the log-probabilities of the next token if a layer were the last.

        The stream after `layer` layers passes the final norm and the unembedding: 0 is before the
        first layer, -1 after the last, where this is the output of the model.

        Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
        """
        return np.asarray(self._unembed(self.streams[layer]))


def inspect(loaded: LoadedRun, params: Params, text: str) -> Inspection:
    """Run a model on a text that begins a document, and keep what it computed.

    Attention weights take 4 L N T^2 bytes. Weights of virtual tokens are left out.

    Raises ConfigError if the model is no decoder, or the text exceeds its positions or has no
    token.
    """
    blueprint = loaded.model.blueprint
    if not isinstance(blueprint.merge(params), Decoder):
        raise ConfigError(
            "only decoders are inspected",
            where=f"model.family = {loaded.run.model.family}",
            why="encoders have other attention",
            fix="jaxlm.load of a decoder, such as llama",
        )
    tokenizer = loaded.tokenizer
    ids = [*tokenizer.before, *tokenizer.encode(text)]
    limit = blueprint.text_positions
    if not ids or (limit is not None and len(ids) > limit):
        what = f"the text has {len(ids)} tokens"
        why = f"the model has {limit} positions" if ids else "there is nothing to inspect"
        fix = f"text[:{limit}]" if ids else "a text of at least one letter"
        raise ConfigError(what, where="inspect(text)", why=why, fix=fix)
    with jax.set_mesh(loaded.model.mesh):
        streams, weights = trace(blueprint.merge, params, jnp.array([ids]))
    tokens = [tokenizer.decode([each]) for each in ids]
    length = len(ids)
    return Inspection(
        tokens,
        ids,
        np.stack(streams)[:, 0, -length:].astype(np.float32),
        np.stack(weights)[:, 0, :, -length:, -length:],
        functools.partial(_unembed, blueprint.merge, params),
    )


@functools.partial(jax.jit, static_argnums=0)  # compiled once for a model and a length
def trace(merge: Any, params: Params, ids: Int[jax.Array, "B T"]) -> tuple[list[Any], list[Any]]:
    """Return the streams before the layers and after each, and each layer's attention weights."""
    model: Model = merge(params)
    with intermediates.capture(("streams", "weights")) as captured:
        model(ids)
    arrays = captured.sums
    streams, weights = (_by_layer(arrays, name) for name in ("stream", "weights"))
    return [arrays["embedded"], *streams], weights


def _by_layer(arrays: dict[str, jax.Array], name: str) -> list[jax.Array]:
    """Return the arrays of a name in the order of layers; kinds of layers alternate."""
    layers: list[jax.Array] = []
    for stack in ("prefix", "stack"):
        kinds = {int(key.split("/")[1]): key for key in arrays if _is_of(key, stack, name)}
        each = {kind: list(arrays[key]) for kind, key in kinds.items()}
        depth = sum(map(len, each.values()))
        layers += [each[n % len(each)][n // len(each)] for n in range(depth)]
    return layers


def _is_of(key: str, stack: str, name: str) -> bool:
    return key.startswith(f"{stack}/") and key.split("/", 2)[2] == name


@functools.partial(jax.jit, static_argnums=0)
def _unembed(merge: Any, params: Params, stream: jax.Array) -> jax.Array:
    model: Any = merge(params)
    values = jnp.asarray(stream)[None]
    if model.final_norm is not None:
        values = model.final_norm(values)
    return jax.nn.log_softmax(model.logits(values)[0])
