"""REINFORCE with a group baseline on one prompt with 64 responses, of which one is right.

Three tokens out of four, a table of logits for each prefix, 16 samples a step, reward 1 only for the response (2, 0, 3).
Run:

    python examples/one_prompt.py [seeds]
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from _tables import PREFIXES, RESPONSES, VOCABULARY, response_probabilities, show, token_logprobs

from jaxrl_lm import algos

RIGHT = 2 * VOCABULARY**2 + 0 * VOCABULARY + 3  # the number of (2, 0, 3)
GROUP = 16


def loss(logits, chosen, *, mask):
    """The loss of one group; chosen[G] are numbers of responses."""
    logprobs = token_logprobs(logits, RESPONSES[chosen])
    advantages = algos.group_advantages(chosen == RIGHT, group_size=GROUP, scale="none")
    advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    weights = algos.token_weights(mask, over="seq-mean-token-sum")
    return jnp.sum(weights * algos.policy_gradient(logprobs, advantages, mask))


@functools.partial(jax.jit, static_argnames=("seeds", "steps"))
def train(key, *, seeds=100, steps=300, step_size=0.5):
    """The exact probability [seeds] of the right response at the end, and the share of it in 1000 samples."""
    mask = jnp.ones((GROUP, RESPONSES.shape[1]), bool)

    def sample(key, logits, count):
        return jax.random.categorical(key, jnp.log(response_probabilities(logits)), shape=(count,))

    def run(key):
        def step(logits, index):
            chosen = sample(jax.random.fold_in(key, index), logits, GROUP)
            return logits - step_size * jax.grad(loss)(logits, chosen, mask=mask), None

        logits, _ = jax.lax.scan(step, jnp.zeros((PREFIXES, VOCABULARY)), jnp.arange(steps))
        share = jnp.mean(sample(jax.random.fold_in(key, steps), logits, 1000) == RIGHT)
        return response_probabilities(logits)[RIGHT], share

    return jax.vmap(run)(jax.random.split(key, seeds))


def main(seeds: int = 100) -> None:
    exact, sampled = map(np.asarray, train(jax.random.key(0), seeds=seeds))
    start = float(response_probabilities(jnp.zeros((PREFIXES, VOCABULARY)))[RIGHT])
    fails = algos.same_outcome_share(start, GROUP)  # all right is 1e-29 of it
    show(
        f"Probability of the right response after 300 steps, {seeds} seeds",
        ["quantity", "ours", "expected"],
        [
            ["at the start", f"{start:.6f}", "0.015625"],
            ["the whole first group fails", f"{fails:.6f}", "0.777265"],
            ["at the end, mean over seeds", f"{float(exact.mean()):.4f}", "0.9753"],
            ["at the end, range over seeds", f"{float(exact.min()):.3f} to {float(exact.max()):.3f}", "0.969 to 0.980"],
            ["share in 1000 samples, first seed", f"{float(sampled[0]):.3f}", "0.979 in another generator's run"],
        ],
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
