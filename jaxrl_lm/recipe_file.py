"""The file of a recipe: its stages in the order in which they run, and what the braces in their options mean.

Here a stage's options become the config of its command; `recipe.py` checks and runs them. The format is described in
docs/recipes.md.
"""

import argparse
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_lm.options import ConfigError, from_dict, nearest, read_toml

# Options with braces of their own, beside those that end in _template: they are left as they are.
VERBATIM = frozenset({"system_prompt", "prompt", "stop", "planning_tokens", "step_separator", "format"})
RESERVED = ("round", "output_dir")  # what braces may hold beside names of stages
ROOT = "{output_dir}"  # how paths below the recipe's directory are kept, so that the directory may move


class Command(NamedTuple):
    """What a stage can be."""

    config_class: type
    run: Callable[[Any], Any]  # what it returns may say `interrupted`: then the recipe ends here
    result: Callable[[Any, Path], str | Path]  # of config and stage directory: the path that later stages get
    places: Mapping[str, str] = {"output_dir": "."}  # options that the recipe sets, to paths in the stage's directory
    check: Callable[[Any], None] | None = None  # raises ValueError for options that do not go together
    idle: Callable[[Mapping[str, Any]], Iterable[str]] = lambda options: ()  # what nothing reads with a stage's options


class Stage(NamedTuple):
    """A stage in its place."""

    name: str  # of its directory; in a loop with the number of the round
    base: str  # as it stands in the file
    command: str
    options: dict[str, Any]
    visible: dict[str, str]  # names that it may refer to, and the stages before it that they mean
    loop: frozenset[str] = frozenset()  # names of the stages of its loop
    round: int | None = None


class Recipe(NamedTuple):
    """A file, read and put in order."""

    source: str
    output_dir: Path
    defaults: dict[str, Any]
    stages: tuple[Stage, ...]

    def directory(self, stage: str) -> Path:
        """Where a stage writes."""
        return self.output_dir / stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Head:
    output_dir: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StageHead:
    name: str
    command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LoopHead:
    rounds: int
    after: str | None = None

    def __post_init__(self):
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds}: must be at least 1")


# --- the file ---------------------------------------------------------------------------------------------------------


def parse_recipe(argv: Sequence[str]) -> tuple[Recipe, str | None]:
    """The recipe of a command line and the stage to stop after. A mistake in the line ends with code 2."""
    parser = argparse.ArgumentParser(
        prog="jaxrl-lm recipe", description="Run the stages of a recipe, or go on with them", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file with the stages (docs/recipes.md)")
    parser.add_argument("--output_dir", "--output-dir", metavar="DIR", help="instead of the file's output_dir")
    parser.add_argument("--until", metavar="STAGE", help="last stage to run; of a loop's, its last round or NAME-ROUND")
    given = parser.parse_args(argv)
    return read_recipe(given.config, output_dir=given.output_dir), given.until


def read_recipe(path: str | Path, *, output_dir: str | Path | None = None) -> Recipe:
    """The recipe in a file, its loops unrolled; `output_dir` wins over the file's.

    Raises ConfigError (a ValueError) that names file and stage for a key, name or order that cannot be.
    """
    where, table = str(path), read_toml(path)
    keys = ("output_dir", "defaults", "stage", "loop")
    for key in table:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key!r}; the nearest is {nearest(key, keys)!r}")
    head = {"output_dir": str(output_dir)} if output_dir is not None else _only(table, ("output_dir",))
    defaults = table.get("defaults", {})
    if not isinstance(defaults, dict):
        raise ConfigError(f"{where}: defaults = {defaults!r}: expected a table, [defaults]")
    directory = Path(from_dict(_Head, head, where=where).output_dir)
    return Recipe(where, directory, defaults, tuple(_with_visible(_unroll(table, where), where)))


def _only(table: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: table[key] for key in keys if key in table}


def _tables(table: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"{where}: {key} must be an array of tables: write [[{key}]]")
    return found


def _unroll(table: Mapping[str, Any], where: str) -> list[Stage]:
    """The stages in the order in which they run."""
    plain = [_stage(one, where, number) for number, one in enumerate(_tables(table, "stage", where), 1)]
    names = [stage.name for stage in plain]
    loops = [_loop(one, where, number, names) for number, one in enumerate(_tables(table, "loop", where), 1)]
    if not plain and not loops:
        raise ConfigError(f"{where}: no stage: write [[stage]] with a name and a command")
    order = []
    for stage in plain:
        order += [stage, *(one for after, rounds in loops if after == stage.name for one in rounds)]
    return order + [one for after, rounds in loops if after is None for one in rounds]


def _stage(table: dict[str, Any], where: str, number: int) -> Stage:
    label = f"{where}, stage {table.get('name', number)!r}"
    head = from_dict(_StageHead, _only(table, ("name", "command")), where=label)
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*", head.name) or head.name in RESERVED:
        raise ConfigError(f"{label}: a name has letters, digits, - and _, and is not {' or '.join(RESERVED)}")
    options = {key: value for key, value in table.items() if key not in ("name", "command")}
    return Stage(head.name, head.name, head.command, options, {})


def _loop(table: dict[str, Any], where: str, number: int, names: Sequence[str]) -> tuple[str | None, list[Stage]]:
    """The name of the stage that a loop comes after, and its stages, round after round."""
    label, keys = f"{where}, loop {number}", ("rounds", "after", "stage")
    for key in table:
        if key not in keys:
            raise ConfigError(f"{label}: unknown key {key!r}; the nearest is {nearest(key, keys)!r}")
    head = from_dict(_LoopHead, _only(table, ("rounds", "after")), where=label)
    if head.after is not None and head.after not in names:
        near = f"; the nearest is {nearest(head.after, names)!r}" if names else ""
        raise ConfigError(f"{label}: after = {head.after!r}: there is no [[stage]] of this name{near}")
    stages = [_stage(one, label, place) for place, one in enumerate(_tables(table, "stage", label), 1)]
    if not stages:
        raise ConfigError(f"{label}: no stage: write [[loop.stage]] with a name and a command")
    loop = frozenset(stage.base for stage in stages)
    return head.after, [
        stage._replace(name=f"{stage.base}-{turn}", loop=loop, round=turn)
        for turn in range(1, head.rounds + 1)
        for stage in stages
    ]


def _with_visible(stages: Sequence[Stage], where: str) -> Iterator[Stage]:
    """The stages with what each may refer to: a name means the newest stage of that name before it."""
    visible: dict[str, str] = {}
    names = set()
    for stage in stages:
        if stage.name in names:
            raise ConfigError(f"{where}: two stages are called {stage.name!r}; give one of them another name")
        names.add(stage.name)
        yield stage._replace(visible=dict(visible))
        visible |= {stage.base: stage.name, stage.name: stage.name}


# --- references -------------------------------------------------------------------------------------------------------


def resolve(recipe: Recipe, stage: Stage, command: Command, results: Mapping[str, str]) -> tuple[Any, list[str]]:
    """A stage's config, in which only {output_dir} still stands for something, and the stages that it reads.

    `results` are those of the stages before; a path that there will be stands in for one that there is not yet.
    """
    where, reads = f"{recipe.source}, stage {stage.name!r}", []

    def put(match: re.Match) -> str:
        name, bar, otherwise = match[1].partition("|")
        name, dot, part = name.partition(".")
        if name == "round" and stage.round is not None and not dot and not bar:
            return str(stage.round)
        if match[0] == ROOT:
            return ROOT
        if (dot and part != "dir") or name in RESERVED:
            raise ConfigError(
                f"{where}: {match[0]}: braces hold a stage's name, NAME.dir, NAME|OTHERWISE, output_dir or, in a loop, round"
            )
        if name in stage.visible:
            reads.append(stage.visible[name])
            return f"{ROOT}/{reads[-1]}" if dot else results.get(reads[-1], f"{ROOT}/{reads[-1]}/result")
        if bar and name in stage.loop:
            return otherwise
        raise ConfigError(f"{where}: {match[0]}: {_why_not(recipe, stage, name)}")

    for key in command.places:
        if key in stage.options:
            raise ConfigError(f"{where}: {key} is set by the recipe, to a path in {recipe.directory(stage.name)}")
    options = _only(recipe.defaults, takes(recipe, stage, command)) | stage.options
    options = {key: value if _verbatim(key) else _substitute(value, put) for key, value in options.items()}
    options |= {key: os.path.normpath(f"{ROOT}/{stage.name}/{place}") for key, place in command.places.items()}
    return from_dict(command.config_class, options, where=where), reads


def takes(recipe: Recipe, stage: Stage, command: Command) -> set[str]:
    """The options that a default of the recipe can be for in this stage."""
    own = {field.name for field in dataclasses.fields(command.config_class)} - set(command.places)
    return own - set(command.idle(_only(recipe.defaults, own) | stage.options))


def _why_not(recipe: Recipe, stage: Stage, name: str) -> str:
    """Why a name cannot be referred to."""
    if name in stage.loop:
        return f"there is no {name} before the first one; {{{name}|OTHERWISE}} says what is taken until then"
    known = {other for one in recipe.stages for other in (one.name, one.base)}
    if name in known:
        return f"{name} does not stand before this stage"
    return f"there is no stage {name!r}; the nearest is {nearest(name, known)!r}"


def _verbatim(key: str) -> bool:
    return key.endswith("_template") or key in VERBATIM


def _substitute(value: Any, put: Callable[[re.Match], str]) -> Any:
    """The value with references replaced in every string; a string that is {round} alone becomes an integer."""
    if isinstance(value, str):
        text = re.sub(r"\{([^{}]*)\}", put, value)
        return int(text) if value == "{round}" else text
    if isinstance(value, list | tuple):
        return [_substitute(one, put) for one in value]
    if isinstance(value, dict):
        return {key: _substitute(one, put) for key, one in value.items()}
    return value


def placed(recipe: Recipe, config: Any) -> Any:
    """The config with the recipe's directory in its place."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    put = lambda match: str(recipe.output_dir) if match[0] == ROOT else match[0]
    values = {key: value if _verbatim(key) else _substitute(value, put) for key, value in values.items()}
    return from_dict(type(config), values, where=recipe.source)
