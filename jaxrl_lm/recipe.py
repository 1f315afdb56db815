"""Recipes: stages in one TOML file, each a command of ours, that hand what they made to the next and resume anywhere.

`check_recipe` looks at all stages before the first one runs, `run_recipe` runs them. Which commands there are and what
each leaves behind is the caller's table (`cli.py`), so no trainer is imported here. Reading the file: `recipe_file.py`.
"""

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_lm.options import ConfigError, changed, from_dict, nearest
from jaxrl_lm.recipe_file import ROOT, Command, Recipe, Stage, placed, resolve, takes


class Done(NamedTuple):
    """What a finished stage left behind, as in its done.json."""

    command: str
    options: dict[str, Any]  # resolved; {output_dir} stands for the recipe's
    result: str
    seconds: float  # of the call that finished it


# --- before anything runs ---------------------------------------------------------------------------------------------


def check_recipe(recipe: Recipe, commands: Mapping[str, Command]) -> dict[str, Done]:
    """The stages that are done already, by name, when every stage of the recipe can be what it says.

    Raises ConfigError (a ValueError) naming the stage for a command, reference or option that there is not, a default
    that no stage has, a done stage whose options have changed, and one whose input is gone.
    """
    unused = set(recipe.defaults)
    for stage in recipe.stages:
        where = f"{recipe.source}, stage {stage.name!r}"
        if stage.command not in commands:
            near = nearest(stage.command, commands)
            raise ConfigError(f"{where}: there is no command {stage.command!r}; the nearest is {near!r}")
        command = commands[stage.command]
        config, _ = resolve(recipe, stage, command, {})
        unused -= takes(recipe, stage, command)
        if command.check is not None:
            try:
                command.check(placed(recipe, config))
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from error
    for key in sorted(unused):
        names = set().union(*(takes(recipe, one, commands[one.command]) for one in recipe.stages))
        near = nearest(key, names)
        raise ConfigError(f"{recipe.source}, [defaults]: no stage takes {key!r}; the nearest option is {near!r}")
    return _check_done(recipe, commands)


def _check_done(recipe: Recipe, commands: Mapping[str, Command]) -> dict[str, Done]:
    """The stages that are done, when they are what the recipe asks for now."""
    finished: dict[str, Done] = {}
    orphans: list[str] = []
    for stage in recipe.stages:
        config, reads = resolve(recipe, stage, commands[stage.command], _results(finished))
        record = _read_done(recipe.directory(stage.name))
        if _begun(recipe, stage.name) and not set(reads) <= finished.keys():
            orphans.append(stage.name)
        elif record is not None:
            _check_unchanged(recipe, commands, stage, config, record)
            finished[stage.name] = record
    if orphans:
        raise ConfigError(
            f"{recipe.source}: {', '.join(orphans)} read what is not there any more, or would be made anew: delete "
            + _directories(recipe, orphans)
        )
    return finished


def _check_unchanged(recipe: Recipe, commands: Mapping[str, Command], stage: Stage, config: Any, record: Done) -> None:
    """Raises ConfigError where a done stage was another, or its result has been removed."""
    where = recipe.directory(stage.name) / "done.json"
    later = _later(recipe, commands, stage.name)
    again = f"To run it again delete {_directories(recipe, [stage.name, *later])}; or give another output_dir."
    if record.command != stage.command:
        changes = {"command": (record.command, stage.command)}
    else:
        changes = changed(from_dict(type(config), record.options, where=str(where)), config)
    if changes:
        lines = "\n".join(f"  {key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())
        raise ConfigError(f"{recipe.source}, stage {stage.name!r} is done, with other options:\n{lines}\n{again}")
    if not Path(_real(recipe, record.result)).exists():
        raise ConfigError(f"{where}: the result {_real(recipe, record.result)} is gone. {again}")


def _later(recipe: Recipe, commands: Mapping[str, Command], name: str) -> list[str]:
    """The stages that have begun and read what the named one left, themselves or by way of others."""
    reached = [name]
    for stage in recipe.stages:
        _, reads = resolve(recipe, stage, commands[stage.command], {})
        if set(reads) & set(reached):
            reached.append(stage.name)
    return [one for one in reached[1:] if _begun(recipe, one)]


def _begun(recipe: Recipe, name: str) -> bool:
    directory = recipe.directory(name)
    return directory.is_dir() and any(directory.iterdir())


def _directories(recipe: Recipe, names: Iterable[str]) -> str:
    return ", ".join(str(recipe.directory(name)) for name in names)


# --- running ----------------------------------------------------------------------------------------------------------


def run_recipe(recipe: Recipe, commands: Mapping[str, Command], *, until: str | None = None) -> dict[str, str]:
    """The results by stage, after all stages up to `until` that are not done yet have been run.

    Each leaves done.json in its directory and a line in recipe.json; a half-finished one is handed to its command
    again, which goes on in its own run directory. Raises as `check_recipe` before the first stage runs, what a command
    raises, and SystemExit where a signal ended a stage: the same call goes on with it.
    """
    finished = check_recipe(recipe, commands)
    stages = recipe.stages[: _last(recipe, until) + 1]
    for number, stage in enumerate(stages, 1):
        title = f"stage {number} of {len(recipe.stages)}, {stage.name} ({stage.command})"
        if stage.name in finished:
            print(f"{title}: done before, in {finished[stage.name].seconds:.1f} s", flush=True)
            continue
        print(f"{title}: begins in {recipe.directory(stage.name)}", flush=True)
        config, _ = resolve(recipe, stage, commands[stage.command], _results(finished))
        done = _run_stage(recipe, stage, commands[stage.command], config)
        finished[stage.name] = done
        print(f"{title}: {done.seconds:.1f} s, result {_real(recipe, done.result)}", flush=True)
        _write_summary(recipe, finished)
    _write_summary(recipe, finished)
    results = {stage.name: _real(recipe, finished[stage.name].result) for stage in stages}
    print("\n".join(_table(stages, finished, results)), flush=True)
    return results


def _last(recipe: Recipe, until: str | None) -> int:
    """The index of the stage to stop after; of a name in a loop the last round's."""
    if until is None:
        return len(recipe.stages) - 1
    exact = [index for index, stage in enumerate(recipe.stages) if stage.name == until]
    found = exact or [index for index, stage in enumerate(recipe.stages) if stage.base == until]
    if not found:
        near = nearest(until, [stage.name for stage in recipe.stages])
        raise ConfigError(f"until = {until!r}: {recipe.source} has no such stage; the nearest is {near!r}")
    return found[-1]


def _run_stage(recipe: Recipe, stage: Stage, command: Command, config: Any) -> Done:
    """Runs a stage to its end and says so in its directory."""
    directory, began, ready = recipe.directory(stage.name), time.perf_counter(), placed(recipe, config)
    directory.mkdir(parents=True, exist_ok=True)
    again = "the same command goes on with this stage"
    try:
        with _ends_at(signal.SIGTERM):
            ended = command.run(ready)
            interrupted = getattr(ended, "interrupted", False)
            reason = getattr(ended, "stopped", None) or "interrupted"
            del ended  # a run holds the weights, which the result may need the room of
            if interrupted:
                raise SystemExit(reason)
            result = Path(command.result(ready, directory))
    except SystemExit as end:
        raise SystemExit(f"stage {stage.name}: {end.code}; {again}") from end
    if not result.exists():
        raise FileNotFoundError(f"stage {stage.name}: {stage.command} has left no {result}")
    inside = result.absolute().is_relative_to(recipe.output_dir.absolute())
    text = f"{ROOT}/{result.absolute().relative_to(recipe.output_dir.absolute()).as_posix()}" if inside else str(result)
    done = Done(stage.command, dataclasses.asdict(config), text, time.perf_counter() - began)
    _write_json(directory / "done.json", done._asdict())
    return done


@contextlib.contextmanager
def _ends_at(number: signal.Signals) -> Iterator[None]:
    """A signal raises SystemExit meanwhile; trainers that save first have a handler of their own."""

    def end(*_: Any) -> None:
        raise SystemExit(number.name)

    try:
        before = signal.signal(number, end)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)


def _results(finished: Mapping[str, Done]) -> dict[str, str]:
    return {name: done.result for name, done in finished.items()}


def _real(recipe: Recipe, result: str) -> str:
    return result.replace(ROOT, str(recipe.output_dir), 1)


def _read_done(directory: Path) -> Done | None:
    path = directory / "done.json"
    if not path.exists():
        return None
    try:
        return Done(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not what a finished stage writes ({error}); delete {directory}") from error


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Writes a file that is whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(json.dumps(table, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _write_summary(recipe: Recipe, finished: Mapping[str, Done]) -> None:
    rows = [
        {
            "stage": stage.name,
            "command": stage.command,
            "seconds": finished[stage.name].seconds,
            "result": _real(recipe, finished[stage.name].result),
        }
        for stage in recipe.stages
        if stage.name in finished
    ]
    _write_json(recipe.output_dir / "recipe.json", {"recipe": recipe.source, "stages": rows})


def _table(stages: Sequence[Stage], finished: Mapping[str, Done], results: Mapping[str, str]) -> list[str]:
    width = max(len(stage.name) for stage in stages)
    return [f"{'stage':{width}}  {'command':12}  {'seconds':>8}  result"] + [
        f"{one.name:{width}}  {one.command:12}  {finished[one.name].seconds:8.1f}  {results[one.name]}"
        for one in stages
    ]
