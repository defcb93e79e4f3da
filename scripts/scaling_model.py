"""Weak scaling on paper: Llama 8B and 70B on TPU v5p, from 8 to 4,096 chips.

    python scripts/scaling_model.py
    python scripts/scaling_model.py --tokens_per_chip=2048 --plot=scaling.png

Compute is counted FLOPs over the chip's peak; communication is bytes in closed form over the links'
stated speed. Both are lower bounds: no kernel reaches the peak, and no message is free of latency.
A strategy pays as long as its communication can hide behind its compute. The bytes are those of
`models.wire`, which its tests compare with compiled steps. The default output and plot are kept in
scripts/scaling_model.md.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from jaxlm.core import config
from jaxlm.models.config import DecoderConfig
from jaxlm.models.cost import comm_cost, model_cost
from jaxlm.parallel.config import AXES
from jaxlm.parallel.schedule import Schedule
from jaxlm.recipes.config import Run
from jaxlm.recipes.scaling.plan import STATE_BYTES

# cloud.google.com/tpu/docs/v5p, "System architecture": 459 TFLOP/s in bf16, 95 GiB, 1,200 GB/s
# between chips counting both directions of six links, so 100 GB/s each way on a link; 50 Gbit/s a
# chip in the data-centre network.
PEAK_FLOPS = 459e12
HBM_BYTES = 95 * 2**30
LINK_BYTES = 1200e9 / 12
NETWORK_BYTES = 50e9 / 8
# The same page: a torus has its wrap-around links from a cube of 4 x 4 x 4 on; below, a ring's ends
# meet through the middle.
CUBE = 64
WHOLE_BYTES = 8  # a parameter: float32 weights and gradients, which ZeRO 1 does not split
CHIPS = tuple(8 * 2**power for power in range(10))
SLICE = (
    1024  # chips that a job is assumed to get in one piece; more are several, joined by the network
)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to lay chips out: fixed sizes, and which axis takes the rest."""

    name: str
    fixed: dict[str, int]
    rest: str
    zero: int = 3

    def sizes(self, chips: int) -> dict[str, int] | None:
        """The mesh; None where there are too few chips."""
        taken = math.prod(self.fixed.values())
        if chips % taken or chips // taken < 1:
            return None
        return dict.fromkeys(AXES, 1) | self.fixed | {self.rest: chips // taken}


STRATEGIES = (
    Strategy("data", {}, "data"),
    Strategy("data, ZeRO 1", {}, "fsdp", zero=1),
    Strategy("fsdp", {}, "fsdp"),
    Strategy("data x fsdp 64", {"fsdp": 64}, "data"),
    Strategy("fsdp x tensor 4", {"tensor": 4}, "fsdp"),
    Strategy("fsdp x tensor 8", {"tensor": 8}, "fsdp"),
    Strategy("fsdp x context 4", {"context": 4}, "fsdp"),
    Strategy("fsdp x pipe 4", {"pipe": 4}, "fsdp"),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A strategy on some chips: seconds of a step by kind of work, and bytes of state on a chip."""

    strategy: str
    chips: int
    compute_seconds: float
    sent_seconds: dict[str, float]
    state_bytes: float

    @property
    def sent_total(self) -> float:
        """Seconds of communication: axes do not share links, but wait for each other."""
        return sum(self.sent_seconds.values())

    @property
    def pays(self) -> bool:
        """Return True if it fits, and its communication could hide behind its compute."""
        return self.state_bytes < HBM_BYTES and self.sent_total <= self.compute_seconds


def speeds(sizes: dict[str, int]) -> dict[str, float]:
    """Bytes a second that a chip can send along each axis.

    The axes in use share six links in pairs, the longest first; an axis that crosses slices has the
    network.
    """
    chips = math.prod(sizes.values())
    used = sorted((axis for axis in AXES if sizes[axis] > 1), key=lambda axis: -sizes[axis])
    pairs = dict.fromkeys(used, 0)
    for number in range(3):
        if used:
            pairs[used[number % len(used)]] += 1
    directions = 2 if chips >= CUBE else 1
    bandwidths = {axis: max(pairs[axis], 1) * directions * LINK_BYTES for axis in used}
    if chips > SLICE and used:
        outermost = min(used, key=AXES.index)
        bandwidths[outermost] = min(
            bandwidths[outermost], NETWORK_BYTES * chips_in_step(sizes, outermost)
        )
    return bandwidths


def chips_in_step(sizes: dict[str, int], axis: str) -> int:
    """Number of chips that share the network along an axis: sums leave a slice once."""
    slices = math.prod(sizes.values()) // SLICE
    return max(sizes[axis] // slices, 1)


def outcome(
    strategy: Strategy, model: DecoderConfig, chips: int, *, tokens: int, sequence: int
) -> Outcome | None:
    """Cost of a strategy with `tokens` a chip; None if it has no layout.

    Args:
      strategy: the strategy.
      model: the model.
      chips: number of chips.
      tokens: tokens of a chip and step.
      sequence: tokens of a row.
    """
    sizes = strategy.sizes(chips)
    # Chips that share rows work on all their tokens together; rows of a context axis are as much
    # longer.
    rows = tokens * sizes["tensor"] * sizes["pipe"] // sequence if sizes else 0
    if sizes is None or rows == 0:
        return None
    microbatches = min(4 * sizes["pipe"], rows) if sizes["pipe"] > 1 else 1
    work = comm_cost.StepWorkload(
        model=model,
        sequence=sequence,
        rows=rows,
        microbatches=microbatches,
        weight_bytes=2 if strategy.zero == 3 else 4,  # cast before they are gathered, or kept
        zero=strategy.zero,
    )
    flops = (
        model_cost.flops_per_token(model, sequence * sizes["context"], causal=True) * tokens * 4 / 3
    )
    compute = flops / PEAK_FLOPS
    compute /= 1 - Schedule(sizes["pipe"], microbatches).bubble
    wires = speeds(sizes)
    sent = {axis: comm_cost.BYTES[axis](work, sizes) / wires[axis] for axis in wires}
    whole = WHOLE_BYTES if strategy.zero == 1 else 0
    held = whole + (STATE_BYTES - whole) / sizes["fsdp"]
    state_bytes = held * model_cost.parameters(model) / (sizes["tensor"] * sizes["pipe"])
    return Outcome(strategy.name, chips, compute, sent, state_bytes)


def outcomes(model: DecoderConfig, *, tokens: int, sequence: int) -> Iterator[Outcome]:
    """Every strategy on every number of chips."""
    for strategy in STRATEGIES:
        for chips in CHIPS:
            if result := outcome(strategy, model, chips, tokens=tokens, sequence=sequence):
                yield result


@dataclasses.dataclass(frozen=True)
class Crossover:
    """The point at which a strategy stops paying.

    Tokens a chip with which communication takes as long as compute, and the tokens of one row.
    """

    tokens: float  # infinite where communication grows faster than compute
    row: float

    def __str__(self) -> str:
        if math.isinf(self.tokens):
            return "never"
        if self.tokens < 1:
            return "any"
        return f"{self.tokens:,.0f}" + ("'" if self.tokens < self.row else "")


def crossover(
    strategy: Strategy, model: DecoderConfig, chips: int, *, sequence: int
) -> Crossover | None:
    """Tokens at which compute and communication are equal; None without a layout, or memory.

    With all micro-batches of a pipeline, compute is a t for t tokens a chip and communication b t +
    c: two outcomes give a, b and c, and the two are equal at c / (a - b).
    """
    sizes = strategy.sizes(chips)
    if sizes is None:
        return None
    row = sequence / (sizes["tensor"] * sizes["pipe"])
    some = 4 * sizes["pipe"] * sequence
    one, two = (outcome(strategy, model, chips, tokens=n * some, sequence=sequence) for n in (1, 2))
    if one is None or two is None or one.state_bytes >= HBM_BYTES:
        return None
    fixed = 2 * one.sent_total - two.sent_total
    gained = (one.compute_seconds - (two.sent_total - one.sent_total)) / some
    return Crossover(fixed / gained if gained > 0 else math.inf, row)


def table(name: str, model: DecoderConfig, *, tokens: int, sequence: int) -> str:
    """Milliseconds of compute and communication for each strategy, and where it stops paying."""
    lines = [
        f"{name}: {tokens:,} tokens a chip, rows of {sequence:,}; ms of compute / of "
        "communication a step; - does not fit,"
        " * communication is longer",
        f"  {'strategy':<18}" + "".join(f"{chips:>14,}" for chips in CHIPS),
    ]
    for strategy in STRATEGIES:
        cells = []
        for chips in CHIPS:
            result = outcome(strategy, model, chips, tokens=tokens, sequence=sequence)
            if result is None or result.state_bytes >= HBM_BYTES:
                cells.append("-")
                continue
            mark = "" if result.pays else "*"
            cells.append(f"{1e3 * result.compute_seconds:.0f}/{1e3 * result.sent_total:.0f}{mark}")
        lines.append(f"  {strategy.name:<18}" + "".join(f"{cell:>14}" for cell in cells))
    lines.append(
        "  where it stops paying: tokens a chip with which communication takes as long as "
        "compute; ' less than a row, so that"
        " one row a chip pays; in a pipeline with 4 micro-batches a stage"
    )
    for strategy in STRATEGIES:
        crossings = [crossover(strategy, model, chips, sequence=sequence) for chips in CHIPS]
        cells = ["-" if each is None else str(each) for each in crossings]
        lines.append(f"  {strategy.name:<18}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def draw(decoders: dict[str, DecoderConfig], path: Path, *, tokens: int, sequence: int) -> None:
    """Communication over compute, by chips, for each strategy; above 1 it cannot be hidden."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(decoders), 4), dpi=100, layout="constrained")
    for number, (name, model) in enumerate(decoders.items(), 1):
        axes = figure.add_subplot(1, len(decoders), number)
        for color, strategy in enumerate(STRATEGIES):
            points = [
                (each.chips, each.sent_total / each.compute_seconds)
                for each in outcomes(model, tokens=tokens, sequence=sequence)
                if each.strategy == strategy.name and each.state_bytes < HBM_BYTES
            ]
            if points:
                label = strategy.name if number == 1 else None
                axes.plot(*zip(*points, strict=True), f"C{color}o-", markersize=3, label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(
            title=f"{name}, {tokens:,} tokens a chip",
            xlabel="v5p chips",
            ylabel="communication / compute",
        )
        axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize=7)
    figure.savefig(path, metadata={"Software": None})


def models() -> dict[str, DecoderConfig]:
    """Those of the tables, by title."""
    root = Path(__file__).parents[1] / "configs"
    return {
        title: config.load(Run, str(root / file)).value.model.build()
        for title, file in (("Llama 8B", "llama_8b.py"), ("Llama 70B", "llama_70b.py"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens_per_chip", type=int, default=8192, metavar="N")
    parser.add_argument("--sequence", type=int, default=4096, metavar="N")
    parser.add_argument("--plot", type=Path, default=Path("scaling_model.png"), metavar="FILE")
    args = parser.parse_args()
    for name, model in models().items():
        print(table(name, model, tokens=args.tokens_per_chip, sequence=args.sequence), end="\n\n")
    draw(models(), args.plot, tokens=args.tokens_per_chip, sequence=args.sequence)
    print(args.plot)


if __name__ == "__main__":
    main()
