"""Checkpoints of a run: the training state and the host's state in one atomic, asynchronous step (Orbax), restored onto
any mesh, and a run directory rewound to the restored step.

`state/` in a step's directory holds the arrays of the TrainState, `host/` a JSON table that the loop fills (config,
data position, metrics position). Orbax writes into a temporary directory and renames it, so a listed step is whole.
Not here: Hugging Face directories (`models/`). Next to read: `loop.py`.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxrl_lm.distributed import agree
from jaxrl_lm.types import TrainState

_SHOWN = 5  # differences that a message lists


class CheckpointError(OSError):
    """A checkpoint could not be written or read; earlier ones are as they were."""


class Checkpoints:
    """The checkpoints in a directory: the last `keep_last` and, by `best_metric` (higher is better), the best one.

    Opening for writing removes what an interrupted save left behind; open with `read_only=True` where another process
    may be writing. Use as a context manager or call `close`, which waits for the save under way.
    """

    def __init__(
        self, directory: str | Path, *, keep_last: int = 1, best_metric: str | None = None, read_only: bool = False
    ):
        if keep_last < 1:
            raise ValueError(f"save_total_limit={keep_last}: at least one checkpoint must be kept")
        self.directory = Path(directory).absolute()
        self._best_metric = best_metric
        self._read_only = read_only
        self._saving: int | None = None  # the step whose save has not been seen to succeed
        if read_only and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory}: no checkpoint directory here")
        policies: list[Any] = [checkpoint_managers.LatestN(keep_last)]
        if best_metric is not None:
            # Without metrics: kept by being among the last ones only.
            policies.append(
                checkpoint_managers.BestN(get_metric_fn=self._metric, n=1, keep_checkpoints_without_metrics=False)
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            # Orbax stores metrics only where best_fn is set, though the policy above decides.
            best_fn=None if best_metric is None else self._metric,
            cleanup_tmp_directories=not read_only,
            create=not read_only,
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def _metric(self, metrics: Mapping[str, float]) -> float:
        return metrics[self._best_metric]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def latest(self) -> int | None:
        """The last step with a whole checkpoint, None where there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending. A save under way counts from its commit on."""
        # Read from the disk: the manager's own list counts a save from its start, and drops what it is to replace.
        return sorted(self._manager.all_steps(read=True))

    def best(self) -> int | None:
        """The step with the highest best_metric among those kept, None where none has it."""
        scored = {step: self._manager.metrics(step) for step in self.steps()} if self._best_metric else {}
        scored = {step: self._metric(metrics) for step, metrics in scored.items() if metrics}
        return max(scored, key=scored.get) if scored else None

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> bool:
        """Starts saving and returns once `state` may be donated; False where the step has a checkpoint already.

        `host` must be JSON. `metrics` may hold best_metric; a checkpoint without it, or with NaN, is never the best.
        Waits for the save before. Raises CheckpointError for that one or for this one.
        """
        if self._read_only:
            raise CheckpointError(f"{self.directory}: opened for reading, step {step} cannot be saved")
        self.wait()
        if agree(step in self.steps()):  # a listing may lag behind on another host, and all must save or none
            return False
        value = float((metrics or {}).get(self._best_metric, math.nan))
        scored = None if math.isnan(value) else {self._best_metric: value}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(dict(host)))
        self._saving = step
        try:
            self._manager.save(step, args=items, metrics=scored, force=True)
        except Exception as error:
            raise self._failed(error) from error
        return True

    def wait(self) -> None:
        """Returns when the save under way is on disk. Raises CheckpointError where it failed."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            if self._saving is None:
                raise
            raise self._failed(error) from error
        self._saving = None

    def _failed(self, error: Exception) -> CheckpointError:
        step, self._saving = self._saving, None
        self._manager.reload()  # it had already forgotten the checkpoints that this one was to replace
        kept = self.latest()
        previous = "there is no earlier one" if kept is None else f"the checkpoint of step {kept} is whole"
        code = re.search(r"os_error_code='(\d+)'", str(error))  # of the file system, deep inside a long message
        reason = os.strerror(int(code[1])) if code else f"{type(error).__name__}: {str(error)[:300]}"
        return CheckpointError(
            f"{self.directory}: the checkpoint of step {step} could not be saved ({reason}); {previous}. "
            "Run the same command to resume, after making room if the disk is full"
        )

    def restore(self, abstract_state: TrainState, *, step: int | None = None) -> tuple[TrainState, dict[str, Any]]:
        """The state of a step (None: the latest), placed by the shardings in `abstract_state`, and its host table.

        Raises CheckpointError where there is no such checkpoint, and ValueError naming the arrays that differ where it
        is one of another model or optimiser; nothing is read or changed then.
        """
        step = self.latest() if step is None else step
        if step not in self.steps():
            raise CheckpointError(f"{self.directory}: no checkpoint of step {step}; there are {self.steps()}")
        stored = self._manager.item_metadata(step)["state"].tree
        _check_same(stored, abstract_state, f"{self.directory}, step {step}")
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), host=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["host"]

    def restore_host(self, *, step: int | None = None) -> dict[str, Any]:
        """The host table of a step (None: the latest) alone, such as the config that the run was started with."""
        step = self.latest() if step is None else step
        if step not in self.steps():
            raise CheckpointError(f"{self.directory}: no checkpoint of step {step}; there are {self.steps()}")
        return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

    def close(self) -> None:
        """Waits and frees the threads. Raises CheckpointError where the last save failed."""
        try:
            self.wait()
        finally:
            self._manager.close()


def _check_same(stored: Any, abstract_state: TrainState, where: str) -> None:
    """Compares paths, shapes and dtypes; parameters are named before the optimiser's copies of them."""
    found = _facts(jax.tree_util.tree_leaves_with_path(stored))
    wanted = _facts(jax.tree_util.tree_leaves_with_path(abstract_state))
    names = sorted(found.keys() | wanted.keys(), key=lambda name: (not name.startswith("params."), name))
    lines = [
        f"  {name}: checkpoint {found.get(name, 'has none')}, this run {wanted.get(name, 'has none')}"
        for name in names
        if found.get(name) != wanted.get(name)
    ]
    if lines:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ValueError(
            f"{where}: the checkpoint holds another model or optimiser:\n"
            + "\n".join(lines[:_SHOWN] + more)
            + "\nGive the model and options it was made with, or another output_dir."
        )


def _facts(leaves: list[tuple[Any, Any]]) -> dict[str, str]:
    """'dtype[shape]' by dotted path; a typed key counts as the integers it is stored as."""
    facts = {}
    for path, leaf in leaves:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        name = ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
        facts[name] = f"{leaf.dtype}{list(leaf.shape)}"
    return facts


def rewind(run_directory: str | Path, step: int) -> None:
    """Removes from a run directory what was logged after `step`: rows of metrics.jsonl, a torn last line, files of
    completions/ and eval/.

    Call it before the file is opened for appending. Raises ValueError naming a line that is no row of metrics.
    """
    run_directory = Path(run_directory)
    metrics = run_directory / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_bytes().split(b"\n")[:-1]  # after the last newline: nothing, or a line cut short by a kill
        kept = [line for i, line in enumerate(lines) if _step_of(line, f"{metrics}, line {i}") <= step]
        temporary = metrics.with_name("metrics.jsonl.tmp")
        with open(temporary, "wb") as file:
            file.write(b"".join(line + b"\n" for line in kept))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, metrics)
    for path in (*run_directory.glob("completions/step_*"), *run_directory.glob("eval/*/step_*")):
        match = re.match(r"step_(\d+)\.(?:parquet|jsonl)", path.name)
        if match and int(match[1]) > step:
            path.unlink()


def _step_of(line: bytes, where: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: no row of metrics ({error!r}); repair or remove the line") from error
