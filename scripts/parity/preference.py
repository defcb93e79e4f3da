"""Losses of preferences and of rewards compared with TRL: value and gradient at the same inputs.

The script runs in jaxlm's environment and calls itself with the interpreter of another one, which
has TRL 1.16:

    python scripts/parity/preference.py --peft_python=peft/bin/python

TRL's trainers compute the mean loss of a batch of pairs of uneven lengths, and its gradient for the
log-probability of each token, in float64; their model is replaced by those log-probabilities, and
that of a reward model by scores.
jaxlm computes both in float32 with its objective's own sums over answers. A row shows the relative
difference of the loss, and the largest difference of a gradient over the largest gradient. The exit
code is 1 if a difference exceeds 1e-5.
"""

import argparse
import collections
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

PAIRS, LONGEST, TOLERANCE = 6, 12, 1e-5
DRAW = np.random.default_rng(0)
LENGTHS = DRAW.integers(1, LONGEST + 1, 2 * PAIRS)  # of chosen answers, then of rejected ones
MASK = np.arange(LONGEST) < LENGTHS[:, None]
LOG_P, REFERENCE = (-DRAW.gamma(2.0, 1.0, MASK.shape) * MASK for _ in range(2))
BETA, SMOOTHING, GAMMA = 0.3, 0.2, 0.8
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "dpo, robust": {"smoothing": SMOOTHING, "noise": "robust"},
    "hinge": {},
    "ipo": {},
    "kto": {},
    "simpo": {"gamma": GAMMA},
    "orpo": {},
    "reward": {"center": 0.2},
}
SCORES, MARGINS = DRAW.normal(size=2 * PAIRS), DRAW.gamma(2.0, 1.0, PAIRS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peft_python", help="interpreter of the environment with TRL")
    parser.add_argument("--make", action="store_true", help="of the script itself")
    args = parser.parse_args()
    if args.make:
        print(json.dumps({name: by_trl(name) for name in LOSSES}))
        return 0
    done = subprocess.run(
        [args.peft_python, __file__, "--make"], check=True, stdout=subprocess.PIPE, timeout=600
    )
    expected = json.loads(done.stdout.splitlines()[-1])
    worst = 0.0
    for name, (value, gradient) in expected.items():
        own_value, own_gradient = by_jaxlm(name)
        largest = np.abs(gradient).max()
        one = abs(own_value - value) / abs(value)
        other = np.abs(own_gradient - np.array(gradient)).max() / largest
        print(f"{name:17} loss {value:.6f}, difference {one:.1e}; gradient {other:.1e}")
        worst = max(worst, one, other)
    return int(not worst <= TOLERANCE)


def by_trl(name: str) -> tuple[float, Any]:
    """Return TRL's mean loss and its gradient for each token's log-probability."""
    import torch

    if name == "reward":
        return reward_by_trl()
    log_p = torch.tensor(LOG_P, requires_grad=True)
    mask = torch.tensor(MASK)
    masked = torch.where(mask, log_p, torch.zeros_like(log_p))
    sums, reference = masked.sum(1), torch.tensor(REFERENCE.sum(1))
    means = sums / mask.sum(1)
    kind = name.partition(",")[0]
    if kind in ("simpo", "orpo"):
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer

        gamma = LOSSES[name].get("gamma")
        fake = SimpleNamespace(
            alpha=0.0,
            beta=BETA,
            label_smoothing=0.0,
            loss_type="simpo",
            simpo_gamma=gamma,
            accelerator=SimpleNamespace(device="cpu"),
        )
        if kind == "simpo":
            loss = CPOTrainer.cpo_loss(fake, means[:PAIRS], means[PAIRS:])[0].mean()
        else:
            losses = ORPOTrainer.odds_ratio_loss(fake, means[:PAIRS], means[PAIRS:])[0]
            loss = -means[:PAIRS].mean() - losses.mean()
    else:
        loss = by_trainer(name, kind, masked, reference)
    loss.backward()
    assert log_p.grad is not None
    return float(loss.detach()), log_p.grad.tolist()


def reward_by_trl() -> tuple[float, list[float]]:
    """Return TRL's mean loss of a reward model, and its gradient for each score."""
    import torch
    from trl import RewardTrainer

    scores = torch.tensor(SCORES, requires_grad=True)
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=LOSSES["reward"]["center"]),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )

    def model(**_: Any) -> Any:
        return SimpleNamespace(logits=scores[:, None])

    inputs = {"margin": torch.tensor(MARGINS), "attention_mask": torch.ones(2 * PAIRS, 1)}
    loss = RewardTrainer.compute_loss(fake, model, inputs)
    loss.backward()
    assert scores.grad is not None
    return float(loss.detach()), scores.grad.tolist()


def by_trainer(name: str, kind: str, log_p: Any, reference: Any) -> Any:
    """Return the mean loss of TRL's DPO or KTO trainer on a model that gives `log_p`."""
    import torch
    from trl import DPOTrainer, KTOTrainer

    # The first slot is a prompt, which no loss reads.
    mask = torch.tensor(np.pad(MASK, ((0, 0), (1, 0))).astype(np.int64))
    outputs = SimpleNamespace(
        log_probs=log_p,
        entropy=torch.zeros_like(log_p),
        mean_logits=torch.zeros_like(log_p),
        is_top1=torch.zeros(log_p.shape, dtype=torch.bool),
    )

    class Model:
        training = True

        def __call__(self, **_: Any) -> Any:
            return outputs

    model = Model()
    types = {"dpo": "robust" if "robust" in name else "sigmoid"}
    fake = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(
            device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[types.get(kind, kind)],
        loss_type="apo_zero_unpaired",
        loss_weights=[1.0],
        beta=BETA,
        label_smoothing=SMOOTHING,
        use_weighting=False,
        calculate_KL=False,
        _compute_kl_logps=lambda *_: None,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        _metrics={"train": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}
    if kind == "kto":
        labels = torch.arange(2 * PAIRS) < PAIRS
        batch = inputs | {"label": labels, "ref_logps": reference}
        return KTOTrainer._compute_loss(fake, model, batch, False)
    pair = {"ref_chosen_logps": reference[:PAIRS], "ref_rejected_logps": reference[PAIRS:]}
    return DPOTrainer._compute_loss(fake, model, inputs | pair, False)


def by_jaxlm(name: str) -> tuple[float, np.ndarray]:
    """Return the loss of jaxlm's objective, and its gradient for each token's log-probability."""
    from unittest import mock

    import jax
    import jax.numpy as jnp

    from jaxlm.data.batch import Answers, Tokens
    from jaxlm.objectives import preference, reward
    from jaxlm.objectives.build import build
    from jaxlm.objectives.config import LossConfig
    from jaxlm.objectives.preference_config import Preference, Reward

    order = np.arange(2 * PAIRS).reshape(2, PAIRS).T.ravel()  # chosen, rejected, chosen, ...
    segments = np.repeat(1 + np.arange(2 * PAIRS), LONGEST)[None].astype(np.int32)
    sides = np.resize(np.array([1, -1], np.float32), 2 * PAIRS)[None]
    kind: Any = name.partition(",")[0]
    settings = LOSSES[name]
    if kind == "reward":
        learned = build(Reward(**settings), LossConfig())
        margins = np.repeat(MARGINS, 2)[None].astype(np.float32)
        judged: Any = Answers(jnp.asarray(sides), jnp.asarray(margins))
        slots = jnp.asarray(segments)
        rewards = Tokens(slots, slots, slots, slots, slots, answers=judged)

        def reward_loss(scores: Any) -> Any:
            with mock.patch.object(reward, "score_texts", return_value=(scores[order][None], {})):
                return learned.loss(None, rewards, None).value  # type: ignore[arg-type]

        value, gradient = jax.value_and_grad(reward_loss)(jnp.asarray(SCORES, jnp.float32))
        return float(value), np.asarray(gradient)
    objective = build(Preference(loss=kind, beta=BETA, **settings), LossConfig())
    has_reference = objective.settings.compared_with is not None
    scores = REFERENCE.sum(1)[order][None].astype(np.float32) if has_reference else None
    tokens = jnp.zeros_like(segments)
    weights = MASK[order].reshape(1, -1).astype(np.float32)
    fields: Any = (jnp.asarray(sides), jnp.zeros_like(sides), scores)
    answers = Answers(*fields)
    batch = Tokens(
        *(tokens, tokens, jnp.asarray(weights), jnp.asarray(segments), tokens),
        answers=answers,
    )

    def loss(log_p: Any) -> Any:
        scored = SimpleNamespace(nll=-log_p[order].reshape(1, -1))
        with mock.patch.object(preference, "score", return_value=(scored, {})):
            return objective.loss(None, batch, None).value  # type: ignore[arg-type]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(LOG_P, jnp.float32))
    return float(value), np.asarray(gradient)


if __name__ == "__main__":
    sys.exit(main())
