"""Reward models, step labels and selection as float64 loops, written from the papers without looking at the library."""

import itertools
import math

import numpy as np
from reference import mean, std


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x):
    return math.exp(log_sigmoid(x))


def reward_model(scores, *, margin=None, center=0.0, label_smoothing=0.0, valid=None):
    """Ouyang et al., 2022, eq. 1; Llama 2, eq. 2; (loss [N], its gradient [N 2])."""
    loss, slope = np.zeros(len(scores)), np.zeros((len(scores), 2))
    for n, (chosen, rejected) in enumerate(scores.astype(np.float64)):
        if valid is None or valid[n]:
            gap = chosen - rejected - (0.0 if margin is None else float(np.broadcast_to(margin, len(scores))[n]))
            loss[n] = -(1 - label_smoothing) * log_sigmoid(gap) - label_smoothing * log_sigmoid(-gap)
            loss[n] += center * (chosen + rejected) ** 2
            pull = -(1 - label_smoothing) * sigmoid(-gap) + label_smoothing * sigmoid(gap)
            slope[n] = [sign * pull + 2 * center * (chosen + rejected) for sign in (1, -1)]
    return loss, slope


def ensemble(scores, *, how, k=1.0):
    columns = [[float(v) for v in column] for column in scores.T]
    one = {"mean": mean, "min": min, "pessimistic": lambda values: mean(values) - k * std(values, 1)}[how]
    return np.array([one(column) for column in columns])


def cross_entropy(z, y):
    """(loss, its slope in z)."""
    return -y * log_sigmoid(float(z)) - (1 - y) * log_sigmoid(-float(z)), sigmoid(float(z)) - y


def outcome(logits, labels, mask, *, per_token):
    loss, slope = np.zeros(mask.shape), np.zeros(mask.shape)
    for n, row in enumerate(mask):
        read = np.nonzero(row)[0]
        for t in read if per_token else read[-1:]:
            loss[n, t], slope[n, t] = cross_entropy(logits[n, t], float(labels[n]))
    return loss, slope


def process(logits, labels, mask):
    """Of [N T]; of [N T 2] as the cross-entropy of the softmax, its gradient by class."""
    loss, slope = np.zeros(mask.shape), np.zeros(logits.shape)
    for n, t in zip(*np.nonzero(mask), strict=True):
        y = float(labels[n, t])
        if logits.ndim == 2:
            loss[n, t], slope[n, t] = cross_entropy(logits[n, t], y)
            continue
        wrong, right = map(float, logits[n, t])
        top = max(wrong, right)
        total = top + math.log(math.exp(wrong - top) + math.exp(right - top))
        loss[n, t] = total - y * right - (1 - y) * wrong
        slope[n, t] = math.exp(wrong - total) - (1 - y), math.exp(right - total) - y
    return loss, slope


def calibration_error(probabilities, labels, bins):
    """Guo et al., 2017, eq. 3, of lists."""
    error = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(probabilities) if min(int(p * bins), bins - 1) == b]
        if inside:
            gap = mean([labels[i] for i in inside]) - mean([probabilities[i] for i in inside])
            error += len(inside) / len(probabilities) * abs(gap)
    return error


# --- steps ------------------------------------------------------------------------------------------------------------


def monte_carlo(successes, *, kind, beta=None, valid):
    out = np.full(len(successes), math.nan)
    for n, row in enumerate(successes):
        kept = [float(v) for v, stands in zip(row, valid[n], strict=True) if stands]
        if kept and kind == "soft":
            out[n] = mean(kept)
        elif kept and kind == "hard":
            out[n] = float(any(v >= 0.5 for v in kept))
        elif kept:
            top = max(kept)
            out[n] = top + beta * math.log(mean([math.exp((v - top) / beta) for v in kept]))
    return out


def rows_of(mask, segment_ids):
    """The (row, columns) of each sequence of each row, in order."""
    for n in range(mask.shape[0]):
        for _, run in itertools.groupby(np.nonzero(mask[n])[0], key=lambda t, n=n: segment_ids[n, t]):
            yield n, list(run)


def shaping(potentials, mask, *, discount, segment_ids):
    out = np.zeros(mask.shape)
    for n, columns in rows_of(mask, segment_ids):
        for t, after in itertools.zip_longest(columns, columns[1:]):
            following = 0.0 if after is None else float(potentials[n, after])
            out[n, t] = discount * following - float(potentials[n, t])
    return out


def step_potentials(scores, ends, mask, *, start, segment_ids):
    out = np.zeros(mask.shape)
    for n, columns in rows_of(mask, segment_ids):
        last = start
        for t in columns:
            out[n, t] = last
            last = float(scores[n, t]) if ends[n, t] else last
    return out


def mean_credit(rewards, ends, mask):
    out = np.zeros(mask.shape)
    for n in range(mask.shape[0]):
        steps = [t for t in range(mask.shape[1]) if ends[n, t] and mask[n, t]]
        for t in steps:
            out[n, t] = float(rewards[n, t]) / len(steps)
    return out


def implicit(logprobs, ref_logprobs, mask, *, beta, ends=None, segment_ids):
    out = np.zeros(mask.shape)
    for n, columns in rows_of(mask, segment_ids):
        step = 0.0
        for t in columns:
            step += beta * (float(logprobs[n, t]) - float(ref_logprobs[n, t]))
            if ends is None or ends[n, t]:
                out[n, t], step = step, 0.0
    return out


# --- selection --------------------------------------------------------------------------------------------------------


def beam(scores, valid, width):
    """Python's sort is stable."""
    ranked = [sorted((i for i in range(len(row)) if valid[n][i]), key=lambda i, row=row: -row[i])
              for n, row in enumerate(scores)]  # fmt: skip
    return [(order + [-1] * width)[:width] for order in ranked]


def majority(answers, weights, valid):
    out = []
    for n, row in enumerate(answers):
        totals = {}
        for i, answer in enumerate(row):
            if valid[n][i]:
                totals[int(answer)] = totals.get(int(answer), 0.0) + float(weights[n][i])
        out.append(max(totals, key=totals.get) if totals else -1)  # the first of equal ones
    return out


def best_of_k(scores, values, k):
    """The mean over all subsets of k, and within a subset over its best ones."""
    out = []
    for subset in itertools.combinations(range(len(scores)), k):
        top = max(scores[i] for i in subset)
        out.append(mean([float(values[i]) for i in subset if scores[i] == top]))
    return mean(out)
