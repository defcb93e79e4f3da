"""Multi-token-prediction heads."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxlm.core.precision import Precision
from jaxlm.models.build import Blueprint
from jaxlm.models.config import MtpConfig
from jaxlm.models.families.llama import Llama
from jaxlm.nn.intermediates import capture


def test_each_head_notes_its_figures_under_the_name_of_its_parameters():
    base = Llama(vocab=40, width=16, depth=2, heads=2, kv_heads=2).build()
    config = dataclasses.replace(base, mtp=MtpConfig(tokens=2, kind="sequential"))
    blueprint = Blueprint(config, Precision.float32())

    def noted(params):
        tokens = jnp.zeros((1, 4), jnp.int32)
        model = blueprint.merge(params)
        inputs = {"positions": tokens, "segments": tokens + 1}
        with capture(("logits", "activations")) as notes:
            stream = model.hidden(tokens, **inputs).stream
            model.mtp_hidden(stream, [(tokens, tokens == 0)] * 2, **inputs)
        return notes

    notes = jax.eval_shape(noted, blueprint.shapes)
    stacks = {path.rpartition("/")[0] for path in (*notes.sums, *notes.peaks)}
    assert stacks == {"stack/0", "heads/0/block/0", "heads/1/block/0"}
    assert blueprint.shapes["heads"]["1"]["block"]["0"]["attention"]
