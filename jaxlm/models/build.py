"""Modules to plain trees of parameters and back: Flax builds, JAX runs.

Example:
  >>> from jaxlm.models.families.llama import Llama
  >>> config = Llama(vocab=16, depth=2, width=8, heads=2, kv_heads=2).build()
  >>> Blueprint(config, Precision.float32()).shapes["embedding"]["table"].shape
  (16, 8)
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxlm.core.precision import Precision
from jaxlm.models import config as configs
from jaxlm.models.backbone import Execution
from jaxlm.models.decoder import Decoder
from jaxlm.models.encoder import Encoder
from jaxlm.models.encoder_decoder import EncoderDecoder
from jaxlm.nn.linear import LOGICAL_AXES
from jaxlm.nn.stack import Layers, Stack
from jaxlm.parallel.logical import LogicalAxes
from jaxlm.parallel.schedule import Schedule

Params = dict[str, Any]
Model = Decoder | Encoder | EncoderDecoder
MODULES: dict[type, Any] = {
    configs.DecoderConfig: Decoder,
    configs.EncoderConfig: Encoder,
    configs.EncoderDecoderConfig: EncoderDecoder,
}


class Blueprint:
    """A model without its parameters: static, so jitted functions can close over it.

    `init` makes the parameters (jit it with `out_shardings` to create them sharded), `merge` puts
    parameters into the module again, at no cost in a trace. `axes` is the tree of each parameter's
    logical axis names, `shapes` that of their shapes and dtypes. `text_positions` is the number of
    tokens of a text that the position table has rows for, if there is one. `surgery` changes a
    module that was built, as an adapter does: function (module, key of the initial values).
    """

    def __init__(
        self,
        config: configs.ModelConfig,
        precision: Precision,
        *,
        layers: Layers = "scan",
        remat: str = "none",
        schedule: Schedule | None = None,
        surgery: Callable[[nnx.Module, jax.Array], None] | None = None,
    ):
        self.config, self.schedule = config, schedule
        execution = Execution(precision, layers, remat, schedule)
        self._options: dict[str, Any] = {"layers": layers, "remat": remat, "surgery": surgery}
        self._precision = precision

        kind = getattr(type(config), "MODULE", None)  # of a config of a user, a Decoder
        kind = kind or next(MODULES[each] for each in type(config).__mro__ if each in MODULES)

        def make(key: jax.Array) -> Any:
            module = kind(config, execution, key=key)
            if surgery is not None:
                surgery(module, key)
            return module

        self._make = make
        # Only the key's shape, as computing a key would compile a program.
        key = jax.eval_shape(lambda: jax.random.key(0))
        module = nnx.eval_shape(lambda key: self._make(key=key), key)
        self.text_positions: int | None = module.text_positions
        self._graphdef, state = nnx.split(module)
        self._treedef = jax.tree.structure(state)
        self.shapes: Params = nnx.to_pure_dict(state)
        self.axes: Params = _axes(module)

    def without_pipeline(self) -> "Blueprint":
        """Return the same model with all layers in one stage."""
        if self.schedule is None:
            return self
        return Blueprint(self.config, self._precision, **self._options)

    def init(self, key: jax.Array) -> Params:
        """Return initial parameters as a nested dict of arrays."""
        return nnx.to_pure_dict(nnx.state(self._make(key=key)))

    def merge(self, params: Params) -> Any:
        """Return the module of the config's kind that holds `params`."""
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, jax.tree.leaves(params)))


def _axes(module: nnx.Module) -> Params:
    """Return the logical axis names of every parameter; in a stack the layers' axis comes first."""
    stacks = {path: node.axis for path, node in nnx.iter_graph(module) if isinstance(node, Stack)}

    def names(path: tuple[Any, ...], variable: nnx.Variable) -> LogicalAxes:
        axes = variable.get_metadata()[LOGICAL_AXES]
        stacked = [axis for stack, axis in stacks.items() if path[: len(stack)] == stack]
        return (*stacked, *axes)

    flat = nnx.to_flat_state(nnx.state(module))
    return nnx.traversals.unflatten_mapping({path: names(path, leaf) for path, leaf in flat})
