"""Losses on preferences as float64 loops, one pair and one token at a time, written from the papers, and batches for them.

Gradients are central differences of these loops, so nothing here is differentiated by hand.
"""

import math

import numpy as np
from hypothesis import strategies as st

POISON = (math.nan, math.inf, -math.inf)
SHAPE = (4, 2, 5)
SIDES = st.sampled_from([(0,) * 5, (1,) * 5, (1, 0, 1, 1, 0), (0, 0, 1, 0, 0), (0, 1, 1, 1, 0)])


@st.composite
def batches(draw):
    """Log-probs of both policies with poison wherever the mask is off; ragged, holed, one-token and empty sides."""
    mask = np.array(
        [[draw(SIDES | st.tuples(*[st.integers(0, 1)] * 5)) for _ in range(2)] for _ in range(SHAPE[0])], bool
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = {name: -rng.gamma(2.0, 0.5, SHAPE) for name in ("logprobs", "ref", "old")}
    numbers["ref"] -= rng.normal(size=SHAPE) * draw(st.sampled_from([0.1, 3.0]))
    numbers = {name: np.where(mask, x, draw(st.sampled_from(POISON))) for name, x in numbers.items()}
    return numbers | {"mask": mask, "weights": rng.random(SHAPE[0]), "labels": rng.random(SHAPE[0]) < 0.5}


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x):
    return math.exp(log_sigmoid(x))


def side(row, mask, weights=None):
    """Σ of the tokens under the mask, each with the weight of its number among them."""
    tokens = [float(x) for x, here in zip(row, mask, strict=True) if here]
    weights = [1.0] * len(tokens) if weights is None else weights
    return math.fsum(w * x for w, x in zip(weights, tokens, strict=True))


def divergence(g, kind, alpha):
    """f′(e^g), the exponents along their tangent above 20."""

    def exponential(x):
        return math.exp(x) if x <= 20 else math.exp(20) * (1 + x - 20)

    if kind == "forward_kl":
        return 1 - exponential(-g)
    if kind == "js_divergence":
        return math.log(2) + log_sigmoid(g)
    if kind == "alpha_divergence" and alpha != 1:
        return (exponential((alpha - 1) * g) - 1) / (alpha - 1)
    return g


def facts(logprobs, ref, mask, o):
    """What a pair's loss is made of, as a dict; all 0 where a side has no token."""
    counts = [int(m.sum()) for m in mask]
    whole = min(counts) > 0
    out = {"whole": whole, "lengths": counts if whole else [0, 0], "pi": [0.0, 0.0], "ref": [0.0, 0.0]}
    for s in range(2) if whole else ():
        tail = o.get("ld_alpha")
        weights = [1.0 if tail is None or k < min(counts) else tail for k in range(counts[s])]
        out["pi"][s] = side(logprobs[s], mask[s], weights)
        out["ref"][s] = 0.0 if ref is None else side(ref[s], mask[s], weights)
    out["g"] = [p - q for p, q in zip(out["pi"], out["ref"], strict=True)]
    out["f"] = [divergence(g, o.get("f_divergence", "reverse_kl"), o.get("f_alpha", 0.5)) for g in out["g"]]
    out["mean"] = [x / max(n, 1) for x, n in zip(out["pi"], out["lengths"], strict=True)]
    return out


def pair(f, variant, o):
    """The loss of one pair from its facts; the ranks of the transport losses are in `dpo`."""
    beta, eps = o.get("beta", 0.1), o.get("label_smoothing", 0.0)
    (gw, gl), (lw, ll) = f["g"], f["lengths"]
    s = beta * (f["f"][0] - f["f"][1]) + o.get("length_alpha", 0.0) * (lw - ll)
    bce = lambda x: -(1 - eps) * log_sigmoid(x) - eps * log_sigmoid(-x)
    below = o.get("sft_length") or max(lw, 1)
    sft = -f["pi"][0] / below
    per_token = f["f"][0] / max(lw, 1) - f["f"][1] / max(ll, 1)
    if variant == "sigmoid":
        return bce(s)
    if variant == "sigmoid_norm":
        return bce(beta * per_token)
    if variant == "hinge":
        return max(0.0, 1 - s)
    if variant == "ipo":
        return (per_token - 1 / (2 * beta)) ** 2
    if variant == "robust":
        return (-(1 - eps) * log_sigmoid(s) + eps * log_sigmoid(-s)) / (1 - 2 * eps)
    if variant == "exo_pair":
        p, q = sigmoid(s), sigmoid(-s)
        return p * (log_sigmoid(s) - math.log(1 - eps)) + q * (log_sigmoid(-s) - math.log(eps))
    if variant == "nca_pair":
        rw, rl = beta * gw, beta * gl
        return -log_sigmoid(rw) - 0.5 * log_sigmoid(-rw) - 0.5 * log_sigmoid(-rl)
    if variant == "bco_pair":
        shift = o.get("reward_shift", 0.0)
        return -log_sigmoid(beta * gw - shift) - log_sigmoid(-(beta * gl - shift))
    if variant == "apo_zero":
        return 1 - sigmoid(beta * gw) + sigmoid(beta * gl)
    if variant == "apo_down":
        return sigmoid(beta * gw) + 1 - sigmoid(beta * (gw - gl))
    if variant == "sppo_hard":
        return (gw - 1 / (2 * beta)) ** 2 + (gl + 1 / (2 * beta)) ** 2
    if variant == "discopop":
        gate = sigmoid(s / o.get("discopop_tau", 0.05))
        return -log_sigmoid(s) * (1 - gate) + math.exp(-s) * gate
    if variant == "simpo":
        return bce(beta * (f["mean"][0] - f["mean"][1]) - (o.get("gamma", 0.5) if f["whole"] else 0.0))
    if variant == "cpo":
        return bce(beta * (f["pi"][0] - f["pi"][1])) + o.get("sft_weight", 1.0) * sft
    if variant == "orpo":
        odds = [min(m, -1e-6) - math.log(1 - math.exp(min(m, -1e-6))) for m in f["mean"]]
        return o.get("sft_weight", 1.0) * sft - beta * log_sigmoid(odds[0] - odds[1])
    assert variant == "sft", variant
    return sft


def dpo(logprobs, ref, mask, *, variant="sigmoid", **o):
    """The loss of each pair."""
    rows = [facts(logprobs[n], None if ref is None else ref[n], mask[n], o) for n in range(len(mask))]
    if variant not in ("aot", "aot_unpaired"):
        return np.array([pair(f, variant, o) for f in rows])
    whole = [n for n, f in enumerate(rows) if f["whole"]]
    if variant == "aot":
        upper = {n: rows[n]["pi"][0] - rows[n]["pi"][1] for n in whole}
        lower = [rows[n]["ref"][0] - rows[n]["ref"][1] for n in whole]
    else:
        upper = {n: rows[n]["g"][0] for n in whole}
        lower = [rows[n]["g"][1] for n in whole]
    out = np.full(len(rows), math.log(2))
    for n, low in zip(sorted(whole, key=upper.get), sorted(lower), strict=True):
        s, eps = o.get("beta", 0.1) * (upper[n] - low), o.get("label_smoothing", 0.0)
        out[n] = -(1 - eps) * log_sigmoid(s) - eps * log_sigmoid(-s)
    return out


def kto(logprobs, ref, mask, labels, kl, *, beta, desirable_weight, undesirable_weight):
    """λ_y − v(x, y) of each row."""
    out = []
    for n in range(len(mask)):
        g = side(logprobs[n], mask[n]) - side(ref[n], mask[n])
        if labels[n]:
            out.append(desirable_weight - desirable_weight * sigmoid(beta * (g - kl)))
        else:
            out.append(undesirable_weight - undesirable_weight * sigmoid(beta * (kl - g)))
    return np.array(out)


def kto_kl(logprobs, ref, mask):
    gaps = [side(logprobs[n], mask[n]) - side(ref[n], mask[n]) for n in range(len(mask)) if mask[n].any()]
    return max(0.0, math.fsum(gaps) / len(gaps)) if gaps else 0.0


def inpo(logprobs, ref, old, mask, *, eta, tau):
    """The squared error of each pair."""
    out = []
    for n in range(len(mask)):
        h = 0.0
        if mask[n].any(1).all():
            delta = lambda x, n=n: side(x[n][0], mask[n][0]) - side(x[n][1], mask[n][1])
            h = delta(logprobs) - tau / eta * delta(ref) - (eta - tau) / eta * delta(old)
        out.append((h - 1 / (2 * eta)) ** 2)
    return np.array(out)


def slopes(function, x, mask, weights, step=1e-5):
    """Central differences of Σ weight · function(x) in the entries of x under the mask, 0 elsewhere."""
    out = np.zeros(x.shape)
    for index in zip(*np.nonzero(mask), strict=True):
        ends = []
        for sign in (1, -1):
            moved = np.where(mask, x, 0.0)
            moved[index] += sign * step
            ends.append(float(weights @ function(moved)))
        out[index] = (ends[0] - ends[1]) / (2 * step)
    return out
