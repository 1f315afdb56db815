"""Whole updates of every algorithm are on each mesh what they are on one device.

For each case the real `learn` of a run (scores, values, credit, minibatches, updates), or the real batches and updates of
training on given rows, goes ten optimiser steps on the same rows: on one device and on two of the four meshes of 8, one of
which at least has the axis tensor or sequence; the pairs of meshes take turns. Compared are the first update's gradient,
each leaf within 1e-5 of its largest number, the parameters after ten steps (1e-3), and the metrics. All in float32.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import tiny_run
from test_sharding import assert_trees_close

from jaxrl_lm import metrics as metric
from jaxrl_lm import prepare
from jaxrl_lm.assemble import copy_params, lora_of, make_batch_rules
from jaxrl_lm.checks import check, needs_reference, resolve_algorithm
from jaxrl_lm.clock import Clock
from jaxrl_lm.collect import Collected, Judged
from jaxrl_lm.config import GRPOConfig, SamplingConfig
from jaxrl_lm.dpo import prepare_dpo
from jaxrl_lm.fit_config import DPOConfig, PRMConfig, RewardConfig, SFTConfig
from jaxrl_lm.fit_steps import compile_streams
from jaxrl_lm.given import table_of
from jaxrl_lm.host import make_host
from jaxrl_lm.learn import learn
from jaxrl_lm.mix import Mix, Stream, check_mix
from jaxrl_lm.models import build, positions
from jaxrl_lm.reward_fit import prepare_prm, prepare_reward
from jaxrl_lm.rollout import Sampled
from jaxrl_lm.score import score
from jaxrl_lm.sequences import Example, Examples
from jaxrl_lm.sft import prepare_sft
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.step_rewards import StepRewards
from jaxrl_lm.steps import trained_specs
from jaxrl_lm.types import Frozen, Rollout

STEPS = 10
MESHES = {
    "data": {"data": 8},
    "cube": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"fsdp": 4, "tensor": 2},
    "sequence": {"fsdp": 2, "sequence": 2, "tensor": 2},
}
TURNS = (("data", "sequence"), ("cube", "tensor"), ("data", "tensor"), ("cube", "sequence"))
GRADIENT, PARAMETERS = 1e-5, 1e-3  # of each leaf's largest number

OPTIMISER = {"learning_rate": 3e-3, "adam_eps": 1e-3, "weight_decay": 0.1}


def in_turn(cases):
    """Each case with its meshes."""
    return [
        pytest.param(name, meshes, id=f"{name} on {' and '.join(meshes)}")
        for name, meshes in zip(cases, TURNS * len(cases), strict=False)
    ]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with tiny_run.compile_cache(tmp_path_factory.mktemp("xla")):
        yield


@pytest.fixture(scope="module")
def config(tiny_config):
    return dataclasses.replace(tiny_config, family="llama", num_layers=1, qkv_bias=False, qk_norm=False)


def plan_on(name):
    """The plan of a mesh of all devices, or of the first one."""
    return Plan(make_mesh(MESHES[name]) if name in MESHES else make_mesh({}, devices=jax.devices()[:1]))


def random_tree(specs, seed, scale=0.2):
    """Weights that all count, from numpy, which compiles nothing."""
    rng, mean = np.random.default_rng(seed), {"normal": 0.0, "ones": 1.0, "zeros": 0.0}
    one = lambda spec: rng.normal(mean.get(spec.init, 0.0), scale, spec.shape).astype(np.float32)
    return jax.tree.map(one, specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))


def near(tree, seed):
    """Other weights, a little way off."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + rng.normal(0.0, 0.02, x.shape).astype(np.float32), tree)


class Facts(NamedTuple):
    """What a case comes to on a mesh, on the host."""

    gradient: Any  # of the first update
    parameters: Any  # after STEPS updates
    metrics: dict[str, float]  # of the first update


def assert_equal(found, expected):
    assert_trees_close(found.gradient, expected.gradient, GRADIENT)
    assert_trees_close(found.parameters, expected.parameters, PARAMETERS)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name


class Recorder:
    """An update that keeps the first moment of its first call, which is (1 − b1) times the clipped gradient."""

    def __init__(self, update):
        self._update, self.gradient, self.calls = update, None, 0

    def __call__(self, state, frozen, batch):
        state, found = self._update(state, frozen, batch)
        if not self.calls:
            self.gradient = jax.device_get(optax.tree.get(state.opt_state, "mu"))
        self.calls += 1
        return state, found


# --- sampled rows -----------------------------------------------------------------------------------------------------

PROMPTS, GROUP, PROMPT, NEW = 8, 4, 5, 6
ROWS = PROMPTS * GROUP
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, NEW + 1, ROWS)
_BEFORE = np.repeat(RNG.integers(0, PROMPT, PROMPTS), GROUP)
_AT = np.arange(PROMPT + NEW)
ACTIONS = (_AT >= PROMPT) & (_AT < PROMPT + LENGTHS[:, None])
SEGMENTS = ((_AT >= _BEFORE[:, None]) & (_AT < PROMPT + LENGTHS[:, None])).astype(np.int32)
TOKENS = np.where(SEGMENTS > 0, RNG.integers(3, 48, SEGMENTS.shape), 0).astype(np.int32)
TOKENS[:, :PROMPT] = np.repeat(TOKENS[::GROUP, :PROMPT], GROUP, axis=0)
RETURNS = RNG.choice([0.0, 0.25, 0.75, 1.0], ROWS)
RETURNS[4:8] = 1.0  # a group that is all right
RETURNS[8:12] = 0.0  # and one all wrong
VALID = np.arange(ROWS) != 17  # a row on which every reward abstained
GREEDY = np.repeat(RNG.choice([0.0, 1.0], PROMPTS), GROUP)
NOISE = RNG.normal(0.0, 0.1, SEGMENTS.shape).astype(np.float32)
STEP_ENDS = ACTIONS & ((_AT % 3 == 0) | (_AT == PROMPT + LENGTHS[:, None] - 1))
STEP_REWARDS = np.where(STEP_ENDS, RNG.uniform(0.0, 1.0, SEGMENTS.shape), 0.0).astype(np.float32)

TWO = {"num_iterations": 5, "minibatch_completions": 16}  # ten updates a batch
CASES: dict[str, dict[str, Any]] = {
    "grpo": {
        "preset": "grpo", "beta": 0.04, "kl_importance": True, "kl_token_power": 0.5, "microbatch_completions": 8, **TWO,
    },
    "rloo": {"preset": "rloo", **TWO},
    "ppo": {"preset": "ppo", "critic": "separate", **TWO},
    "ppo, shared critic, n-grams": {
        "preset": "ppo", "critic": "shared", "actions": "ngram", "ngram": 2, "gamma": 0.9, "discount_per": "token", **TWO,
    },
    "dapo": {
        "preset": "dapo", "overlong_buffer": 2, "mask_truncated_completions": True, "token_scale": "entropy_shaped",
        "top_entropy_share": 0.5, **TWO,
    },
    "dr_grpo": {
        "preset": "dr_grpo", "delta": 4.0, "dual_clip": 3.0, "length_penalty": 0.2, "outlier_limit": 3.0, **TWO,
    },
    "gspo": {"preset": "gspo", "scale_rewards": "batch", "entropy_clip": "kl_cov", "cov_share": 0.1, **TWO},
    "cispo": {"preset": "cispo", "token_scale": "entropy", "log_ratio_clip": 0.5, **TWO},
    "sapo, tokens of a sequence": {
        "preset": "sapo", "importance_sampling_level": "sequence-token", "max_drift": 0.05, "entropy_coef": 0.01,
        "unlikeliness": 0.2, **TWO,
    },
    "reinforce_pp, shaped steps": {
        "preset": "reinforce_pp", "beta": 0.05, "gamma": 0.95, "step_reward": "own:function", "step_shaping": True,
        "entropy_clip": "clip_cov", "cov_share": 0.1, "cov_low": -1.0, **TWO,
    },
    "reinforce": {"preset": "reinforce"},
    "remax": {"preset": "remax"},
    "raft": {"preset": "raft"},
    "gpg": {"preset": "gpg"},
    "max_rl": {"preset": "max_rl"},
    "reinforce_rej": {"preset": "reinforce_rej", "drop": "all-wrong", **TWO},
    "decoupled_ppo, pass at k": {
        "preset": "decoupled_ppo", "advantage": "pass-at-k", "pass_k": 2, "token_scale": "low_probability",
        "actions": "sequence", **TWO,
    },
    "steps in the group": {
        "preset": "grpo", "step_reward": "own:function", "step_weight": 0.5, "sampler_correction": "sequence_mask", **TWO,
    },
    "implicit process rewards": {"preset": "rloo", "step_credit": "mean", "implicit_prm": 0.05, **TWO},
    "implicit process rewards and a critic": {"preset": "ppo", "critic": "shared", "implicit_prm": 0.05, **TWO},
    "lora": {"preset": "grpo", "beta": 0.04, "lora_rank": 4, **TWO},
    "distillation beside the reward": {"preset": "grpo", "teacher": "own", "teacher_divergence": "jsd", **TWO},
    "distillation alone": {"preset": "grpo", "teacher": "own", "teacher_only": True},
    "mixed streams": {
        "preset": "grpo", "mix": {"sft": 0.5, "dpo": 0.3}, "mix_dataset": {"sft": "own", "dpo": "own"}, "mix_rows": 8,
        **TWO,
    },
}  # fmt: skip


def options(name):
    given = {"beta": 0.0} | OPTIMISER | CASES[name]
    if CASES[name]["preset"] in ("rloo", "ppo"):
        del given["beta"]  # that of the preset
    return GRPOConfig(
        model="own", dataset="own", reward=("own",), output_dir="own", prompts_per_step=PROMPTS, num_generations=GROUP,
        max_completion_length=NEW, temperature=0.9, score_chunk=64, **given,
    )  # fmt: skip


@pytest.fixture(scope="module")
def sampler_logprobs(config):
    """Log-probs that a sampler may have had: those of the start, with some noise."""
    plan = plan_on("one")
    model = build(config, plan=plan)
    params = random_tree(model.specs, 0)
    found = jax.jit(functools.partial(score, model=model, temperature=0.9))(params, TOKENS, SEGMENTS)
    return np.where(ACTIONS, np.asarray(found.logprobs) + NOISE, 0.0).astype(np.float32)


def examples(seed, count, sides, **more):
    """Rows of random tokens, prompts and completions of many lengths."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = rng.integers(3, 48, rng.integers(2, 5)).tolist()
        responses = [rng.integers(3, 48, rng.integers(1, 6)).tolist() for _ in range(sides)]
        rows.append(tuple(Example(prompt + one, [False] * len(prompt) + [True] * len(one)) for one in responses))
    return Examples(more.get("rows", [{}] * count), rows, dropped=0, cut=0)


def streams(run):
    """The mix of a run, of rows made here."""
    if not run.mix:
        return None
    table = lambda seed, sides: table_of(examples(seed, 24, sides), [], rows=run.mix_rows, pad_id=0, buckets=())
    return Mix((Stream("sft", 0.5, table(5, 1)), Stream("dpo", 0.3, table(6, 2))), run.mix_beta)


def start_of(run, model, steps):
    """The state and the frozen trees, the same numbers on every mesh."""
    plan, lora = steps.plan, lora_of(run)
    specs = trained_specs(model, lora=lora, critic=run.critic, prm=run.implicit_prm is not None)
    trained = {name: random_tree(tree, seed, 0.1 if lora else 0.2) for seed, (name, tree) in enumerate(specs.items())}
    policy = random_tree(model.specs, 0)
    put = lambda tree: jax.device_put(tree, plan.tree(model.specs))
    keeps = needs_reference(run)
    frozen = Frozen(
        reference=put(near(policy, 7)) if keeps and lora is None else None,
        base=put(policy) if lora else None,
        teacher=put(near(policy, 8)) if run.teacher else None,
        prm_reference=put(near(trained["prm"], 9)) if "prm" in trained else None,
    )
    layouts = jax.tree.map(lambda leaf: leaf.sharding, steps.abstract_state.params)
    if keeps and lora is not None:
        frozen = frozen._replace(reference=jax.device_put(near(trained["policy"], 7), layouts["policy"]))
    return steps.init(jax.device_put(trained, layouts), jax.random.key(3)), frozen


def collected(run, steps, logprobs):
    """What a step learns from, as if the rows had been sampled and judged on this mesh."""
    numbers = ACTIONS.astype(np.int32)
    rollout = Rollout(TOKENS, SEGMENTS, ACTIONS, logprobs, None, LENGTHS == NEW, numbers, np.zeros_like(numbers))
    temperature = np.full(ROWS, 0.9, np.float32)
    texts = [f"answer {row % 3}" for row in range(ROWS)]
    sampled = Sampled(*steps.place((rollout, temperature)), ROWS, [{}] * ROWS, [""] * ROWS, texts, [], None, None)
    judged = Judged(sampled, list(range(PROMPTS)), RETURNS[:, None], RETURNS, VALID, RETURNS)
    found = StepRewards([], STEP_REWARDS, STEP_ENDS, 0) if run.step_reward else None
    greedy = GREEDY if run.preset == "remax" else None
    return Collected(judged, greedy, {}, 0, 0, found)


def learned(name, config, plan, logprobs):
    """The facts of a case on a mesh."""
    run, model = options(name), build(config, plan=plan)
    check(run, 8)
    check_mix(run, 8, prepare.microbatches_of(run))
    algorithm, mix = resolve_algorithm(run), streams(run)
    objective = prepare.whole_objective(run, algorithm, None, model if run.teacher else None, mix)
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=(3,), pad_token_id=0)
    given = {"total_updates": STEPS, "advantages": None, "objective": objective}
    steps, _ = prepare.compile_run(run, algorithm, model, plan, sampling, **given)
    recorder = Recorder(steps.update)
    rule, scored_rule = make_batch_rules(run, algorithm, None)
    read = {
        "config": run, "algorithm": algorithm, "batch_rule": rule, "scored_rule": scored_rule, "mix": mix,
        "steps": dataclasses.replace(steps, update=recorder),
        "stream_steps": compile_streams(model, plan, score_chunk=64, microbatches=1),
    }  # fmt: skip
    setup = prepare.Setup(**dict.fromkeys(prepare.Setup._fields) | read)
    host = make_host(run, [{}] * PROMPTS, algorithm.beta)
    state, frozen = start_of(run, model, steps)
    first, step = None, 0
    while recorder.calls < STEPS:
        step += 1
        done = learn(setup, host, state, frozen, collected(run, steps, logprobs), step=step, clock=Clock())
        state, first = done.state, first or done.metrics
    assert recorder.calls == STEPS
    return Facts(recorder.gradient, jax.device_get(state.params), first)


@pytest.mark.parametrize(("name", "meshes"), in_turn(CASES))
def test_ten_updates_of_an_algorithm(name, meshes, config, sampler_logprobs):
    expected = learned(name, config, plan_on("one"), sampler_logprobs)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected.gradient))
    for mesh in meshes:
        assert_equal(learned(name, config, plan_on(mesh), sampler_logprobs), expected)


# --- the scores themselves --------------------------------------------------------------------------------------------


def test_logits_logprobs_and_entropies(tiny_config):
    """Of the model with every part of the family in it, on all four meshes."""
    config, found = dataclasses.replace(tiny_config, num_layers=2), {}
    for name in ("one", *MESHES):
        plan = plan_on(name)
        model = build(config, plan=plan)
        params = jax.device_put(random_tree(model.specs, 0), plan.tree(model.specs))

        def facts(params, tokens, segments, model=model):
            hidden, _ = model.hidden(params, tokens, positions(segments), segments)
            return model.unembed(params, hidden), score(params, tokens, segments, model=model, chunk=64)

        logits, scores = jax.device_get(jax.jit(facts)(params, *jax.device_put((TOKENS, SEGMENTS), plan.rows)))
        found[name] = (np.where(SEGMENTS[..., None] > 0, logits, 0.0), *scores)
    assert np.count_nonzero(found["one"][1]) > ROWS * NEW / 2
    for name in MESHES:
        for ours, theirs in zip(found[name], found["one"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max(), err_msg=name)


# --- given rows -------------------------------------------------------------------------------------------------------

FIT = OPTIMISER | {"rows_per_step": 16, "max_length": 24, "max_steps": STEPS, "dataset": "own", "output_dir": "own"}
PAIRS = {"beta": 0.5}
FITS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft, packed": (prepare_sft, SFTConfig, {"packing": True, "rows_per_step": 8}),
    "sft of an adapter": (prepare_sft, SFTConfig, {"lora_rank": 4, "microbatch_rows": 8}),
    "dpo": (prepare_dpo, DPOConfig, PAIRS | {"microbatch_rows": 8, "reference_reset_steps": 4}),
    "ipo, bco and sft": (
        prepare_dpo, DPOConfig, PAIRS | {"loss_type": ("ipo", "bco_pair", "sft"), "loss_weights": (1.0, 0.5, 0.2)},
    ),
    "orpo": (prepare_dpo, DPOConfig, PAIRS | {"loss_type": ("orpo",)}),
    "aot": (prepare_dpo, DPOConfig, PAIRS | {"loss_type": ("aot",), "precompute_ref_log_probs": True}),
    "kto": (prepare_dpo, DPOConfig, PAIRS | {"loss_type": ("kto",), "desirable_weight": 1.3}),
    "reward": (prepare_reward, RewardConfig, {"center_rewards_coefficient": 0.01, "label_smoothing": 0.1}),
    "reward, an ensemble": (prepare_reward, RewardConfig, {"members": 3}),
    "outcome": (prepare_reward, RewardConfig, {"loss_type": "outcome"}),
    "prm": (prepare_prm, PRMConfig, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("tiny"), num_layers=1)


def given_rows(name):
    """24 rows of the columns that a case reads: sums, right and wrong."""
    rng, rows = np.random.default_rng(4), []
    for a, b in rng.integers(0, 50, (24, 2)):
        right, wrong, label = str(a + b), str(a + b + rng.integers(1, 200)), bool(rng.integers(2))
        row = {"prompt": f"{a}+{b}="}
        if "sft, packed" in name or "sft of" in name:
            row |= {"completion": right}
        elif name in ("kto", "outcome"):
            row |= {"completion": right if label else wrong, "label": label}
        elif name == "prm":
            row |= {"completions": [f"{a}", wrong, right][: rng.integers(1, 4)]}
            row |= {"labels": [True, False, True][: len(row["completions"])]}
        else:
            row |= {"chosen": right, "rejected": wrong} | ({"margin": 0.5 * (a > b)} if name == "reward" else {})
        rows.append(row)
    return rows


def fitted(name, saved, mesh):
    """The facts of a case on a mesh, all of its parts made as a run makes them."""
    make, config_class, changes = FITS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "build_plan", lambda *_, **__: plan_on(mesh))
        setup = make(config_class(model=saved, **(FIT | changes)), dataset=given_rows(name))
    frozen = setup.frozen
    if setup.reference_is_start:
        frozen = frozen._replace(reference=copy_params(setup.params["policy"]))
    frozen = setup.prepare_frozen(frozen)
    state, recorder, first = setup.steps.init(setup.params, jax.random.key(3)), Recorder(setup.steps.update), None
    for step in range(1, STEPS + 1):
        batch, _ = setup.source.take(step, state, frozen, Clock())
        state, found = recorder(state, frozen, batch)
        found = metric.result(found)
        setup.source.observe(found)
        first = first or found
        if setup.reset_steps and step % setup.reset_steps == 0:
            follow = setup.steps.follow(state.extra["reference"], state.params["policy"], np.float32(0))
            state = state._replace(extra=state.extra | {"reference": follow})
    return Facts(recorder.gradient, jax.device_get(state.params), first)


@pytest.mark.parametrize(("name", "meshes"), in_turn(FITS))
def test_ten_updates_on_given_rows(name, meshes, saved):
    expected = fitted(name, saved, "one")
    assert expected.metrics["nonfinite"] == 0
    assert expected.metrics["grad_norm"] > 0
    for mesh in meshes:
        assert_equal(fitted(name, saved, mesh), expected)
