"""Masked reductions against loops, whatever lies under the mask; metrics of parts merged equal those of the whole."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm import masked
from jaxrl_lm.metrics import (
    CalibrationError,
    Correlation,
    Max,
    Mean,
    Min,
    Sum,
    correlation_of,
    max_of,
    mean_of,
    merge,
    min_of,
    result,
)

SHAPE = (3, 5)
POISON = (math.nan, math.inf, -math.inf)


@st.composite
def arrays(draw):
    """Values with poison wherever the mask is off; masks with holes, full, empty and one-token rows."""
    rows = st.sampled_from([(0,) * 5, (1,) * 5, (1, 0, 1, 0, 1), (0, 0, 1, 0, 0)]) | st.tuples(*[st.integers(0, 1)] * 5)
    mask = np.array(draw(st.tuples(rows, rows, rows)), bool)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = np.where(mask, rng.normal(size=SHAPE), draw(st.sampled_from(POISON)))
    return x.astype(np.float32), mask


def reduce_all(x, mask):
    rows = {
        "sum": masked.sum(x, mask, 1),
        "mean": masked.mean(x, mask, 1),
        "std": masked.std(x, mask, 1),
        "population std": masked.std(x, mask, 1, ddof=0),
    }
    whole = {"sum": masked.sum(x, mask), "mean": masked.mean(x, mask), "std": masked.std(x, mask)}
    total = sum(jnp.sum(v) for v in [*rows.values(), *whole.values()])
    return total, (rows, whole, masked.centre(x, mask, 1))


reduce_jitted = jax.jit(jax.value_and_grad(reduce_all, has_aux=True))


@settings(max_examples=25, deadline=None)
@given(arrays())
def test_reductions_equal_loops_and_no_poison_gets_through(drawn):
    x, mask = drawn
    (_, (rows, whole, centred)), gradient = reduce_jitted(x, mask)
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~mask] == 0).all()
    kept = [[float(v) for v in x[n][mask[n]]] for n in range(SHAPE[0])]
    loops = {
        "sum": math.fsum,
        "mean": lambda values: reference.mean(values) if values else 0.0,
        "std": lambda values: reference.std(values, 1),
        "population std": lambda values: reference.std(values, 0),
    }
    for name, got in rows.items():
        np.testing.assert_allclose(got, [loops[name](values) for values in kept], atol=1e-6, err_msg=name)
    for name, got in whole.items():
        np.testing.assert_allclose(got, loops[name]([*itertools.chain(*kept)]), atol=1e-6, err_msg=name)
    for n, values in enumerate(kept):
        expected = np.zeros(SHAPE[1])
        expected[mask[n]] = [v - reference.mean(values) for v in values]
        np.testing.assert_allclose(centred[n], expected, atol=1e-6)


def test_select_is_float32_at_least_and_takes_integers_and_booleans():
    mask = jnp.array([True, False])
    assert masked.select(jnp.ones(2, jnp.bfloat16), mask).dtype == jnp.float32
    assert masked.select(jnp.array([3, 4]), mask, -jnp.inf).tolist() == [3.0, -math.inf]
    assert masked.select(jnp.array([True, True]), mask, 7.0).tolist() == [1.0, 7.0]


def test_axes_and_keepdims():
    x, mask = jnp.arange(6.0).reshape(2, 3), jnp.ones((2, 3), bool)
    for function in (masked.sum, masked.mean, masked.std):
        assert function(x, mask).shape == ()
        assert function(x, mask, 0).shape == (3,)
        assert function(x, mask, 1, True).shape == (2, 1)
        assert function(x, mask, keepdims=True).shape == (1, 1)
    assert masked.std(x, mask, 0).tolist() == pytest.approx([math.sqrt(4.5)] * 3, rel=1e-6)


def test_a_large_common_offset_costs_no_precision():
    small = np.arange(16) % 7 / 8
    x, mask = jnp.asarray(small + 1e6, jnp.float32), jnp.ones(16, bool)
    assert (np.asarray(x, np.float64) - 1e6 == small).all()  # every value is representable
    assert float(masked.std(x, mask)) == pytest.approx(reference.std(small.tolist(), 1), rel=1e-6)
    np.testing.assert_allclose(masked.centre(x, mask), small - small.mean(), atol=1e-6)


def test_spread_of_equal_or_few_values_is_zero_with_a_finite_gradient():
    for values, on, ddof in (([2.0, 2.0, 2.0], 3, 1), ([5.0, 1.0, 1.0], 1, 1), ([5.0, 1.0, 1.0], 0, 0)):
        x, mask = jnp.array(values), jnp.arange(3) < on
        value, gradient = jax.value_and_grad(lambda x, mask=mask, ddof=ddof: masked.std(x, mask, ddof=ddof))(x)
        assert float(value) == 0.0
        assert gradient.tolist() == [0.0, 0.0, 0.0]


# --- metrics --------------------------------------------------------------------------------------------------------


def measure(x, mask):
    return {
        "mean": mean_of(x, mask),
        "sum": Sum(masked.sum(x, mask)),
        "max": max_of(x, mask),
        "min": min_of(x, mask),
    }


def test_merged_parts_equal_the_whole_although_the_parts_differ_in_size():
    rng = np.random.default_rng(0)
    mask = rng.random((6, 5)) < np.array([[0.9], [0.1], [0.5], [0.0], [1.0], [0.3]])
    x = np.where(mask, rng.integers(-8, 9, size=(6, 5)) / 4, np.nan).astype(np.float32)
    x, mask = jnp.asarray(x), jnp.asarray(mask)
    whole = result(measure(x, mask))
    merged = measure(x[:1], mask[:1])
    for start, stop in ((1, 3), (3, 4), (4, 6)):  # row 3 is empty
        merged = merge(merged, measure(x[start:stop], mask[start:stop]))
    kept = np.asarray(x)[np.asarray(mask)].astype(float)
    assert result(merged) == whole
    assert whole == {"mean": kept.mean(), "sum": kept.sum(), "max": kept.max(), "min": kept.min()}
    means = [result(measure(x[n : n + 1], mask[n : n + 1]))["mean"] for n in (0, 1, 2, 4, 5)]
    assert abs(np.nanmean(means) - whole["mean"]) > 1e-3  # averaging the parts' means would be wrong here


def test_what_was_not_measured_is_nan():
    x = jnp.array([math.nan, math.inf])
    empty = result(measure(x, jnp.zeros(2, bool)))
    assert math.isnan(empty["mean"])
    assert math.isnan(empty["max"])
    assert math.isnan(empty["min"])
    assert empty["sum"] == 0.0


def test_infinities_and_nan_that_were_measured_are_shown():
    found = result(measure(jnp.array([1.0, math.inf]), jnp.ones(2, bool)))
    assert found["max"] == found["mean"] == math.inf
    assert found["min"] == 1.0
    assert result({"min": min_of(jnp.array([1.0, -math.inf]), jnp.ones(2, bool))})["min"] == -math.inf
    bad = measure(jnp.array([1.0, math.nan]), jnp.ones(2, bool))
    good = measure(jnp.array([3.0, 4.0]), jnp.ones(2, bool))
    for merged in (merge(bad, good), merge(good, bad)):
        assert all(math.isnan(value) for value in result(merged).values())


def related(x, y, mask):
    """Two bins: below one half and from there on."""
    bins = jnp.stack([mask & (x < 0.5), mask & (x >= 0.5)])
    sums = lambda values: jnp.sum(jnp.where(bins, values[None], 0.0), axis=1)
    return {
        "correlation": correlation_of(x, y, mask),
        "calibration": CalibrationError(sums(jnp.ones_like(x)), sums(x), sums(y)),
    }


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_relations_of_two_variables_merge(offset):
    """Over parts of unequal size, one of them empty and one of a single value; poison lies under the mask."""
    rng = np.random.default_rng(0)
    mask = rng.random(24) < 0.7
    mask[8:12], mask[23] = False, True
    y = rng.random(24)
    x = np.where(mask, 0.3 * y + 0.7 * rng.random(24), np.nan).astype(np.float32)
    shifted = (x + offset).astype(np.float32)
    parts = [(0, 7), (7, 8), (8, 12), (12, 23), (23, 24)]
    y = jnp.asarray(np.where(mask, y, np.inf), jnp.float32)

    def measured(part):
        found, moved = (related(jnp.asarray(values)[part], y[part], jnp.asarray(mask)[part]) for values in (x, shifted))
        return found | {"moved": moved["correlation"]}

    first, *rest = (measured(slice(*ends)) for ends in parts)
    found = result(functools.reduce(merge, rest, first))
    a, b, c = np.float64(x)[mask], np.float64(y)[mask], np.float64(shifted)[mask]
    assert found["correlation"] == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-5)
    assert found["moved"] == pytest.approx(np.corrcoef(c, b)[0, 1], abs=1e-3)
    gaps = [abs((b - a)[where].sum()) for where in (a < 0.5, a >= 0.5)]
    assert found["calibration"] == pytest.approx(sum(gaps) / mask.sum(), rel=1e-5)
    whole = result(measured(slice(None)))
    assert found == pytest.approx(whole, abs=1e-3)


def test_relations_that_were_not_measured_are_nan():
    none, one = jnp.zeros(3, bool), jnp.ones(3, bool)
    x = jnp.array([0.1, 0.2, 0.7])
    empty = related(x, x, none)
    assert all(math.isnan(value) for value in result(empty).values())
    assert math.isnan(result({"flat": correlation_of(jnp.full(3, 0.1), x, one)})["flat"])
    both = result(merge(empty, related(x, x, one)))
    assert both == pytest.approx({"correlation": 1.0, "calibration": 0.0}, abs=1e-6)
    assert isinstance(merge(empty, empty)["correlation"], Correlation)
    with pytest.raises(KeyError, match="correlation"):
        merge(empty, empty | {"correlation": mean_of(x, one)})


def test_different_metrics_do_not_merge():
    one = jnp.ones(())
    with pytest.raises(KeyError, match=r"\['b', 'c'\]"):
        merge({"a": Sum(one), "b": Sum(one)}, {"a": Sum(one), "c": Sum(one)})
    for a, b in ((Mean(one, one), Sum(one)), (Max(one), Min(one))):
        with pytest.raises(KeyError, match="'a'"):
            merge({"a": a}, {"a": b})


def test_metrics_pass_through_jit_and_scan():
    x = jnp.arange(12.0).reshape(3, 4)
    mask = x > 2.5

    def add(total, part):
        return merge(total, measure(*part)), None

    merged, _ = jax.lax.scan(add, measure(x[0], mask[0]), (x[1:], mask[1:]))
    assert result(merged) == {"mean": 7.0, "sum": 63.0, "max": 11.0, "min": 3.0}
