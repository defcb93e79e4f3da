"""QLoRA: the layer on a quantized base, its memory, remat and meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.llama import Llama
from jaxlm.parallel import mesh, rules
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.schedule import Schedule
from jaxlm.tune import config, cost, merge, surgery
from tests.tune.test_adapters import FAMILIES, gradients, mean_loss, moved

FULL = Precision.float32()
BASES = ("nf4", "nf4_double", "int8")


def settings_of(base, family="llama"):
    at = ("*/attention/*",) if family == "deepseek_v2" else config.PROJECTIONS
    return config.QLora(rank=2, alpha=3.0, base=base, block=8, at=at)


@functools.cache
def models(base="nf4_double", family="llama", **layout):
    """Return plain, stored and adapted model, and parameters of the last, all by its path."""
    settings, model = settings_of(base, family), FAMILIES[family].build()
    quantize, change = surgery.quantization(settings), surgery.build(settings)
    plain = Blueprint(model, FULL, **layout)
    stored = Blueprint(model, FULL, surgery=quantize, **layout)
    adapted = Blueprint(model, FULL, surgery=change, **layout)

    def make():
        weights = stored.init(jax.random.key(1))
        return surgery.adapted_params(stored, change, weights, jax.random.key(2))

    return plain, stored, adapted, jax.jit(make)()


def new_paths(stored, adapted):
    return sorted(set(tree.leaves(adapted.shapes)) - set(tree.leaves(stored.shapes)))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("base", BASES)
def test_a_new_adapter_is_the_dequantized_base_to_the_bit(base, family):
    plain, stored, adapted, params = models(base, family)
    joined = jax.jit(lambda params: merge.merged_params(adapted, plain, params))(params)
    rounded, original = tree.leaves(joined), tree.leaves(plain.init(jax.random.key(1)))
    changed = {path for path, leaf in original.items() if not np.array_equal(leaf, rounded[path])}
    assert changed == set(surgery.quantized_weights(stored))
    for path in changed:
        error = np.abs(rounded[path] - original[path]).max() / np.abs(original[path]).max()
        assert error < (0.005 if base == "int8" else 0.2), path

    one, other, before = (
        jax.jit(functools.partial(mean_loss, model))(weights)
        for model, weights in (
            (adapted, params),
            (plain, joined),
            (plain, plain.init(jax.random.key(1))),
        )
    )
    assert one == other
    assert one != before


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_compute_the_same(family):
    plain, stored, adapted, params = models("nf4_double", family)
    params = moved(params, new_paths(stored, adapted))
    joined = jax.jit(lambda params: merge.merged_params(adapted, plain, params))(params)
    assert jax.tree.structure(joined) == jax.tree.structure(plain.shapes)
    merged, unmerged = (
        float(jax.jit(functools.partial(mean_loss, model))(weights))
        for model, weights in ((plain, joined), (adapted, params))
    )
    assert merged == pytest.approx(unmerged, rel=2e-6)


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("base", BASES)
def test_the_leaves_in_closed_form_are_those_of_the_model(base, family):
    _, stored, adapted, _ = models(base, family)
    names = tree.leaves(adapted.axes, is_leaf=lambda node: isinstance(node, tuple))
    trained, frozen = cost.split(settings_of(base, family), tensors(adapted.config))
    assert sorted(each.path for each in trained) == new_paths(stored, adapted)
    shapes = tree.leaves(stored.shapes)
    assert {each.path: (each.shape, each.axes, each.item_bytes or 4) for each in frozen} == {
        path: (leaf.shape, names[path], leaf.dtype.itemsize) for path, leaf in shapes.items()
    }


@pytest.mark.slow
def test_scan_unrolling_and_remat_give_the_same_gradients():
    _, stored, adapted, params = models()
    new = new_paths(stored, adapted)
    params = moved(params, new)
    loss, expected = gradients(adapted, params, new)
    expected = tree.leaves(expected)
    assert all(jnp.abs(leaf).max() > 0 for leaf in expected.values())
    for layout in ({"layers": "unroll"}, {"remat": "full"}):
        repeated, computed = gradients(models(**layout)[2], params, new)
        assert repeated == pytest.approx(float(loss), rel=1e-6)
        for path, leaf in tree.leaves(computed).items():
            np.testing.assert_allclose(leaf, expected[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_gradients_are_those_of_lora_on_the_dequantized_base():
    plain, stored, adapted, params = models()
    new = new_paths(stored, adapted)
    params = moved(params, new)
    settings = settings_of("nf4_double").unquantized()
    change = surgery.build(settings)
    lora = Blueprint(plain.config, FULL, surgery=change)
    rest = tree.map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if path in new else leaf, params
    )
    dense = jax.jit(lambda params: merge.merged_params(adapted, plain, params))(rest)
    leaves = tree.leaves(params)
    whole = surgery.adapted_params(plain, change, dense, jax.random.key(2))
    whole = tree.map_with_path(lambda path, leaf: leaves[path] if path in new else leaf, whole)
    for one, other in zip(
        jax.tree.leaves(gradients(adapted, params, new)),
        jax.tree.leaves(gradients(lora, whole, new)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}, {"pipe": 2, "data": 4}]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("base", BASES)
def test_a_mesh_gives_the_losses_and_gradients_of_one_device(base, sizes):
    _, stored, adapted, params = models(base)
    new = new_paths(stored, adapted)
    params = moved(params, new)
    loss, expected = gradients(adapted, params, new)
    grid = mesh.build(MeshConfig(**{"data": 1} | sizes))
    split = models(base, schedule=Schedule(2, 2) if sizes.get("pipe") else None)[2]
    with jax.set_mesh(grid):
        layout = rules.shardings(grid, split.axes, split.shapes)
        placed = jax.device_put(params, layout)
        split_loss, computed = gradients(split, placed, new)
    codes = next(leaf for path, leaf in tree.leaves(placed).items() if path.endswith("_codes"))
    assert codes.addressable_shards[0].data.size < codes.size
    assert float(split_loss) == pytest.approx(float(loss), rel=1e-5)
    for (path, leaf), want in zip(
        tree.leaves(computed).items(), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(leaf, want, rtol=2e-3, atol=1e-6, err_msg=path)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_backward_pass_keeps_no_dequantized_weight(layers, remat):
    """Memory of a deeper model grows as that of LoRA, whose weights are arguments."""

    def temporary(settings, depth):
        change = surgery.build(settings)
        model = Llama(vocab=64, width=256, depth=depth, heads=4, kv_heads=4, hidden=512).build()
        built = Blueprint(model, FULL, layers=layers, remat=remat, surgery=change)
        new = [path for path in tree.leaves(built.shapes) if "lora_" in path]
        frozen = tree.drop_leaves(built.shapes, frozenset(new))
        trained = tree.drop_leaves(
            built.shapes, frozenset(tree.leaves(built.shapes)) - frozenset(new)
        )

        def loss(part, rest):
            return mean_loss(built, tree.merge_leaves(rest, part))

        lowered = jax.jit(jax.grad(loss)).lower(trained, frozen)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    weights = 4 * (4 * 256 * 256 + 3 * 256 * 512)  # bytes of a layer in float32
    quantized = config.QLora(rank=2, block=64)
    grown, expected = (
        temporary(each, 10) - temporary(each, 4) for each in (quantized, quantized.unquantized())
    )
    assert grown < expected + 0.1 * 6 * weights


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"at": ("*/attn/*",)}, "tune.at", "'--config.tune.at=*/attention/*,*/mlp/*'"),
        ({"rank": 17}, "tune.rank", "--config.tune.rank=8"),
        (
            {"also": ("*/attention/key/*",)},
            "tune.also",
            "'--config.tune.also=*norm/scale'",
        ),
    ],
    ids=["no match", "large rank", "codes"],
)
def test_what_cannot_be_quantized_is_an_error(changes, where, fix):
    settings = dataclasses.replace(settings_of("nf4"), **changes)
    with pytest.raises(ConfigError) as caught:
        build = functools.partial(Blueprint, FAMILIES["llama"].build(), FULL)
        build(surgery=surgery.build(settings))
        surgery.base_paths(settings, build(surgery=surgery.quantization(settings)))
    assert (caught.value.where, caught.value.fix) == (where, fix)


@pytest.mark.few(2)
@pytest.mark.parametrize("base", ["fp8", "int4_zero", "nf4_double"])
@pytest.mark.parametrize("block", [8, "all"])
def test_a_quantized_model_trains_nothing_and_has_its_leaves_in_closed_form(base, block):
    settings = config.Quantized(base=base, block=block)
    model = FAMILIES["llama"].build()
    stored = Blueprint(model, FULL, surgery=surgery.build(settings))
    names = tree.leaves(stored.axes, is_leaf=lambda node: isinstance(node, tuple))
    trained, frozen = cost.split(settings, tensors(model))
    assert trained == []
    assert surgery.base_paths(settings, stored) == frozenset()
    assert {each.path: (each.shape, each.axes, each.item_bytes or 4) for each in frozen} == {
        path: (leaf.shape, names[path], leaf.dtype.itemsize)
        for path, leaf in tree.leaves(stored.shapes).items()
    }
