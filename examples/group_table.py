"""Advantages of six completions of one prompt, k of them right: GRPO, Dr. GRPO, leave-one-out. Run:

python examples/group_table.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from _tables import show

from jaxrl_lm import algos

GROUP = 6
# By k: A right, A wrong (population std); the same centred only; the same leave-one-out; Σ centred². None: no such row.
EXPECTED = (
    ((None, 0.0), (None, 0.0), (None, 0.0), 0.0),
    ((2.236068, -0.447214), (0.8333, -0.1667), (1.0, -0.2), 0.8333),
    ((1.414214, -0.707107), (0.6667, -0.3333), (0.8, -0.4), 1.3333),
    ((1.0, -1.0), (0.5, -0.5), (0.6, -0.6), 1.5),
    ((0.707107, -1.414214), (0.3333, -0.6667), (0.4, -0.8), 1.3333),
    ((0.447214, -2.236068), (0.1667, -0.8333), (0.2, -1.0), 0.8333),
    ((0.0, None), (0.0, None), (0.0, None), 0.0),
)


@jax.jit
def advantages(returns):
    """By GRPO with the population std, centred only (Dr. GRPO), leave-one-out."""
    grpo = algos.group_advantages(returns, group_size=GROUP, ddof=0, eps=0.0)
    centred = algos.group_advantages(returns, group_size=GROUP, scale="none")
    return grpo, centred, algos.leave_one_out_advantages(returns, group_size=GROUP)


def table():
    """By k, in the form of EXPECTED."""
    rows = []
    for right in range(GROUP + 1):
        grpo, centred, others = map(np.asarray, advantages((jnp.arange(GROUP) < right).astype(float)))
        pair = lambda x, k=right: (float(x[0]) if k else None, float(x[-1]) if k < GROUP else None)
        rows.append((pair(grpo), pair(centred), pair(others), float(np.sum(centred**2))))
    return rows


def main() -> None:
    cell = lambda pair, digits: " / ".join("–" if x is None else f"{x + 0.0:.{digits}f}" for x in pair)
    line = lambda grpo, centred, others, square: [cell(grpo, 6), cell(centred, 4), cell(others, 1), f"{square:.4f}"]
    rows = []
    for right, (ours, expected) in enumerate(zip(table(), EXPECTED, strict=True)):
        rows += [[str(right), "ours", *line(*ours)], ["", "expected", *line(*expected)]]
    show(
        "Six completions, k right: advantage of a right one / of a wrong one",
        ["k", "", "GRPO, population std", "centred (Dr. GRPO)", "leave-one-out", "Σ centred²"],
        rows,
    )


if __name__ == "__main__":
    main()
