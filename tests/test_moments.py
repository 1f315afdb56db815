"""Moments in bfloat16 and 8 bits: against AdamW in float64, their bytes and layouts, small numbers, and resumed runs."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run

from jaxrl_lm import SFTConfig, train_sft
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.memory import device_bytes
from jaxrl_lm.models import build
from jaxrl_lm.moments import LogTiles, Tiles, moment_bytes
from jaxrl_lm.optim import make_optimizer
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.train_state import state_shardings

pytestmark = pytest.mark.usefixtures("cached")

PLAIN = {"max_grad_norm": 0.0, "weight_decay": 0.0, "b1": 0.9, "b2": 0.95, "eps": 1e-8}


def optimizer(dtype, rate=1e-2, **options):
    return make_optimizer(optax.constant_schedule(rate), **PLAIN | options, moments_dtype=dtype)


def adamw(gradient, start, steps, *, b2=0.95, rate=1e-2, b1=0.9, eps=1e-8, decay=0.0):
    """Loshchilov and Hutter, 2019, algorithm 2, in float64: the weights after each of the steps."""
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), start)
    first = second = jax.tree.map(np.zeros_like, weights)
    found = {}
    for step in range(1, max(steps) + 1):
        grads = gradient(weights, step)
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, grads)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, second, grads)
        one = lambda w, m, v, step=step: (
            w - rate * (m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + eps) + decay * w)
        )
        weights = jax.tree.map(one, weights, first, second)
        found[step] = weights
    return {step: found[step] for step in steps}


def deviation(found, expected, start):
    """The distance to where the reference is, in units of the way it went."""

    def norm(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return np.sqrt(sum(np.sum((np.asarray(x, np.float64) - y) ** 2) for x, y in pairs))

    return norm(found, expected) / norm(start, expected)


def trained(tx, gradient, start, steps):
    params, state, found = start, tx.init(start), {}

    @jax.jit
    def one(params, state, step):
        updates, state = tx.update(gradient(params, step), state, params)
        return optax.apply_updates(params, updates), state

    for step in range(1, max(steps) + 1):
        params, state = one(params, state, step)
        found[step] = params
    return {step: found[step] for step in steps}, state


# --- against float64 --------------------------------------------------------------------------------------------------

STEPS = (1, 10, 100)


@pytest.fixture(scope="module")
def regression():
    """A gradient of 64 × 128 weights over batches of 32 rows, whose inputs differ in size by 1000; and float64's steps."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((100, 32, 64)) * np.logspace(-2, 1, 64)
    noise = 0.1 * rng.standard_normal((100, 32, 128))
    outputs = inputs @ rng.standard_normal((64, 128)) + noise
    start = {"w": {"kernel": np.zeros((64, 128))}}

    def gradient(weights, step):
        x, y = inputs[step - 1], outputs[step - 1]
        return {"w": {"kernel": 2 * x.T @ (x @ weights["w"]["kernel"] - y) / 32}}

    x, y = jnp.asarray(inputs, jnp.float32), jnp.asarray(outputs, jnp.float32)

    def ours(params, step):
        a, b = x[step - 1], y[step - 1]
        return {"w": {"kernel": 2 * a.T @ (a @ params["w"]["kernel"] - b) / 32}}

    expected = {b2: adamw(gradient, start, STEPS, b2=b2) for b2 in (0.95, 0.999)}
    return ours, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start), expected


# Measured, and rounded up by about half: (10 steps, 100 steps).
BOUNDS = {
    ("float32", 0.95): (1e-6, 1e-6),
    ("bfloat16", 0.95): (2.5e-3, 3.5e-3),
    ("int8", 0.95): (9e-3, 1.0e-2),
    ("float32", 0.999): (1.2e-5, 1e-5),
    ("bfloat16", 0.999): (2.5e-3, 5e-3),
    ("int8", 0.999): (9e-3, 1.4e-2),
}


@pytest.mark.parametrize("b2", [0.95, 0.999])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_regression_goes_the_way_of_float64(regression, dtype, b2):
    gradient, start, expected = regression
    found, _ = trained(optimizer(dtype, b2=b2), gradient, start, STEPS)
    errors = [deviation(found[step], expected[b2][step], start) for step in STEPS]
    assert errors[0] < 2e-5  # the first step is taken before anything is stored
    assert errors[1] < BOUNDS[dtype, b2][0]
    assert errors[2] < BOUNDS[dtype, b2][1]
    if dtype != "float32":
        assert errors[1] > 1e-4  # and something is


MODEL_BOUNDS = {"float32": (5e-6, 5e-6), "bfloat16": (2.5e-3, 7e-3), "int8": (9e-3, 2.1e-2)}


@pytest.fixture(scope="module")
def small(tiny_config):
    """A gradient of a tiny model's log-probs, the weights it starts from, and float64's steps."""
    model, tokens = build(tiny_config), jax.random.randint(jax.random.key(2), (4, 12), 1, 48)
    start = model.init(jax.random.key(1))
    loss = lambda params: -score(params, tokens, jnp.ones_like(tokens), model=model).logprobs.mean()
    gradient = jax.jit(lambda params, step: jax.grad(loss)(params))
    single = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    double = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    return gradient, start, adamw(lambda w, step: double(gradient(single(w), step)), start, (10, 100), rate=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_tiny_model_goes_the_way_of_float64(small, dtype):
    gradient, start, expected = small
    found, state = trained(optimizer(dtype, rate=1e-3), gradient, start, (10, 100))
    errors = [deviation(found[step], expected[step], start) for step in (10, 100)]
    assert errors[0] < MODEL_BOUNDS[dtype][0]
    assert errors[1] < MODEL_BOUNDS[dtype][1]
    if dtype == "int8":
        kinds = jax.tree.leaves(state[1][0].mu, is_leaf=lambda node: isinstance(node, Tiles))
        assert {isinstance(one, Tiles) for one in kinds} == {True, False}  # matrices are, norms are not


# --- what is stored ---------------------------------------------------------------------------------------------------


def weights_of_sizes():
    return {
        "a": {"kernel": jnp.zeros((8, 96, 256), jnp.bfloat16)},  # scales of 128 numbers each along the last axis
        "b": {"lora_a": jnp.zeros((4, 256, 8)), "bias": jnp.zeros(8192)},  # … along the middle one; a bias
        "c": {"kernel": jnp.zeros((31, 171))},  # no axis has a tile of at least 16
        "d": {"kernel": jnp.zeros((32, 64))},  # small
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_bytes_of_the_state_are_those_computed(dtype):
    sizes = [8 * 96 * 256, 4 * 256 * 8, 8192, 31 * 171, 32 * 64]
    state = optimizer(dtype).init(weights_of_sizes())
    expected = {
        "float32": 8 * sum(sizes),
        "bfloat16": 4 * sum(sizes),
        "int8": (2 + 12 / 128) * sum(sizes[:2]) + 8 * sum(sizes[2:]),
    }[dtype]
    assert device_bytes(state) == expected + 2 * 4  # two counters
    if dtype == "int8":
        adam = state[1][0]
        assert adam.mu["b"]["lora_a"].scale.shape == (4, 2, 8)
        assert adam.nu["a"]["kernel"].middle.shape == (8, 96, 2)
        assert adam.mu["a"]["kernel"].values.dtype == jnp.int8
        assert moment_bytes("int8") == 2 + 12 / 128


def test_no_second_moment_becomes_zero_beside_a_large_one():
    """In one tile are squares of gradients from 1e-12 to 1: every step is about the size of float32's, 1."""
    grads = {"w": {"kernel": jnp.asarray(np.tile(np.logspace(-6, 0, 128), (64, 1)), jnp.float32)}}
    start = jax.tree.map(jnp.zeros_like, grads)
    for dtype, bound in (("int8", 0.2), ("float32", 1e-3)):
        tx = optimizer(dtype, rate=1.0, eps=1e-12)
        state = tx.init(start)
        for _ in range(20):
            updates, state = tx.update(grads, state, start)
            assert np.abs(np.asarray(updates["w"]["kernel"]) + 1.0).max() < bound, dtype
    assert float(jnp.abs(state[1][0].nu["w"]["kernel"]).min()) > 0.0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_second_moment_follows_small_changes_in_the_mean(dtype):
    """With b2 = 0.999 a step is below half of the last place: rounding to the nearest would stay where it is."""
    start = {"w": {"kernel": jnp.ones((64, 128))}}
    tx = optimizer(dtype, b2=0.999, eps=1e-12)
    state = tx.init(start)
    spread = jnp.where(jnp.arange(128) % 2 == 0, 1.0, 0.5)[None] * jnp.ones((64, 1))

    @jax.jit
    def steps(state, size):
        return jax.lax.fori_loop(0, 200, lambda _, s: tx.update({"w": {"kernel": spread * size}}, s, start)[1], state)

    state = steps(steps(state, 1.0), 0.1)
    nu = state[1][0].nu["w"]["kernel"]
    if isinstance(nu, LogTiles):
        from jaxrl_lm.moments import _nu_of

        nu = _nu_of(nu)
    a, b = 1 - 0.999**200, 0.999**200
    expected = b * a + 0.01 * a
    found = np.asarray(nu, np.float64) / np.asarray(spread, np.float64) ** 2
    assert found[:, ::2].mean() == pytest.approx(expected, rel=0.02)
    assert found[:, 1::2].mean() == pytest.approx(expected, rel=0.02)


def test_int8_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"moments_dtype='int8' needs qwix: pip install 'jaxrl-lm\[8bit\]'"):
        optimizer("int8")


def test_an_unknown_dtype_is_named():
    with pytest.raises(ValueError, match="moments_dtype='int4' is unknown: use float32, bfloat16 or int8"):
        optimizer("int4")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_members_of_an_ensemble_are_clipped_each_by_its_own_norm(dtype):
    tx = optimizer(dtype, rate=1.0, max_grad_norm=1.0, b1=0.0, b2=0.0, eps=1.0, stacked=True)
    grads = {"w": {"kernel": jnp.stack([jnp.full((64, 64), size) for size in (1.0, 1e-3)])}}
    updates, _ = tx.update(grads, tx.init(grads), grads)
    for member, clipped in enumerate((1 / 64, 1e-3)):  # norms 64 and 0.064
        np.testing.assert_allclose(updates["w"]["kernel"][member], -clipped / (clipped + 1), rtol=1e-5)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_sharded_is_unsharded(tiny_config, dtype):
    """Moments lie as their parameter does, and the same numbers come out, chances included."""
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    model, tx = build(tiny_config, plan=plan), optimizer(dtype)
    params = {"policy": build(tiny_config).init(jax.random.key(0))}
    specs = {"policy": model.specs}
    abstract, layouts = state_shardings(specs, plan, tx, "float32")
    grads = [jax.tree.map(lambda x, n=n: jnp.sin(x * (7 + n)), params) for n in range(2)]

    def run(place):
        state, weights = place(tx.init(params), layouts.opt_state), place(params, layouts.params)
        for one in grads:
            updates, state = jax.jit(tx.update)(place(one, layouts.params), state, weights)
            weights = jax.tree.map(jnp.add, weights, updates)
        return weights, state

    found, state = run(jax.device_put)
    expected, whole = run(lambda tree, _: tree)

    def close(ours, theirs):
        a, b = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max(initial=0.0), rtol=0)

    jax.tree.map(close, found, expected)
    jax.tree.map(close, state, whole)
    adam, layout = abstract.opt_state[1][0], layouts.params["policy"]["layers"]["mlp"]["gate_proj"]["kernel"]
    moment = adam.mu["policy"]["layers"]["mlp"]["gate_proj"]["kernel"]
    if dtype == "int8":
        assert moment.values.sharding == layout
        assert moment.scale.sharding.spec[:2] == layout.spec[:2]  # 64 / 2 numbers: a tile of 64 is on two devices
        moment = moment.values
    assert moment.sharding == layout
    assert not moment.sharding.is_fully_replicated


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """A run of supervised training in a directory, by dtype and changes."""
    model = tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")
    rows = demonstration_rows(make_problems(14, seed=0, digits=2), seed=0, skip=0.3)
    options = {"model": model, "dataset": "rows", "mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "rows_per_step": 8}
    options |= {"learning_rate": 1e-2, "eval_steps": 0, "save_steps": 1, "max_steps": 3}
    return lambda directory, **changes: train_sft(
        SFTConfig(**options | {"output_dir": str(directory)} | changes), dataset=rows
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_resumed_run_goes_on_bit_for_bit_also_from_another_mesh(sft, dtype, tmp_path):
    """Of all weights in one case, of an adapter in the other."""
    given = {"moments_dtype": dtype, "lora_rank": {"bfloat16": 8, "int8": None}[dtype]}
    straight = sft(tmp_path / "straight", **given)
    sft(tmp_path / "cut", **given, max_steps=2)
    resumed = sft(tmp_path / "cut", **given)
    assert tiny_run.bits(resumed.state) == tiny_run.bits(straight.state)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(resumed.state.opt_state)}
    assert dtypes >= {"bfloat16": {"bfloat16"}, "int8": {"int8", "float32"}}[dtype]
    moved = sft(tmp_path / "cut", **given, mesh={"data": 4, "fsdp": 2})
    assert tiny_run.bits(moved.state) == tiny_run.bits(straight.state)
    values = jax.tree.leaves(moved.state.opt_state[1][0].mu)
    assert any(not leaf.sharding.is_fully_replicated for leaf in values)


def test_a_run_does_not_change_the_dtype_of_its_moments(sft, tmp_path):
    sft(tmp_path / "run", max_steps=1)
    with pytest.raises(ValueError, match=r"moments_dtype: 'float32' -> 'bfloat16' \(not allowed\)"):
        sft(tmp_path / "run", moments_dtype="bfloat16", max_steps=2)
