"""Scores of tasks during training, with the samples that `jaxlm eval --tasks` has of the step."""

import functools
from typing import Any

from jaxlm.core.config import to_json
from jaxlm.core.errors import ConfigError
from jaxlm.data import chat_templates
from jaxlm.data.chat import ChatTemplate
from jaxlm.evals.tasks import scoring
from jaxlm.recipes import setup
from jaxlm.recipes.train.api import RunContext
from jaxlm.recipes.train.programs import TrainPrograms
from jaxlm.recipes.use import tasks
from jaxlm.recipes.use.tasks import PreparedTask, ScoredModel, TaskSettings, Tokenizers
from jaxlm.training.state import TrainState

SPLIT = "tasks"  # of the records in metrics.jsonl


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
        length, mesh = run.data.sequence, programs.model.mesh
        settings = TaskSettings(
            shots=run.eval.tasks_shots, form=run.eval.tasks_form, is_chat=run.eval.tasks_chat
        )
        shared = (settings, tokenizers, length, mesh, blueprint.config)
        self._prepared = [PreparedTask(each, *shared) for each in read]
        self._scorers = tasks.scorers(self._prepared, blueprint)

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
        """Return the record of metrics.jsonl: means and intervals of all tasks.

        It is empty in a process that does not write. Raises Diverged if a score is not finite.
        """
        context = self._context
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
        return record
