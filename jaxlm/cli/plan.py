"""Predict memory per device, time, cost and sharding of a run, before it starts.

jaxlm plan --config=llama_1b --on=h100x8       of a shipped config
jaxlm plan --config=my_config.py --fit         settings that fit this machine
jaxlm plan --serve --workdir=runs/a --on=t4    a server

The prediction is arithmetic, without the accelerator and without JAX: --on=h100x8, h200, rtx4090,
t4, v5e-16, v5p-128, tpu7x-64, or cpu; by default the GPUs of this machine if JAX would use them,
else its CPU. For any other GPU --on=NAME --memory=24GB predicts if the run fits, without times.
--exact compiles the step, for a TPU slice or for this machine's CPU, and shows the compiler's
memory analysis too. --fit searches meshes, micro-batches, remat and loss chunks for the fastest
settings that fit. --serve plans `jaxlm serve` instead: its memory, the slots of a context that fit,
and the tokens per second that the memory's speed allows. The exit code is 0 even if the run does
not fit: the result then names what fits: other settings, else more of the chips, else a smaller
model.
"""

import math
import shlex
from typing import Any

from jaxlm.cli.arguments import Parser, add_flag, is_run, needed, needed_config, without_flag
from jaxlm.cli.init_from import add_init_from, with_init_from
from jaxlm.cli.output import Output, columns, table
from jaxlm.core import config
from jaxlm.core.errors import CommandError, ConfigError, JaxlmError
from jaxlm.monitor import chips, formatting, host_machine
from jaxlm.monitor.chips import MEMORY, Machine, machine
from jaxlm.parallel.config import AXES, format_mesh

SLOTS = 8  # of a server, as of `jaxlm serve`


def add_arguments(parser: Parser) -> None:
    add_flag(parser, "--on", "MACHINE", str, "chip, CHIPxN, TPU slice, or cpu (this machine)")
    add_flag(parser, MEMORY, "SIZE", str, "memory of one GPU that is not in the table, as 24GB")
    add_flag(parser, "--devices", "N", 1, "with --on=cpu: number of devices", least=1)
    add_flag(parser, "--price", "X", float, "price per device-hour, to compute the cost")
    add_init_from(parser, "sizes are")
    parser.add_switch("--serve", "plan a server, not a training run")
    add_flag(parser, "--slots", "N", int, "with --serve: requests that run at once (8)", least=1)
    add_flag(
        parser,
        "--context",
        "TOKENS",
        int,
        "with --serve: largest request (the run's rows)",
        least=2,
    )
    add_flag(parser, "--kv_cache_dtype", ["auto", "int8"], str, "with --serve: dtype of its cache")
    add_flag(parser, "--draft", "lookup|heads|RUN", str, "with --serve: source of draft tokens")
    parser.add_switch("--fit", "search for the fastest settings that fit")
    parser.add_switch("--exact", "compile the step and compare")
    parser.add_switch("--sharding", "print the sharding of each parameter")


def run(args: Any, out: Output) -> int:
    from jaxlm.recipes.config import Run
    from jaxlm.recipes.plan import predict, search

    loaded = config.load(Run, _config(args), args.overrides)
    loaded = with_init_from(loaded, args, out)
    if args.on is None and (args.exact or args.devices != 1):  # these are for this CPU
        args.on = "cpu"
    set_machine(args)
    _check(args)
    assumed: list[str] = []
    on = named_machine(args, args.devices, assumed)
    if args.serve:
        from jaxlm.recipes.plan import serving

        draft, is_int8 = _draft(args.draft), args.kv_cache_dtype == "int8"
        plan = serving.forecast_serving(
            loaded.value,
            on,
            slots=args.slots or SLOTS,
            context=args.context,
            is_int8=is_int8,
            draft=draft,
            assumed=assumed,
        )
        answer = plan.record()
        if not plan.most_slots:
            other = serving.nearest(loaded.value, plan, draft, is_int8=is_int8)
            answer["nearest"] = other and _serving_nearest(other)
        return out.result(answer, _serving_text(answer, args))
    chosen = loaded.value
    answer = {}
    if args.fit:
        result = search.search(loaded.value, on, assumed)
        chosen = (result.best or result.smallest).run
        names = ("settings", "flags", "tried", "fitting")
        answer["fit"] = {name: getattr(result, name) for name in names}
    try:
        forecast = predict.forecast(chosen, on, assumed, has_base=bool(args.init_from))
    except ConfigError as error:
        sizes = [getattr(chosen.mesh, axis) for axis in AXES]
        needed = math.prod(size for size in sizes if size != "auto")
        if args.on == "cpu" and needed > args.devices:
            error.fix = f"--on=h100x{needed}    # other devices than this machine's\n{error.fix}"
        raise
    answer |= forecast.record(args.price) | {"sharding": forecast.sharding()}
    if not forecast.fits:
        nearest = search.nearest(loaded.value, on)
        answer["nearest"] = nearest and {
            "flags": nearest.flags,
            "bytes_per_device": nearest.forecast.bytes_per_device["total"],
            "step_seconds": nearest.forecast.record()["step_seconds"],
        }
    if args.exact:
        from jaxlm.recipes.diagnose.collectives import compile_for, compile_here

        compiling: Any = compile_here if args.on == "cpu" else compile_for
        devices = args.devices if args.on == "cpu" else args.on
        held = compiling(chosen, devices, out.log)["bytes_per_device"]
        answer["compiled_bytes_per_device"] = held
        answer["fits"] = held["total"] <= forecast.memory_bytes
    return out.result(answer, _text(answer, forecast.run, with_sharding=args.sharding))


def _config(args: Any) -> str:
    """Return --config. Raises CommandError; the fix is a run that another flag names, if any."""
    from jaxlm.recipes.config import Run
    from jaxlm.training.rundir import split_ref

    places = [args.workdir] if args.workdir else []
    places += [str(split_ref(args.init_from)[0])] if args.init_from else []
    if run := next(filter(is_run, places), None):
        return needed(args, "config", fix=f"--config={shlex.quote(run)}")
    return needed_config(args, Run)


def _draft(ref: str | None) -> Any:
    """Return the config of a draft run, or another kind of draft; errors name --draft."""
    from jaxlm.recipes.config import Run

    if ref in (None, "lookup", "heads"):
        return ref
    try:
        return config.load(Run, ref).value
    except JaxlmError as error:
        error.where = error.where.replace("--config=", "--draft=")
        error.fix = error.fix.replace("--config=", "--draft=")
        raise


def set_machine(args: Any) -> None:
    """Set --on to this machine if it is not given, and --memory if its GPU is unknown."""
    if args.on is None:
        args.on, memory = host_machine.used_machine()
        args.memory = args.memory or memory


def named_machine(args: Any, devices: int, assumed: list[str]) -> Machine:
    """Return the machine of --on and --memory; a CPU is this one, split into `devices`."""
    if args.on == "cpu":
        return host_machine.this_machine(devices, assumed)
    return machine(args.on, flag="--on", memory=args.memory)


def _check(args: Any) -> None:
    """Raise CommandError for flags that contradict each other."""
    if args.price is not None and not args.price > 0:
        what, where = f"a price of {args.price:g} is not allowed", f"--price={args.price:g}"
        why = "--price must be a positive price per device-hour"
        raise CommandError(what, where=where, why=why, fix="jaxlm plan --help")
    training = [name for name in ("fit", "exact", "sharding", "price") if getattr(args, name)]
    server_flags = ("slots", "context", "kv_cache_dtype", "draft")
    serving = [name for name in server_flags if getattr(args, name)]
    if args.serve and training:
        what, where = f"--{training[0]} is for a training run", f"--serve --{training[0]}"
        why = "--serve plans a server, whose settings are --slots and --context"
        fix = f"jaxlm plan --config={shlex.quote(args.config)} --on={args.on} --serve"
        raise CommandError(what, where=where, why=why, fix=fix)
    if serving and not args.serve:
        what, where = f"--{serving[0]} is for a server", f"--{serving[0]}"
        why = "without --serve the plan is of a training run"
        raise CommandError(what, where=where, why=why, fix=f"--serve {_flag_of(args, serving[0])}")
    if args.devices > 1 and args.on != "cpu":
        is_gpu = args.on in chips.CHIPS and not chips.CHIPS[args.on].is_tpu
        what = "the name of the machine contains the number of devices"
        why = "a CPU can be split into several devices; other machines are named as in h100x8"
        named = f"--on={args.on}x{args.devices} --devices=1"
        fix = named if is_gpu else "jaxlm plan --help"
        raise CommandError(what, where=f"--devices={args.devices}", why=why, fix=fix)
    if args.memory and args.on == "cpu":
        where, fix = f"{MEMORY}={args.memory}", f"--on=mygpu {MEMORY}={args.memory}    # any name"
        why = "--on names no GPU: the plan is for this machine's CPU, whose memory is known"
        raise CommandError(f"{MEMORY} is for GPUs", where=where, why=why, fix=fix)
    if args.exact and args.on != "cpu" and named_machine(args, 0, []).topology is None:
        what = "a step cannot be compiled for a GPU of another machine"
        why = "the compiler of TPUs needs no TPU, that of GPUs needs the GPU"
        fix = f"jaxlm plan --config={shlex.quote(args.config)} --on={args.on}"
        raise CommandError(what, where=f"--exact --on={args.on}", why=why, fix=fix)


def _flag_of(args: Any, name: str) -> str:
    return f"--{name}={getattr(args, name)}"


def _serving_text(answer: dict[str, Any], args: Any) -> list[str]:
    size = formatting.size
    verdict = "fits" if answer["fits"] else "DOES NOT FIT"
    slots, most = answer["slots"], answer["most_slots"]
    drafted = f" · draft {size(answer['draft_bytes'])}" if answer["draft_bytes"] else ""
    layer = f" · a layer {size(answer['layer_bytes'])}" if answer["layer_bytes"] else ""
    parts = f"weights {size(answer['weights_bytes'])}{drafted}{layer}"
    parts += f" · {slots} x {size(answer['slot_bytes'])}"
    if answer["total_bytes"] == answer["start_bytes"]:
        parts += f"; {size(answer['start_bytes'])} at the start, with the parameters as stored"
    speed = "unknown: no figures for this chip"
    if answer["tokens_per_second"]:
        slow, fast = map(formatting.count, answer["tokens_per_second"])
        low, high = map(formatting.duration, answer["pass_seconds"])
        speed = f"at most {slow} to {fast} tokens/s, {low} to {high} per token of a request"
    rows = [
        ("on", answer["on"]),
        ("slots", f"{slots:,} of {answer['context']:,} tokens"),
        ("memory", f"{size(answer['total_bytes'])} of {size(answer['memory_bytes'])}: {verdict}"),
        ("parts", parts),
        ("at most", f"{most:,} slots of this context"),
        ("speed", speed),
        *(("assumed", text) for text in answer["assumed"]),
    ]
    return table(rows + [("next", text) for text in _serving_next(answer, args)])


def _serving_next(answer: dict[str, Any], args: Any) -> list[str]:
    """Return the commands that follow a plan of a server."""
    # Changed settings are those of another run.
    run = args.config if is_run(args.config) and not args.overrides else "RUN"
    slots, most, cache = answer["slots"], answer["most_slots"], args.kv_cache_dtype
    nearest = answer.get("nearest")
    if not most:
        if nearest is None:
            return ["a smaller model"]
        if settings := nearest["settings"]:
            return _planned_again(nearest["flags"].split(), settings, run, args)
        most, cache = nearest["slots"], "int8"
    words = [f"--workdir={run}", f"--slots={min(slots, most)}", f"--context={answer['context']}"]
    words += [f"--kv_cache_dtype={cache}"] if cache else []
    words += [f"--draft={args.draft}"] if args.draft else []
    return [f"jaxlm serve {shlex.join(words)}"]


def _planned_again(flags: list[str], settings: dict[str, Any], run: str, args: Any) -> list[str]:
    """Return the plan with `flags`, and the command that writes its codes if it has some."""
    words = args.words
    for each in flags:
        words = without_flag(words, each.partition("=")[0])
    texts = [f"jaxlm {shlex.join([*words, *flags])}"]
    if scheme := settings.get("tune.base"):
        places = [f"--workdir={run}", f"--scheme={scheme}", f"--out={run.rstrip('/')}-{scheme}"]
        texts.append(f"jaxlm quantize {shlex.join(places)}")
    return texts


def _serving_nearest(nearest: Any) -> dict[str, Any]:
    """Return the JSON of another plan of a server, with the flags that lead to it."""
    plan = nearest.forecast
    flags = [f"--slots={plan.slots}"]
    flags += ["--kv_cache_dtype=int8"] if nearest.is_int8 else []
    flags += [f"--config.{path}={value}" for path, value in nearest.settings.items()]
    return {
        "flags": " ".join(flags),
        "settings": nearest.settings,
        "total_bytes": plan.total_bytes,
        "slots": plan.slots,
    }


def _text(answer: dict[str, Any], run: Any, *, with_sharding: bool) -> list[str]:
    count, size = formatting.count, formatting.size
    held = answer["bytes_per_device"]
    parts = sorted(((held[name], name) for name in held if name != "total"), reverse=True)
    verdict = "fits" if answer["fits"] else "DOES NOT FIT"
    devices = f"{answer['devices']} device{'s' if answer['devices'] > 1 else ''}"
    parameters, flops = count(answer["parameters"]), count(answer["flops_per_token"], billion="G")
    memory = f"{size(held['total'])} of {size(answer['memory_bytes'])} per device"
    rows = [
        ("on", f"{answer['on']}, {devices}, mesh {format_mesh(answer['mesh'])}"),
        ("model", f"{parameters} parameters, {flops} FLOPs per token"),
        ("memory", f"{memory}: {verdict}"),
        ("parts", " · ".join(f"{name} {size(part)}" for part, name in parts if part)),
        ("evaluation", f"{size(answer['evaluation_bytes_per_device'])} per device"),
        ("step", _step_time(answer)),
        ("run", _run_time(answer, run.train.steps)),
    ]
    if drawn := answer.get("rollout"):
        rows.append(("rollout", _rollout(drawn)))
    if answer["cost"]:
        rows.append(("cost", " to ".join(map(_money, answer["cost"]))))
    rows.append(("checkpoint", f"{size(answer['checkpoint_bytes'])} before compression"))
    if sent := answer["sent_bytes_per_device"]:
        axes = ", ".join(f"{size(part)} over {axis}" for axis, part in sent.items())
        rows.append(("sends", f"{axes} per device and step"))
    if exact := answer.get("compiled_bytes_per_device"):
        named = [f"{name} {size(part)}" for name, part in exact.items() if name != "total" and part]
        rows.append(("compiled", f"{size(exact['total'])} per device: {' · '.join(named)}"))
    if fit := answer.get("fit"):
        rows.append(("tried", f"{fit['tried']:,} settings, {fit['fitting']:,} fit"))
        rows.append(("settings", fit["flags"] or "unchanged"))
    if "nearest" in answer:
        none = "none: no share of depth, of width or of a row's length fits"
        nearest = answer["nearest"]
        texts = [none] if nearest is None else [nearest["flags"], _fitting(nearest)]
        rows += [("nearest", text) for text in texts]
    rows += [(name, text) for name in ("assumed", "risks") for text in answer[name]]
    return table(rows) + (_sharding(answer["sharding"]) if with_sharding else [])


def _step_time(answer: dict[str, Any]) -> str:
    if answer["step_seconds"] is None:
        return "unknown: no figures for this chip"
    low, high = map(formatting.duration, answer["step_seconds"])
    slow, fast = map(formatting.count, answer["tokens_per_second"])
    mfu = ", MFU {:.0%} to {:.0%}".format(*answer["mfu"]) if answer["mfu"] else ""
    return f"{low} to {high}, {slow} to {fast} tokens/s{mfu}"


def _run_time(answer: dict[str, Any], steps: int) -> str:
    text = f"{formatting.count(answer['tokens'])} tokens in {steps:,} steps"
    if answer["hours"] is None:
        return text
    low, high = (formatting.duration(3600 * hours) for hours in answer["hours"])
    return f"{text}: {low} to {high}"


def _money(amount: float) -> str:
    """Return an amount with two decimals, or two digits if it is less than one."""
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.2g}"


def _rollout(drawn: dict[str, Any]) -> str:
    size = formatting.size
    updates = f"{drawn['updates']} step{'s' if drawn['updates'] > 1 else ''}"
    text = f"{drawn['samples']} samples each {updates}, {drawn['slots']} at once"
    text += f", cache {size(drawn['cache_bytes_per_device'])}"
    text += f", {size(drawn['bytes_per_device'])} per device"
    if drawn["draw_seconds"] is None:
        return text
    low, high = map(formatting.duration, drawn["draw_seconds"])
    text += f"; drawn in {low} to {high}"
    if not any(drawn["rescore_seconds"]):
        return text
    low, high = map(formatting.duration, drawn["rescore_seconds"])
    return f"{text}, scored again in {low} to {high}"


def _fitting(nearest: dict[str, Any]) -> str:
    text = f"{formatting.size(nearest['bytes_per_device'])} per device"
    if nearest["step_seconds"] is None:
        return text
    low, high = map(formatting.duration, nearest["step_seconds"])
    return f"{text}, {low} to {high} per step"


def _sharding(rows: list[dict[str, Any]]) -> list[str]:
    cells = [("parameter", "shape", "sharded over", "elements per device")]
    for row in rows:
        over = ",".join("x".join(axes) if axes else "-" for axes in row["over"])
        shape = "x".join(map(str, row["shape"]))
        cells.append((row["path"], shape, over, formatting.count(row["numbers_per_device"])))
    return columns(cells, "<<<")
