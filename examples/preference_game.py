"""A preference with a cycle has no reward; the regularised game has an equilibrium all the same.

Three actions of which 0 beats 1, 1 beats 2 and 2 beats 0, a reference policy and τ = 0.05. The equilibrium by a fixed
point, then KL(equilibrium ‖ policy) of the last policy of each method. A step of Nash-MD and of self-play asks for one win
rate, one of extragradient for two. Run:

    python examples/preference_game.py
"""

import functools

import jax
import jax.numpy as jnp
from _tables import numbers, show

from jaxrl_lm.algos import nash

TAU = 0.05
STEP = 2.0
PREFERENCE = [[0.5, 0.9, 0.3], [0.1, 0.5, 0.8], [0.7, 0.2, 0.5]]
REF = [0.6, 0.3, 0.1]
AFTER = (0, 10, 30, 100, 300, 1000, 10000)
FLOOR = 1e-15  # what float64 can tell from 0


def equilibrium(ref, preference):
    """Log-probs of π = π_ref exp(P π / τ) / Z, by small steps towards the right-hand side."""

    def step(_, logits):
        aim = ref + preference @ jax.nn.softmax(logits) / TAU
        return jax.nn.log_softmax(0.98 * logits + 0.02 * jax.nn.log_softmax(aim))

    return jax.lax.fori_loop(0, 20000, step, ref)


def unregularised_step(logits, ref, preference, *, step_size, tau):
    """Self-play without the reference: exponential weights, which circle."""
    return nash.regularised_step(logits, logits, ref, preference, step_size=step_size, tau=0.0)


def self_play_step(logits, ref, preference, *, step_size, tau):
    """A mirror step of the regularised game against the policy itself."""
    return nash.regularised_step(logits, logits, ref, preference, step_size=step_size, tau=tau)


METHODS = {
    "self-play without the reference, η = 2": (unregularised_step, lambda _: STEP),
    "self-play (INPO's step), η = 2": (self_play_step, lambda _: STEP),
    "Nash-MD, η = 2": (nash.nash_md_step, lambda _: STEP),
    "Nash-MD, η = 2 / (τ (t + 2))": (nash.nash_md_step, lambda t: 2.0 / (TAU * (t + 2.0))),
    "extragradient, η = 2": (nash.extragradient_step, lambda _: STEP),
}


@functools.partial(jax.jit, static_argnames="name")
def distances(ref, preference, truth, name):
    """KL(truth ‖ policy) after 0, 1, … steps of the method."""
    method, size = METHODS[name]

    def step(logits, t):
        after = method(logits, ref, preference, step_size=size(t), tau=TAU)
        return after, jnp.sum(jnp.exp(truth) * (truth - jax.nn.log_softmax(logits)))

    return jax.lax.scan(step, ref, jnp.arange(AFTER[-1] + 1))[1]


def main() -> None:
    with jax.enable_x64(True):
        ref, preference = jnp.log(jnp.asarray(REF)), jnp.asarray(PREFERENCE)
        truth = equilibrium(ref, preference)
        rows = []
        for name in METHODS:
            found = distances(ref, preference, truth, name)
            rows.append([name, *(f"{float(found[t]):.1e}" if found[t] > FLOOR else f"< {FLOOR:.0e}" for t in AFTER)])
        equal = float(jnp.exp(truth) @ preference @ jnp.exp(truth))
        beats = preference @ jnp.exp(truth)
    print(f"reference {numbers(REF, 3)}; equilibrium {numbers(jnp.exp(truth), 6)}, which beats itself with {equal:.3f}")
    print(f"each action beats it with {numbers(beats, 6)}: what the reference keeps it from taking")
    show("KL(equilibrium ‖ policy) after so many steps", ["method", *map(str, AFTER)], rows)


if __name__ == "__main__":
    main()
