"""What a verifier does not check is not learned: a full check against one that reads only the answer.

24 prompts, 64 responses each, one right; the last of three tokens is the answer, the first two are the working. A
demonstrator is right about 55 % of the time, and some of its errors have the right answer with wrong working. Supervised
on 40 demonstrations a prompt, then steps along the exact expected gradient of E reward − β KL(π ‖ SFT). Run:

    python examples/verifier_gaps.py [seeds [seed of the first column]]

The published figures come with a demonstrator that is not given; this one is ours, so the orderings are what is
compared.
"""

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _tables import PREFIXES, RESPONSES, VOCABULARY, all_logprobs, prefix_rows, response_probabilities, show

from jaxrl_lm import algos

PROMPTS, DEMONSTRATIONS, SMOOTHING = 24, 40, 0.1
MASK = jnp.ones(RESPONSES.shape, bool)
BETA = 0.05


class Task(NamedTuple):
    """Prompts P with responses R = 64."""

    right: jax.Array  # [P R] the right response
    passes: jax.Array  # [P R] the responses with the right answer, whatever their working
    demonstrator: jax.Array  # [P R] probabilities
    demonstrations: jax.Array  # [P 40] numbers of responses


class Measured(NamedTuple):
    """Of a policy, exact: means over prompts, and the number of prompts locked on a lucky response."""

    accuracy: jax.Array  # probability of the right response
    answer: jax.Array  # probability of the right answer
    pass_at_8: jax.Array
    kl: jax.Array  # KL(π ‖ SFT) of whole responses, nats
    locked: jax.Array  # prompts whose most likely response has the right answer and the wrong working


# --- the demonstrator and supervised learning --------------------------------------------------------------------------


def make_prompt(key):
    """One prompt: its right response, and a demonstrator with a few favourite errors."""
    keys = jax.random.split(key, 6)
    number = jax.random.randint(keys[0], (), 0, RESPONSES.shape[0])
    right = jnp.arange(RESPONSES.shape[0]) == number
    passes = RESPONSES[:, 2] == RESPONSES[number, 2]
    share = jax.nn.sigmoid(0.2 + jax.random.normal(keys[1]))  # of right responses: 0.55 on average
    lucky = jax.nn.sigmoid(-0.4 + 2.5 * jax.random.normal(keys[2]))  # of the errors that have the right answer
    spread = lambda key, where: jax.nn.softmax(jnp.where(where, 3.0 * jax.random.normal(key, where.shape), -jnp.inf))
    errors = lucky * spread(keys[3], passes & ~right) + (1 - lucky) * spread(keys[4], ~passes)
    demonstrator = jnp.where(right, share, (1 - share) * errors)
    demonstrations = jax.random.categorical(keys[5], jnp.log(demonstrator), shape=(DEMONSTRATIONS,))
    return Task(right, passes, demonstrator, demonstrations)


def make_task(key) -> Task:
    return jax.vmap(make_prompt)(jax.random.split(key, PROMPTS))


def maximum_likelihood(demonstrations, kept):
    """Logits [P 21 4] of the smoothed maximum likelihood of the demonstrations that are kept."""

    def one(demonstrations, kept):
        responses = RESPONSES[demonstrations]
        counts = (
            jnp.zeros((PREFIXES, VOCABULARY)).at[prefix_rows(responses), responses].add(kept[:, None].astype(float))
        )
        return jax.nn.log_softmax(jnp.log(counts + SMOOTHING))

    return jax.vmap(one)(demonstrations, kept)


# --- reinforcement learning --------------------------------------------------------------------------------------------


def loss(logits, reference, reward, *, beta):
    """The expected loss of one prompt: every response once, weighted by its probability."""
    logprobs = all_logprobs(logits)
    kl = algos.kl_estimate(logprobs, all_logprobs(reference), MASK, estimator="k1").sum(1)
    advantages = jax.lax.stop_gradient(reward - beta * kl)
    advantages = jnp.broadcast_to(advantages[:, None], MASK.shape)
    weights = jax.lax.stop_gradient(jnp.exp(logprobs.sum(1, keepdims=True)))
    return jnp.sum(weights * algos.policy_gradient(logprobs, advantages, MASK))


def measure(logits, reference, task) -> Measured:
    probabilities = jax.vmap(response_probabilities)(logits)
    logprobs = jax.vmap(all_logprobs)(logits)
    gaps = (logprobs - jax.vmap(all_logprobs)(reference)).sum(2)
    accuracy = jnp.sum(jnp.where(task.right, probabilities, 0.0), axis=1)
    top = jax.nn.one_hot(jnp.argmax(probabilities, axis=1), RESPONSES.shape[0], dtype=bool)
    return Measured(
        accuracy=accuracy.mean(),
        answer=jnp.sum(jnp.where(task.passes, probabilities, 0.0), axis=1).mean(),
        pass_at_8=jnp.mean(1 - (1 - accuracy) ** 8),
        kl=jnp.sum(probabilities * gaps, axis=1).mean(),
        locked=jnp.sum(top & task.passes & ~task.right),
    )


def train(task, reference, reward, beta, *, steps=1600, step_size=1.0) -> Measured:
    """What is measured after 0, 1, …, steps steps."""

    def step(logits, _):
        gradient = jax.vmap(jax.grad(functools.partial(loss, beta=beta)))(logits, reference, reward)
        return logits - step_size * gradient, measure(logits, reference, task)

    return jax.lax.scan(step, reference, length=steps + 1)[1]


# --- closed forms ------------------------------------------------------------------------------------------------------


def optimum(reference, reward, beta):
    """The policy [P R] that maximises E reward − β KL(π ‖ SFT)."""
    logprobs = jax.vmap(all_logprobs)(reference).sum(2)
    return jax.nn.softmax(logprobs + reward / beta)


def optimal_accuracy(reference, task, beta, *, verifier):
    """The accuracy [P] of that optimum: p_c e^(1/β) / (p e^(1/β) + 1 − p), p the chance to pass the verifier."""
    probabilities = jax.vmap(response_probabilities)(reference)
    right = jnp.sum(jnp.where(task.right, probabilities, 0.0), axis=1)
    passed = jnp.sum(jnp.where(task.passes, probabilities, 0.0), axis=1) if verifier == "answer" else right
    return right / (passed + (1 - passed) * jnp.exp(-1 / beta))


# --- the table ---------------------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """Of each seed: single policies, and runs as Measured of steps 0, 1, …."""

    demonstrator: jax.Array  # its accuracy
    rejection: Measured  # SFT on the demonstrations that pass the full check
    optimum: jax.Array  # accuracy of the optimum of the answer-only verifier with the KL
    full: Measured
    answer: Measured
    held: Measured  # answer only, with the KL


@functools.partial(jax.jit, static_argnames="steps")
def experiment(keys, *, steps=1600) -> Results:
    """The results of each seed, which all of them lead with."""
    return jax.vmap(functools.partial(one_seed, steps=steps))(keys)


def one_seed(key, *, steps) -> Results:
    task = make_task(key)
    reference = maximum_likelihood(task.demonstrations, jnp.ones(task.demonstrations.shape, bool))
    kept = jnp.take_along_axis(task.right, task.demonstrations, axis=1)
    rewards = jnp.stack([task.right, task.passes, task.passes]).astype(float)
    run = functools.partial(train, task, reference, steps=steps)
    measured = jax.vmap(run)(rewards, jnp.array([0.0, 0.0, BETA]))
    return Results(
        demonstrator=jnp.sum(jnp.where(task.right, task.demonstrator, 0.0), axis=1).mean(),
        rejection=measure(maximum_likelihood(task.demonstrations, kept), reference, task),
        optimum=optimal_accuracy(reference, task, BETA, verifier="answer").mean(),
        full=jax.tree.map(lambda x: x[0], measured),
        answer=jax.tree.map(lambda x: x[1], measured),
        held=jax.tree.map(lambda x: x[2], measured),
    )


def orderings(results: Results) -> dict[str, np.ndarray]:
    """What the published figures show, as statements that hold for a seed or do not: [seeds]."""
    full, answer, held = results.full, results.answer, results.held
    return {
        "SFT is near its demonstrator": np.abs(full.accuracy[:, 0] - results.demonstrator) < 0.05,
        "with the full check RL learns all, soon": (full.accuracy[:, 50] > 0.94) & (full.accuracy[:, 300] > 0.99),
        "SFT on what passes is near RL": np.abs(results.rejection.accuracy - full.accuracy[:, 50]) < 0.03,
        "the answer-only verifier is satisfied too": answer.answer[:, 300] > 0.99,
        "its true accuracy is lower": answer.accuracy[:, 300] < full.accuracy[:, 300],
        "prompts lock on a lucky response": answer.locked[:, -1] > 0,
        "its pass@8 rises, then falls below the peak": (answer.pass_at_8.max(1) > answer.pass_at_8[:, 0])
        & (answer.pass_at_8.max(1) > answer.pass_at_8[:, 300])
        & (answer.pass_at_8[:, 300] > answer.pass_at_8[:, -1]),
        "with the KL accuracy peaks, then falls towards its optimum": (held.accuracy.max(1) > held.accuracy[:, -1])
        & (held.accuracy[:, -1] > results.optimum),
        "the KL costs accuracy": held.accuracy[:, -1] < answer.accuracy[:, -1],
        "the KL keeps pass@8": held.pass_at_8[:, -1] > answer.pass_at_8[:, -1],
    }


def table(results: Results, seed: int) -> list[list[str]]:
    """Rows of quantity, the seed's value, the range over all seeds, the published figure."""
    full, answer, held = results.full, results.answer, results.held
    quantities = [
        ("demonstrator's accuracy", results.demonstrator, "0.550"),
        ("SFT accuracy", full.accuracy[:, 0], "0.530"),
        ("SFT pass@8", full.pass_at_8[:, 0], "0.948"),
        ("full check: accuracy at 50", full.accuracy[:, 50], "0.970"),
        ("full check: accuracy at 300", full.accuracy[:, 300], "0.994"),
        ("full check: KL at 300, nats", full.kl[:, 300], "0.75"),
        ("SFT on demonstrations that pass: accuracy", results.rejection.accuracy, "0.971"),
        ("answer only: verifier's score at 300", answer.answer[:, 300], "0.994"),
        ("answer only: accuracy at 300", answer.accuracy[:, 300], "0.884"),
        ("answer only: prompts locked on a lucky response", answer.locked[:, -1], "3"),
        ("answer only: pass@8, peak", answer.pass_at_8.max(1), "0.993"),
        ("answer only: step of that peak", answer.pass_at_8.argmax(1), "23"),
        ("answer only: pass@8 at 300", answer.pass_at_8[:, 300], "0.960"),
        ("answer only: pass@8 at 1600", answer.pass_at_8[:, -1], "0.921"),
        ("answer only, β = 0.05: accuracy, peak", held.accuracy.max(1), "0.873"),
        ("answer only, β = 0.05: step of that peak", held.accuracy.argmax(1), "234"),
        ("answer only, β = 0.05: accuracy at 1600", held.accuracy[:, -1], "0.827"),
        ("answer only, β = 0.05: accuracy of the optimum", results.optimum, "0.758"),
        ("answer only, β = 0.05: pass@8 at 1600", held.pass_at_8[:, -1], "0.994"),
    ]
    cell = lambda value: f"{float(value):.3f}" if np.issubdtype(value.dtype, np.floating) else str(int(value))
    return [
        [name, cell(x[seed]), f"{cell(x.min())} to {cell(x.max())}", published] for name, x, published in quantities
    ]


def main(seeds: int = 8, seed: int = 4) -> None:
    results = jax.tree.map(np.asarray, experiment(jax.vmap(jax.random.key)(jnp.arange(seeds))))
    show(
        "24 prompts; steps of exact policy gradient; the published figures have another demonstrator",
        ["quantity", f"seed {seed}", f"seeds 0 to {seeds - 1}", "published"],
        table(results, seed),
    )
    rows = []
    for statement, holds in orderings(results).items():
        without = ", ".join(str(index) for index in range(seeds) if not holds[index])
        rows.append([statement, f"{int(holds.sum())} of {seeds}", without])
    show("Do the orderings hold?", ["statement", "seeds", "not in seed"], rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
