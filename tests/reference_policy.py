"""Ratios, gates, corrections, entropy, token scales and weights as float64 loops, and the batches to compare them on.

Written from the papers, without looking at the library; one token at a time.
"""

import math

import numpy as np
from hypothesis import strategies as st
from reference import mean, sequences

POISON = (math.nan, math.inf, -math.inf)
SHAPE = (4, 6)
ROWS = st.sampled_from([(0,) * 6, (1,) * 6, (1, 0, 1, 1, 0, 1), (0, 0, 0, 1, 0, 0)])
SEGMENTS = st.sampled_from([(1, 1, 1, 1, 1, 1), (0, 1, 1, 2, 2, 2), (1, 1, 2, 2, 3, 0)])
ACTIONS = st.sampled_from([(1, 1, 1, 1, 1, 1), (1, 2, 3, 4, 5, 6), (1, 1, 2, 2, 2, 3), (0, 7, 7, 7, 1, 1)])
NAMES = ("logprobs", "old_logprobs", "advantages", "entropy")


@st.composite
def batches(draw):
    """Float32 arrays with poison wherever the mask is off, ids, and weights; every kind of ragged row."""
    mask = np.array([draw(ROWS | st.tuples(*[st.integers(0, 1)] * 6)) for _ in range(SHAPE[0])], bool)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch = {name: rng.normal(size=SHAPE) * 0.5 for name in NAMES}
    batch["entropy"] = np.abs(batch["entropy"])
    batch["logprobs"] -= 1.5
    batch["old_logprobs"] -= 1.5
    batch = {k: np.where(mask, v, draw(st.sampled_from(POISON))).astype(np.float32) for k, v in batch.items()}
    batch["segment_ids"] = np.tile(draw(SEGMENTS), (SHAPE[0], 1)).astype(np.int32)
    batch["action_ids"] = np.stack([draw(ACTIONS) for _ in range(SHAPE[0])]).astype(np.int32)
    batch["mask"] = mask
    batch["weights"] = np.where(mask, rng.random(SHAPE), 0.0).astype(np.float32)
    return batch


def actions(mask, action_ids, segment_ids=None):
    """The (row, columns) of each action: neighbours under the mask with equal id, within one segment."""
    out = []
    for n in range(mask.shape[0]):
        last = None
        for t in range(mask.shape[1]):
            if not mask[n, t]:
                continue
            here = (int(action_ids[n, t]), 0 if segment_ids is None else int(segment_ids[n, t]))
            if last != here:
                out.append((n, []))
            out[-1][1].append(t)
            last = here
    return out


def units(mask, level, segment_ids, action_ids):
    """The groups of tokens that share one log-ratio."""
    if level == "token":
        return [(n, [t]) for n, columns in sequences(mask) for t in columns]
    if level == "action":
        return actions(mask, action_ids, segment_ids)
    return sequences(mask, segment_ids)


def ratio_and_slopes(logprobs, old_logprobs, mask, *, level, segment_ids=None, action_ids=None, log_ratio_clip=None):
    """(ratio [N T], d ratio[n, t] / d logprob[n, s] [N T T])."""
    out, slopes = np.ones(mask.shape), np.zeros((*mask.shape, mask.shape[1]))
    for n, columns in units(mask, level, segment_ids, action_ids):
        gaps, inner = {}, {}
        for t in columns:
            gap = float(logprobs[n, t]) - float(old_logprobs[n, t])
            bound = math.inf if log_ratio_clip is None else log_ratio_clip
            gaps[t] = min(max(gap, -bound), bound)
            inner[t] = float(abs(gap) < bound)
        total = math.fsum(gaps.values())
        size = len(columns) if level in ("sequence", "sequence-token") else 1
        for t in columns:
            out[n, t] = math.exp(total / size)
            for s in columns:
                share = float(s == t) if level == "sequence-token" else 1 / size
                slopes[n, t, s] = out[n, t] * share * inner[s]
    return out, slopes


def through_ratio(weights, slope, slopes, mask):
    """d Σ weight · loss / d logprobs from d loss / d ratio."""
    out = np.zeros(mask.shape)
    for n in range(mask.shape[0]):
        for s in range(mask.shape[1]):
            out[n, s] = math.fsum(weights[n, t] * slope[n, t] * slopes[n, t, s] for t in np.flatnonzero(mask[n]))
    return out


def each(mask, function):
    """function(n, t) where the mask holds, 0 elsewhere."""
    out = np.zeros(mask.shape)
    for n, columns in sequences(mask):
        for t in columns:
            out[n, t] = function(n, t)
    return out


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def soft_gate(ratio, advantage, positive, negative):
    """(loss, d loss / d ratio) of one token; SAPO."""
    tau = positive if advantage > 0 else negative
    gate = sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * advantage


def sampler_correction(old, behaviour, mask, *, mode, cap, floor, segment_ids=None):
    out = np.zeros(mask.shape)
    level, action = mode.split("_")
    for n, columns in sequences(mask, segment_ids):
        gaps = [float(old[n, t]) - float(behaviour[n, t]) for t in columns]
        for t, gap in zip(columns, gaps, strict=True):
            ratio = math.exp(gap if level == "token" else math.fsum(gaps))
            high = math.inf if cap is None else cap
            if action == "truncate":
                out[n, t] = min(max(ratio, floor), high)
            elif floor <= ratio <= high:
                out[n, t] = ratio
    return out


def drift_mask(logprobs, sampler, advantages, mask, *, limit, segment_ids=None):
    out = np.zeros(mask.shape, bool)
    for n, columns in sequences(mask, segment_ids):
        drift = mean([float(sampler[n, t]) - float(logprobs[n, t]) for t in columns])
        for t in columns:
            out[n, t] = advantages[n, t] >= 0 or drift <= limit
    return out


def covariance(logprobs, advantages, mask):
    where = list(zip(*np.nonzero(mask), strict=True))
    if not where:
        return np.zeros(mask.shape)
    middle_l, middle_a = (mean([float(x[at]) for at in where]) for x in (logprobs, advantages))
    return each(mask, lambda n, t: (float(logprobs[n, t]) - middle_l) * (float(advantages[n, t]) - middle_a))


def largest(values, mask, share, count):
    """The ⌈share · count⌉ largest values under the mask, the first of equals."""
    where = sorted(zip(*np.nonzero(mask), strict=True), key=lambda at: (-values[at], at))
    out = np.zeros(mask.shape, bool)
    for at in where[: math.ceil(share * count - 1e-9)]:
        out[at] = True
    return out


def normalise_scale(scale, mask, segment_ids=None):
    out = np.zeros(mask.shape)
    for n, columns in sequences(mask, segment_ids):
        middle = mean([float(scale[n, t]) for t in columns])
        for t in columns:
            out[n, t] = float(scale[n, t]) / middle if middle else 1.0
    return out


def entropy_shaped_advantage(entropy, advantages, mask, *, alpha, kappa):
    """Cheng et al.: A + min(α H, |A| / κ)."""
    bonus = lambda n, t: min(alpha * float(entropy[n, t]), abs(float(advantages[n, t])) / kappa)
    return each(mask, lambda n, t: float(advantages[n, t]) + bonus(n, t))


def gtpo_scale(entropy, advantages, mask, *, group_size, share):
    def one(n, t):
        if advantages[n, t] == 0:
            return 1.0
        first = n - n % group_size
        same = [
            k
            for k in range(first, first + group_size)
            if mask[k, t] and np.sign(advantages[k, t]) == np.sign(advantages[n, t])
        ]
        weight = lambda k: float(entropy[k, t]) if advantages[n, t] > 0 else 1 / float(entropy[k, t])
        return 1 - share + share * weight(n) / math.fsum(weight(k) for k in same) * len(same)

    return each(mask, one)


def token_weights(mask, *, over, length, segment_ids=None, action_ids=None):
    """Each action is one term of the reduction; its weight is spread equally over its tokens."""
    found = sequences(mask, segment_ids)
    acts = actions(mask, action_ids, segment_ids)
    owner = {(n, t): i for i, (n, columns) in enumerate(found) for t in columns}
    inside = [sum(owner[n, columns[0]] == i for n, columns in acts) for i in range(len(found))]
    out = np.zeros(mask.shape)
    for n, columns in acts:
        weight = {
            "token-mean": 1 / len(acts),
            "seq-mean-token-mean": 1 / (len(found) * inside[owner[n, columns[0]]]),
            "seq-mean-token-sum": 1 / len(found),
            "seq-mean-token-sum-norm": 1 / (len(found) * length),
        }[over]
        for t in columns:
            out[n, t] = weight / len(columns)
    return out


def pack(x, fill):
    """Rows (0, 1) and (2, 3) end to end, a column of padding between them."""
    gap = np.full((1, 1), fill, x.dtype)
    return np.concatenate([np.concatenate([x[n : n + 1], gap, x[n + 1 : n + 2]], axis=1) for n in (0, 2)])


def unpack(x):
    width = (x.shape[1] - 1) // 2
    return np.concatenate([np.stack([row[:width], row[width + 1 :]]) for row in np.asarray(x)])


def packed_example():
    """(rows, packed rows): the same four sequences, with ids of actions that come back in the next segment."""
    rng = np.random.default_rng(3)
    rows = {name: rng.normal(size=(4, 5)).astype(np.float32) * 0.4 for name in NAMES}
    rows["entropy"] = np.abs(rows["entropy"])
    rows["mask"] = np.array([[0, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]], bool)
    rows["action_ids"] = np.array([[1, 1, 1, 2, 2], [2, 2, 2, 3, 3], [1, 1, 1, 1, 1], [5, 5, 5, 5, 6]], np.int32)
    fills = {"mask": False, "action_ids": 2}
    packed = {name: pack(x, fills.get(name, np.nan)) for name, x in rows.items()}
    packed["segment_ids"] = np.tile([1] * 5 + [0] + [2] * 5, (2, 1)).astype(np.int32)
    return rows, packed
