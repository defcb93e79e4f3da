"""FLOPs of programs that were really compiled, against XLA's count before the compilation."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxlm.parallel import hlo


def counted(function, *inputs):
    """The FLOPs of the compiled program, and of XLA's analysis of the traced one."""
    lowered = jax.jit(function).lower(*inputs)
    flops = hlo.read_flops(lowered.compile().as_text())
    assert (flops.attention, flops.unknown) == (0, 0)
    return flops.products, lowered.cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("spec", "left", "right"),
    [
        ("ij,jk->ik", (3, 4), (4, 5)),
        ("bij,bkj->bik", (2, 3, 4), (2, 5, 4)),
        ("bthd,bshd->bhts", (2, 8, 3, 4), (2, 6, 3, 4)),
        ("abc,bcd->ad", (2, 3, 4), (3, 4, 5)),
    ],
)
def test_products_count_as_in_cost_analysis(spec, left, right):
    def product(x, y):
        return jnp.einsum(spec, x, y)

    ours, xla = counted(product, jnp.ones(left), jnp.ones(right))
    assert ours == xla > 0


@pytest.mark.parametrize(
    "options",
    [
        {"padding": "VALID"},
        {"padding": "SAME"},
        {"padding": [(2, 1), (0, 3)], "window_strides": (2, 1)},
        {"padding": "SAME", "rhs_dilation": (2, 1)},
        {"padding": [(1, 1), (2, 2)], "lhs_dilation": (2, 3)},
        {"padding": "SAME", "feature_group_count": 2},
    ],
)
def test_convolutions_count_as_in_cost_analysis(options):
    """The TPU compiler's products are convolutions; elements of the padding do not count."""
    channels = 4 // options.get("feature_group_count", 1)

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, **{"window_strides": (1, 1)} | options)

    ours, xla = counted(convolve, jnp.ones((2, 4, 9, 8)), jnp.ones((6, channels, 3, 2)))
    assert ours == xla > 0


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_counts_as_its_unrolled_layers(remat):
    def layer(x, weight):
        return jnp.tanh(x @ weight[0]) @ weight[1], None

    def loss(weights, x, unroll):
        body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return (lax.scan(body, x, weights, unroll=unroll)[0] ** 2).sum()

    weights, x = (jnp.ones((5, 8, 16)), jnp.ones((5, 16, 8))), jnp.ones((4, 8))
    texts = [
        jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        .lower(weights, x, unroll)
        .compile()
        .as_text()
        for unroll in (1, 5)
    ]
    scanned, unrolled = map(hlo.read_flops, texts)
    assert " while(" in texts[0]
    assert " while(" not in texts[1]
    product = 2 * 4 * 8 * 16
    assert scanned.products == 5 * (6 + remat) * product
    # XLA finds the recomputed product of an unrolled layer a second time, and removes it.
    assert unrolled.products == 5 * 6 * product


KERNEL = 'custom-call(%t, %t), custom_call_target="tpu_custom_call", operand_layout_constraints='
HEADS, GROUPS = (f"bf16[4,{count},1024,64]{{3,2,1,0}}" for count in (2, 1))
BLOCKS = "s8[1,2,2]{2,1,0}, s8[1,2,2]{2,1,0}"
SPLASH = f"""HloModule jit_step, num_partitions=2

%body (t: (s32[])) -> (s32[]) {{
  %t = (s32[]) parameter(0)
  %splash_mha_fwd_residuals.1 = ({HEADS}) {KERNEL}{{{BLOCKS}, {HEADS}, {GROUPS}}}
  %splash_mha_dkv_no_residuals.1 = ({HEADS}) {KERNEL}{{{BLOCKS}, {HEADS}, {GROUPS}}}
  %other.1 = f32[8]{{0}} custom-call(%t), custom_call_target="tpu_custom_call"
  ROOT %r = (s32[]) tuple(%t)
}}

%cond (t: (s32[])) -> pred[] {{
  %n = s32[] constant(6)
  ROOT %lt = pred[] compare(%n, %n), direction=LT
}}

ENTRY %main (x: (s32[])) -> (s32[]) {{
  %x = (s32[]) parameter(0)
  ROOT %w = (s32[]) while(%x), condition=%cond, body=%body
}}
"""


def test_splash_kernels_count_three_of_four_blocks_of_a_causal_mask():
    """Two products forward and four for keys and values, in a loop of six; another kernel: none."""
    flops = hlo.read_flops(SPLASH)
    pairs = 4 * 2 * 1024 * 1024 * 3 / 4
    assert flops == (0, 6 * 2 * (2 + 4) * pairs * 64, 1)


@pytest.mark.parametrize(("step", "runs"), [(1, 8), (2, 4), (3, 3)])
def test_the_trips_of_a_loop_depend_on_its_increment(step, runs):
    """A product whose operand is divided may advance by two: XLA's windowed_dot_general."""
    text = f"""HloModule jit_step, num_partitions=2

%body (t: (f32[4,4], u32[])) -> (f32[4,4], u32[]) {{
  %step = u32[] constant({step})
  %t = (f32[4,4], u32[]) parameter(0)
  %x = f32[4,4]{{1,0}} get-tuple-element(%t), index=0
  %i = u32[] get-tuple-element(%t), index=1
  %y = f32[4,4]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %next = u32[] add(%i, %step)
  ROOT %r = (f32[4,4], u32[]) tuple(%y, %next)
}}

%cond (t: (f32[4,4], u32[])) -> pred[] {{
  %t = (f32[4,4], u32[]) parameter(0)
  %i = u32[] get-tuple-element(%t), index=1
  %n = u32[] constant(8)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (x: (f32[4,4], u32[])) -> (f32[4,4], u32[]) {{
  %x = (f32[4,4], u32[]) parameter(0)
  ROOT %w = (f32[4,4], u32[]) while(%x), condition=%cond, body=%body
}}
"""
    assert hlo.read_flops(text) == (runs * 2 * 4 * 4 * 4, 0, 0)
