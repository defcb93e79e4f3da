"""Scores of tasks during training, with the samples that `jaxlm eval --tasks` has of the step."""

import functools
import math
import time
from typing import Any

from jaxlm.core.config import to_json
from jaxlm.core.errors import ConfigError
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.evals.tasks import scoring
from jaxlm.recipes import setup
from jaxlm.recipes.config import READ_PER_TRAINED
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.use import tasks
from jaxlm.recipes.use.tasks import ModelRows, PreparedTask, ScoredModel, TaskSettings, Tokenizers
from jaxlm.training.state import TrainState

SPLIT = "tasks"  # of the records in metrics.jsonl
SHARE = 0.04  # of the work of the steps: with the reading of samples and files, 5% of the time
FEWEST = 100  # items of a task


class TaskScores:
    """Scores of the tasks of `eval.tasks`; use it under the mesh of the programs.

    Samples and results are in the folder `evals` of the run.

    Args:
      context: the run.
      programs: the model.

    Raises:
      InputMissing: if a task file or its items do not exist.
      DataError: if a task or an item is not valid.
      ConfigError: if an item is too long, or the model has no log-likelihood of a text.
    """

    def __init__(self, context: RunContext, programs: TrainPrograms):
        run = context.run
        self._context, self._programs = context, programs
        read = tasks.read_tasks(run.eval.tasks, "eval.tasks")
        if run.objective.prompts == "none" or run.architecture == "encoder-decoder":
            raise ConfigError(
                "this run cannot be scored on tasks",
                where="eval.tasks",
                why=f"{run.model.family} does not predict each token from those before it",
                fix="'--config.eval.tasks=()'",
            )
        blueprint, self._decoded = setup.decoding(programs.model)
        tokenizers = Tokenizers.of(programs.data.tokenizer, self._template())
        settings = TaskSettings(
            shots=run.eval.tasks_shots,
            form=run.eval.tasks_form,
            limit=FEWEST,
            is_chat=run.eval.tasks_chat,
        )
        flag = "--config.data.sequence"
        rows = ModelRows(run.data.sequence, programs.model.mesh, blueprint.config, flag)
        self._passes = self._number_of_passes()
        self._prepared = []
        with context.console.timer("reading the tasks"):
            for each in read:
                probe = PreparedTask(each, settings, tokenizers, rows)
                self._prepared.append(self._limited(probe, len(read)))
        both_ways = run.objective.prompts == "both ways"
        self._scorers = tasks.scorers(self._prepared, blueprint, both_ways=both_ways)

    def _number_of_passes(self) -> int | None:
        """Return how often the tasks are scored; None if the interval is a time."""
        run = self._context.run
        if run.eval.tasks_every.unit == "second":
            return None
        steps = run.eval.tasks_every.steps(run.train.steps, run.pace)
        return math.ceil(run.train.steps / steps) if steps else 1

    def _limited(self, probe: PreparedTask, tasks: int) -> PreparedTask:
        """Return a task with the items of `eval.tasks_limit`.

        Args:
          probe: the task with a few items, whose mean length is that of all.
          tasks: number of tasks, which share the work.
        """
        limit = self._context.run.eval.tasks_limit
        if limit == "auto" and self._passes is not None:
            budget = SHARE * self._work() / (self._passes * tasks)
            limit = affordable(budget, probe.tokens / len(probe))
        if isinstance(limit, int) and limit < probe.available:
            return probe.limited(limit)
        return probe.limited(None)

    def _work(self) -> float:
        """Return the work of the training steps, in tokens that are read without gradients."""
        run = self._context.run
        return READ_PER_TRAINED * run.pace.tokens(run.train.steps)

    def describe(self) -> str:
        """Return the items of each task, and the work of the passes as a share of the training."""
        parts = [
            f"{each.task.name} {len(each)} of {each.available} items" for each in self._prepared
        ]
        text = ", ".join(parts)
        if self._passes is None:
            return f"{text}, every {self._context.run.eval.tasks_every}"
        share = self._passes * sum(each.tokens for each in self._prepared) / self._work()
        return f"{text}; passes {self._passes}, about {share:.1%} of the work of the steps"

    def _template(self) -> ChatTemplate | None:
        """Return the chat template of the run, None if its tasks are texts."""
        path = self._context.directory.path
        if not self._context.run.eval.tasks_chat:
            return None
        template = chat_templates.of_folder(path / chat_templates.HUB)
        if template is None:
            raise ConfigError(
                "this run has no chat template",
                where="eval.tasks_chat",
                why="a template comes with training on conversations, or with an imported model",
                fix="--config.eval.tasks_chat=false",
            )
        return template

    def score(self, state: TrainState, step: int) -> dict[str, Any]:
        """Return the record of metrics.jsonl: means and intervals of all tasks, and the seconds.

        It is empty in a process that does not write. Raises Diverged if a score is not finite.
        """
        context, begun = self._context, time.monotonic()
        params = self._decoded(self._programs.whole(state.params))
        model = ScoredModel(
            params=params,
            precision=to_json(context.run.precision),
            step=step,
            digest=scoring.weights_digest(params),
        )
        record: dict[str, Any] = {}
        for prepared, scorer in zip(self._prepared, self._scorers, strict=True):
            result = tasks.run_task(
                prepared,
                scorer,
                model,
                context.directory.path,
                is_writer=context.directory.is_writer,
                share=functools.partial(context.processes.share, "tasks"),
            )
            for name, figures in result.get("metrics", {}).items():
                path = f"task.{prepared.task.name}.{name}"
                record[path] = figures["mean"]
                record |= {f"{path}_{end}": figures[end] for end in ("low", "high")}
        return record | {"seconds": time.monotonic() - begun} if record else record


def affordable(budget: float, item: float) -> int:
    """Return the number of items of a pass.

    Args:
      budget: tokens that the pass reads.
      item: tokens of an item.
    """
    return max(FEWEST, int(budget / item) if item else 0)
