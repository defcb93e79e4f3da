"""`--init_from` of verbs that read the config of a run before it is trained."""

from pathlib import Path
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.output import Output
from jaxlm.core.config import Loaded


def add_init_from(parser: Parser, used: str) -> None:
    """Add --init_from; `used` names what is used of the model."""
    doc = f"as of `jaxlm train`: the model whose {used} used"
    add_flag(parser, "--init_from", "RUN[@STEP]", str, doc)


def with_init_from(loaded: Loaded, args: Any, out: Output) -> Loaded:
    """Return the config that `jaxlm train` has with --init_from, and print what changes.

    A model of another library is imported to WORKDIR-base, which replaces it in `args`.
    """
    if args.init_from is None:
        return loaded
    from jaxlm.recipes.train.init_from import as_run, with_model_of
    from jaxlm.recipes.use.load import check_run_ref

    workdir = Path(args.workdir) if args.workdir else None
    args.init_from = as_run(args.init_from, workdir, None, out.log)
    check_run_ref(args.init_from, "--init_from")
    loaded, lines = with_model_of(loaded, args.init_from, workdir)
    for line in lines:
        out.log(line)
    return loaded
