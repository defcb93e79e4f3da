"""Predicted memory and speed of `jaxlm serve`, by arithmetic alone. Free of JAX.

Example:
  >>> from jaxlm.core import config
  >>> from jaxlm.monitor.chips import machine
  >>> run = config.load(Run, None, [("model", "llama3-8b")]).value
  >>> plan = forecast_serving(run, machine("h200", flag="--on"), slots=8, context=4096)
  >>> plan.fits, plan.most_slots > 8
  (True, True)
"""

import dataclasses
import math
from collections import Counter
from typing import Any, Literal, NamedTuple

from jaxlm.core import backend
from jaxlm.core.errors import ConfigError
from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.generate.config import GUESSES, PARTS
from jaxlm.models.config import DecoderConfig, EncoderDecoderConfig, ModelConfig, OneStack
from jaxlm.models.cost import model_cost
from jaxlm.models.cost.tensors import tensors
from jaxlm.monitor import chips
from jaxlm.monitor.chips import Machine
from jaxlm.ops.kernels import INTEGERS
from jaxlm.parallel.config import AXES
from jaxlm.parallel.logical import LAYERS
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict
from jaxlm.tune import cost
from jaxlm.tune.config import Full, Quantized

# Seen and drawn ids, biases and ids that end a request: bytes of an id of the vocabulary.
ID_BYTES = 1 + 4 + 4 + 1
LOGITS_COPIES = 3  # float32 logits of all slots in a pass: raw, penalized, sorted
CHUNK = 64  # tokens of a prompt that a pass reads, as of `jaxlm serve`
# Settings of the runs that `jaxlm quantize` writes by default.
CODES: tuple[dict[str, Any], ...] = (
    {"tune.name": "quantized", "tune.base": "int8"},
    {"tune.name": "quantized", "tune.base": "int4", "tune.block": 128},
)
PlannedDraft = Run | Literal["lookup", "heads"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingForecast:
    """The plan of a server, or of another use of its engine, on one device."""

    machine: Machine
    slots: int
    context: int  # tokens of a request, its prompt included
    weights_bytes: float
    draft_bytes: float  # weights of the draft
    layer_bytes: float  # weights of a layer, all its experts, as its products read them
    slot_bytes: float  # KV caches and state of a request
    start_bytes: float  # before the slots exist: on a CPU, parameters and what is made of them
    memory_bytes: float  # of the device, available to a program
    pass_seconds: tuple[float, float]  # of a token of all slots: empty caches, and full ones
    assumed: list[str]

    @property
    def total_bytes(self) -> float:
        """Bytes of the server, at its start or with all slots."""
        return max(self.start_bytes, self._fixed_bytes + self.slots * self.slot_bytes)

    @property
    def _fixed_bytes(self) -> float:
        return self.weights_bytes + self.draft_bytes + self.layer_bytes

    @property
    def fits(self) -> bool:
        """Return True if the device has the memory."""
        return self.total_bytes <= self.memory_bytes

    @property
    def most_slots(self) -> int:
        """Largest number of slots of this context that fit; 0 if the weights do not."""
        return self.slots_within(self.memory_bytes)

    def slots_within(self, memory: float) -> int:
        """Return the largest number of slots of this context within that many bytes."""
        if memory < self.start_bytes:
            return 0
        return max(0, int((memory - self._fixed_bytes) // self.slot_bytes))

    def record(self) -> dict[str, Any]:
        """Return the JSON of `jaxlm plan --serve --json`."""
        is_timed = self.machine.chip.is_known
        fast, slow = self.pass_seconds
        return {
            "on": self.machine.name,
            "slots": self.slots,
            "context": self.context,
            "fits": self.fits,
            "memory_bytes": self.memory_bytes,
            "total_bytes": self.total_bytes,
            "weights_bytes": self.weights_bytes,
            "draft_bytes": self.draft_bytes,
            "layer_bytes": self.layer_bytes,
            "slot_bytes": self.slot_bytes,
            "start_bytes": self.start_bytes,
            "most_slots": self.most_slots,
            "pass_seconds": [fast, slow] if is_timed else None,
            "tokens_per_second": [self.slots / slow, self.slots / fast] if is_timed else None,
            "assumed": self.assumed,
        }


def forecast_serving(
    run: Run,
    machine: Machine,
    *,
    slots: int,
    context: int | None = None,
    chunk: int = CHUNK,
    is_int8: bool = False,
    draft: PlannedDraft = None,
    keeps_params: bool = False,
    assumed: list[str] | None = None,
) -> ServingForecast:
    """Return the plan of serving the model of `run` on one device.

    Args:
      run: the run.
      machine: the device.
      slots: requests that run at once.
      context: largest number of tokens of a request; by default `data.sequence`.
      chunk: tokens of a prompt that are read in one pass.
      is_int8: store the KV cache in int8.
      draft: the run that guesses tokens, which has the vocabulary of the model, or another kind.
      keeps_params: see `EngineSettings`; a server keeps none.
      assumed: assumptions made so far.

    Raises:
      ConfigError: if the machine has several devices, or a model has an encoder, or no heads that
        are to guess tokens.
    """
    assumed = [] if assumed is None else list(assumed)
    chip, is_cpu = machine.chip, machine.chip.name == "cpu"
    if machine.devices > 1:
        raise ConfigError(
            "a server uses one device",
            where=f"--on={machine.name}",
            why="the engine has one KV cache; start a server on each device",
            fix="--devices=1" if is_cpu else f"--on={chip.name}",
        )
    run = run.with_compute(chips.fastest_dtype(chip))
    decoder = _served(
        run.decoder(predict.vocabulary(run, dict.fromkeys(AXES, 1), assumed)),
        where="an encoder-decoder",
        fix="`jaxlm generate` continues its prompts",
    )
    context = context or run.data.sequence
    weights = _weights(run, decoder, is_cpu=is_cpu)
    # A CPU reads other arrays than the parameters, which are made from them.
    held = start = weights.stored + (weights.placed if is_cpu else 0)
    if is_cpu and not keeps_params:
        held = weights.placed
        start = max(weights.stored, weights.placed) + weights.placed / PARTS + weights.largest
    chunk, spare = min(chunk, context), 0 if draft is None else GUESSES
    if draft == "heads":
        spare = check_heads(run, decoder)
    tokens = chunk * math.ceil(context / chunk)
    cache = _cache_bytes(run, decoder, tokens, spare, is_cpu=is_cpu, is_int8=is_int8)
    more, drafted = 0.0, 0.0
    if draft == "lookup":
        drafted = 4 * (tokens + 1)  # ids of the text, their number
    elif draft == "heads":
        # The heads are decoders of a layer; the stream is that of the last layer, at each id.
        heads = dataclasses.replace(decoder, pattern=decoder.layers[-1:], prefix=(), depth=spare)
        drafted = _cache_bytes(run, heads, tokens, spare, is_cpu=is_cpu)
        each = ITEM_BYTES["float32" if is_cpu else run.precision.compute_dtype]
        drafted += (tokens + spare) * (each * decoder.width + 4) + 4
    elif draft is not None:
        smaller = draft.with_compute(chips.fastest_dtype(chip))
        its = _served(
            smaller.decoder(decoder.vocab),
            where="the draft is an encoder-decoder",
            fix="--draft=lookup    # needs no run",
        )
        more = _weights(smaller, its, is_cpu=is_cpu).placed  # its parameters are not kept
        drafted = _cache_bytes(smaller, its, tokens, spare, is_cpu=is_cpu)
    logits = (LOGITS_COPIES + spare) * ITEM_BYTES["float32"] * decoder.vocab
    assumed.append("a pass reads all weights, and all caches in the worst case")
    if draft is not None:
        assumed.append("the speed is that without the draft")
    return ServingForecast(
        machine=machine,
        slots=slots,
        context=context,
        weights_bytes=held,
        draft_bytes=more,
        layer_bytes=0.0 if is_cpu else _layer_bytes(run, decoder),
        slot_bytes=cache + drafted + ID_BYTES * decoder.vocab + logits,
        start_bytes=start + more,
        memory_bytes=predict.memory_bytes(machine, assumed),
        pass_seconds=(
            weights.read / chip.memory_speed,
            (weights.read + slots * cache) / chip.memory_speed,
        ),
        assumed=assumed,
    )


class SmallerServer(NamedTuple):
    """A plan of fewer bytes that has a slot, and what changes for it."""

    forecast: ServingForecast
    is_int8: bool
    settings: dict[str, Any]  # of the run


def nearest(
    run: Run, failed: ServingForecast, draft: PlannedDraft, *, is_int8: bool
) -> SmallerServer | None:
    """Return the first that fits: an int8 cache, 16 bits, both, then codes with each; else None.

    Args:
      run: the run.
      failed: its plan, in which no slot fits.
      draft: as in that plan.
      is_int8: as in that plan.
    """
    compute = "bfloat16" if "bfloat16" in failed.machine.chip.flops else "float16"
    half = {"precision.params": "bfloat16", "precision.compute": compute}
    changes: list[tuple[bool, dict[str, Any]]]
    changes = [(True, {}), (is_int8, half), (True, half)]
    if isinstance(run.tune, Full):  # `jaxlm quantize` refuses an adapter
        coded = [(is_int8, {}), *changes]
        changes += [(each, more | codes) for codes in CODES for each, more in coded]
    for is_small, settings in changes:
        try:
            changed = run.changed(settings)
        except ConfigError:  # of other settings of the run
            continue
        plan = forecast_serving(
            changed,
            failed.machine,
            slots=failed.slots,
            context=failed.context,
            is_int8=is_small,
            draft=draft,
        )
        if slots := min(plan.slots, plan.most_slots):
            plan = dataclasses.replace(plan, slots=slots)
            return SmallerServer(plan, is_small and not is_int8, settings)
    return None


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Bytes of the weights."""

    stored: float  # the parameters
    placed: float  # the arrays that the programs of a CPU get
    read: float  # those that a pass reads
    largest: float  # what a CPU's programs read of the largest parameter


def _weights(run: Run, decoder: ModelConfig, *, is_cpu: bool) -> _Weights:
    numbers, item = model_cost.parameters(decoder), ITEM_BYTES[run.precision.params]
    # The table of an embedding is looked up, not multiplied, unless it is tied to the head.
    table = decoder.vocab * decoder.width
    multiplied = ITEM_BYTES[run.precision.compute_dtype] if is_cpu else item
    read = (numbers - (0 if decoder.tied else table)) * multiplied
    stored = numbers * item
    if isinstance(run.tune, Quantized):
        leaves = list(tensors(decoder))
        codes = cost.split(run.tune, leaves)[1]
        stored = sum(each.size * (each.item_bytes or item) for each in codes)
        if run.tune.base in INTEGERS:  # products read the codes
            rounded = sum(each.size for each in cost.adapted_weights(run.tune, leaves))
            read += stored - (numbers - rounded) * item - rounded * multiplied
    # A CPU multiplies a copy of the table if it is tied.
    looked_up = 0 if decoder.tied and not is_cpu else table
    largest = multiplied * max(each.size for each in tensors(decoder))
    return _Weights(stored, read + looked_up * item, read, largest)


def _layer_bytes(run: Run, decoder: ModelConfig) -> float:
    """Return the bytes of the largest layer's weights in the compute dtype.

    A pass makes them from codes or from a slice of the stack; all experts of a layer exist at once.
    A CPU has them from `prepare` on.
    """
    by_layer = Counter[str]()
    for each in tensors(decoder):
        if each.axes[0] in LAYERS and each.is_matrix:
            by_layer[each.path.rsplit("/", 3)[0]] += each.size // each.shape[0]
    return float(ITEM_BYTES[run.precision.compute_dtype] * max(by_layer.values()))


def _cache_bytes(
    run: Run,
    decoder: ModelConfig,
    tokens: int,
    spare: int,
    *,
    is_cpu: bool,
    is_int8: bool = False,
) -> float:
    """Return the bytes of the KV cache of a slot.

    Args:
      run: the run.
      decoder: its model.
      tokens: slots of a layer without a window.
      spare: guesses at a time.
      is_cpu: the blocks of a CPU's cache have no room for guesses beyond the end of a text.
      is_int8: it has numbers of int8, and a float32 scale for each head's key and value.
    """
    each = ITEM_BYTES[backend.cached_dtype(run.precision.compute_dtype, is_cpu=is_cpu)]
    each, scale = (1, ITEM_BYTES["float32"]) if is_int8 else (each, 0)
    slots = tokens if is_cpu else tokens + spare
    return float(
        model_cost.cache_bytes(decoder, slots, element_bytes=each, scale_bytes=scale, spare=spare)
    )


def check_heads(run: Run, decoder: ModelConfig) -> int:
    """Return the number of heads that guess tokens. Raises ConfigError if there are none."""
    if isinstance(decoder, DecoderConfig) and decoder.heads:
        return len(decoder.heads)
    raise ConfigError(
        "this model has no heads that guess tokens",
        where="--draft=heads",
        why=f"the run trained none, with objective.name={run.objective.name}; mtp trains them",
        fix="--draft=lookup    # needs no heads",
    )


def _served(decoder: ModelConfig, *, where: str, fix: str) -> OneStack:
    """Return the model. Raises ConfigError if it has an encoder."""
    if isinstance(decoder, EncoderDecoderConfig):
        raise ConfigError(
            "the engine does not serve this model",
            where=where,
            why="an encoder reads a prompt as a whole, and the engine reads it in chunks",
            fix=fix,
        )
    return decoder
