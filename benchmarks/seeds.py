"""Several seeds of a tiny model by one `vmap` against one call each: generation and the gradient, as ratios in one run.

    python benchmarks/seeds.py [--seeds 5] [--rows 128] [--new 32] [--repeats 5]

A model of the size of benchmarks/lab_presets.py with random weights. `--seeds N` on the command line makes runs that share
compiled steps; a vmap over seeds would pay where this prints more than 1. docs/benchmarks.md holds the output.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.models import ModelConfig, build
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.types import Requests

PROMPT = 16


def seconds(function, *args, repeats: int) -> float:
    """The median time of a call, after one that compiles."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"seeds": 5, "rows": 128, "new": 32, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    shape = {"hidden_size": 80, "intermediate_size": 216, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2}
    model = build(ModelConfig(vocab_size=24, head_dim=40, tie_embeddings=True, initializer_range=0.05, **shape))
    params = model.init(jax.random.key(0))
    # No end of sequence: every call decodes all columns.
    sampling = SamplingConfig(max_new_tokens=args.new, eos_token_ids=(1000,), pad_token_id=0)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(2, 24, (args.rows, PROMPT + args.new)), jnp.int32)
    ones = jnp.ones(tokens.shape, jnp.int32)
    requests = Requests(
        tokens[:, :PROMPT],
        ones[:, :PROMPT],
        jax.random.split(jax.random.key(1), args.rows),
        jnp.full(args.rows, args.new, jnp.int32),
        jnp.ones(args.rows, jnp.float32),
        jnp.int32(0),
    )
    sample = functools.partial(generate, model=model, sampling=sampling)
    gradient = jax.grad(lambda params, tokens, ones: score(params, tokens, ones, model=model).logprobs.mean())
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * args.seeds), tree)
    decode = jax.jit(functools.partial(prepare_decode, model=model))(params)
    size = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    print(f"{size:.2f} M parameters, {args.rows} rows, {jax.devices()[0].device_kind}\n")
    print(f"| | one seed | {args.seeds} seeds by vmap | {args.seeds} calls / vmap |\n|---|---|---|---|")
    for name, function, inputs in (
        ("generation", sample, (decode, requests)),
        ("gradient", gradient, (params, tokens, ones)),
    ):
        one = seconds(jax.jit(function), *inputs, repeats=args.repeats)
        together = seconds(jax.jit(jax.vmap(function)), *stack(inputs), repeats=args.repeats)
        print(f"| {name} | {one * 1e3:.0f} ms | {together * 1e3:.0f} ms | {args.seeds * one / together:.2f} |")


if __name__ == "__main__":
    main()
