"""Quantized runs of one run: what each costs, by its bytes, as a table and a plot.

    python scripts/show_quantized.py runs/a-int8 runs/a-int4 --plot=quantized.svg --rounds=5

Each directory is one of `jaxlm quantize`, which wrote its figures. The plot has the growth of the
loss against the bytes of the weights. With --rounds the run and the quantized ones write eight
greedy texts in turns, as many times: speed is in tokens per second of the processor, since other
programs may run, as the median of the ratios of a round.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

Figures = dict[str, Any]
PROMPTS, NEW = 8, 64
HEAD = "| codes | bytes | loss | KL, mean | KL, 99.9% | same likeliest id | changed items | speed |"


def read(workdir: Path) -> Figures:
    """Return the figures of a quantized run, with the name of its codes and the run before it."""
    figures = json.loads((workdir / "imported.json").read_text())
    base = json.loads((workdir / "base.json").read_text())
    tune = json.loads((workdir / "config.json").read_text())["tune"]
    block = "" if tune["block"] == "all" else f", {tune['block']}"
    method = "" if figures["method"] == "rtn" else f", {figures['method']}"
    return figures | {"codes": f"{figures['scheme']}{block}{method}", "before_run": base["run"]}


def table(rows: list[Figures], speeds: list[float] | None) -> str:
    """Return the table in Markdown, the smallest runs first.

    Args:
      rows: those of `read`.
      speeds: of each, over that of the run before; None if they were not measured.
    """
    before = rows[0]["before"]
    lines = [HEAD, "|---" * 8 + "|"]
    lines.append(f"| none | {before['bytes']:,} | {before['loss_nats']:.4f} | | | | | |")
    order = sorted(range(len(rows)), key=lambda n: rows[n]["after"]["bytes"])
    for n in order:
        row = rows[n]
        flips = [task["flips"] for task in row["tasks"].values() if task["flips"] is not None]
        distances = ["-"] * 3  # of a reward model, whose distributions are of no text
        if "kl_mean" in row:
            distances = [f"{row[name]:.2g}" for name in ("kl_mean", "kl_999")]
            distances.append(f"{row['top1_agreement']:.2%}")
        cells = [
            row["codes"],
            f"{row['after']['bytes']:,}",
            f"{row['after']['loss_nats']:.4f} ({row['loss_growth']:+.3%})",
            *distances,
            f"{max(flips):.1%}" if flips else "",
            f"{speeds[n]:.2f}" if speeds else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[Figures], path: Path) -> None:
    """Plot the growth of the loss against the bytes, a point for each run."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        point = row["after"]["bytes"] / 2**20, 100 * row["loss_growth"]
        axes.plot(*point, "o", markersize=5)
        axes.annotate(row["codes"], point, (4, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axvline(rows[0]["before"]["bytes"] / 2**20, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="MiB of weights", ylabel="growth of the loss, %", xlim=(0, None))
    axes.grid(alpha=0.25)
    is_svg = path.suffix == ".svg"
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxlm"}):
        figure.savefig(path, metadata={"Date": None} if is_svg else {"Software": None})


def measure(runs: list[str], rounds: int) -> list[float]:
    """Return the speed of each run but the first over that of the first."""
    import jax

    import jaxlm
    from jaxlm.generate.config import GenerateConfig
    from jaxlm.generate.sampler import Sampler

    writers = []
    for run in runs:
        loaded = jaxlm.load(run).loaded
        settings = GenerateConfig(
            prompts=tuple(map(str, range(PROMPTS))),
            max_tokens=min(NEW, loaded.run.data.sequence // 2),
            temperature=0.0,
        )
        sampler = Sampler(settings, loaded.model.blueprint, loaded.tokenizer, flag="--")
        writers.append((sampler, loaded))
    speeds: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):  # the first one compiles
        for (sampler, loaded), each in zip(writers, speeds, strict=True):
            begun = time.process_time()
            with jax.set_mesh(loaded.model.mesh):
                tokens = sum(len(text.ids) for text in sampler.write(loaded.params))
            if number:
                each.append(tokens / (time.process_time() - begun))
    first, *others = speeds
    return [statistics.median(a / b for a, b in zip(each, first, strict=True)) for each in others]


def main() -> None:
    """Print the table, and write the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="directories of quantized runs")
    parser.add_argument("--plot", type=Path, help="file of the plot, .svg or .png")
    parser.add_argument("--rounds", type=int, default=0, help="of the measurement of speed (none)")
    args = parser.parse_args()
    rows = [read(each) for each in args.runs]
    if len({json.dumps([row["before_run"], row["before"]["loss_nats"]]) for row in rows}) > 1:
        raise SystemExit("the runs were made of different ones, or compared on different texts")
    before = rows[0]["before_run"]
    speeds = measure([before, *map(str, args.runs)], args.rounds) if args.rounds else None
    print(table(rows, speeds))
    if args.plot:
        draw(rows, args.plot)
        print(args.plot)


if __name__ == "__main__":
    main()
