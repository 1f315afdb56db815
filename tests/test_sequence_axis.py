"""Columns over the mesh's axis sequence: the numbers of one device, and the memory that the axis is there for."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sharding import assert_trees_close, host_params

from jaxrl_lm.distill import token_divergence
from jaxrl_lm.models import build, positions
from jaxrl_lm.score import by_columns, score, score_with_values, values
from jaxrl_lm.sharding import Plan, make_mesh

ROWS, COLUMNS = 8, 19  # which no axis divides
RNG = np.random.default_rng(1)
TOKENS = RNG.integers(0, 48, (ROWS, COLUMNS)).astype(np.int32)
# Left padding, two segments that meet at different columns, right padding.
_FIRST, _SECOND, _END = (RNG.integers(*of, (ROWS, 1)) for of in ((0, 5), (6, 15), (15, COLUMNS + 1)))
_AT = np.broadcast_to(np.arange(COLUMNS), TOKENS.shape)
SEGMENTS = ((_FIRST <= _AT) * (1 + (_SECOND <= _AT)) * (_END > _AT)).astype(np.int32)
WEIGHTS = RNG.normal(size=(2, ROWS, COLUMNS)).astype(np.float32)
HEAD = {"kernel": RNG.normal(size=(32, 1)).astype(np.float32)}


def facts(config, mesh, start):
    """Logits, scores, values and the gradient of their weighted sum, on a mesh."""
    plan = Plan(mesh)
    model = build(config, plan=plan)
    params = jax.device_put(host_params(model), plan.tree(model.specs))

    def everything(params, tokens, segments):
        hidden = model.hidden(params, tokens, positions(segments), segments)
        scores = score(params, tokens, segments, model=model, temperature=0.7, chunk=40, start=start)
        return jnp.where(segments[..., None] > 0, hidden, 0.0), scores

    def loss(params, tokens, segments):
        scores = score(params, tokens, segments, model=model, temperature=0.7, chunk=40, start=start)
        return sum(jnp.sum(weight * x) for weight, x in zip(WEIGHTS, scores, strict=True))

    def all_of_it(*given):
        return *everything(*given), jax.grad(loss)(*given)

    return jax.device_get(jax.jit(all_of_it)(params, *jax.device_put((TOKENS, SEGMENTS), plan.rows)))


@pytest.mark.parametrize(
    ("sizes", "start", "window"),
    [
        ({"sequence": 8}, 1, None),
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, 12, None),
        ({"data": 2, "sequence": 4}, 5, 3),
    ],
)
def test_states_scores_and_gradients_are_those_of_one_device(tiny_config, sizes, start, window):
    """Column t is a fact about token t, also where token t − 1 lies on another device."""
    config = dataclasses.replace(tiny_config, num_layers=2, sliding_window=window, remat="full")
    hidden, scores, gradient = facts(config, make_mesh(sizes), start)
    one = make_mesh({}, devices=jax.devices()[:1])
    expected_hidden, expected_scores, expected_gradient = facts(config, one, start)
    np.testing.assert_allclose(hidden, expected_hidden, atol=1e-5 * np.abs(expected_hidden).max(), rtol=0)
    np.testing.assert_allclose(scores.logprobs, expected_scores.logprobs, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(scores.entropy, expected_scores.entropy, atol=1e-5, rtol=1e-5)
    assert np.count_nonzero(expected_scores.logprobs) > ROWS * (COLUMNS - start) / 2
    assert_trees_close(gradient, expected_gradient, 1e-5)


def test_values_and_divergences_too(tiny_config):
    config = dataclasses.replace(tiny_config, num_layers=1)
    found = []
    for mesh in (make_mesh({}, devices=jax.devices()[:1]), make_mesh({"fsdp": 2, "sequence": 2, "tensor": 2})):
        plan = Plan(mesh)
        model = build(config, plan=plan)
        params = jax.device_put(host_params(model), plan.tree(model.specs))
        other = jax.device_put(jax.tree.map(lambda x: 0.5 * x, host_params(model)), plan.tree(model.specs))

        def everything(params, other, tokens, segments, model=model):
            apart = token_divergence(params, other, tokens, segments, model=model, teacher_model=model, chunk=16)
            given = {"model": model, "start": 3}
            shared = score_with_values(params, HEAD, tokens, segments, **given)
            return apart, values(HEAD, params, tokens, segments, **given), shared

        found.append(jax.device_get(jax.jit(everything)(params, other, *jax.device_put((TOKENS, SEGMENTS), plan.rows))))
    for ours, theirs in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize(("columns", "chunk"), [(1, 1000), (7, 1), (8, 8), (19, 8), (19, 24), (19, 1000)])
def test_chunks_of_split_columns_come_back_in_order(columns, chunk):
    plan = Plan(make_mesh({"data": 2, "sequence": 4}))
    x = np.arange(4.0 * columns).reshape(4, columns)
    widths = []

    def double(x, y):
        widths.append(x.shape)
        return {"sum": x + y[..., 0]}

    out = jax.jit(lambda *given: by_columns(double, *given, chunk=chunk, plan=plan))(x, x[..., None])
    np.testing.assert_array_equal(out["sum"], 2 * x)
    assert all(width % 4 == 0 and (width * 4 <= chunk or width == 4) for _, width in widths)


# --- memory -------------------------------------------------------------------------------------------------------------


def compiled(config, sizes, rows, columns):
    """The gradient of the scores, compiled for a mesh of the first devices."""
    devices = jax.devices()[: int(np.prod(list(sizes.values()) or [1]))]
    plan = Plan(make_mesh(sizes, devices=devices))
    model = build(config, plan=plan)
    layouts = plan.tree(model.specs)
    shaped = lambda spec, layout: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=layout)
    params = jax.tree.map(shaped, model.specs, layouts, is_leaf=lambda leaf: hasattr(leaf, "axes"))
    ids = jax.ShapeDtypeStruct((rows, columns), jnp.int32, sharding=plan.rows)
    loss = lambda *given: jnp.sum(score(*given, model=model, chunk=256, start=columns // 4).logprobs)
    return jax.jit(jax.grad(loss), out_shardings=layouts).lower(params, ids, ids).compile()


def largest(text):
    """Bytes of the largest array in a program."""
    size = {"f32": 4, "s32": 4, "pred": 1}
    shapes = re.findall(r"\b(f32|s32|pred)\[([\d,]+)\]", text)
    return max(size[kind] * int(np.prod([int(n) for n in dims.split(",")])) for kind, dims in shapes)


def test_the_largest_temporary_falls_with_the_axis(tiny_config):
    """What is of the columns falls with it; the weights of a device's own rows of attention fall as 1 / sequence."""
    config = dataclasses.replace(tiny_config, num_layers=1, remat="full")
    programs = {ways: compiled(config, {"sequence": ways}, 2, 512) for ways in (1, 2, 8)}
    sizes = {ways: largest(program.as_text()) for ways, program in programs.items()}
    temporary = {ways: program.memory_analysis().temp_size_in_bytes for ways, program in programs.items()}
    assert sizes[1] >= 2 * 4 * 512 * 512 * 4  # rows, heads, columns, columns, bytes
    assert [sizes[2], sizes[8]] == [sizes[1] // 2, sizes[1] // 8]
    # The keys and values of all columns, and their gradients, stay.
    assert temporary[2] < 0.7 * temporary[1]
    assert temporary[8] < 0.4 * temporary[1]
