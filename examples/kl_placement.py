"""Where the KL goes decides what is learned: in the reward, as a k1 loss, as a k3 loss.

One prompt, ten responses, β = 0.5. First the three estimators on samples of the optimum π* ∝ π_ref exp(r / β), then a
softmax policy trained under each placement beside the limit in closed form. Run (the figure needs the extra `plot`):

    python examples/kl_placement.py [figure.png]
"""

import functools
import sys

import jax
import jax.numpy as jnp
from _tables import numbers, save_figure, show

from jaxrl_lm import algos

BETA = 0.5
REF = jnp.array([0.080549, 0.062242, 0.134769, 0.078889, 0.041574, 0.101976, 0.261685, 0.183134, 0.035142, 0.020040])
REWARDS = jnp.array(
    [0.815854, 0.002739, 0.857404, 0.033586, 0.729655, 0.175656, 0.863179, 0.541461, 0.299712, 0.422687]
)
ESTIMATORS = ("k1", "k2", "k3")
PLACEMENTS = {"k1 in the reward": "reward", "k1 as a loss": "k1", "k3 as a loss": "k3"}

# What is expected: mean, std and share of negative means by Monte Carlo; exact mean and std.
EXPECTED_ESTIMATES = {
    "k1": ((0.1367, 0.1138, 0.121), (0.136299, 0.114053)),
    "k2": ((0.1131, 0.0415, 0.0), (0.113353, 0.041636)),
    "k3": ((0.1358, 0.0673, 0.0), (0.136299, 0.067536)),
}
# Reward, KL(π ‖ π_ref), total variation to π*, to the forward-KL optimum: after 4000 sampled steps, and in the limit.
EXPECTED_POLICIES = {
    "k1 in the reward": ((0.729, 0.136, 0.000, 0.034), (0.729495, 0.136299, 0.0, 0.033889)),
    "k1 as a loss": ((0.863, 1.318, 0.605, 0.616), (0.863179, 1.340616, 0.608178, 0.618712)),
    "k3 as a loss": ((0.706, 0.096, 0.034, 0.001), (0.706338, 0.096872, 0.033889, 0.0)),
}


# --- the optima in closed form ---------------------------------------------------------------------------------------


def reverse_optimum():
    """π* ∝ π_ref exp(r / β), which maximises E r − β KL(π ‖ π_ref)."""
    return jax.nn.softmax(jnp.log(REF) + REWARDS / BETA)


def forward_optimum():
    """β π_ref / (λ − r), which maximises E r − β KL(π_ref ‖ π); λ by bisection."""
    low, high = REWARDS.max(), REWARDS.max() + BETA

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        above = jnp.sum(BETA * REF / (middle - REWARDS)) > 1
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    return BETA * REF / (jax.lax.fori_loop(0, 60, halve, (low, high))[1] - REWARDS)


@jax.jit
def limits():
    """The policy that each placement ends at: a k1 loss regularises nothing, so that the best response takes all."""
    best = jax.nn.one_hot(jnp.argmax(REWARDS), REWARDS.size)
    return {"k1 in the reward": reverse_optimum(), "k1 as a loss": best, "k3 as a loss": forward_optimum()}


@jax.jit
def facts(policy):
    """Reward, KL to the reference, total variation to both optima."""
    kl = jnp.sum(jnp.where(policy > 0, policy * jnp.log(jnp.where(policy > 0, policy, 1.0) / REF), 0.0))
    distance = lambda other: 0.5 * jnp.sum(jnp.abs(policy - other))
    return jnp.stack([policy @ REWARDS, kl, distance(reverse_optimum()), distance(forward_optimum())])


# --- the estimators --------------------------------------------------------------------------------------------------


def estimates(responses, estimator):
    """KL(π* ‖ π_ref) by the estimator at each response of responses[N T]."""
    logprobs, ref_logprobs = jnp.log(reverse_optimum())[responses], jnp.log(REF)[responses]
    return algos.kl_estimate(logprobs, ref_logprobs, jnp.ones(responses.shape, bool), estimator=estimator)


@functools.partial(jax.jit, static_argnames=("repetitions", "samples"))
def monte_carlo(key, *, repetitions=100_000, samples=16):
    """By estimator: mean, std and share of negative ones among the means over some samples of π*."""
    responses = jax.random.categorical(key, jnp.log(reverse_optimum()), shape=(repetitions, samples))
    means = {name: estimates(responses, name).mean(1) for name in ESTIMATORS}
    return {name: jnp.stack([mean.mean(), mean.std(), (mean < 0).mean()]) for name, mean in means.items()}


@jax.jit
def exact_estimates(samples=16):
    """By estimator: the exact mean, and the exact std of a mean over some samples."""
    out = {}
    for name in ESTIMATORS:
        values = estimates(jnp.arange(REWARDS.size)[None], name)[0]
        mean = reverse_optimum() @ values
        out[name] = jnp.stack([mean, jnp.sqrt(reverse_optimum() @ (values - mean) ** 2 / samples)])
    return out


# --- training --------------------------------------------------------------------------------------------------------


def loss(logits, responses, weights, *, placement):
    """The weighted loss of responses[N], rows of one token each."""
    logprobs, ref_logprobs = jax.nn.log_softmax(logits)[responses][:, None], jnp.log(REF)[responses][:, None]
    mask = jnp.ones(logprobs.shape, bool)
    kl = lambda name: algos.kl_estimate(logprobs, ref_logprobs, mask, estimator=name)
    returns = REWARDS[responses]
    if placement == "reward":
        returns = returns - BETA * jax.lax.stop_gradient(kl("k1")[:, 0])
    advantages = algos.group_advantages(returns, group_size=returns.size, scale="none")
    losses = algos.policy_gradient(logprobs, advantages[:, None], mask)
    if placement != "reward":
        losses = losses + BETA * kl(placement)
    return jnp.sum(weights * losses)


@functools.partial(jax.jit, static_argnames=("placement", "steps", "group"))
def train(key, *, placement, steps=4000, group=256, step_size=0.5):
    """The policy after gradient steps on groups of samples."""
    weights = algos.token_weights(jnp.ones((group, 1), bool))

    def step(logits, key):
        responses = jax.random.categorical(key, logits, shape=(group,))
        return logits - step_size * jax.grad(loss)(logits, responses, weights, placement=placement), None

    return jax.nn.softmax(jax.lax.scan(step, jnp.log(REF), jax.random.split(key, steps))[0])


@functools.partial(jax.jit, static_argnames=("placement", "steps"))
def train_exactly(*, placement, steps=4000, step_size=0.5):
    """The policy after steps along the expected gradient: every response once, weighted by its probability."""
    every = jnp.arange(REWARDS.size)

    def step(logits, _):
        return logits - step_size * jax.grad(loss)(
            logits, every, jax.nn.softmax(logits)[:, None], placement=placement
        ), 0

    return jax.nn.softmax(jax.lax.scan(step, jnp.log(REF), length=steps)[0])


# --- the tables and the figure ---------------------------------------------------------------------------------------


def draw(figure, policies):
    axes, order = figure.subplots(), jnp.argsort(REWARDS)
    colours, width = ("#b8b8b8", "#0b559f", "#c8501e", "#3a7d44"), 0.2
    bars = {"reference": (REF, REF)} | {name: (policies[name], limits()[name]) for name in PLACEMENTS}
    for index, (name, (policy, limit)) in enumerate(bars.items()):
        at = [place + (index - 1.5) * width for place in range(REWARDS.size)]
        axes.bar(at, policy[order], width, color=colours[index], label=name)
        if name != "reference":
            axes.plot(at, limit[order], "_", color="black", markersize=8, label="limit" if index == 3 else None)
    axes.set_xticks(range(REWARDS.size), [f"{reward:.2f}" for reward in REWARDS[order].tolist()])
    axes.set_xlabel("reward of the response")
    axes.set_ylabel("probability")
    axes.set_title("Policies reached under each placement of the KL, β = 0.5", fontsize=10.5, loc="left")
    axes.legend(fontsize=8.5, frameon=False)


def main(figure: str = "runs/kl_placement.png") -> None:
    sampled, exact = monte_carlo(jax.random.key(0)), exact_estimates()
    rows = []
    for name, (expected_sampled, expected_exact) in EXPECTED_ESTIMATES.items():
        cells = (sampled[name], 4), (expected_sampled, 4), (exact[name], 6), (expected_exact, 6)
        rows.append([name, *(numbers(*cell) for cell in cells)])
    show(
        "KL(π* ‖ π_ref) from 16 samples, 100,000 times: mean / std / share of negative means",
        ["estimator", "Monte Carlo", "expected", "exact mean / std", "expected"],
        rows,
    )
    policies = {
        name: train(jax.random.key(index), placement=placement)
        for index, (name, placement) in enumerate(PLACEMENTS.items())
    }
    rows = []
    for name, (expected_sampled, expected_limit) in EXPECTED_POLICIES.items():
        cells = (facts(policies[name]), 3), (expected_sampled, 3), (facts(limits()[name]), 6), (expected_limit, 6)
        rows.append([name, *(numbers(*cell) for cell in cells)])
    show(
        "Policies learned: reward / KL(π ‖ π_ref) / total variation to π* / to the optimum of the forward KL",
        ["placement", "4000 sampled steps", "expected", "limit", "expected"],
        rows,
    )
    save_figure(figure, lambda canvas: draw(canvas, policies))


if __name__ == "__main__":
    main(*sys.argv[1:])
