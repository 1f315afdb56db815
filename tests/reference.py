"""The formulas of the papers as float64 loops over plain numpy arrays, written without looking at the library.

Nothing is vectorised and nothing is shared with `jaxrl_lm.algos`, so that the two can only agree by both being right.
"""

import math
from fractions import Fraction

import numpy as np


def mean(values):
    return math.fsum(values) / len(values)


def std(values, ddof):
    if len(values) <= ddof:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - ddof))


def group_advantages(returns, *, group_size, scale="group", ddof=1, eps=1e-6, valid=None):
    """DeepSeekMath, section 4.1.2 (scale="group"); Dr. GRPO, section 3.2 (scale="none")."""
    rows = len(returns)
    valid = [True] * rows if valid is None else list(valid)
    batch = [float(returns[n]) for n in range(rows) if valid[n]]
    out = np.zeros(rows)
    for start in range(0, rows, group_size):
        members = [n for n in range(start, start + group_size) if valid[n]]
        group = [float(returns[n]) for n in members]
        if len(set(group)) < 2:
            continue
        for n in members:
            centred = float(returns[n]) - mean(group)
            below = {"group": std(group, ddof), "batch": std(batch, ddof), "none": None}[scale]
            out[n] = centred if below is None else centred / (below + eps)
    return out


def sequences(mask, segment_ids=None):
    """The (row, columns) of each sequence that has a token under the mask."""
    out = []
    for n in range(mask.shape[0]):
        ids = np.ones(mask.shape[1], int) if segment_ids is None else segment_ids[n]
        for segment in sorted(set(ids.tolist())):
            columns = [t for t in range(mask.shape[1]) if ids[t] == segment and mask[n, t]]
            if columns:
                out.append((n, columns))
    return out


def importance_ratio(logprobs, old_logprobs, mask, *, level="token", segment_ids=None):
    """PPO's ratio; GSPO eq. 7 and, in value the same, eq. 14."""
    out = np.ones(mask.shape)
    for n, columns in sequences(mask, segment_ids):
        gaps = [float(logprobs[n, t]) - float(old_logprobs[n, t]) for t in columns]
        for t, gap in zip(columns, gaps, strict=True):
            out[n, t] = math.exp(gap if level == "token" else mean(gaps))
    return out


def surrogate_token(ratio, advantage, clip_low, clip_high, dual_clip, delta):
    """(loss, d loss / d ratio) of one token; PPO eq. 7, dual clip, two-sided clip."""
    free, slope = (ratio, 1.0) if delta is None or ratio < delta else (delta, 0.0)
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    inner = 1.0 if bounded == ratio else 0.0
    objective, slope = min((free * advantage, slope * advantage), (bounded * advantage, inner * advantage))
    if dual_clip is not None and advantage < 0 and objective < dual_clip * advantage:
        objective, slope = dual_clip * advantage, 0.0
    return -objective, -slope


def clipped_surrogate(
    logprobs, old_logprobs, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None, delta=None,
    level="token", segment_ids=None,
):  # fmt: skip
    ratio = importance_ratio(logprobs, old_logprobs, mask, level=level, segment_ids=segment_ids)
    out = np.zeros(mask.shape)
    for n, columns in sequences(mask, segment_ids):
        for t in columns:
            out[n, t], _ = surrogate_token(ratio[n, t], float(advantages[n, t]), clip_low, clip_high, dual_clip, delta)
    return out


def clipped_surrogate_gradient(
    weights, logprobs, old_logprobs, advantages, mask, *, clip_low=0.2, clip_high=0.2, dual_clip=None, delta=None,
    level="token", segment_ids=None,
):  # fmt: skip
    """d (Σ weight · loss) / d logprobs by the chain rule of each level."""
    ratio = importance_ratio(logprobs, old_logprobs, mask, level=level, segment_ids=segment_ids)
    out = np.zeros(mask.shape)
    for n, columns in sequences(mask, segment_ids):
        terms = []
        for t in columns:
            _, slope = surrogate_token(ratio[n, t], float(advantages[n, t]), clip_low, clip_high, dual_clip, delta)
            terms.append(weights[n, t] * slope * ratio[n, t])
        for t, term in zip(columns, terms, strict=True):
            out[n, t] = math.fsum(terms) / len(columns) if level == "sequence" else term
    return out


def kl_token(logprob, ref_logprob, estimator):
    """(value, d value / d logprob) of one token (Schulman, 2020)."""
    gap = float(logprob) - float(ref_logprob)
    table = {"k1": (gap, 1.0), "k2": (gap * gap / 2, gap), "k3": (math.expm1(-gap) + gap, -math.expm1(-gap))}
    value, slope = table[estimator.rstrip("+")]
    return (value, gap) if estimator.endswith("+") else (value, slope)


def kl_estimate(logprobs, ref_logprobs, mask, *, estimator="k3"):
    """(values, derivatives), both 0 off the mask."""
    values, slopes = np.zeros(mask.shape), np.zeros(mask.shape)
    for n, columns in sequences(mask):
        for t in columns:
            values[n, t], slopes[n, t] = kl_token(logprobs[n, t], ref_logprobs[n, t], estimator)
    return values, slopes


def token_weights(mask, *, over="token-mean", length=None, valid=None, segment_ids=None):
    """DAPO eq. 8 (token-mean), DeepSeekMath eq. 3 (seq-mean-token-mean), Dr. GRPO (seq-mean-token-sum-norm)."""
    kept = np.array(mask, bool)
    for n in range(kept.shape[0]):
        if valid is not None and not valid[n]:
            kept[n] = False
    found = sequences(kept, segment_ids)
    tokens = sum(len(columns) for _, columns in found)
    out = np.zeros(kept.shape)
    for n, columns in found:
        for t in columns:
            out[n, t] = {
                "token-mean": 1 / tokens,
                "seq-mean-token-mean": 1 / (len(found) * len(columns)),
                "seq-mean-token-sum": 1 / len(found),
                "seq-mean-token-sum-norm": 1 / (len(found) * (length or 1)),
            }[over]
    return out


def pass_at_k(samples, correct, k):
    """Chen et al., 2021, eq. 1, in exact rational arithmetic."""
    return 1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k))
