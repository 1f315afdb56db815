"""The advantage of each turn of an agent's episode: rewards-to-go minus a constant.

Four tool calls that pay 0.10 each, then a submission that pays the outcome; between them tool output, which is no action
of the policy. Every turn is two tokens here. Run:

    python examples/agent_episode.py
"""

import jax
import jax.numpy as jnp
from _tables import numbers, show

from jaxrl_lm import algos

BASELINE, BONUS, CALLS = 0.45, 0.10, 4
EXPECTED = {"failed": (-0.05, -0.15, -0.25, -0.35, -0.45), "solved": (0.95, 0.85, 0.75, 0.65, 0.55)}

# Columns: two tokens of a turn, one of tool output, …; the last turn has no output.
MASK = jnp.array([True, True, False] * CALLS + [True, True])
LAST_TOKENS = jnp.array([3 * turn + 1 for turn in range(CALLS + 1)])


@jax.jit
def turn_advantages(outcome: float):
    """The advantages [T] of the tokens of an episode with this outcome; 0 at tool output."""
    paid = jnp.stack([*[jnp.float32(BONUS)] * CALLS, jnp.float32(outcome)])
    rewards = jnp.zeros(MASK.shape).at[LAST_TOKENS].set(paid)  # a turn is paid on its last token
    to_go = algos.returns_to_go(rewards[None], MASK[None])[0]
    return algos.constant_baseline_advantages(to_go, baseline=BASELINE, valid=MASK)


def main() -> None:
    rows = []
    for outcome, (name, expected) in enumerate(EXPECTED.items()):
        rows.append([name, numbers(turn_advantages(outcome)[LAST_TOKENS], 2), numbers(expected, 2)])
    show("Advantage of each turn", ["attempt", "ours", "expected"], rows)


if __name__ == "__main__":
    main()
