"""What every kind of run on given rows is put together from: checked options, model on the mesh, encoded rows, schedule."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax

from jaxrl_lm.assemble import load_model
from jaxrl_lm.data import read_rows
from jaxrl_lm.example import Examples
from jaxrl_lm.fit_config import FitOptions
from jaxrl_lm.given import Table, table_of
from jaxrl_lm.models import Model, eos_token_ids
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.options import from_dict
from jaxrl_lm.packing import pack, packing_share
from jaxrl_lm.prepare import plan_of, vocabulary_notes
from jaxrl_lm.runs import check_processes
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params

# The least value that an option may have.
LEAST = {
    "max_length": 2, "rows_per_step": 1, "microbatch_rows": 1, "max_steps": 1, "num_epochs": 0, "eval_steps": 0,
    "eval_limit": 1, "save_steps": 0, "logging_steps": 1, "seed": 0, "learning_rate": 0, "warmup_steps": 0,
    "max_grad_norm": 0, "weight_decay": 0, "score_chunk": 1, "lora_rank": 1, "members": 1,
    "center_rewards_coefficient": 0, "simpo_gamma": 0, "desirable_weight": 0, "undesirable_weight": 0, "rpo_alpha": 0,
}  # fmt: skip


class Basis(NamedTuple):
    """A checked config, and the model that training starts from."""

    config: Any
    plan: Plan
    model: Model
    params: Params
    tokenizer: Any
    generation: dict[str, Any]
    eos_token_id: int  # what ends a response
    pad_token_id: int
    microbatches: int


def check(config: FitOptions, plan: Plan) -> None:
    """Raises ValueError, naming the option, for values out of range and sizes that do not divide."""
    for name, least in LEAST.items():
        value = getattr(config, name, None)
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: must be at least {least}")
    for name, size in (("rows_per_step", config.rows_per_step), ("microbatch_rows", config.microbatch_rows or 0)):
        if size % plan.batch_ways:
            raise ValueError(
                f"{name}={size} is not divisible by the {plan.batch_ways} devices of the mesh's batch axes"
            )
    microbatch = config.microbatch_rows or config.rows_per_step
    if config.rows_per_step % microbatch:
        raise ValueError(f"microbatch_rows={microbatch} does not divide rows_per_step={config.rows_per_step}")
    if config.num_epochs <= 0:
        raise ValueError(f"num_epochs={config.num_epochs}: must be above 0")
    if config.best_metric is not None and config.best_metric.endswith(("loss", "calibration_error")):
        raise ValueError(f"best_metric={config.best_metric!r} is best where it is lowest, and the highest is kept")
    if config.best_metric is not None and not (config.eval_dataset and config.eval_steps):
        raise ValueError(f"best_metric={config.best_metric!r} needs an eval_dataset, and eval_steps above 0")


def checked(config: Any) -> Any:
    """The config after the check that those of files and command lines get."""
    return from_dict(type(config), dataclasses.asdict(config), where="config")


def open_model(config: FitOptions, load: Callable[..., Any] | None = None) -> Basis:
    """The checked config with the model on its mesh. `load` is one like `load_model`."""
    config = checked(config)
    check_processes(config)
    plan = plan_of(config)
    check(config, plan)
    model, params, tokenizer, generation = (load or load_model)(
        config.model, plan, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat,
        attention=config.attention_implementation,
    )  # fmt: skip
    eos = eos_token_ids(generation, tokenizer)
    own = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else eos[0]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    microbatches = config.rows_per_step // (config.microbatch_rows or config.rows_per_step)
    return Basis(config, plan, model, params, tokenizer, generation, own, pad, microbatches)


class Tables(NamedTuple):
    train: Table
    held_out: dict[str, Table]
    notes: list[str]


def make_tables(
    basis: Basis, encode: Callable[..., Examples], dataset: Any, *, packing: bool = False, left: bool = False
) -> Tables:
    """The training rows and those of the evaluation sets, encoded by `encode(rows, name=…)` and given their shapes
    (`left`: see `table_of`).

    `dataset` (rows) stands in for the config's. Raises ValueError, naming file and row, for rows that do not fit.
    """
    config = basis.config
    rows = read_rows(dataset if dataset is not None else config.dataset, name="dataset")
    data = encode(rows, name="dataset")
    held = {
        name: encode(read_rows(source, name=f"eval_dataset {name!r}"), name=f"eval_dataset {name!r}")
        for name, source in config.eval_dataset.items()
    }
    _check_held_out(data, held)
    notes = [*_notes("dataset", data, config.max_length)]
    for name, one in held.items():
        notes += _notes(f"eval_dataset {name!r}", one, config.max_length)
    if packing:
        data, note = _packed(data, config.max_length)
        first = lambda one: one._replace(rows=one.rows[: config.eval_limit], sides=one.sides[: config.eval_limit])
        held = {name: _packed(first(one), config.max_length)[0] for name, one in held.items()}
        notes.append(note)
    shapes = {"rows": config.rows_per_step, "pad_id": basis.pad_token_id, "buckets": config.length_buckets}
    shapes["left"] = left or packing
    train = table_of(data, list(held.values()), **shapes)
    return Tables(train, {name: dataclasses.replace(train, data=one) for name, one in held.items()}, notes)


def _packed(data: Examples, max_length: int) -> tuple[Examples, str]:
    packed = pack([side for (side,) in data.sides], max_length=max_length)
    note = (
        f"packing: {len(data.sides)} rows in {len(packed)} of {max_length} tokens, "
        f"{packing_share(packed, max_length):.1%} filled"
    )
    return data._replace(sides=[(side,) for side in packed]), note


def _check_held_out(data: Examples, held: Mapping[str, Examples]) -> None:
    """Raises ValueError for a held-out row that is trained on."""
    trained = {tuple(tuple(side.ids) for side in sides) for sides in data.sides}
    for name, one in held.items():
        same = [index for index, sides in enumerate(one.sides) if tuple(tuple(side.ids) for side in sides) in trained]
        if same:
            raise ValueError(
                f"eval_dataset {name!r}: {len(same)} of its rows stand in the training set too (row {same[0]} of those "
                "kept is the first): take them out of one of the two"
            )


def _notes(name: str, data: Examples, max_length: int) -> list[str]:
    counts = {
        f"{data.dropped} rows dropped, longer than max_length={max_length}": data.dropped,
        f"{data.cut} rows cut to max_length={max_length}": data.cut,
        f"{data.no_response} rows dropped: cut to max_length={max_length} nothing of a response would be left": (
            data.no_response
        ),
        f"{data.identical} pairs with two equal sides, which teach nothing": data.identical,
    }
    return [f"{name}: {text}" for text, count in counts.items() if count]


class Timing(NamedTuple):
    total_steps: int
    schedule: Callable[[int], Any]
    tx: optax.GradientTransformation


def timing(config: FitOptions, rows: int) -> Timing:
    """How many steps there are, the learning rate at each, and the optimiser."""
    total = config.max_steps or math.ceil(config.num_epochs * rows / config.rows_per_step)
    return Timing(total, *optimizer_of(config, total_steps=total))


def start_notes(basis: Basis, tables: Tables, trained: Any, base: Params | None, total_steps: int) -> list[str]:
    """What a run says before its first step."""
    size = lambda tree: f"{sum(leaf.size for leaf in jax.tree.leaves(tree)) / 1e6:.1f} M parameters"
    below = f" on {size(base)}" if base is not None else ""
    table = tables.train
    return [
        *tables.notes,
        *vocabulary_notes(basis.model, basis.tokenizer),
        f"{size(trained)}{below}, {len(table.data.sides)} training rows, {total_steps} steps of {table.rows}, padded to "
        f"{list(table.buckets)} columns, mesh {dict(basis.plan.mesh.shape)}",
    ]
