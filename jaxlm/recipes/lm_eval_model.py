"""A run as a model of lm-evaluation-harness, by the name `jaxlm`.

    python -m jaxlm.recipes.lm_eval_model run --model jaxlm --model_args run=runs/a \
      --tasks facts.yaml --include_path=.

The arguments after the module are those of `lm_eval`, which this program calls after it has
registered the model. Answers are scored from the token that holds their first byte on, as
`jaxlm eval --tasks` scores them; see `evals.tasks.requests`.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import model_registry

from jaxlm.core.errors import ConfigError
from jaxlm.data.batch import Tokens
from jaxlm.evals.tasks import requests as texts
from jaxlm.evals.tasks.requests import ScoringRequest
from jaxlm.objectives import loss
from jaxlm.parallel import host, rules
from jaxlm.recipes import language_model, setup
from jaxlm.recipes.use import load

ROWS = 8  # requests that are scored at a time
MAX_TOKENS = 256  # of an answer, where a task names no limit; that of lm-eval's own models
LEAST_SLOTS = 32
OF_SAMPLING = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


class LmEvalModel(LM):
    """The model of a run.

    Args:
      run: a run, RUN@STEP, a folder of transformers or a .gguf file, see `jaxlm.load`.
      sequence: most tokens of a request; by default those of a row of the run.
      batch_size, max_batch_size, device: arguments that lm-eval passes to every model. They change
        nothing: the rows of a pass are fixed, so that results do not depend on them.

    Raises:
      ConfigError: if the model does not predict each token of a text from those before it.
    """

    def __init__(
        self,
        run: str,
        sequence: int | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ):
        super().__init__()
        self._model = language_model.load(run)
        loaded = self._model.loaded
        load.check_scores(loaded)
        self._length = sequence or loaded.run.data.sequence
        mesh, blueprint = loaded.model.mesh, loaded.model.blueprint
        chunk = setup.pass_chunk(loaded.run)
        ways = rules.split(mesh, "batch")
        self._rows = -(-ROWS // ways) * ways
        self._put = functools.partial(host.put, mesh)

        @jax.jit
        def step(params: Any, batch: Tokens) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
            scores = loss.score(blueprint.merge(params), batch, None, chunk)[0]
            return scores.nll * batch.weights, jnp.where(batch.weights > 0, scores.correct, 1.0)

        self._step = step

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return log p of each continuation in nats, and if greedy decoding would write it."""
        pairs = [each.args for each in requests]
        return list(self._scores(texts.encode(self._model.tokenizer, pairs)))

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of each text in nats, in windows of a row that do not overlap."""
        tokenizer = self._model.tokenizer
        start = (tokenizer.before or tokenizer.after)[-1]
        windows: list[ScoringRequest] = []
        counts = []
        for each in requests:
            ids = tokenizer.encode(each.args[0])
            parts = utils.get_rolling_token_windows(ids, start, self._length, 1)
            disjoint = [utils.make_disjoint_window(part) for part in parts]
            counts.append(len(disjoint))
            windows += [ScoringRequest((*a, *b), len(a), False) for a, b in disjoint]
        scores = self._scores(windows)
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, without the text that ended it."""
        answers = []
        for each in requests:
            prompt, settings = each.args
            if unknown := settings.keys() - set(OF_SAMPLING):
                raise ConfigError(
                    f"{sorted(unknown)[0]} is no setting of answers",
                    where="generation_kwargs",
                    why=f"the settings are {', '.join(OF_SAMPLING)}",
                    fix=f"remove {sorted(unknown)[0]} from the generation_kwargs of the task",
                )
            is_sampled = settings.get("do_sample", settings.get("temperature", 0.0) > 0)
            until = settings.get("until") or []
            sampling = {k: settings[k] for k in ("top_k", "top_p") if k in settings}
            (answer,) = self._model.generate(
                prompt,
                max_tokens=settings.get("max_gen_toks", MAX_TOKENS),
                temperature=settings.get("temperature", 1.0) if is_sampled else 0.0,
                stop=[until] if isinstance(until, str) else until,
                **sampling,
            )
            answers.append(answer.text)
        return answers

    def _scores(self, asked: Sequence[ScoringRequest]) -> Iterator[tuple[float, bool]]:
        """Yield the log-likelihood of each request, and if all its ids are the likeliest."""
        longest = max((len(each.ids) - 1 for each in asked), default=0)
        if longest > self._length:
            raise ConfigError(
                "a request does not fit a row",
                where=f"--model_args run={self._model.workdir}",
                why=f"rows have {self._length} tokens, the longest request {longest}",
                fix=f"--model_args=run={self._model.workdir},sequence={longest}",
            )
        for first in range(0, len(asked), self._rows):
            part = asked[first : first + self._rows]
            with jax.set_mesh(self._model.loaded.model.mesh):
                values = self._step(self._model.params, self._put(self._batch(part)))
            nll, correct = (np.asarray(host.fetch(each)) for each in values)
            for row in range(len(part)):
                yield -float(nll[row].sum(dtype=np.float64)), bool(correct[row].all())

    def _batch(self, part: Sequence[ScoringRequest]) -> Tokens:
        longest = max(len(each.ids) - 1 for each in part)
        slots = max(LEAST_SLOTS, 1 << (longest - 1).bit_length())
        shape = (self._rows, min(slots, self._length))
        tokens, targets, segments, positions = (np.zeros(shape, np.int32) for _ in range(4))
        weights = np.zeros(shape, np.float32)
        for row, each in enumerate(part):
            count = len(each.ids) - 1
            tokens[row, :count], targets[row, :count] = each.ids[:-1], each.ids[1:]
            segments[row, :count], positions[row, :count] = 1, np.arange(count)
            weights[row, each.begin - 1 : count] = 1.0
        # NumPy until it is placed on devices.
        return Tokens(tokens, targets, weights, segments, positions)  # type: ignore[arg-type]


def main() -> None:
    """Register the model, and run lm-eval's command line."""
    from lm_eval.__main__ import cli_evaluate

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model_registry.register("jaxlm", target=LmEvalModel)
    cli_evaluate()


if __name__ == "__main__":
    main()
