"""Selection by scores against loops and enumeration, and the toy of over-optimisation."""

import importlib
import inspect
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_rewards as loops
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm.algos import selection
from jaxrl_lm.algos.passk import pass_at_k

POISON = (math.nan, math.inf, -math.inf)
beam_step = jax.jit(selection.beam_step, static_argnames="width")
best_of_n = jax.jit(selection.best_of_n)
weighted_majority = jax.jit(selection.weighted_majority)
expected_best_of_n = jax.jit(selection.expected_best_of_n, static_argnames="k")


def f32(x):
    return jnp.asarray(x, jnp.float32)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(POISON), st.sampled_from([1, 6]))
def test_choices_equal_their_loops_with_ties_infinities_and_gaps(seed, poison, n):
    rng = np.random.default_rng(seed)
    valid = rng.random((4, n)) < rng.choice([0.0, 0.5, 1.0], size=(4, 1))
    scores = rng.choice([-math.inf, -1e4, 0.0, 0.25, 1e4], size=(4, n))
    poisoned = np.where(valid, scores, poison).astype(np.float32)
    answers = rng.integers(0, 3, size=(4, n)).astype(np.int32)
    weights = rng.integers(0, 3, size=(4, n)) / 4
    for width in {1, n}:
        wanted = loops.beam(scores, valid, width)
        np.testing.assert_array_equal(beam_step(poisoned, width=width, valid=valid), wanted)
    np.testing.assert_array_equal(best_of_n(poisoned, valid=valid), [order[0] for order in wanted])
    given_weights = np.where(valid, weights, poison).astype(np.float32)
    got = weighted_majority(answers, given_weights, valid=valid)
    np.testing.assert_array_equal(got, loops.majority(answers, weights, valid))
    votes = weighted_majority(answers, valid=valid)
    np.testing.assert_array_equal(votes, loops.majority(answers, np.ones_like(weights), valid))


def test_choices_by_hand():
    scores = f32([[1, 3, 3, -2], [math.nan, -5, -math.inf, -7]])
    np.testing.assert_array_equal(selection.beam_step(scores, width=3), [[1, 2, 0], [1, 3, 2]])
    np.testing.assert_array_equal(selection.best_of_n(scores), [1, 1])
    answers = jnp.array([[7, 2, 2, 9], [4, 4, 4, 4]])
    np.testing.assert_array_equal(selection.weighted_majority(answers), [2, 4])
    np.testing.assert_array_equal(selection.weighted_majority(answers, f32([[1, 0.25, 0.5, 0.9]] * 2)), [7, 4])
    np.testing.assert_array_equal(selection.weighted_majority(answers, jnp.ones((2, 4)) / 3), [2, 4])  # equal weights


def test_two_steps_of_a_beam_find_the_best_leaf_that_keeps_the_beam():
    """Beams of 2, three continuations each: index // 3 is the beam that goes on."""
    rng = np.random.default_rng(1)
    first, second = rng.permutation(6)[None] / 6, rng.permutation(18).reshape(6, 3) / 18
    kept = np.asarray(selection.beam_step(f32(first), width=2))[0]
    grown = second[kept].reshape(1, 6)
    chosen = np.asarray(selection.beam_step(f32(grown), width=2))[0]
    assert set(kept) == set(np.argsort(first[0])[-2:])
    parents = kept[chosen // 3]
    np.testing.assert_allclose(second[parents, chosen % 3], sorted(second[kept].reshape(-1))[:-3:-1])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_expected_best_of_k_is_the_mean_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 4, size=(3, 6)) * rng.choice([1.0, 1e4])
    values = rng.normal(size=(3, 6))
    for k in (1, 3, 6):
        own, other = expected_best_of_n(f32(scores), k=k), expected_best_of_n(f32(scores), k=k, values=f32(values))
        wanted = [[loops.best_of_k(s, v, k) for s, v in zip(scores, x, strict=True)] for x in (scores, values)]
        np.testing.assert_allclose(own, wanted[0], rtol=1e-5, atol=1e-6 * np.abs(scores).max(initial=1.0))
        np.testing.assert_allclose(other, wanted[1], rtol=1e-5, atol=1e-5)


def test_expected_best_of_k_of_right_and_wrong_is_pass_at_k():
    for correct, k in ((0, 3), (3, 5), (10, 1), (1, 10)):
        right = f32([[1.0] * correct + [0.0] * (10 - correct)])
        assert float(expected_best_of_n(right, k=k)[0]) == pytest.approx(pass_at_k(10, correct, k), abs=1e-6)


def test_expected_best_of_k_keeps_its_precision_with_thousands_of_candidates():
    """Of the numbers 1..n the best of k is on average k (n + 1) / (k + 1)."""
    ranks = jnp.arange(1.0, 4097.0)[None]
    for k in (2, 64, 4096):
        assert float(expected_best_of_n(ranks, k=k)[0]) == pytest.approx(k * 4097 / (k + 1), rel=1e-5)


def test_the_mean_over_samples_of_expected_best_of_k_is_that_of_best_of_k():
    """Unbiased: all 4^4 samples of a policy over four responses, against the exact mean of the best of 2."""
    chance, reward = np.array([0.1, 0.4, 0.2, 0.3]), np.array([3.0, -1.0, 0.5, 0.5])
    draws = np.array(list(itertools.product(range(4), repeat=4)))
    estimate = np.asarray(expected_best_of_n(f32(reward[draws]), k=2), np.float64)
    pairs = np.array(list(itertools.product(range(4), repeat=2)))
    exact = np.prod(chance[pairs], axis=1) @ reward[pairs].max(1)
    assert np.prod(chance[draws], axis=1) @ estimate == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_the_kl_of_best_of_n(n):
    """On 20,000 equal responses with different scores: rank i is best of n with chance (i/M)^n − ((i−1)/M)^n."""
    size = 20_000
    edges = (np.arange(size + 1) / size) ** n
    best = np.diff(edges)
    exact = float(np.sum(best * np.log(np.maximum(best, 1e-300) * size)))
    assert selection.best_of_n_kl(n) == pytest.approx(exact, abs=2e-3)
    # With two scores only, the same formula is an upper bound.
    tied = np.array([0.5**n, 1 - 0.5**n])
    assert float(np.sum(tied * np.log(tied * 2))) <= selection.best_of_n_kl(n)


FAILURES = [
    (selection.beam_step, (jnp.zeros((1, 3)),), {"width": 4}, "width=4: between 1 and the 3 candidates"),
    (selection.beam_step, (jnp.zeros((1, 3)),), {"width": 0}, "width=0"),
    (selection.expected_best_of_n, (jnp.zeros((1, 3)),), {"k": 4}, "k=4: best-of-k from 3 candidates"),
    (selection.expected_best_of_n, (jnp.zeros((1, 3)),), {"k": 0}, "k=0"),
    (selection.best_of_n_kl, (0,), {}, "n=0"),
]


@pytest.mark.parametrize(("function", "arguments", "options", "words"), FAILURES)
def test_what_is_refused(function, arguments, options, words):
    with pytest.raises(ValueError, match=words):
        inspect.unwrap(function)(*arguments, **options)


# --- the toy of over-optimisation -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "examples")
        module = importlib.import_module("overoptimisation")
        patch.setattr(module, "BEST_OF", (1, 2, 4, 8, 24, 64, 192, 384))  # a program each
        yield module


@pytest.fixture(scope="module")
def small(toy):
    return toy.problems(jax.random.key(1), seeds=6, responses=2048)


@pytest.fixture(scope="module")
def found(toy, small):
    return toy.curves(*small[:2])


def test_the_peaks_of_the_laws(toy):
    assert toy.peak(1.0, 0.2, "d(α − βd)") == pytest.approx((2.5, 1.25))
    assert toy.peak(1.0, 0.3, "d(α − β ln d)") == pytest.approx((10.3123, 3.09368), rel=1e-5)
    assert toy.peak(1.0, -0.1, "d(α − βd)") == (math.inf, math.inf)
    d = np.linspace(0.0, 3.0, 40)
    for law, term in toy.LAWS.items():
        alpha, beta, rest = toy.fit(d, np.append(0.0, d[1:] * (0.7 - 0.4 * term(d[1:]))), law)
        assert (alpha, beta) == pytest.approx((0.7, 0.4))
        assert rest < 1e-12
        top, value = toy.peak(alpha, beta, law)
        assert top * (alpha - beta * term(top)) == pytest.approx(value)
        assert all(x * (alpha - beta * term(x)) < value for x in (0.95 * top, 1.05 * top))


def test_gold_rises_peaks_and_falls_while_the_proxy_rises(toy, found):
    """Surely so with the smallest proxy; a larger one is good for more, and its peak lies farther out."""
    for method in toy.METHODS:
        by_size = [[x.mean(0) for x in found[method, "one proxy", size]] for size in toy.SIZES]
        for distance, gold, proxy in by_size:
            assert (np.diff(distance) > 0).all()
            assert (np.diff(proxy) > 0).all()
            assert abs(gold[0]) < 0.05
        gold = by_size[0][1]
        at = gold.argmax()
        assert (np.diff(gold[: at + 1]) > 0).all()
        assert (np.diff(gold[at:]) < 0).all()
        assert gold[-1] < -0.5 < 0.2 < gold[at]
        tops = [(distance[gold.argmax()], gold.max()) for distance, gold, _ in by_size]
        assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(tops))


def test_the_curves_follow_the_exact_law_where_there_are_responses_enough(toy):
    """A linear proxy and a Gaussian policy: gold is d(α − βd) with the α and β of the direction."""
    x = jax.random.normal(jax.random.key(2), (1 << 15, toy.FEATURES))
    for direction in (toy.WEIGHTS, np.eye(toy.FEATURES)[0]):
        proxy = toy.standard((x @ f32(direction))[None])
        distance, gold, _ = map(np.asarray, toy.rl_curves(toy.gold_reward(x)[None], proxy, steps=12))
        alpha, beta = toy.exact_law(direction)
        assert distance[0, -1] > 0.9
        np.testing.assert_allclose(gold, distance * (alpha - beta * distance), atol=0.06)


def test_what_all_members_get_wrong_pessimism_cannot_see(toy, small, found):
    """Proxies of one number differ in nothing. Those of eight do, and what they learned is nearer to the truth together."""
    for method in toy.METHODS:
        same = [found[method, name, 1][1] for name in toy.REWARDS]
        np.testing.assert_allclose(same[1:], [same[0]] * 2, atol=1e-4)
        alone, pessimistic = (found[method, name, 8][1] for name in ("one proxy", "mean − std of 4"))
        assert np.abs(alone - pessimistic).max() > 0.02
    members = np.asarray(small[2])  # [seeds sizes 4 8]
    cosine = lambda x: x @ toy.WEIGHTS / np.linalg.norm(x, axis=-1)
    assert (cosine(members[:, 2].mean(1)) > cosine(members[:, 2]).mean(1)).all()
    assert (members[:, 0, :, 1:] == 0).all()
    assert (members[:, :, :, 0] > 0).all()


def test_the_toy_prints_and_draws(toy, small, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(toy, "problems", lambda key, **options: small)
    toy.main(str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    lines = [line.split("|")[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == (2 + 18) + (2 + 12)
    assert {line[0].strip() for line in lines} == {"method", "-" * 9, *toy.METHODS}
