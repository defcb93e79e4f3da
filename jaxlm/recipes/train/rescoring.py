"""Scores of samples by the program that is trained: values, a reference, corrected weights."""

from typing import Any

import jax
import numpy as np

from jaxlm.core import tree
from jaxlm.data.batch import Tokens
from jaxlm.objectives.policy import HIGH, PolicyLearning
from jaxlm.objectives.policy_config import Ppo
from jaxlm.ops.advantage import gae, whitened
from jaxlm.parallel import host
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.training import state as states


class Rescorer:
    """Forward passes over a rollout with the parameters that drew it, in batches of an update.

    The pass is that of the step, without dropout: its precision, kernels and mesh. Use it under the
    mesh of the programs.
    """

    def __init__(self, programs: TrainPrograms):
        run, mesh = programs.run, programs.model.mesh
        self._programs, self._size = programs, run.train.batch
        self._has_penalty = isinstance(run.objective, Ppo) and run.objective.kl == "reward_k1"
        self._score = jax.jit(self._scores, out_shardings=states.replicated(mesh))
        self._rows = host.host_rows(mesh, self._size)

    def rescored(self, rows: Tokens, params: Any) -> tuple[Tokens, dict[str, float]]:
        """Return the rows of a rollout with the columns of its objective, and figures.

        Args:
          rows: NumPy arrays, see `rl.rollout.as_rows`. With a value head the advantages are the
            rewards of the samples.
          params: those of the state that drew them.
        """
        programs, run = self._programs, self._programs.run
        parts = []
        for first in range(0, len(rows.tokens), self._size):
            part = jax.tree.map(lambda x, low=first: x[low : low + self._size][self._rows], rows)
            batch = host.put(programs.model.mesh, part)
            scores = self._score(params, batch, programs.extra_inputs)
            parts.append({name: np.asarray(each) for name, each in scores.items()})
        scores = {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
        figures: dict[str, float] = {}
        if run.rl.correction == "tis":
            rows, figures = corrected(rows, scores["log_p"], run.rl.correction_cap)
        if isinstance(run.objective, Ppo):
            rows, more = valued(rows, scores, run.objective)
            figures |= more
        return rows, figures

    def _scores(self, params: Any, batch: Tokens, extra: dict[str, Any]) -> dict[str, jax.Array]:
        """Return log-probabilities, values and log-probabilities under the reference, [B, T]."""
        programs = self._programs
        objective, base = programs.objective, extra.get("base")
        assert isinstance(objective, PolicyLearning)
        whole = params if base is None else tree.merge_leaves(base, params)
        scores, _ = objective.score(programs.model.trained.merge(whole), batch, None)
        out = {"log_p": scores.log_p}
        if scores.value is not None:
            out["value"] = scores.value
        if self._has_penalty:
            taught = programs.taught(extra.get("teacher"), base, extra.get("adapter"))
            out["reference"] = objective.score(taught, batch, None)[0].log_p
        return out


def corrected(rows: Tokens, log_p: np.ndarray, cap: float) -> tuple[Tokens, dict[str, float]]:
    """Return rows whose weights have truncated ratios to the sampler, and ratios a new divisor.

    Source: Yao et al. 2025, fengyao.notion.site/off-policy-rl (truncated importance sampling);
    Ionides 2008, J. Comput. Graph. Stat. 17(2) (the estimator).
    """
    assert rows.rollout is not None
    is_drawn = np.asarray(rows.weights > 0)
    scored: Any = np.where(is_drawn, log_p, 0.0).astype(np.float32)
    gap = np.where(is_drawn, scored - rows.rollout.log_p, 0.0)
    ratio = np.minimum(np.exp(np.minimum(gap, 80.0)), cap).astype(np.float32)
    known = np.abs(gap[is_drawn])
    figures = {}
    if known.size:
        figures = {
            "sampler_gap_nats": float(known.mean()),
            "sampler_gap_high_nats": float(np.quantile(known, HIGH)),
            "correction_mean": float(ratio[is_drawn].mean()),
            "correction_capped_share": float((ratio[is_drawn] >= cap).mean()),
        }
    rollout = rows.rollout._replace(log_p=scored)
    return rows._replace(weights=rows.weights * ratio, rollout=rollout), figures


def valued(
    rows: Tokens, scores: dict[str, np.ndarray], settings: Ppo
) -> tuple[Tokens, dict[str, float]]:
    """Return rows with values, returns and advantages in place of the rewards of their samples."""
    assert rows.rollout is not None
    is_drawn = np.asarray(rows.weights > 0)
    is_last = is_drawn & (np.cumsum(is_drawn[:, ::-1], axis=1)[:, ::-1] == 1)
    rewards = np.where(is_last, rows.rollout.advantages, 0.0).astype(np.float64)
    figures = {}
    if "reference" in scores:
        # Ids that are never drawn have a log-probability of -inf under both.
        log_p, log_q = (np.where(is_drawn, scores[name], 0.0) for name in ("log_p", "reference"))
        distance = log_p - log_q
        rewards -= settings.beta * distance
        k3 = (np.expm1(-distance) + distance)[is_drawn]
        figures["kl_nats"] = float(k3.mean()) if k3.size else 0.0
    values = np.where(is_drawn, scores["value"], 0.0).astype(np.float64)
    terms = {"gamma": settings.gamma, "lam": settings.gae_lambda}
    advantages = gae(rewards, values, is_drawn, **terms)
    returns = np.where(is_drawn, advantages + values, 0.0)
    known = returns[is_drawn]
    if known.size and known.var() > 0:
        figures["explained_variance"] = float(1 - advantages[is_drawn].var() / known.var())
    if settings.scale == "batch":
        advantages = whitened(advantages, is_drawn)
    columns = {"advantages": advantages, "values": values, "returns": returns}
    narrow: dict[str, Any] = {name: each.astype(np.float32) for name, each in columns.items()}
    return rows._replace(rollout=rows.rollout._replace(**narrow)), figures
