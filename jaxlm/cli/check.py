"""Compare a reduced config on fake devices with one device: losses, gradients and collectives.

jaxlm check --config=my_config.py --config.mesh.fsdp=4    4 fake devices
jaxlm check --config=llama_1b --topology=v5e-256

Exit code 1 if a loss or a gradient norm differs by more than 1e-5; if a parameter matrix is
replicated along an axis that should shard it; if a device holds the logits of a whole vocabulary
that the mesh shards; or if activations, logits or parameters are sent without need. Each finding
has its source line.
"""

from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, needed_config
from jaxlm.cli.output import Output, columns
from jaxlm.core import config
from jaxlm.monitor import formatting


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--steps", "N", 3, "number of steps to compare", least=1)
    doc = "largest number of fake devices, unless two along each mesh axis are more"
    add_flag(parser, "--devices", "N", 8, doc, least=1)
    doc = "TPU slice such as v5e-16 to compile the unchanged config for; needs the extra `tpu`"
    add_flag(parser, "--topology", "NAME", str, doc)


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.config import Run

    loaded = config.load(Run, needed_config(args, Run), args.overrides)

    if args.topology:
        from jaxlm.recipes.diagnose.collectives import compile_for

        answer = compile_for(loaded.value, args.topology, out.log)
        return out.result(answer, _memory(answer), 0 if answer["fits"] else 1)

    from jaxlm.recipes.diagnose.check import check

    answer = check(loaded.value, steps=args.steps, devices=args.devices, say=out.log)
    return out.result(answer, _text(answer), 0 if answer["ok"] else 1)


def _text(answer: dict[str, Any]) -> str:
    changes = [f"{path} {old} -> {new}" for path, (old, new) in answer["changes"].items()]
    verdict = "equal" if answer["is_equal"] else "NOT EQUAL"
    worst = answer["worst_gradient"]
    lines = [
        "reduced: " + ", ".join(changes),
        f"losses and gradient norms of {len(answer['losses'])} steps: {verdict}, "
        f"deviation {answer['deviation']:.1e} of {answer['tolerance']:.0e}",
        f"first gradient, leaf by leaf: deviation {answer['gradients'][worst]:.1e} of "
        f"{answer['gradient_tolerance']:.0e} at most, in {worst}",
        f"  {'step':<6}{'loss':>12}{'alone':>12}{'gradient':>12}{'alone':>12}",
    ]
    names = ("losses", "losses_alone", "grad_norms", "grad_norms_alone")
    for step, row in enumerate(zip(*(answer[name] for name in names), strict=True), 1):
        lines.append(f"  {step:<6}" + "".join(f"{value:>12.7g}" for value in row))
    lines += [
        f"REPLICATED along {' and '.join(each['axes'])}: {each['path']}, "
        f"{formatting.number(each['parameters'])} parameters, {each['share']:.2%} of the model"
        for each in answer["replicated"]
    ] or ["no parameter matrix is replicated by accident"]
    lines += [f"LOGITS OF THE WHOLE VOCABULARY: {each}" for each in answer["whole_logits"]]
    lines.append("collectives of one step (XLA for CPU writes a reduce-scatter as an all-reduce)")
    lines.extend(_collectives(answer))
    lines += [
        f"UNEXPECTED: {each['source']}: {each['kind']} over {','.join(each['axes'])} of "
        f"{each['largest']}: {each['why_unexpected']}"
        for each in answer["unexpected"]
    ]
    lines.append("ok" if answer["ok"] else "the check failed")
    return "\n".join(lines)


def _collectives(answer: dict[str, Any]) -> list[str]:
    """Return the table of collectives; an unknown count of a loop is a question mark."""
    rows = [("kind", "axes", "of", "count", "sent", "overlapped", "largest, from")]
    for each in answer["collectives"]:
        what = (each["kind"], ",".join(each["axes"]), each["content"])
        count = "?" if each["count"] is None else str(each["count"])
        sent, largest = formatting.size(each["sent_bytes"]), f"{each['largest']} {each['source']}"
        share = each["overlapped_bytes"] / each["sent_bytes"] if each["sent_bytes"] else 0.0
        rows.append((*what, count, sent, f"{share:.0%}", largest))
    return [f"  {line}" for line in columns(rows, "<<<>>><")]


def _memory(answer: dict[str, Any]) -> list[str]:
    size, held = formatting.size, answer["bytes_per_device"]
    parts = ", ".join(f"{name} {size(held[name])}" for name in held if name != "total")
    verdict = "fits" if answer["fits"] else "DOES NOT FIT"
    step = f"a step on {answer['devices']} chips, {answer['topology']}"
    memory = f"{size(held['total'])} per chip ({parts}), {verdict} {size(answer['hbm_bytes'])}"
    exposed = formatting.duration(answer["exposed_seconds"])
    links = f"communication while no product runs: at least {exposed} a step"
    return [f"{step}: {memory}", links, *_roofline(answer["roofline"]), *_collectives(answer)]


def _roofline(bound: dict[str, Any]) -> list[str]:
    """Return the lines of the compiled FLOPs and of the bound of MFU, with its assumptions."""
    compiled, peak = bound["flops_per_device"], bound["peak_flops"] / 1e12
    flops = f"{compiled / 1e12:.4g} TFLOP a chip in products"
    if compiled:
        planned, model = (
            f"{compiled / bound[name]:.2f} times {what}"
            for name, what in (
                ("planned_flops_per_device", "those of the plan"),
                ("model_flops_per_device", "the model's"),
            )
        )
        flops += f", {planned} and {model} (the rest is recomputation)"
    lines = [flops]
    if bound["unknown_products"]:
        unknown = f"{bound['unknown_products']} products are in loops of unknown length"
        lines.append(f"  {unknown} or kernels without a formula: no bound of MFU")
    if bound["mfu"] is not None:
        seconds = formatting.duration(bound["seconds"])
        at = f"at least {seconds} a step, an MFU of at most {bound['mfu']:.0%}"
        why = f"products at {peak:.3g} TFLOP/s and that communication, nothing else"
        lines.append(f"{at}: {why}")
    return lines
