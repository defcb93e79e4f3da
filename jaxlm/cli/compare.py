"""Compare runs: settings that differ, results with their uncertainty, curves.

jaxlm compare runs/a runs/b           two runs or more
jaxlm compare --workdir=runs/lr       all runs in a folder

The page has the losses over steps, tokens and seconds. Runs that differ only in their seed are one
result, with the standard error over seeds.

Results of `jaxlm eval --tasks` are compared item by item, each run with the first. With
--require=not_worse:1% the exit code is 1 unless the 95% interval of each task's first metric
excludes a loss of more than 1 point, or of 1% of bits per byte.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlm.cli.arguments import Parser, add_flag
from jaxlm.cli.output import Output, columns

if TYPE_CHECKING:
    from jaxlm.recipes.compare.comparison import Comparison


def add_arguments(parser: Parser) -> None:
    parser.withhold("runs are compared with the configs that they were saved with")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories")
    doc = "page to write, which replaces an earlier one"
    add_flag(parser, "--out", "FILE", "compare.html", doc)
    doc = "exit code 1 if results of tasks may be worse than those of the first run"
    add_flag(parser, "--require", "not_worse:P%", str, doc)


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.compare import comparison, summary

    paths = [Path(each) for each in args.runs]
    if args.workdir:
        listed = summary.find(Path(args.workdir))
        paths += [each.path for each in listed if each.status != "damaged"]
    if not args.require:
        return show(comparison.compare(paths), Path(args.out), out)

    from jaxlm.recipes.compare import tasks

    requirement = tasks.Requirement.parse(args.require)
    compared = comparison.compare(paths)
    violations = tasks.violations(compared.tasks, requirement, paths)
    target, answer = Path(args.out), {"violations": violations}
    code = show(compared, target, out, answer, code=int(bool(violations)))
    for violation in violations:
        out.log(f"not met: {violation}")
    return code


def show(
    compared: "Comparison",
    target: Path,
    out: Output,
    more: dict[str, Any] | None = None,
    code: int = 0,
) -> int:
    """Write the page of a comparison, print it, and return the exit code.

    Args:
      compared: the comparison.
      target: the page.
      out: receives the result.
      more: further entries of the JSON answer.
      code: the exit code.
    """
    from jaxlm.recipes.compare import page

    written = page.write(compared, target)
    answer = compared.record() | {"page": str(written)} | (more or {})
    lines = columns(page.result_table(compared), "<")
    for title, rows in page.task_tables(compared):
        lines += ["", title, *columns([page.TASK_HEAD, *rows], "<<>>>>>><")]
    if compared.differences:
        lines += ["", *columns(page.difference_rows(compared), "<")]
    for axis in compared.tables:
        head, rows = page.curve_rows(compared, axis)
        lines += ["", *columns([head, *rows], "<")]
    if any(page.INTERPOLATED in line for line in lines):
        lines += [f"{page.INTERPOLATED} is interpolated between two evaluations"]
    runs = [page.run_row(name, each) for name, each in compared.runs.items()]
    lines += ["", *columns([page.RUN_HEAD, *runs], "<<")]
    lines += ["", *(f"note: {note}" for note in compared.notes), f"page  {written}"]
    return out.result(answer, lines, code)
