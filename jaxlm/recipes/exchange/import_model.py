"""Make a run of a Hugging Face folder or a GGUF: its config, tokenizer and weights."""

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint import hub_architecture, hub_digests
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.checkpoint.hub_download import fetch_model
from jaxlm.checkpoint.hub_folder import Folder, ModelSource
from jaxlm.checkpoint.hub_tensors import Fetch, HFTensor, Reader, Slices, layout
from jaxlm.checkpoint.hub_tokenizer_files import SENTENCEPIECE, read_tokenizer
from jaxlm.checkpoint.quantized_folder import QuantizedFolder, open_quantized
from jaxlm.checkpoint.store import Store, StoreWriter
from jaxlm.core import config, disk, tree
from jaxlm.core.callbacks import Log, OnProgress
from jaxlm.core.errors import CommandError, ConfigError, DataError
from jaxlm.core.hub import PREFIX
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.data.hub_tokenizer import ImportedTokenizer
from jaxlm.data.tokenizer_file import MAX_FILE_BYTES
from jaxlm.models.cost import model_cost
from jaxlm.models.families.union import EncoderDecoderFamily, EncoderFamily
from jaxlm.monitor import formatting
from jaxlm.objectives.config import Causal, Masked, Objective, Span
from jaxlm.optim.average_config import NoAverage
from jaxlm.parallel import host
from jaxlm.parallel import mesh as meshes
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import quantized_tensors
from jaxlm.training.loop import Progress
from jaxlm.training.rundir import IMPORTED, RunDir
from jaxlm.tune import surgery

FOLDER = "hub"  # of an imported run: unchanged files that came with the weights
# Files of a tokenizer that tokenizer.json contains too.
VOCABULARIES = (*SENTENCEPIECE, "vocab.txt", "vocab.json", "merges.txt")
COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MAX_SEQUENCE = 2048  # sequence length of an imported run whose model could read longer rows
# Axis of the vocabulary of each leaf that has one.
VOCAB_AXES = {"embedding/table": 0, "unembedding/weight": 1, "head/bias": 0}
CHUNK = 4096  # rows read at a time for a mean


def check_free(workdir: Path, flag: str, what: str) -> None:
    """Raise CommandError if the directory contains a run; leftovers of a killed import are none."""
    has_steps = any((workdir / "checkpoints").glob("[0-9]*"))
    if (workdir / "config.json").exists() or (has_steps and not (workdir / IMPORTED).exists()):
        where, why = f"{flag}={workdir}", f"{what} needs an empty directory"
        exists = "the directory already contains a run"
        raise CommandError(exists, where=where, why=why, fix=shlex.quote(f"{where}-2"))


def write(
    directory: RunDir,
    run: Run,
    params: Any,
    tokenizer: bytes,
    facts: dict[str, Any],
    *,
    low_memory: bool = False,
) -> None:
    """Commit the weights as step 0 of a run; config.json, which makes it a run, is written last.

    The run stores no average of the weights, and its config names none.

    Raises SaveFailed if the checkpoint cannot be written.

    Args:
      directory: the run directory.
      run: the config.
      params: the weights.
      tokenizer: bytes of the tokenizer file.
      facts: contents of the file that marks a run whose weights were not trained in it; `status`
        is how they were made, "imported" by default.
      low_memory: if the checkpoint is written with little memory.
    """
    run = dataclasses.replace(run, average=NoAverage())
    directory.write_json(IMPORTED, facts)
    directory.write_bytes("tokenizer", tokenizer)
    writer = StoreWriter(owner=directory.lock.fence, is_owner=directory.lock.is_owner)
    store = Store(directory.checkpoints, CheckpointConfig(), writer=writer, low_memory=low_memory)
    for step in store.steps():
        store.quarantine(step, "committed by a command that was killed before config.json")
    meta = {
        "step": 0,
        "finished": False,
        "config": config.to_json(run),
        "data": {},
        "progress": dataclasses.asdict(Progress()),
        "evaluation": None,
        "rewinds": [],
    }
    store.save(0, {"params": params}, meta)
    store.close()
    directory.write_json("config.json", config.to_json(run))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The model to import and the new run directory."""

    source: Path | str  # a folder, a GGUF, or hf:ORG/NAME[@REVISION] of the Hugging Face Hub
    workdir: Path
    overrides: Sequence[tuple[str, str]] = ()
    add_tokens: Sequence[str] = ()  # after those of its tokenizer
    cpu_devices: int | None = None


def import_model(
    options: ImportOptions,
    say: Log = lambda _: None,
    show: OnProgress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Make a run whose step 0 has a model's weights; each tensor is read straight to its shards.

    Before the first number is read, everything that can be wrong is checked: unknown attributes of
    config.json; tensors that are missing, left over, or of another shape or dtype; wrong sha256.
    Every parameter is loaded. Files of the hub are downloaded first; `show` receives their
    progress. Raises JaxlmError with the whole list of problems.
    """
    check_free(options.workdir, "--workdir", "an import")
    folder, origin = _open_source(options.source, say, show)
    family, dtype = hub_architecture.read_family(folder, say)
    tokenizer = read_tokenizer(folder, say)
    known, rows = tokenizer.size, family.vocab
    if known > rows:
        what = f"the tokenizer has {known:,} ids and the embedding {rows:,} rows"
        why = "an id without a row cannot be read"
        fix = "download the folder again: its tokenizer and its weights are of different models"
        raise DataError(what, where=str(options.source), why=why, fix=fix)
    tokenizer = add_tokens(tokenizer, options.add_tokens)
    run = _run(dataclasses.replace(family, vocab=max(rows, tokenizer.size)), options)
    decoder = run.model.build()
    hub = run.model.HUB
    theirs = dataclasses.replace(decoder, vocab=rows)
    tensors = hub_architecture.in_folder_names(layout(theirs, hub), folder, hub)
    tune, why = quantized_tensors.kept_format(folder, tensors)
    ignored = hub_architecture.compare(tensors, folder, hub, is_tied=decoder.tied)
    _verify(folder, say)
    setup.start(options.cpu_devices)
    mesh = meshes.build(run.mesh)
    assembled = setup.build_sharded_model(run, decoder.vocab, mesh)
    if tune is not None:
        try:
            stored = dataclasses.replace(run, tune=tune)
            assembled = setup.build_sharded_model(stored, decoder.vocab, mesh)
            run = stored
        except ConfigError as error:  # experts, or a head
            tune, why = None, error.why
    if isinstance(folder, QuantizedFolder):
        count = f"{len(folder.matrices)} matrices of {folder.method}"
        say(f"{count}: the same codes" if tune else f"{count}: dequantized, as {why}")
        if folder.rounds_inputs and (tune is None or tune.base not in ("w8a8", "w4a8")):
            say("its products round their inputs in other programs; here they do not")
    layers = surgery.quantized_weights(assembled.blueprint)
    read = quantized_tensors.leaf_tensors(tensors, layers)
    with RunDir(options.workdir) as directory:
        with folder.opened() as fetch:
            head = hub_architecture.namer(folder, hub)(hub.head_name)
            if decoder.tied and head in ignored:
                hub_architecture.check_tied_head(head, tensors, folder, fetch)
            mean_from = known if options.add_tokens else None
            params = load(read, fetch, setup.abstract_params(assembled), mean_from=mean_from)
        answer: dict[str, Any] = {
            "workdir": str(options.workdir),
            "family": run.model.family,
            "parameters": model_cost.parameters(decoder),
            "tensors": len(tensors),
            "ignored": ignored,
            "dtype": dtype,
            "added_tokens": list(options.add_tokens),
        }
        place = directory.path / FOLDER
        _copy_files(folder, tokenizer, place, is_extended=bool(options.add_tokens))
        facts = answer | {"source": origin}
        write(directory, run, params, tokenizer.serialize(), facts, low_memory=True)
    hub_architecture.log_ignored(ignored, folder, hub, say)
    if options.add_tokens:
        added = tokenizer.size - known
        say(f"{added} tokens added; their rows are the mean of the {known:,} others")
    say(f"{len(tensors)} tensors, {formatting.count(answer['parameters'])} parameters, {dtype}")
    if dtype != run.precision.compute == "float32":
        flag = f"--config.precision.compute={dtype}"
        say(f"the run computes in float32; {flag} computes in the dtype of the files")
    return answer


def _open_source(source: Path | str, say: Log, show: OnProgress) -> tuple[ModelSource, str]:
    """Open the source; returns it and the name to record."""
    if str(source).startswith(PREFIX):
        check = hub_architecture.family_of
        download = fetch_model(str(source), COMPANION_FILES, check=check, say=say, show=show)
        return open_quantized(Folder(download.path)), download.origin
    path = Path(source)
    if path.suffix == ".gguf":
        return Gguf(path), path.name
    return open_quantized(Folder(path)), path.name


def _verify(folder: ModelSource, say: Log) -> None:
    """Compare the files with their published sha256 and log those without one. Raises DataError."""
    files = folder.files(COMPANION_FILES)
    unknown = hub_digests.compare(files)
    if len(unknown) == len(files):
        say(f"no sha256 to compare with: without {hub_digests.NAME} a flipped bit goes unnoticed")
        return
    without = f"; no sha256 is known of {', '.join(unknown)}" if unknown else ""
    say(f"compared by sha256: {len(files) - len(unknown)} of {len(files)} files{without}")


def load(
    tensors: list[HFTensor], fetch: Fetch, abstract: Any, *, mean_from: int | None = None
) -> Any:
    """Return the parameters on the devices; ids from `mean_from` on have the mean of the others."""
    return tree.map_with_path(leaf_reader(tensors, fetch, mean_from=mean_from), abstract)


def leaf_reader(
    tensors: list[HFTensor], fetch: Fetch, *, mean_from: int | None = None
) -> Callable[[str, jax.ShapeDtypeStruct], jax.Array]:
    """Return a function that reads a leaf to the devices, shard by shard, by path and shape."""
    plain = Reader(tensors, fetch)
    reader = plain if mean_from is None else MeanInitRows(plain, mean_from)

    def leaf(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        def part(within: Slices) -> np.ndarray:
            return reader.leaf(path, like.shape, within, np.dtype(like.dtype))

        return host.by_parts(like.shape, like.sharding, part)

    return leaf


def _run(family: Any, options: ImportOptions) -> Run:
    """Return the run: the family, the model's tokenizer and sequence length, and the overrides."""
    objective: Objective = Causal()
    if isinstance(family, EncoderFamily):
        objective = Masked()
    elif isinstance(family, EncoderDecoderFamily):
        objective = Span()
    sequence = min(family.max_positions, MAX_SEQUENCE)
    data = {"tokenizer": str(options.workdir / "tokenizer"), "sequence": sequence}
    raw = {"model": config.to_json(family), "objective": config.to_json(objective), "data": data}
    return config.from_json(Run, raw, where=str(options.source), overrides=options.overrides)


def _copy_files(
    folder: ModelSource, tokenizer: ImportedTokenizer, target: Path, *, is_extended: bool
) -> None:
    """Copy the files that came with the weights, for an export, and write tokenizer.json.

    If tokens were added, the vocabulary is in tokenizer.json alone.
    """
    target.mkdir(exist_ok=True)
    without = VOCABULARIES if is_extended else ()
    for name in COMPANION_FILES:
        if folder.has(name) and name not in without:
            (target / name).write_bytes(folder.read(name, MAX_FILE_BYTES))
        else:  # left by an import that was killed here
            (target / name).unlink(missing_ok=True)
    (target / "tokenizer.json").write_bytes(tokenizer.content)


def add_tokens(tokenizer: ImportedTokenizer, tokens: Sequence[str]) -> ImportedTokenizer:
    """Return the tokenizer with `tokens` added, which are matched first. Raises CommandError."""
    if not tokens:
        return tokenizer
    import tokenizers

    built = tokenizers.Tokenizer.from_buffer(tokenizer.content)
    for number, token in enumerate(tokens):
        if not token or token in tokens[:number] or built.token_to_id(token) is not None:
            why = "the tokenizer has it, or the command names it twice" if token else "it is empty"
            what, where = f"{token!r} is not a new token", f"--add_token={token}"
            raise CommandError(what, where=where, why=why, fix="leave it out")
    built.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    around = {name: getattr(tokenizer, name) for name in ("before", "after", "ends")}
    return ImportedTokenizer(built.to_str().encode(), **around, where="--add_token")


@dataclasses.dataclass
class MeanInitRows:
    """Reads leaves like `Reader`; rows of ids from `known` on are the mean of the rows before.

    These include rows of the embedding that have no id in the tokenizer. The mean is taken in
    float64, over a part of the rows at a time, and rounded once.

    Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models".
    """

    reader: Reader
    known: int

    def __post_init__(self) -> None:
        self._means: dict[str, np.ndarray] = {}

    def leaf(
        self, path: str, shape: tuple[int, ...], within: Slices, dtype: np.dtype
    ) -> np.ndarray:
        """Return the part `within` a leaf."""
        if path not in VOCAB_AXES:
            return self.reader.leaf(path, shape, within, dtype)
        axis = VOCAB_AXES[path]
        cuts = [slice(*cut.indices(size)[:2]) for cut, size in zip(within, shape, strict=True)]
        first, stop = cuts[axis].start, cuts[axis].stop
        read = max(first, min(stop, self.known))
        mean = self._mean(path, shape, dtype)[(*cuts[:axis], *cuts[axis + 1 :])]
        size = [cut.stop - cut.start for cut in cuts]
        size[axis] = stop - read
        new = np.broadcast_to(np.expand_dims(mean, axis), size)
        if read == first:
            return np.ascontiguousarray(new)
        cuts[axis] = slice(first, read)
        return np.concatenate((self.reader.leaf(path, shape, tuple(cuts), dtype), new), axis)

    def _mean(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if path not in self._means:
            axis = VOCAB_AXES[path]
            total = np.zeros((*shape[:axis], *shape[axis + 1 :]))
            cuts = [slice(0, size) for size in shape]
            for first in range(0, self.known, CHUNK):
                cuts[axis] = slice(first, min(first + CHUNK, self.known))
                part = self.reader.leaf(path, shape, tuple(cuts), np.dtype(np.float32))
                total = total + part.sum(axis, dtype=np.float64)
            self._means[path] = (total / self.known).astype(dtype)
        return self._means[path]


def copy_hub_files(source: Path, directory: RunDir) -> None:
    """Copy the files of an imported model, such as its chat template, for exports of this run."""
    directory.copy_folder(source / FOLDER, FOLDER)


def keep_template(template: ChatTemplate, workdir: Path, warn: Log) -> None:
    """Write the template of the conversations, for generation and exports of this run."""
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    known = chat_templates.of_folder(folder)
    if known is not None and chat_templates.dated(known) != template.source:
        warn(f"the chat template, {template.where}, differs from that of the model: {known.where}")
    for name, content in chat_templates.keep(template, folder).items():
        disk.replace(folder / name, content)
