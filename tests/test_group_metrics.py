"""Metrics over groups: exact values, a loop reference, and what must not change them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.group_metrics import group_metrics

NAN = float("nan")
NAMES = ("0", "0-25", "25-50", "50-75", "75-100", "100")


def shares(found, name):
    return [found[f"{name}/{bucket}"] for bucket in NAMES]


def test_exact_values():
    # right of four: 0, 1, 2, 3, 4, 2
    right = [0, 1, 2, 3, 4, 2]
    returns = np.array([float(n < r) for r in right for n in range(4)])
    advantages = np.repeat([0.0, 1.0, 2.0, 3.0, 0.0, 1.0], 4)
    texts = ["a", "b", "a", "b"] * 3 + ["c", "c", "c", "c"] + ["d", "e", "f", "g"] * 2
    found = group_metrics(returns, np.ones(24, bool), advantages, texts, 4)
    assert shares(found, "solve_rate") == pytest.approx([1 / 6, 1 / 6, 2 / 6, 1 / 6, 0, 1 / 6])
    assert shares(found, "advantage_share") == pytest.approx([0, 1 / 15, 5 / 15, 9 / 15, 0, 0])
    # Σ(r − mean)² = 4 p (1 − p): 3/4 for one or three of four, 1 for two of four
    assert shares(found, "advantage_share_unscaled") == pytest.approx([0, 0.75 / 3.5, 2 / 3.5, 0.75 / 3.5, 0, 0])
    assert found["distinct_answers"] == (2 * 3 + 1 + 4 * 2) / 6
    assert found["distinct_completions"] == 7 / 24
    assert len(found) == 20


@pytest.mark.parametrize(
    ("right", "size", "bucket"),
    [
        *[(right, 8, bucket) for right, bucket in enumerate([0, 1, 1, 2, 2, 3, 3, 4, 5])],
        *[(1, 3, 2), (2, 3, 3), (1, 5, 1), (4, 5, 4), (1, 1, 5), (0, 1, 0), (1, 2, 2), (250, 1000, 1), (251, 1000, 2)],
    ],
)
def test_edges_of_the_buckets(right, size, bucket):
    returns = (np.arange(size) < right).astype(float)
    found = group_metrics(returns, np.ones(size, bool), np.zeros(size), [""] * size, size)
    assert shares(found, "solve_rate") == [float(b == bucket) for b in range(6)]


def test_the_threshold_decides_what_is_right():
    returns = np.array([0.4, 0.6, 0.8, 1.0])
    found = lambda **options: shares(
        group_metrics(returns, np.ones(4, bool), returns, [""] * 4, 4, **options), "solve_rate"
    )
    assert found() == [0, 0, 0, 1, 0, 0]
    assert found(threshold=0.4) == [0, 0, 0, 0, 0, 1]
    assert found(threshold=0.9) == [0, 1, 0, 0, 0, 0]


def test_answers_are_read_out_of_texts():
    texts = ["so 3", "thus 3", "4", "I do not know"]
    read = lambda text: next((word for word in text.split() if word.isdigit()), None)
    returns = np.zeros(4)
    assert group_metrics(returns, returns == 0, returns, texts, 4, answer=read)["distinct_answers"] == 2
    assert group_metrics(returns, returns == 0, returns, texts, 2, answer=read)["distinct_answers"] == 1
    assert group_metrics(returns, returns == 0, returns, texts, 4)["distinct_answers"] == 4


def test_nothing_to_divide_by_is_nan():
    found = group_metrics(np.full(4, 0.1), np.ones(4, bool), np.zeros(4), ["a"] * 4, 2)
    assert shares(found, "solve_rate") == [1, 0, 0, 0, 0, 0]
    assert all(math.isnan(x) for x in shares(found, "advantage_share"))
    # 0.1 three times has no exact mean: rounding must not look like a share
    found = group_metrics(np.full(3, 0.1), np.ones(3, bool), np.zeros(3), ["a"] * 3, 3)
    assert all(math.isnan(x) for x in shares(found, "advantage_share_unscaled"))
    found = group_metrics(np.zeros(4), np.zeros(4, bool), np.zeros(4), ["a"] * 4, 2)
    assert all(math.isnan(x) for x in shares(found, "solve_rate"))


def test_rows_that_do_not_fit_are_refused():
    for count, size in ((5, 2), (0, 2), (4, 0)):
        with pytest.raises(ValueError, match=f"{count} rows are not a whole number of groups of {size}"):
            group_metrics(np.zeros(count), np.ones(count, bool), np.zeros(count), [""] * count, size)
    with pytest.raises(ValueError, match="3 texts for 4 rows"):
        group_metrics(np.zeros(4), np.ones(4, bool), np.zeros(4), [""] * 3, 2)


def reference(returns, valid, advantages, size):
    """Counts and sums per bucket, by loops."""
    totals = {"solve_rate": [0.0] * 6, "advantage_share": [0.0] * 6, "advantage_share_unscaled": [0.0] * 6}
    for g in range(0, len(returns), size):
        rows = [n for n in range(g, g + size) if valid[n]]
        if not rows:
            continue
        p = sum(returns[n] >= 0.5 for n in rows) / len(rows)
        b = 0 if p == 0 else 5 if p == 1 else next(i for i in range(1, 5) if p <= i / 4)
        mean = math.fsum(returns[n] for n in rows) / len(rows)
        totals["solve_rate"][b] += 1
        totals["advantage_share"][b] += math.fsum(advantages[n] ** 2 for n in rows)
        totals["advantage_share_unscaled"][b] += math.fsum((returns[n] - mean) ** 2 for n in rows)
    return {name: [x / sum(t) if sum(t) else NAN for x in t] for name, t in totals.items()}


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_masks_against_the_reference(data):
    size, groups = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    rows = size * groups
    draw = lambda values: np.array(data.draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)))
    returns, valid, advantages = (
        draw([0.0, 0.25, 0.5, 1.0, 1e6]),
        draw([True, True, False]),
        draw([-2.0, 0.0, 0.5, 3.0]),
    )
    expected = reference(returns, valid, advantages, size)
    hidden = draw([NAN, np.inf, -np.inf])
    found = group_metrics(
        np.where(valid, returns, hidden),
        valid,
        np.where(valid, advantages, hidden).astype(np.float32),
        [str(n % 3) for n in range(rows)],
        size,
    )
    for name, values in expected.items():
        np.testing.assert_allclose(shares(found, name), values, rtol=1e-9, atol=1e-12)
    assert found["distinct_completions"] == min(3, rows) / rows
    assert found["distinct_answers"] == min(3, size)
