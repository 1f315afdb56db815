"""Whole updates of every algorithm are on each mesh what they are on one device.

For each case the real `learn` of a run (scores, values, credit, minibatches, updates) goes ten optimiser steps on the same
rows: on one device and on two of the four meshes of 8, one of which at least has the axis tensor or sequence; the pairs of
meshes take turns. Compared are the first update's gradient, each leaf within 1e-5 of its largest number, the parameters
after ten steps (1e-4), and the metrics. All in float32. Training on given rows: `test_mesh_equality_fit.py`.

Losses meet a model through its scores and values alone, so that most cases of sampled rows train a small net with the
decoder's axes instead of a decoder, which compiles in half the time; the decoder's own equality stands in
`test_sharding.py` and `test_sequence_axis.py`. Cases whose update is the same program share it through the cache.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from test_sharding import assert_trees_close

from jaxrl_lm import prepare
from jaxrl_lm.assemble import lora_of, make_batch_rules
from jaxrl_lm.checks import check, needs_reference, resolve_algorithm
from jaxrl_lm.clock import Clock
from jaxrl_lm.collect import Collected, Judged
from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.fit_steps import compile_streams
from jaxrl_lm.given import table_of
from jaxrl_lm.host import make_host
from jaxrl_lm.learn import learn
from jaxrl_lm.mix import Mix, Stream, check_mix
from jaxrl_lm.models import Model, build, positions
from jaxrl_lm.models.layers import ParamSpec
from jaxrl_lm.rollout import Sampled
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sequences import Example, Examples
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.step_rewards import StepRewards
from jaxrl_lm.train_state import trained_specs
from jaxrl_lm.types import Frozen, Rollout

STEPS = 10
MESHES = {
    "data": {"data": 8},
    "cube": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"fsdp": 4, "tensor": 2},
    "sequence": {"fsdp": 2, "sequence": 2, "tensor": 2},
}
TURNS = (("data", "sequence"), ("cube", "tensor"), ("data", "tensor"), ("cube", "sequence"))
GRADIENT, PARAMETERS = 1e-5, 1e-4  # of each leaf's largest number

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
ACTIONS = (_AT >= PROMPT) & (PROMPT + LENGTHS[:, None] > _AT)
SEGMENTS = ((_BEFORE[:, None] <= _AT) & (PROMPT + LENGTHS[:, None] > _AT)).astype(np.int32)
TOKENS = np.where(SEGMENTS > 0, RNG.integers(3, 48, SEGMENTS.shape), 0).astype(np.int32)
TOKENS[:, :PROMPT] = np.repeat(TOKENS[::GROUP, :PROMPT], GROUP, axis=0)
RETURNS = RNG.choice([0.0, 0.25, 0.75, 1.0], ROWS)
RETURNS[4:8] = 1.0  # a group that is all right
RETURNS[8:12] = 0.0  # and one all wrong
VALID = np.arange(ROWS) != 17  # a row on which every reward abstained
GREEDY = np.repeat(RNG.choice([0.0, 1.0], PROMPTS), GROUP)
NOISE = RNG.normal(0.0, 0.1, SEGMENTS.shape).astype(np.float32)
STEP_ENDS = ACTIONS & ((_AT % 3 == 0) | (PROMPT + LENGTHS[:, None] - 1 == _AT))
STEP_REWARDS = np.where(STEP_ENDS, RNG.uniform(0.0, 1.0, SEGMENTS.shape), 0.0).astype(np.float32)

TEN = {"num_iterations": 5, "minibatch_completions": 16}  # updates a batch
SAME = {"epsilon": 0.2, "epsilon_high": 0.28, **TEN}  # one program of the update for several cases
DECODED = ("grpo of an adapter",)  # cases of a whole decoder
CASES: dict[str, dict[str, Any]] = {
    "grpo of an adapter": {
        "preset": "grpo", "beta": 0.04, "kl_importance": True, "kl_token_power": 0.5, "lora_rank": 4,
        "microbatch_completions": 8, **TEN,
    },
    "rloo": {"preset": "rloo", **TEN},
    "ppo": {"preset": "ppo", "critic": "separate", "gamma": 0.9, **TEN},
    "ppo with a shared critic, n-grams and implicit process rewards": {
        "preset": "ppo", "critic": "shared", "actions": "ngram", "ngram": 2, "implicit_prm": 0.05, **TEN,
    },
    "dr_grpo": {
        "preset": "dr_grpo", "delta": 4.0, "dual_clip": 3.0, "length_penalty": 0.2, "outlier_limit": 3.0, **TEN,
    },
    "gspo": {"preset": "gspo", "scale_rewards": "batch", "entropy_clip": "kl_cov", "cov_share": 0.1, **TEN},
    "cispo": {"preset": "cispo", "token_scale": "entropy", "log_ratio_clip": 0.5, **TEN},
    "sapo, tokens of a sequence": {
        "preset": "sapo", "importance_sampling_level": "sequence-token", "max_drift": 0.05, "entropy_coef": 0.01,
        "unlikeliness": 0.2, **TEN,
    },
    "decoupled_ppo, pass at k": {
        "preset": "decoupled_ppo", "advantage": "pass-at-k", "pass_k": 2, "token_scale": "low_probability",
        "actions": "sequence", **TEN,
    },
    "dapo": {
        "preset": "dapo", "overlong_buffer": 2, "mask_truncated_completions": True, "token_scale": "entropy_shaped",
        "top_entropy_share": 0.5, **SAME,
    },
    "reinforce_pp, shaped steps": {
        "preset": "reinforce_pp", "beta": 0.05, "gamma": 0.95, "step_reward": "own:function", "step_shaping": True,
        "entropy_clip": "clip_cov", "cov_share": 0.1, "cov_low": -1.0, **SAME,
    },
    "reinforce_rej": {"preset": "reinforce_rej", "drop": "all-wrong", **SAME},
    "steps in the group": {
        "preset": "grpo", "step_reward": "own:function", "step_weight": 0.5, "sampler_correction": "sequence_mask", **SAME,
    },
    "reinforce": {"preset": "reinforce"},
    "remax": {"preset": "remax"},
    "raft": {"preset": "raft"},
    "gpg": {"preset": "gpg"},
    "max_rl": {"preset": "max_rl"},
    "a teacher and streams": {
        "preset": "grpo", "teacher": "own", "teacher_divergence": "jsd", "mix": {"sft": 0.5, "dpo": 0.3},
        "mix_dataset": {"sft": "own", "dpo": "own"}, "mix_rows": 8, **TEN,
    },
}  # fmt: skip


class Net(Model):
    """An embedding, the mean of what a row has had so far, an MLP: a decoder as far as scores, values and axes go."""

    @property
    def specs(self):
        width, inner = self.config.hidden_size, self.config.intermediate_size
        kernels = {
            "up": ParamSpec((width, inner), ("embed", "mlp"), "normal"),
            "down": ParamSpec((inner, width), ("mlp", "embed"), "normal"),
        }
        ends = {name: spec for name, spec in super().specs.items() if name != "layers"}
        return ends | {"layers": {name: {"kernel": spec} for name, spec in kernels.items()}}

    def hidden(self, params, tokens, positions, segment_ids):
        columns = tokens.shape[1]
        room = ((0, 0), (0, -columns % self.plan.ways("columns")))
        tokens, segment_ids = jnp.pad(tokens, room), jnp.pad(segment_ids, room)
        real = (segment_ids > 0).astype(jnp.float32)[:, :, None]
        x = self.look_up(params["embed"]["table"], tokens)
        seen = jnp.cumsum(x * real, axis=1) / jnp.maximum(jnp.cumsum(real, axis=1), 1.0)
        inner = jnp.tanh(seen @ params["layers"]["up"]["kernel"])
        (scale,) = jax.tree.leaves(params["final_norm"])
        x = (x + inner @ params["layers"]["down"]["kernel"]) * scale[None, None]
        return self.constrain(x)[:, :columns]


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
    run, model = options(name), (build(config, plan=plan) if name in DECODED else Net(config, plan))
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
            hidden = model.hidden(params, tokens, positions(segments), segments)
            return model.unembed(params, hidden), score(params, tokens, segments, model=model, chunk=64)

        logits, scores = jax.device_get(jax.jit(facts)(params, *jax.device_put((TOKENS, SEGMENTS), plan.rows)))
        found[name] = (np.where(SEGMENTS[..., None] > 0, logits, 0.0), *scores)
    assert np.count_nonzero(found["one"][1]) > ROWS * NEW / 2
    for name in MESHES:
        for ours, theirs in zip(found[name], found["one"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max(), err_msg=name)
