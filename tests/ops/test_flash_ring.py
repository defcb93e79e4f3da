"""Keys in a ring, and gathered keys, give the results of one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core.precision import Precision
from jaxlm.core.precision_config import PrecisionConfig
from jaxlm.ops import masks
from jaxlm.ops.attention import attention
from jaxlm.parallel import context, hlo, mesh, rules
from jaxlm.parallel.config import MeshConfig

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 16, 4, 2, 4
SEGMENTS = np.array([[1] * 5 + [2] * 8 + [0] * 3, [1] * 16], np.int32)
REACH = np.array([[3] * 4 + [4] + [12] * 8 + [13, 14, 15], [10] * 11 + [*range(11, 16)]], np.int32)
OPERANDS = tuple(
    jax.random.normal(key, (ROWS, LENGTH, heads, SIZE))
    for key, heads in zip(
        jax.random.split(jax.random.key(0), 4), (HEADS, KV_HEADS, KV_HEADS, HEADS), strict=True
    )
)


def grid_of(**sizes):
    count = int(np.prod(list(sizes.values())))
    return mesh.build(MeshConfig(**{"data": 1} | sizes), jax.devices()[:count])


def weighed(parts, keys, window, softcap, segments, reach, precision, operands):
    """Return the sum of out x weights in a zigzag order of slots, and the outputs in order.

    Args:
      parts: parts of the zigzag order.
      keys: the way to the keys, such as a ring.
      window, softcap: settings of the attention.
      segments, reach: documents of the slots, and the last visible slot of each.
      precision: dtypes of the products.
      operands: queries, keys, values and weights.
    """
    query, key, value, weights = context.zigzag_shard(operands, parts) if parts > 1 else operands
    sharded = context.zigzag_shard(jax.tree.map(jnp.asarray, (segments, reach)), parts)
    mask = dataclasses.replace(masks.causal(LENGTH, *sharded, parts=parts), window=window)
    out = attention(query, key, value, mask, precision, scale=0.7, softcap=softcap, kernel=keys)
    return (out * weights).sum(), context.zigzag_unshard(out, parts)


def computed(parts, keys, window=None, softcap=None, segments=SEGMENTS, reach=None, precision=None):
    function = functools.partial(
        weighed, parts, keys, window, softcap, segments, reach, precision or Precision.float32()
    )
    (_, out), gradients = jax.jit(jax.value_and_grad(function, has_aux=True))(OPERANDS)
    return [np.asarray(leaf) for leaf in (out, *gradients)]


# zigzag, way, mesh, window, softcap, segments, reach
CASES = {
    "gathered": (False, "reference", {"context": 4}, 5, 2.0, SEGMENTS, None),
    "ring": (False, "ring", {"context": 4}, None, None, None, None),
    "zigzag ring of two": (True, "ring", {"context": 2, "data": 2}, None, 2.0, SEGMENTS, None),
    "zigzag ring of four": (True, "ring", {"context": 4}, 5, None, SEGMENTS, None),
    "zigzag ring, split heads": (True, "ring", {"context": 2, "tensor": 2}, 5, 2.0, SEGMENTS, None),
    "zigzag ring, both ways": (True, "ring", {"context": 2}, None, None, SEGMENTS, REACH),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_split_rows_give_what_whole_rows_give(case):
    is_zigzag, keys, sizes, *terms = CASES[case]
    alone = computed(1, "reference", *terms)
    with jax.set_mesh(grid_of(**sizes)):
        split = computed(sizes["context"] if is_zigzag else 1, keys, *terms)
    for one, other in zip(alone, split, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("keys", ["reference", "ring"])
def test_values_may_be_of_another_size_than_keys(keys, monkeypatch):
    query, key, value, weights = OPERANDS
    monkeypatch.setitem(globals(), "OPERANDS", (query, key, value[..., :3], weights[..., :3]))
    alone = computed(1, "reference")
    with jax.set_mesh(grid_of(context=2, tensor=2)):
        split = computed(2, keys)
    for one, other in zip(alone, split, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())


@pytest.mark.slow
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [None, 1, 5, 16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "sizes",
    [
        {"context": 2},
        {"context": 4, "fsdp": 2},
        {"context": 8},
        {"data": 2, "context": 2, "tensor": 2},
    ],
    ids=str,
)
def test_every_mask_in_every_ring(sizes, softcap, window, segments):
    alone = computed(1, "reference", window, softcap, segments)
    # A window of one token has zeros for the gradients of queries and keys.
    largest = max(np.abs(one).max() for one in alone)
    with jax.set_mesh(grid_of(**sizes)):
        for parts in (1, sizes["context"]):
            for one, other in zip(
                alone, computed(parts, "ring", window, softcap, segments), strict=True
            ):
                np.testing.assert_allclose(other, one, atol=1e-5 * (np.abs(one).max() or largest))


@pytest.mark.slow
def test_a_ring_in_low_precision_is_as_near_to_float32_as_gathered_keys():
    low = Precision.of(PrecisionConfig(compute="bfloat16"))
    exact = computed(1, "reference")
    with jax.set_mesh(grid_of(context=2)):
        near, gathered = computed(2, "ring", precision=low), computed(1, "reference", precision=low)
    for one, ring, whole in zip(exact, near, gathered, strict=True):
        error, known = np.abs(ring - one).max(), np.abs(whole - one).max()
        assert 0 < error <= 2 * known


@pytest.mark.slow
def test_a_ring_runs_under_scan_remat_and_the_map_over_stages():
    """Two stages at a time, each a scan over layers with remat, as in the pipeline."""

    def layer(x, scale):
        mask = masks.causal(LENGTH, jnp.asarray(SEGMENTS))
        shape = (*x.shape[:2], HEADS, SIZE)
        query, key = (x * scale).reshape(shape), x.reshape(shape)[:, :, ::2]
        out = attention(query, key, key, mask, Precision.float32(), scale=0.5, kernel="ring")
        return rules.constrain(x + out.reshape(x.shape), "batch", "length", None), None

    def loss(x, scales):
        stage = lambda x, scales: jax.lax.scan(jax.checkpoint(layer), x, scales)[0]  # noqa: E731
        return jnp.square(jax.vmap(stage, spmd_axis_name="pipe")(x, scales)).mean()

    x = jax.random.normal(jax.random.key(1), (2, ROWS, LENGTH, HEADS * SIZE))
    scales = jnp.array([[1.0, 0.5], [0.3, 2.0]])
    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    alone = jax.tree.leaves(jax.jit(gradient)(x, scales))
    with jax.set_mesh(grid_of(pipe=2, context=2)):
        compiled = jax.jit(gradient).lower(x, scales).compile()
        split = jax.tree.leaves(compiled(x, scales))
    for one, other in zip(alone, split, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())
    sent = [each for each in hlo.read_collectives(compiled.as_text()) if each.bytes > 256]
    assert {each.kind for each in sent} == {"collective-permute"}


def test_a_ring_holds_a_part_of_the_scores_and_never_all_keys():
    length, heads = 512, 2
    shape = jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32)
    held = {}
    for keys in ("reference", "ring"):
        parts = 4 if keys == "ring" else 1

        def loss(query, key, value, parts=parts, kernel=keys):
            mask = masks.causal(length, parts=parts)
            return attention(
                query, key, value, mask, Precision.float32(), scale=1.0, kernel=kernel
            ).sum()

        with jax.set_mesh(grid_of(context=4)):
            grad = jax.grad(loss, argnums=(0, 1, 2))

            def constrained(*xs, grad=grad):
                return grad(*(rules.constrain(x, "batch", "length", None, None) for x in xs))

            compiled = jax.jit(constrained).lower(shape, shape, shape).compile()
        held[keys] = compiled.memory_analysis().temp_size_in_bytes
        kinds = {
            each.kind for each in hlo.read_collectives(compiled.as_text()) if each.bytes > 4096
        }
        assert ("all-gather" in kinds) == (keys == "reference")
        assert ("collective-permute" in kinds) == (keys == "ring")
    scores = 4 * heads * (length // 4) * length
    assert held["reference"] > scores
    assert held["ring"] < held["reference"] / 2


def products(program):
    """FLOPs of the products in a program, with loops times their turns, on one device.

    Each device computes with its own part.
    """
    total = 0
    for eqn in program.eqns:
        if eqn.primitive.name == "dot_general":
            (over, _), _ = eqn.params["dimension_numbers"]
            length = math.prod(eqn.invars[0].aval.shape[dim] for dim in over)
            total += 2 * length * eqn.outvars[0].aval.size
        inner = jax.tree.leaves(eqn.params, is_leaf=lambda each: hasattr(each, "eqns"))
        turns = eqn.params.get("length", 1)
        total += turns * sum(products(each) for each in inner if hasattr(each, "eqns"))
    return total


@pytest.mark.few(1)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_dealt_ring_leaves_out_the_half_of_each_hop_that_is_hidden_and_devices_do_the_same(parts):
    """A device meets its own keys in one piece; all devices run one program with equal cuts."""
    work = {}
    for count in (1, parts):

        def loss(operands, count=count):
            return weighed(count, "ring", None, None, None, None, Precision.float32(), operands)[0]

        with jax.set_mesh(grid_of(context=parts)):
            work[count] = products(jax.make_jaxpr(jax.grad(loss))(OPERANDS))
    alone = functools.partial(weighed, 1, "reference", None, None, None, None, Precision.float32())
    whole = products(jax.make_jaxpr(lambda operands: alone(operands)[0])(OPERANDS))
    # Two products forward, and five back, as scores are made again.
    assert work[1] * parts == whole * 7 / 2
    assert work[parts] / work[1] == (1 + (parts - 1) / 2) / parts


def test_what_a_ring_cannot_do_is_refused():
    query, key, value, _ = OPERANDS
    with jax.set_mesh(grid_of(context=4)):
        with pytest.raises(ValueError, match="ring has no attention dropout"):
            attention(
                query,
                key,
                value,
                masks.causal(LENGTH),
                Precision.float32(),
                scale=1.0,
                dropout=0.5,
                dropout_key=jax.random.key(0),
                kernel="ring",
            )
        short = (x[:, :14] for x in (query, key, value))
        with pytest.raises(ValueError, match="14 slots do not divide over 4 devices"):
            attention(*short, masks.causal(14), Precision.float32(), scale=1.0, kernel="ring")
