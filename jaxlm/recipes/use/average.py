"""One model made of several checkpoints: the mean of their parameters, leaf by leaf."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.checkpoint.store import Store
from jaxlm.core import config, tree
from jaxlm.core.errors import CommandError, DataError
from jaxlm.data import tokenizer_file
from jaxlm.optim.average_config import NoAverage
from jaxlm.recipes.config import Run
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.train import resume
from jaxlm.recipes.train.resume import InitSource
from jaxlm.recipes.use import load
from jaxlm.training.rundir import RunDir, read_json

PART = "params/"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is averaged, and where to."""

    workdir: Path
    out: Path
    steps: tuple[int, ...] = ()
    newest: int = 0  # steps, where none is named
    others: tuple[str, ...] = ()  # RUN[@STEP]
    proportions: tuple[
        float, ...
    ] = ()  # of the steps and then of the others; none means equal ones
    accumulate: Literal["float32", "float64"] = "float64"


def average(options: Options, say: Say = lambda _: None) -> dict[str, Any]:
    """Makes a run directory whose checkpoint of step 0 has the mean of the parameters of several checkpoints.

    They are read leaf by leaf, so beside the result one leaf is in memory at a time. What is refused is, before any is read:
    other shapes or dtypes, another model, another tokenizer.

    Raises:
      JaxlmError: where something is not there, damaged, or of another model.

    Source: Wortsman et al. 2022, arXiv:2203.05482, section 2 (uniform, of runs that began alike).
    """
    import_model.check_free(options.out, "--out", "an average")
    origins = _origins(options, say)
    proportions = _proportions(options, len(origins))
    leaves = _agreed(origins)
    run = dataclasses.replace(origins[0].run, average=NoAverage())
    total = sum(proportions)
    params: dict[str, Any] = {}
    dtype = np.dtype(options.accumulate)
    for path, layout in leaves.items():
        mean = sum(
            each.store.leaf(each.step, path).astype(dtype) * dtype.type(share / total)
            for each, share in zip(origins, proportions, strict=True)
        )
        *folders, name = path.split("/")
        node = params
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = np.asarray(mean).astype(np.dtype(layout.partition("[")[0]))
    answer = {
        "workdir": str(options.out),
        "of": [
            {"run": str(each.workdir), "step": each.step, "share": share / total}
            for each, share in zip(origins, proportions, strict=True)
        ],
        "parameters": tree.count(params),
        "tensors": len(leaves),
        "accumulated_in": options.accumulate,
    }
    _write(options.out, run, origins[0], params, answer)
    return answer


def _origins(options: Options, say: Say) -> list[InitSource]:
    """What is averaged, in the order of the proportions."""
    place = options.workdir
    run = config.from_json(Run, read_json(place, "config.json"), where=str(place / "config.json"))
    store = Store(place / "checkpoints", CheckpointConfig(), read_only=True)
    steps = options.steps
    if not steps:
        there = store.steps()
        if not 0 < options.newest <= len(there):
            raise CommandError(
                "there are not so many checkpoints" if options.newest else "no step is named",
                where=f"--newest={options.newest}" if options.newest else f"--workdir={place}",
                why=f"committed steps: {', '.join(map(str, there)) or 'none'}",
                fix=f"--steps={','.join(map(str, there[-2:]))}",
            )
        steps = tuple(there[-options.newest :])
    origins = [InitSource(run, store, load.select_step(store, step, False, say)) for step in steps]
    origins += [resume.open_run_ref(other, "--with", say) for other in options.others]
    if len(origins) < 2 or len({(each.workdir, each.step) for each in origins}) < len(origins):
        several = set(steps) if len(set(steps)) > 1 else {*steps, *store.steps()[-2:]}
        raise CommandError(
            "an average is of several checkpoints",
            where=f"--workdir={place}",
            why=f"named are {', '.join(map(str, origins))}",
            fix=f"--steps={','.join(map(str, sorted(several)))}"
            if len(several) > 1 and not options.others
            else "name checkpoints that differ by --steps=A,B, and of other runs by --with",
        )
    return origins


def _proportions(options: Options, count: int) -> tuple[float, ...]:
    found = options.proportions or (1.0,) * count
    if len(found) != count or min(found) < 0 or not 0 < sum(found) < float("inf"):
        raise CommandError(
            f"{count} checkpoints need as many proportions, none below zero and not all zero",
            where=f"--proportions={','.join(f'{each:g}' for each in found)}",
            why=f"there are {len(found)}",
            fix="jaxlm average --help",
        )
    return found


def _agreed(origins: list[InitSource]) -> dict[str, str]:
    """The layout of each parameter, the same in all. Raises DataError where one is of another model or tokenizer."""
    first, *rest = origins
    wanted, tokens = _layout(first), tokenizer_file.read(first.workdir / "tokenizer").digest
    for each in rest:
        found = _layout(each)
        why = [
            f"{path}: {wanted.get(path, 'nothing')} and {found.get(path, 'nothing')}"
            for path in sorted(wanted | found)
            if wanted.get(path) != found.get(path)
        ]
        why += map(str, resume.model_differences(first.run, each.run))
        if tokenizer_file.read(each.workdir / "tokenizer").digest != tokens:
            why.append("its tokenizer gives other ids")
        if why:
            raise DataError(
                f"{each} is of another model than {first}",
                where=str(each.workdir),
                why="\n".join(why[:4]),
                fix="average checkpoints of one run\naverage runs that began with the same weights",
            )
    return {path.removeprefix(PART): layout for path, layout in wanted.items()}


def _layout(origin: InitSource) -> dict[str, str]:
    found = origin.store.layout(origin.step).items()
    return {path: layout for path, layout in found if path.startswith(PART)}


def _write(place: Path, run: Run, first: InitSource, params: Any, answer: dict[str, Any]) -> None:
    with RunDir(place) as directory:
        tokenizer = (first.workdir / "tokenizer").read_bytes()
        import_model.write(
            directory, run, params, tokenizer, answer | {"dtype": run.precision.params}
        )
