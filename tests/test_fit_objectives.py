"""Objectives on given rows: loss and gradient against float64 loops through a model in torch; weights of the whole batch.

The model is causal and knows segments, but has no layers, so that torch's twin of it is three lines.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_preference as loops
import reference_rewards
import torch

from jaxrl_lm import fit_batches as batches
from jaxrl_lm.fit_objectives import ComparisonObjective, LabelledObjective, PreferenceObjective, UnpairedObjective
from jaxrl_lm.metrics import result
from jaxrl_lm.models import Model, build, trunk_model
from jaxrl_lm.objectives import SFTObjective
from jaxrl_lm.types import Frozen
from jaxrl_lm.update import gradients

ROWS, COLUMNS, PROMPT, VOCABULARY, WIDTH = 6, 9, 3, 48, 32
FILLER, HALF = 5, 4  # a row that fills the batch, a pair without a rejected side
LN2 = math.log(2)
RNG = np.random.default_rng(0)
LENGTHS = np.array([[4, 6], [6, 2], [1, 3], [5, 5], [4, 0], [6, 6]])  # of the completions
AT = np.arange(COLUMNS)
MASK = (AT >= PROMPT) & (PROMPT + LENGTHS[..., None] > AT)
SEGMENTS = (MASK | (AT < PROMPT)).astype(np.int32)
SEGMENTS[::2, :, 0] = 0  # left padding
TOKENS = RNG.integers(0, VOCABULARY, MASK.shape).astype(np.int32)
TOKENS[:, 1, :PROMPT] = TOKENS[:, 0, :PROMPT]
VALID = np.arange(ROWS) != FILLER
WHOLE = VALID & (np.arange(ROWS) != HALF)
REF, OLD = (np.where(MASK, -RNG.gamma(4.0, 1.0, MASK.shape), np.nan).astype(np.float32) for _ in range(2))
MARGIN = np.array([0.5, 0.0, 1.0, 0.2, 0.3, np.nan], np.float32)
LABELS = np.where(MASK[:, 0] & (AT % 2 == 0), RNG.integers(0, 5, (ROWS, COLUMNS)) / 4, -100).astype(np.float32)
LABEL_MASK = (LABELS >= 0) & VALID[:, None]


class Causal(Model):
    """The state of a token is tanh of the embeddings of its segment up to it, each half as heavy as the next."""

    def hidden(self, params, tokens, positions, segment_ids):
        gap = jnp.asarray(AT[:, None] - AT)
        seen = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (gap >= 0)[None]
        heavy = jnp.where(seen, 0.5 ** jnp.maximum(gap, 0)[None], 0.0)
        return jnp.tanh(heavy @ params["embed"]["table"][tokens])


class Twin:
    """The same in float64, with its gradient."""

    def __init__(self, params):
        self.leaves = jax.tree.map(lambda x: torch.tensor(np.float64(x), requires_grad=True), params)

    def hidden(self, tokens, segments):
        gap, ids = torch.tensor(AT[:, None] - AT), torch.tensor(segments)
        seen = (ids[:, :, None] == ids[:, None, :]) & (gap >= 0)
        heavy = torch.where(seen, 0.5 ** gap.clamp(min=0).double(), 0.0)
        return torch.tanh(heavy @ self.trunk["embed"]["table"][torch.tensor(tokens).long()])

    @property
    def trunk(self):
        return self.leaves["policy"] if "policy" in self.leaves else self.leaves["reward"]["trunk"]

    def logprobs(self, tokens, segments):
        """[N T] of rows; the first token of a row has none."""
        logits = self.hidden(tokens, segments) @ self.trunk["lm_head"]["table"].T
        chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, torch.tensor(tokens[:, 1:, None]).long())[..., 0]
        return torch.nn.functional.pad(chosen, (1, 0))

    def logits(self, tokens, segments):
        head = self.leaves["reward"]["head"]
        return self.hidden(tokens, segments) @ head["kernel"] + head.get("bias", 0.0)

    def assert_gradient(self, ours, theirs):
        """`theirs`: a loss, or a pair of log-probs and a loss's gradient in them."""
        theirs.backward() if isinstance(theirs, torch.Tensor) else theirs[0].backward(torch.tensor(theirs[1]))
        flat = zip(jax.tree.leaves(ours), jax.tree.leaves(self.leaves), strict=True)
        moved = [(a, b.grad.numpy()) for a, b in flat if b.grad is not None]
        assert moved
        for a, b in moved:
            np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


@pytest.fixture(scope="module")
def model(tiny_config):
    return Causal(tiny_config)


def tables(rng, *names):
    draw = lambda: jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)) * 0.3, jnp.float32)
    return {"embed": {"table": draw()}, "final_norm": {"scale": jnp.ones(WIDTH)}} | {
        n: {"table": draw()} for n in names
    }


@pytest.fixture(scope="module")
def policy():
    return {"policy": tables(np.random.default_rng(1), "lm_head")}


def reward_params(labels=1, seed=2, bias=False):
    rng = np.random.default_rng(seed)
    head = {"kernel": jnp.asarray(rng.normal(size=(WIDTH, labels)), jnp.float32)}
    if bias:
        head["bias"] = jnp.asarray(rng.normal(size=labels), jnp.float32)
    return {"reward": {"trunk": tables(rng), "head": head}}


@functools.partial(jax.jit, static_argnames=("objective", "model", "microbatches"))
def compiled(params, batch, **options):
    return gradients(params, Frozen(), batch, **options)


def run(params, batch, objective, model, microbatches=1):
    """(loss, gradient, metrics) of the objective."""
    grads, metrics = compiled(params, batch, objective=objective, model=model, microbatches=microbatches)
    grads, metrics = jax.device_get((grads, metrics))
    found = result(metrics)
    return found.pop("loss"), grads, found


# --- batches ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("name", "over", "over_tokens_sft", "per_row"))
def built(*arrays, name, **options):
    return getattr(batches, name)(*arrays, **options)


def build_batch(name, *arrays, **options):
    """Compiled, as in a run; of numpy arrays."""
    return jax.device_get(built(*arrays, name=name, **options))


def pairs(old=None, shift=None, ref=REF, **options):
    return build_batch("preference_batch", TOKENS, SEGMENTS, MASK, VALID, ref, old, shift, **options)


def unpaired(gap=0.1, rows=slice(None)):
    """Rows of the chosen sides; the KL's rows, of which the last fills, differ by `gap` a token."""
    labels = np.array([True, False, True, False, True, True])
    kl = (np.full((2, 4), -1.0, np.float32), np.full((2, 4), -1.0 - gap, np.float32), np.array([[1, 1, 1, 0], [0] * 4]))
    arrays = (x[rows] for x in (TOKENS[:, 0], SEGMENTS[:, 0], MASK[:, 0], labels, VALID, REF[:, 0]))
    return build_batch("unpaired_batch", *arrays, *kl[:2], kl[2].astype(bool))


def test_weights_of_pairs_come_from_the_whole_batch():
    batch = pairs(shift=np.float32(0.25), over_tokens_sft=True)
    np.testing.assert_array_equal(batch.weights, np.where(WHOLE, np.float32(1 / 4), 0))
    np.testing.assert_array_equal(batch.sft_length, [LENGTHS[WHOLE, 0].sum() / 4] * ROWS)
    np.testing.assert_array_equal(batch.reward_shift, [0.25] * ROWS)
    assert batch.old_logprobs is None
    assert pairs().sft_length is pairs().reward_shift is None


def test_weights_of_other_rows():
    batch = unpaired()
    np.testing.assert_array_equal(batch.weights, np.where(VALID, np.float32(1 / 5), 0))
    np.testing.assert_allclose(batch.kl, [0.3] * ROWS, rtol=1e-6)  # of the one row that has tokens
    assert float(unpaired(gap=-0.1).kl[0]) == 0.0
    batch = build_batch("comparison_batch", TOKENS, SEGMENTS * (LENGTHS[..., None] > 0), VALID, None)
    np.testing.assert_array_equal(batch.weights, np.where(WHOLE, np.float32(1 / 4), 0))
    for per_row in (False, True):
        weights = build_batch(
            "labelled_batch", TOKENS[:, 0], SEGMENTS[:, 0], LABELS, LABEL_MASK, per_row=per_row
        ).weights
        counts = LABEL_MASK.sum(1, keepdims=True)
        plain = LABEL_MASK / np.maximum(counts, 1) / (counts > 0).sum() if per_row else LABEL_MASK / LABEL_MASK.sum()
        np.testing.assert_allclose(weights, plain, rtol=1e-6)


@pytest.mark.parametrize("name", ["preference_batch", "unpaired_batch", "comparison_batch", "labelled_batch"])
def test_a_batch_of_fillers_has_no_weight(name):
    none = np.zeros(ROWS, bool)
    one = (TOKENS[:, 0], SEGMENTS[:, 0])
    arrays = {
        "preference_batch": (TOKENS, SEGMENTS, MASK, none, REF),
        "unpaired_batch": (*one, MASK[:, 0], none, none, REF[:, 0], REF[:, 0], REF[:, 0], MASK[:, 0] & False),
        "comparison_batch": (TOKENS, SEGMENTS, none, MARGIN),
        "labelled_batch": (*one, LABELS, MASK[:, 0] & False),
    }[name]
    batch = build_batch(name, *arrays)
    assert (np.asarray(batch.weights) == 0).all()
    if name == "unpaired_batch":
        assert (np.asarray(batch.kl) == 0).all()


def test_a_demonstration_is_learned_from_what_has_something_before_it():
    segments = np.array([[1, 1, 1, 2, 2, 0], [0, 1, 1, 1, 1, 1]], np.int32)
    mask = segments > 0
    predicted = np.array([[0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 1, 1]])
    for over, plain in (
        ("token-mean", predicted / 7),
        ("seq-mean-token-mean", predicted * np.array([[0, 1 / 2, 1 / 2, 0, 1, 0], [1 / 4] * 6]) / 3),
    ):
        batch = build_batch("sft_batch", TOKENS[:2, 0, :6], segments, mask, over=over)
        np.testing.assert_allclose(batch.weights, plain, rtol=1e-6)
    pair = build_batch("preference_batch", TOKENS[:1, :, :6], segments[None], mask[None], VALID[:1], None)
    np.testing.assert_array_equal(pair.action_mask[0], predicted.astype(bool))


def test_demonstrations(model, policy):
    rows = TOKENS[:, 0], SEGMENTS[:, 0]
    batch = build_batch("sft_batch", *rows, MASK[:, 0] & VALID[:, None])
    loss, grads, _ = run(policy, batch, SFTObjective(), model)
    twin, keep = Twin(policy), torch.tensor(MASK[:, 0] & VALID[:, None])
    theirs = -twin.logprobs(*rows)[keep].mean()
    assert loss == pytest.approx(theirs.item(), rel=1e-6)
    twin.assert_gradient(grads, theirs)


# --- pairs ------------------------------------------------------------------------------------------------------------

# options of the objective, of the batch, and (variant, weight, options) of each loop
PREFERENCES = {
    "sigmoid": (
        {"beta": 0.3, "label_smoothing": 0.1, "length_alpha": 0.2, "ld_alpha": 0.5},
        {},
        [("sigmoid", 1.0, {"beta": 0.3, "label_smoothing": 0.1, "length_alpha": 0.2, "ld_alpha": 0.5})],
    ),
    "f-divergence": (
        {"parts": (("hinge", 1.0),), "f_divergence": "alpha_divergence", "f_alpha": 0.7},
        {},
        [("hinge", 1.0, {"f_divergence": "alpha_divergence", "f_alpha": 0.7})],
    ),
    "mpo": (
        {"parts": (("sigmoid", 0.8), ("bco_pair", 0.2), ("sft", 1.0))},
        {"shift": np.float32(0.4), "over_tokens_sft": True},
        [("sigmoid", 0.8, {}), ("bco_pair", 0.2, {"reward_shift": 0.4}), ("sft", 1.0, {"sft_length": 4.0})],
    ),
    "simpo": (
        {"parts": (("simpo", 2.0),), "beta": 2.0, "gamma": 1.0},
        {"ref": None},
        [("simpo", 2.0, {"beta": 2.0, "gamma": 1.0})],
    ),
    "aot": (
        {"parts": (("aot", 1.0), ("discopop", 0.5)), "discopop_tau": 0.5},
        {},
        [("aot", 1.0, {}), ("discopop", 0.5, {"discopop_tau": 0.5})],
    ),
    "inpo": (
        {"parts": (("inpo", 3.0),), "eta": 0.5, "tau": 0.2},
        {"old": OLD},
        [("inpo", 3.0, {"eta": 0.5, "tau": 0.2})],
    ),
}


def pair_loops(parts, ref, logprobs):
    mask = MASK & WHOLE[:, None, None]

    def one(variant, options):
        if variant == "inpo":
            return loops.inpo(logprobs, np.float64(REF), np.float64(OLD), mask, **options)
        return loops.dpo(logprobs, ref if ref is None else np.float64(ref), mask, variant=variant, **options)

    return sum(weight * one(variant, options) for variant, weight, options in parts)


@pytest.mark.parametrize("name", PREFERENCES)
def test_pairs_equal_their_loops(model, policy, name):
    options, given, parts = PREFERENCES[name]
    assert LENGTHS[WHOLE, 0].mean() == 4.0  # sft_length of the loop
    twin, ref = Twin(policy), given.get("ref", REF)
    logprobs = twin.logprobs(TOKENS.reshape(-1, COLUMNS), SEGMENTS.reshape(-1, COLUMNS)).reshape(MASK.shape)
    values, weights = logprobs.detach().numpy(), WHOLE / 4
    objective = PreferenceObjective(**options, start=PROMPT)
    loss, grads, metrics = run(policy, pairs(**given), objective, model)
    assert loss == pytest.approx(weights @ pair_loops(parts, ref, values), rel=1e-5)
    inside = MASK & WHOLE[:, None, None]
    twin.assert_gradient(grads, (logprobs, loops.slopes(lambda x: pair_loops(parts, ref, x), values, inside, weights)))
    # TRL's metrics, over the four whole pairs
    average, tail = name == "simpo", options.get("ld_alpha")
    rewards = np.zeros((ROWS, 2))
    for n, s in zip(*np.nonzero(np.repeat(WHOLE[:, None], 2, 1)), strict=True):
        shorter, own = LENGTHS[n].min(), MASK[n, s]
        heavy = [1.0 if tail is None or k < shorter else tail for k in range(LENGTHS[n, s])]
        gap = loops.side(values[n, s], own, heavy) - (0.0 if ref is None else loops.side(REF[n, s], own, heavy))
        rewards[n, s] = options.get("beta", 0.1) * gap / (LENGTHS[n, s] if average else 1)
    sums = np.where(inside, values, 0).sum(2)
    for side, label in enumerate(("chosen", "rejected")):
        assert metrics[f"rewards/{label}"] == pytest.approx(rewards[WHOLE, side].mean(), rel=1e-4)
        assert metrics[f"logps/{label}"] == pytest.approx(sums[WHOLE, side].mean(), rel=1e-5)
    apart = rewards[WHOLE, 0] - rewards[WHOLE, 1]
    assert metrics["rewards/margins"] == pytest.approx(apart.mean(), rel=1e-4)
    assert metrics["rewards/accuracies"] == (apart > 0).mean()
    assert 0 < metrics["entropy"] < math.log(VOCABULARY)


def test_equal_sides_have_the_loss_ln_2_and_no_gradient(model, policy):
    same = lambda x: np.repeat(x[:, :1], 2, axis=1)
    arrays = tuple(map(same, (TOKENS, SEGMENTS, MASK)))
    batch = build_batch("preference_batch", *arrays, VALID, same(REF))
    usual = run(policy, batch._replace(ref_logprobs=REF), PreferenceObjective(), model)
    comparison = build_batch("comparison_batch", *arrays[:2], VALID, None)
    for params, found, objective in (
        (policy, batch, PreferenceObjective()),
        (reward_params(), comparison, ComparisonObjective()),
    ):
        loss, grads, _ = run(params, found, objective, model)
        assert loss == pytest.approx(LN2, rel=1e-6)
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads)) < 1e-8
    assert usual[0] != pytest.approx(LN2, rel=1e-3)


def test_options_that_cannot_be_met_are_refused(model, policy):
    with pytest.raises(ValueError, match="inpo stands alone"):
        PreferenceObjective(parts=(("inpo", 1.0), ("sft", 1.0)), eta=1.0, tau=0.1)
    for options in ({"parts": (("inpo", 1.0),)}, {"eta": 1.0}, {"eta": 1.0, "tau": 0.1}, {"tau": 0.1}):
        with pytest.raises(ValueError, match="both belong to inpo"):
            PreferenceObjective(**options)
    with pytest.raises(ValueError, match="inpo reads the log-probs of the reference and of the policy that sampled"):
        run(policy, pairs(), PreferenceObjective(parts=(("inpo", 1.0),), eta=1.0, tau=0.1), model)
    with pytest.raises(ValueError, match=r"no part of .* reads reward_shift: bco_pair do"):
        run(policy, pairs(shift=np.float32(1.0)), PreferenceObjective(), model)
    with pytest.raises(ValueError, match=r"no part of .* reads label_smoothing"):
        run(policy, pairs(), PreferenceObjective(parts=(("hinge", 1.0),), label_smoothing=0.1), model)


# --- judged completions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.1, -0.1])
def test_judged_completions_equal_their_loop(model, policy, gap):
    batch = unpaired(gap)
    options = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    twin, mask = Twin(policy), MASK[:, 0] & VALID[:, None]
    logprobs = twin.logprobs(TOKENS[:, 0], SEGMENTS[:, 0])
    values, labels, ref = logprobs.detach().numpy(), np.asarray(batch.labels), np.float64(REF[:, 0])
    loop = lambda x: loops.kto(x, ref, mask, labels, 0.3 if gap > 0 else 0.0, **options)
    loss, grads, metrics = run(policy, batch, UnpairedObjective(**options), model)
    assert loss == pytest.approx(VALID / 5 @ loop(values), rel=1e-5)
    twin.assert_gradient(grads, (logprobs, loops.slopes(loop, values, mask, VALID / 5)))
    sums = np.where(mask, values, 0).sum(1)
    rewards = 0.5 * (sums - np.where(mask, ref, 0).sum(1))
    for name, rows in (("chosen", labels & VALID), ("rejected", ~labels & VALID)):
        assert metrics[f"rewards/{name}"] == pytest.approx(rewards[rows].mean(), rel=1e-4)
        assert metrics[f"logps/{name}"] == pytest.approx(sums[rows].mean(), rel=1e-5)
    assert metrics["kl"] == pytest.approx(0.3 if gap > 0 else 0.0, rel=1e-6)


# --- reward models ----------------------------------------------------------------------------------------------------


def comparisons(margin=MARGIN):
    return build_batch("comparison_batch", TOKENS, SEGMENTS, VALID, margin)


def torch_scores(twin):
    rows = SEGMENTS.reshape(-1, COLUMNS)
    logits = twin.logits(TOKENS.reshape(-1, COLUMNS), rows)[..., 0]
    last = [np.flatnonzero(row).max() for row in rows]
    return logits[range(len(rows)), last].reshape(ROWS, 2)


@pytest.mark.parametrize("margin", [None, MARGIN], ids=["plain", "margin"])
def test_comparisons_equal_torch(model, margin):
    params = reward_params()
    twin = Twin(params)
    scores = torch_scores(twin)[VALID]
    gap = scores[:, 0] - scores[:, 1] - (0 if margin is None else torch.tensor(np.float64(margin[VALID])))
    log_sigmoid = torch.nn.functional.logsigmoid
    losses = -0.9 * log_sigmoid(gap) - 0.1 * log_sigmoid(-gap) + 0.01 * scores.sum(1) ** 2
    theirs = losses.mean()
    objective = ComparisonObjective(center=0.01, label_smoothing=0.1)
    loss, grads, metrics = run(params, comparisons(margin), objective, model)
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    twin.assert_gradient(grads, theirs)
    values = scores.detach().numpy()
    apart, lengths = values[:, 0] - values[:, 1], SEGMENTS.sum(2)[VALID]
    chances = [loops.sigmoid(abs(x)) for x in apart]
    assert metrics == pytest.approx(
        {
            "accuracy": (apart > 0).mean(),
            "margin": apart.mean(),
            "mean_reward": values.mean(),
            "length_reward_correlation": np.corrcoef(lengths.ravel(), values.ravel())[0, 1],
            "calibration_error": reference_rewards.calibration_error(chances, (apart > 0).astype(float).tolist(), 10),
        },
        rel=1e-4,
    )


def stack(*trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def test_members_learn_as_if_each_were_alone(tiny_config):
    """On the real model, whose layers are scanned below the members."""
    model = build(dataclasses.replace(tiny_config, num_layers=1))
    batch = comparisons()

    def member(seed):
        trunk = trunk_model(model).init(jax.random.key(seed))
        return {"reward": reward_params(seed=seed)["reward"] | {"trunk": trunk}}

    members = [member(seed) for seed in (0, 1, 2)]
    options = {"center": 0.05, "label_smoothing": 0.1}
    loss, grads, metrics = run(stack(*members), batch, ComparisonObjective(members=3, **options), model)

    losses, separate, _ = zip(*(run(one, batch, ComparisonObjective(**options), model) for one in members), strict=True)
    assert loss == pytest.approx(sum(losses), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(stack(*separate)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max() + 1e-9)
    for number, one in enumerate(separate[1:]):
        assert np.abs(one["reward"]["head"]["kernel"] - separate[number]["reward"]["head"]["kernel"]).max() > 1e-3
    assert metrics["ensemble_std"] > 0


def test_metrics_of_members_are_those_of_their_mean(model):
    members = [reward_params(seed=seed) for seed in (2, 3, 4)]
    _, _, metrics = run(stack(*members), comparisons(), ComparisonObjective(members=3), model)
    scores = np.stack([torch_scores(Twin(one)).detach().numpy() for one in members])[:, VALID]
    mean = scores.mean(0)
    assert metrics["mean_reward"] == pytest.approx(mean.mean(), rel=1e-4)
    assert metrics["accuracy"] == (mean[:, 0] > mean[:, 1]).mean()
    assert metrics["ensemble_std"] == pytest.approx(scores.std(0, ddof=1).mean(), rel=1e-5)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_labels_equal_torch(model, kind, bias):
    """Soft labels as probabilities of torch's cross-entropy; −100 where nothing is to be read."""
    params = reward_params({"outcome": 1, "process": 2}[kind], bias=bias)
    rows = TOKENS[:, 0], SEGMENTS[:, 0]
    batch = build_batch("labelled_batch", *rows, LABELS, LABEL_MASK, per_row=kind == "outcome")
    twin, targets = Twin(params), torch.tensor(np.float64(LABELS))
    logits = twin.logits(*rows)
    if kind == "outcome":
        z = logits[..., 0]
        terms = torch.nn.functional.binary_cross_entropy_with_logits(
            z, targets.clamp(min=0), reduction="none"
        )  # the mean over rows of each one's mean
        theirs = torch.stack([terms[n][LABEL_MASK[n]].mean() for n in np.flatnonzero(LABEL_MASK.any(1))]).mean()
    else:
        z = logits[..., 1] - logits[..., 0]
        soft = torch.stack([1 - targets, targets], -1)[LABEL_MASK]
        theirs = torch.nn.functional.cross_entropy(logits[LABEL_MASK], soft)
    loss, grads, metrics = run(params, batch, LabelledObjective(kind=kind), model)
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    twin.assert_gradient(grads, theirs)
    chances, labels = torch.sigmoid(z).detach().numpy()[LABEL_MASK], LABELS[LABEL_MASK]
    assert metrics == pytest.approx(
        {
            "accuracy": ((chances > 0.5) == (labels >= 0.5)).mean(),
            "mean_probability": chances.mean(),
            "mean_label": labels.mean(),
            "calibration_error": reference_rewards.calibration_error(chances.tolist(), labels.tolist(), 10),
        },
        rel=1e-4,
    )


def test_a_label_to_be_ignored_is_never_a_positive(model):
    """Off the mask −100 is not read; under it loss and gradient are NaN, with which `update` stops."""
    rows = TOKENS[:, 0], SEGMENTS[:, 0]
    call = lambda labels, mask: run(
        reward_params(), build_batch("labelled_batch", *rows, labels, mask), LabelledObjective(), model
    )
    assert call(LABELS, LABEL_MASK)[0] == call(np.where(LABEL_MASK, LABELS, 1.0).astype(np.float32), LABEL_MASK)[0]
    assert math.isnan(call(LABELS, MASK[:, 0])[0])


def test_a_head_of_another_kind_is_refused(model):
    batch = build_batch("labelled_batch", TOKENS[:, 0], SEGMENTS[:, 0], LABELS, LABEL_MASK)
    with pytest.raises(ValueError, match=r"kind='process' reads a head with 2 label\(s\); this one has 1"):
        run(reward_params(), batch, LabelledObjective(kind="process"), model)


# --- what holds for all -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mpo", "inpo", "unpaired", "members", "labels"])
def case(request, policy):
    """(parameters, objective, batch) of each kind."""
    name = request.param
    if name in PREFERENCES:
        options, given, _ = PREFERENCES[name]
        return policy, PreferenceObjective(**options), pairs(**given)
    if name == "unpaired":
        return policy, UnpairedObjective(), unpaired()
    if name == "labels":
        rows = TOKENS[:, 0], SEGMENTS[:, 0]
        batch = build_batch("labelled_batch", *rows, LABELS, LABEL_MASK, per_row=True)
        return reward_params(), LabelledObjective(), batch
    params = stack(reward_params(seed=2), reward_params(seed=3))
    return params, ComparisonObjective(members=2, center=0.1), comparisons()


@pytest.fixture(scope="module")
def whole(case, model):
    params, objective, batch = case
    return run(params, batch, objective, model)


def test_microbatches_change_nothing(case, whole, model):
    params, objective, batch = case
    loss, grads, metrics = run(params, batch, objective, model, 3)
    assert loss == pytest.approx(whole[0], rel=1e-5)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(whole[1]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max() + 1e-12)
    assert metrics == pytest.approx(whole[2], rel=1e-4, abs=1e-6)
    assert all(map(math.isfinite, metrics.values()))


def test_what_fills_the_batch_leaves_no_trace(case, whole, model):
    """Bit for bit, whatever stands in the row."""
    params, objective, batch = case
    at = np.arange(ROWS) == FILLER

    def spoil(name, x):
        x = np.array(x)
        if name == "tokens":
            x[at] = 7
        elif name == "segment_ids":
            x[at] = 1
        elif name in ("ref_logprobs", "old_logprobs", "margin", "labels"):
            x[at] = np.nan if x.dtype == np.float32 else ~x[at]
        elif name == "action_mask":
            x[at] = True
        return x

    fields = {name: spoil(name, x) for name, x in batch._asdict().items() if x is not None}
    loss, grads, metrics = run(params, batch._replace(**fields), objective, model)
    assert (loss, metrics) == (whole[0], whole[2])
    jax.tree.map(np.testing.assert_array_equal, grads, whole[1])


def test_a_batch_of_fillers_has_no_loss_no_gradient_and_no_metric(case, model):
    params, objective, batch = case
    loss, grads, metrics = run(params, batch._replace(weights=np.zeros_like(batch.weights)), objective, model)
    assert loss == 0.0
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))
    assert all(map(math.isnan, metrics.values()))
