"""The engine's table: ours, Tunix, transformers and TRL on the same work in turns, as ratios within one run.

    python benchmarks/engine.py [generate long_tail group score train grpo head] [--cache DIR] [--turns 2]

SmolLM2-135M-Instruct in float32 on this machine's CPU; see docs/benchmarks.md for the work, and peers.py for the peers.
`make bench` runs all of it, and grpo once more with memory kept (the Makefile has how).
"""

import argparse
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from ours import Ours, decode_limit, layer_weights, limits, prefill_limit, products_alone
from peers import CACHE, Peer, best, interleaved, model_directory

from jaxrl_lm.score import by_columns, token_scores

WHAT = ("generate", "group", "long_tail", "score", "train", "grpo", "head")


def show(title: str, found: dict[str, dict]) -> None:
    """A row: tokens a second of each, and ours over each peer's."""
    rates = {name: answer["tokens"] / answer["seconds"] for name, answer in found.items()}
    ratios = ", ".join(f"{rates['ours'] / rate:.2f} × {name}" for name, rate in rates.items() if name != "ours")
    print(
        f"{title}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()) + f" tokens/s; {ratios}",
        flush=True,
    )


def compare(
    title: str, task: str, ours: Ours, own: dict, peers: list[tuple[Peer, dict]], turns: int, timed: int = 2
) -> dict[str, dict]:
    calls = {"ours": lambda: ours.ask(task, **own)}
    calls |= {peer.name: lambda peer=peer, options=options: peer.ask(task, **options) for peer, options in peers}
    found = interleaved(calls, turns, timed=timed)
    show(title, found)
    return found


def generate(ours: Ours, tunix: Peer, torch: Peer, turns: int) -> None:
    modes = [{"mode": "dynamic"}]
    for rows in (8, 32, 128):
        work = {"rows": rows, "prompt": 40, "new": 64}
        found = compare(
            f"generate, {rows} rows of 64 tokens after 40", "generate", ours, work,
            [(tunix, work), (torch, best(torch, "generate", modes, **work))], *((turns, 2) if rows < 128 else (1, 1)),
        )  # fmt: skip
        rates, took = limits(), found["ours"]["seconds"]
        first = statistics.median(ours.ask("generate", **work | {"new": 1})["seconds"] for _ in range(3))
        prompts = prefill_limit(ours.model, rows, 40 - 1, rates)  # the last token is the first pass's
        least = decode_limit(ours.model, rows, 40 + 32, rates)
        passed = (took - first) / 63
        print(
            f"  {(prompts + 64 * least) / took:.0%} of the limit at {rates['flops'] / 1e9:.0f} GFLOP/s and "
            f"{rates['bytes'] / 1e9:.0f} GB/s; of a pass alone {least / passed:.0%}: {1e3 * passed:.1f} ms, and not less "
            f"than {1e3 * least:.1f} ms; of the prompts alone {prompts / (first - passed):.0%}; a pass's products by "
            f"themselves take {1e3 * products_alone(ours, rows):.1f} ms",
            flush=True,
        )


def group(ours: Ours, tunix: Peer, torch: Peer, turns: int) -> None:
    work = {"rows": 8, "prompt": 512, "new": 8, "group": 8}
    modes = [{"mode": "dynamic"}, {"mode": "continuous"}]
    peers = [(tunix, work), (torch, best(torch, "generate", modes, **work))]
    compare("a group of 8 on a prompt of 512, 8 tokens each", "generate", ours, work, peers, turns)
    alone = work | {"rows": 1, "group": 1, "new": 1}
    one = ours.ask("generate", **work | {"new": 1})["seconds"] / ours.ask("generate", **alone)["seconds"]
    print(f"  prefill and one token of 8 rows of one prompt take {one:.2f} times those of one row")


def tail(ours: Ours, tunix: Peer, torch: Peer, turns: int) -> None:
    # One size of each peer, for Tunix compiles each for minutes; `peers.py long_tail --batches` compares more.
    tunix_work, torch_work = {"batch": 8}, {"batch": 16, "mode": "continuous"}
    rate = lambda answer: answer["tokens"] / answer["seconds"]
    chosen = max((8, 12, 16), key=lambda slots: max(rate(ours.ask("long_tail", slots=slots)) for _ in range(2)))
    calls = {
        "ours": lambda: ours.ask("long_tail", slots=chosen),
        "tunix": lambda: tunix.ask("long_tail", **tunix_work),
        "transformers": lambda: torch.ask("long_tail", **torch_work),
    }
    found = interleaved(calls, 1)
    show(f"long tail: 64 requests, {chosen} slots, tunix {tunix_work}, transformers {torch_work}", found)
    for slots in (8, 12, 16):
        answer = ours.ask("long_tail", slots=slots)
        print(
            f"  {slots} slots: {rate(answer):.1f} tokens/s, {answer['passes']} passes (list scheduling "
            f"{answer['list_scheduling']}), slots busy {answer['busy']:.1%} of them all"
        )


def learn(task: str, ours: Ours, torch: Peer, turns: int) -> None:
    for low in (20, 200):
        work = {"rows": 16, "low": low, "high": 200}
        cuts = [{"cuts": count} for count in (2, 4)]
        own = work | min(cuts, key=lambda cut: ours.ask(task, **work, **cut)["seconds"])
        title = f"{task}, 16 rows of {low} to 200 tokens"
        sizes = [{"batch": size} for size in (4, 8)]
        found = compare(title, task, ours, own, [(torch, best(torch, task, sizes, **work))], turns)
        m, rates = ours.model.config, limits()
        passes = 3 if task == "train" else 1  # backward is twice forward
        flops = 2.0 * passes * (layer_weights(m) + m.vocab_size * m.hidden_size) * found["ours"]["tokens"]
        share = flops / found["ours"]["seconds"] / rates["flops"]
        print(f"  products with weights alone: {share:.0%} of {rates['flops'] / 1e9:.0f} GFLOP/s")


def grpo(ours: Ours, trl: Peer, turns: int) -> None:
    """Seconds of a whole step of 16 completions."""
    calls = {
        "ours": lambda: ours.ask("grpo"),
        "ours, prompt once a group": lambda: ours.ask("grpo", share_prompt=True),
        "trl": lambda: trl.ask("grpo"),
    }
    found = interleaved(calls, turns)
    for name, answer in found.items():
        times = found["trl"]["seconds"] / answer["seconds"]
        print(
            f"GRPO step, {answer['completions']} completions, {answer['tokens']} tokens of at most 32 each: {name} "
            f"{answer['seconds']:.2f} s, {times:.2f} × trl",
            flush=True,
        )


def head() -> None:
    """Peak memory of the head's log-probs and their gradient, 4 rows of 2048, against logits that stand whole."""
    width, vocab, rows, columns = 896, 151_936, 4, 2048
    hidden, table = (
        jax.ShapeDtypeStruct((rows, columns, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
    )
    tokens = jax.ShapeDtypeStruct((rows, columns), jnp.int32)

    def naive(hidden, table, tokens):
        logits = jnp.einsum("ntd,vd->ntv", hidden, table)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).sum()

    def chunked(hidden, table, tokens):
        one = lambda h, t: token_scores(jnp.einsum("ntd,vd->ntv", h, table), t, jnp.ones((rows,))).logprobs
        return by_columns(one, hidden, tokens, chunk=64).sum()

    given = (hidden, table, tokens)
    compiled = lambda function: jax.jit(jax.grad(function, (0, 1))).lower(*given).compile()
    ours, theirs = (compiled(function).memory_analysis().temp_size_in_bytes for function in (chunked, naive))
    print(
        f"head, V = {vocab}, width {width}, 4 rows of 2048, in chunks of 64 tokens: temporaries {ours / 2**20:.0f} MiB of "
        f"{theirs / 2**20:.0f} MiB, 1/{theirs / ours:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=WHAT, help=", ".join(WHAT))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    unknown = set(options.what) - set(WHAT)
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(WHAT)}")
    ours = Ours(model_directory(options.cache))
    wanted = [name for name in WHAT if name in options.what]
    peer = lambda name: Peer(name, cache=options.cache)  # in turn, for several training states fill the memory
    sampling = {"generate": generate, "group": group, "long_tail": tail}
    if sampling.keys() & set(wanted):
        with peer("tunix") as tunix, peer("transformers") as torch:
            for name in [name for name in wanted if name in sampling]:
                sampling[name](ours, tunix, torch, options.turns)
    for name in [name for name in wanted if name in ("score", "train")]:
        with peer("transformers") as torch:
            learn(name, ours, torch, options.turns)
    if "grpo" in wanted:
        with peer("trl") as trl:
            grpo(ours, trl, options.turns)
    if "head" in wanted:
        head()


if __name__ == "__main__":
    main()
