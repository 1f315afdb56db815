"""Advantages, returns and rewards of the papers as float64 loops, written without looking at the library."""

import math
import statistics

import numpy as np
from reference import mean, std


def groups(returns, group_size, valid=None):
    """The indices of the valid rows of each group."""
    valid = [True] * len(returns) if valid is None else valid
    return [[n for n in range(start, start + group_size) if valid[n]] for start in range(0, len(returns), group_size)]


def leave_one_out(returns, *, group_size, valid=None):
    """Ahmadian et al., 2024: the mean of the others is the baseline."""
    out = np.zeros(len(returns))
    for members in groups(returns, group_size, valid):
        for n in members:
            others = [float(returns[m]) for m in members if m != n]
            out[n] = float(returns[n]) - mean(others) if others else 0.0
    return out


def max_rl(returns, *, group_size, valid=None):
    out = np.zeros(len(returns))
    for members in groups(returns, group_size, valid):
        centre = mean([float(returns[n]) for n in members]) if members else 0.0
        for n in members:
            out[n] = (float(returns[n]) - centre) / centre if centre else 0.0
    return out


def pass_at_k(returns, *, group_size, k, threshold=0.5, valid=None):
    """Chen et al., 2025, analytical derivation, in whole numbers up to the last division."""
    out = np.zeros(len(returns))
    for members in groups(returns, group_size, valid):
        n, c = len(members), sum(returns[m] >= threshold for m in members)
        if n < k:
            continue
        rate = 1 - math.comb(n - c, k) / math.comb(n, k)
        sigma = math.sqrt(rate * (1 - rate))
        for m in members:
            if sigma and returns[m] >= threshold:
                out[m] = (1 - rate) / sigma
            elif sigma:
                out[m] = (1 - rate - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma
    return out


def whiten(x, mask, *, eps=1e-8, ddof=1, shift_mean=True):
    values = [float(v) for v in x[mask]]
    out = np.zeros(x.shape)
    for at in zip(*np.nonzero(mask), strict=True):
        white = (float(x[at]) - mean(values)) / (std(values, ddof) + eps) if len(set(values)) > 1 else 0.0
        out[at] = white if shift_mean else white + mean(values)
    return out


def mixed(returns, *, group_size, drop, threshold=0.5, valid=None):
    out = np.zeros(len(returns), bool)
    for members in groups(returns, group_size, valid):
        right = [returns[n] >= threshold for n in members]
        goes = {
            "none": False,
            "equal": len({float(returns[n]) for n in members}) < 2,
            "all-wrong": not any(right),
            "all-right": all(right),
        }[drop]
        out[members] = not goes
    return out


def outliers(values, *, limit, valid=None):
    valid = [True] * len(values) if valid is None else valid
    kept = [float(v) for v, stands in zip(values, valid, strict=True) if stands]
    if not kept:
        return np.zeros(len(values), bool)
    middle = statistics.median(kept)
    mad = statistics.median([abs(v - middle) for v in kept])
    far = lambda v: mad > 0 and abs(float(v) - middle) > limit * 1.4826 * mad
    return np.array([stands and far(v) for v, stands in zip(values, valid, strict=True)])


def actions(mask, action_ids=None, segment_ids=None):
    """The actions of each sequence of each row: lists of columns, in order; what is off the mask is in none."""
    out = []
    for n in range(mask.shape[0]):
        row, last = [], None
        for t in range(mask.shape[1]):
            if not mask[n, t]:
                continue
            segment = 0 if segment_ids is None else int(segment_ids[n, t])
            name = (segment, t if action_ids is None else int(action_ids[n, t]))
            if last is None or last[0] != segment:
                row.append([])
            if name == last:
                row[-1][-1].append(t)
            else:
                row[-1].append([t])
            last = name
        out.append(row)
    return out


def discounted(gamma, action, discount_per):
    return gamma ** len(action) if discount_per == "token" else gamma


def returns_to_go(rewards, mask, *, discount=1.0, discount_per="action", action_ids=None, segment_ids=None):
    """Forward from the definition: each action sums every later reward with its product of discounts."""
    out = np.zeros(mask.shape)
    for n, row in enumerate(actions(mask, action_ids, segment_ids)):
        for sequence in row:
            for i, action in enumerate(sequence):
                total, factor = 0.0, 1.0
                for later in sequence[i:]:
                    total += factor * math.fsum(float(rewards[n, t]) for t in later)
                    factor *= discounted(discount, later, discount_per)
                out[n, action] = total
    return out


def gae(
    rewards, values, mask, *, discount=1.0, lam=0.95, bootstrap=None, discount_per="action", action_ids=None,
    segment_ids=None,
):  # fmt: skip
    """Schulman et al., 2016, eq. 16, as the sum that it is: A_a = Σ_l (γλ)^l δ_{a+l}."""
    advantages, targets = np.zeros(mask.shape), np.zeros(mask.shape)
    for n, row in enumerate(actions(mask, action_ids, segment_ids)):
        for number, sequence in enumerate(row):
            heads = [float(values[n, action[0]]) for action in sequence]
            end = float(bootstrap[n]) if bootstrap is not None and number == len(row) - 1 else 0.0
            gammas = [discounted(discount, action, discount_per) for action in sequence]
            errors = [
                math.fsum(float(rewards[n, t]) for t in action) + gammas[i] * [*heads, end][i + 1] - heads[i]
                for i, action in enumerate(sequence)
            ]
            for i, action in enumerate(sequence):
                factors = np.cumprod([1.0, *[lam * gamma for gamma in gammas[i:-1]]])
                advantages[n, action] = math.fsum(f * e for f, e in zip(factors, errors[i:], strict=True))
                targets[n, action] = advantages[n, action[0]] + heads[i]
    return advantages, targets


def normalised(named, everything, scale, eps=1e-6):
    """{name: value} minus the mean, over the std of `named` or of `everything`."""
    values = list(named.values())
    if len(set(values)) < 2:
        return dict.fromkeys(named, 0.0)
    below = {"none": None, "group": std(values, 1), "batch": std(everything, 1)}[scale]
    return {key: v - mean(values) if below is None else (v - mean(values)) / (below + eps) for key, v in named.items()}


CREDITS = {"mean": mean, "min": min, "product": math.prod, "last": lambda values: values[-1]}


def process(step_rewards, step_ends, outcome, mask, *, group_size, scale="group", credit="sum-to-go", valid=None):
    """DeepSeekMath, 4.1.3, plus the outcome of 4.1.2."""
    columns = mask.shape[1]
    steps = lambda n: [t for t in range(columns) if step_ends[n, t] and mask[n, t]]
    out, per_step, per_row, totals = np.zeros(mask.shape), {}, {}, {}
    for g, members in enumerate(groups(outcome, group_size, valid)):
        totals[g] = {n: float(outcome[n]) for n in members}
        per_step[g] = {(n, t): float(step_rewards[n, t]) for n in members for t in steps(n)}
        one = CREDITS.get(credit, mean)
        per_row[g] = {n: one([float(step_rewards[n, t]) for t in steps(n)]) for n in members if steps(n)}
    flat = lambda named: [v for part in named.values() for v in part.values()]
    for g in totals:
        whole = normalised(totals[g], flat(totals), scale)
        if credit == "sum-to-go":
            parts = normalised(per_step[g], flat(per_step), scale)
        else:
            parts = normalised(per_row[g], flat(per_row), scale)
        for n in whole:
            for t in range(columns):
                if mask[n, t] and credit == "sum-to-go":
                    out[n, t] = whole[n] + math.fsum(parts[n, s] for s in steps(n) if s >= t)
                elif mask[n, t]:
                    out[n, t] = whole[n] + parts.get(n, 0.0)
    return out


def turns(turn_rewards, turn_ids, mask, *, group_size, scale="group", discount=1.0, valid=None):
    rows, columns = mask.shape
    out, table = np.zeros(mask.shape), {}
    for g, members in enumerate(groups([0.0] * rows, group_size, valid)):
        for n in members:
            names = sorted({int(turn_ids[n, t]) for t in range(columns) if mask[n, t] and turn_ids[n, t] > 0})
            pays = [math.fsum(float(turn_rewards[n, t]) for t in range(columns) if mask[n, t] and turn_ids[n, t] == k)
                    for k in names]  # fmt: skip
            for i, k in enumerate(names):
                to_go = math.fsum(discount**j * pay for j, pay in enumerate(pays[i:]))
                table.setdefault((g, k), {})[n] = to_go
    everything = [v for named in table.values() for v in named.values()]
    for (_, k), named in table.items():
        for n, value in normalised(named, everything, scale).items():
            out[n, [t for t in range(columns) if mask[n, t] and turn_ids[n, t] == k]] = value
    return out


def length_penalty(returns, lengths, *, group_size, valid=None):
    out = np.zeros(len(returns))
    for members in groups(returns, group_size, valid):
        sizes = [int(lengths[n]) for n in members]
        for n in members:
            if max(sizes) > min(sizes):
                share = 0.5 - (int(lengths[n]) - min(sizes)) / (max(sizes) - min(sizes))
                out[n] = share if returns[n] >= 0.5 else min(0.0, share)
    return out


def unlikeliness(returns, logprobs, *, group_size, beta, valid=None):
    out = np.zeros(len(returns))
    for members in groups(returns, group_size, valid):
        ordered = sorted((float(logprobs[n]) for n in members), reverse=True)
        for n in members:
            rank = mean([i for i, v in enumerate(ordered) if v == float(logprobs[n])])
            lowered = float(returns[n]) * (1 - beta * (len(members) - rank) / len(members))
            out[n] = lowered if returns[n] >= 0.5 else float(returns[n])
    return out


def value_loss(value, old, target, clip):
    """(loss, d loss / d value) of one token."""
    pairs = [((value - target) ** 2 / 2, value - target)]
    if clip is not None:
        bounded = min(max(value, old - clip), old + clip)
        pairs.append(((bounded - target) ** 2 / 2, bounded - target if bounded == value else 0.0))
    return max(pairs, key=lambda pair: pair[0])
