"""Laws that every decoder satisfies."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.core import tree
from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.cost import model_cost
from jaxlm.models.cost.tensors import tensors
from jaxlm.models.families.cohere import Cohere
from jaxlm.models.families.deepseek import DeepSeekV2, DeepSeekV3
from jaxlm.models.families.gpt2 import GPT2
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.mistral import Mixtral
from jaxlm.models.families.modernbert import ModernBERT
from jaxlm.models.families.qwen import Qwen3
from jaxlm.models.families.union import BY_PARAMETERS, SIZES, Family
from jaxlm.nn.config import BlockConfig, NormConfig, Residual
from jaxlm.nn.rotary import Rope, YarnScaling
from jaxlm.ops import masks
from tests.models.parameters import draw_params

LENGTH, VOCAB = 12, 50
FAMILIES = {
    "llama": Llama(vocab=VOCAB, width=32, depth=3, heads=4, kv_heads=2, hidden=48),
    "qwen3, tied": Qwen3(vocab=VOCAB, width=32, depth=2, heads=4, kv_heads=1, tied=True),
    "cohere": Cohere(vocab=VOCAB, width=32, depth=2, heads=4, kv_heads=2, hidden=48),
    "gpt2": GPT2(vocab=VOCAB, width=32, depth=3, heads=4, max_positions=16),
    "gpt2, no biases": GPT2(
        vocab=VOCAB, width=32, depth=2, heads=4, max_positions=16, bias=False, tied=False
    ),
    "mixtral": Mixtral(
        vocab=VOCAB,
        width=32,
        depth=3,
        heads=4,
        kv_heads=2,
        experts=4,
        hidden=24,
        balance_bias=0.1,
        dense_depth=1,
        dense_hidden=48,
        shared=16,
        tied=True,
    ),
    "deepseek_v2": DeepSeekV2(
        vocab=VOCAB,
        width=32,
        depth=3,
        heads=4,
        kv_rank=24,
        nope_dim=4,
        rope_dim=6,
        value_dim=5,
        experts=8,
        top_k=2,
        groups=4,
        top_groups=2,
        hidden=24,
        shared=16,
        dense_hidden=48,
    ),
    "deepseek_v3": DeepSeekV3(
        vocab=VOCAB,
        width=32,
        depth=2,
        heads=4,
        kv_rank=12,
        query_rank=20,
        nope_dim=8,
        rope_dim=4,
        value_dim=6,
        experts=4,
        top_k=2,
        groups=2,
        top_groups=1,
        hidden=24,
        shared=16,
        dense_depth=0,
    ),
}


def patterned():
    """Return a decoder with a prefix, a pattern of two kinds, and an incomplete last period."""
    base = FAMILIES["llama"].build()
    (block,) = base.pattern
    local = dataclasses.replace(
        block, attention=dataclasses.replace(block.attention, window=4), residual="sandwich"
    )
    first = dataclasses.replace(
        block, residual="parallel", attention=dataclasses.replace(block.attention, softcap=5.0)
    )
    post = dataclasses.replace(block, residual="post", norm=NormConfig(kind="layer", bias=True))
    return dataclasses.replace(
        base, depth=6, prefix=(first,), pattern=(local, post), logit_softcap=10.0
    )


def parallel():
    """Return a decoder with norms over all heads, partly rotated heads, and parallel parts."""
    base = FAMILIES["llama"].build()
    (block,) = base.pattern
    norm = NormConfig(offset=1.0)
    rotary = Rope(share=0.5, scaling=YarnScaling(original=8))
    attention = dataclasses.replace(block.attention, rotary=rotary, bias=True, out_bias=True)
    first = dataclasses.replace(
        block, attention=dataclasses.replace(attention, rotary=None), residual="parallel_norms"
    )
    attention = dataclasses.replace(attention, qk_norm=norm, qk_norm_over="heads")
    second = dataclasses.replace(block, attention=attention, norm=norm, residual="output")
    return dataclasses.replace(base, depth=2, pattern=(first, second), final_norm=norm)


CONFIGS = {name: family.build() for name, family in FAMILIES.items()} | {
    "patterned": patterned(),
    "parallel": parallel(),
    "shallower than its pattern, two positions": dataclasses.replace(
        patterned(), depth=2, inner_positions=8
    ),
}


def test_everything_that_a_block_can_be_is_under_these_laws():
    """Families consist of these; tests/parity compares each with transformers."""
    encoder = ModernBERT(vocab=VOCAB, depth=2).build()  # its laws are in test_encoder.py
    blocks = [block for config in (*CONFIGS.values(), encoder) for block in config.layers]
    assert {block.residual for block in blocks} == set(get_args(Residual))
    assert {type(block.mlp) for block in blocks} == set(
        get_args(BlockConfig.__annotations__["mlp"])
    )
    assert {block.attention.qk_norm_over for block in blocks} == {"head", "heads"}


def inputs(rows=2, length=LENGTH, seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return jnp.asarray(tokens), jnp.asarray(positions)


def logits(blueprint, params, tokens, positions, **rest):
    @jax.jit  # one program compiles faster than each of its operations
    def forward(params, tokens, positions, rest):
        model = blueprint.merge(params)
        return model.logits(model.hidden(tokens, positions=positions, **rest).values)

    return forward(params, tokens, positions, rest)


@pytest.fixture(scope="module", params=CONFIGS)
def built(request):
    blueprint = Blueprint(CONFIGS[request.param], Precision.float32())
    return blueprint, draw_params(blueprint, std=0.1)


@pytest.mark.few(1)
def test_no_token_depends_on_those_after_it(built):
    blueprint, params = built
    tokens, positions = inputs(rows=1)
    table = params["embedding"]["table"]

    unseen = jnp.asarray([t for t in range(VOCAB) if t not in set(tokens[0, :6].tolist())])

    # A tied table is also the output layer: look at the hidden state, which the table reaches
    # through the inputs alone.
    def hidden(table):
        model = blueprint.merge(params | {"embedding": {"table": table}})
        return model.hidden(tokens, positions=positions).values[0, 5].sum()

    gradient = jax.jit(jax.grad(hidden))(table)
    assert float(jnp.abs(gradient[unseen]).max()) == 0.0
    assert float(jnp.abs(gradient[tokens[0, 5]]).max()) > 0.0
    assert float(jnp.abs(gradient[tokens[0, 3]]).max()) > 0.0


@pytest.mark.few(1)
def test_packed_documents_do_not_see_each_other(built):
    blueprint, params = built
    tokens, _ = inputs(rows=1)
    cut = 5
    segments = jnp.asarray([[1] * cut + [2] * (LENGTH - cut)], jnp.int32)
    positions = jnp.asarray([[*range(cut), *range(LENGTH - cut)]], jnp.int32)
    packed = logits(blueprint, params, tokens, positions, segments=segments)
    for start, stop in ((0, cut), (cut, LENGTH)):
        alone = logits(blueprint, params, tokens[:, start:stop], positions[:, start:stop])
        np.testing.assert_allclose(packed[:, start:stop], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.few(4)
def test_padding_is_finite_and_changes_nothing(built):
    blueprint, params = built
    tokens, positions = inputs(rows=1)
    segments = jnp.asarray([[1] * 7 + [0] * (LENGTH - 7)], jnp.int32)
    out = logits(blueprint, params, tokens, positions, segments=segments)
    assert bool(jnp.isfinite(out).all())
    np.testing.assert_allclose(
        out[:, :7], logits(blueprint, params, tokens[:, :7], positions[:, :7]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.few(1)
def test_scan_and_unroll_run_the_same_parameters(built):
    blueprint, params = built
    other = Blueprint(blueprint.config, Precision.float32(), layers="unroll")
    assert tree.leaves(other.shapes).keys() == tree.leaves(params).keys()
    value = {}
    for each in (blueprint, other):
        tokens, positions = inputs()

        def loss(p, each=each, tokens=tokens, positions=positions):
            return (logits(each, p, tokens, positions) ** 2).mean()

        value[each] = jax.jit(jax.value_and_grad(loss))(params)
    (a, ga), (b, gb) = value.values()
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for path, leaf in tree.leaves(ga).items():
        np.testing.assert_allclose(leaf, tree.leaves(gb)[path], rtol=1e-3, atol=1e-6, err_msg=path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "remat", ["dots", "full", "save:attention_out", "save:attention_out,mlp_out"]
)
def test_what_is_computed_again_changes_no_gradient(remat):
    tokens, positions = inputs()
    gradients = []
    for policy in ("none", remat):
        blueprint = Blueprint(CONFIGS["llama"], Precision.float32(), remat=policy)
        params = draw_params(blueprint)
        loss = lambda p, b=blueprint: (logits(b, p, tokens, positions) ** 2).mean()  # noqa: E731
        gradients.append(tree.leaves(jax.jit(jax.grad(loss))(params)))
    for path, leaf in gradients[0].items():
        np.testing.assert_allclose(leaf, gradients[1][path], rtol=1e-4, atol=1e-8, err_msg=path)


def test_a_remat_policy_that_does_not_exist_is_refused():
    blueprint = Blueprint(CONFIGS["llama"], Precision.float32(), remat="save:everything")
    with pytest.raises(ValueError, match="save:everything"):
        logits(blueprint, draw_params(blueprint), *inputs())


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_full_remat_keeps_less_in_memory(layers):
    family = Llama(vocab=VOCAB, width=64, depth=6, heads=4, kv_heads=4)
    tokens, positions = inputs(rows=4, length=64)
    sizes = {}
    for policy in ("none", "full"):
        blueprint = Blueprint(family.build(), Precision.float32(), layers=layers, remat=policy)
        loss = lambda p, b=blueprint: (logits(b, p, tokens, positions) ** 2).mean()  # noqa: E731
        compiled = jax.jit(jax.grad(loss)).lower(blueprint.shapes).compile()
        sizes[policy] = compiled.memory_analysis().temp_size_in_bytes
    # Before 0.12, what is computed again outside of a loop does not wait for the backward pass.
    is_waited_for = layers == "scan" or jax.__version_info__ >= (0, 12)
    assert sizes["full"] < (0.6 if is_waited_for else 0.95) * sizes["none"]


@pytest.mark.few(1)
def test_cached_decoding_is_the_full_forward_row_by_row(built):
    blueprint, params = built
    tokens, positions = inputs(rows=3)
    full = logits(blueprint, params, tokens, positions)
    lengths = jnp.asarray([4, 7, 2], jnp.int32)

    # for the prompt and for each token after it: one program compiles faster than each of its
    # operations
    @jax.jit
    def forward(tokens, positions, cache, count):
        model = blueprint.merge(params)
        hidden = model.hidden(tokens, positions=positions, cache=cache, count=count)
        return model.logits(hidden.values), hidden.cache

    cache = blueprint.merge(params).empty_cache(3, LENGTH)
    held = tree.size_bytes(cache.layers)
    assert held == 3 * model_cost.cache_bytes(blueprint.config, LENGTH, element_bytes=4)
    got, cache = forward(tokens[:, :7], positions[:, :7], cache, lengths)
    for row, length in enumerate(lengths.tolist()):
        np.testing.assert_allclose(got[row, :length], full[row, :length], rtol=1e-4, atol=1e-5)
    cache = cache._replace(length=lengths)
    for _ in range(4):  # rows continue at different slots, over the padding
        index = cache.length[:, None]
        token = jnp.take_along_axis(tokens, index, axis=1)
        got, cache = forward(token, index, cache, jnp.ones_like(lengths))
        np.testing.assert_allclose(
            got[:, 0],
            jnp.take_along_axis(full, index[..., None], axis=1)[:, 0],
            rtol=1e-4,
            atol=1e-5,
        )


def test_segments_with_a_cache_are_refused():
    blueprint = Blueprint(CONFIGS["llama"], Precision.float32())
    model = blueprint.merge(draw_params(blueprint))
    tokens, positions = inputs()
    with pytest.raises(ValueError, match="segments with a cache"):
        model.hidden(
            tokens,
            positions=positions,
            segments=jnp.ones_like(tokens),
            cache=model.empty_cache(len(tokens), LENGTH),
        )


@pytest.mark.parametrize("depth", [0, 1])
def test_a_depth_that_leaves_nothing_to_the_pattern_is_refused(depth):
    with pytest.raises(ValueError, match=f"depth = {depth}, a prefix of 1"):
        dataclasses.replace(patterned(), depth=depth)
    with pytest.raises(ValueError, match="a pattern of 0"):
        dataclasses.replace(patterned(), pattern=())


def test_the_closed_form_counts_every_parameter(built):
    blueprint, params = built
    assert model_cost.parameters(blueprint.config) == tree.count(params)
    axes = tree.leaves(blueprint.axes, is_leaf=lambda node: isinstance(node, tuple))
    assert {each.path: (each.shape, each.axes) for each in tensors(blueprint.config)} == {
        path: (leaf.shape, axes[path]) for path, leaf in tree.leaves(params).items()
    }
    assert all(leaf.size for leaf in jax.tree.leaves(params)), "a parameter without a number"


@pytest.mark.parametrize("built", ["shallower than its pattern, two positions"], indirect=True)
def test_second_positions_count_where_there_is_a_table_and_none_are_zeros(built):
    blueprint, params = built
    arrays = inputs()
    plain = logits(blueprint, params, *arrays)
    zeros = jnp.zeros_like(arrays[0])
    np.testing.assert_array_equal(plain, logits(blueprint, params, *arrays, block_positions=zeros))
    changed = logits(blueprint, params, *arrays, block_positions=zeros.at[0, 5].set(3))
    differs = np.abs(np.asarray(plain - changed)).max(-1) > 0
    np.testing.assert_array_equal(differs[0], np.arange(LENGTH) >= 5)
    assert not differs[1].any()


def test_every_parameter_has_axes_of_its_rank(built):
    blueprint, params = built
    names = tree.leaves(blueprint.axes, is_leaf=lambda node: isinstance(node, tuple))
    assert names.keys() == tree.leaves(params).keys()
    for path, leaf in tree.leaves(params).items():
        assert len(names[path]) == leaf.ndim, path
        assert (names[path][0] == "layers") == ("stack/" in path), path
        assert (names[path][0] == "prefix") == ("prefix/" in path), path


PUBLISHED = {
    "command-r-v01": 34_980_831_232,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-3-medium-4k": 13_960_238_080,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # without the layer that predicts a further token
    # With the head that predicts hidden tokens; without it and with the pooler, BERT's base has
    # 109_482_240.
    "bert-base-uncased": 109_514_298,
    "bert-base-cased": 108_340_804,
    "bert-large-uncased": 335_174_458,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "modernbert-base": 149_655_232,
    "modernbert-large": 395_881_664,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "ul2-20b": 19_591_209_984,
}


def test_every_family_has_published_sizes():
    assert {type(family) for family in SIZES.values()} == set(get_args(Family))
    assert SIZES.keys() - BY_PARAMETERS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_their_published_parameters(name):
    assert not list(SIZES[name].problems())
    assert model_cost.parameters(SIZES[name].build()) == PUBLISHED[BY_PARAMETERS.get(name, name)]


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("mixtral-8x7b", 12.9e9),
        ("mixtral-8x22b", 39e9),
        ("qwen3-235b-a22b", 22e9),
        ("deepseek-moe-16b", 2.8e9),
        ("deepseek-v2", 21e9),
        ("deepseek-v3", 37e9),
    ],
)
def test_a_token_meets_the_published_share_of_the_parameters(name, active):
    assert model_cost.active_parameters(SIZES[name].build()) == pytest.approx(active, rel=0.02)
    assert model_cost.active_parameters(CONFIGS["llama"]) == model_cost.parameters(CONFIGS["llama"])


def without_windows(config):
    def whole(block):
        return dataclasses.replace(
            block, attention=dataclasses.replace(block.attention, window=None)
        )

    return dataclasses.replace(
        config,
        prefix=tuple(map(whole, config.prefix)),
        pattern=tuple(map(whole, config.pattern)),
    )


def test_a_cache_of_latents_is_as_small_as_published():
    """arXiv:2405.04434, table 1: 4.5 head sizes of 128 in each layer for any number of heads."""
    decoder = SIZES["deepseek-v2"].build()
    numbers = model_cost.cache_bytes(decoder, 1, element_bytes=1)
    assert numbers == 4.5 * 128 * 60
    (block,) = decoder.pattern
    whole = dataclasses.replace(block.attention, latent=None)
    config = dataclasses.replace(
        decoder, prefix=(), pattern=(dataclasses.replace(block, attention=whole),)
    )
    assert model_cost.cache_bytes(config, 1, element_bytes=1) > 80 * numbers


@pytest.mark.parametrize(
    ("changed", "setting", "fix"),
    [
        ({"rope_dim": 5}, "rope_dim", "--config.model.rope_dim=6"),
        ({"mscale": 1.0}, "mscale", "--config.model.mscale=0"),
        ({"groups": 3}, "groups", "--config.model.groups=1 --config.model.top_groups=1"),
        ({"top_groups": 5}, "top_groups", "--config.model.top_groups=4"),
        ({"top_groups": 1, "top_k": 3}, "top_groups", "--config.model.top_groups=2"),
    ],
)
def test_what_groups_and_latents_cannot_be_is_told_with_what_they_can(changed, setting, fix):
    family = FAMILIES["deepseek_v2"]
    assert not list(family.problems())
    ((actual, _, flag),) = dataclasses.replace(family, **changed).problems()
    assert (actual, flag) == (setting, fix)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mixtral", "deepseek_v2", "deepseek_v3", "patterned"]
)
def test_flops_are_those_of_the_products_in_the_program(name):
    """The forward pass, counted product by product in its jaxpr, times three for training."""
    config = CONFIGS[name]
    blueprint = Blueprint(config, Precision.float32())
    tokens, positions = inputs(rows=1)
    program = jax.make_jaxpr(lambda p: logits(blueprint, p, tokens, positions))(blueprint.shapes)
    counted = 3 * dot_flops(program.jaxpr) / LENGTH
    # The reference kernel computes all scores, also those that a window hides.
    assert counted == model_cost.flops_per_token(without_windows(config), LENGTH, causal=False)
    half = model_cost.flops_per_token(config, LENGTH, causal=True)
    assert counted > half > 6 * model_cost.matmul_parameters(config)


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [3, LENGTH])
def test_the_keys_of_a_causal_row_are_those_that_its_masks_show(length):
    config = CONFIGS["patterned"]
    met = 0.0
    for block in config.layers:
        attention = block.attention
        mask = dataclasses.replace(masks.causal(length), window=attention.window)
        keys = float(mask.materialize().sum()) / length
        met += 12 * attention.heads * attention.head_dim * keys
    expected = 6 * model_cost.matmul_parameters(config) + met
    assert model_cost.flops_per_token(config, length, causal=True) == pytest.approx(
        expected, rel=1e-12
    )


def dot_flops(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            inner = int(np.prod([left[dim] for dim in contracted]))
            total += 2 * inner * int(np.prod(equation.outvars[0].aval.shape))
        if (
            equation.primitive.name == "ragged_dot_general"
        ):  # each row meets the weight of its expert
            total += 2 * equation.invars[0].aval.size * equation.outvars[0].aval.shape[1]
        for value in equation.params.values():
            for inner_jaxpr in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner_jaxpr, "jaxpr"):
                    total += times * dot_flops(inner_jaxpr.jaxpr)
                elif hasattr(inner_jaxpr, "eqns"):
                    total += times * dot_flops(inner_jaxpr)
    return total
