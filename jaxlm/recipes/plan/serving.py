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
from typing import Any

from jaxlm.core.errors import ConfigError
from jaxlm.core.precision_config import ITEM_BYTES
from jaxlm.models.config import EncoderDecoderConfig
from jaxlm.models.cost import model_cost
from jaxlm.monitor import chips
from jaxlm.monitor.chips import Machine
from jaxlm.parallel.config import AXES
from jaxlm.recipes.config import Run
from jaxlm.recipes.plan import predict

LEAST_CPU_SLOTS = 2  # a row alone is slower on a CPU, so the engine has two (generate.engine)
# Seen and drawn ids, biases and ids that end a request: bytes of an id of the vocabulary.
ID_BYTES = 1 + 4 + 4 + 1
LOGITS_COPIES = 3  # float32 logits of all slots in a pass: raw, penalized, sorted


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingForecast:
    """The plan of a server on one device."""

    machine: Machine
    slots: int
    context: int  # tokens of a request, its prompt included
    weights_bytes: float
    slot_bytes: float  # KV cache and state of a request
    memory_bytes: float  # of the device, available to a program
    pass_seconds: tuple[float, float]  # of a token of all slots: empty caches, and full ones
    assumed: list[str]

    @property
    def total_bytes(self) -> float:
        """Bytes of the server."""
        return self.weights_bytes + self.slots * self.slot_bytes

    @property
    def fits(self) -> bool:
        """Return True if the device has the memory."""
        return self.total_bytes <= self.memory_bytes

    @property
    def most_slots(self) -> int:
        """Largest number of slots of this context that fit; 0 if the weights do not."""
        return max(0, int((self.memory_bytes - self.weights_bytes) // self.slot_bytes))

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
            "slot_bytes": self.slot_bytes,
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
    is_int8: bool = False,
    assumed: list[str] | None = None,
) -> ServingForecast:
    """Return the plan of serving the model of `run` on one device.

    Args:
      run: the run.
      machine: the device.
      slots: requests that run at once.
      context: largest number of tokens of a request; by default `data.sequence`.
      is_int8: store the KV cache in int8.
      assumed: assumptions made so far.

    Raises:
      ConfigError: if the machine has several devices, or the model has an encoder.
    """
    assumed = [] if assumed is None else list(assumed)
    chip, is_cpu = machine.chip, machine.chip.name == "cpu"
    if machine.devices > 1:
        raise ConfigError(
            "a server uses one device",
            where=f"--on={machine.name}",
            why="the engine has one KV cache; start a server on each device",
            fix="--on=cpu" if chip.is_tpu else f"--on={chip.name}",
        )
    run = run.with_compute(chips.fastest_dtype(chip))
    decoder = run.decoder(predict.vocabulary(run, dict.fromkeys(AXES, 1), assumed))
    if isinstance(decoder, EncoderDecoderConfig):
        raise ConfigError(
            "the engine does not serve this model",
            where="an encoder-decoder",
            why="an encoder reads a prompt as a whole, and the engine reads it in chunks",
            fix="`jaxlm generate` continues its prompts",
        )
    context = context or run.data.sequence
    slots = max(slots, LEAST_CPU_SLOTS) if is_cpu else slots
    compute, numbers = run.precision.compute_dtype, model_cost.parameters(decoder)
    # The table of an embedding is looked up, not multiplied, unless it is tied to the head.
    table = 0 if decoder.tied else decoder.vocab * decoder.width
    stored = numbers * ITEM_BYTES[run.precision.params]
    read = (numbers - table) * ITEM_BYTES[compute if is_cpu else run.precision.params]
    # A CPU reads other arrays than the parameters, and the server keeps both.
    copied = read + table * ITEM_BYTES[run.precision.params] if is_cpu else 0
    # A CPU keeps activations in float32 in every dtype, and so the cache.
    cached = ITEM_BYTES["float32"] if is_cpu else ITEM_BYTES[compute]
    cache = float(model_cost.cache_bytes(decoder, context, element_bytes=1 if is_int8 else cached))
    if is_int8:  # a float32 scale for each head's key and value of a token
        heads = sum(
            2 * block.attention.cached[0] * min(block.attention.window or context, context)
            for block in decoder.layers
        )
        cache += ITEM_BYTES["float32"] * heads
    logits = LOGITS_COPIES * ITEM_BYTES["float32"] * decoder.vocab
    assumed.append("a pass reads all weights, and all caches in the worst case")
    return ServingForecast(
        machine=machine,
        slots=slots,
        context=context,
        weights_bytes=stored + copied,
        slot_bytes=cache + ID_BYTES * decoder.vocab + logits,
        memory_bytes=predict.memory_bytes(machine, assumed),
        pass_seconds=(read / chip.memory_speed, (read + slots * cache) / chip.memory_speed),
        assumed=assumed,
    )
