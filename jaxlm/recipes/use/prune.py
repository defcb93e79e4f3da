"""Build a smaller run from some layers of another, with the loss that each layer is worth."""

import dataclasses
import functools
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, ConfigError
from jaxlm.data.loader import Loader
from jaxlm.evals import loss
from jaxlm.models.build import Blueprint
from jaxlm.models.config import BackboneConfig
from jaxlm.parallel import host
from jaxlm.recipes import setup
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.exchange.import_model import copy_hub_files
from jaxlm.recipes.train import resume
from jaxlm.recipes.use import evaluate, load
from jaxlm.recipes.use.load import LoadedRun
from jaxlm.training.rundir import RunDir

RULE = re.compile(r"(even|harm):(\d+)")  # number of layers, at even distances or of most harm
LAYER = re.compile(r"(prefix|stack)/(\d+)/(.+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """The layers that are kept, and the rows that their harm is measured on."""

    workdir: Path
    out: Path
    keep: str  # numbers from 0, as 0,2,4; even:N or harm:N
    batches: int = 16  # of the first set
    text: tuple[str, ...] = ()  # globs; () means the validation sets


def prune(options: PruneOptions, say: Log = lambda _: None, **selection: Any) -> dict[str, Any]:
    """Write a run whose step 0 has some layers of another run, and all its other weights.

    The harm of a layer is the loss without it minus the loss, in nats. `selection` are `step`,
    `best`, `weights` and `cpu_devices` of `load.load_run`.

    Raises:
      CommandError: if `out` has a run, or `keep` is no list of layers.
      ConfigError: if the run is no plain decoder of text, there is no text to measure on, or its
        family has no model of these layers.
    """
    import_model.check_free(options.out, "--out", "a smaller run")
    numbers = _numbers(options.keep)
    opened = load.load_run(options.workdir, check=_check_decoder, say=say, **selection)
    config: Any = opened.model.blueprint.config
    depth = config.depth
    if rule := RULE.fullmatch(options.keep):
        numbers = [*range(int(rule[2]))]
    _check(numbers, depth, options.keep)
    if rule:
        numbers = even(len(numbers), depth)
    loaders = evaluate.open_loaders(opened, options.text, opened.run.data.sequence, say)
    evaluate.check_texts(opened, loaders)
    loader = next(iter(loaders.values()))
    measure = functools.partial(_losses, opened, loader, options.batches)
    with jax.set_mesh(opened.model.mesh):
        whole = [*range(depth)]
        before = next(measure([whole]))
        without = [[*whole[:each], *whole[each + 1 :]] for each in whole] if depth > 1 else []
        say(f"the loss without each of {len(without)} layers")
        harm = [after - before for after in measure(without)]
        if rule and rule[1] == "harm" and harm:
            worst = sorted(whole, key=lambda number: -harm[number])
            numbers = sorted(worst[: len(numbers)])
        run = _student(opened.run, config, numbers, options)
        after = next(measure([numbers]))
        student: Any = run.decoder(config.vocab)
        params = kept(opened.params, config, student, numbers)
    answer = {
        "workdir": str(options.out),
        "of": {"run": str(options.workdir), "step": opened.step},
        "kept": numbers,
        "parameters": tree.count(params),
        "loss_nats": {"before": before, "after": after},
        "harm_nats": harm,
    }
    with RunDir(options.out) as directory:
        tokenizer = (options.workdir / "tokenizer").read_bytes()
        facts = answer | {"status": "pruned", "dtype": run.precision.params}
        facts["data"] = resume.trained_on(options.workdir)
        copy_hub_files(options.workdir, directory)
        import_model.write(directory, run, params, tokenizer, facts)
    return answer


def _check_decoder(opened: LoadedRun) -> None:
    """Raise ConfigError if the run is no decoder with plain weights."""
    run, where = opened.run, f"--workdir={opened.workdir}"
    if run.tune.unmerged:
        raise ConfigError(
            "layers are kept of plain weights",
            where=where,
            why=run.tune.unmerged,
            fix=load.unmerged_fix(run, opened.workdir),
        )
    is_reward = run.objective.has_reward_head
    if run.architecture != "decoder" or is_reward:
        raise ConfigError(
            "layers are kept of a decoder of text",
            where=where,
            why="this model scores answers" if is_reward else f"it is an {run.architecture}",
            fix=f"jaxlm eval --workdir={shlex.quote(str(opened.workdir))}",
        )


def even(count: int, depth: int) -> list[int]:
    """Return `count` of the layers at even distances, with the first and the last."""
    return [round(n * (depth - 1) / max(count - 1, 1)) for n in range(count)]


def kept(
    params: Any, before: BackboneConfig, after: BackboneConfig, numbers: Sequence[int]
) -> dict[str, Any]:
    """Return the parameters of a model of some layers of another one, which keep their bits.

    Args:
      params: the parameters of the other model.
      before, after: configs of the other and of the new model.
      numbers: numbers of the kept layers, in order.
    """
    leaves = tree.leaves(params)
    chosen: dict[str, Any] = {path: x for path, x in leaves.items() if not LAYER.fullmatch(path)}
    by_layer: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        if parts := LAYER.fullmatch(path):
            by_layer.setdefault(f"{parts[1]}/{parts[2]}", {})[parts[3]] = leaf
    rows: dict[str, list[Any]] = {}
    for new, number in enumerate(numbers):
        folder, row = _place(before, number)
        target, _ = _place(after, new)
        for name, leaf in by_layer[folder].items():
            rows.setdefault(f"{target}/{name}", []).append(leaf[row])
    chosen |= {path: jax.numpy.stack(layers) for path, layers in rows.items()}
    return _nested(chosen)


def _place(config: BackboneConfig, number: int) -> tuple[str, int]:
    """Return the folder of a layer's leaves, and its row in them."""
    first = len(config.prefix)
    if number < first:
        return f"prefix/{number}", 0
    row, kind = divmod(number - first, len(config.pattern))
    return f"stack/{kind}", row


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = params
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return params


def _losses(opened: LoadedRun, loader: Loader, limit: int, sets: Sequence[Sequence[int]]) -> Any:
    """Yield the loss in nats with each set of layers alone; equal kinds are compiled once."""
    mesh, config = opened.model.mesh, opened.model.blueprint.config
    assert isinstance(config, BackboneConfig)
    table = setup.token_bytes(opened.model, opened.tokenizer)
    batch = setup.pass_rows(opened.run, mesh)
    rows, put = host.host_rows(mesh, batch), functools.partial(host.put, mesh)
    steps: dict[Any, Any] = {}
    for numbers in sets:
        layers = tuple(config.layers[number] for number in numbers)
        alone = _config_of(config, layers)
        if layers not in steps:
            head = setup.head_of(opened.run)
            merge = Blueprint(alone, opened.model.precision, surgery=head).merge
            prefix = setup.prefix(opened.tokenizer)
            chunk = setup.pass_chunk(opened.run)
            steps[layers] = jax.jit(loss.build(merge, table, chunk=chunk, prefix=prefix))
        step = functools.partial(steps[layers], kept(opened.params, config, alone, numbers))
        batches = loader.evaluation(batch=batch, rows=rows, limit=limit)
        yield loss.evaluate(step, batches, put).record()["loss_nats"]


def _config_of(config: BackboneConfig, layers: tuple[Any, ...]) -> Any:
    """Return a config of these layers, of any kinds."""
    size = next(
        n for n in range(1, len(layers) + 1) if layers == (layers[:n] * len(layers))[: len(layers)]
    )
    return dataclasses.replace(config, depth=len(layers), prefix=(), pattern=layers[:size])


def _student(run: Run, config: Any, numbers: Sequence[int], options: PruneOptions) -> Run:
    """Return the run with a model of these layers. Raise ConfigError if it has none."""
    settings: dict[str, Any] = {"model.depth": len(numbers)}
    if hasattr(run.model, "dense_depth"):
        settings["model.dense_depth"] = sum(each < run.model.dense_depth for each in numbers)
    whole = run.decoder(config.vocab).layers
    chosen = [whole[number] for number in numbers]
    student = None
    try:
        student = run.changed(settings)
        layers = student.decoder(config.vocab).layers
    except (ConfigError, ValueError):
        layers = ()
    if student is None or list(layers) != chosen:
        period = len(config.prefix) + len(config.pattern)
        least = ",".join(map(str, range(min(period, config.depth))))
        raise ConfigError(
            "the model's family has no model of these layers",
            where=f"--keep={options.keep}",
            why=f"its kinds of layers repeat after {len(config.pattern)}, behind "
            f"{len(config.prefix)} of their own",
            fix=f"--keep={least}",
        )
    return student


def _numbers(text: str) -> list[int]:
    """Return the numbers of --keep; none for a rule. Raise CommandError if it is neither."""
    if RULE.fullmatch(text):
        return []
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise CommandError(
            "the kept layers are no list of numbers",
            where=f"--keep={text}",
            why="they are numbers from 0, or a number of layers with a rule",
            fix="--keep=even:1\n--keep=harm:1\n--keep=0",
        )
    return [int(part) for part in parts]


def _check(numbers: Sequence[int], depth: int, text: str) -> None:
    """Raise CommandError if there is no such layer, all stay, or they are not in order."""
    rule = text.partition(":")[0] if ":" in text else "even"
    if not numbers:
        why, fix = "a model has at least one layer", "--keep=even:1"
    elif max(numbers) >= depth:
        count = max(depth // 2, 1)
        if ":" not in text and len(set(numbers)) < depth:
            count = len(set(numbers))
        why, fix = f"the run has {depth} layers, from 0 on", f"--keep={rule}:{count}"
    elif any(one >= other for one, other in itertools.pairwise(numbers)):
        ordered = ",".join(map(str, sorted(set(numbers))))
        why, fix = "each layer is kept once, and in order", f"--keep={ordered}"
    elif len(numbers) == depth > 1:
        why, fix = f"the run has {depth} layers, and all stay", f"--keep={rule}:{depth // 2}"
    else:
        return
    raise CommandError("these layers cannot be kept", where=f"--keep={text}", why=why, fix=fix)
