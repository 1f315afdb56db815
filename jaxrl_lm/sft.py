"""Supervised training on prompt-completion, messages or text rows: `jaxrl-lm sft`.

The loss is cross-entropy on the completions (assistant turns, whole texts), a mean over the tokens of the step's rows;
packed rows give the same as rows of their own. The loop is `fit.py`, the rows are `sequences.py`.
"""

import functools
from pathlib import Path
from typing import Any

from jaxrl_lm.assemble import lora_of, with_adapter
from jaxrl_lm.fit import Fit, FitRun, fit
from jaxrl_lm.fit_batches import sft_batch
from jaxrl_lm.fit_config import SFTConfig
from jaxrl_lm.fit_prepare import make_tables, open_model, start_notes, timing
from jaxrl_lm.fit_steps import FitSteps, compile_fit
from jaxrl_lm.given import Given, HostRows, Stateless, Table, fingerprint
from jaxrl_lm.models import merge
from jaxrl_lm.objectives import SFTObjective
from jaxrl_lm.sequences import encode_sft
from jaxrl_lm.train_state import trained_specs
from jaxrl_lm.types import Frozen, Params, SFTBatch, TrainState


def train_sft(config: SFTConfig, *, dataset: Any = None) -> FitRun:
    """Trains as the config says; `dataset` (rows) stands in for the config's. Raises as `fit` and `prepare_sft`."""
    return fit(prepare_sft(config, dataset=dataset))


def prepare_sft(config: SFTConfig, *, dataset: Any = None) -> Fit:
    """Everything before the first step. Raises ValueError, naming option, file or row, for what does not fit."""
    basis = open_model(config)
    config, model, plan = basis.config, basis.model, basis.plan
    encode = functools.partial(
        encode_sft,
        tokenizer=basis.tokenizer,
        max_length=config.max_length,
        eos_token_id=basis.eos_token_id,
        long_rows=config.long_rows,
        prompt_template=config.prompt_template,
        system_prompt=config.system_prompt,
    )
    tables = make_tables(basis, encode, dataset, packing=config.packing)
    time, lora = timing(config, len(tables.train.data.sides)), lora_of(config)
    trained, base = with_adapter(config, model, basis.params, plan, lora)
    steps = compile_fit(
        model,
        plan,
        specs=trained_specs(model, lora=lora),
        objective=SFTObjective(score_chunk=config.score_chunk, start=tables.train.start),
        make_batch=sft_batch,
        tx=time.tx,
        param_dtype=config.param_dtype,
        microbatches=basis.microbatches,
        score_chunk=config.score_chunk,
        lora=lora,
    )
    return Fit(
        command="sft",
        config=config,
        directory=Path(config.output_dir),
        model=model,
        params=trained,
        frozen=Frozen(base=base),
        reference_is_start=False,
        tokenizer=basis.tokenizer,
        generation=basis.generation,
        steps=steps,
        source=Given(tables.train, tables.held_out, steps, SFTBatches(steps), config.seed, config.eval_limit),
        schedule=time.schedule,
        total_steps=time.total_steps,
        fingerprint=fingerprint(tables.train.data),
        notes=start_notes(basis, tables, trained, base, time.total_steps),
    )


class SFTBatches(Stateless):
    """Rows as they are, weighted."""

    def __init__(self, steps: FitSteps):
        self._steps = steps

    def __call__(self, host: HostRows, table: Table, state: TrainState, frozen: Frozen) -> SFTBatch:
        """The batch of these rows; those that fill it have no weight."""
        mask = host.mask & host.valid[:, None, None]
        return self._steps.batch(*self._steps.place((host.tokens[:, 0], host.segment_ids[:, 0], mask[:, 0])))


def trained_policy(config: Any, base: Params | None, state: TrainState) -> Params:
    """The policy that a state of sft or dpo stands for: an adapter is merged into the weights below it."""
    lora, policy = lora_of(config), state.params["policy"]
    return policy if lora is None else merge(base, policy, lora)
