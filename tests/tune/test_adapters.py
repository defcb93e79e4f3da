"""Adapters: float64 references, the base's own bits at the start, merging, remat, meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlm.core import tree
from jaxlm.core.errors import ConfigError
from jaxlm.core.load import load
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.deepseek import DeepSeekV2
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mixtral
from jaxlm.nn import dropout
from jaxlm.nn.init import Initializer
from jaxlm.nn.linear import Linear
from jaxlm.objectives.build import build
from jaxlm.objectives.config import Causal, LossConfig
from jaxlm.parallel import mesh, rules
from jaxlm.parallel.config import MeshConfig
from jaxlm.parallel.schedule import Schedule
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.tune import config, cost, merge, surgery
from jaxlm.tune.adapters import BottleneckLinear, DoraLinear, Ia3Linear, LoraLinear
from tests.models.parameters import draw_params

SLOW = pytest.mark.slow
FULL = Precision.float32()
LLAMA = Llama(vocab=64, width=16, depth=4, heads=4, kv_heads=2, hidden=24)
FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2(vocab=64, width=16, depth=2, heads=4, max_positions=16),
    "deepseek_v2": DeepSeekV2(
        vocab=64, width=16, depth=3, heads=2, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4,
        dense_depth=1, dense_hidden=24, experts=4, top_k=2, groups=2, top_groups=1, hidden=8,
    ),
}  # fmt: skip
ARMS = {
    "lora": config.Lora(rank=2, alpha=3.0),
    "rslora": config.Lora(rank=4, alpha=3.0, scale="root"),
    "dora": config.Dora(rank=2, alpha=3.0),
    "pissa": config.Lora(rank=2, alpha=3.0, init="pissa"),
    "ia3": config.Ia3(),
    "bottleneck": config.Bottleneck(hidden=5),
}
VIRTUAL = {"prefix": config.PrefixTuning(length=3), "prompt": config.PromptTuning(length=3)}
FLAT = {  # class, settings, path of the layer
    "lora": (LoraLinear, config.Lora(rank=2, alpha=3.0), "a"),
    "dora": (DoraLinear, config.Dora(rank=2, alpha=3.0), "a"),
    "pissa": (LoraLinear, config.Lora(rank=2, alpha=3.0, init="pissa"), "a"),
    "dora from pissa": (DoraLinear, config.Dora(rank=2, alpha=3.0, init="pissa"), "a"),
    "ia3": (Ia3Linear, config.Ia3(), "stack/0/attention/key"),
    "ia3 of inputs": (Ia3Linear, config.Ia3(), "stack/0/mlp/down"),
    "bottleneck": (BottleneckLinear, config.Bottleneck(hidden=5, activation="silu"), "a"),
}


def pairs(arms):
    """Return arms and families: each once, and the other pairs as slow tests."""
    either = [(arm, family) for family in FAMILIES for arm in arms]
    latent = ("ia3", "bottleneck")  # adapters that DeepSeek's latent attention has no place for
    known = [each for each in either if each[1] != "deepseek_v2" or each[0] not in latent]
    return [
        pytest.param(*each, marks=[] if each[1] == "llama" or each[0] == "lora" else [SLOW])
        for each in known
    ]


def batch(rows=4, length=12):
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 64, (rows, length)).astype(np.int32)
    weights = draw.random((rows, length)).astype(np.float32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    fields = tokens, np.roll(tokens, -1, 1), weights, np.ones_like(tokens), positions
    return Tokens(*map(jnp.asarray, fields))


@functools.cache
def plain_model(family="llama"):
    plain = Blueprint(FAMILIES[family].build(), FULL)
    return plain, draw_params(plain, 1)


def settings_of(arm, family):
    settings = (ARMS | VIRTUAL)[arm]
    if family == "deepseek_v2" and arm in ARMS:  # its experts have no adapter
        settings = dataclasses.replace(settings, at=("*/attention/*",))
    return settings


def adapted(arm, family="llama", **build_settings):
    """Return the adapted blueprint, its parameters with moved adapters, and the new paths."""
    plain, base = plain_model(family)
    change = surgery.build(settings_of(arm, family))
    blueprint = Blueprint(plain.config, FULL, surgery=change, **build_settings)
    params = surgery.adapted_params(plain, change, base, jax.random.key(2))
    new = [path for path in tree.leaves(params) if path not in tree.leaves(base)]
    return blueprint, params, new


def moved(params, new):
    """Return the parameters with noise on the new leaves."""
    draw = np.random.default_rng(3)
    return tree.map_with_path(
        lambda path, leaf: (
            leaf + 0.3 * draw.standard_normal(leaf.shape).astype(np.float32)
            if path in new
            else leaf
        ),
        params,
    )


def loss_of(blueprint, params, key=None):
    return build(Causal(), LossConfig()).loss(blueprint.merge(params), batch(), key, None)


def mean_loss(blueprint, params, key=None):
    loss = loss_of(blueprint, params, key)
    return loss.objective.total / loss.objective.weight


@pytest.mark.few(2)
@pytest.mark.parametrize(("arm", "family"), pairs(ARMS))
def test_a_new_adapter_changes_no_bit(arm, family):
    blueprint, params, new = adapted(arm, family)
    plain, base = plain_model(family)
    assert new
    before, after = jax.jit(lambda: (mean_loss(plain, base), mean_loss(blueprint, params)))()
    if arm == "dora":  # its gain is 1 up to rounding
        assert float(after) == pytest.approx(float(before), rel=1e-6)
    else:
        assert before == after


@pytest.mark.few(2)
@pytest.mark.parametrize(("arm", "family"), pairs(["lora", "dora", "rslora", "pissa", "ia3"]))
def test_merged_weights_compute_the_same(arm, family):
    blueprint, params, new = adapted(arm, family)
    plain, base = plain_model(family)
    params = moved(params, new)
    joined = jax.jit(lambda params: merge.merged_params(blueprint, plain, params))(params)
    assert jax.tree.structure(joined) == jax.tree.structure(base)
    before, merged, unmerged = (
        float(jax.jit(functools.partial(mean_loss, model))(weights))
        for model, weights in ((plain, base), (plain, joined), (blueprint, params))
    )
    assert abs(unmerged - before) > 1e-4
    assert merged == pytest.approx(unmerged, rel=2e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arm", [*ARMS, *VIRTUAL])
def test_the_leaves_in_closed_form_are_those_of_the_model(arm, family):
    if family == "deepseek_v2" and arm in ("ia3", "bottleneck", "prefix"):
        return
    blueprint, _, new = adapted(arm, family)
    shapes, axes = (
        tree.leaves(blueprint.shapes),
        tree.leaves(blueprint.axes, is_leaf=lambda node: isinstance(node, tuple)),
    )
    settings = settings_of(arm, family)
    computed = {
        each.path: (each.shape, each.axes)
        for each in cost.new_tensors(settings, tensors(blueprint.config))
    }
    assert computed == {path: (shapes[path].shape, axes[path]) for path in new}


def layer(name):
    """Return an adapted layer [6] -> [2, 4] with a bias and moved leaves, and its leaves."""
    kind, settings, path = FLAT[name]
    init = Initializer("normal", std=0.5, depth=1, precision=FULL)
    ins, outs = {"embed": 6}, {"heads": 2, "head_dim": 4}
    base = Linear(ins, outs, key=jax.random.key(0), init=init, bias=True)
    made = kind(base, settings, path, jax.random.key(1))
    draw = np.random.default_rng(5)
    for field in ("bias", "lora_a", "lora_b", "magnitude", "ia3", "adapter_down", "adapter_up"):
        if getattr(made, field, None) is not None:
            leaf = getattr(made, field)
            leaf[...] = leaf[...] + draw.standard_normal(leaf[...].shape).astype(np.float32)
    return made


def reference(name, leaves, x):
    """Return the layer's result in float64, from its equation."""
    _, settings, _ = FLAT[name]
    f = {key: np.asarray(value, np.float64) for key, value in leaves.items()}
    w, bias, s = f["weight"].reshape(6, 8), f["bias"].reshape(8), getattr(settings, "factor", 1)
    if name == "lora":
        y = x @ w + s * (x @ f["lora_a"]) @ f["lora_b"].reshape(2, 8)
        return y + bias
    if name == "pissa":  # the residual and A B, as PEFT has it
        first, now = (s * f[f"lora_a{n}"] @ f[f"lora_b{n}"].reshape(2, 8) for n in ("0", ""))
        left, values, right = np.linalg.svd(w)
        best = (left[:, :2] * values[:2]) @ right[:2]
        np.testing.assert_allclose(first, best, atol=1e-5)
        return x @ (w - best + now) + bias
    if name.startswith("dora"):
        whole = w + s * f["lora_a"] @ f["lora_b"].reshape(2, 8)
        if name == "dora from pissa":
            whole -= s * f["lora_a0"] @ f["lora_b0"].reshape(2, 8)
        return x @ (whole * f["magnitude"].reshape(8) / np.linalg.norm(whole, axis=0)) + bias
    if name == "ia3":
        return (x @ w + bias) * f["ia3"].reshape(8)
    if name == "ia3 of inputs":
        return (x * f["ia3"]) @ w + bias
    z = x @ w + bias
    low = z @ f["adapter_down"].reshape(8, 5) + f["adapter_bias"]
    return z + (low / (1 + np.exp(-low))) @ f["adapter_up"].reshape(5, 8)


@pytest.mark.parametrize("name", FLAT)
def test_a_layer_is_its_equation_in_float64(name):
    made = layer(name)
    leaves = {
        field: getattr(made, field)[...]
        for field in ("weight", "bias", "lora_a", "lora_b", "lora_a0", "lora_b0", "magnitude",
                      "ia3", "adapter_down", "adapter_bias", "adapter_up")
        if getattr(made, field, None) is not None
    }  # fmt: skip
    x = np.random.default_rng(6).standard_normal((2, 3, 6)).astype(np.float32)
    expected = reference(name, leaves, x.astype(np.float64)).reshape(2, 3, 2, 4)
    np.testing.assert_allclose(made(jnp.asarray(x)), expected, rtol=2e-5, atol=2e-5)


def test_the_norm_of_dora_is_a_constant_of_the_backward_pass():
    made = layer("dora")
    x = jnp.asarray(np.random.default_rng(7).standard_normal((1, 5, 6)), jnp.float32)

    graphdef, state = nnx.split(made)

    def with_b(b):
        return nnx.merge(graphdef, nnx.State(dict(state) | {"lora_b": nnx.Param(b)}))

    def expected(b, is_constant):
        whole, magnitude = with_b(b)._sum(), made.magnitude[...].reshape(-1)
        norm = jnp.linalg.norm(whole, axis=0)
        norm = jax.lax.stop_gradient(norm) if is_constant else norm
        return jnp.sum(jnp.sin(x @ (whole * (magnitude / norm)[None])))

    b = made.lora_b[...]
    gradient = jax.grad(lambda b: jnp.sum(jnp.sin(with_b(b)._product(x))))(b)
    np.testing.assert_allclose(gradient, jax.grad(expected)(b, True), rtol=1e-4, atol=1e-5)
    assert not np.allclose(gradient, jax.grad(expected)(b, False), rtol=1e-2)


def test_the_norm_of_dora_makes_no_matrix_of_the_weights_size():
    """In its sum, and in the gradient of the magnitude."""
    init = Initializer("normal", std=0.5, depth=1, precision=FULL)
    sizes = {"embed": 256}, {"mlp": 256}
    base = Linear(*sizes, key=jax.random.key(0), init=init)
    graphdef, state = nnx.split(DoraLinear(base, config.Dora(rank=2), "a", jax.random.key(1)))

    def largest(function):
        compiled = jax.jit(jax.value_and_grad(function)).lower(state).compile()
        gradients = tree.size_bytes(state)
        return compiled.memory_analysis().temp_size_in_bytes, gradients

    temporary, weight = largest(lambda state: nnx.merge(graphdef, state)._gain().sum())
    assert temporary < weight / 4
    temporary, weight = largest(lambda state: jnp.linalg.norm(nnx.merge(graphdef, state)._sum()))
    assert temporary > weight / 2, "the test can fail"


def gradients(blueprint, params, new, key=None):
    """Return loss and gradients of the new leaves alone."""

    def loss(part):
        return mean_loss(blueprint, tree.merge_leaves(params, part), key)

    frozen = frozenset(tree.leaves(params)) - frozenset(new)
    return jax.jit(jax.value_and_grad(loss))(tree.drop_leaves(params, frozen))


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, marks=[SLOW] if arm in ("rslora", "ia3") else [])
        for arm in (*ARMS, *VIRTUAL)
        if arm != "pissa"  # lora, twice
    ],
)
def test_scan_unrolling_and_remat_give_the_same_gradients(arm):
    blueprint, params, new = adapted(arm)
    params = moved(params, new)
    loss, expected = gradients(blueprint, params, new)
    expected = tree.leaves(expected)
    assert all(jnp.abs(leaf).max() > 0 for leaf in expected.values())
    for layout in ({"layers": "unroll"}, {"remat": "full"}, {"remat": "dots"}):
        repeated, computed = gradients(adapted(arm, **layout)[0], params, new)
        assert repeated == pytest.approx(float(loss), rel=1e-6)
        for path, leaf in tree.leaves(computed).items():
            np.testing.assert_allclose(leaf, expected[path], rtol=1e-4, atol=1e-6, err_msg=path)


MESHES = [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}, {"pipe": 2, "data": 4}]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arm", "sizes"),
    [
        pytest.param(
            arm,
            sizes,
            marks=[] if arm == "lora" or (sizes == MESHES[0] and arm != "pissa") else [SLOW],
        )
        for sizes in MESHES
        for arm in ("lora", "dora", "ia3", "bottleneck", "pissa", "prefix", "prompt")
    ],
    ids=str,
)
def test_a_mesh_gives_the_losses_and_gradients_of_one_device(arm, sizes):
    blueprint, params, new = adapted(arm)
    params = moved(params, new)
    loss, expected = gradients(blueprint, params, new)
    grid = mesh.build(MeshConfig(**{"data": 1} | sizes))
    schedule = Schedule(2, 2) if sizes.get("pipe") else None
    split = adapted(arm, schedule=schedule)[0]
    with jax.set_mesh(grid):
        layout = rules.shardings(grid, split.axes, split.shapes)
        split_loss, computed = gradients(split, jax.device_put(params, layout), new)
    assert float(split_loss) == pytest.approx(float(loss), rel=1e-5)
    for (path, leaf), want in zip(
        tree.leaves(computed).items(), jax.tree.leaves(expected), strict=True
    ):
        # Devices add in another order: an element near 0 has the error of the largest ones.
        assert np.abs(leaf - want).max() <= 1e-4 * np.abs(want).max(), path


@pytest.mark.slow
def test_dropout_draws_for_each_layer_and_only_with_a_key():
    change = surgery.build(config.Lora(rank=2, dropout=0.5))
    plain, base = plain_model()
    blueprint = Blueprint(plain.config, FULL, surgery=change)
    params = surgery.adapted_params(plain, change, base, jax.random.key(2))
    new = [path for path in tree.leaves(params) if path not in tree.leaves(base)]
    params = moved(params, new)
    run = jax.jit(functools.partial(mean_loss, blueprint))
    first, second = (float(run(params, jax.random.key(seed))) for seed in (0, 1))
    assert first != second
    assert first == float(run(params, jax.random.key(0)))
    assert dropout.layer_key() is None
    without = float(run(params))
    assert without not in (first, second)


@pytest.mark.parametrize(
    ("family", "settings", "where", "fix"),
    [
        (LLAMA, config.Lora(rank=17), "tune.rank", "--config.tune.rank=8"),
        (
            LLAMA,
            config.Lora(at=("*/attn/*",)),
            "tune.at",
            "'--config.tune.at=*/attention/*,*/mlp/*'",
        ),
        (
            Mixtral(vocab=64, width=16, depth=2, heads=4, kv_heads=2, experts=4, hidden=8),
            config.Lora(rank=2),
            "tune.at",
            "'--config.tune.at=*/attention/*'",
        ),
        (
            FAMILIES["deepseek_v2"],
            config.Ia3(at=("*/attention/key/*",)),
            "tune.at",
            "--config.tune.name=lora",
        ),
        (FAMILIES["deepseek_v2"], config.PrefixTuning(), "tune.name", "--config.tune.name=prompt"),
    ],
    ids=["large rank", "no match", "experts", "latent", "prefix of latent"],
)
def test_a_place_that_cannot_be_adapted_is_an_error(family, settings, where, fix):
    with pytest.raises(ConfigError) as caught:
        Blueprint(family.build(), FULL, surgery=surgery.build(settings))
    assert (caught.value.where, caught.value.fix) == (where, fix)


@pytest.mark.slow
def test_leaves_of_the_base_can_be_trained_whole():
    plain, base = plain_model()
    every = frozenset(tree.leaves(base))
    assert surgery.base_paths(config.Full(), plain) == frozenset()
    assert surgery.base_paths(config.Lora(), plain) == every
    trained = every - surgery.base_paths(config.Lora(also=("*norm/scale",)), plain)
    assert trained
    assert all(path.endswith("norm/scale") for path in trained)


@pytest.mark.parametrize(
    ("pattern", "fix"),
    [
        ("unembedding/*", "--config.tune.also=embedding/table"),  # which is the tied head
        ("head/*", "'--config.tune.also=()'"),
    ],
)
def test_a_pattern_of_no_parameter_of_the_base_is_refused(pattern, fix):
    tied = Blueprint(dataclasses.replace(LLAMA, tied=True).build(), FULL)
    with pytest.raises(ConfigError, match="matches no parameter") as caught:
        surgery.base_paths(config.Lora(also=("*norm/scale", pattern)), tied)
    assert (caught.value.where, caught.value.fix) == ("tune.also", fix)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("arm", ["lora", "bottleneck"])
def test_the_observer_of_a_pipeline_has_the_adapter(arm):
    sizes = [
        ("mesh.data", "1"),
        ("mesh.pipe", "2"),
        ("train.batch", "4"),
        ("train.microbatches", "2"),
    ]
    model = [
        ("model.vocab", "64"),
        ("model.width", "16"),
        ("model.depth", "2"),
        ("model.heads", "4"),
    ]
    settings = [*sizes, *model, ("model.kv_heads", "2"), ("tune.name", arm)]
    run = load(Run, None, [*settings, *([("tune.rank", "2")] if arm == "lora" else [])]).value
    grid = mesh.build(run.mesh, jax.devices()[:2])
    trained = setup.build_sharded_model(run, 64, grid)
    observed = setup.observer_model(trained)
    assert observed.schedule is None
    assert tree.leaves(observed.shapes).keys() == tree.leaves(trained.trained.shapes).keys()
