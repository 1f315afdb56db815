"""FLOPs of a traced function: those of its matrix products, every loop's body as often as it runs.

Counted on the jaxpr, so for the whole mesh at once, with what rematerialisation computes again. Elementwise work is not
counted: it is bound by memory. Next to read: `plan_report.py`.
"""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def count_flops(jaxpr: Jaxpr | ClosedJaxpr, *, while_trips: tuple[int | float, ...] = ()) -> float:
    """2 · batch · M · N · K of every matrix product, times its runs; of a `cond` the most expensive branch.

    `while_trips` is how often a while loop runs, and one inside of it, and so on, which the code does not say. Raises
    ValueError where one is met without it.
    """
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    return math.fsum(_equation_flops(equation, while_trips) for equation in jaxpr.eqns)


def _equation_flops(equation: Any, while_trips: tuple[int | float, ...]) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        raise ValueError("convolutions are not counted: this package has none")
    deeper = while_trips[1:] if name == "while" else while_trips
    inner = [count_flops(value, while_trips=deeper) for value in _jaxprs(params)]
    if name == "pallas_call":  # of the blocks that a kernel passes over, too
        return math.prod(params["grid_mapping"].grid) * math.fsum(inner)
    if name == "shard_map":  # what one device computes
        return params["mesh"].size * math.fsum(inner)
    if name == "scan":
        return params["length"] * math.fsum(inner)
    if name == "while":
        if math.fsum(inner) and not while_trips:
            raise ValueError("a while loop with matrix products: say how often it runs (while_trips)")
        return (while_trips or (0,))[0] * math.fsum(inner)
    return max(inner, default=0.0) if name == "cond" else math.fsum(inner)


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    """The functions that an equation runs."""
    found = []
    for value in params.values():
        found += [one for one in (value if isinstance(value, tuple | list) else (value,)) if _is_jaxpr(one)]
    return found


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
