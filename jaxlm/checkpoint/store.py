"""Orbax behind our own door: trees of arrays and JSON, committed a step at a time."""

import contextlib
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers

from jaxlm.checkpoint.config import CheckpointConfig
from jaxlm.core.errors import DataError, SaveFailed
from jaxlm.core.tree import leaves

FORMAT_VERSION = 1
METRIC = "loss_nats"


class Store:
    """The committed steps of one run.

    A step holds `state`, a tree of arrays, and `meta`, JSON: the data cursor, the config, and what the host counts.
    Both are written in the background and become visible together, or not at all.
    """

    def __init__(
        self, directory: epath.PathLike, config: CheckpointConfig, *, read_only: bool = False
    ):
        self.directory = epath.Path(directory).absolute()
        keep: list[checkpoint_managers.PreservationPolicy] = [
            checkpoint_managers.LatestN(config.keep_last)
        ]
        if config.keep_best:
            keep.append(
                checkpoint_managers.BestN(
                    get_metric_fn=_metric,
                    reverse=True,
                    n=config.keep_best,
                    keep_checkpoints_without_metrics=False,
                )
            )
        logging.set_verbosity(logging.ERROR)  # Orbax warns of what read_only implies
        if not read_only:
            self._remove_torn()
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=checkpoint_managers.FixedIntervalPolicy(
                1
            ),  # the loop decides when
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(keep),
            best_fn=_metric,
            best_mode="min",
            read_only=read_only,
        )
        # Named now: a manager that has not saved in this process knows no metadata of a step otherwise.
        handlers = {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_handlers=handlers
        )

    def steps(self) -> list[int]:
        """Committed steps, oldest first."""
        return sorted(self._manager.all_steps())

    def best(self) -> int | None:
        """The committed step with the lowest evaluation loss; None where no step was evaluated."""
        return self._manager.best_step()

    def save(
        self, step: int, state: Any, meta: dict[str, Any], loss_nats: float | None = None
    ) -> None:
        """Copies the state off the device, then writes in the background.

        Returns once `state` may be donated.

        Raises:
          SaveFailed: where an earlier save turned out to have failed, or Orbax did not take this one.
        """
        self.check()
        metrics = None if loss_nats is None else {METRIC: float(loss_nats)}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave({"format_version": FORMAT_VERSION, **meta}),
        )
        try:
            taken = self._manager.save(step, args=items, metrics=metrics, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error
        if not taken:
            raise SaveFailed(
                f"step {step} was due and was not saved",
                where=str(self.directory),
                why=f"newest step there: {self._manager.latest_step()}",
            )

    def check(self) -> None:
        """Raises SaveFailed where a save in the background has failed."""
        try:
            self._manager.check_for_errors()
        except Exception as error:  # Orbax passes on whatever its thread raised
            raise self._failed(error) from error

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON of a step.

        Raises:
          DataError: where it cannot be read or comes from a newer format.
        """
        try:
            meta = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            ).meta
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"checkpoint {step} cannot be read",
                where=str(self.directory / str(step)),
                why=str(error),
            ) from error
        if meta.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"checkpoint {step} has format {meta.get('format_version')}",
                where=str(self.directory / str(step)),
                why=f"this jaxlm reads format {FORMAT_VERSION}",
                fix="use the jaxlm version in environment.json beside the checkpoints",
            )
        return meta

    def restore(self, step: int, abstract: Any) -> Any:
        """The state of a step, straight into the shapes, dtypes and shardings of `abstract`.

        Raises:
          DataError: where a leaf is missing, left over, or of another shape or dtype. Orbax would cast a dtype silently.
        """
        self._compare(step, _layout(abstract), self._saved(step))
        return self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        ).state

    def restore_part(self, step: int, name: str, abstract: Any) -> Any:
        """One part of the state, such as `params`, without reading the others. Raises DataError as `restore` does."""
        saved = {
            path: layout
            for path, layout in self._saved(step).items()
            if path.startswith(f"{name}/")
        }
        self._compare(
            step, {f"{name}/{path}": layout for path, layout in _layout(abstract).items()}, saved
        )
        wanted = {name: abstract}
        args = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        return reader.restore(self.directory / str(step) / "state", args=args)[name]

    def _saved(self, step: int) -> dict[str, str]:
        return _layout(self._manager.item_metadata(step)["state"])

    def _compare(self, step: int, wanted: dict[str, str], found: dict[str, str]) -> None:
        differences = [
            f"{path}: want {wanted.get(path, 'nothing')}, found {found.get(path, 'nothing')}"
            for path in sorted(wanted | found)
            if wanted.get(path) != found.get(path)
        ]
        if differences:
            more = f"\nand {len(differences) - 3} more" if len(differences) > 3 else ""
            raise DataError(
                f"checkpoint {step} does not match the model in {len(differences)} leaves",
                where=str(self.directory / str(step)),
                why="\n".join(differences[:3]) + more,
            )

    def close(self) -> None:
        """Waits for what is being written; raises SaveFailed where it failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self.check()
        self._manager.close()

    def release(self) -> None:
        """Lets go after an error: waits for what is being written, and says nothing of how it went."""
        with contextlib.suppress(Exception):
            self._manager.close()

    def wait(self) -> None:
        """Returns when every save so far is committed."""
        self._manager.wait_until_finished()
        self.check()

    def _remove_torn(self) -> None:
        """Removes what a killed process left half-written. Who may write holds the run directory's lock, so nobody else is writing."""
        if self.directory.exists():
            for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
                path.rmtree()

    def _failed(self, error: BaseException) -> SaveFailed:
        return SaveFailed(
            "a checkpoint could not be written",
            where=str(self.directory),
            why=f"{type(error).__name__}: {error}"[:500],
            fix="free space there, then run the same command again: it goes on from the last committed step",
        )


def _metric(metrics: dict[str, float]) -> float:
    return metrics[METRIC]


def _layout(tree: Any) -> dict[str, str]:
    """Each leaf's path, dtype and shape; named tuples and dicts of the same names read the same."""
    return {
        path: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves(tree).items()
    }
