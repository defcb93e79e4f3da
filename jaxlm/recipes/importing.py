"""A model of somebody else made a run of ours: config, tokenizer and weights of a folder of Hugging Face, or of a GGUF."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from jaxlm.checkpoint import hub_digests
from jaxlm.checkpoint.gguf_source import Gguf
from jaxlm.checkpoint.hub_download import PREFIX, Show, fetched
from jaxlm.checkpoint.hub_folder import DTYPES, Folder, Source
from jaxlm.checkpoint.hub_tensors import Fetch, Reader, Theirs, layout
from jaxlm.core import config, tree
from jaxlm.core.errors import DataError
from jaxlm.data.hub_tokenizer import Imported
from jaxlm.data.tokenizer_file import LARGEST_FILE
from jaxlm.models import cost
from jaxlm.models.families.hub import Attributes, Hub
from jaxlm.models.families.union import EncoderDecoderFamily, EncoderFamily, Family
from jaxlm.monitor import words
from jaxlm.objectives.config import Causal, Masked, Objective, Span
from jaxlm.parallel import host
from jaxlm.recipes import adopted, assembly, devices, vocabulary
from jaxlm.recipes.config import Run
from jaxlm.recipes.import_tokenizer import SENTENCEPIECE, read_tokenizer
from jaxlm.train.rundir import RunDir

ARMS = {arm.HUB.model_type: arm for arm in get_args(Family)}
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
    adopted.check_free(options.workdir, "--workdir", "an import")
    folder, origin = _opened(options.source, say, show)
    family, dtype = described(folder, say)
    tokenizer = read_tokenizer(folder, say)
    known, rows = tokenizer.size, family.vocab
    if known > rows:
        raise DataError(
            f"the tokenizer has {known:,} ids and the embedding {rows:,} rows",
            where=str(options.source),
            why="an id without a row cannot be read",
            fix="fetch the folder again where it came from: its tokenizer and its weights are not of one model",
        )
    tokenizer = vocabulary.extended(tokenizer, options.add_tokens)
    run = _run(dataclasses.replace(family, vocab=max(rows, tokenizer.size)), options)
    decoder = run.model.build()
    hub = run.model.HUB
    theirs = dataclasses.replace(decoder, vocab=rows)
    tensors = named(layout(theirs, hub), folder, hub)
    ignored = compare(tensors, folder, hub, is_tied=decoder.tied)
    _verify(folder, say)
    devices.start(options.cpu_devices)
    mesh = devices.build_mesh(run.mesh)
    assembled = assembly.assemble(run, decoder.vocab, mesh)
    with RunDir(options.workdir) as directory:
        with folder.opened() as fetch:
            if decoder.tied and hub.head in ignored:
                _refuse_other_head(hub.head, tensors, folder, fetch)
            mean_from = known if options.add_tokens else None
            params = load(tensors, fetch, assembly.placed(assembled), mean_from=mean_from)
        answer: dict[str, Any] = {
            "workdir": str(options.workdir),
            "family": run.model.family,
            "parameters": cost.parameters(decoder),
            "tensors": len(tensors),
            "ignored": ignored,
            "dtype": dtype,
            "added_tokens": list(options.add_tokens),
        }
        place = directory.path / FOLDER
        _keep(folder, tokenizer, place, is_extended=bool(options.add_tokens))
        facts = answer | {"source": origin}
        adopted.write(directory, run, params, tokenizer.serialise(), facts, is_frugal=True)
    _tell_ignored(ignored, folder, hub, say)
    if options.add_tokens:
        say(
            f"{tokenizer.size - known} tokens added; their rows are the mean of the {known:,} others"
        )
    say(f"{len(tensors)} tensors, {words.count(answer['parameters'])} parameters, {dtype}")
    return answer


def described(folder: Source, say: Callable[[str], None]) -> tuple[Any, str]:
    """The family with its sizes, and the dtype of its matrices: float32 where they have several, which holds all of them.

    Raises:
      DataError: where there is no such family here, or an attribute is not understood.
    """
    raw = folder.config
    family = _family(raw, str(folder.path / "config.json"))
    if raw.get("auto_map"):
        say(
            "the folder names code of its own (auto_map), which is never run: the model is built from our own parts"
        )
    found = {dtype for dtype, shape in folder.tensors().values() if len(shape) > 1}
    stored = found & DTYPES.keys()  # GPT-2's has masks of bytes beside
    dtype = DTYPES.get("".join(stored), DTYPES["F32"]).name
    claimed = raw.get("dtype") or raw.get("torch_dtype") or dtype
    if claimed != dtype:
        held = " and ".join(sorted(stored))
        say(
            f"config.json says {claimed!r:.40}, and the matrices are {held}: an export will be in {dtype}"
        )
    return family, dtype


def _family(raw: dict[str, Any], where: str) -> Any:
    """What a config.json describes, checked as a config of ours. Raises DataError."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARMS:
        raise DataError(
            f"models of the type {kind!r:.60} are not known",
            where=where,
            why=f"known are {', '.join(sorted(ARMS))}",
            fix="--from=DIR    # a model of one of these types",
        )
    given = Attributes(raw, where)
    family = ARMS[kind].from_hub(given)
    given.finish()
    return config.from_json(ARMS[kind], config.to_json(family), where=where)


def _opened(source: Path | str, say: Callable[[str], None], show: Show) -> tuple[Source, str]:
    """What is imported, and the name that is remembered of it."""
    if str(source).startswith(PREFIX):
        found = fetched(str(source), BESIDE, check=_family, say=say, show=show)
        return Folder(found.path), found.origin
    path = Path(source)
    return Gguf(path) if path.suffix == ".gguf" else Folder(path), path.name


def named(tensors: list[Theirs], folder: Source, hub: Hub) -> list[Theirs]:
    """The tensors by the names that the folder uses, which may be older ones, or leave out what is optional in front."""
    there = folder.tensors()
    is_short = not any(name.startswith(hub.optional) for name in there)

    def name(ours: str) -> str:
        ours = ours.removeprefix(hub.optional) if is_short else ours
        for old, new in hub.older:
            if ours not in there and ours.endswith(new):
                ours = ours.removesuffix(new) + old
        return ours

    return [dataclasses.replace(each, name=name(each.name)) for each in tensors]


def compare(
    tensors: list[Theirs],
    folder: Source,
    hub: Hub,
    *,
    is_tied: bool,
) -> list[str]:
    """The tensors of the folder that need not be read.

    Raises:
      DataError: where one is missing, left over, or of another shape or dtype; all of them are told.
    """
    there, wanted = folder.tensors(), {each.name: each.shape for each in tensors}
    again = (*hub.buffers, hub.head) if is_tied else hub.buffers
    left = there.keys() - wanted.keys()
    others = (*hub.others, *hub.layers_ahead(folder.config))
    ignored = sorted(name for name in left if name.endswith(again) or name.startswith(others))
    problems = [f"missing     {name} {list(wanted[name])}" for name in wanted if name not in there]
    problems += [f"unexpected  {name}" for name in sorted(left - set(ignored))]
    for name, shape in wanted.items():
        dtype, found = there.get(name, ("F32", shape))
        if found != shape:
            problems.append(f"shape       {name}: got {list(found)}, want {list(shape)}")
        if dtype not in DTYPES:
            problems.append(f"dtype       {name}: got {dtype}, want {', '.join(DTYPES)}")
    if problems:
        raise DataError(
            f"{len(problems)} tensors of the folder do not fit the model of its config.json",
            where=str(folder.path),
            why="every one must be there, of the shape that it has there, and no other",
            every=problems,
            fix="fetch the folder again where it came from\nsave it again with transformers",
        )
    return ignored


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


def _tell_ignored(ignored: list[str], folder: Source, hub: Hub, say: Callable[[str], None]) -> None:
    """Every tensor that was not read, and why; those of a layer that predicts further tokens by their number."""
    for layer in hub.layers_ahead(folder.config):
        count = sum(name.startswith(layer) for name in ignored)
        if count:
            say(
                f"not read: {count} tensors of {layer}*, a layer that predicts a token beyond the next, which "
                f"{hub.architecture} does not compute; objective.name=mtp trains such heads from their start"
            )
    for name in ignored:
        if not name.startswith(hub.layers_ahead(folder.config)):
            is_other = name.startswith(hub.others)
            why = f"{hub.architecture} has no such part" if is_other else "it can be computed again"
            say(f"not read, as {why}: {name}")


def _refuse_other_head(name: str, tensors: list[Theirs], folder: Source, fetch: Fetch) -> None:
    """A head that is stored although the model is tied must be the embedding itself, of which a part is compared at a time."""
    table = next(each for each in tensors if each.parts[0].path == "embedding/table")
    shape = folder.tensors()[name][1]
    for first in range(0, shape[0], 4096):
        cut = (slice(first, min(first + 4096, shape[0])), slice(0, shape[1]))
        if shape != table.shape or not np.array_equal(fetch(name, cut), fetch(table.name, cut)):
            raise DataError(
                f"{name} is another matrix than the embedding",
                where=str(folder.path),
                why="config.json says tie_word_embeddings, and one of the two would be lost",
                fix='"tie_word_embeddings": false in config.json keeps both',
            )


def load(tensors: list[Theirs], fetch: Fetch, placed: Any, *, mean_from: int | None = None) -> Any:
    """The parameters on the devices, each leaf part by part; ids from `mean_from` on have the mean of those before."""
    plain = Reader(tensors, fetch)
    reader = plain if mean_from is None else vocabulary.Extended(plain, mean_from)

    def leaf(path: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        dtype = np.dtype(like.dtype)
        return host.by_parts(
            like.shape, like.sharding, lambda within: reader.leaf(path, like.shape, within, dtype)
        )

    return tree.map_with_path(leaf, placed)


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
