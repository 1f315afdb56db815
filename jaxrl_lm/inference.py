"""Generation, evaluation and export of a model or a run: what `jaxrl-lm generate|eval|export` do."""

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

from jaxrl_lm.assemble import load_model, lora_of
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.checks import moves_reference
from jaxrl_lm.config import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    GRPOConfig,
    PromptOptions,
    SamplingOptions,
    TemplateOptions,
)
from jaxrl_lm.data import read_rows
from jaxrl_lm.distributed import place, writes
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.evaluate import evaluate, probe, probe_message
from jaxrl_lm.fit_config import DPOConfig, PRMConfig, RewardConfig, SFTConfig
from jaxrl_lm.models import LoraConfig, Model, merge, save, save_adapter
from jaxrl_lm.optim import optimizer_of
from jaxrl_lm.options import from_dict
from jaxrl_lm.prepare import build_plan, make_sampler, make_sampling, plan_of
from jaxrl_lm.prompt_sets import buckets_of, drop_notes, encode_with
from jaxrl_lm.reward_fit import reward_state, save_reward
from jaxrl_lm.reward_model import open_reward_models
from jaxrl_lm.rewards import resolve_all
from jaxrl_lm.rollout import EVAL, Sampler
from jaxrl_lm.rule_tables import FROM_THE_START, check_speculation
from jaxrl_lm.runs import check_processes, command_of
from jaxrl_lm.sharding import Plan
from jaxrl_lm.steps import compile_steps
from jaxrl_lm.train_state import state_shardings, trained_specs
from jaxrl_lm.types import Params


class Adapter(NamedTuple):
    params: Params
    config: LoraConfig
    base: str  # the model that it is added to


class Loaded(NamedTuple):
    model: Model
    params: Params  # an adapter is merged into them
    tokenizer: Any
    generation: dict[str, Any]
    adapter: Adapter | None = None


def restore_policy(
    run: str | Path,
    plan: Plan,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
    attention: str = "auto",
) -> Loaded:
    """The policy of a run's checkpoint: of a step, the best, or the last.

    Raises ValueError or CheckpointError where the run, the step or a best checkpoint is missing.
    """
    config = policy_config(run)
    model, params, tokenizer, generation = load_model(
        config.model, plan, dtype=dtype or config.dtype, param_dtype=config.param_dtype, remat=config.remat,
        attention=attention,
    )  # fmt: skip
    lora = lora_of(config)
    if lora is None:
        del params
    _, tx = optimizer_of(config, total_steps=1 + config.warmup_steps)
    target, _ = state_shardings(_specs(config, model), plan, tx, config.param_dtype, reference=_holds_reference(config))
    with Checkpoints(Path(run) / "checkpoints", best_metric=config.best_metric, read_only=True) as checkpoints:
        step = _best_of(run, checkpoints, config.best_metric) if best else step
        state, _ = checkpoints.restore(target, step=step)
    policy = state.params["policy"]
    if lora is None:
        return Loaded(model, policy, tokenizer, generation)
    return Loaded(model, merge(params, policy, lora), tokenizer, generation, Adapter(policy, lora, config.model))


def is_run(path: str | Path) -> bool:
    """Whether a path is a run directory of ours."""
    return (Path(path) / "config.toml").is_file()


CONFIGS: dict[str | None, type] = {
    None: GRPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward": RewardConfig,
    "prm": PRMConfig,
}
"""The options of a run directory, by the command that made it."""


def run_config(run: str | Path) -> Any:
    """The resolved config of a run directory. Raises ValueError where there is none."""
    if not is_run(run):
        raise ValueError(f"{run}: no run directory (it has no config.toml)")
    path = Path(run) / "config.toml"
    return from_dict(CONFIGS[command_of(run)], tomllib.loads(path.read_text()), where=str(path))


def policy_config(run: str | Path) -> Any:
    """The same of a run that trains a policy. Raises ValueError for one that trains a reward model."""
    config = run_config(run)
    if isinstance(config, RewardConfig | PRMConfig):
        raise ValueError(f"{run} trains a reward model, which writes no text; export it, and use it as a reward")
    return config


def _specs(config: Any, model: Model) -> dict[str, Any]:
    if not isinstance(config, GRPOConfig):
        return trained_specs(model, lora=lora_of(config))
    prm = config.implicit_prm is not None
    return trained_specs(model, lora=lora_of(config), critic=config.critic, prm=prm)


def _holds_reference(config: Any) -> bool:
    if isinstance(config, GRPOConfig):
        return moves_reference(config)
    return isinstance(config, DPOConfig) and config.reference_reset_steps is not None


def load_any(name: str, plan: Plan, *, dtype: str | None = None, attention: str = "auto") -> Loaded:
    """A model by directory, GGUF file or hub id, or the last policy of a run directory."""
    if is_run(name):
        return restore_policy(name, plan, dtype=dtype, attention=attention)
    return Loaded(*load_model(name, plan, dtype=dtype, param_dtype="float32", remat="none", attention=attention))


def make_inference(
    config: GenerateConfig | EvalConfig, loaded: Loaded, plan: Plan, sets: list[EncodedPrompts]
) -> Sampler:
    """A sampler for these prompts; `prompts_per_step` is a batch. Raises ValueError where a prompt fits no bucket, or the
    batch does not divide over the mesh."""
    sampling = make_sampling(config, loaded.tokenizer, loaded.generation)
    rows = config.prompts_per_step * config.num_generations
    if config.prompts_per_step % plan.batch_ways:
        raise ValueError(
            f"prompts_per_step={config.prompts_per_step} is not divisible by the {plan.batch_ways} devices of the mesh"
        )
    steps = compile_steps(loaded.model, plan, objective=None, tx=optax.identity(), rows=rows, sampling=sampling)
    return make_sampler(
        steps,
        config,
        loaded.tokenizer,
        sampling,
        buckets=buckets_of(config, sets)[0],
        prompts=config.prompts_per_step,
        vocab=loaded.model.config.vocab_size,
    )


def with_run_options(config: Any, *, from_prefixes: bool = False) -> Any:
    """The config, with the options of the run that its model names for those that were left at their defaults.

    A run is sampled as it was trained: template, stop strings, temperature, lengths. `from_prefixes`: what is sampled goes
    on from parts of completions, and options that count from the first token are not taken. Raises ValueError for options
    of speculation that nothing reads.
    """
    if is_run(config.model):
        config = _with_options_of(policy_config(config.model), config, FROM_THE_START if from_prefixes else ())
    check_speculation(config)
    return config


def _with_options_of(run: Any, config: Any, leave: tuple[str, ...]) -> Any:
    defaults, taken = type(config)(model=config.model), {}
    if config.num_speculative_tokens == 0:  # turned off for a run that speculates, and what goes with it
        leave += ("speculative_source", "prompt_lookup_max")
    for base in (TemplateOptions, PromptOptions, SamplingOptions):
        if not isinstance(run, base):  # supervised runs have no sampling of their own
            continue
        for field in dataclasses.fields(base):
            name = field.name
            if name not in ("prompts_per_step", "num_generations", "prompt_buckets") and getattr(
                config, name
            ) == getattr(defaults, name):
                taken[name] = getattr(run, name)
    left = {
        name: taken.pop(name) for name in leave if taken.get(name, getattr(defaults, name)) != getattr(defaults, name)
    }
    if set(left) & set(FROM_THE_START):
        say(
            [
                f"not from {config.model}: "
                + ", ".join(f"{name}={value!r}" for name, value in left.items() if name in FROM_THE_START)
                + ": counted from the first token of a completion, and this goes on from prefixes"
            ]
        )
    say(
        [
            f"from {config.model}: "
            + ", ".join(f"{name}={value!r}" for name, value in taken.items() if value is not None)
        ]
    )
    return dataclasses.replace(config, **taken)


def say(notes: list[str]) -> None:
    for note in notes if writes() else ():
        print(note, file=sys.stderr)


def run_generate(config: GenerateConfig) -> list[dict[str, Any]]:
    """Rows with `prompt`, `completions` and `logprobs` (of each completion, a sum); written to `output` if given."""
    config = with_run_options(config)
    if bool(config.prompt) == bool(config.dataset):
        raise ValueError("generate: give either prompt or dataset")
    plan = plan_of(config)
    loaded = load_any(config.model, plan, dtype=config.dtype, attention=config.attention_implementation)
    if config.dataset:
        rows = read_rows(config.dataset, name="dataset")[: config.limit]
    else:
        chat = loaded.tokenizer.chat_template is not None and config.prompt_template is None
        rows = [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in config.prompt]
    prompts = encode_with(config, loaded.tokenizer, rows, "dataset")
    say(drop_notes({"dataset": prompts}, config.max_prompt_length))
    sampler = make_inference(config, loaded, plan, [prompts])
    decode_params, key = sampler.steps.prepare_decode(loaded.params, None), _key(config.seed, plan)
    out = []
    for start in range(0, len(prompts.ids), config.prompts_per_step):
        indices = list(range(start, min(start + config.prompts_per_step, len(prompts.ids))))
        options = {"purpose": EVAL, "step": start, "temperature": config.temperature, "policy_step": 0}
        sampled = sampler(decode_params, key, prompts, indices, **options)
        for row, index in enumerate(indices):
            mine = slice(row * config.num_generations, (row + 1) * config.num_generations)
            out.append({
                **prompts.rows[index],
                "completions": sampled.texts[mine],
                "completion_ids": sampled.completion_ids[mine],
                "logprobs": [float(value) for value in sampled.logprob_sums[mine]],
            })  # fmt: skip
    if config.output:
        Path(config.output).write_text("".join(json.dumps(row) + "\n" for row in out))
    return out


def run_eval(config: EvalConfig) -> dict[str, float]:
    """Metrics of every evaluation set, as in training; with `probe` what a training run would find in these prompts."""
    config = with_run_options(config)
    if not config.eval_dataset:
        raise ValueError("eval_dataset: no set is given (--eval_dataset.NAME SOURCE)")
    if not config.eval_reward_functions:
        raise ValueError("eval_reward_functions: no reward function is given")
    check_processes(config)
    plan = plan_of(config)
    functions = resolve_all(*open_reward_models(config.eval_reward_functions, plan=plan, dtype=config.dtype))
    loaded = load_any(config.model, plan, dtype=config.dtype, attention=config.attention_implementation)
    sets = {
        name: encode_with(config, loaded.tokenizer, read_rows(source, name=name), f"eval_dataset {name!r}")
        for name, source in config.eval_dataset.items()
    }
    say(drop_notes(sets, config.max_prompt_length))
    sampler = make_inference(config, loaded, plan, list(sets.values()))
    decode_params, key = sampler.steps.prepare_decode(loaded.params, None), _key(config.seed, plan)
    output = Path(config.output) if config.output and writes() else None
    if output:
        output.mkdir(parents=True, exist_ok=True)
    metrics: dict[str, float] = {}
    for number, (name, prompts) in enumerate(sets.items()):
        if config.probe:
            found = probe(
                sampler, decode_params, key, prompts, functions, temperature=config.temperature, limit=config.eval_limit
            )
            if writes():
                print(f"{name}: {probe_message(found)}")
            metrics |= {f"probe/{name}/{metric}": float(value) for metric, value in found.items()}
            continue
        found = evaluate(
            sampler,
            decode_params,
            key,
            prompts,
            functions,
            temperature=config.temperature,
            samples=config.eval_num_generations,
            limit=config.eval_limit,
            policy_step=0,
            name=name,
            purpose=EVAL + number,
        )
        metrics |= found.metrics
        if output:
            (output / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found.records))
    if output:
        (output / ("probe.json" if config.probe else "metrics.json")).write_text(json.dumps(metrics, indent=2) + "\n")
    return metrics


def run_export(config: ExportConfig) -> Path:
    """Writes what a run's checkpoint holds, a policy or a reward model, as a Hugging Face directory; returns its path."""
    if command_of(config.run) in ("reward", "prm"):
        return export_reward(config)
    loaded = restore_policy(config.run, build_plan({"fsdp": -1}), step=config.step, best=config.best)
    if config.adapter:
        if loaded.adapter is None:
            raise ValueError(f"adapter: {config.run} was trained without lora_rank, there is no adapter to export")
        params, lora, base = loaded.adapter
        save_adapter(config.directory, loaded.model, params, lora, base)
        return Path(config.directory)
    save(
        config.directory,
        loaded.model,
        loaded.params,
        loaded.tokenizer,
        dtype=config.dtype,
        generation_config=loaded.generation,
        overwrite=config.overwrite,
    )
    return Path(config.directory)


def export_reward(config: ExportConfig) -> Path:
    """Writes the reward model of a run's checkpoint as a classification directory, an ensemble as one a member."""
    run = run_config(config.run)
    if config.adapter:
        raise ValueError(f"adapter: {config.run} trains a whole reward model; leave the option out")
    model, abstract, tokenizer = reward_state(run, build_plan({"fsdp": -1}))
    with Checkpoints(Path(config.run) / "checkpoints", best_metric=run.best_metric, read_only=True) as checkpoints:
        step = _best_of(config.run, checkpoints, run.best_metric) if config.best else config.step
        state, _ = checkpoints.restore(abstract, step=step)
    options = {"dtype": config.dtype, "overwrite": config.overwrite}
    save_reward(config.directory, run, model, state.params["reward"], tokenizer, **options)
    return Path(config.directory)


def _best_of(run: str | Path, checkpoints: Checkpoints, best_metric: str | None) -> int:
    """The step of the best checkpoint. Raises ValueError where there is none."""
    step = checkpoints.best()
    if step is None:
        raise ValueError(f"{run}: no checkpoint has a best_metric (best_metric={best_metric!r})")
    return step


def _key(seed: int, plan: Plan) -> jax.Array:
    return place(jax.random.key(seed), plan.replicated)
