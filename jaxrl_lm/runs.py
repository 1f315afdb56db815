"""What every kind of run does at its edges: stops at a signal, goes on only from its own checkpoint, keeps a bad batch."""

import contextlib
import dataclasses
import hashlib
import json
import signal
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_lm.checkpoint import rewind
from jaxrl_lm.config import DistributedOptions
from jaxrl_lm.distributed import check_same, check_shared, first_only, gather, several
from jaxrl_lm.options import check_resume, from_dict, to_toml


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; the message names the step and the file with the batch."""


@contextlib.contextmanager
def on_signal(number: signal.Signals) -> Iterator[list[str]]:
    """A list that holds the signal's name once it has come; the run ends after the step under way.

    A handler from outside gets it at the end, so that a recipe of several runs ends too.
    """
    came: list[str] = []
    try:
        before = signal.signal(number, lambda *_: came.append(number.name))
    except ValueError:  # not the main thread: signals are somebody else's
        yield came
        return
    try:
        yield came
    finally:
        signal.signal(number, before)
        if came and callable(before):
            before(number, None)


def came(stop: list[str]) -> str:
    """The name of the signal that ends a run."""
    return stop[0] if stop else "a signal to another process"


def check_same_run(saved: Mapping[str, Any], config: Any, *, directory: Path, fingerprint: str) -> list[str]:
    """What to say of options that changed since a checkpoint. Raises ValueError where it is one of another run."""
    earlier = from_dict(type(config), tomllib.loads(saved["config"]), where="checkpoint")
    notes = [f"resumed with {name}: {old!r} -> {new!r}" for name, (old, new) in check_resume(earlier, config).items()]
    if saved["data"] != fingerprint:
        raise ValueError(
            f"{directory}: the training rows are not those that this run was started with (dataset, template or "
            "tokenizer changed): restore them, or give another output_dir to start a new run"
        )
    return notes


def write_command(directory: Path, command: str) -> None:
    """Marks a run directory with the command that made it, which is what its checkpoints are read by."""
    (directory / "run.json").write_text(json.dumps({"command": command}) + "\n")


def command_of(directory: str | Path) -> str | None:
    """The command of a run directory; None for those of the policy-gradient family."""
    path = Path(directory) / "run.json"
    return json.loads(path.read_text())["command"] if path.is_file() else None


def check_command(directory: Path, command: str | None) -> None:
    """Raises ValueError where a directory holds the run of another command."""
    found = command_of(directory)
    if found != command:
        shown = lambda name: name or "grpo, rloo or ppo"
        raise ValueError(
            f"{directory} holds a run of {shown(found)}, and this is {shown(command)}: give another output_dir"
        )


def keep_batch(directory: Path, step: int, batch: Any) -> Path:
    """Writes the arrays of a batch whose loss was not finite."""
    path = directory / f"nonfinite_step_{step:06d}.npz"
    leaves = jax.tree_util.tree_leaves_with_path(gather(batch))
    arrays = {jax.tree_util.keystr(where, simple=True, separator="."): leaf for where, leaf in leaves}

    def write() -> None:
        with tempfile.NamedTemporaryFile(dir=directory, suffix=".npz", delete=False) as file:
            np.savez(file, **arrays)
        Path(file.name).replace(path)

    first_only(write)
    return path


def open_directory(directory: Path, config: Any, *, command: str | None, step: int) -> None:
    """Makes the run directory, or rewinds the one that is there to a step (-1: to its start), and writes what it is.

    `command`: None for the policy-gradient family. Raises ValueError where a process does not see the directory.
    """

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        rewind(directory, step)
        (directory / "config.toml").write_text(to_toml(config))
        if command is None:
            (directory / "run.json").unlink(missing_ok=True)  # of another command that saved nothing
        else:
            write_command(directory, command)

    first_only(write)
    check_shared(directory)


def check_processes(config: Any) -> None:
    """Raises ValueError, naming the option or the version, where the processes of a run do not agree, and where options
    ask for processes that have not been started.
    """
    own = {field.name for field in dataclasses.fields(DistributedOptions)}
    asked, there = config.num_processes, jax.process_count()
    if asked not in (None, there) or (asked is None and config.coordinator_address is not None and there == 1):
        raise ValueError(
            f"num_processes={asked}, coordinator_address={config.coordinator_address!r}: the run has {there} process(es): "
            "the command line starts several; in Python call jaxrl_lm.launch.start before anything touches a device"
        )
    if not several():
        return
    package, digest = Path(__file__).parent, hashlib.blake2b(digest_size=16)
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    versions = {"jax": jax.__version__, "numpy": np.__version__, "jaxrl_lm's files": digest.hexdigest()}
    check_same(versions, what="versions")
    options = {name: repr(value) for name, value in dataclasses.asdict(config).items() if name not in own}
    check_same(options, what="config")
