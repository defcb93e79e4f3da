"""Models whose weights are codes: the outputs of the dequantized weights, for all layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.mistral import Mixtral
from jaxlm.parallel import mesh
from jaxlm.parallel.config import MeshConfig
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.tune import config, cost, surgery
from tests.models.parameters import draw_params

PRECISION = Precision.float32()
SIZES = {"vocab": 64, "width": 16, "depth": 1, "heads": 2}
EXPERTS = Mixtral(**SIZES, kv_heads=2, experts=4, top_k=2, hidden=24, shared=8)
TIED = GPT2(**SIZES, max_positions=32)
EVERYWHERE = ("*/attention/*", "*/mlp/*", "embedding/*", "unembedding/*", "positions/*")
FORMATS = [(TIED, "int4_zero"), (EXPERTS, "int8")]
FORMATS += [(TIED, each) for each in ("int8", "fp8", "int4", "nf4", "nf4_double")]
FORMATS += [(EXPERTS, each) for each in ("fp8", "int4", "int4_zero", "nf4", "nf4_double")]


def quantized(family, base, at, block=8):
    """Return the blueprint of codes and its parameters, and those of the dequantized weights."""
    plain = Blueprint(family.build(), PRECISION)
    params = draw_params(plain, std=0.1)
    settings = config.Quantized(base=base, block=block, at=at)
    stored = Blueprint(family.build(), PRECISION, surgery=surgery.quantization(settings))
    layers, leaves, values = surgery.quantized_weights(stored), {}, {}
    for path, leaf in tree.leaves(params).items():
        values[path] = leaves[path] = leaf
        if path in layers:
            del leaves[path]
            made = layers[path].quantized(leaf)
            leaves |= {f"{path.rpartition('/')[0]}/{name}": each for name, each in made.items()}
            parts = {name.partition("_")[2]: each for name, each in made.items()}
            values[path] = layers[path].dequantized(parts)
    codes = tree.map_with_path(lambda path, _: leaves[path], stored.shapes)
    dense = tree.map_with_path(lambda path, _: values[path], plain.shapes)
    return stored, codes, plain, dense


def outputs(blueprint, params, *, layers=False):
    """Return the logits of a few rows; with `layers` after the weights are read for decoding."""

    def run(params):
        model = blueprint.merge(params)
        if layers:
            model.relayout_unembedding()
        return model.logits(model.hidden(TOKENS, positions=POSITIONS).values)

    return jax.jit(run)(params)


TOKENS = np.random.default_rng(1).integers(0, 64, (4, 8)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(8, dtype=np.int32), (4, 8))


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "base"), FORMATS)
def test_outputs_are_those_of_the_dequantized_weights_bit_for_bit(family, base):
    at = [each for each in EVERYWHERE if family is TIED or each != "positions/*"]
    at = [each for each in at if family is EXPERTS or each != "unembedding/*"]
    stored, codes, plain, dense = quantized(family, base, tuple(at))
    plain_paths = {path for path in tree.leaves(codes) if not path.rpartition("/")[2].count("_")}
    assert not any(
        path.endswith(("weight", "table")) and "router" not in path for path in plain_paths
    )
    np.testing.assert_array_equal(outputs(stored, codes), outputs(plain, dense))
    shapes = {path: leaf.shape for path, leaf in tree.leaves(codes).items()}
    settings = config.Quantized(base=base, block=8, at=tuple(at))
    _, closed = cost.split(settings, tensors(family.build()))
    assert {each.path: each.shape for each in closed} == shapes


def test_layers_with_codes_are_traced_once_as_the_others():
    """The key of what is traced is the graph of a layer, which must have a hash."""
    settings = config.Quantized(
        base="int8", block=8, at=("*/attention/*", "*/mlp/*", "embedding/*")
    )
    stored = Blueprint(EXPERTS.build(), PRECISION, surgery=surgery.quantization(settings))
    hash(nnx.graphdef(stored.merge(stored.shapes)))


@pytest.mark.slow
def test_a_table_of_integers_is_the_output_layer_of_its_products():
    """The product rounds its inputs too; the lookup does not."""
    stored, codes, plain, dense = quantized(TIED, "w8a8", ("embedding/*",), "all")
    logits, exact = outputs(stored, codes), outputs(plain, dense)
    assert 0 < float(jnp.abs(logits - exact).max()) < 0.02 * float(jnp.abs(exact).max())
    np.testing.assert_array_equal(logits, outputs(stored, codes, layers=True))


def test_routers_are_quantized_by_their_name_only():
    def matched(*at):
        settings = config.Quantized(base="int8", at=at)
        stored = Blueprint(EXPERTS.build(), PRECISION, surgery=surgery.quantization(settings))
        return {path.rpartition("/")[0] for path in surgery.quantized_weights(stored)}

    router = "stack/0/mlp/router"
    assert router not in matched("*")
    assert {"embedding", "unembedding", "stack/0/mlp/gate"} <= matched("*")
    assert matched("*/router/*") == {router}
    assert not matched(*config.PROJECTIONS) & {router, "embedding", "unembedding"}


def test_products_of_integers_with_experts_are_refused():
    settings = config.Quantized(base="w8a8")
    with pytest.raises(ConfigError, match="w8a8 does not support stack/0/mlp/"):
        _ = Blueprint(EXPERTS.build(), PRECISION, surgery=surgery.quantization(settings)).shapes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "axes"),
    [
        (TIED, {"tensor": 2, "fsdp": 2}),
        (EXPERTS, {"expert": 2, "fsdp": 2}),
        (EXPERTS, {"expert": 2, "tensor": 2}),
    ],
    ids=["tied", "experts-fsdp", "experts-tensor"],
)
@pytest.mark.parametrize("base", ["int4_zero", "fp8", "nf4_double"])
def test_a_mesh_gives_the_outputs_of_one_device(family, base, axes):
    at = ("*/attention/*", "*/mlp/*", "embedding/*")
    stored, codes, _, _ = quantized(family, base, at)

    def embedded(params):
        return stored.merge(params).embedding(TOKENS)

    expected = outputs(stored, codes)
    grid = mesh.build(MeshConfig(data=1, **axes), jax.devices()[:4])
    run = Run(model=family, tune=config.Quantized(base=base, block=8, at=at))
    model = setup.build_sharded_model(run, 64, grid)
    placed = jax.tree.map(jax.device_put, codes, model.shardings)
    with jax.set_mesh(grid):
        logits = outputs(stored, placed)
        looked_up = jax.jit(embedded)(placed)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(looked_up, jax.jit(embedded)(codes))
