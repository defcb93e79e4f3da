"""Choice of the objective by the type of its settings."""

from typing import Any

from jaxlm.core import user_code
from jaxlm.core.errors import ConfigError
from jaxlm.objectives import config, objective
from jaxlm.objectives.config import LossConfig
from jaxlm.objectives.distill import Distillation
from jaxlm.objectives.facts import Architecture
from jaxlm.objectives.objective import Objective
from jaxlm.objectives.policy import PolicyLearning
from jaxlm.objectives.policy_config import Policy, Ppo
from jaxlm.objectives.ppo import ProximalPolicy
from jaxlm.objectives.preference import PreferenceLearning
from jaxlm.objectives.preference_config import Preference, Process, Reward
from jaxlm.objectives.reward import ProcessLearning, RewardLearning


def build(
    settings: config.Objective, loss: LossConfig, architecture: Architecture = "decoder"
) -> Objective[Any]:
    """Return the objective of a run, for a model of a kind.

    Example:
      >>> from jaxlm.objectives.config import Causal, LossConfig
      >>> build(Causal(), LossConfig()).settings.name
      'causal'
    """
    if user_code.source_of(settings) is not None:
        return _own(settings, loss, architecture)
    if isinstance(settings, config.Mixture):
        members = tuple(build(part, loss, architecture) for part, _ in settings.parts)
        return objective.MixtureObjective(settings, loss, architecture, members)
    return _class_of(settings)(settings, loss, architecture)


def _own(settings: Any, loss: LossConfig, architecture: Architecture) -> Objective[Any]:
    """Return the objective of a user. Raises ConfigError if it is no Objective."""
    built = settings.build(loss, architecture)
    if not isinstance(built, Objective):
        raise ConfigError(
            f"build() of {type(settings).__name__} returns no objective",
            where=f"objective.name = {settings.name}",
            why=f"it is a {type(built).__name__}, no {Objective.__module__}.Objective",
            fix="return Objective(self, loss, architecture)    # or a subclass",
        )
    return built


def _class_of(
    settings: config.TokenObjective | config.Distill | Preference | Reward | Process | Policy | Ppo,
) -> type[Objective[Any]]:
    match settings:
        case config.Causal():
            return Objective
        case config.MTP():
            return objective.MultiToken
        case config.Prefix():
            return objective.PrefixLM
        case config.Masked():
            return objective.MaskedLM
        case config.Span():
            return objective.SpanCorruption
        case config.UL2():
            return objective.UnifiedDenoising
        case config.Blank():
            return objective.BlankInfilling
        case config.FIM():
            return objective.FillInTheMiddle
        case config.Distill():
            return Distillation
        case Preference():
            return PreferenceLearning
        case Reward():
            return RewardLearning
        case Process():
            return ProcessLearning
        case Policy():
            return PolicyLearning
        case Ppo():
            return ProximalPolicy
