"""No device holds tokens x vocabulary if the mesh splits the vocabulary, or sends too much.

Read from the compiled programs of runs that are made small as `jaxlm check` makes them, for every
optimizer, for objectives and families whose programs differ, and for every axis of a mesh.
`recipes/diagnose/collectives.py` lists the collectives that are allowed, with reasons.
"""

import dataclasses
import functools
import math
import typing

import jax
import numpy as np
import pytest

from jaxlm.core import config
from jaxlm.generate import beam, decode, sampling
from jaxlm.optim.config import Optimizer
from jaxlm.parallel import hlo, logical, mesh
from jaxlm.recipes.config import Run
from jaxlm.recipes.diagnose import check, collectives
from jaxlm.recipes.diagnose.check import keyed_by_source_lines, reduced_run
from jaxlm.recipes.plan import predict
from jaxlm.recipes.train.programs import without_data

PRIME, VOCAB = 127, 508  # ids; nothing else is a multiple of the prime
BASE = ("model.heads=8", "model.kv_heads=4", "mesh.data=1")
TENSOR = (*BASE, "mesh.tensor=4")
BOTH = (*BASE, "mesh.fsdp=2", "mesh.tensor=2")  # the heads first
CONTEXT = (*BASE, "mesh.context=2", "mesh.tensor=2")
PIPE = (*BASE, "mesh.pipe=2", "mesh.tensor=2")
EXPERTS = ("model.family=mixtral", "mesh.data=1", "mesh.expert=2", "mesh.tensor=2")
TERMS = ("loss.z_loss=1e-4", "loss.label_smoothing=0.1")
CHUNKS = ("loss.chunk=64", "train.remat=full")

QUICK = {
    "a split vocabulary": (*TENSOR, *TERMS),
    "keys gathered": (*CONTEXT, "mesh.context_keys=gather"),
    "labels that sophia samples": (*TENSOR, "optim.name=sophia", "loss.chunk=64"),
    "moments in eight bits": (*TENSOR, "optim.name=adamw8bit", "model.hidden=1536"),
}
ARMS = {
    f"optimizer {arm().name}": (*BOTH, f"optim.name={arm().name}")
    for arm in typing.get_args(Optimizer)
}
SLOW = ARMS | {
    "chunks and remat": (*BOTH, *TERMS, *CHUNKS),
    "tied": ("model.family=gpt2", "model.heads=4", "mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2"),
    "rows alone": ("mesh.data=4",),
    "zero 1": (*BOTH, "mesh.zero=1"),
    "zero 2 of micro-batches": (*BOTH, "mesh.zero=2", "train.microbatches=2"),
    "zero 3 of micro-batches": (*BOTH, "train.microbatches=2"),
    "an average": (*BOTH, "average.name=ema"),
    "clipped logits of attention": (*BOTH, "regularization.qk_clip=100"),
    "prefix": (*BOTH, "objective.name=prefix"),
    "blank": (*BOTH, "objective.name=blank"),
    "span": (*BOTH, "objective.name=span"),
    "further tokens": (*BOTH, "objective.name=mtp"),
    "masked": ("model.family=bert", "objective.name=masked", *TENSOR[2:], "mesh.tensor=2"),
    "keys gathered in chunks": (*CONTEXT, *CHUNKS, "mesh.context_keys=gather"),
    "keys in a ring": (*CONTEXT, "mesh.context_keys=ring", *CHUNKS),
    "sophia, keys gathered": (*CONTEXT, "mesh.context_keys=gather", "optim.name=sophia"),
    "sophia, keys in a ring": (*CONTEXT, "mesh.context_keys=ring", "optim.name=sophia", *CHUNKS),
    "stages": PIPE,
    "stages in chunks": (*PIPE, *CHUNKS),
    "sophia in stages": (*PIPE, "optim.name=sophia", "loss.chunk=64"),
    "circular stages": (*PIPE, "train.pipeline=circular", "train.pipeline_repeats=2"),
    "experts": EXPERTS,
    "experts of a capacity": (*EXPERTS, "model.capacity=1.25"),
    "experts, sophia": (*EXPERTS, "optim.name=sophia"),
    "experts, eight bits": (*EXPERTS, "optim.name=adamw8bit"),
    "experts of latents": ("model.family=deepseek_v3", *EXPERTS[1:]),
    "windows and caps": ("model.family=gemma2", *BOTH),
}
WATCHED = ("log.layers=norms,activations,attention,noise", "train.microbatches=2")
# What no rule of sharding names, and why it may be sent.
ALLOWED = {
    "f32[3,15]": "sums of the calibration's 15 bins, a multiple of the mark of tokens",
    "over pipe of f32[4,32,32]": "layers are watched without the pipeline: each device reads "
    "those of all stages",
}


def smaller(settings):
    """The run of these settings, reduced as by `jaxlm check`, with an unmistakable vocabulary."""
    run = config.load(Run, None, [tuple(each.split("=", 1)) for each in settings]).value
    small = reduced_run(run, 1, 8)
    raw = config.to_json(small.run)
    raw["model"]["vocab"] = VOCAB
    if "model.hidden=1536" in settings:
        raw["model"]["hidden"] = 1536
    return dataclasses.replace(small, run=config.from_json(Run, raw))


@functools.cache
def engine_of(settings):
    small = smaller(settings)
    count = math.prod(small.mesh.values())
    grid = mesh.build(small.run.mesh, jax.devices()[:count])
    return small, grid, without_data(small.run, grid, VOCAB)


@pytest.fixture(autouse=True)
def sources():
    """Source lines in what is compiled that are those of this code."""
    with keyed_by_source_lines():
        yield


def compiled(settings, program):
    """Compiled text of the training step, the watched step or an evaluation, and its facts."""
    small, grid, engine = engine_of(settings)
    batch, state = collectives.abstract_batch(small.run, grid), engine.abstract()
    with jax.set_mesh(grid):
        lowered = {
            "step": lambda: engine.step.lower(state, batch),
            "observe": lambda: engine.observe.lower(state, batch),
            "evaluation": lambda: engine.eval_step.lower(state.params, batch),
        }[program]()
        return small, lowered.compile().as_text()


def wrong(small, text, **known):
    """Return unexpected arrays and collectives, a line each."""
    step, run = dataclasses.replace(check.step_of(small), **known), small.run
    lines = collectives.table(hlo.read_collectives(text), small.mesh, step)
    problems = [
        f"{line.source}: {line.kind} over {','.join(line.axes)} of {line.largest}, "
        f"{line.sent_bytes:.0f} bytes: {line.why_unexpected}"
        for line in lines
        if line.why_unexpected
    ]
    problems = [line for line in problems if not any(each in line for each in ALLOWED)]
    results = hlo.read_results(text)
    problems += collectives.unsharded_arrays(results, small.mesh, step)
    if logical.ways(small.mesh, "vocab") == 1:
        return problems
    # In any shape: as many numbers as one chunk of a device's tokens has logits.
    tokens = run.tokens_per_step if small.mesh["pipe"] > 1 else small.tokens
    tokens //= logical.ways(small.mesh, "batch") * logical.ways(small.mesh, "length")
    least = tokens * VOCAB // (1 if run.loss.chunk is None else 2)
    return problems + [
        f"{each.op_name}: {each.op} of {each.shape}"
        for each in results
        if each.shape.elements >= least and not each.shape.elements % (PRIME * small.mark)
    ]


@pytest.mark.slow  # the sound config of test_check.py is a fast test
@pytest.mark.parametrize("name", QUICK)
def test_a_step_holds_no_whole_logits_and_sends_nothing_unexplained(name):
    small, text = compiled(QUICK[name], "step")
    assert f"[{small.run.train.batch // logical.ways(small.mesh, 'batch')}," in text
    assert not wrong(small, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_nor_does_that_of_any_other_arm(name):
    small, text = compiled(SLOW[name], "step")
    assert not wrong(small, text)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("optim.name=sophia", "loss.chunk=32")], ids=["", "sophia"])
def test_nor_does_that_of_an_encoder_and_a_decoder(more):
    """`jaxlm check` does not shrink it. Gradients of score biases are summed over all rows."""
    sizes = ("width=32", "depth=2", "heads=4", "hidden=64", "head_dim=8", f"vocab={VOCAB}")
    settings = (
        *("model.family=t5", *(f"model.{size}" for size in sizes), "objective.name=span"),
        *("data.sequence=80", "train.batch=2", "precision.compute=float32", *BOTH[2:], *more),
    )
    run = config.load(Run, None, [tuple(each.split("=", 1)) for each in settings]).value
    grid = mesh.build(run.mesh, jax.devices()[:4])
    text = collectives.compile_step(run, grid).as_text()
    step = collectives.StepShapes(tokens=2 * run.data.sequence, mark=5, vocab=VOCAB)
    lines = collectives.table(hlo.read_collectives(text), dict(grid.shape), step)
    unexpected = {(line.kind, line.largest) for line in lines if line.why_unexpected}
    assert unexpected <= {("all-reduce", "f32[2,1,80,80]")}
    targets = predict.decoder_tokens(run)
    assert 0 < targets < run.data.sequence
    for each in hlo.read_results(text):
        assert VOCAB not in each.shape.sizes, each
        assert each.shape.elements < targets * VOCAB or each.shape.elements % PRIME, each


EVERYWHERE = pytest.mark.parametrize(
    "settings",
    [BOTH, (*BOTH, "optim.name=sophia"), CONTEXT, PIPE, EXPERTS, (*TENSOR, *CHUNKS)],
    ids=" ".join,
)


@pytest.mark.slow
@EVERYWHERE
def test_nor_does_a_step_that_is_watched(settings):
    """Figures of layers and hidden units are gathered: each device needs all of them."""
    small, text = compiled((*settings, *WATCHED), "observe")
    assert not wrong(small, text, figures=small.run.model.depth * small.run.model.hidden)


@pytest.mark.slow
@EVERYWHERE
def test_nor_does_an_evaluation(settings):
    """It reads whole batches: keys are twice as long with two micro-batches."""
    small, text = compiled(settings, "evaluation")
    step = check.step_of(small)
    times = small.run.train.microbatches
    assert not wrong(small, text, tokens=times * step.tokens, keys=times * step.keys)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2])
def test_nor_does_generation_but_for_one_token_of_each_text(beams):
    """Cuts such as top-p sort the logits of a row's last token, which are whole.

    No device has the logits of the prompt.
    """
    small, grid, engine = engine_of(BOTH)
    rows, length = 2, 2 * small.mark
    shared = dict(max_tokens=8, ends=(3,), pad=0, allowed=jax.numpy.ones(VOCAB, bool))
    if beams > 1:
        program = beam.build(
            engine.model.blueprint.merge, beams=beams, length_penalty=1.0, **shared
        )
    else:
        draw = functools.partial(sampling.draw, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
        program = decode.build(engine.model.blueprint.merge, draw, is_scored=True, **shared)
    ids = jax.ShapeDtypeStruct((rows, length), np.int32)
    lengths = jax.ShapeDtypeStruct((rows,), np.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    with jax.set_mesh(grid):
        params = engine.abstract().params
        text = jax.jit(program).lower(params, ids, lengths, keys).compile().as_text()
    results = hlo.read_results(text)
    assert any(each.shape.elements == rows * VOCAB // 2 for each in results), "the mesh splits them"
    step = collectives.StepShapes(tokens=rows * length, mark=small.mark, vocab=VOCAB)
    assert not collectives.unsharded_arrays(results, small.mesh, step)
    most = max(each.shape.elements for each in results if VOCAB in each.shape.sizes)
    assert most <= rows * beams * VOCAB


GATHER = """HloModule m, num_partitions=4

ENTRY %main (p: f32[1,10,127]) -> f32[1,10,508] {
  %p = f32[1,10,127]{2,1,0} parameter(0)
  ROOT %g = f32[1,10,508]{2,1,0} all-gather(%p), dimensions={2}, replica_groups={{0,1,2,3}}, \
metadata={op_name="jit(step)/cumsum"}
}
"""


def test_whole_logits_and_a_gathered_moment_are_found():
    small = smaller(TENSOR)
    lines = wrong(small, GATHER)
    assert any("logits are sent whole" in line for line in lines)
    assert any(line == "jit(step)/cumsum: all-gather of f32[1,10,508]" for line in lines)
    flat = GATHER.replace("f32[1,10,508]", "f32[5080]")
    assert any("all-gather of f32[5080]" in line for line in wrong(small, flat))
    moment = GATHER.replace("f32[1,10,127]", "f32[64,192]").replace("f32[1,10,508]", "f32[64,768]")
    (line,) = wrong(small, moment)
    assert "over tensor of f32[64,768]" in line
    assert "parameters are gathered" in line
