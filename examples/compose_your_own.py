"""A new algorithm outside the package: median baseline, sequence-level clipping, an entropy bonus.

Two pure functions of public names, trained by the same compiled loop as every preset. Run:

    jaxrl-lm lab --output_dir runs/lab --control false          (once, for a model and data)
    python examples/compose_your_own.py runs/lab [max_steps]
"""

import sys

# --- the algorithm ---------------------------------------------------------------------------------------------------
import jax.numpy as jnp

import jaxrl_lm
from jaxrl_lm import algos, metrics


def advantages(returns, *, group_size, valid):
    groups = jnp.where(valid, returns, jnp.nan).reshape(-1, group_size)
    return jnp.nan_to_num(groups - jnp.nanmedian(groups, axis=1, keepdims=True)).reshape(-1)


def objective(params, frozen, batch, *, model):
    scores = jaxrl_lm.score(
        params["policy"], batch.tokens, batch.segment_ids, model=model, temperature=batch.temperature
    )
    mask = batch.action_mask
    losses = algos.clipped_surrogate(
        scores.logprobs, batch.sampler_logprobs, batch.advantages, mask, clip_low=3e-3, clip_high=4e-3, level="sequence"
    )
    loss = jnp.sum(batch.weights * (losses - 1e-3 * jnp.where(mask, scores.entropy, 0.0)))
    return loss, {"entropy": metrics.mean_of(scores.entropy, mask)}


# --- the run ---------------------------------------------------------------------------------------------------------


def main(lab: str, max_steps: int = 20) -> None:
    config = jaxrl_lm.GRPOConfig(
        model=f"{lab}/sft",
        dataset=f"{lab}/data/train.jsonl",
        eval_dataset={"test": f"{lab}/data/test.jsonl"},
        reward=("jaxrl_lm.lab.task:lab_answer",),
        output_dir=f"{lab}/compose_your_own",
        num_iterations=2,
        max_completion_length=40,
        learning_rate=3e-4,
        max_steps=max_steps,
        eval_steps=max_steps,
    )
    run = jaxrl_lm.train(config, advantages=advantages, objective=objective)
    print({name: round(value, 3) for name, value in run.metrics[-1].items() if name.startswith("eval/test/")})


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
