"""The steps of a planned run, as traced functions of shapes with layouts: our own compiled steps, and no weight is made.

`trace_steps` goes the way of `prepare.py` from a config to `compile_steps`, with shapes in place of arrays.
Next to read: `plan_report.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_lm.assemble import lora_of, make_batch_rules, make_objective
from jaxrl_lm.batch import Coefficients, Implicit, Rated
from jaxrl_lm.checks import (
    check,
    moves_reference,
    needs_reference,
    old_logprobs_of,
    resolve_algorithm,
    updates_per_step,
)
from jaxrl_lm.models import BLOCK, Model, ModelConfig, build, critic_specs, decode_specs, stacked
from jaxrl_lm.models.attention import choose as choose_attention
from jaxrl_lm.models.hf_config import config_from_hf, read_json
from jaxrl_lm.placement import Placement, check_placement, check_places
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.prepare import compile_run
from jaxrl_lm.reward_model import PREFIX
from jaxrl_lm.rule_tables import sampling_of
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import Plan
from jaxrl_lm.steps import Steps, minibatch_rows
from jaxrl_lm.topologies import parse_topology
from jaxrl_lm.types import Frozen, Requests, Scores

ROLLOUT_STEPS = ("generate", "score_reference")  # that run on a rollout mesh, where there is one


class PlannedStep(NamedTuple):
    """One compiled function of a run, before it is compiled."""

    name: str
    trace: Callable[[], Any]  # to jax.stages.Traced
    arguments: dict[str, Any]  # shapes with layouts, by our names
    beside: dict[str, Any]  # what else is in the devices' memory meanwhile
    runs: int  # in one step of training
    mesh: str = "mesh"  # whose devices run it: mesh or rollout_mesh
    blocks: float = 1.0  # of a slot's cache that a pass of decoding reads


class Shapes(NamedTuple):
    """The trees that a run holds, as shapes with layouts."""

    placement: Placement
    state: Any
    frozen: Frozen
    held: tuple[Any, Frozen]  # what of the two is on the mesh's devices between the steps that read it
    decode: Any
    requests: Requests
    rollout: Any  # as it lies on the mesh
    rewards: dict[str, Any]  # reward models, by their options


def with_machine_defaults(config: PlanConfig, model: ModelConfig, plan: Plan | None = None) -> ModelConfig:
    """The model with what an accelerator computes in, recomputes and attends by where the config does not say."""
    model = dataclasses.replace(model, dtype=config.dtype or "bfloat16", remat=config.remat or "full")
    platform = None if plan is None else plan.platform
    if platform is None:  # of GPUs there is no description
        platform = "tpu" if parse_topology(config.topology).compiled else "gpu"
    chosen = choose_attention(config.attention_implementation, model, platform=platform, plan=plan)
    return dataclasses.replace(model, attention_implementation=chosen)


def check_plannable(config: PlanConfig) -> None:
    """Raises ValueError for parts of a run that are not planned."""
    for name in (
        "teacher",
        "mix",
        "step_reward",
        "true_reward",
        "end_of_thinking",
        "vocabulary_mask",
        "share_prompt",
        "pack_completions",
        "max_off_policy_steps",
    ):
        if getattr(config, name):
            raise ValueError(f"plan: {name} is not planned yet; leave it out, and add its memory and time by hand")
    check_places(config)
    if config.reward_placement != "mesh" and not any(option.startswith(PREFIX) for option in config.reward):
        raise ValueError(
            f"reward_placement={config.reward_placement!r} has no effect: no reward_model: is among the rewards; leave "
            "it out"
        )


def planned_placement(config: PlanConfig, plan: Plan, rollout: Plan | None = None) -> Placement:
    """The run's placement on the devices of training and, where it has a rollout mesh, those of generation.

    Raises ValueError, as a run, for an option that has no effect and for sizes that do not divide.
    """
    where = {name: getattr(config, f"{name}_placement") for name in ("reference", "reward", "critic", "optimizer")}
    placement = Placement(plan, rollout or plan, **where)
    check_placement(config, placement, reference=needs_reference(config), moves=moves_reference(config))
    return placement


def decode_passes(config: PlanConfig) -> int:
    """Forward passes of decoding where every completion has full length."""
    rows = config.prompts_per_step * config.num_generations
    return -(-rows // min(config.decode_slots or rows, rows)) * config.max_completion_length


def blocks_read(config: PlanConfig, window: int | None) -> float:
    """Blocks of a slot's cache that a pass of decoding reads, on average; a cache of one block is read whole.

    With a sliding window those that it touches, of rows of equal length: a shorter one beside them would add its own.
    """
    prompt, new = config.max_prompt_length, config.max_completion_length
    if prompt + new <= BLOCK:
        return 1.0
    filled = range(prompt, prompt + new)
    unseen = (0 if window is None else max(columns - window, 0) // BLOCK for columns in filled)
    return math.fsum(-(-columns // BLOCK) - before for columns, before in zip(filled, unseen, strict=True)) / new


def planned_sampling(config: PlanConfig) -> SamplingConfig:
    """What the run's sampler compiles in. There is no tokenizer: the end of a sequence is an id that no rule names."""
    named = {*config.forced_tokens, *config.allowed_token_ids}
    eos = min(set(range(len(named) + 1)) - named)
    return sampling_of(config, None, eos_token_ids=(eos,), pad_token_id=0)


def trace_steps(
    config: PlanConfig, model_config: ModelConfig, plan: Plan, rollout: Plan | None = None
) -> dict[str, PlannedStep]:
    """Every compiled step of the run, by name: prepare_decode, generate, score, with a critic values, update; with a
    reference on the rollout mesh, whose plan is `rollout`, score_reference.

    Raises ValueError for options that contradict each other or the mesh, as a run would.
    """
    check_plannable(config)
    check(config, plan.batch_ways)
    placement = planned_placement(config, plan, rollout)
    model = build(with_machine_defaults(config, model_config, plan), plan=plan)
    algorithm = resolve_algorithm(config)
    steps, _ = compile_run(
        config,
        algorithm,
        model,
        plan,
        planned_sampling(config),
        total_updates=(config.max_steps or 100) * updates_per_step(config),
        advantages=None,
        objective=make_objective(config, algorithm),
        placement=_where_computed(placement),
    )
    shapes = _shapes(config, model, placement, steps)
    planned = [
        _prepare_decode(shapes, steps),
        _generate(config, model.config, shapes, steps),
        *_scores(config, shapes, steps),
    ]
    planned.append(_update(config, algorithm, shapes, steps, plan))
    return {step.name: step for step in planned}


def _where_computed(placement: Placement) -> Placement:
    """The same without host memory: what lies there is on the mesh while a step reads it."""
    on_mesh = {"critic": "mesh", "optimizer": "mesh"} | ({"reference": "mesh"} if placement.reference == "host" else {})
    return dataclasses.replace(placement, **on_mesh)


def _placed(tree: Any, layouts: Any) -> Any:
    """Shapes of arrays, with a layout for each or one for all."""
    put = lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout)
    if isinstance(layouts, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: put(leaf, layouts), tree)
    return jax.tree.map(put, tree, layouts)


def weights_of(specs: Any, plan: Plan, dtype: str) -> Any:
    """Shapes with layouts of weights that are declared so."""
    is_spec = lambda node: hasattr(node, "axes")
    shapes = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(dtype)), specs, is_leaf=is_spec)
    return _placed(shapes, plan.tree(specs))


def _shapes(config: PlanConfig, model: Model, placement: Placement, steps: Steps) -> Shapes:
    plan, state = placement.train, steps.abstract_state
    keeps = needs_reference(config) and not moves_reference(config)
    frozen = Frozen(
        reference=_placed(state.params["policy"], steps.reference) if keeps else None,
        base=None if lora_of(config) is None else weights_of(model.specs, plan, config.param_dtype),
        prm_reference=state.params.get("prm"),
    )
    decode = weights_of(decode_specs(model.config), placement.rollout.for_decode(), model.config.dtype)
    requests = _requests(config, placement.rollout)
    rollout = _placed(jax.eval_shape(steps.generate, decode, requests, None), plan.rows)
    held = _at_rest(config, state, frozen)
    hosted = config.reward_placement == "host"
    rewards = {} if hosted else reward_models(config, model, placement.plan(config.reward_placement))
    return Shapes(placement, state, frozen, held, decode, requests, rollout, rewards)


def _requests(config: PlanConfig, plan: Plan) -> Requests:
    prompts, rows = config.prompts_per_step, config.prompts_per_step * config.num_generations
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=plan.rows if shape else plan.replicated)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    return Requests(
        tokens=array((prompts, config.max_prompt_length), jnp.int32),
        segment_ids=array((prompts, config.max_prompt_length), jnp.int32),
        keys=_placed(keys, plan.rows),
        max_new=array((rows,), jnp.int32),
        temperature=array((rows,), jnp.float32),
        policy_step=array((), jnp.int32),
    )


def _at_rest(config: PlanConfig, state: Any, frozen: Frozen) -> tuple[Any, Frozen]:
    """State and frozen models without what lies in host memory or on the rollout mesh."""
    critic = lambda path: config.critic_placement == "host" and "critic" in [getattr(key, "key", None) for key in path]
    left = lambda tree: jax.tree.map_with_path(lambda path, leaf: None if critic(path) else leaf, tree)
    moments = None if config.optimizer_placement == "host" else left(state.opt_state)
    reference = frozen.reference if config.reference_placement == "mesh" else None
    return state._replace(params=left(state.params), opt_state=moments), frozen._replace(reference=reference)


def reward_models(config: PlanConfig, policy: Model, plan: Plan) -> dict[str, Any]:
    """Weights of the reward models that the config names, by option, in the dtype that they are loaded in.

    Raises ValueError or FileNotFoundError for one whose config.json is not there.
    """
    found = {}
    for option in config.reward:
        if not option.startswith(PREFIX):
            continue
        name = option.removeprefix(PREFIX).split("?")[0]
        members = sorted(Path(name).glob("member_*")) or [Path(name)]  # an ensemble's directory holds one for each
        path = members[0] / "config.json"
        untied = {"architectures": None, "tie_word_embeddings": True}  # a classifier has no table of outputs
        own = config_from_hf(read_json(path) | untied) if path.exists() else open_model_config(name)
        specs = critic_specs(build(own, plan=plan))
        found[option] = weights_of(stacked(specs, len(members)), plan, policy.config.dtype)
    return found


def _held(shapes: Shapes, *, policy: bool = True, base: bool = True, rollout: bool = True) -> dict[str, Any]:
    """What a run holds on the mesh's devices besides a step's own arguments; leave out what is among these."""
    state, frozen = shapes.held
    params = {f"params.{name}": tree for name, tree in state.params.items() if policy or name != "policy"}
    held = params | {"opt_state": state.opt_state, "extra": state.extra}
    frozen = frozen if base else frozen._replace(base=None)
    held |= {f"frozen.{name}": tree for name, tree in frozen._asdict().items() if tree is not None}
    held |= _rewards_on(shapes, "mesh")
    return held | ({"rollout": shapes.rollout} if rollout else {})


def _rewards_on(shapes: Shapes, mesh: str) -> dict[str, Any]:
    """The reward models on the devices of a mesh: those in host memory come and go between the steps."""
    return shapes.rewards if shapes.placement.reward == mesh else {}


def _held_apart(shapes: Shapes) -> dict[str, Any]:
    """What a run holds on the devices of a rollout mesh all the time."""
    there = shapes.placement.reference == "rollout_mesh"
    return ({"frozen.reference": shapes.frozen.reference} if there else {}) | _rewards_on(shapes, "rollout_mesh")


def _prepare_decode(shapes: Shapes, steps: Steps) -> PlannedStep:
    policy, base = shapes.state.params["policy"], shapes.frozen.base
    trace = lambda: steps.lay_out.trace(policy, base)
    beside = _held(shapes, policy=False, base=False, rollout=False)
    return PlannedStep("prepare_decode", trace, {"params.policy": policy, "frozen.base": base}, beside, 1)


def _generate(config: PlanConfig, model: ModelConfig, shapes: Shapes, steps: Steps) -> PlannedStep:
    trace = lambda: steps.generate.trace(shapes.decode, shapes.requests, None)
    arguments = {"decode": shapes.decode, "requests": shapes.requests}
    apart = shapes.placement.apart
    beside, mesh = (_held_apart(shapes), "rollout_mesh") if apart else (_held(shapes, rollout=False), "mesh")
    return PlannedStep("generate", trace, arguments, beside, 1, mesh, blocks_read(config, model.sliding_window))


def _scores(config: PlanConfig, shapes: Shapes, steps: Steps) -> list[PlannedStep]:
    """The scoring pass, of a reference elsewhere its own, and with a critic its values, with an implicit process reward
    model its scores."""
    rollout, base, params = shapes.rollout, shapes.frozen.base, shapes.state.params
    given = (rollout.tokens, rollout.segment_ids)
    temperature, start = _placed(shapes.requests.temperature, shapes.placement.train.rows), config.max_prompt_length
    rule, _ = make_batch_rules(config, resolve_algorithm(config), None)
    compares, apart = needs_reference(config), shapes.placement.reference == "rollout_mesh"
    recomputes = old_logprobs_of(config) == "recompute" or rule.needs_old
    in_reward = compares and resolve_algorithm(config).kl_in == "reward"
    reference = None if apart else shapes.frozen.reference
    found = [
        PlannedStep(
            "score",
            lambda: steps.score.trace(params["policy"], base, *given, temperature, start),
            {"params.policy": params["policy"], "frozen.base": base},
            # The policy's scores, or the reference's with the policy beside them.
            _held(shapes, policy=False, base=False) | ({"frozen.reference": reference} if reference else {}),
            int(recomputes or in_reward) + int(compares and not apart),
        )
    ]
    if apart:
        found.append(_score_reference(shapes, steps, start))
    if config.critic != "none":
        trace = lambda: steps.values.trace(params, base, *given, start)
        arguments = {"params.critic": params["critic"]}
        beside = {name: tree for name, tree in _held(shapes).items() if name != "params.critic"}
        if config.critic == "shared":  # the head reads states: the table of outputs is read by nobody
            for name in {"params.policy", "frozen.base"} & beside.keys():
                arguments[name] = {key: leaf for key, leaf in beside[name].items() if key != "lm_head"}
                beside[name] = {key: leaf for key, leaf in beside[name].items() if key == "lm_head"}
        found.append(PlannedStep("values", trace, arguments, beside, 1))
    if config.implicit_prm is not None:
        prm, start_prm = params["prm"], shapes.frozen.prm_reference
        arguments = {"params.prm": prm, "frozen.prm_reference": start_prm}
        beside = {name: tree for name, tree in _held(shapes).items() if name not in arguments}
        found.append(
            PlannedStep("implicit", lambda: steps.implicit.trace(prm, start_prm, rollout, start), arguments, beside, 1)
        )
    return found


def _score_reference(shapes: Shapes, steps: Steps, start: int) -> PlannedStep:
    """The scores of a reference on the rollout mesh, whose weights of generation are gone by then."""
    reference, rows = shapes.frozen.reference, shapes.placement.rollout.rows
    given = _placed((shapes.rollout.tokens, shapes.rollout.segment_ids, shapes.requests.temperature), rows)
    trace = lambda: steps.score_compared.trace(reference, None, *given, start)
    return PlannedStep(
        "score_reference",
        trace,
        {"frozen.reference": reference},
        _rewards_on(shapes, "rollout_mesh"),
        1,
        "rollout_mesh",
    )


def _update(config: PlanConfig, algorithm: Any, shapes: Shapes, steps: Steps, plan: Plan) -> PlannedStep:
    batch = _placed(_batch(config, algorithm, shapes, steps), plan.rows)
    state, (_, frozen) = shapes.state, shapes.held
    arguments = {f"params.{name}": tree for name, tree in state.params.items()} | {"opt_state": state.opt_state}
    arguments |= {"extra": state.extra, "batch": batch, "frozen.base": frozen.base}
    trace = lambda: steps.update.trace(state, frozen, batch)
    # The batch has the references' log-probs: what the program does not read is no argument of it.
    unread = {f"frozen.{name}": getattr(frozen, name) for name in ("reference", "prm_reference")}
    beside = {"rollout": shapes.rollout} | {name: tree for name, tree in unread.items() if tree is not None}
    beside |= _rewards_on(shapes, "mesh")
    return PlannedStep("update", trace, arguments, beside, updates_per_step(config))


def _batch(config: PlanConfig, algorithm: Any, shapes: Shapes, steps: Steps) -> Any:
    """The shapes of one update's batch."""
    rollout, rows = shapes.rollout, shapes.rollout.tokens.shape[0]
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    per_row, valid = jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows,), bool)
    plain = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    rollout = plain(rollout)
    scores = Scores(rollout.logprobs, rollout.logprobs)
    rule, _ = make_batch_rules(config, algorithm, None)
    compares, in_reward = needs_reference(config), algorithm.kl_in == "reward"
    ref = rollout.logprobs if compares else None
    values = rollout.logprobs if config.critic != "none" else None
    paid = in_reward and compares
    greedy = per_row if algorithm.advantage == "greedy" else None
    by_step = (rollout.logprobs, rollout.action_mask) if config.implicit_prm is not None else (None, None)
    credit = jax.eval_shape(
        steps.credit,
        per_row,
        valid,
        rollout,
        scores.logprobs if paid else None,
        ref if paid else None,
        scalar,
        values,
        greedy,
        *by_step,
    )
    rated = Rated(
        rollout=rollout,
        temperature=per_row,
        credit=plain(credit),
        old=scores if old_logprobs_of(config) == "recompute" or rule.needs_old else None,
        values=values,
        ref_logprobs=None if in_reward else ref,
        implicit=None if config.implicit_prm is None else Implicit(rollout.logprobs, per_row, valid),
    )
    chosen = jax.ShapeDtypeStruct((config.minibatch_completions or rows,), jnp.int32)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(
        functools.partial(minibatch_rows, rule=rule),
        rated,
        Coefficients(scalar, scalar, scalar),
        shapes.state.key,
        number,
        chosen,
    )
