"""Over-optimisation: a policy that is optimised against a learned reward gets better, then worse.

A prompt has 8192 responses, each eight numbers. What is wanted, the gold reward, rises with all of them and bends down in
the first. A proxy reads the first few numbers only, is linear, and learns from noisy comparisons of responses of the
initial policy, where the bend hardly shows. Best-of-n and a policy that is a table of logits are optimised against one
proxy or four of them, and gold and proxy are read against d = √KL(π ‖ π_init). Run (the figure needs the extra `plot`):

    python examples/overoptimisation.py [figure.png]

The laws that are fitted, d(α − βd) and d(α − β ln d), are those of "Scaling laws for reward model overoptimization" (Gao,
Schulman and Hilton, 2022) for best-of-n and RL. Here the first is exact for RL and a faithful linear proxy: the policy
moves the responses by √2 d along the proxy's direction u, so that gold is √2 d (w·u) − 2 BEND d² u₀².
"""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _tables import save_figure, show

from jaxrl_lm.algos.reward_losses import ensemble_reward, reward_model_loss
from jaxrl_lm.algos.selection import best_of_n_kl, expected_best_of_n

FEATURES, BEND = 8, 0.45
WEIGHTS = np.sqrt([0.5] + [0.5 / 7] * 7)
SIZES = (1, 4, 8)  # how many of the numbers a proxy reads
REWARDS = {"one proxy": "mean", "mean of 4": "mean", "mean − std of 4": "pessimistic"}
BEST_OF = (1, 2, 3, 4, 6, 10, 16, 28, 48, 96, 192, 384)
LAWS = {"d(α − βd)": lambda d: d, "d(α − β ln d)": np.log}
METHODS = ("best-of-n", "RL")


# --- rewards ---------------------------------------------------------------------------------------------------------


def gold_reward(x):
    """What is wanted of x[… 8]; its mean over the initial policy is 0."""
    return x @ jnp.asarray(WEIGHTS, x.dtype) - BEND * (jnp.square(x[..., 0]) - 1.0)


def train_proxy(key, size, *, pairs=256, steps=150):
    """A proxy's weights [8], 0 past its size, after descent on the loss of comparisons with the gold reward's chances."""
    draw, noise = jax.random.split(key)
    x = jax.random.normal(draw, (pairs, 2, FEATURES))
    gap = gold_reward(x[:, 0]) - gold_reward(x[:, 1]) + jax.random.logistic(noise, (pairs,))
    x = jnp.where((gap > 0)[:, None, None], x, x[:, ::-1])  # the preferred one first
    read = jnp.arange(FEATURES) < size
    tx = optax.adam(0.1)

    def step(state, _):
        weights, opt_state = state
        loss = lambda w: jnp.mean(reward_model_loss(x @ jnp.where(read, w, 0.0)))
        updates, opt_state = tx.update(jax.grad(loss)(weights), opt_state)
        return (weights + updates, opt_state), None

    start = jnp.zeros(FEATURES)
    return jax.lax.scan(step, (start, tx.init(start)), length=steps)[0][0]


@functools.partial(jax.jit, static_argnames=("seeds", "responses"))
def problems(key, *, seeds, responses):
    """gold[S M] of M responses in S worlds, and the proxies' scores by reward: [S sizes M], with mean 0 and std 1."""

    def world(key):
        x_key, key = jax.random.split(key)
        x = jax.random.normal(x_key, (responses, FEATURES))
        members = jax.vmap(jax.vmap(train_proxy, (0, None)), (None, 0))(jax.random.split(key, 4), jnp.array(SIZES))
        scores = members @ x.T  # [sizes 4 M]
        return gold_reward(x), standard(scores), members

    gold, scores, members = jax.vmap(world)(jax.random.split(key, seeds))
    join = lambda scores, how: jax.vmap(jax.vmap(lambda one: ensemble_reward(one, how=how)))(scores)
    joint = {name: join(scores[:, :, :1] if name == "one proxy" else scores, how) for name, how in REWARDS.items()}
    return gold, {name: standard(rewards) for name, rewards in joint.items()}, members


def standard(x):
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)


# --- optimisation: both return d, gold and proxy [curves points] ------------------------------------------------------


expected_best = jax.jit(expected_best_of_n, static_argnames="k")


def best_of_n_curves(gold, proxy):
    """The responses are samples of the initial policy: the best of each n of them by proxy, and what it is worth."""
    distance = np.sqrt([best_of_n_kl(n) for n in BEST_OF])
    values = [np.stack([expected_best(proxy, k=n, values=x) for n in BEST_OF], axis=1) for x in (gold, proxy)]
    return np.broadcast_to(distance, values[0].shape), *values


@functools.partial(jax.jit, static_argnames=("steps",))
def rl_curves(gold, proxy, *, steps=28, step_size=0.12):
    """Natural policy gradient from equal logits: a step adds the advantages, here exact, to a table of logits."""

    def step(logits, _):
        policy = jax.nn.softmax(logits)
        mean = lambda x: jnp.sum(policy * x, axis=1)
        kl = mean(jax.nn.log_softmax(logits)) + math.log(logits.shape[1])
        facts = jnp.sqrt(jnp.maximum(kl, 0.0)), mean(gold), mean(proxy)
        return logits + step_size * (proxy - mean(proxy)[:, None]), facts

    facts = jax.lax.scan(step, jnp.zeros_like(proxy), length=steps)[1]
    return tuple(x.T for x in facts)


# --- the laws --------------------------------------------------------------------------------------------------------


def fit(distance, gold, law):
    """(α, β, root of the mean squared rest) of gold ≈ d(α − β · term(d)), by least squares over the points with d > 0."""
    d, y = distance[distance > 0.05], gold[distance > 0.05]
    table = np.stack([d, -d * LAWS[law](d)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(table, y, rcond=None)
    return alpha, beta, math.sqrt(np.mean((table @ [alpha, beta] - y) ** 2))


def peak(alpha, beta, law):
    """(d, gold) at the top of a law: d = α / 2β and α² / 4β, or d = exp(α / β − 1) and β d; infinite for β ≤ 0."""
    if beta <= 0:
        return math.inf, math.inf
    if law == "d(α − βd)":
        return alpha / (2 * beta), alpha**2 / (4 * beta)
    return math.exp(alpha / beta - 1), beta * math.exp(alpha / beta - 1)


def exact_law(direction):
    """α and β of RL against the linear proxy with this direction, for endlessly many responses."""
    u = direction / np.linalg.norm(direction)
    return math.sqrt(2) * WEIGHTS @ u, 2 * BEND * u[0] ** 2


# --- tables and figure -----------------------------------------------------------------------------------------------


def curves(gold, rewards):
    """By (method, reward, size): d, gold, proxy, each [seeds points]."""
    out = {}
    for name in REWARDS:
        proxy = rewards[name]
        seeds, sizes, responses = proxy.shape
        flat = proxy.reshape(-1, responses)
        golds = jnp.broadcast_to(gold[:, None], proxy.shape).reshape(flat.shape)
        for method, optimise in (("best-of-n", best_of_n_curves), ("RL", rl_curves)):
            found = [np.asarray(x).reshape(seeds, sizes, -1) for x in optimise(golds, flat)]
            for index, size in enumerate(SIZES):
                out[method, name, size] = tuple(x[:, index] for x in found)
    return out


def spread(values, digits=2):
    """mean [low, high] over the seeds."""
    values = np.asarray(values)
    return f"{values.mean():.{digits}f} [{values.min():.{digits}f}, {values.max():.{digits}f}]"


def print_tables(found):
    measured, fitted = [], []
    for (method, name, size), (distance, gold, proxy) in found.items():
        top = [np.take_along_axis(x, gold.argmax(1)[:, None], 1)[:, 0] for x in (distance, gold)]
        measured.append([method, name, str(size), *map(spread, (*top, gold[:, -1], proxy[:, -1]))])
        for law in LAWS if name == "one proxy" else ():
            alpha, beta, rest = np.array([fit(d, y, law) for d, y in zip(distance, gold, strict=True)]).T
            tops = np.array([peak(a, b, law) for a, b in zip(alpha, beta, strict=True)]).T
            fitted.append([method, str(size), law, *map(spread, (alpha, beta, *tops)), f"{rest.mean():.3f}"])
    show("Optimised against a proxy, mean [lowest, highest] of the seeds: where the gold reward peaks, and the end",
         ["method", "reward", "size", "peak at d", "gold there", "gold at the end", "proxy there"], measured)  # fmt: skip
    show("Laws fitted to gold(d) of one proxy; rest: root of the mean square that is left",
         ["method", "size", "law", "α", "β", "peak at d", "gold there", "rest"], fitted)  # fmt: skip


def draw(figure, found):
    colours = ("#c8501e", "#0b559f", "#3a7d44")
    for axes, method in zip(figure.subplots(1, 2, sharey=True), METHODS, strict=True):
        for colour, size in zip(colours, SIZES, strict=True):
            distance, gold, proxy = (x.mean(0) for x in found[method, "one proxy", size])
            axes.plot(distance, gold, color=colour, label=f"gold, proxy of size {size}")
            axes.plot(distance, proxy, color=colour, linestyle=":", label="the proxy itself" if size == 1 else None)
            axes.plot(*(x.mean(0) for x in found[method, "mean − std of 4", size][:2]), color=colour, linestyle="--",
                      linewidth=0.9, label="gold, mean − std of 4" if size == 1 else None)  # fmt: skip
        axes.set_xlabel("d = √KL(π ‖ π_init)")
        axes.set_title(method, fontsize=10.5, loc="left")
    figure.axes[0].set_ylabel("reward")
    figure.axes[0].legend(fontsize=8, frameon=False)


def main(figure: str = "runs/overoptimisation.png") -> None:
    gold, rewards, _ = problems(jax.random.key(0), seeds=8, responses=8192)
    found = curves(gold, rewards)
    print_tables(found)
    save_figure(figure, lambda canvas: draw(canvas, found))


if __name__ == "__main__":
    main(*sys.argv[1:])
