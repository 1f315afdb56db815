"""Heads of critics and classifiers against plain loops over the hidden states. Directories: `test_classifiers.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_lm.models import Model, build, heads, positions
from jaxrl_lm.models.hf_table import flatten
from jaxrl_lm.score import score, score_with_values, values
from jaxrl_lm.sharding import Plan, make_mesh

SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 2, 2, 2, 3, 3, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)
ROWS, COLUMNS = SEGMENTS.shape
TOKENS = np.random.default_rng(0).integers(0, 48, SEGMENTS.shape).astype(np.int32)
HEAD = {"kernel": np.random.default_rng(1).normal(size=(32, 1)).astype(np.float32)}
PULL = np.random.default_rng(2).normal(size=(3, *SEGMENTS.shape)).astype(np.float32)
is_spec = lambda leaf: hasattr(leaf, "axes")
shapes = lambda tree: jax.tree.map(lambda leaf: tuple(leaf.shape), tree, is_leaf=is_spec)


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(dataclasses.replace(tiny_config, num_layers=2))


@pytest.fixture(scope="module")
def params(model):
    """Weights that all count, from numpy, which compiles nothing."""
    rng = np.random.default_rng(0)
    one = lambda spec: jnp.asarray((spec.init == "ones") + rng.normal(0, 0.2, spec.shape), jnp.float32)
    return jax.tree.map(one, model.specs, is_leaf=is_spec)


class HeadOnly(Model):
    """The tiny model without its layers, which counts its forward passes while it is traced."""

    calls = 0

    def hidden(self, params, tokens, positions, segment_ids):
        HeadOnly.calls += 1
        return params["embed"]["table"][tokens]


@pytest.fixture(scope="module")
def table_only(model):
    return HeadOnly(model.config)


@jax.jit(static_argnums=1)
def run_hidden(params, model):
    segments = jnp.asarray(SEGMENTS)
    return model.hidden(params, jnp.asarray(TOKENS), positions(segments), segments)


@jax.jit(static_argnums=(2, 3))
def run_values(head, params, model, start=1):
    return values(head, params, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), model=model, start=start)


def plain_values(hidden, segments, kernel, start=1):
    """What values() says it gives, by loops in float64."""
    out = np.zeros(segments.shape)
    for n, t in np.ndindex(*segments.shape):
        if t >= start and segments[n, t] > 0 and segments[n, t] == segments[n, t - 1]:
            out[n, t] = np.float64(hidden[n, t - 1]) @ np.float64(kernel[:, 0])
    return out


# --- values -----------------------------------------------------------------------------------------------------------


def test_values_are_the_head_on_the_state_before_each_token(model, params):
    found = run_values(HEAD, params, model)
    assert found.dtype == jnp.float32
    expected = plain_values(run_hidden(params, model), SEGMENTS, HEAD["kernel"])
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert np.abs(expected).max() > 1
    first = np.pad(SEGMENTS[:, :-1], ((0, 0), (1, 0))) != SEGMENTS
    empty = first | (SEGMENTS == 0)
    assert (np.asarray(found)[empty] == 0).all()
    assert (np.asarray(found)[~empty] != 0).all()


def test_a_value_knows_nothing_of_its_token_and_what_follows(model, params):
    found = run_values(HEAD, params, model)
    changed = TOKENS.copy()
    changed[0, 5:] = (changed[0, 5:] + 7) % 48
    again = jax.jit(lambda t: values(HEAD, params, t, jnp.asarray(SEGMENTS), model=model))(changed)
    np.testing.assert_array_equal(again[0, :6], found[0, :6])
    assert (np.asarray(again)[0, 6:] != np.asarray(found)[0, 6:]).all()


def test_packed_segments_have_the_values_of_separate_rows(model, params):
    tokens, segments = np.zeros_like(TOKENS), np.zeros_like(SEGMENTS)
    for segment in (1, 2, 3):
        inside = SEGMENTS[4] == segment
        tokens[segment, : inside.sum()], segments[segment, : inside.sum()] = TOKENS[4, inside], 1
    separate = jax.jit(lambda t, s: values(HEAD, params, t, s, model=model))(tokens, segments)
    packed = np.asarray(run_values(HEAD, params, model))[4]
    for segment in (1, 2, 3):
        inside = SEGMENTS[4] == segment
        np.testing.assert_allclose(separate[segment, : inside.sum()], packed[inside], atol=1e-5)


@pytest.mark.parametrize("start", [1, 4, COLUMNS - 1])
def test_columns_before_start_hold_zero(table_only, params, start):
    found = run_values(HEAD, params, table_only, start)
    expected = plain_values(params["embed"]["table"][TOKENS], SEGMENTS, HEAD["kernel"], start)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("start", [0, COLUMNS])
def test_a_start_outside_the_row_is_refused(table_only, params, start):
    with pytest.raises(ValueError, match=rf"start={start} is outside \[1, {COLUMNS}\)"):
        run_values(HEAD, params, table_only, start)


def test_one_forward_pass_gives_scores_and_values(table_only, params):
    """And the gradients of both, for chunks that divide nothing."""
    arrays = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
    options = {"temperature": jnp.linspace(0.5, 2.0, ROWS), "chunk": 3 * ROWS, "start": 2}

    def together(trees):
        return score_with_values(*trees, *arrays, model=table_only, **options)

    def apart(trees):
        own = values(trees[1], trees[0], *arrays, model=table_only, start=2)
        return score(trees[0], *arrays, model=table_only, **options), own

    def run(both):
        def total(trees):
            scores, own = both(trees)
            return sum(jnp.sum(pull * x) for pull, x in zip(PULL, (*scores, own), strict=True)), (scores, own)

        HeadOnly.calls = 0
        return *jax.jit(jax.grad(total, has_aux=True))((params, HEAD)), HeadOnly.calls

    gradient, outputs, calls = run(together)
    expected_gradient, expected, separate_calls = run(apart)
    assert (calls, separate_calls) == (1, 2)
    for ours, theirs in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * max(np.abs(theirs).max(), 1e-3))
    assert np.abs(gradient[1]["kernel"]).max() > 0


def test_a_head_beside_tied_embeddings_is_its_own(tiny_config, table_only, params):
    """Its gradient reaches the trunk through the hidden states, never as a row of the table."""
    tied = HeadOnly(dataclasses.replace(tiny_config, tie_embeddings=True))
    trunk = {name: leaf for name, leaf in params.items() if name != "lm_head"}
    np.testing.assert_array_equal(run_values(HEAD, trunk, tied), run_values(HEAD, params, table_only))
    total = lambda head, trunk: jnp.sum(PULL[0] * run_values(head, trunk, tied))
    kernel, table = jax.grad(total, argnums=(0, 1))(HEAD, trunk)
    weights = np.where(plain_values(np.ones((*SEGMENTS.shape, 32)), SEGMENTS, HEAD["kernel"]) != 0, PULL[0], 0)
    by_token = np.zeros(48)
    for n, t in np.argwhere(weights != 0):
        by_token[TOKENS[n, t - 1]] += weights[n, t]
    np.testing.assert_allclose(table["embed"]["table"], by_token[:, None] * HEAD["kernel"].T, atol=1e-5)
    expected = np.float64(params["embed"]["table"]).T @ by_token
    np.testing.assert_allclose(kernel["kernel"][:, 0], expected, atol=1e-5)


def test_a_fresh_head_gives_zero_and_leaves_the_trunk_alone_but_learns(model, table_only, params):
    head = heads.init_value_head(model.config)
    assert shapes(head) == shapes(heads.value_specs(model.config)) == {"kernel": (32, 1)}
    assert heads.init_value_head(model.config, "bfloat16")["kernel"].dtype == jnp.bfloat16
    loss = lambda head, params: jnp.sum((run_values(head, params, table_only) - PULL[0]) ** 2)
    assert (np.asarray(run_values(head, params, table_only)) == 0).all()
    head_gradient, gradient = jax.grad(loss, argnums=(0, 1))(head, params)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(gradient))
    assert np.abs(head_gradient["kernel"]).min() > 0


def test_values_are_float32_from_bfloat16_states():
    hidden = jnp.asarray(np.random.default_rng(3).normal(size=(5, 32)), jnp.bfloat16)
    found = heads.apply(HEAD, hidden)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.float64(hidden) @ np.float64(HEAD["kernel"][:, 0]), atol=1e-5)
    half = {"kernel": jnp.asarray(HEAD["kernel"], jnp.bfloat16)}
    assert heads.apply(half, hidden[0]).shape == ()


def test_eight_devices_give_the_values_of_one(model, params):
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    wide = build(heads.trunk_model(model).config, plan=plan)
    layouts = plan.tree(heads.critic_specs(model))
    _, critic = heads.critic(model, params)
    critic = jax.device_put(critic | {"head": HEAD}, layouts)
    assert critic["head"]["kernel"].is_fully_replicated
    found = run_values(critic["head"], critic["trunk"], wide)
    np.testing.assert_allclose(found, run_values(HEAD, params, model), atol=2e-5)


# --- critics ----------------------------------------------------------------------------------------------------------


def test_a_critic_has_the_hidden_states_and_no_unembedding(model, params):
    trunk, critic = heads.critic(model, params)
    assert "lm_head" in params
    assert shapes(critic) == shapes(heads.critic_specs(model)) == shapes(heads.critic_specs(trunk))
    assert set(flatten(critic["trunk"])) == set(flatten(params)) - {"lm_head.table"}
    np.testing.assert_array_equal(run_hidden(critic["trunk"], trunk), run_hidden(params, model))
    assert (np.asarray(run_values(critic["head"], critic["trunk"], trunk)) == 0).all()


def test_row_scores_read_the_last_token(model, params):
    run = jax.jit(lambda c: heads.row_scores(c, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), model=model))
    hidden = np.float64(run_hidden(params, model))
    last = [max(np.flatnonzero(row), default=None) for row in SEGMENTS]
    assert last == [8, 8, 4, 7, 7, None, 4, 1]
    expected = [0.0 if t is None else hidden[n, t] @ np.float64(HEAD["kernel"][:, 0]) for n, t in enumerate(last)]
    np.testing.assert_allclose(run({"trunk": params, "head": HEAD}), expected, atol=2e-5)


# --- classifiers ------------------------------------------------------------------------------------------------------


def test_token_logits_are_the_head_on_the_state_of_each_token(model, params):
    """After it has read the token: a critic's value of the next one."""
    head = {"kernel": np.random.default_rng(4).normal(size=(32, 2)).astype(np.float32)}
    biased = head | {"bias": np.array([0.5, -2.0], np.float32)}
    arrays = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
    run = jax.jit(lambda head: heads.token_logits({"trunk": params, "head": head}, *arrays, model=model))
    hidden, real = np.float64(run_hidden(params, model)), SEGMENTS[:, :, None] > 0
    for given, bias in ((head, np.zeros(2)), (biased, biased["bias"])):
        found = run(given)
        assert found.dtype == jnp.float32
        assert found.shape == (ROWS, COLUMNS, 2)
        expected = np.where(real, hidden @ np.float64(head["kernel"]) + bias[None, None], 0.0)
        np.testing.assert_allclose(found, expected, atol=5e-5)
        assert (np.asarray(found)[SEGMENTS == 0] == 0).all()
    one = run(HEAD)
    assert one.shape == SEGMENTS.shape
    before = np.asarray(run_values(HEAD, params, model))
    same = (SEGMENTS[:, 1:] > 0) & (SEGMENTS[:, 1:] == SEGMENTS[:, :-1])
    np.testing.assert_allclose(np.asarray(one)[:, :-1][same], before[:, 1:][same], atol=2e-5)


@pytest.mark.parametrize("kind", ["row_scores", "token_logits"])
def test_nan_states_of_padding_reach_neither_scores_nor_gradients(table_only, params, kind):
    """Token 0 stands on padding alone, and its row of the table is NaN."""
    table = params["embed"]["table"].at[0].set(jnp.nan)
    tokens, segments = jnp.where(SEGMENTS > 0, TOKENS % 47 + 1, 0), jnp.asarray(SEGMENTS)

    def total(head, table):
        classifier = {"trunk": {"embed": {"table": table}}, "head": head}
        return jnp.sum(getattr(heads, kind)(classifier, tokens, segments, model=table_only) ** 2)

    value, (gradient, of_table) = jax.value_and_grad(total, argnums=(0, 1))(HEAD, table)
    assert np.isfinite(value)
    assert np.isfinite(of_table).all()
    assert np.isfinite(gradient["kernel"]).all()
    assert np.abs(gradient["kernel"]).min() > 0


def test_a_drawn_head_has_the_stated_spread_and_its_key(model):
    wide = dataclasses.replace(model.config, hidden_size=4095)
    head = heads.init_head(wide, labels=3, bias=True, key=jax.random.key(5))
    assert shapes(head) == shapes(heads.head_specs(wide, labels=3, bias=True)) == {"kernel": (4095, 3), "bias": (3,)}
    kernel = np.float64(head["kernel"])
    assert kernel.std() == pytest.approx(1 / 64, rel=0.02)  # 12285 draws: 0.6 % a standard error
    assert kernel.mean() == pytest.approx(0, abs=5e-4)
    assert (np.asarray(head["bias"]) == 0).all()
    jax.tree.map(
        np.testing.assert_array_equal, heads.init_head(wide, labels=3, key=jax.random.key(5)), {"kernel": kernel}
    )
    assert (np.asarray(heads.init_head(wide, labels=3, key=jax.random.key(6))["kernel"]) != kernel).any()
    assert heads.init_head(wide, key=jax.random.key(6), dtype="bfloat16")["kernel"].dtype == jnp.bfloat16
    zero = heads.init_head(wide, labels=2, bias=True)
    assert all((np.asarray(leaf) == 0).all() for leaf in zero.values())


def test_stacked_declarations_keep_the_layout_of_each_member(model):
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    specs = heads.classifier_specs(model, labels=2, bias=True)
    many = heads.stacked(specs, 3)
    assert shapes(many) == jax.tree.map(lambda spec: (3, *spec.shape), specs, is_leaf=is_spec)
    same = lambda one, two: (None, *one.spec) == tuple(two.spec)
    assert jax.tree.all(jax.tree.map(same, plan.tree(specs), plan.tree(many)))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.init == b.init, specs, many, is_leaf=is_spec))
