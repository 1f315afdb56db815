"""What is computed of many rows: their scores, values and credit, a bounded number of rows at a time.

Pure functions; `steps.py` compiles them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxrl_lm import algos
from jaxrl_lm.credit import Credit, CreditRule, Outcomes
from jaxrl_lm.models import LoraConfig, Model, attach, row_scores, token_logits, trunk_model
from jaxrl_lm.score import score, values
from jaxrl_lm.types import Layout, Params, Rollout, Scores
from jaxrl_lm.update import cut


def whole(policy: Params, base: Params | None, lora: LoraConfig | None) -> Params:
    """All weights of a policy: those that are trained, or those below with the adapter on them."""
    return policy if lora is None else attach(base, policy, lora)


def score_rows(
    policy,
    base,
    tokens,
    segment_ids,
    temperature,
    start: int,
    *,
    model: Model,
    lora,
    chunk: int,
    size: int,
    together: int = 1,
) -> Scores:
    """Scores of many rows, `size` rows at a time, so that scoring needs no more memory than an update's forward pass.

    Here and below a Layout of all rows may stand for tokens, with None for segment_ids; its cells are those of rows that go
    at once, `together` of which never part.
    """
    params = whole(policy, base, lora)
    one = lambda part: score(params, *part[:2], model=model, temperature=part[2], chunk=chunk, start=start)
    if isinstance(tokens, Layout):
        temperature = in_parts(temperature, len(temperature) // size, together)
    return _by_rows(one, (tokens, segment_ids, temperature), size, together)


def value_rows(
    params, base, tokens, segment_ids, start: int, *, model: Model, lora, shared: bool, size: int, together: int = 1
) -> Float[Array, "N T"]:
    """Values of many rows, `size` rows at a time: of the critic, or of its head on the policy."""
    head = params["critic"]["head"]
    if shared:
        trunk = whole(params["policy"], base, lora)
    else:
        trunk, model = params["critic"]["trunk"], trunk_model(model)
    one = lambda part: values(head, trunk, *part, model=model, start=start)
    return _by_rows(one, (tokens, segment_ids), size, together)


def implicit_rows(
    prm: Params,
    reference: Params,
    rollout: Rollout,
    start: int,
    *,
    model: Model,
    beta: float,
    chunk: int,
    size: int,
    together: int = 1,
) -> tuple[Float[Array, "N T"], Float[Array, "N T"]]:
    """What an implicit process reward model pays each action token, and the log-probs of the model it started from."""
    ones = jnp.ones(rollout.action_mask.shape[:1], jnp.float32)
    given = (rollout.tokens, rollout.segment_ids, ones, start)
    how = {"model": model, "lora": None, "chunk": chunk, "size": size, "together": together}
    of = lambda params: score_rows(params, None, *given, **how).logprobs
    ref = of(reference)
    return algos.implicit_process_rewards(of(prm), ref, rollout.action_mask, beta=beta), ref


def _by_rows(function: Callable[[Any], Any], arrays: tuple, size: int, together: int) -> Any:
    packed = isinstance(arrays[0], Layout)
    shape = (arrays[0].places if packed else arrays[0]).shape
    parts = shape[0] // size
    out = jax.lax.map(function, cut(arrays, parts))
    out = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(shape), out)
    return out_of_parts(out, parts, together) if packed else out


def in_parts(tree: Any, parts: int, together: int) -> Any:
    """Arrays [N …] in the order in which `cut` leaves neighbours of `together` rows in one part."""
    if parts == 1 or together == 1:
        return tree
    one = lambda x: x.reshape(-1, parts, together, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    return jax.tree.map(one, tree)


def out_of_parts(tree: Any, parts: int, together: int) -> Any:
    """What `in_parts` was given."""
    if parts == 1 or together == 1:
        return tree
    one = lambda x: x.reshape(-1, together, parts, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    return jax.tree.map(one, tree)


def credit_rows(
    returns: Float[Array, "N"],
    valid: Bool[Array, "N"],
    rollout: Rollout,
    current: Float[Array, "N T"] | None,
    ref: Float[Array, "N T"] | None,
    kl_coefficient: Float[Array, ""],
    values: Float[Array, "N T"] | None,
    greedy_returns: Float[Array, "N"] | None,
    step_rewards: Float[Array, "N T"] | None = None,
    step_ends: Bool[Array, "N T"] | None = None,
    *,
    rule: CreditRule,
    estimator: str,
) -> Credit:
    """Credit of a rollout; with `ref` the KL to it is paid in the reward."""
    mask = rollout.action_mask
    kl = None if ref is None else algos.kl_estimate(current, ref, mask, estimator=estimator)
    policy = (mask, rollout.logprobs, rollout.turn_ids)
    outcomes = Outcomes(returns, valid, *policy, kl, kl_coefficient, values, greedy_returns, step_rewards, step_ends)
    if (
        rule.reads_lengths and rule.max_length is not None
    ):  # a forced token takes room in a completion, and is no action
        written = rollout.segment_ids[:, mask.shape[1] - rule.max_length :] > 0
        outcomes = outcomes._replace(lengths=written.sum(1, dtype=jnp.int32))
    return rule(outcomes)


def member_scores(
    members: dict[str, Params], tokens: Int32[Array, "N T"], segment_ids: Int32[Array, "N T"], *, model: Model
) -> Float[Array, "K N"]:
    """`row_scores` of each of K stacked reward models."""
    return jax.vmap(lambda one: row_scores(one, tokens, segment_ids, model=model))(members)


def step_chances(
    classifier: dict[str, Params],
    tokens: Int32[Array, "N T"],
    segment_ids: Int32[Array, "N T"],
    step_ends: Bool[Array, "N T"],
    *,
    model: Model,
) -> Float[Array, "N T"]:
    """`algos.process_scores` of the head at every token; NaN where a logit is not finite, which σ would make a 0 or 1."""
    logits = algos.reward_losses.binary_logits(token_logits(classifier, tokens, segment_ids, model=model))
    return jnp.where(step_ends & ~jnp.isfinite(logits), jnp.nan, algos.process_scores(logits, step_ends))
