"""A second stream of data in the updates of reinforcement learning: demonstrations or pairs beside the policy's samples.

L = L_rl + Σ_streams weight · L_stream, each over its own tokens or pairs, in one update (PPO-ptx, Ouyang et al., 2022). A
stream's rows come from a dataset of their own, from rows of the training set that ask for it (column `loss`), or from
prompts that the policy has never solved, with a solution that is given.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.data import batch_indices, read_rows
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.example import Examples
from jaxrl_lm.fit_objectives import PreferenceObjective
from jaxrl_lm.fit_steps import StreamSteps
from jaxrl_lm.given import HostRows, Table, fingerprint, table_of
from jaxrl_lm.metrics import Metric, Sum
from jaxrl_lm.models import Model
from jaxrl_lm.objectives import SFTObjective
from jaxrl_lm.rollout import SolveRates
from jaxrl_lm.sequences import encode_pairs, encode_sft
from jaxrl_lm.types import Frozen, Params, TrainState
from jaxrl_lm.update import Objective

STREAMS = ("sft", "dpo")


class MixedBatch(NamedTuple):
    """The batch of reinforcement learning, and those of the streams in the order of their objectives."""

    main: Any
    streams: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedObjective:
    """L_rl + Σ weight · L_stream; metrics of a stream have its name before them."""

    main: Objective
    streams: tuple[tuple[str, float, Objective], ...]

    def __call__(self, params: dict[str, Params], frozen: Frozen, batch: MixedBatch, *, model: Model):
        """Returns (loss, metrics)."""
        loss, metrics = self.main(params, frozen, batch.main, model=model)
        found: dict[str, Metric] = dict(metrics)
        for (name, weight, objective), part in zip(self.streams, batch.streams, strict=True):
            own, more = objective(params, frozen, part, model=model)
            loss = loss + weight * own
            found |= {f"{name}/{key}": value for key, value in more.items()}
            found[f"{name}/loss"] = Sum(jax.lax.stop_gradient(own))
        return loss, found


class Stream(NamedTuple):
    """Rows of one kind."""

    name: str
    weight: float
    table: Table
    sources: list[int] | None = None  # of rows for prompts never solved: each one's index among the training prompts


class Mix(NamedTuple):
    """The streams of a run."""

    streams: tuple[Stream, ...]
    beta: float  # of the loss on pairs

    def objective(self, main: Objective, *, score_chunk: int) -> MixedObjective:
        """The loss of a step with its streams."""
        of = lambda one: {"score_chunk": score_chunk, "start": one.table.start}
        make = {"sft": SFTObjective, "dpo": lambda **options: PreferenceObjective(beta=self.beta, **options)}
        return MixedObjective(
            main=main, streams=tuple((one.name, one.weight, make[one.name](**of(one))) for one in self.streams)
        )

    def fingerprint(self) -> str:
        """A hash of the streams' rows: a resumed run must see the same."""
        return "".join(fingerprint(one.table.data) for one in self.streams)

    def teaches(self, rates: SolveRates) -> bool:
        """Whether any stream has a weight and a row now, so that there is something to learn beside the policy's samples."""
        rows = lambda one: one.sources is None or any(rates.never_solved(source) for source in one.sources)
        return any(one.weight > 0 and rows(one) for one in self.streams)

    def batches(
        self,
        number: int,
        steps: StreamSteps,
        state: TrainState,
        frozen: Frozen,
        rates: SolveRates,
        *,
        seed: int,
        learns: bool = True,
    ) -> tuple[Any, ...]:
        """The streams' batches of update `number`: rows are a function of (seed, number), and of what has been solved.

        learns=False: no row has a weight, as while only a critic learns.
        """
        return tuple(self._batch(one, number, steps, state, frozen, rates, seed, learns) for one in self.streams)

    def _batch(
        self, stream: Stream, number: int, steps: StreamSteps, state, frozen, rates, seed: int, learns: bool
    ) -> Any:
        table = stream.table
        rows = list(range(len(table.data.sides)))
        if stream.sources is not None:
            rows = [row for row in rows if rates.never_solved(stream.sources[row])]
        chosen = batch_indices(len(rows), seed=seed, position=number * table.rows, count=table.rows) if rows else []
        host = table.batch([rows[place] for place in chosen] or [0])
        if not rows or not learns:
            host = host._replace(valid=np.zeros_like(host.valid))
        return self._placed(stream.name, host, table, steps, state, frozen)

    def _placed(self, name: str, host: HostRows, table: Table, steps: StreamSteps, state, frozen) -> Any:
        if name == "sft":
            mask = host.mask & host.valid[:, None, None]
            return steps.sft(*steps.place((host.tokens[:, 0], host.segment_ids[:, 0], mask[:, 0])))
        # Under an adapter the reference is a tree of its form, and the weights below it are what it started from.
        candidates = (frozen.base, state.extra.get("reference"), frozen.reference)
        reference = next(tree for tree in candidates if tree is not None)
        tokens, segment_ids, mask, valid = steps.place((host.tokens, host.segment_ids, host.mask, host.valid))
        ref = steps.score_base(reference, tokens, segment_ids, table.start)
        return steps.pairs(tokens, segment_ids, mask, valid, ref)


def split_rows(config: GRPOConfig, rows: Sequence[dict[str, Any]]) -> tuple[list[dict], list[dict]]:
    """The rows that are sampled, and those whose column `loss` says sft. Raises ValueError for another word there."""
    sampled, told = [], []
    for index, row in enumerate(rows):
        loss = row.get("loss")
        if loss not in (None, "rl", "sft"):
            raise ValueError(f"dataset: row {index} has loss={loss!r}: use rl or sft, or leave the column out")
        (told if loss == "sft" else sampled).append(row)
    if told and "sft" not in config.mix:
        raise ValueError(f"dataset: {len(told)} rows say loss=sft: give mix.sft, their weight in the update")
    if not sampled:
        raise ValueError(
            "dataset: every row says loss=sft, nothing is left to sample: `jaxrl-lm sft` trains on such rows"
        )
    return sampled, told


def check_mix(config: GRPOConfig, ways: int, microbatches: int) -> None:
    """Raises ValueError, naming the option, for streams that do not exist or whose rows do not divide."""
    for name in (*config.mix, *config.mix_dataset):
        if name not in STREAMS:
            raise ValueError(f"mix.{name}: there is no such stream; use {' or '.join(STREAMS)}")
    for name, weight in config.mix.items():
        if weight < 0:
            raise ValueError(f"mix.{name}={weight}: must be at least 0")
    idle = [name for name in config.mix_dataset if name not in config.mix]
    if idle:
        raise ValueError(f"mix_dataset.{idle[0]} is given, and mix.{idle[0]}, its weight in the update, is not")
    if "dpo" in config.mix and "dpo" not in config.mix_dataset:
        raise ValueError("mix.dpo: give mix_dataset.dpo, rows with prompt, chosen and rejected")
    if config.mix_unsolved is not None and ("sft" not in config.mix or "sft" in config.mix_dataset):
        raise ValueError("mix_unsolved makes the rows of the stream sft: give mix.sft, and no mix_dataset.sft")
    for name, default, read in (("mix_rows", 16, bool(config.mix)), ("mix_beta", 0.1, "dpo" in config.mix)):
        if getattr(config, name) != default and not read:
            raise ValueError(
                f"{name}={getattr(config, name)} has no effect on the streams that are chosen: leave it out"
            )
    if config.mix and (config.mix_rows < 1 or config.mix_rows % (ways * microbatches)):
        raise ValueError(
            f"mix_rows={config.mix_rows} does not divide into {microbatches} microbatches over {ways} devices"
        )


def check_teacher(config: GRPOConfig) -> None:
    """Raises ValueError where options of a teacher have none, or it stands beside something it does not go with."""
    if config.teacher is None:
        idle = {"teacher_coef": 1.0, "teacher_divergence": "reverse", "teacher_beta": 0.5, "teacher_only": False}
        for name, default in idle.items():
            if getattr(config, name) != default:
                raise ValueError(f"{name}={getattr(config, name)!r} has no effect without teacher: give one")
    elif config.critic != "none" or config.implicit_prm is not None:
        raise ValueError("teacher goes with methods that train the policy alone: leave critic and implicit_prm out")
    elif config.teacher_beta != 0.5 and config.teacher_divergence != "jsd":
        raise ValueError(f"teacher_beta={config.teacher_beta!r} has no effect without teacher_divergence='jsd'")
    elif config.teacher_only:
        for name in ("beta", "target_kl", "entropy_coef", "target_entropy"):
            if getattr(config, name):
                raise ValueError(
                    f"{name}={getattr(config, name)!r} has no effect with teacher_only, which leaves the loss that it is "
                    "part of out"
                )


def open_mix(
    config: GRPOConfig, tokenizer: Any, *, eos_token_id: int, pad_token_id: int, told: list[dict], prompts: list[dict]
) -> Mix | None:
    """The streams that the options ask for, encoded. Raises ValueError, naming option or row, for what does not fit."""
    if not config.mix:
        return None
    shared = {
        "max_length": config.max_prompt_length + config.max_completion_length,
        "eos_token_id": eos_token_id,
        "long_rows": "drop",
        "prompt_template": config.prompt_template,
        "system_prompt": config.system_prompt,
    }
    streams = []
    for name, weight in config.mix.items():
        rows, sources = told, None
        elsewhere = f"mix_dataset.{name}" if name in config.mix_dataset else config.mix_unsolved and "mix_unsolved"
        if told and name == "sft" and elsewhere:
            raise ValueError(f"{elsewhere} and rows of the dataset with loss=sft: give the stream one source")
        if name in config.mix_dataset:
            rows = read_rows(config.mix_dataset[name], name=f"mix_dataset.{name}")
        elif config.mix_unsolved is not None:
            rows, sources = _solutions(config.mix_unsolved, prompts)
        if not rows:
            raise ValueError(
                f"mix.{name}: give mix_dataset.{name}, rows with loss={name} in the dataset, or mix_unsolved"
            )
        encode = encode_sft if name == "sft" else encode_pairs
        data = encode(rows, tokenizer, name=f"mix.{name}", **shared)
        if sources is not None:
            sources = _kept(data, rows, sources)
        table = table_of(data, [], rows=config.mix_rows, pad_id=pad_token_id, buckets=())
        streams.append(Stream(name, weight, table, sources))
    return Mix(tuple(streams), config.mix_beta)


def check_held_out_streams(mix: Mix, eval_sets: Mapping[str, EncodedPrompts]) -> None:
    """Raises ValueError where a prompt of an evaluation set is trained on by a stream."""
    for stream in mix.streams:
        prompts = {tuple(side.ids[: side.mask.index(True)]) for sides in stream.table.data.sides for side in sides}
        for name, held in eval_sets.items():
            shared = [row for row, ids in enumerate(held.ids) if tuple(ids) in prompts]
            if shared:
                raise ValueError(
                    f"eval_dataset {name!r}: {len(shared)} of its prompts are trained on by mix.{stream.name} (the first is "
                    f"row {shared[0]}): take them out of one of the two"
                )


def _solutions(column: str, prompts: list[dict]) -> tuple[list[dict], list[int]]:
    """Prompt-completion rows of the prompts that bring a solution, and each one's index."""
    found = [index for index, row in enumerate(prompts) if row.get(column) is not None]
    if not found:
        raise ValueError(f"mix_unsolved={column!r}: no row of the dataset has that column")
    return [{"prompt": prompts[i]["prompt"], "completion": prompts[i][column]} for i in found], found


def _kept(data: Examples, rows: list[dict], sources: list[int]) -> list[int]:
    """The indices of the rows that were not dropped; rows keep their identity."""
    places: Mapping[int, int] = {id(row): source for row, source in zip(rows, sources, strict=True)}
    return [places[id(row)] for row in data.rows]
