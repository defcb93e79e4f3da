import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxlm.cli.main import main
from jaxlm.core import tree
from jaxlm.optim import build as optim
from jaxlm.optim import moments, muon
from jaxlm.optim.config import Muon
from jaxlm.optim.work_split import WorkSplit, work_split
from jaxlm.parallel import hlo, mesh, rules
from jaxlm.parallel.config import MeshConfig
from tests.faults import harness

AXES = {
    "embedding": {"table": ("vocab", "embed")},
    "norm": {"scale": ("embed",)},
    "stack": {
        "out": {"weight": ("layers", "heads", "head_dim", "embed"), "bias": ("layers", "embed")},
        "query": {"weight": ("layers", "embed", "heads", "head_dim")},
        "up": {"weight": ("layers", "embed", "mlp")},
    },
}
SHAPES = {
    "embedding": {"table": (7, 4)},
    "norm": {"scale": (4,)},
    "stack": {
        "out": {"weight": (3, 2, 3, 4), "bias": (3, 4)},
        "query": {"weight": (3, 4, 2, 3)},
        "up": {"weight": (3, 4, 9)},
    },
}
DOT = re.compile(r"= \w+\[([\d,]+)\]\S* dot\(")
MATRICES = {  # path: (inputs, outputs) of a layer
    "stack/out/weight": (6, 4),
    "stack/query/weight": (4, 6),
    "stack/up/weight": (4, 9),
}


def draw(rng):
    return jax.tree.map(
        lambda s: rng.normal(size=s).astype(np.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 16, 64), (2, 64, 16), (1, 32, 32)])
def test_singular_values_end_near_one(dtype, shape):
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32) * 1e-3
    values = jnp.linalg.svd(muon.newton_schulz(x, 5, dtype).astype(jnp.float32), compute_uv=False)
    assert float(values.max()) < 1.3
    # Random square matrices have singular values near zero, which five steps do not raise to 1.
    assert float(jnp.median(values)) > 0.6


@pytest.mark.few(1)
@pytest.mark.parametrize("ways", [{"fsdp": 4}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_each_device_multiplies_its_part_of_newton_schulz(ways):
    """Count the products in the compiled update: each device does a quarter of every one."""
    axes = {"up": {"weight": ("layers", "embed", "mlp")}}
    whole = {"up": {"weight": jax.ShapeDtypeStruct((2, 64, 256), jnp.float32)}}
    config = Muon(newton_schulz_dtype="float32")
    optimizer = optim.build(config, lambda step: 0.02, axes)
    state = jax.eval_shape(optimizer.init, whole)

    def compiled(params_at, state_at):
        def of(shapes, layout):
            return jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                shapes,
                layout,
            )

        params = of(whole, params_at)
        update = jax.jit(optimizer.update, out_shardings=(params_at, state_at))
        return update.lower(params, of(state, state_at), params).compile()

    def split(**sizes):
        grid = mesh.build(MeshConfig(data=1, **sizes), jax.devices()[: math.prod(sizes.values())])
        layout = optim.state_axes(config, optimizer, whole, axes)
        with jax.set_mesh(grid):
            return compiled(
                rules.shardings(grid, axes, whole), rules.shardings(grid, layout, state)
            )

    alone, parts = split(fsdp=1), split(**ways)
    assert parts.cost_analysis()["flops"] < 0.26 * alone.cost_analysis()["flops"]
    products, shares = (Counter(DOT.findall(each.as_text())) for each in (alone, parts))
    assert products == {"2,64,64": 10, "2,64,256": 5}
    assert shares.total() == 15


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sizes", "stack", "stacked", "columns"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, (6,), (("pipe", "fsdp"),), ("tensor",)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (3,), (("pipe",),), ("fsdp", "tensor")),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (8,), (("pipe", "fsdp", "tensor"),), ()),
        ({"expert": 2, "fsdp": 4}, (2, 8), (("pipe", "tensor"), ("expert", "fsdp")), ()),
        ({"pipe": 2, "tensor": 4}, (6,), (("pipe", "fsdp"),), ("tensor",)),
    ],
    ids=str,
)
def test_matrices_are_divided_over_the_mesh_and_nothing_is_sent_over_data(
    sizes, stack, stacked, columns
):
    stack_axes = ("layers", "experts")[: len(stack)]
    axes = (*stack_axes, "mlp" if len(stack) == 1 else None, "embed")
    x = np.random.default_rng(5).normal(size=(*stack, 24, 8)).astype(np.float32)
    expected = muon.orthogonal(jnp.asarray(x), axes, 5, "float32")
    grid = mesh.build(MeshConfig(**{"data": 1, **sizes}), jax.devices()[:8])
    place = NamedSharding(grid, rules.spec(axes))
    with jax.set_mesh(grid):
        split = work_split((*stack, 8, 24), stack_axes)
        assert split == WorkSplit(stacked, columns)
        run = jax.jit(lambda x: muon.orthogonal(x, axes, 5, "float32"), out_shardings=place)
        compiled = run.lower(jax.device_put(x, place)).compile()
        np.testing.assert_allclose(compiled(jax.device_put(x, place)), expected, atol=2e-5)
    sent = hlo.read_collectives(compiled.as_text())
    crossed = {axis for each in sent for axis in each.axes(grid.shape)}
    assert crossed <= {"fsdp", "tensor"}


def test_only_matrices_of_blocks_are_orthogonalized_and_they_need_no_second_moment():
    assert moments.inputs(("layers", "embed", "heads", "head_dim")) == (1,)
    assert moments.inputs(("layers", "heads", "head_dim", "embed")) == (1, 2)
    for axes in (
        ("vocab", "embed"),
        ("positions", "embed"),
        ("embed", "vocab"),
        ("layers", "embed"),
        ("embed",),
    ):
        assert moments.inputs(axes) == ()
    state = optim.build(Muon(), lambda step: 0.02, AXES).init(draw(np.random.default_rng(0)))
    second = tree.leaves(state)
    assert {
        p
        for p in MATRICES
        if second[next(k for k in second if k.endswith(f"second/{p}"))].shape == ()
    } == set(MATRICES)


@pytest.mark.usefixtures("one_device")
def test_heads_of_later_tokens_train_on_a_cpu(tmp_path):
    """XLA has no kernel for a product of bfloat16 whose first input it transposes."""
    settings = {"objective.name": "mtp", "optim.name": "muon", "train.steps": 1}
    config = harness.write_config(tmp_path, settings)
    assert main(harness.words(config, tmp_path / "run")) == 0
