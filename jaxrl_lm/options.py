"""Options in and out: TOML and command line to a frozen config, a config to TOML, and what a resumed run may change.

Works on any dataclass whose fields are bool, int, float, str, Literal, `X | None`, `tuple[X, ...]` or `dict[str, X]`;
what the options mean stands in `config.py`. Every value goes through one check (`from_dict`), wherever it was given.
Not here: reading datasets or models. Next to read: `cli.py`.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tomli_w
import tyro

# The keys that leave what a run has already done, and the rule by which it goes on, as they were: its length, what is
# measured, saved and shown, where it is written, and how the same numbers are laid out on devices. A key that is not
# listed may not change. Lengths have a condition, see `check_resume`.
RESUMABLE = frozenset(
    {
        "max_steps",
        "num_epochs",
        "eval_dataset",
        "eval_reward_functions",
        "eval_steps",
        "eval_limit",
        "eval_num_generations",
        "true_reward",  # logged only
        "probe_prompts",  # before step 1
        "save_steps",
        "save_total_limit",
        "best_metric",
        "logging_steps",
        "completions_steps",
        "report_to",
        "output_dir",  # the directory was moved
        "prompt_buckets",  # padding
        "length_buckets",
        "microbatch_completions",
        "microbatch_rows",
        "share_prompt",
        "pack_completions",
        "mesh",
        "sharding_preset",
        "sharding_rules",
        "decode_sharding_rules",
        "rollout_mesh",
        "reference_placement",
        "reward_placement",
        "critic_placement",
        "optimizer_placement",
        "coordinator_address",
        "num_processes",
        "process_id",
        "start_timeout",
        "heartbeat_timeout",
        "remat",
        "attention_implementation",
        "score_chunk",
        "decode_chunk",
    }
)
_LENGTHS = ("max_steps", "num_epochs")
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_PLURALS = {bool: "true or false", int: "integers", float: "numbers", str: "strings"}


class ConfigError(ValueError):
    """An option that does not exist, is missing or has a value of the wrong kind."""


def parse(config_class: type, argv: Sequence[str], *, prog: str, description: str) -> Any:
    """The config that defaults, then the file of `--config`, then the command line give.

    Any key can be given as `--key value`, with hyphens or underscores; one entry of a table as `--mesh.fsdp 8`, which
    leaves the table's other entries. A mistake of the user ends the program with code 2 and one message on stderr.
    """
    try:
        hints = typing.get_type_hints(config_class)
        given = _scan(argv, hints)
        where = given.config or "command line"
        from_file = {} if given.config is None else _checked(config_class, read_toml(given.config), where=where)
        defaults = {**_defaults(config_class), **from_file}
        shadow = _shadow(config_class, hints, defaults)
        flat = tyro.cli(
            shadow,
            args=given.rest,
            prog=prog,
            description=description,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
        values = {}
        for name, hint in hints.items():
            if _is_table(hint):
                values[name] = {**defaults.get(name, {}), **given.tables.get(name, {})}
            else:
                values[name] = getattr(flat, name)
        return from_dict(config_class, values, where="command line")
    except ValueError as error:
        _stop(prog, str(error))


def _stop(prog: str, message: str) -> NoReturn:
    print(f"{prog}: error: {message}\nAll options: {prog} --help", file=sys.stderr)
    raise SystemExit(2)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file. Raises ConfigError that names the file."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror}); check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error


def from_dict(config_class: type, mapping: Mapping[str, Any], *, where: str) -> Any:
    """The config with the mapping's values; lists become tuples, integers become floats where a float is meant.

    `where` names the source in messages, such as the file. Raises ConfigError (a ValueError) on an unknown key, naming
    the nearest one, on a missing key and on a value of the wrong kind.
    """
    values = _checked(config_class, mapping, where=where)
    missing = [
        field.name
        for field in dataclasses.fields(config_class)
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given")
    try:
        return config_class(**values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_toml(config: Any) -> str:
    """TOML text from which `from_dict` makes an equal config: every key, those that are None left out."""
    defaults = _defaults(type(config))
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is not None:
            values[field.name] = list(value) if isinstance(value, tuple) else value
        elif defaults.get(field.name, None) is not None:
            raise ConfigError(f"{field.name} = None cannot be written: TOML has no null and the default is not None")
    return tomli_w.dumps(values)


def changed(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The keys on which two configs of one class differ, with (old, new)."""
    if type(old) is not type(new):
        raise TypeError(f"configs of two kinds of run: {type(old).__name__} and {type(new).__name__}")
    pairs = {field.name: (getattr(old, field.name), getattr(new, field.name)) for field in dataclasses.fields(new)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def check_resume(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The allowed changes with (old, new), to be logged.

    Raises ConfigError listing every changed key when one of them would make the run another run. A run's length may
    change under a constant learning rate only: other schedules are functions of the length, so that the steps already
    taken would have had other learning rates.
    """
    changes = changed(old, new)
    allowed = {}
    lines = []
    for name, (before, after) in changes.items():
        reason = None if name in RESUMABLE else "not allowed"
        schedule = getattr(old, "lr_scheduler", "constant")
        if name in _LENGTHS and schedule != "constant":
            reason = f"not allowed with lr_scheduler={schedule!r}, which depends on it"
        if reason is None:
            allowed[name] = (before, after)
        lines.append(f"  {name}: {before!r} -> {after!r} ({reason or 'allowed'})")
    if len(allowed) < len(changes):
        raise ConfigError(
            "this run was started with other options:\n"
            + "\n".join(lines)
            + "\nSet those that are not allowed back to resume it, or give another output_dir to start a new run."
        )
    return allowed


# --- values ---------------------------------------------------------------------------------------------------------


def _defaults(config_class: type) -> dict[str, Any]:
    defaults = {}
    for field in dataclasses.fields(config_class):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def _checked(config_class: type, mapping: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    for key in mapping:
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}; the nearest is {nearest(key, hints)!r}")
    return {name: _convert(value, hints[name], f"{where}: {name}") for name, value in mapping.items()}


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of the names that is spelt most like the given one."""
    plain = {other.lower(): other for other in names}
    return plain[difflib.get_close_matches(name.lower().replace("-", "_"), list(plain), n=1, cutoff=0.0)[0]]


def _convert(value: Any, hint: Any, label: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_optional(hint):
        return None if value is None else _convert(value, _inner(hint), label)
    if origin is Literal and any(type(value) is type(choice) and value == choice for choice in arguments):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(item, arguments[0], f"{label}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _convert(item, arguments[1], f"{label}.{key}") for key, item in value.items()}
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in _NAMES and type(value) is hint:
        return value
    raise ConfigError(f"{label} = {value!r}: expected {_expected(hint)}")


def _expected(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if _is_optional(hint):
        return f"{_expected(_inner(hint))}, or the key left out"
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin is tuple:
        return f"a list of {_PLURALS[arguments[0]]}"
    if origin is dict:
        return f"a table of {_PLURALS[arguments[1]]} by name"
    if hint in _NAMES:
        return _NAMES[hint]
    raise TypeError(f"options of type {hint} are not supported")


def _is_optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType) and type(None) in typing.get_args(hint)


def _inner(hint: Any) -> Any:
    """X of `X | None`."""
    (inner,) = (argument for argument in typing.get_args(hint) if argument is not type(None))
    return inner


def _is_table(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


# --- the command line -----------------------------------------------------------------------------------------------


class _Given(typing.NamedTuple):
    config: str | None
    tables: dict[str, dict[str, Any]]
    rest: list[str]  # for tyro


def _scan(argv: Sequence[str], hints: dict[str, Any]) -> _Given:
    """Takes --config and the entries of tables out of argv, completes a bare boolean, refuses unknown options."""
    config, tables, rest = None, {}, []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--") or token == "--help":
            rest.append(token)
            continue
        option, equals, value = token.partition("=")
        root, dot, entry = option[2:].partition(".")
        name = root.replace("-", "_")
        if name != "config" and (name not in hints or (dot and not _is_table(hints[name]))):
            raise ConfigError(f"unknown option {option}; the nearest is --{nearest(name, [*hints, 'config'])}")

        def take(option=option, equals=equals, value=value) -> str:
            if equals:
                return value
            if not tokens or tokens[0].startswith("--"):
                raise ConfigError(f"{option}: a value must follow")
            return tokens.pop(0)

        if name == "config":
            if config is not None:
                raise ConfigError("--config: given twice; merge the files")
            config = take()
        elif _is_table(hints[name]):
            tables.setdefault(name, {})[entry] = _entry(option, entry, typing.get_args(hints[name])[1], take)
        elif hints[name] is bool:
            bare = not equals and (not tokens or tokens[0].startswith("--"))
            rest += [option, "True" if bare else take().capitalize()]
        else:
            rest.append(token)
    return _Given(config, tables, rest)


def _entry(option: str, entry: str, kind: type, take: Callable[[], str]) -> Any:
    if not entry:
        raise ConfigError(f"{option} is a table: give its entries one by one, as {option}.NAME {kind.__name__.upper()}")
    text = take()
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{option} = {text!r}: expected {_expected(kind)}") from error


def _shadow(config_class: type, hints: dict[str, Any], defaults: dict[str, Any]) -> type:
    """A dataclass for tyro: the fields of the config, the defaults of the file, and the tables for the help only."""
    docs = _docs(config_class)
    note = "TOML file with these keys; the command line wins over it."
    fields = [("config", Annotated[str | None, tyro.conf.arg(help=note, metavar="FILE")], None)]
    for name, hint in hints.items():
        if _is_table(hint):
            kind = typing.get_args(hint)[1].__name__.upper()
            shown = ", ".join(f"{key} = {value}" for key, value in defaults.get(name, {}).items()) or "none"
            argument = tyro.conf.arg(
                name=f"{name}.NAME", metavar=kind, help=docs.get(name, ""), help_behavior_hint=f"(default: {shown})"
            )
            fields.append((name, Annotated[str, argument], ""))
        else:
            default = defaults.get(name, dataclasses.MISSING)
            shown = "(default: none)" if default == () else None  # tyro would show "(default: )"
            argument = tyro.conf.arg(help=docs.get(name, ""), help_behavior_hint=shown)
            fields.append((name, Annotated[hint, argument], dataclasses.field(default=default)))
    return dataclasses.make_dataclass(config_class.__name__, fields, kw_only=True)


def _docs(config_class: type) -> dict[str, str]:
    """The string literal under each field of the class and its bases."""
    docs = {}
    for base in reversed(config_class.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, text in itertools.pairwise(body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and is_text and isinstance(text.value.value, str):
                docs[field.target.id] = inspect.cleandoc(text.value.value)
    return docs
