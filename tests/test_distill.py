"""On-policy distillation: the divergence against a full softmax in float64, its limits, its gradient, its chunks."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxrl_lm.algos import token_weights
from jaxrl_lm.distill import DistillObjective, check_same_vocabulary, divergence, token_divergence
from jaxrl_lm.metrics import Sum, result
from jaxrl_lm.models import Model
from jaxrl_lm.types import Frozen, PolicyBatch
from jaxrl_lm.update import gradients

SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 2, 0],
        [0, 1, 1, 1, 1, 1, 1, 1, 1],
    ],
    np.int32,
)
ROWS, COLUMNS = SEGMENTS.shape
VOCABULARY, PADDED = 48, 56  # the teacher's table has rows that no token of the tokenizer has
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, SEGMENTS.shape).astype(np.int32)
PULL = np.random.default_rng(1).normal(size=SEGMENTS.shape).astype(np.float32)
REAL = np.pad((SEGMENTS[:, 1:] > 0) & (SEGMENTS[:, 1:] == SEGMENTS[:, :-1]), ((0, 0), (1, 0)))
KINDS = [("reverse", 1.0, 0.5), ("forward", 0.7, 0.5), ("jsd", 1.0, 0.3), ("jsd", 2.0, 0.9)]


class HeadOnly(Model):
    """A model without its layers; the width is its table's."""

    def hidden(self, params, tokens, positions, segment_ids):
        return params["embed"]["table"][tokens]


def weights(seed, width=32, vocabulary=VOCABULARY):
    rng = np.random.default_rng(seed)
    draw = lambda: jnp.asarray(rng.normal(size=(vocabulary, width)) * 0.4, jnp.float32)
    return {"embed": {"table": draw()}, "final_norm": {"scale": jnp.ones(width)}, "lm_head": {"table": draw()}}


STUDENT, TEACHER = weights(1), weights(2, 20, PADDED)


@pytest.fixture(scope="module")
def model(tiny_config):
    return HeadOnly(tiny_config)


@functools.partial(jax.jit, static_argnames=("model", "direction", "temperature", "beta", "chunk", "start"))
def pulled(params, teacher, **options):
    """(Σ pull · divergence and the divergence), and its gradient in both."""

    def total(params, teacher):
        found = token_divergence(
            params, teacher, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), teacher_model=options["model"], **options
        )
        return jnp.sum(PULL * found), found

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, teacher)


def torch_divergence(student, teacher, kind, temperature, beta):
    """Σ over the vocabulary, in float64, of the definition."""
    p, q = (torch.log_softmax(x[..., :VOCABULARY] / temperature, -1) for x in (teacher, student))
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)
    if kind == "reverse":
        return kl(q, p)
    if kind == "forward":
        return kl(p, q)
    mixture = torch.log(beta * p.exp() + (1 - beta) * q.exp())
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


@pytest.mark.parametrize(("kind", "temperature", "beta"), KINDS)
def test_values_and_gradient_are_those_of_the_full_logits(model, kind, temperature, beta):
    leaves = {name: torch.tensor(np.float64(STUDENT[name]["table"]), requires_grad=True) for name in STUDENT
              if name != "final_norm"}  # fmt: skip
    fixed = {name: torch.tensor(np.float64(TEACHER[name]["table"])) for name in leaves}
    logits = [tree["embed"][torch.tensor(TOKENS).long()] @ tree["lm_head"].T for tree in (leaves, fixed)]
    apart = torch.nn.functional.pad(torch_divergence(*logits, kind, temperature, beta)[:, :-1], (1, 0))
    expected = torch.where(torch.tensor(REAL), apart, 0.0)
    (torch.tensor(PULL) * expected).sum().backward()
    options = {"model": model, "direction": kind, "temperature": temperature, "beta": beta}
    (_, whole), grads = pulled(STUDENT, TEACHER, **options, chunk=2048)
    np.testing.assert_allclose(whole, expected.detach(), atol=2e-6)
    assert (np.asarray(whole)[~REAL] == 0).all()
    assert (np.asarray(whole)[REAL] > 0).all()
    for name, leaf in leaves.items():
        theirs = leaf.grad.numpy()
        np.testing.assert_allclose(grads[0][name]["table"], theirs, atol=1e-5 * np.abs(theirs).max())
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads[1]))
    # one column at a time, and 3, which does not divide 8
    for chunk in (1, 3 * ROWS) if kind == "reverse" else (3 * ROWS,):
        (_, cut), cut_grads = pulled(STUDENT, TEACHER, **options, chunk=chunk)
        np.testing.assert_allclose(cut, whole, atol=1e-6)
        for ours, theirs in zip(jax.tree.leaves(cut_grads), jax.tree.leaves(grads), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6 * max(np.abs(theirs).max(), 1e-3))


def test_columns_before_start_hold_zero(model):
    options = {"model": model, "direction": "reverse"}
    (_, whole), _ = pulled(STUDENT, TEACHER, **options)
    (_, late), _ = pulled(STUDENT, TEACHER, **options, start=4)
    assert (np.asarray(late)[:, :4] == 0).all()
    np.testing.assert_allclose(late[:, 4:], whole[:, 4:], atol=1e-6)


@pytest.mark.parametrize(("kind", "temperature", "beta"), KINDS[:3])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(model, kind, temperature, beta):
    """Exactly: neither value nor gradient is rounding noise."""
    options = {"model": model, "direction": kind, "temperature": temperature, "beta": beta}
    (_, apart), grads = pulled(STUDENT, STUDENT, **options)
    assert (np.asarray(apart) == 0).all()
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))


# --- the formula ------------------------------------------------------------------------------------------------------

CHANCES = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], jnp.float32))  # student, teacher


def test_by_hand():
    at = lambda **options: float(divergence(CHANCES[:1], CHANCES[1:], **options)[0])
    reverse = 0.5 * math.log(5) + 0.25 * math.log(2.5) + 0.25 * math.log(0.25 / 0.8)
    forward = 0.1 * math.log(0.2) + 0.1 * math.log(0.4) + 0.8 * math.log(3.2)
    assert at() == pytest.approx(reverse, rel=1e-6)
    assert at(direction="forward") == pytest.approx(forward, rel=1e-6)
    # GKD's limits: β of the forward one near 0, 1 − β of the reverse one near 1
    assert at(direction="jsd", beta=1e-3) / 1e-3 == pytest.approx(forward, rel=3e-3)
    assert at(direction="jsd", beta=1 - 1e-3) / 1e-3 == pytest.approx(reverse, rel=3e-3)
    swapped = divergence(CHANCES[1:], CHANCES[:1], direction="jsd", beta=0.7)
    assert at(direction="jsd", beta=0.3) == pytest.approx(float(swapped[0]), rel=1e-5)


@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_logits_far_apart_stay_finite(kind):
    student = jnp.array([[1e4, -1e4, 0.0], [0.0, 1.0, 2.0], [5.0, 5.0, 5.0]], jnp.float32)
    teacher = jnp.array([[-1e4, 1e4, 0.0], [1e4, 0.0, 0.0], [5.0, 5.0, 5.0]], jnp.float32)
    call = lambda x: divergence(x, teacher, direction=kind)
    found, slope = call(student), jax.grad(lambda x: call(x).sum())(student)
    assert np.isfinite(found).all()
    assert np.isfinite(slope).all()
    assert float(found[2]) == 0.0
    expected = {"reverse": 2e4, "forward": 2e4, "jsd": math.log(2)}[kind]
    assert float(found[0]) == pytest.approx(expected, rel=1e-6)


def test_small_gaps_keep_their_precision():
    """Half the variance of the gap of logits; each term alone is ten thousand times as large."""
    gap = jnp.array([1.0, -1.0, 0.5, -0.5]) * 2.0**-10
    expected = float(np.var(np.float64(gap))) / 2
    for kind, share in (("reverse", 1.0), ("forward", 1.0), ("jsd", 0.25)):
        found = divergence(gap[None], jnp.zeros((1, 4)), direction=kind)
        assert float(found[0]) == pytest.approx(share * expected, rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "both"}, "direction='both' is unknown: use reverse, forward, jsd"),
        ({"temperature": 0.0}, "temperature=0.0: above 0"),
        ({"direction": "jsd", "beta": 1.0}, "beta=1.0: above 0 and below 1"),
        ({"direction": "jsd", "beta": 0.0}, "beta=0.0: above 0 and below 1"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(divergence)(CHANCES[:1], CHANCES[1:], **options)


# --- memory -----------------------------------------------------------------------------------------------------------


def largest_array(jaxpr):
    """The number of elements of the largest intermediate, inner programs included."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size")]
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            sizes += [largest_array(inner)] if hasattr(inner, "eqns") else []
    return max(sizes)


def test_the_logits_of_the_batch_never_exist(model):
    student, teacher = weights(1, 4), weights(2, 4)
    largest = lambda chunk: largest_array(
        jax.make_jaxpr(lambda *trees: pulled.__wrapped__(*trees, model=model, chunk=chunk))(student, teacher).jaxpr
    )
    assert largest(ROWS) <= 2 * ROWS * VOCABULARY
    assert largest(2048) == ROWS * (COLUMNS - 1) * VOCABULARY  # so this test can fail


# --- the objective ----------------------------------------------------------------------------------------------------

PROMPT = 3
MASK = REAL & (np.arange(COLUMNS) >= PROMPT)
VALID = np.array([True, True, False, True])


def policy_batch(**fields):
    zero = jnp.zeros(SEGMENTS.shape, jnp.float32)
    every = {
        "tokens": jnp.asarray(TOKENS),
        "segment_ids": jnp.asarray(SEGMENTS),
        "action_mask": jnp.asarray(MASK),
        "weights": token_weights(jnp.asarray(MASK), valid=jnp.asarray(VALID)),
        "temperature": jnp.ones(ROWS),
        "old_logprobs": None,
        "sampler_logprobs": zero,
        "advantages": jnp.where(MASK, 1.0, jnp.nan),
        "ref_logprobs": None,
        "truncated": jnp.zeros(ROWS, bool),
        "valid": jnp.asarray(VALID),
    }
    return PolicyBatch(**every | fields)


@functools.partial(jax.jit, static_argnames=("objective", "model", "microbatches"))
def learn(params, teacher, batch, **options):
    return gradients({"policy": params}, Frozen(teacher=teacher), batch, **options)


def toy_policy(params, frozen, batch, *, model):
    """A loss that is told apart from the divergence, and a metric of its own."""
    loss = jnp.sum(batch.weights) * params["policy"]["final_norm"]["scale"][0]
    return 3.0 * loss, {"toy": Sum(loss)}


def test_the_objective_is_the_weighted_divergence_beside_the_policy(model):
    options = {"teacher_model": model, "completion_columns": COLUMNS - PROMPT, "coef": 0.5}
    batch = policy_batch()
    grads, metrics = learn(STUDENT, TEACHER, batch, objective=DistillObjective(**options), model=model, microbatches=1)
    (_, apart), _ = pulled(STUDENT, TEACHER, model=model, direction="reverse")
    mean = np.asarray(apart)[MASK & VALID[:, None]].mean()  # token-mean
    assert result(metrics) == pytest.approx({"distill/kl": mean, "loss": 0.5 * mean}, rel=1e-5)
    joint = {"objective": DistillObjective(**options, policy=toy_policy), "model": model}
    both, found = learn(STUDENT, TEACHER, batch, **joint, microbatches=1)
    assert result(found) == pytest.approx({"distill/kl": mean, "toy": 1.0, "loss": 0.5 * mean + 3.0}, rel=1e-5)
    scale = both["policy"].pop("final_norm")["scale"]
    np.testing.assert_allclose(scale, [3.0] + [0.0] * 31, rtol=1e-6)
    assert (np.asarray(grads["policy"].pop("final_norm")["scale"]) == 0).all()
    for ours, theirs in zip(jax.tree.leaves(both), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
    cut, parts = learn(STUDENT, TEACHER, batch, **joint, microbatches=2)
    assert result(parts) == pytest.approx(result(found), rel=1e-5)
    del cut["policy"]["final_norm"]
    for ours, theirs in zip(jax.tree.leaves(cut), jax.tree.leaves(both), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_rows_that_do_not_learn_leave_no_trace(model):
    objective = DistillObjective(teacher_model=model, completion_columns=COLUMNS - PROMPT, direction="jsd")
    call = lambda batch: learn(STUDENT, TEACHER, batch, objective=objective, model=model, microbatches=1)
    spoilt = jnp.where(VALID[:, None], TOKENS, 5), jnp.where(VALID[:, None], SEGMENTS, 1)
    first, second = call(policy_batch()), call(policy_batch(tokens=spoilt[0], segment_ids=spoilt[1]))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_a_teacher_is_needed(model):
    objective = DistillObjective(teacher_model=model, completion_columns=6)
    with pytest.raises(ValueError, match=r"distillation needs the teacher's weights: give Frozen\(teacher=…\)"):
        objective({"policy": STUDENT}, Frozen(), policy_batch(), model=model)


class Vocabulary:
    def __init__(self, *tokens):
        self.get_vocab = lambda: {token: number for number, token in enumerate(tokens)}


def test_another_vocabulary_is_refused():
    check_same_vocabulary(Vocabulary("a", "b", "c"), Vocabulary("a", "b", "c"))
    for other, message in (
        (Vocabulary("a", "x", "y"), "token 1 is 'b' to the policy's tokenizer and 'x' to this model's"),
        (Vocabulary("a", "b", "c", "d"), "token 3 is None to the policy's tokenizer and 'd' to this model's"),
        (Vocabulary("a", "b"), "token 2 is 'c' to the policy's tokenizer and None to this model's"),
    ):
        with pytest.raises(ValueError, match=message):
            check_same_vocabulary(Vocabulary("a", "b", "c"), other)
