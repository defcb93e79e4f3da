"""Average the parameters of several checkpoints into a new run, leaf by leaf."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlm.checkpoint import object_store
from jaxlm.core import tree
from jaxlm.core.callbacks import Log
from jaxlm.core.errors import CommandError, DataError
from jaxlm.data import tokenizer_file
from jaxlm.recipes.exchange import import_model
from jaxlm.recipes.train import resume
from jaxlm.recipes.train.init_from import model_differences
from jaxlm.recipes.use import load
from jaxlm.recipes.use.load import InitSource
from jaxlm.training.rundir import RunDir
from jaxlm.tune.config import Full, Quantized

PART = "params/"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Checkpoints to average, and the new run directory."""

    workdir: Path
    out: Path
    steps: tuple[int, ...] = ()
    newest: int = 0  # number of steps, if `steps` is empty
    others: tuple[str, ...] = ()  # RUN[@STEP]
    proportions: tuple[float, ...] = ()  # of the steps, then of the others; () means equal
    accumulate: Literal["float32", "float64"] = "float64"


def average(options: AverageOptions, say: Log = lambda _: None) -> dict[str, Any]:
    """Make a run whose step 0 has the mean of the parameters of several checkpoints.

    One leaf at a time is in memory besides the result. Other shapes, dtypes, models or tokenizers
    are refused before any leaf is read: raises JaxlmError for an input that is missing or damaged.

    Source: Wortsman et al. 2022, arXiv:2203.05482, section 2 (uniform, of runs that began equal).
    """
    import_model.check_free(options.out, "--out", "an average")
    origins = _origins(options, say)
    proportions = _proportions(options, len(origins))
    leaves = _agreed(origins)
    run = origins[0].run
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
    of = [{"run": str(each.workdir), "step": each.step} for each in origins]
    answer = {
        "workdir": str(options.out),
        "of": [row | {"share": share / total} for row, share in zip(of, proportions, strict=True)],
        "parameters": tree.count(params),
        "tensors": len(leaves),
        "accumulated_in": options.accumulate,
    }
    tokenizer = (origins[0].workdir / "tokenizer").read_bytes()
    with RunDir(options.out) as directory:
        facts = answer | {"status": "averaged", "dtype": run.precision.params}
        facts["data"] = resume.trained_on(origins[0].workdir)
        import_model.copy_hub_files(origins[0].workdir, directory)
        import_model.write(directory, run, params, tokenizer, facts)
    return answer


def _origins(options: AverageOptions, say: Log) -> list[InitSource]:
    """Return the checkpoints in the order of the proportions."""
    workdir = options.workdir
    run = load.read_config(workdir)
    store = object_store.of_run(workdir)
    steps = options.steps
    if not steps:
        committed = store.steps()
        newest = options.newest or (1 if options.others else 0)
        if not 0 < newest <= len(committed):
            raise CommandError(
                "the run has too few checkpoints" if newest else "no step is named",
                where=f"--newest={newest}" if newest else f"--workdir={workdir}",
                why=f"committed steps: {', '.join(map(str, committed)) or 'none'}",
                fix=f"--steps={','.join(map(str, committed[-2:]))}",
            )
        steps = tuple(committed[-newest:])
    origins = [InitSource(run, store, load.select_step(store, step, False, say)) for step in steps]
    origins += [load.open_run_ref(other, "--with", say) for other in options.others]
    if len(origins) < 2 or len({(each.workdir, each.step) for each in origins}) < len(origins):
        several = set(steps) if len(set(steps)) > 1 else {*steps, *store.steps()[-2:]}
        raise CommandError(
            "an average needs several different checkpoints",
            where=f"--workdir={workdir}",
            why=f"the command names {', '.join(map(str, origins))}",
            fix=f"--steps={','.join(map(str, sorted(several)))}"
            if len(several) > 1 and not options.others
            else "name different checkpoints by --steps=A,B and of other runs by --with",
        )
    return origins


def _proportions(options: AverageOptions, count: int) -> tuple[float, ...]:
    proportions = options.proportions or (1.0,) * count
    if len(proportions) != count or min(proportions) < 0 or not 0 < sum(proportions) < float("inf"):
        what = f"{count} checkpoints need {count} proportions, at least zero and not all zero"
        where = f"--proportions={','.join(f'{each:g}' for each in proportions)}"
        why, fix = f"the command gives {len(proportions)}", "jaxlm average --help"
        raise CommandError(what, where=where, why=why, fix=fix)
    return proportions


def _agreed(origins: list[InitSource]) -> dict[str, str]:
    """Return the layout of each parameter. Raises DataError for another model or tokenizer."""
    first, *rest = origins
    if isinstance(first.run.tune, Quantized):
        what = "an average of quantized weights is not supported"
        fix = "average the runs that they were made of"
        raise DataError(what, where=str(first.workdir), why=first.run.tune.unmerged, fix=fix)
    if not isinstance(first.run.tune, Full):
        what = "an average of adapters is not supported"
        cause = f"{first} has the parameters of tune.name = {first.run.tune.name} alone"
        workdir = shlex.quote(str(first.workdir))
        fix = f"jaxlm merge --workdir={workdir} --out={workdir}-merged    # then average the models"
        raise DataError(what, where=str(first.workdir), why=cause, fix=fix)
    expected, digest = _layout(first), tokenizer_file.read(first.workdir / "tokenizer").digest
    for each in rest:
        layout = _layout(each)
        why = [
            f"{path}: {expected.get(path, 'nothing')} and {layout.get(path, 'nothing')}"
            for path in sorted(expected | layout)
            if expected.get(path) != layout.get(path)
        ]
        why += map(str, model_differences(first.run, each.run))
        if tokenizer_file.read(each.workdir / "tokenizer").digest != digest:
            why.append("its tokenizer gives other ids")
        if why:
            what, where = f"{each} is of another model than {first}", str(each.workdir)
            fix = "average checkpoints of one run\naverage runs that began with the same weights"
            raise DataError(what, where=where, why="\n".join(why[:4]), fix=fix)
    return {path.removeprefix(PART): layout for path, layout in expected.items()}


def _layout(origin: InitSource) -> dict[str, str]:
    layouts = origin.store.layout(origin.step).items()
    return {path: layout for path, layout in layouts if path.startswith(PART)}
