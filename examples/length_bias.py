"""Length bias: dividing by a completion's own length (GRPO) lengthens wrong answers, a constant (Dr. GRPO) does not.

A policy of plain logits: one of four answer tokens (answer 0 is right), then filler until it stops, at most 40 decisions;
a stop logit for each answer and position. Nothing rewards length. Run (the figure needs the extra `plot`):

    python examples/length_bias.py [figure.png]
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from _tables import numbers, save_figure, show

from jaxrl_lm import algos

ANSWERS, POSITIONS, GROUP = 4, 40, 8
METHODS = ("GRPO", "Dr. GRPO")
MEASURED = (0, 100, 300, 1000)
# P(correct), mean length if correct, if incorrect, by step: the mean over 20 seeds (the last one over 100 seeds).
EXPECTED = {
    "GRPO": ((0.25, 9.3, 9.3), (0.82, 2.6, 10.7), (0.96, 2.2, 11.5), (0.99, 2.108, 12.142)),
    "Dr. GRPO": ((0.25, 9.3, 9.3), (0.55, 9.3, 9.3), (0.89, 9.2, 9.3), (0.98, 9.228, 9.273)),
}


def start():
    """Equal answers, and a chance of 0.119 to stop at each position."""
    return {"answer": jnp.zeros(ANSWERS), "stop": jnp.full((ANSWERS, POSITIONS), -2.0)}


def sample(key, logits):
    """A group of completions: answers[G], and at each position whether it stops there, [G 40]."""
    answer_key, stop_key = jax.random.split(key)
    answers = jax.random.categorical(answer_key, logits["answer"], shape=(GROUP,))
    return answers, jax.random.bernoulli(stop_key, jax.nn.sigmoid(logits["stop"])[answers])


def completion_mask(stops):
    """The tokens [G 41] of each completion: its answer, and every decision up to the first stop."""
    stopped_before = jnp.cumsum(stops, axis=1) - stops > 0
    return jnp.concatenate([jnp.ones((GROUP, 1), bool), ~stopped_before], axis=1)


def completion_logprobs(logits, answers, stops):
    """The log-probs [G 41] of the answers and of the decisions to stop or not."""
    answer = jax.nn.log_softmax(logits["answer"])[answers]
    stop = logits["stop"][answers]
    return jnp.concatenate([answer[:, None], jax.nn.log_sigmoid(jnp.where(stops, stop, -stop))], axis=1)


def loss(logits, answers, stops, *, method):
    """The method's loss of one group: an advantage, a surrogate, a reduction."""
    mask, returns = completion_mask(stops), answers == 0
    if method == "GRPO":
        advantages = algos.group_advantages(returns, group_size=GROUP, scale="group", ddof=0, eps=1e-6)
        weights = algos.token_weights(mask, over="seq-mean-token-mean")
    else:
        advantages = algos.group_advantages(returns, group_size=GROUP, scale="none")
        weights = algos.token_weights(mask, over="seq-mean-token-sum-norm", length=1 + POSITIONS)
    logprobs = completion_logprobs(logits, answers, stops)
    advantages = jnp.broadcast_to(advantages[:, None], mask.shape)
    return jnp.sum(weights * algos.clipped_surrogate(logprobs, jax.lax.stop_gradient(logprobs), advantages, mask))


def facts(logits):
    """Exact: P(correct), the mean length of correct completions, that of incorrect ones."""
    answers = jax.nn.softmax(logits["answer"])
    going_on = jnp.cumprod(jax.nn.sigmoid(-logits["stop"]), axis=1)
    lengths = 2.0 + going_on[:, :-1].sum(1)  # the answer, the first decision, and each one that is reached
    return jnp.stack([answers[0], lengths[0], answers[1:] @ lengths[1:] / answers[1:].sum()])


@functools.partial(jax.jit, static_argnames=("method", "seeds", "steps"))
def train(key, *, method, seeds=20, steps=1000):
    """The facts [seeds, steps + 1, 3] of the policy along the run of each seed."""
    step_size = 2.0 if method == "GRPO" else 20.0

    def run(key):
        def step(logits, index):
            gradient = jax.grad(loss)(logits, *sample(jax.random.fold_in(key, index), logits), method=method)
            sizes = {"answer": step_size / 10, "stop": step_size}
            return {name: logits[name] - sizes[name] * gradient[name] for name in logits}, facts(logits)

        return jax.lax.scan(step, start(), jnp.arange(steps + 1))[1]

    return jax.vmap(run)(jax.random.split(key, seeds))


def draw(figure, runs):
    for axes, name in zip(figure.subplots(1, 2, sharey=True), METHODS, strict=True):
        for column, label, colour in ((1, "correct", "#0b559f"), (2, "incorrect", "#c8501e")):
            for run in runs[name]:
                axes.plot(run[:, column], color=colour, linewidth=0.5, alpha=0.25)
            axes.plot(runs[name][:, :, column].mean(0), color=colour, linewidth=1.9, label=label)
        axes.set_title(name, fontsize=10.5, loc="left")
        axes.set_xlabel("step")
    figure.axes[0].set_ylabel("mean length, tokens")
    figure.axes[0].legend(fontsize=8.5, frameon=False)


def main(figure: str = "runs/length_bias.png") -> None:
    runs = {name: np.asarray(train(jax.random.key(0), method=name)) for name in METHODS}
    rows = []
    for name in METHODS:
        for step, expected in zip(MEASURED, EXPECTED[name], strict=True):
            found = runs[name][:, step]
            cells = numbers(found.mean(0), 3), numbers(found.std(0, ddof=1), 2), " / ".join(map(str, expected))
            rows.append([name, str(step), *cells])
    show(
        "P(correct) / length if correct / length if incorrect, 20 seeds",
        ["method", "step", "mean", "spread over seeds", "expected mean"],
        rows,
    )
    save_figure(figure, lambda canvas: draw(canvas, runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
