"""Supervised steps on prompt-completion rows, with the same state, update and layouts as reinforcement learning.

The loss is on the completions, a mean over the batch's completion tokens. A caller takes as many steps as it wants from
`sft_steps`; the lab (`lab/run.py`) is the one there is so far.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_lm.assemble import load_model, lora_of, with_adapter
from jaxrl_lm.config import SFTConfig
from jaxrl_lm.data import batch_indices, pad_rows, read_rows
from jaxrl_lm.encode import EncodedPairs, encode_completions
from jaxrl_lm.metrics import result
from jaxrl_lm.models import Model, eos_token_ids, merge
from jaxrl_lm.objectives import SFTObjective
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.prepare import build_plan
from jaxrl_lm.steps import Steps, compile_steps
from jaxrl_lm.types import Frozen, Params, TrainState


class SFTSetup(NamedTuple):
    """A supervised run before its first step."""

    config: SFTConfig
    directory: Path
    model: Model
    params: dict[str, Params]  # what is trained, by name
    base: Params | None  # under LoRA: the weights below the adapter
    tokenizer: Any
    generation: dict[str, Any]
    steps: Steps
    data: EncodedPairs
    notes: list[str]  # what the run should say at its start
    lengths: tuple[int, int]  # padded columns of prompts and of completions
    pad_token_id: int


def prepare_sft(config: SFTConfig, *, dataset: Any = None) -> SFTSetup:
    """Everything before the first step; `dataset` (rows) stands in for the config's. Raises ValueError as `prepare` does."""
    plan = build_plan(config.mesh)
    for name, size in (("rows_per_step", config.rows_per_step), ("microbatch_rows", config.microbatch_rows or 0)):
        if size % plan.batch_ways:
            raise ValueError(
                f"{name}={size} is not divisible by the {plan.batch_ways} devices of the mesh's batch axes"
            )
    microbatch = config.microbatch_rows or config.rows_per_step
    if config.rows_per_step % microbatch:
        raise ValueError(f"microbatch_rows={microbatch} does not divide rows_per_step={config.rows_per_step}")
    model, params, tokenizer, generation = load_model(
        config.model, plan, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat
    )
    eos = eos_token_ids(generation, tokenizer)
    data = encode_completions(
        read_rows(dataset if dataset is not None else config.dataset, name="dataset"),
        tokenizer,
        max_length=config.max_length,
        eos_token_id=tokenizer.eos_token_id if tokenizer.eos_token_id is not None else eos[0],
        prompt_template=config.prompt_template,
        system_prompt=config.system_prompt,
        name="dataset",
    )
    rounded = lambda longest: -(-longest // 8) * 8
    lengths = tuple(rounded(max(len(pair[part]) for pair in data.pairs)) for part in (0, 1))
    dropped = f"{data.dropped} rows dropped, longer than max_length={config.max_length}"
    notes = [dropped] if data.dropped else []
    _, tx = optimizer_of(config, total_steps=config.max_steps)
    lora = lora_of(config)
    trained, base = with_adapter(config, model, params, plan, lora)
    steps = compile_steps(
        model,
        plan,
        objective=SFTObjective(score_chunk=config.score_chunk),
        tx=tx,
        param_dtype=config.param_dtype,
        rows=config.rows_per_step,
        microbatches=config.rows_per_step // microbatch,
        score_chunk=config.score_chunk,
        lora=lora,
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    return SFTSetup(
        config, Path(config.output_dir), model, trained, base, tokenizer, generation, steps, data, notes, lengths, pad
    )  # fmt: skip


def sft_policy(setup: SFTSetup, state: TrainState) -> Params:
    """The weights that a state stands for: an adapter is merged into those below it."""
    lora = lora_of(setup.config)
    policy = state.params["policy"]
    return policy if lora is None else merge(setup.base, policy, lora)


def sft_steps(setup: SFTSetup) -> Iterator[tuple[int, TrainState, dict[str, float]]]:
    """Yields (step, state, metrics) after each step. The state is donated to the next one: keep no part of an old one.

    The order of rows is a function of (seed, epoch, index). Raises FloatingPointError at a non-finite loss or gradient.
    """
    config, steps = setup.config, setup.steps
    key = jax.device_put(jax.random.key(config.seed), steps.plan.replicated)
    state, frozen = steps.init(setup.params, key), Frozen(base=setup.base)
    for step in range(1, config.max_steps + 1):
        position = (step - 1) * config.rows_per_step
        indices = batch_indices(len(setup.data.pairs), seed=config.seed, position=position, count=config.rows_per_step)
        arrays = pad_rows([setup.data.pairs[i] for i in indices], *setup.lengths, setup.pad_token_id)
        state, found = steps.update(state, frozen, steps.sft_batch(*steps.place(arrays)))
        metrics = result(found)
        if metrics.pop("nonfinite"):
            raise FloatingPointError(f"step {step}: the loss or its gradient is not finite; lower learning_rate")
        yield step, state, metrics
