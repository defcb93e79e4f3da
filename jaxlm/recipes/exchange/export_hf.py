"""Export of a run's model to a Hugging Face folder, as transformers saves one."""

import shutil
from pathlib import Path
from typing import Any

from jaxlm.checkpoint import hub_digests
from jaxlm.checkpoint.hub_folder import Folder, write_json, write_tensors
from jaxlm.checkpoint.hub_tensors import round_to_dtype
from jaxlm.data import tokenizer_json
from jaxlm.data.hub_tokenizer import Imported
from jaxlm.models.families.hub import uncomputed
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.exchange.parity import ExportedParams, ExportJob
from jaxlm.recipes.use.load import LoadedRun

GENERATION = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class HFExport:
    """config.json, safetensors, tokenizer, chat template, model card, and the sha256 of each file.

    Raises:
      ConfigError: if the tokenizer and the model use different padding ids.
    """

    def __init__(self, job: ExportJob):
        self._job = job
        self._attributes = _attributes(job.family, job.dtype.name, job.opened)

    def write(self, place: Path) -> int:
        """Write the folder; returns the number of tensor files. Raises OSError, NotWritable."""
        job = self._job
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        write_json(place / "config.json", self._attributes)
        self._write_companions(place)
        files = write_tensors(place, job.tensors, job.array, job.dtype, shard_bytes=job.shard_bytes)
        return len(set(files.values()))

    def read(self, place: Path) -> Folder:
        """Open the written folder."""
        return Folder(place)

    @property
    def held(self) -> ExportedParams:
        """Return the rounding of each leaf; some leaves are float32 in every folder."""
        return {
            part.path: round_to_dtype(each.kept(self._job.dtype))
            for each in self._job.tensors
            for part in each.parts
        }

    def finish(self, place: Path, answer: dict[str, Any]) -> None:
        """Add the parity report, the model card and the digests."""
        write_json(place / "parity.json", answer["parity"])
        (place / "README.md").write_text(_card(answer, self._job.opened))
        hub_digests.write(place)

    def _write_companions(self, place: Path) -> None:
        """Write the tokenizer, files of an imported model, and generation_config.json."""
        tokenizer = self._job.opened.tokenizer
        ids = {
            name: id_
            for name, id_ in self._attributes.items()
            if name in GENERATION and id_ is not None
        }
        if len(ends := tokenizer.ends) > 1:
            ids["eos_token_id"] = list(ends)
        write_json(place / "generation_config.json", ids)
        hub_folder = self._job.workdir / import_model.FOLDER
        if hub_folder.is_dir():
            for name in import_model.COMPANION_FILES:
                if name != "config.json" and (hub_folder / name).is_file():
                    shutil.copyfile(hub_folder / name, place / name)
            return
        content = tokenizer_json.as_json(tokenizer)
        if content is None:
            self._job.say(
                "the tokenizer is not exported: it uses jaxlm's names of special tokens, "
                "and its ids start after jaxlm's special tokens"
            )
            return
        (place / "tokenizer.json").write_bytes(content)
        write_json(place / "tokenizer_config.json", tokenizer_json.settings(tokenizer))


def _attributes(family: Any, dtype: str, opened: LoadedRun) -> dict[str, Any]:
    tokenizer, attributes = opened.tokenizer, family.to_hub()
    pad = attributes.get("pad_token_id", tokenizer.pad)
    if pad != tokenizer.pad and not isinstance(tokenizer, Imported):
        # transformers derives positions from the padding id.
        raise uncomputed(family.HUB, f"padding = {pad}, the tokenizer pads with {tokenizer.pad}")
    return attributes | {
        "architectures": [family.HUB.architecture],
        "model_type": family.HUB.model_type,
        "torch_dtype": dtype,
        "bos_token_id": tokenizer.before[0] if tokenizer.before else None,
        "eos_token_id": tokenizer.eos,
        "pad_token_id": pad,
    }


def _card(answer: dict[str, Any], opened: LoadedRun) -> str:
    run, parity = opened.run, answer["parity"]
    return f"""---
library_name: transformers
---
# {answer["architecture"]} by jaxlm

{answer["parameters"]:,} parameters, {answer["dtype"]}; step {answer["step"]} of a run
of {run.train.steps} steps of {run.tokens_per_step:,} tokens, sequence length {run.data.sequence},
seed {run.seed}, {run.optim.name} at {run.optim.lr:g}.

Read back after writing: on {parity["tokens"]} tokens of real text the logits differ by at most
{parity["largest_difference"]:.3g}; rounding to {parity["dtype"]} changed them
by {parity["largest_difference_by_rounding"]:.3g}.
"""
