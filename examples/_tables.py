"""What the small experiments share: printed tables, figures, and policies that are tables of logits.

A tabular policy over responses of three tokens out of four: one row of logits for each of the 21 prefixes, so that all
64 responses can be enumerated and every expectation is exact.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

VOCABULARY = 4
PREFIXES = 1 + VOCABULARY + VOCABULARY**2
RESPONSES = jnp.stack(jnp.unravel_index(jnp.arange(VOCABULARY**3), (VOCABULARY,) * 3), axis=1)  # [64 3]


def prefix_rows(responses):
    """For each token of responses[N 3] the row of the table that chose it."""
    first, second = responses[:, 0], responses[:, 1]
    return jnp.stack([jnp.zeros_like(first), 1 + first, 1 + VOCABULARY * (1 + first) + second], axis=1)


def token_logprobs(logits, responses):
    """The log-probs [N 3] of the tokens of responses[N 3] under logits[21 4]."""
    return jax.nn.log_softmax(logits)[prefix_rows(responses), responses]


def all_logprobs(logits):
    """token_logprobs of all 64 responses, without a gather: rows of a prefix are repeated over what follows."""
    logprobs = jax.nn.log_softmax(logits)
    levels = logprobs[:1], logprobs[1 : 1 + VOCABULARY], logprobs[1 + VOCABULARY :]
    return jnp.stack([jnp.repeat(level.reshape(-1), RESPONSES.shape[0] // level.size) for level in levels], axis=1)


def response_probabilities(logits):
    """The probability of each of the 64 responses."""
    return jnp.exp(all_logprobs(logits).sum(1))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    line = lambda cells: "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
    print("\n".join(["", title, "", line(columns), line(["-" * width for width in widths]), *map(line, rows)]))


def numbers(values: Sequence[float], digits: int) -> str:
    """1.234 / 0.120 / …; a rounded zero has no sign."""
    return " / ".join(f"{round(float(value), digits) + 0.0:.{digits}f}" for value in values)


def save_figure(path: str, draw: Callable[[Any], None], *, width: float = 10.0, height: float = 4.0) -> None:
    """Let `draw` fill a figure and write it to `path`; says so where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("\nno figure: it needs matplotlib, pip install 'jaxrl-lm[plot]'")
        return
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8.5)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"\nfigure: {path}")
