"""Predicted memory, time and communication of a run, by arithmetic alone. Free of JAX.

Example:
  >>> from jaxlm.monitor.chips import machine
  >>> run = config.load(Run, None, [("model.vocab", "4096")]).value
  >>> plan = forecast(run, machine("h100x8", flag="--on"))
  >>> plan.fits, dict(plan.sizes)["fsdp"]
  (True, 1)
"""

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxlm.core import config
from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.data import tokenizer_file
from jaxlm.data.config import TOKENIZER_FILES
from jaxlm.models.config import ModelConfig
from jaxlm.models.cost import comm_cost, model_cost
from jaxlm.models.cost.activations import DeviceShare
from jaxlm.models.cost.tensors import tensors
from jaxlm.monitor import chips, formatting
from jaxlm.monitor.chips import Chip, Dtype, Machine
from jaxlm.nn.config import MoeConfig
from jaxlm.objectives.policy_config import START
from jaxlm.ops.kernels import Target
from jaxlm.parallel import logical
from jaxlm.parallel.logical import Sizes
from jaxlm.recipes.config import VOCAB_MULTIPLE, Run
from jaxlm.recipes.plan import (
    attention_kernels,
    cpu_work,
    device_memory,
    divisibility,
    rollout,
)
from jaxlm.recipes.plan.rollout import RolloutForecast
from jaxlm.training.rundir import read_json, split_ref
from jaxlm.tune import cost
from jaxlm.tune.config import Full

# Share of the three products of a projection whose operands are rounded (`ops.matmul`).
EIGHT_BITS = {"int8": 2 / 3, "fp8": 1.0}
# Range of the share of a chip's peak that the products of a step reach, as published trainers
# report: from small models and long rows to large models. A CPU is compared with its own BLAS; its
# other work is that of `cpu_work`.
REACHED = {"accelerator": (0.25, 0.60), "cpu": (0.60, 1.00)}
SMALL = 0.8e6  # parameters below which a CPU's time is that of other work than `cpu_work`
# XLA for CPU writes out the gradient, the direction and, to measure it, the update. Bytes of a step
# of one short row over its parameters, 34M model: AdamW 3.00, Muon 3.00, Lion 2.00 to 3.00.
CPU_COPIES = 3.0
# Kernels of a step, forward and backward, and the seconds from the start of one to that of the next
# if each has little work; a TPU begins them without the host. Compiled for a CPU, a step has 173
# operations per layer and 226 outside of them; compilers for GPUs fuse more.
KERNELS_PER_LAYER, KERNELS_PER_STEP = 100, 150
LAUNCH_SECONDS = {"gpu": (2e-6, 8e-6), "tpu": (0.3e-6, 1e-6)}
HOST_SECONDS = (0.3e-3, 2e-3)  # of Python between two steps, which overlaps with the device
HOST = 8  # GPUs that share a fast interconnect
CAPACITY = 1.25  # of the shipped GPU layouts; Fedus et al. 2021, arXiv:2101.03961, section 2.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """The plan of a run on a machine: bytes of the fullest device, seconds of one step.

    For a chip of unknown speed (`Chip.is_known`) the seconds are an A100's and only rank plans.
    """

    run: Run
    machine: Machine
    sizes: Sizes
    decoder: ModelConfig
    bytes_per_device: dict[str, float]  # of a step
    evaluation_bytes: float  # of a device in an evaluation between two steps
    memory_bytes: float  # of a device, available to a program
    flops_per_token: float
    hardware_flops: float  # of a step, over all devices, recomputation included
    peak_flops: float  # of one device, in the dtype of the products
    sent_bytes: dict[str, float]  # per device, over each axis
    seconds: tuple[float, float]
    checkpoint_bytes: float
    assumed: list[str]
    risks: list[str]
    rollout: RolloutForecast | None = None  # of a run that samples answers

    @property
    def draw_bytes(self) -> float:
        """Bytes of a device while a rollout is drawn; with `rl.lag` that is during a step."""
        if self.rollout is None:
            return 0.0
        held = device_memory.held_bytes(self.run, self.decoder, self.sizes)
        used = sum(held.values()) - held["gradients"]
        if self.run.rl.lag:
            used = self.bytes_per_device["total"] + held["parameters"]  # a copy of those
        return used + self.rollout.cache_bytes + self.rollout.weights_bytes

    @property
    def fits(self) -> bool:
        """Return True if the fullest device has the memory."""
        used = self.bytes_per_device["total"], self.evaluation_bytes, self.draw_bytes
        return max(used) <= self.memory_bytes

    def record(self, price: float | None = None) -> dict[str, Any]:
        """Return the JSON of `jaxlm plan --json`; `price` is that of a device for an hour."""
        low, high = self.seconds
        tokens = self.run.tokens_per_step
        steps = self.run.train.steps
        model_flops = self.flops_per_token * tokens
        draws = (0.0, 0.0) if self.rollout is None else self.rollout.seconds
        drawn = [each / self.run.rl.updates for each in draws]
        pairs = zip(self.seconds, drawn, strict=True)
        hours = [steps * (seconds + draw) / 3600 for seconds, draw in pairs]
        peak = self.peak_flops * self.machine.devices
        chip = self.machine.chip
        is_timed, is_priced = chip.is_known, chip.is_known and price is not None
        mfu = [model_flops / (seconds * peak) for seconds in (high, low)]
        cost = [(price or 0) * self.machine.devices * each for each in hours]
        return {
            "on": self.machine.name,
            "devices": self.machine.devices,
            "mesh": dict(self.sizes),
            "fits": self.fits,
            "memory_bytes": self.memory_bytes,
            "bytes_per_device": self.bytes_per_device,
            "evaluation_bytes_per_device": self.evaluation_bytes,
            "parameters": model_cost.parameters(self.decoder),
            "active_parameters": model_cost.active_parameters(self.decoder),
            "flops_per_token": self.flops_per_token,
            "flops_per_step": model_flops,
            "step_seconds": [low, high] if is_timed else None,
            "tokens_per_second": [tokens / high, tokens / low] if is_timed else None,
            "mfu": mfu if is_timed and chip.name != "cpu" else None,
            "hours": hours if is_timed else None,
            "cost": cost if is_priced else None,
            "tokens": steps * tokens,
            "sent_bytes_per_device": self.sent_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "assumed": self.assumed,
            "risks": self.risks,
        } | self._rollout(is_timed=is_timed)

    def _rollout(self, *, is_timed: bool) -> dict[str, Any]:
        if self.rollout is None:
            return {}
        record = self.rollout.record(self.run, is_timed=is_timed)
        return {"rollout": record | {"bytes_per_device": self.draw_bytes}}

    def sharding(self) -> list[dict[str, Any]]:
        """Return the mesh axes that split each parameter."""
        return device_memory.sharding(self.decoder, self.sizes, self.run.mesh.zero)


def forecast(
    run: Run, machine: Machine, assumed: list[str] | None = None, *, has_base: bool = False
) -> Forecast:
    """Return the plan of `run` on `machine`; with `has_base` it begins with trained weights.

    Raises ConfigError if the run does not divide over the devices, or the requested kernel cannot
    compute its attention there.
    """
    assumed = [] if assumed is None else list(assumed)
    requested, run = run, run.with_compute(chips.fastest_dtype(machine.chip))
    if run is not requested:
        assumed.append(f"precision.compute=auto is {run.precision.compute} on {machine.chip.name}")
    divisibility.check(run, machine.devices)
    sizes = run.mesh.sizes(machine.devices)
    vocab = vocabulary(run, sizes, assumed)
    decoder = run.decoder(vocab)
    target = _target(machine.chip)
    stack = run.train.stack_on(target.platform, machine.devices, len(decoder.layers))
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, stack=stack))
    attention_kernels.check(run, decoder, sizes, target)
    decoder = attention_kernels.with_kernels(run, decoder, sizes, target)
    is_cpu = machine.chip.name == "cpu"
    share = device_memory.share_of(run, decoder, sizes, target.platform)
    held = device_memory.held_bytes(run, decoder, sizes)
    targets = decoder_tokens(run)
    used = held | device_memory.temporary_bytes(run, decoder, share, sizes, held, targets)
    teacher = _teacher(run, assumed)
    teacher_flops = 0.0
    if teacher is not None:
        taught = teacher.decoder(vocab)
        used["teacher"] = device_memory.teacher_bytes(run, teacher, taught, share, sizes)
        whole = model_cost.flops_per_token(taught, run.data.sequence, causal=True)
        teacher_flops = whole / 3  # forward only
    if run.objective.compared_with == "adapter_off":
        teacher_flops = model_cost.flops_per_token(decoder, run.data.sequence, causal=True) / 3
    if is_cpu:
        # Activations are freed before the update: the larger of the two counts.
        coming = held["gradients"] + sum(used.values()) - sum(held.values())
        used["update"] = max(_written(run, held) - coming, 0.0)
    used["total"] = sum(used.values())
    evaluation = device_memory.evaluation_bytes(run, decoder, share, held, targets)
    peak = peak_flops(run.precision.compute_dtype, machine.chip, assumed)
    length = run.data.sequence
    has_logits = not run.objective.has_reward_head
    model_flops = model_cost.flops_per_token(
        decoder, length, causal=True, targets=targets, has_logits=has_logits
    )
    model_flops -= 6 * (1 - run.scored_share) * decoder.vocab * decoder.width
    model_flops += cost.more_flops(run.tune, decoder, _multiplied(run, decoder))
    hardware = _hardware_flops(run, decoder, share) + teacher_flops
    hardware *= run.tokens_per_step
    sent = _sent(run, decoder, sizes, share)
    memory = memory_bytes(machine, assumed)
    low_share, high_share = REACHED["cpu" if is_cpu else "accelerator"]
    if is_cpu:  # a step of few tokens gains nothing from a unit for bfloat16
        low_share *= machine.chip.flops["float32"] / peak
    spared = _spared(run, decoder, machine.chip, peak) * run.tokens_per_step
    compute = (hardware - spared) / (machine.devices * peak)
    if schedule := divisibility.schedule(run, sizes):
        compute /= 1 - schedule.bubble
    # Every step reads and writes the state; no product hides that.
    update = 2 * sum(held.values()) / machine.chip.memory_speed
    if is_cpu:
        speed = machine.devices * machine.chip.flops["float32"]
        update += cpu_work.step(decoder, length) * run.tokens_per_step / speed
    moved = sum(sent.values()) / machine.chip.link_speed
    unknown = f"the speed of {machine.chip.name} is unknown: no times; --fit ranks by an A100's"
    reached = f"products reach between {low_share:.0%} and {high_share:.0%}"
    timed = f"{reached} of {peak / 1e12:.3g} TFLOP/s"
    assumed.append(timed if machine.chip.is_known else unknown)
    if is_cpu and model_cost.parameters(decoder) < SMALL:
        assumed.append("below 0.8M parameters steps and samples took twice as long as planned")
    if not machine.chip.is_tpu and machine.devices > HOST:
        assumed.append(f"links between hosts are as fast as those within a host of {HOST}")
    low, high = max(compute / high_share + update, moved), compute / low_share + update + moved
    if not is_cpu:
        kernels = _kernels(run, decoder)
        launch = LAUNCH_SECONDS[target.platform]
        least = max(launch[0] * kernels, HOST_SECONDS[0]), launch[1] * kernels + HOST_SECONDS[1]
        if low < least[0] and machine.chip.is_known:
            each = f"{launch[0] * 1e6:.2g} to {launch[1] * 1e6:.2g} \u00b5s"
            assumed.append(
                f"{kernels:,} kernels a step, {each} each, take longer than their products"
            )
        low, high = max(low, least[0]), max(high, least[1])
    if run.objective.compared_with not in (None, "adapter_off"):
        once = "a forward pass over the data before the first step"
        if machine.chip.is_known:
            forward = model_cost.flops_per_token(decoder, length, causal=True, targets=targets) / 3
            scored = 1e6 * forward / (machine.devices * peak)
            span = (formatting.duration(scored / each) for each in (high_share, low_share))
            once += f", {' to '.join(span)} per million tokens"
        assumed.append(f"the reference {run.objective.compared_with} is not in the times: {once}")
    drawn = None
    if run.objective.samples_answers:
        launch = (0.0, 0.0) if is_cpu else LAUNCH_SECONDS[target.platform]
        forward = KERNELS_PER_LAYER / 3 * len(decoder.layers)  # kernels of a pass
        begun = launch[0] * forward, launch[1] * forward
        reached_shares = low_share, high_share
        drawn = rollout.forecast(run, decoder, machine, sizes, held, peak, reached_shares, begun)
        assumed.append(f"samples of {run.rl.max_tokens} tokens after prompts that fill the row")
    if sent:
        assumed.append("communication overlaps with products in the best case, not in the worst")
    return Forecast(
        run=requested,
        machine=machine,
        sizes=sizes,
        decoder=decoder,
        bytes_per_device=used,
        evaluation_bytes=evaluation,
        memory_bytes=memory,
        flops_per_token=model_flops,
        hardware_flops=hardware,
        peak_flops=peak,
        sent_bytes=sent,
        seconds=(low, high),
        checkpoint_bytes=_saved(run, decoder),
        assumed=assumed,
        risks=[
            *_evaluation_risk(run, used["total"], evaluation),
            *_risks(run, machine, decoder, sizes),
            *_length_risks(run, decoder, has_base=has_base),
        ],
        rollout=drawn,
    )


def _kernels(run: Run, decoder: ModelConfig) -> int:
    """Return the number of kernels of a step."""
    layers = len(decoder.layers) + len(decoder.heads)
    return (KERNELS_PER_LAYER * layers + KERNELS_PER_STEP) * run.train.microbatches


def _teacher(run: Run, assumed: list[str]) -> Run | None:
    """Return the run of the teacher, or None; if it is not here, assume one as large as `run`."""
    ref = run.objective.teacher
    if not ref:
        return None
    if ref == START:
        return run
    workdir, _ = split_ref(ref)
    if (workdir / "config.json").exists():
        return config.from_json(Run, read_json(workdir, "config.json"), f"{workdir}/config.json")
    assumed.append(f"a teacher as large as the model: {workdir} is not on this machine")
    return run


def _written(run: Run, held: dict[str, float]) -> float:
    """Return the bytes that an update writes out on a CPU: float32 in every dtype of the state."""
    wide, precision = ITEM_BYTES["float32"], run.precision
    copies = CPU_COPIES * held["parameters"] * wide / ITEM_BYTES[precision.params]
    if precision.moments == "float32":
        return copies
    return copies + held["optimizer"] * wide / ITEM_BYTES[precision.moments]


def decoder_tokens(run: Run) -> int:
    """Return the sequence length of a decoder that has an encoder; 0 for other models."""
    is_paired = run.architecture == "encoder-decoder"
    return run.objective.target_length(run.data.sequence) if is_paired else 0


def _target(chip: Chip) -> Target:
    platform = "tpu" if chip.is_tpu else "cpu" if chip.name == "cpu" else "gpu"
    return Target(platform, chip.capability)


def vocabulary(run: Run, sizes: Sizes, assumed: list[str]) -> int:
    """Return `model.vocab`, or the maximum for a tokenizer that is not trained yet."""
    if run.model.vocab != "auto":
        return run.model.vocab
    setting, unit = run.data.tokenizer, VOCAB_MULTIPLE * logical.ways(sizes, "vocab")
    if setting.endswith(TOKENIZER_FILES) and Path(setting).is_file():
        return -(-tokenizer_file.read(setting).size // unit) * unit
    kind, _, size = setting.partition(":")
    known = 320 if kind == "bytes" else int(size) if size.isdigit() else 4096
    vocab = -(-known // unit) * unit
    why = f"model.vocab is auto, the tokenizer {run.data.tokenizer}"
    assumed.append(f"a vocabulary of {vocab:,}: {why}")
    return vocab


def _multiplied(run: Run, decoder: ModelConfig) -> float:
    """Return the number of parameters that a token of a step is multiplied with."""
    whole = model_cost.matmul_parameters_per_token(
        decoder,
        run.data.sequence,
        decoder_tokens(run),
        has_logits=not run.objective.has_reward_head,
    )
    return whole - (1 - run.scored_share) * decoder.vocab * decoder.width


def _hardware_flops(run: Run, decoder: ModelConfig, share: DeviceShare) -> float:
    """Return the FLOPs per token of all products, recomputation included.

    Computed twice are the forward pass of layers, by remat, and the unembedding of chunks. Experts
    multiply rows that are empty, or those of other experts (`models.cost.model_cost`).
    """
    sequence, targets = run.data.sequence, decoder_tokens(run)
    has_logits = not run.objective.has_reward_head
    once = model_cost.flops_per_token(
        decoder, sequence, causal=True, targets=targets, has_logits=has_logits
    )
    once -= 6 * (1 - run.scored_share) * decoder.vocab * decoder.width
    once *= 1 + run.tune.virtual_rows / sequence
    predicted = targets / sequence if targets else run.scored_share
    table = (1 + len(decoder.heads)) * decoder.vocab * decoder.width * predicted
    unembedding = table if has_logits else 0.0
    head = 2 * unembedding
    layers = once / 3 - head
    policies = run.train.remat.split("/")
    parameters = _multiplied(run, decoder)
    recomputed = {"none": 0.0, "dots": layers - 2 * (parameters - unembedding)}
    extra = sum(recomputed.get(policy, layers) for policy in policies) / len(policies)
    whole = once + extra + (head if _loss_parts(run, decoder, share) > 1 else 0.0)
    passes = 3 + sum(policy != "none" for policy in policies) / len(policies)
    whole += passes * _idle_flops(decoder, share)
    whole += cost.more_flops(run.tune, decoder, parameters)
    # Estimating the curvature costs another gradient.
    every = run.optim.curvature_every
    return whole * (1 + 1 / every) if every else whole


def _loss_parts(run: Run, decoder: ModelConfig, share: DeviceShare) -> int:
    """Return the parts in which a device scores its tokens."""
    tokens = device_memory.predicted_tokens(run, decoder, share, decoder_tokens(run))
    return math.ceil(tokens / (run.loss.chunk or tokens))


def _idle_flops(decoder: ModelConfig, share: DeviceShare) -> float:
    """Return the FLOPs per token of experts' forward pass beyond the token's own experts."""
    idle = 0.0
    for block in (*decoder.layers, *decoder.heads):
        if isinstance(block.mlp, MoeConfig):
            rows = (share.length, share.sizes)
            is_dense = model_cost.is_dense_ragged(share.platform)
            multiple = model_cost.expert_flops_ratio(block.mlp, *rows, is_dense=is_dense)
            idle += 2 * (multiple - 1) * model_cost.routed_parameters(block, decoder.width)
    return idle


def _sent(run: Run, decoder: ModelConfig, sizes: Sizes, share: DeviceShare) -> dict[str, float]:
    """Return the bytes that a device sends in a step over each mesh axis of known cost."""
    trained, frozen = cost.split(run.tune, tensors(decoder))
    work = comm_cost.StepWorkload(
        model=decoder,
        sequence=share.length,
        targets=decoder_tokens(run),
        rows=share.rows * run.train.microbatches,
        microbatches=run.train.microbatches,
        repeats=run.train.turns,
        weight_bytes=ITEM_BYTES[run.precision.params],
        gradient_bytes=ITEM_BYTES[run.precision.reduce],
        activation_bytes=share.stream_bytes,
        zero=run.mesh.zero,
        sums_locally=divisibility.sums_locally(run, decoder, sizes),
        loss_parts=_loss_parts(run, decoder, share),
        trained=None if isinstance(run.tune, Full) else tuple(trained),
        frozen=tuple(frozen),
    )
    return {
        axis: comm_cost.BYTES[axis](work, dict(sizes))
        for axis, size in sizes.items()
        if size > 1 and axis in comm_cost.BYTES
    }


def peak_flops(dtype: Dtype, chip: Chip, assumed: list[str]) -> float:
    """Return the FLOP/s of one device in a dtype, or in float32 if the chip lacks the dtype."""
    if dtype in chip.flops:
        return chip.flops[dtype]
    assumed.append(f"{chip.name} has no unit for {dtype}: its products run as float32")
    return chip.flops["float32"]


def _spared(run: Run, decoder: ModelConfig, chip: Chip, peak: float) -> float:
    """Return the FLOPs per token, at `peak`, that 8-bit products save."""
    products = run.precision.products
    if products == "compute" or products not in chip.flops:
        return 0.0
    rounded = EIGHT_BITS[products] * 6 * model_cost.projection_parameters(decoder)
    return rounded * max(1 - peak / chip.flops[products], 0.0)


def memory_bytes(machine: Machine, assumed: list[str]) -> float:
    """Return the bytes of a device's memory that a program gets."""
    if machine.chip.is_tpu or machine.chip.name == "cpu":
        return machine.chip.memory_bytes
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    share = float(os.environ.get(name, "0.75"))
    assumed.append(f"JAX takes {share:.0%} of a GPU's memory ({name}, or its default)")
    return share * machine.chip.memory_bytes


def _saved(run: Run, decoder: ModelConfig) -> float:
    """Return the bytes of one checkpoint, over all hosts, before compression."""
    whole = dict.fromkeys(logical.RULES, 1)
    # Offloaded state is saved too.
    one = dataclasses.replace(run, train=dataclasses.replace(run.train, offload=()))
    held = device_memory.held_bytes(one, decoder, whole)
    first = sum(each.size for each in cost.first_tensors(run.tune, tensors(decoder)))
    first_bytes = first * ITEM_BYTES[run.precision.params]
    return sum(held.values()) - held["gradients"] - held.get("base", 0) + first_bytes


def _evaluation_risk(run: Run, step: float, evaluation: float) -> Iterator[str]:
    """Yield a warning if an evaluation needs more memory than a step."""
    if evaluation > step and run.eval.batch != "auto":
        sizes = f"{formatting.size(evaluation)} per device, a step {formatting.size(step)}"
        yield f"an evaluation needs {sizes}: --config.eval.batch=auto has rows of a micro-batch"


def _risks(run: Run, machine: Machine, decoder: ModelConfig, sizes: Sizes) -> Iterator[str]:
    """Yield warnings that follow from the chip and from experience of training."""
    compute, products, chip = run.precision.compute, run.precision.products, machine.chip
    if compute == "bfloat16" and "bfloat16" not in chip.flops:
        other = "float16" if "float16" in chip.flops else "float32"
        yield f"{chip.name} has no bfloat16: --config.precision.compute={other}"
    if products != "compute" and products not in chip.flops and chip.is_known:
        yield f"{chip.name} has no unit for {products}: rounding makes products slower"
    if compute == "float16":
        overflow = "steps whose scaled gradients overflow are not applied"
        yield f"float16 has a small range: {overflow}; bfloat16 has no such steps"
    yield from dropless_warnings(run, decoder, sizes, _target(chip).platform)


def _length_risks(run: Run, decoder: ModelConfig, *, has_base: bool) -> Iterator[str]:
    """Yield warnings of few steps, and of few tokens for a model that begins without training."""
    tokens = run.pace.tokens(run.train.steps)
    ratio = tokens / model_cost.active_parameters(decoder)
    is_pretraining = run.data.kind == "text" and isinstance(run.tune, Full) and not has_base
    if is_pretraining and ratio < 5:
        best = "about 20 are best for the compute (arXiv:2203.15556)"
        yield f"{tokens:,} tokens are {ratio:.2g} per parameter: {best}"
    if run.train.steps < 100:
        yield f"{run.train.steps} steps are too few for most schedules"


def dropless_warnings(run: Run, decoder: ModelConfig, sizes: Sizes, platform: str) -> Iterator[str]:
    """Yield a warning for each kind of experts that multiplies rows with other experts' weights.

    Only GPUs do: TPUs and CPUs multiply the rows of each expert alone.
    """
    if platform != "gpu":
        return
    length = run.data.sequence // logical.ways(sizes, "length")
    rows = attention_kernels.rows_per_device(run, sizes)
    cost_of: dict[MoeConfig, tuple[float, float]] = {}
    for block in (*decoder.layers, *decoder.heads):
        mlp = block.mlp
        if isinstance(mlp, MoeConfig) and mlp.capacity is None:
            multiple = model_cost.expert_flops_ratio(mlp, length, sizes, is_dense=True)
            widest = max(decoder.width, mlp.hidden // logical.ways(sizes, "mlp"))
            copies: float = model_cost.experts_per_device(mlp, sizes)
            copies *= model_cost.expert_rows(mlp, length, sizes)
            size = rows * length * copies * widest * ITEM_BYTES[run.precision.compute_dtype]
            cost_of[mlp] = multiple, size
    for mlp, (multiple, size) in cost_of.items():
        if multiple > 1:
            yield (
                "model.capacity=None makes XLA for GPUs multiply each row with the weights of all "
                f"{model_cost.experts_per_device(mlp, sizes)} experts of a device: {multiple:.3g} "
                f"times the FLOPs that the tokens' experts need, and {formatting.size(size)} for "
                f"one padded operand; --config.model.capacity={CAPACITY} avoids both, and drops "
                "tokens instead"
            )
