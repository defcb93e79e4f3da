"""A run's model as one file of llama.cpp's, a GGUF."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxlm.checkpoint import gguf_config, hub_architecture
from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.checkpoint.gguf_writer import Plan, library
from jaxlm.checkpoint.hub_folder import write_json
from jaxlm.core.errors import ConfigError, DataError
from jaxlm.data import tokenizer_json
from jaxlm.data.tokenizer import Tokenizer
from jaxlm.data.vocabularies import gguf_written
from jaxlm.data.vocabularies.gguf_tokens import OWN
from jaxlm.models.families.hub import IGNORED_ATTRIBUTES
from jaxlm.recipes.exchange.parity import ExportedParams, ExportJob
from jaxlm.recipes.use.chat import template_source


class GgufForm:
    """Matrices, vectors in float32, the tokenizer, the chat template; beside the file, how it compares with the run.

    Raises:
      InputMissing: where the package that writes is not installed.
      ConfigError: where llama.cpp computes no such model, or has no such tokenizer.
    """

    def __init__(self, job: ExportJob):
        library(job.workdir)
        self._job = job
        attributes = job.family.to_hub() | {"model_type": job.family.HUB.model_type}
        try:
            self._plan = Plan(attributes, job.tensors, job.dtype)
        except ValueError as error:
            raise _uncomputed(str(error)) from error
        _refuse_lost(attributes, self._plan)
        tokenizer = job.opened.tokenizer
        content = tokenizer_json.as_json(tokenizer)
        if content is None:
            raise ConfigError(
                "the tokenizer cannot be written in a GGUF",
                where=str(job.workdir),
                why="its ids are moved up behind jaxlm's special tokens, and no tokenizer.json gives the same",
                fix="--to=hf    # a folder, without a tokenizer",
            )
        rows = attributes["vocab_size"]
        self._tokenizer = gguf_written.metadata(content, rows, str(job.workdir)) | _named(tokenizer)
        if (template := template_source(job.workdir)[0]) is not None:
            self._tokenizer["tokenizer.chat_template"] = template

    def write(self, place: Path) -> int:
        """Makes the file, and says that it is one. Raises OSError."""
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        title = self._job.workdir.resolve().name
        self._plan.write(place, self._job.array, self._tokenizer, title)
        return 1

    def read(self, place: Path) -> Gguf:
        """What was written."""
        return Gguf(place)

    @property
    def held(self) -> ExportedParams:
        """Vectors whole, matrices rounded to the file's dtype."""
        return self._plan.held()

    def finish(self, place: Path, answer: dict[str, Any]) -> None:
        """Says beside the file how it compares with the run."""
        write_json(Path(answer["out"]).with_suffix(".parity.json"), answer["parity"])


def _refuse_lost(attributes: dict[str, Any], plan: Plan) -> None:
    """Raises ConfigError where the file cannot say all of the model."""
    try:
        back = hub_architecture.family_of(plan.read_back(), "GGUF").to_hub()
    except DataError as error:
        raise _uncomputed(error.why) from error
    if plan.frequencies is not None:  # by which the scaling is known, and by nothing else
        found = gguf_config.frequencies(back)
        if found is not None and np.allclose(found, plan.frequencies, rtol=1e-5):
            back["rope_scaling"] = attributes["rope_scaling"]
    lost = [
        f"{name} = {attributes[name]!r}, and a reader of the file takes {back.get(name)!r}"
        for name in sorted(attributes.keys() - IGNORED_ATTRIBUTES)
        if attributes[name] != back.get(name)
    ]
    if lost:
        raise _uncomputed("; ".join(lost))


def _named(tokenizer: Tokenizer) -> dict[str, Any]:
    """Ids that begin and end documents, and those that end an answer."""
    later = [number for number in tokenizer.ends if number != tokenizer.eos]
    named = {
        "bos": tokenizer.before[0] if tokenizer.before else None,
        "eos": tokenizer.eos,
        "eot": later[0] if later else None,
        "eom": later[1] if later[1:] else None,
        "unknown": tokenizer.unk,
        "padding": tokenizer.pad,
    }
    return {
        f"{OWN}{name}_token_id": number for name, number in named.items() if number is not None
    } | {
        f"{OWN}add_bos_token": bool(tokenizer.before),
        f"{OWN}add_eos_token": False,
    }


def _uncomputed(why: str) -> ConfigError:
    return ConfigError(
        "no GGUF holds this model",
        where="model",
        why=why,
        fix="--to=hf    # a folder of transformers, which llama.cpp's converter may know",
    )
