"""Losses of policy gradients compared with TRL: value and gradient at the same samples.

The script runs in jaxlm's environment and calls itself with the interpreter of another one, which
has TRL 1.16:

    python scripts/parity/policy.py --peft_python=peft/bin/python

`GRPOTrainer` and `RLOOTrainer` compute the loss of samples of uneven lengths whose
log-probabilities when drawn were other ones, and its gradient for the log-probability of each
token, in float64; their model is replaced by those log-probabilities. `GKDTrainer` computes a
divergence of logits. jaxlm computes them in float32 with its objectives, on rows made by
`rl.rollout.as_rows`, with the weights of tis by the recipe. RLOO's ratio is of whole samples in
TRL, so only its gradient on samples of the model itself is compared. A row shows the relative
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

SAMPLES, LONGEST, TOLERANCE = 6, 12, 1e-5
DRAW = np.random.default_rng(0)
LENGTHS = DRAW.integers(1, LONGEST + 1, SAMPLES)
MASK = np.arange(LONGEST) < LENGTHS[:, None]
LOG_P = -DRAW.gamma(2.0, 1.0, MASK.shape) * MASK
OLD, SAMPLER, REFERENCE = (LOG_P + 0.3 * DRAW.normal(size=MASK.shape) * MASK for _ in range(3))
ADVANTAGES = DRAW.normal(size=SAMPLES)
BETA, CAP = 0.3, 1.1
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "rloo": {},
    "grpo, loss_k3": {"kl": "loss_k3"},
    "grpo, loss_k3_weighted": {"kl": "loss_k3_weighted"},
    "dapo, tis": {},
}
VOCAB = 11
STUDENT, TEACHER = DRAW.normal(size=(2, 20, VOCAB)) * 2
DIVERGENCES = {"forward": 0.0, "reverse": 1.0, "jsd": 0.3}  # TRL's beta


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peft_python", help="interpreter of the environment with TRL")
    parser.add_argument("--make", action="store_true", help="of the script itself")
    args = parser.parse_args()
    if args.make:
        losses = {name: by_trl(name) for name in LOSSES}
        print(json.dumps(losses | {name: gkd_by_trl(name) for name in DIVERGENCES}))
        return 0
    done = subprocess.run(
        [args.peft_python, __file__, "--make"], check=True, stdout=subprocess.PIPE, timeout=600
    )
    expected = json.loads(done.stdout.splitlines()[-1])
    worst = 0.0
    for name, (value, gradient) in expected.items():
        own_value, own_gradient = (by_jaxlm if name in LOSSES else gkd_by_jaxlm)(name)
        one = 0.0 if name == "rloo" else abs(own_value - value) / abs(value)
        other = np.abs(own_gradient - np.array(gradient)).max() / np.abs(gradient).max()
        shown = f"loss {value:.6f}, difference {one:.1e}; " if name != "rloo" else ""
        print(f"{name:23} {shown}gradient {other:.1e}")
        worst = max(worst, one, other)
    return int(not worst <= TOLERANCE)


def by_trl(name: str) -> tuple[float, Any]:
    """Return TRL's loss and its gradient for each token's log-probability."""
    import torch
    from trl import GRPOTrainer, RLOOTrainer

    algorithm = name.partition(",")[0]
    log_p, mask = torch.tensor(LOG_P, requires_grad=True), torch.tensor(MASK)
    low, high = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28), "cispo": (0.2, 5.0)}.get(
        algorithm, (0.2, 0.2)
    )
    kl = LOSSES[name].get("kl")
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1, sync_gradients=True
        ),
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=kl == "loss_k3_weighted", steps_per_generation=1
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if algorithm == "gspo" else "token",
        beta=BETA if kl else 0.0,
        loss_type="grpo" if algorithm == "gspo" else algorithm,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm="tis" in name,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
    )
    fake._get_per_token_logps_and_entropies = lambda *_, **__: (log_p, torch.zeros_like(mask), None)
    empty = torch.zeros(SAMPLES, 0)
    old = torch.tensor(OLD)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": mask,
        "completion_mask": mask.long(),
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": old,
        "old_logps": (log_p.detach() * mask).sum(1),
        "ref_per_token_logps": torch.tensor(REFERENCE),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": torch.exp(old - torch.tensor(SAMPLER)).clamp(max=CAP),
    }
    trainer = RLOOTrainer if algorithm == "rloo" else GRPOTrainer
    loss = trainer._compute_loss(fake, None, inputs)
    loss.backward()
    assert log_p.grad is not None
    return float(loss.detach()), log_p.grad.tolist()


def gkd_by_trl(name: str) -> tuple[float, Any]:
    """Return TRL's divergence of logits a token, and its gradient for those of the student."""
    import torch
    from trl.experimental.gkd import GKDTrainer

    student = torch.tensor(STUDENT, requires_grad=True)
    loss = GKDTrainer.generalized_jsd_loss(
        student, torch.tensor(TEACHER), beta=DIVERGENCES[name], temperature=1.3, reduction="sum"
    )
    loss = loss / len(STUDENT)
    loss.backward()
    assert student.grad is not None
    return float(loss.detach()), student.grad.tolist()


def by_jaxlm(name: str) -> tuple[float, np.ndarray]:
    """Return the loss of jaxlm's objective, and its gradient for each token's log-probability."""
    from unittest import mock

    import jax
    import jax.numpy as jnp

    from jaxlm.objectives.build import build
    from jaxlm.objectives.config import LossConfig
    from jaxlm.objectives.policy import DrawnScores, PolicyLearning
    from jaxlm.objectives.policy_config import Policy
    from jaxlm.recipes.train.rescoring import corrected
    from jaxlm.rl.rollout import DrawnSample, Weighted, as_rows

    algorithm: Any = name.partition(",")[0]
    kl = LOSSES[name].get("kl", "none")
    settings = Policy(algorithm=algorithm, kl=kl, beta=BETA, reference="runs/a")
    objective = build(settings, LossConfig())
    assert isinstance(objective, PolicyLearning)
    drawn_as = SAMPLER if "tis" in name else LOG_P if algorithm == "rloo" else OLD
    samples = [
        Weighted(
            np.zeros(1, np.int32),
            DrawnSample(np.ones(size, np.int32), log_p[:size].astype(np.float32), "length"),
            float(advantage),
        )
        for size, log_p, advantage in zip(LENGTHS.tolist(), drawn_as, ADVANTAGES, strict=True)
    ]
    rows = as_rows(samples, LONGEST, mean=settings.terms.mean, max_tokens=LONGEST)
    if "tis" in name:
        rows, _ = corrected(rows, OLD.astype(np.float32), CAP)
    batch = jax.tree.map(jnp.asarray, rows)
    zeros = jnp.zeros(MASK.shape)
    taught: Any = DrawnScores(jnp.asarray(REFERENCE, jnp.float32), zeros), {}

    def loss(log_p: Any) -> Any:
        with mock.patch.object(PolicyLearning, "score", return_value=taught):
            teacher: Any = None if kl == "none" else objective
            return objective.policy_loss(DrawnScores(log_p, zeros), batch, teacher)[0].value

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(LOG_P, jnp.float32))
    return float(value), np.asarray(gradient)


def gkd_by_jaxlm(name: str) -> tuple[float, np.ndarray]:
    """Return jaxlm's divergence of logits a token, and its gradient for those of the student."""
    import jax
    import jax.numpy as jnp

    from jaxlm.objectives.distill import divergence

    kind: Any = name

    def loss(student: Any) -> Any:
        return divergence(jnp.asarray(TEACHER), student, 1.3, kind, DIVERGENCES["jsd"]).mean()

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(STUDENT, jnp.float32))
    return float(value), np.asarray(gradient)


if __name__ == "__main__":
    sys.exit(main())
