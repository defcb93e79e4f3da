"""Preferences: losses of packed pairs against closed forms, alone, in any order and padding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.core.mean import Mean
from jaxlm.core.precision import Precision
from jaxlm.data.batch import Answers, Tokens
from jaxlm.models.build import Blueprint
from jaxlm.models.families.llama import Llama
from jaxlm.objectives.build import build
from jaxlm.objectives.config import Causal, LossConfig
from jaxlm.objectives.preference import score_answers
from jaxlm.objectives.preference_config import Preference
from tests.models.parameters import draw_params

pytestmark = pytest.mark.usefixtures("one_device")

FAMILY = Llama(vocab=64, width=16, depth=1, heads=2, kv_heads=1, hidden=32)
LENGTHS = [(5, 3), (2, 7), (4, 4)]  # of the answers of three pairs
PROMPT = 2
DRAW = np.random.default_rng(0)
IDS = [
    [DRAW.integers(0, 64, PROMPT + size + 1).astype(np.int32) for size in sizes]
    for sizes in LENGTHS
]
ENTER, LEAVE = slice(None, -1), slice(1, None)  # of ids: those that are read, and predicted
LOSSES = ("dpo", "ipo", "kto", "orpo", "simpo", "hinge")


@pytest.fixture(scope="module")
def blueprint():
    return Blueprint(FAMILY.build(), Precision.float32())


@pytest.fixture(scope="module")
def models(blueprint):
    return [draw_params(blueprint, seed) for seed in (0, 1)]


def rows(pairs, length=40, answers=32, order=(0, 1)):
    """One batch of rows, each of the pairs of one list."""
    shape = (len(pairs), length)
    tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
    weights, sides = np.zeros(shape, np.float32), np.zeros((len(pairs), answers), np.float32)
    for row, numbers in enumerate(pairs):
        slot = 0
        items = [(number, side) for number in numbers for side in order]
        for segment, (number, side) in enumerate(items, 1):
            ids = IDS[number][side]
            here = (row, slice(slot, slot + len(ids) - 1))
            tokens[here], targets[here], segments[here] = ids[:-1], ids[1:], segment
            positions[here] = np.arange(len(ids) - 1)
            weights[here] = np.arange(len(ids) - 1) >= PROMPT - 1
            weights[row, slot] = 0
            sides[row, segment - 1] = 1 - 2 * side
            slot += len(ids) - 1
    fields = map(jnp.asarray, (tokens, targets, weights, segments, positions))
    return Tokens(*fields, answers=Answers(jnp.asarray(sides), jnp.zeros_like(sides)))


@functools.cache
def loss_of(blueprint, chunk=None, **settings):
    objective = build(Preference(**settings), LossConfig(chunk=chunk))

    def loss(params, reference, batch):
        teacher = None if reference is None else blueprint.merge(reference)
        part = objective.loss(blueprint.merge(params), batch, None, teacher)
        return part.objective.total, part

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def measured(blueprint, models, batches, **settings):
    """Value, figures and gradient of the mean over some batches, as micro-batches are added."""
    policy, reference = models
    reference = None if settings.get("loss") in ("orpo", "simpo") else reference
    function = loss_of(blueprint, **settings)
    parts = [function(policy, reference, batch) for batch in batches]
    grads, losses = [grad for _, grad in parts], [part for (_, part), _ in parts]
    total = jax.tree.map(lambda *x: sum(x), *(part.objective for part in losses))
    metrics = Mean.merged(*(part.metrics for part in losses))
    gradient = jax.tree.map(lambda *x: sum(x) / total.weight, *grads)
    return float(total.value), {n: float(m.value) for n, m in metrics.items()}, gradient


@functools.cache
def logits_of(blueprint):
    def logits(params, ids):
        model = blueprint.merge(params)
        return model.logits(model.hidden(ids, positions=jnp.arange(ids.shape[1])[None]).values)[0]

    return jax.jit(logits)


def log_p(blueprint, params, number, side):
    """Log-probability of the answer of a pair in float64, alone in its row, and its length."""
    ids = IDS[number][side]
    logits = logits_of(blueprint)(params, np.resize(ids[:-1], 12)[None])[: len(ids) - 1]
    logits = np.asarray(logits, np.float64)
    picked = logits[np.arange(len(logits)), ids[1:]] - np.log(np.exp(logits).sum(-1))
    return picked[1:].sum(), len(picked) - 1


def expected(blueprint, models, loss, beta, nll):
    values, nats = [], []
    for number in range(3):
        sides = []
        for side in (0, 1):
            policy, size = log_p(blueprint, models[0], number, side)
            reference, _ = log_p(blueprint, models[1], number, side)
            sides.append((policy, policy - reference, size))
        (w, rw, nw), (_, rl, nl) = sides
        nats.append(-w / nw)
        if loss == "dpo":
            values.append(np.logaddexp(0, -beta * (rw - rl)))
        elif loss == "hinge":
            values.append(max(0, 1 - beta * (rw - rl)))
        elif loss == "ipo":
            values.append((rw / nw - rl / nl - 1 / (2 * beta)) ** 2)
        elif loss == "simpo":
            values.append(np.logaddexp(0, 0.5 - beta * (w / nw - sides[1][0] / nl)))
        elif loss == "orpo":
            mw, ml = w / nw, sides[1][0] / nl
            odds = mw - ml - np.log(-np.expm1(mw)) + np.log(-np.expm1(ml))
            values.append(beta * np.logaddexp(0, -odds) - mw)
        else:
            values.append((1 / (1 + np.exp(beta * rw)) + 1 / (1 + np.exp(-beta * rl))) / 2)
    share = 0.5 if loss == "kto" else 1.0  # of the answers that have an nll
    return np.mean(values) + nll * share * np.mean(nats)


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_packed_pairs_have_the_loss_of_the_paper_in_every_layout(blueprint, models, loss):
    settings = {"loss": loss, "beta": 0.5, "nll": 0.25}
    value, figures, grads = measured(blueprint, models, [rows([[0, 1], [2]])], **settings)
    want = expected(blueprint, models, loss, 0.5, 0.25)
    np.testing.assert_allclose(value, want, rtol=2e-5)
    np.testing.assert_allclose(figures["loss_nats"], want, rtol=2e-5)
    layouts = [
        [rows([[n], []]) for n in range(3)],  # alone
        [rows([[2, 0], [1]], order=(1, 0))],
    ]
    if loss == "hinge":
        layouts.append([rows([[1], [0, 2]], length=56, answers=64)])
    for batches in layouts:
        other, others, gradient = measured(blueprint, models, batches, **settings)
        np.testing.assert_allclose(other, value, rtol=1e-6)
        np.testing.assert_allclose([*others.values()], [*figures.values()], rtol=1e-5, atol=1e-6)
        for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_at_the_reference_the_loss_is_ln_2_and_its_gradient_half_of_beta(blueprint, models):
    same = (models[0], models[0])
    value, figures, grads = measured(blueprint, same, [rows([[0, 1], [2]])], beta=0.3)
    np.testing.assert_allclose(value, np.log(2), rtol=1e-7)
    assert (figures["margin"], figures["preference_accuracy"], figures["kl_nats"]) == (0, 0.5, 0)

    # Each answer alone in its row, those that are preferred first.
    ids = [pair[side] for side in (0, 1) for pair in IDS]
    tokens, targets = (np.array([np.resize(x[part], 12) for x in ids]) for part in (ENTER, LEAVE))
    lengths = np.array([len(each) - 1 for each in ids])[:, None]
    slots = np.arange(12)[None]
    signs = ((slots >= PROMPT - 1) & (slots < lengths)) * np.repeat([1, -1], 3)[:, None] / 3

    def gaps(params):
        model = blueprint.merge(params)
        positions = np.broadcast_to(slots, tokens.shape)
        logits = model.logits(model.hidden(tokens, positions=positions).values)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        return (signs * scores[..., 0]).sum()

    slope = jax.jit(jax.grad(gaps))(models[0])
    for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(one, -0.15 * two, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_cached_reference_is_the_live_one_and_chunks_change_nothing(blueprint, models):
    batch = rows([[0, 1], [2]])
    scored, _ = jax.jit(lambda p: score_answers(blueprint.merge(p), batch, None, None))(models[1])
    cached = batch._replace(answers=batch.answers._replace(reference=scored.log_p))
    live = measured(blueprint, models, [batch])
    (_, part), _ = loss_of(blueprint)(models[0], None, cached)
    np.testing.assert_allclose(float(part.objective.value), live[0], rtol=1e-6)
    chunked = measured(blueprint, models, [batch], chunk=8)
    np.testing.assert_allclose(chunked[0], live[0], rtol=1e-6)


def test_logits_of_all_tokens_never_exist(blueprint, models):
    text = str(jax.make_jaxpr(loss_of(blueprint, chunk=8))(*models, rows([[0, 1], [2]])))
    assert "f32[2,40,64]" not in text
    assert "f32[2,4,64]" in text


@pytest.mark.slow
def test_training_reaches_the_closed_form_optimum_of_three_answers(blueprint, models):
    """pi = ref exp(r / beta) / Z, with r = log w and answers i preferred w_i / (w_i + w_j) often.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 4.
    """
    weights, beta, ids = (1, 2, 3), 1.0, (7, 8, 9)
    pairs = [
        (one, other)
        for one, other in itertools.permutations(range(3), 2)
        for _ in range(weights[one])
    ]
    shape = (len(pairs), 4)  # a prompt of two tokens before each answer of one
    segments = np.broadcast_to([1, 1, 2, 2], shape).astype(np.int32)
    positions = np.broadcast_to([0, 1, 0, 1], shape).astype(np.int32)
    tokens = np.broadcast_to([5, 6, 5, 6], shape).astype(np.int32)
    targets = np.array([[6, ids[one], 6, ids[other]] for one, other in pairs], np.int32)
    scored = np.broadcast_to([0.0, 1.0, 0.0, 1.0], shape).astype(np.float32)
    sides = np.zeros((len(pairs), 32), np.float32)
    sides[:, :2] = 1, -1
    answers = Answers(jnp.asarray(sides), jnp.zeros_like(sides))
    fields = map(jnp.asarray, (tokens, targets, scored, segments, positions))
    batch = Tokens(*fields, answers=answers)
    function, reference = loss_of(blueprint, beta=beta), models[1]
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, 600))

    @jax.jit
    def step(params, state):
        _, grads = function(params, reference, batch)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    params, state = models[1], optimizer.init(models[1])
    for _ in range(600):
        params, state = step(params, state)
    policy, before = (
        np.asarray(jax.nn.log_softmax(logits_of(blueprint)(each, tokens[:1, :2])[1]))[[*ids]]
        for each in (params, reference)
    )
    optimum = np.exp(before + np.log(weights) / beta)
    share = np.exp(policy - np.logaddexp.reduce(policy))
    np.testing.assert_allclose(share, optimum / optimum.sum(), rtol=0.01)


@pytest.mark.slow  # the compiled step; a fast test above reads the traced one
def test_no_array_of_tokens_and_vocabulary_is_in_a_step_with_chunks(blueprint, models):
    """Both forms of it: rows and slots apart, and together."""
    batch = rows([[0, 1], [2]])
    slots = batch.tokens.size
    shapes = [f"[{slots},64]", f"[2,{slots // 2},64]", f"[64,{slots}]"]

    def has_logits(chunk):
        objective = build(Preference(reference="none", loss="simpo"), LossConfig(chunk=chunk))

        def total(params):
            return objective.loss(blueprint.merge(params), batch, None).objective.total

        text = jax.jit(jax.grad(total)).lower(models[0]).compile().as_text()
        return any(shape in text for shape in shapes)

    assert has_logits(None)
    assert not has_logits(8)


def test_a_pass_of_the_reference_computes_no_more_than_an_evaluation_of_text(blueprint, models):
    """Tokens outnumber what is summed for each answer, as in rows of a usual length."""
    batch = rows([[0, 1], [2]], answers=4)
    text = build(Causal(), LossConfig())

    def flops(function):
        compiled = jax.jit(lambda params: function(blueprint.merge(params))).lower(models[0])
        return compiled.compile().cost_analysis()["flops"]

    evaluated = flops(lambda model: text.loss(model, batch._replace(answers=None), None))
    scored = flops(lambda model: score_answers(model, batch, None, None)[0].log_p)
    assert 0 < scored <= 1.02 * evaluated


def test_a_step_with_cached_scores_computes_what_a_step_of_text_does(blueprint, models):
    batch = rows([[0, 1], [2]], answers=4)
    batch = batch._replace(
        answers=batch.answers._replace(reference=jnp.zeros_like(batch.answers.sides))
    )

    def flops(objective, batch):
        def total(params):
            return objective.loss(blueprint.merge(params), batch, None).objective.total

        return jax.jit(jax.grad(total)).lower(models[0]).compile().cost_analysis()["flops"]

    text = flops(build(Causal(), LossConfig()), batch._replace(answers=None))
    assert 0 < flops(build(Preference(), LossConfig()), batch) <= 1.05 * text
