"""A reward model in the format of transformers: a sequence classifier of one label.

`AutoModelForSequenceClassification` computes the product of its `score.weight` [1, D] and the final
stream at the last id that is not padding. A reward model reads the id before the end of the text,
so the text is given without its end.
"""

import shlex
from pathlib import Path
from typing import Any

import jax

from jaxlm.checkpoint.hub_tensors import HFTensor, MappedSlice, layout
from jaxlm.core.errors import ConfigError
from jaxlm.models.config import ModelConfig
from jaxlm.models.families.hub import Hub
from jaxlm.recipes.config import Run

HEAD = "reward/weight"  # path of the leaf
CLASSIFIERS = {
    "GPT2LMHeadModel": "GPT2ForSequenceClassification",
    "LlamaForCausalLM": "LlamaForSequenceClassification",
    "MistralForCausalLM": "MistralForSequenceClassification",
    "Qwen2ForCausalLM": "Qwen2ForSequenceClassification",
    "Qwen3ForCausalLM": "Qwen3ForSequenceClassification",
}
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # transformers' num_labels


def check(run: Run, workdir: Path, to: str) -> None:
    """Raise ConfigError if the format, or the family in it, has no classifier of sequences."""
    known = CLASSIFIERS.get(run.model.HUB.architecture)
    if to == "hf" and known is not None:
        return
    why = "the format has no name for its head"
    fix = "--to=hf    # a classifier of sequences"
    if known is None:
        why = f"{run.model.HUB.architecture} has no classifier with that head in transformers"
        fix = f"jaxlm eval --workdir={shlex.quote(str(workdir))}    # its accuracy on pairs"
    where = f"objective.name = {run.objective.name}"
    raise ConfigError("a reward model cannot be exported", where=where, why=why, fix=fix)


def tensors(decoder: ModelConfig, hub: Hub) -> list[HFTensor]:
    """Return the tensors of the classifier: no unembedding, and the head."""
    stream = [each for each in layout(decoder, hub) if not _is_unembedding(each)]
    head = MappedSlice(HEAD, (), (decoder.width,), 1)
    return [*stream, HFTensor("score.weight", "transposed", (head,))]


def attributes(hub: Hub) -> dict[str, Any]:
    """Return the attributes of config.json that differ from those of a language model."""
    return {"architectures": [CLASSIFIERS[hub.architecture]], **ONE_LABEL}


def scores(model: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the score of each slot."""
    return model.reward(model.hidden(tokens, positions=positions).values)


def _is_unembedding(tensor: HFTensor) -> bool:
    return tensor.parts[0].path == "unembedding/weight"
