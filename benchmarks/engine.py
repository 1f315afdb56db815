"""Generation and the gradient against transformers with torch, as ratios within one run.

    python benchmarks/engine.py [--rows 8 32] [--new 64] [--repeats 3]

A SmolLM2-135M-shaped model with random weights, float32, on this machine's CPU; prompts of 40 tokens. The peers take
turns, and the medians are compared. Ours records the log-probs
of what it samples, transformers keeps the scores from which they are computed. docs/benchmarks.md holds the output.
"""

import argparse
import functools
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.models import load
from jaxrl_lm.score import score
from jaxrl_lm.types import Requests

PROMPT = 40


def make_models():
    """The same random weights in both libraries."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        lab_tokenizer().save_pretrained(directory)
        model, params, _ = load(directory)
    return theirs, model, params


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: dict, repeats: int) -> dict[str, float]:
    """Median seconds of each, after one warm-up each."""
    for call in calls.values():
        call()
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return {name: statistics.median(values) for name, values in times.items()}


def bench_generate(theirs, model, params, rows: int, new: int, repeats: int) -> None:
    tokens = np.random.default_rng(0).integers(100, 49000, (rows, PROMPT)).astype(np.int32)
    # No token ends a row here: every row makes `new` tokens on both sides.
    sampling = SamplingConfig(max_new_tokens=new, eos_token_ids=(), pad_token_id=0)
    run = jax.jit(functools.partial(generate, model=model, sampling=sampling))
    decode_params = jax.jit(functools.partial(prepare_decode, model=model))(params)
    requests = Requests(
        jnp.asarray(tokens),
        jnp.ones_like(tokens),
        jax.random.split(jax.random.key(0), rows),
        jnp.full((rows,), new, jnp.int32),
        jnp.ones((rows,), jnp.float32),
        jnp.zeros((), jnp.int32),
    )
    made = int(run(decode_params, requests).action_mask.sum())
    prompt = torch.tensor(tokens, dtype=torch.long)

    def reference():
        with torch.no_grad():
            theirs.generate(
                prompt, max_new_tokens=new, do_sample=True, top_k=0, output_scores=True, return_dict_in_generate=True
            )

    found = interleaved(
        {"ours": lambda: jax.block_until_ready(run(decode_params, requests)), "transformers": reference}, repeats
    )
    ours, peer = made / found["ours"], rows * new / found["transformers"]
    print(f"generate {rows:4} rows × {new}: {ours:7.1f} tokens/s, transformers {peer:7.1f}, ratio {ours / peer:.2f}")


def bench_update(theirs, model, params, repeats: int, rows: int = 16, columns: int = 96) -> None:
    tokens = np.random.default_rng(1).integers(100, 49000, (rows, columns)).astype(np.int32)
    ones = jnp.ones_like(tokens)
    loss = lambda p: -score(p, jnp.asarray(tokens), ones, model=model).logprobs.mean()
    gradient = jax.jit(jax.grad(loss))
    labels = torch.tensor(tokens, dtype=torch.long)

    def reference():
        theirs.zero_grad()
        theirs(labels, labels=labels).loss.backward()

    found = interleaved({"ours": lambda: jax.block_until_ready(gradient(params)), "torch": reference}, repeats)
    ours, peer = (rows * columns / found[name] for name in ("ours", "torch"))
    print(f"gradient {rows:4} rows × {columns}: {ours:7.1f} tokens/s, torch {peer:7.1f}, ratio {ours / peer:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    theirs, model, params = make_models()
    for rows in options.rows:
        bench_generate(theirs, model, params, rows, options.new, options.repeats)
    bench_update(theirs, model, params, options.repeats)


if __name__ == "__main__":
    main()
