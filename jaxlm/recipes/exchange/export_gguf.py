"""Export of a run's model to a GGUF of llama.cpp."""

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
from jaxlm.recipes.use.generate import template_source


class GGUFExport:
    """A GGUF: matrices, float32 vectors, tokenizer and chat template; a parity report next to it.

    Raises:
      InputMissing: if the gguf package is not installed.
      ConfigError: if llama.cpp does not support the model or the tokenizer.
    """

    def __init__(self, job: ExportJob):
        library(job.workdir)
        self._job = job
        attributes = job.family.to_hub() | {"model_type": job.family.HUB.model_type}
        try:
            self._plan = Plan(attributes, job.tensors, job.dtype)
        except ValueError as error:
            raise _unsupported(str(error)) from error
        _refuse_lost(attributes, self._plan)
        tokenizer = job.opened.tokenizer
        content = tokenizer_json.as_json(tokenizer)
        if content is None:
            raise ConfigError(
                "the tokenizer cannot be written to a GGUF",
                where=str(job.workdir),
                why="its ids start after jaxlm's special tokens; no tokenizer.json gives those ids",
                fix="--to=hf    # a folder, without a tokenizer",
            )
        rows = attributes["vocab_size"]
        self._tokenizer = gguf_written.metadata(content, rows, str(job.workdir)) | _special_ids(
            tokenizer
        )
        if (template := template_source(job.workdir)[0]) is not None:
            self._tokenizer["tokenizer.chat_template"] = template

    def write(self, place: Path) -> int:
        """Write the file; returns the number of files, 1. Raises OSError."""
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        title = self._job.workdir.resolve().name
        self._plan.write(place, self._job.array, self._tokenizer, title)
        return 1

    def read(self, place: Path) -> Gguf:
        """Open the written file."""
        return Gguf(place)

    @property
    def held(self) -> ExportedParams:
        """Return the rounding of each leaf: vectors whole, matrices in the file's dtype."""
        return self._plan.held()

    def finish(self, place: Path, answer: dict[str, Any]) -> None:
        """Write the parity report next to the file."""
        write_json(Path(answer["out"]).with_suffix(".parity.json"), answer["parity"])


def _refuse_lost(attributes: dict[str, Any], plan: Plan) -> None:
    """Raise ConfigError if the file cannot represent all attributes of the model."""
    try:
        back = hub_architecture.family_of(plan.read_back(), "GGUF").to_hub()
    except DataError as error:
        raise _unsupported(error.why) from error
    if plan.frequencies is not None:  # the file stores rope_scaling as these frequencies alone
        frequencies = gguf_config.frequencies(back)
        if frequencies is not None and np.allclose(frequencies, plan.frequencies, rtol=1e-5):
            back["rope_scaling"] = attributes["rope_scaling"]
    lost = [
        f"{name} = {attributes[name]!r} is read back as {back.get(name)!r}"
        for name in sorted(attributes.keys() - IGNORED_ATTRIBUTES)
        if attributes[name] != back.get(name)
    ]
    if lost:
        raise _unsupported("; ".join(lost))


def _special_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids that begin and end documents and answers."""
    later = [id_ for id_ in tokenizer.ends if id_ != tokenizer.eos]
    ids = {
        "bos": tokenizer.before[0] if tokenizer.before else None,
        "eos": tokenizer.eos,
        "eot": later[0] if later else None,
        "eom": later[1] if later[1:] else None,
        "unknown": tokenizer.unk,
        "padding": tokenizer.pad,
    }
    return {f"{OWN}{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None} | {
        f"{OWN}add_bos_token": bool(tokenizer.before),
        f"{OWN}add_eos_token": False,
    }


def _unsupported(why: str) -> ConfigError:
    return ConfigError(
        "a GGUF cannot hold this model",
        where="model",
        why=why,
        fix="--to=hf    # a transformers folder, which llama.cpp's converter may support",
    )
