"""A model of somebody else made a run of ours: config, tokenizer and weights of a folder of Hugging Face, or of a GGUF."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlm.checkpoint import hub_architecture, hub_digests
from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.checkpoint.hub_download import PREFIX, Show, fetched
from jaxlm.checkpoint.hub_folder import Folder, Source
from jaxlm.checkpoint.hub_tensors import Fetch, HFTensor, Reader, layout
from jaxlm.checkpoint.hub_tokenizer_files import SENTENCEPIECE, read_tokenizer
from jaxlm.checkpoint.store import Store
from jaxlm.core import config, tree
from jaxlm.core.errors import CommandError, DataError
from jaxlm.data.hub_tokenizer import Imported
from jaxlm.data.tokenizer_file import LARGEST_FILE
from jaxlm.models.cost import model_cost
from jaxlm.models.families.union import EncoderDecoderFamily, EncoderFamily
from jaxlm.monitor import formatting
from jaxlm.objectives.config import Causal, Masked, Objective, Span
from jaxlm.parallel import host
from jaxlm.recipes import jax_setup, setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import vocabulary
from jaxlm.training.loop import Progress
from jaxlm.training.rundir import IMPORTED, RunDir

# A run directory whose weights came from elsewhere: as a whole, or to be made again.


def check_free(workdir: Path, flag: str, what: str) -> None:
    """Raises CommandError where a run is in the directory; what one that was killed while it was made has left is none."""
    has_steps = any((workdir / "checkpoints").glob("[0-9]*"))
    if (workdir / "config.json").exists() or (has_steps and not (workdir / IMPORTED).exists()):
        raise CommandError(
            "there is a run in this directory",
            where=f"{flag}={workdir}",
            why=f"{what} begins a run, and nothing is overwritten",
            fix=f"{flag}={workdir}-2",
        )


def write(
    directory: RunDir,
    run: Run,
    params: Any,
    tokenizer: bytes,
    facts: dict[str, Any],
    *,
    is_frugal: bool = False,
) -> None:
    """Commits the weights as step 0 of a run, of which nothing else is known. config.json, which makes it one, comes last.

    Raises:
      SaveFailed: where they cannot be written.
    """
    directory.write_json(IMPORTED, facts)
    directory.write_bytes("tokenizer", tokenizer)
    store = Store(
        directory.checkpoints,
        CheckpointConfig(),
        owner=directory.lock.fence,
        is_owner=directory.lock.is_owner,
        is_frugal=is_frugal,
    )
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


FOLDER = "hub"  # in a run that was imported: what came with the weights, as it was
# A tokenizer that tokenizer.json holds too.
VOCABULARIES = (*SENTENCEPIECE, "vocab.txt", "vocab.json", "merges.txt")
BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
LONGEST_ROW = 2048  # tokens of a row that an imported run reads, where its model can read more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is imported, and where to."""

    source: Path | str  # a folder, a GGUF, or hf:ORG/NAME[@REVISION] of the Hugging Face Hub
    workdir: Path
    overrides: Sequence[tuple[str, str]] = ()
    add_tokens: Sequence[str] = ()  # behind those of its tokenizer
    cpu_devices: int | None = None


def import_model(
    options: Options,
    say: Callable[[str], None] = lambda _: None,
    show: Show = lambda what, done, total: None,
) -> dict[str, Any]:
    """Makes a run directory whose checkpoint of step 0 has a model's weights, each tensor read straight to its shards.

    Everything that can be refused is, before the first number is read: an attribute of config.json that is not
    understood; a tensor that is missing, left over, of another shape or dtype; a file that has another sha256 than it must.
    Nothing is left at its initial value.
    What comes from the hub is fetched first, and `show` told how far each file is.

    Raises:
      JaxlmError: with the whole list told before.
    """
    check_free(options.workdir, "--workdir", "an import")
    folder, origin = _opened(options.source, say, show)
    family, dtype = hub_architecture.described(folder, say)
    tokenizer = read_tokenizer(folder, say)
    known, rows = tokenizer.size, family.vocab
    if known > rows:
        raise DataError(
            f"the tokenizer has {known:,} ids and the embedding {rows:,} rows",
            where=str(options.source),
            why="an id without a row cannot be read",
            fix="fetch the folder again where it came from: its tokenizer and its weights are not of one model",
        )
    tokenizer = vocabulary.add_tokens(tokenizer, options.add_tokens)
    run = _run(dataclasses.replace(family, vocab=max(rows, tokenizer.size)), options)
    decoder = run.model.build()
    hub = run.model.HUB
    theirs = dataclasses.replace(decoder, vocab=rows)
    tensors = hub_architecture.named(layout(theirs, hub), folder, hub)
    ignored = hub_architecture.compare(tensors, folder, hub, is_tied=decoder.tied)
    _verify(folder, say)
    jax_setup.start(options.cpu_devices)
    mesh = jax_setup.build_mesh(run.mesh)
    assembled = setup.build_sharded_model(run, decoder.vocab, mesh)
    with RunDir(options.workdir) as directory:
        with folder.opened() as fetch:
            head = hub_architecture.namer(folder, hub)(hub.head)
            if decoder.tied and head in ignored:
                hub_architecture.refuse_other_head(head, tensors, folder, fetch)
            mean_from = known if options.add_tokens else None
            params = load(tensors, fetch, setup.abstract_params(assembled), mean_from=mean_from)
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
        _keep(folder, tokenizer, place, is_extended=bool(options.add_tokens))
        facts = answer | {"source": origin}
        write(directory, run, params, tokenizer.serialise(), facts, is_frugal=True)
    hub_architecture.tell_ignored(ignored, folder, hub, say)
    if options.add_tokens:
        say(
            f"{tokenizer.size - known} tokens added; their rows are the mean of the {known:,} others"
        )
    say(f"{len(tensors)} tensors, {formatting.count(answer['parameters'])} parameters, {dtype}")
    return answer


def _opened(source: Path | str, say: Callable[[str], None], show: Show) -> tuple[Source, str]:
    """What is imported, and the name that is remembered of it."""
    if str(source).startswith(PREFIX):
        found = fetched(str(source), BESIDE, check=hub_architecture.family_of, say=say, show=show)
        return Folder(found.path), found.origin
    path = Path(source)
    return Gguf(path) if path.suffix == ".gguf" else Folder(path), path.name


def _verify(folder: Source, say: Callable[[str], None]) -> None:
    """Compares what is read with the sha256 that is known of it, and says of which files none is. Raises DataError."""
    files = folder.files(BESIDE)
    unknown = hub_digests.compare(files)
    if len(unknown) == len(files):
        say(
            f"nothing to compare with: no {hub_digests.NAME} says what the files must hold, so a bit that flipped on the way is not seen"
        )
        return
    without = f"; nothing says what must be in {', '.join(unknown)}" if unknown else ""
    say(f"compared by sha256: {len(files) - len(unknown)} of {len(files)} files{without}")


def load(
    tensors: list[HFTensor], fetch: Fetch, placed: Any, *, mean_from: int | None = None
) -> Any:
    """The parameters on the devices; ids from `mean_from` on have the mean of those before."""
    return tree.map_with_path(leaf_reader(tensors, fetch, mean_from=mean_from), placed)


def leaf_reader(
    tensors: list[HFTensor], fetch: Fetch, *, mean_from: int | None = None
) -> Callable[[str, jax.ShapeDtypeStruct], jax.Array]:
    """What reads a leaf to the devices, part by part, by its path and what it is like."""
    plain = Reader(tensors, fetch)
    reader = plain if mean_from is None else vocabulary.MeanInitRows(plain, mean_from)

    def leaf(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        dtype = np.dtype(like.dtype)
        return host.by_parts(
            like.shape, like.sharding, lambda within: reader.leaf(path, like.shape, within, dtype)
        )

    return leaf


def _run(family: Any, options: Options) -> Run:
    """The run: the family, the model's own tokenizer and rows that it can read; the rest as the command line says."""
    learnt: Objective = Causal()
    if isinstance(family, EncoderFamily):
        learnt = Masked()
    elif isinstance(family, EncoderDecoderFamily):
        learnt = Span()
    raw = {
        "model": config.to_json(family),
        "objective": config.to_json(learnt),
        "data": {
            "tokenizer": str(options.workdir / "tokenizer"),
            "sequence": min(family.context, LONGEST_ROW),
        },
    }
    return config.from_json(Run, raw, where=str(options.source), overrides=options.overrides)


def _keep(folder: Source, tokenizer: Imported, place: Path, *, is_extended: bool) -> None:
    """Copies what came with the weights, for an export, and the tokenizer.json where it was made of another form.

    A vocabulary to which tokens were added is in tokenizer.json alone.
    """
    place.mkdir(exist_ok=True)
    without = VOCABULARIES if is_extended else ()
    for name in BESIDE:
        if folder.has(name) and name not in without:
            (place / name).write_bytes(folder.read(name, LARGEST_FILE))
        else:  # of an import that was killed here
            (place / name).unlink(missing_ok=True)
    (place / "tokenizer.json").write_bytes(tokenizer.content)
