"""Config of a run: all sections, and the checks that involve several of them.

Example:
  >>> from jaxlm.recipes.config import Run
  >>> run = Run().changed({"train.batch": 16, "data.sequence": 128})
  >>> run.tokens_per_step
  2048
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, get_args

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.core import batch_schedule as paces
from jaxlm.core import config, user_code
from jaxlm.core.batch_schedule import BatchSchedule, Phase
from jaxlm.core.config import Span, setting
from jaxlm.core.errors import ConfigError
from jaxlm.core.nearest import nearest_word
from jaxlm.core.precision_config import Float, PrecisionConfig
from jaxlm.data import mixture_config
from jaxlm.data.config import DataConfig
from jaxlm.evals.config import EvalConfig
from jaxlm.generate.config import SampleConfig
from jaxlm.models.config import DecoderConfig, ModelConfig, MupConfig, RegularizationConfig
from jaxlm.models.families.llama import Llama
from jaxlm.models.families.union import (
    SIZES,
    EncoderDecoderFamily,
    EncoderFamily,
    Family,
    TabledFamily,
)
from jaxlm.monitor.config import LogConfig, ProfileConfig, WatchConfig
from jaxlm.objectives.config import Causal, Distill, LossConfig, Objective, Sampling, mtp_heads
from jaxlm.objectives.facts import Architecture
from jaxlm.objectives.policy_config import START
from jaxlm.optim import average_config, schedule_config
from jaxlm.optim.average_config import Average, NoAverage
from jaxlm.optim.config import AdamW, Optimizer
from jaxlm.optim.schedule_config import Cosine, Schedule
from jaxlm.optim.schedule_config import problems as run_problems
from jaxlm.parallel.config import MeshConfig
from jaxlm.rl.config import RLConfig
from jaxlm.rl.reward_config import RewardConfig
from jaxlm.training.config import GuardConfig, TrainConfig
from jaxlm.tune.config import Full, Quantized, Tune, VirtualConfig

READ_PER_TRAINED = 3  # tokens read in the time that one is trained: the gradient costs two losses
EVALUATED_SHARE, FEWEST_EVALUATED = 0.03, 8  # of the work of the steps; batches of a set
VOCAB_MULTIPLE = 64  # `model.vocab=auto` rounds up to it, so that the vocabulary can be sharded


# Names that other trainers use for the same setting in the same unit.
_OTHER_NAMES = {
    "optim.lr": "learning_rate peak_lr max_lr",
    "optim.weight_decay": "wd",
    "optim.b1": "beta1 adam_beta1",
    "optim.b2": "beta2 adam_beta2",
    "optim.eps": "adam_epsilon epsilon",
    "optim.clip_norm": "clip grad_clip clip_grad clip_grad_norm grad_norm_clip max_grad_norm "
    "gradient_clipping",
    "optim.name": "optimizer",
    "schedule.name": "lr_schedule lr_scheduler lr_scheduler_type",
    "schedule.warmup": "warmup_steps num_warmup_steps warmup_iters",
    "train.steps": "max_steps num_steps num_train_steps total_steps train_steps training_steps "
    "max_iters iterations",
    "train.batch": "batch_size global_batch_size train_batch_size",
    "train.microbatches": "gradient_accumulation gradient_accumulation_steps grad_accum "
    "grad_accum_steps accumulate_grad_batches accumulation accumulation_steps",
    "data.sequence": "seq_len seq_length sequence_length max_seq_len max_seq_length max_length "
    "block_size context_length context_size",
    "data.train": "dataset train_data train_files",
    "data.validation": "val_data validation_files",
    "model.depth": "layers n_layer n_layers num_layers num_hidden_layers",
    "model.width": "n_embd d_model hidden_size",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_key_value_heads",
    "model.hidden": "d_ff ffn ffn_dim mlp_dim intermediate_size",
    "model.max_positions": "max_position_embeddings n_positions",
    "model.vocab": "vocab_size",
    "precision.compute": "dtype",
    "precision.params": "param_dtype",
    "checkpoint.every": "save_every save_steps save_interval",
    "checkpoint.keep_last": "keep max_to_keep save_total_limit",
    "eval.every": "eval_every eval_steps eval_interval",
    "log.every": "log_every logging_steps log_interval",
    "log.sinks": "report_to",
    "mesh.data": "dp data_parallel data_parallel_size",
    "mesh.tensor": "tp tensor_parallel tensor_parallel_size",
    "mesh.pipe": "pp pipeline_parallel",
    "mesh.context": "cp context_parallel context_parallel_size",
    "mesh.expert": "ep expert_parallel expert_parallel_size",
    "rl.samples": "num_generations group_size",
    "rl.max_tokens": "max_new_tokens max_completion_length",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All settings of a run, as a value that can be printed, compared, saved and run again."""

    VERB: ClassVar[str] = "train --workdir=runs/a"  # the verb that reads it
    ALIASES: ClassVar[Mapping[str, str]] = {
        name: path for path, names in _OTHER_NAMES.items() for name in names.split()
    }

    seed: int = setting(
        0,
        "seed of all random numbers: weights, data order, dropout, samples",
        low=0,
        high=2**32 - 1,
    )
    model: Family = setting(Llama(), "model family and size", named=SIZES)
    data: DataConfig = setting(DataConfig(), "input files and their processing")
    objective: Objective = setting(Causal(), "training objective")
    loss: LossConfig = setting(LossConfig(), "computation of the loss")
    rl: RLConfig = setting(RLConfig(), "rollouts: samples of the model that are trained on")
    regularization: RegularizationConfig = setting(
        RegularizationConfig(),
        "regularization and stabilization of training",
        formerly="regularisation",
    )
    tune: Tune = setting(Full(), "fine-tuning: all parameters, or those of an adapter")
    reward: RewardConfig = setting(RewardConfig(), "rewards of completions")
    optim: Optimizer = setting(AdamW(), "optimizer")
    mup: MupConfig = setting(MupConfig(), "scaling of settings with the model width (muP)")
    schedule: Schedule = setting(Cosine(), "learning rate schedule")
    average: Average = setting(NoAverage(), "average of the parameters")
    train: TrainConfig = setting(TrainConfig(), "training loop")
    guard: GuardConfig = setting(GuardConfig(), "skipped steps and rewinds")
    mesh: MeshConfig = setting(MeshConfig(), "sharding over devices")
    precision: PrecisionConfig = setting(PrecisionConfig(), "dtypes")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "checkpoints")
    eval: EvalConfig = setting(EvalConfig(), "evaluation")
    sample: SampleConfig = setting(SampleConfig(), "samples of text during training")
    log: LogConfig = setting(LogConfig(), "logged metrics")
    profile: ProfileConfig = setting(ProfileConfig(), "profiled steps")
    watch: WatchConfig = setting(WatchConfig(), "watchdog: time limits of the phases")

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Check the sections against each other."""
        if self.architecture not in self.objective.architectures:
            why, names = {
                "encoder": ("an encoder attends to the tokens to predict", ("masked",)),
                "encoder-decoder": (
                    "an encoder-decoder needs pairs of input and target",
                    ("span", "ul2"),
                ),
                "decoder": ("a decoder does not support this objective", ("causal",)),
            }[self.architecture]
            fixes = [f"--config.objective.name={name}" for name in names]
            yield (
                "objective.name",
                f"{self.model.family} cannot be trained by {self.objective.name}: {why}",
                "\n".join([*fixes, "--config.model.family=gpt2"]),
            )
        if self.data.has_chats and not self.objective.document_mask:
            why = "rows have several conversations, and a token would see those before its own"
            yield "objective.document_mask", why, "--config.objective.document_mask=True"
        yield from self._preference_problems()
        yield from self._rollout_problems()
        if isinstance(self.model, TabledFamily) and self.data.sequence > self.model.max_positions:
            yield (
                "data.sequence",
                f"rows of {self.data.sequence} tokens need as many positions, and the model has "
                f"{self.model.max_positions}",
                f"--config.model.max_positions={self.data.sequence}",
            )
        sets, followed = self.data.validation_names, self.eval.follow
        # The suffix that an objective adds to a set's name depends on its tokenizer.
        if followed != "auto" and followed.partition(".")[0] not in sets:
            yield (
                "eval.follow",
                f"no validation set has the name {followed!r}; the names are "
                f"{', '.join(sets) or 'none'}",
                f"--config.eval.follow={nearest_word(followed, sets) or 'auto'}",
            )
        is_own = user_code.source_of(self.objective) is not None
        if is_own and not self.objective.keeps_rows and self.data.workers:
            yield (
                "data.workers",
                f"worker processes cannot change rows as {self.objective.name} does; threads can",
                "--config.data.workers=0",
            )
        no_clip = "--config.regularization.qk_clip=None"
        if self.regularization.qk_clip is not None and self.optim.averages_parameters:
            why = (
                "schedule_free trains on an average of its iterates, and QK-clip would scale only "
                "the average"
            )
            yield "regularization.qk_clip", why, no_clip
        if self.regularization.qk_clip is not None and self.architecture == "encoder-decoder":
            why = f"{self.model.family} has cross-attention, whose logits are not measured"
            yield "regularization.qk_clip", why, no_clip
        if not isinstance(self.tune, Full | Quantized):  # codes have no step
            yield from self._tune_problems()
        yield from self._mup_problems()
        if self.data.sequence_warmup and not self.objective.keeps_rows:
            yield (
                "data.sequence_warmup",
                f"{self.objective.name} changes the rows, which then cannot be cut; rows of causal "
                "and mtp can",
                "'--config.data.sequence_warmup=()'",
            )
        is_uneven = self.log.layers and self.train.batch_warmup
        for name in ("every", "layers_every"):
            if is_uneven and getattr(self.log, name).unit == "token":
                yield (
                    f"log.{name}",
                    "statistics of layers need a fixed interval of steps, and tokens are no fixed "
                    "interval while batches grow",
                    f"--config.log.{name}=1%",
                )
        try:
            pace = self.pace
        except paces.ScheduleError as error:
            yield error.setting, str(error), f"'--config.{error.setting}=()'"
            return
        for name, why, fix in run_problems(self.schedule, self.train.steps, pace):
            yield f"schedule.{name}", why, fix
        if self.objective.mtp_settings and self.optim.curvature_every:
            yield (
                "optim.name",
                "sophia estimates the curvature of the next-token loss only, not of further heads",
                "--config.optim.name=adamw",
            )
        for name, why, fix in average_config.problems(self.average, self.train.steps, pace):
            yield f"average.{name}", why, fix
        for name, why, fix in mixture_config.run_problems(
            self.data.mixture, self.row_at, self.rows
        ):
            yield f"data.{name}", why, fix

    def _preference_problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that judged answers have an objective that compares them, and the other way."""
        objective, answers = self.objective, self.data.answers
        if not objective.compares_answers:
            if answers:
                why = f"data.kind = {answers} has answers that are not to be learned"
                name = "process" if answers == "steps" else "preference"
                yield "objective.name", why, f"--config.objective.name={name}"
            return
        kind = "steps" if objective.labels_steps else "pairs"
        fix = f"--config.data.kind={kind} --config.data.train={kind}.jsonl"
        if not answers:
            why = f"{objective.name} learns from answers that were compared or judged"
            yield "data.kind", why, f"{fix}\n--config.objective.name=causal"
        elif objective.labels_steps and answers != "steps":
            yield "data.kind", f"data.kind = {answers} has no labels of steps", fix
        elif answers == "steps" and not objective.labels_steps:
            why = f"data.kind = steps has labels of steps, which {objective.name} does not learn"
            yield "objective.name", why, "--config.objective.name=process"
        elif answers == "labeled" and objective.has_reward_head:
            why = "data.kind = labeled has no pairs, whose scores are compared"
            fix = "--config.objective.name=preference --config.objective.loss=kto"
            yield "objective.name", why, fix
        elif answers == "labeled" and getattr(objective, "loss", "kto") != "kto":
            why = "data.kind = labeled has no pairs, which every loss but kto compares"
            yield "objective.loss", why, "--config.objective.loss=kto"
        if objective.compared_with == "adapter_off" and isinstance(self.tune, Full):
            why = "tune.name = full has no adapter that could be off"
            yield "objective.reference", why, "--config.objective.reference=start"
        yield from self._token_loss_problems("preference")

    def _rollout_problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that prompts have an objective that samples answers, and the other way."""
        objective, rl = self.objective, self.rl
        if not (isinstance(objective, Sampling) and objective.samples_answers):
            if self.data.has_prompts:
                why = "data.kind = prompts has no answers to learn"
                is_taught = isinstance(objective, Distill)
                sampled = "--config.objective.sampled=1 --config.objective.weight=1"
                fix = sampled if is_taught else "--config.objective.name=policy"
                yield "objective.name", why, fix
            return
        if isinstance(objective, Distill) and rl.correction != "none":
            why = "distill has no ratio to the probability of a token when it was drawn"
            yield "rl.correction", why, "--config.rl.correction=none"
        if not self.data.has_prompts:
            why = f"{objective.name} samples answers to prompts"
            fix = "--config.data.kind=prompts --config.data.train=prompts.jsonl"
            yield "data.kind", why, f"{fix}\n--config.objective.name=causal"
        for name, why, fix in rl.batch_problems(self.train.batch, self.data.sequence):
            yield f"rl.{name}", why, fix
        if rl.samples == 1 and objective.terms.has_group_baseline:
            why = f"the baseline {objective.terms.baseline} compares samples of one prompt"
            fix = "--config.rl.samples=8\n--config.objective.baseline=batch"
            yield "rl.samples", why, fix
        if objective.dead_groups == "redraw" and not objective.terms.has_group_baseline:
            why = f"with the baseline {objective.terms.baseline} no group is without a gradient"
            yield "objective.dead_groups", why, "--config.objective.dead_groups=keep"
        if not self.reward.functions:
            why = f"{objective.name} needs a reward"
            yield "reward.functions", why, "--config.reward.functions=number"
        if objective.compared_with == "adapter_off" and isinstance(self.tune, Full):
            why = "tune.name = full has no adapter that could be off"
            fix = "--config.objective.reference=start\n--config.objective.kl=none"
            yield "objective.reference", why, fix
        if objective.teacher == START and not isinstance(self.tune, Full | Quantized):
            why = "the run of --init_from is the base of the adapter, which needs no second model"
            yield "objective.reference", why, "--config.objective.reference=adapter_off"
        if self.train.batch_warmup:
            why = "a rollout has a fixed number of samples"
            yield "train.batch_warmup", why, "'--config.train.batch_warmup=()'"
        yield from self._token_loss_problems("reward")

    def _token_loss_problems(self, learned: str) -> Iterator[tuple[str, str, str]]:
        """Check that no setting needs the next-token loss: the objective learns `learned`."""
        if self.optim.curvature_every:
            why = f"sophia estimates the curvature of the next-token loss, not of a {learned}"
            yield "optim.name", why, "--config.optim.name=adamw"
        for name in ("z_loss", "label_smoothing"):
            if getattr(self.loss, name):
                why = f"{self.objective.name} has no such term"
                yield f"loss.{name}", why, f"--config.loss.{name}=0"

    def _tune_problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that the step of an adapter is implemented: the base is no part of its state."""
        if self.precision.qat != "none":
            why = f"it rounds weights that are trained, and those of tune.name={self.tune.name} not"
            yield "precision.qat", why, "--config.precision.qat=none"
        if self.regularization.qk_clip is not None:
            why = f"QK-clip scales weights of the base, which tune.name={self.tune.name} freezes"
            yield "regularization.qk_clip", why, "--config.regularization.qk_clip=None"
        if self.optim.curvature_every:
            why = (
                f"sophia estimates the curvature of all weights, not of tune.name={self.tune.name}"
            )
            yield "optim.name", why, "--config.optim.name=adamw"
        if self.objective.mtp_settings:
            why = "the base has no further heads, and an adapter does not train new ones"
            yield "objective.name", why, "--config.objective.name=causal"
        if isinstance(self.tune, VirtualConfig):
            yield from self._virtual_problems(self.tune)

    def _virtual_problems(self, tune: VirtualConfig) -> Iterator[tuple[str, str, str]]:
        """Check that a decoder has positions for the virtual tokens and a row."""
        if self.architecture != "decoder":
            yield (
                "tune.name",
                f"virtual tokens are implemented for decoders, not for {self.model.family}",
                "--config.tune.name=lora",
            )
            return
        sequence, positions = self.data.sequence, self.model.max_positions
        if sequence <= positions < sequence + tune.length:
            room = positions - tune.length
            yield (
                "tune.length",
                f"{tune.length} virtual tokens and rows of {sequence} need "
                f"{sequence + tune.length} positions, and the model has {positions}",
                f"--config.data.sequence={room}"
                if room > 0
                else f"--config.tune.length={max(positions // 8, 1)}\n"
                f"--config.data.sequence={positions - max(positions // 8, 1)}",
            )

    def _mup_problems(self) -> Iterator[tuple[str, str, str]]:
        """Check that muP has a decoder, an optimizer like Adam, and a fixed initial deviation."""
        if self.mup.base_width is None:
            return
        if self.architecture != "decoder":
            yield (
                "mup.base_width",
                f"muP is implemented for decoders, not for {self.model.family}",
                "--config.mup.base_width=None",
            )
            return
        if not self.optim.follows_width:
            known = ", ".join(arm.name for arm in get_args(Optimizer) if arm.follows_width)
            yield (
                "optim.name",
                f"muP is implemented for {known}, not for {self.optim.name}",
                "--config.optim.name=adamw",
            )
        if self.model.init not in ("normal", "gpt2"):
            yield (
                "model.init",
                f"{self.model.init} scales initial weights by their sizes, and muP does too",
                "--config.model.init=normal",
            )

    def cautions(self) -> Iterator[tuple[str, str, str]]:
        """Return (setting, why, fix) of each warning: values that may be intended.

        An example is the first part of a longer run.
        """
        length: dict[str, Any] = {"total": self.train.steps, "tokens_per_step": self.pace}
        for name, why, fix in schedule_config.cautions(self.schedule, **length):
            yield f"schedule.{name}", why, fix
        for name, why, fix in average_config.cautions(self.average, **length):
            yield f"average.{name}", why, fix

    def changed(self, settings: Mapping[str, Any]) -> "Run":
        """Return the run with changed settings, by path. Raises ConfigError if they are invalid."""
        raw = config.to_json(self)
        for path, value in settings.items():
            section, _, name = path.partition(".")
            raw[section][name] = value
        run: Run = config.loaded_json(Run, raw, "config.json").value
        return run

    def with_compute(self, dtype: Float) -> "Run":
        """Return the run with `dtype` as `precision.compute` if that is auto."""
        if self.precision.compute != "auto":
            return self
        precision = dataclasses.replace(self.precision, compute=dtype)
        return dataclasses.replace(self, precision=precision)

    def decoder(self, vocab: int) -> ModelConfig:
        """Return the model with a vocabulary of `vocab` ids, and with the objective's additions.

        Raises ConfigError if a family of a user builds no decoder.
        """
        built = dataclasses.replace(self.model, vocab=vocab).build()
        if user_code.source_of(self.model) is not None and not isinstance(built, DecoderConfig):
            raise ConfigError(
                f"build() of {type(self.model).__name__} returns no model",
                where=f"model.family = {self.model.family}",
                why=f"it is a {type(built).__name__}, no {DecoderConfig.__module__}.DecoderConfig",
                fix="return Llama(vocab=self.vocab).build()    # as an example",
            )
        if isinstance(built, DecoderConfig):
            built = dataclasses.replace(
                built, inner_positions=self.objective.block_positions, mtp=mtp_heads(self.objective)
            )
            built = self.mup.applied(built)
        return self.regularization.applied(built)

    @property
    def rows(self) -> int:
        """Number of rows that the whole run reads."""
        return self.pace.rows(self.train.steps)

    def row_at(self, span: Span) -> int:
        """Return the first row of the stream after a span of the run."""
        return self.pace.rows(span.steps(self.train.steps, self.pace))

    @property
    def pace(self) -> BatchSchedule:
        """Batch schedule: rows and sequence length of each batch. Raises ValueError if invalid."""
        return paces.build(
            total=self.train.steps,
            batch=self.train.batch,
            sequence=self.data.sequence,
            batches=self.train.batch_warmup,
            lengths=self.data.sequence_warmup,
        )

    def at(self, phase: Phase) -> "Run":
        """Return the run with one phase of its batch schedule from start to end."""
        return dataclasses.replace(
            self,
            train=dataclasses.replace(self.train, batch=phase.rows, batch_warmup=()),
            data=dataclasses.replace(self.data, sequence=phase.length, sequence_warmup=()),
        )

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model."""
        if isinstance(self.model, EncoderDecoderFamily):
            return "encoder-decoder"
        return "encoder" if isinstance(self.model, EncoderFamily) else "decoder"

    @property
    def rescores_rollouts(self) -> bool:
        """True if rollouts need scores of the trained program, apart from those of the sampler."""
        return self.objective.has_value_head or self.rl.correction != "none"

    @property
    def evaluated_batches(self) -> int | None:
        """Batches of each validation set in an evaluation between two steps; None for all."""
        if self.eval.batches != "auto":
            return None if self.eval.batches == "all" else self.eval.batches
        if self.eval.every.unit == "second" or self.objective.samples_answers:
            return None
        interval = self.eval.every.steps(self.train.steps, self.pace)
        sets = len(self.data.validation_names)
        if not interval or not sets:
            return None
        rows = EVALUATED_SHARE * READ_PER_TRAINED * self.pace.rows(self.train.steps)
        rows /= math.ceil(self.train.steps / interval) * sets
        return max(FEWEST_EVALUATED, int(rows / self.evaluated_rows))

    @property
    def evaluated_rows(self) -> int:
        """Rows of a batch of an evaluation during training."""
        return self.train.batch if self.eval.batch == "auto" else self.eval.batch

    @property
    def scored_share(self) -> float:
        """Share of the tokens of a row that have logits: those of samples of a policy, else all."""
        objective = self.objective
        if not objective.samples_answers or isinstance(objective, Distill):
            return 1.0
        return min(1.0, self.rl.turns * self.rl.max_tokens / self.data.sequence)

    @property
    def tokens_per_step(self) -> int:
        """Token slots of the global batch, after its warm-up."""
        return self.train.batch * self.data.sequence
