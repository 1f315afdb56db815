"""Our side of the engine's table: the tasks of peer_work.py, each as a function that gives the call to be measured.

SmolLM2-135M-Instruct in float32 from the directory that all peers load. `limits` measures what the machine can do at most.
"""

import dataclasses
import functools
import heapq
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from peer_work import long_tail, prompts, questions, sequences
from stepped import SteppedRun

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.example import Example
from jaxrl_lm.generate import collect, decode, prepare_decode, read_prompts
from jaxrl_lm.models import load
from jaxrl_lm.optim import make_optimizer
from jaxrl_lm.packing import best_fit, pack
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sequences import align
from jaxrl_lm.slots import start
from jaxrl_lm.types import Requests


class Ours:
    """The interface of peers.Peer for our own engine: `ask(task, **options)` gives seconds, tokens and more."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.model, self.params, _ = load(directory)
        self.weights = jax.jit(functools.partial(prepare_decode, model=self.model))(self.params)
        self.calls = {}

    def ask(self, task: str, **options) -> dict:
        key = (task, *sorted(options.items()))
        if key not in self.calls:
            # A training state has the size of four models.
            self.calls = {old: call for old, call in self.calls.items() if old[0] == task != "train"}
            self.calls[key] = getattr(self, task)(**options)
            self.calls[key]()
        began = time.perf_counter()
        found = self.calls[key]()
        return {"seconds": time.perf_counter() - began} | found

    def _sampler(self, rows: list[list[int]], limits: list[int], *, slots: int | None, group: int = 1):
        """A call that samples these rows, each prompt standing once, with its state at the end."""
        sampling = SamplingConfig(max_new_tokens=max(limits), eos_token_ids=(), pad_token_id=0, slots=slots)
        tokens = jnp.asarray(rows[::group], jnp.int32)
        requests = Requests(
            tokens=tokens,
            segment_ids=jnp.ones_like(tokens),
            keys=jax.random.split(jax.random.key(0), len(rows)),
            max_new=jnp.asarray(limits, jnp.int32),
            temperature=jnp.ones((len(rows),), jnp.float32),
            policy_step=jnp.zeros((), jnp.int32),
        )

        @jax.jit
        def sample(weights, requests):
            prefixes = read_prompts(weights, requests, model=self.model)
            state = start(prefixes, requests, model=self.model, sampling=sampling)
            state = decode(weights, requests, state, model=self.model, sampling=sampling)
            return collect(state, requests, sampling=sampling), state.step, state.busy

        return lambda: jax.block_until_ready(sample(self.weights, requests))

    def generate(self, *, rows: int, prompt: int = 40, new: int = 64, group: int = 1):
        sample = self._sampler(prompts(rows=rows, columns=prompt, group=group), [new] * rows, slots=None, group=group)
        return lambda: {"tokens": int(sample()[0].action_mask.sum())}

    def long_tail(self, *, slots: int, prompt: int = 40):
        lengths = long_tail()
        sample = self._sampler(prompts(rows=len(lengths), columns=prompt), lengths, slots=slots)

        def run():
            rollout, passes, busy = sample()
            return {
                "tokens": int(rollout.action_mask.sum()),
                "passes": int(passes),
                "busy": int(busy) / int(passes) / slots,
                "list_scheduling": list_scheduling(lengths, slots),
            }

        return run

    def grpo(self, *, completions: int = 16, group: int = 8, new: int = 32, share_prompt: bool = False):
        """A whole step of `jaxrl_lm.train`, from one hand-over of completions to the next: `peer_trl.grpo`'s work."""
        config = GRPOConfig(
            model=str(self.directory),
            dataset="questions",
            output_dir=tempfile.mkdtemp(),
            prompts_per_step=completions // group,
            num_generations=group,
            max_completion_length=new,
            learning_rate=1e-6,
            max_steps=1_000_000,
            save_steps=0,
            share_prompt=share_prompt,
        )
        stepped = SteppedRun(config, questions(64))
        for _ in range(4):  # update and sampling are compiled, for most of the widths that rows come to
            stepped.step()

        def run():
            stepped.step()
            return {"completions": len(stepped.lengths), "tokens": sum(stepped.lengths)}

        return run

    def _packed(self, rows: int, low: int, high: int):
        """Rows that hold the sequences of `peer_work.sequences`, and a loss over all tokens but each one's first.

        They are as wide, up to twice the longest sequence, as leaves the fewest columns empty.
        """
        drawn = sequences(rows=rows, low=low, high=high)
        examples = [Example(ids, [False] + [True] * (len(ids) - 1)) for ids in drawn]
        lengths, widths = list(map(len, drawn)), range(-(-high // 8) * 8, 2 * high, 8)
        columns = min(widths, key=lambda width: width * len(best_fit(lengths, width)))
        tokens, segments, mask, _ = align(pack(examples, max_length=columns), start=None, columns=columns, pad_id=0)
        return sum(map(len, drawn)), jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(mask)

    def score(self, *, rows: int = 32, low: int = 20, high: int = 200, cuts: int = 4):
        count, tokens, segments, mask = self._packed(rows, low, high)
        batch = -(-len(tokens) // cuts)
        parts = [slice(first, first + batch) for first in range(0, len(tokens), batch)]
        scored = jax.jit(lambda p, t, s, m: -jnp.where(m, score(p, t, s, model=self.model).logprobs, 0.0).sum())

        def run():
            return {
                "tokens": count,
                "loss": sum(float(scored(self.params, tokens[c], segments[c], mask[c])) for c in parts),
            }

        return run

    def train(self, *, rows: int = 32, low: int = 20, high: int = 200, cuts: int = 4):
        count, tokens, segments, mask = self._packed(rows, low, high)
        batch = -(-len(tokens) // cuts)
        options = {"max_grad_norm": 0.0, "weight_decay": 0.0, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
        tx = make_optimizer(lambda _: 1e-6, **options)
        # What a run takes on a CPU where no option says otherwise.
        model = dataclasses.replace(self.model, config=dataclasses.replace(self.model.config, remat="dots"))
        loss = lambda p, t, s, m: -jnp.where(m, score(p, t, s, model=model).logprobs, 0.0).sum() / count
        gradient = jax.jit(
            lambda total, p, *given: jax.tree.map(jnp.add, total, jax.grad(loss)(p, *given)), donate_argnums=0
        )

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, gradients):
            updates, state = tx.update(gradients, state, params)
            return jax.tree.map(jnp.add, params, updates), state

        held = [jax.tree.map(jnp.copy, self.params), jax.jit(tx.init)(self.params)]

        def run():
            total = jax.tree.map(jnp.zeros_like, held[0])
            for first in range(0, len(tokens), batch):
                cut = slice(first, first + batch)
                total = gradient(total, held[0], tokens[cut], segments[cut], mask[cut])
            held[:] = step(*held, total)
            jax.block_until_ready(held[0])
            return {"tokens": count}

        return run


def list_scheduling(lengths: list[int], slots: int) -> int:
    """Passes until the last of these requests has ended, if each slot takes the next one as soon as it is free."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def seconds(call, repeats: int = 5) -> float:
    """The median of some calls, after one that is not measured."""
    jax.block_until_ready(call())
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def limits() -> dict[str, float]:
    """What the machine does at most here: FLOP/s of a large product in float32, bytes/s of reading memory."""
    a, b = (jax.random.normal(jax.random.key(n), (2048, 2048)) for n in range(2))
    product, total = jax.jit(jnp.matmul), jax.jit(jnp.sum)
    large = jnp.ones((1 << 27,), jnp.float32)
    return {
        "flops": 2 * 2048**3 / seconds(lambda: product(a, b)),
        "bytes": large.nbytes / seconds(lambda: total(large)),
    }


def layer_weights(m) -> int:
    """The numbers in the matrices of all layers."""
    per_layer = m.hidden_size * (2 * (m.num_heads + m.num_kv_heads) * m.head_dim + 3 * m.intermediate_size)
    return m.num_layers * per_layer


def _pair(m) -> float:
    """Operations of attention for a query and a key."""
    return 4.0 * m.num_layers * m.num_heads * m.head_dim


def products_alone(ours: "Ours", rows: int, passes: int = 8) -> float:
    """Seconds that the products of a pass with weights take by themselves, one after another as the layers need them."""
    groups = ours.model.config.num_heads // ours.model.config.num_kv_heads

    @jax.jit
    def run(weights, x):
        def one(_, x):
            for layer in weights["layers"]:
                qkv = jnp.einsum("cgkd,dw->cgkw", layer["qkv"]["kernel"], x)
                x = x + layer["o"]["kernel"] @ qkv[:, :groups].reshape(-1, rows)
                gate, up = jnp.einsum("nfd,dw->nfw", layer["gate_up"]["kernel"], x)
                x = x + layer["down"]["kernel"] @ (gate * up)
            logits = weights["embed"]["table"] @ x
            return x / (1 + jnp.abs(logits).max())  # so that nothing grows, and no product is left out

        return jax.lax.fori_loop(0, passes, one, x)

    x = jax.random.normal(jax.random.key(0), (ours.model.config.hidden_size, rows))
    return seconds(lambda: run(ours.weights, x)) / passes


def prefill_limit(model, rows: int, columns: int, found: dict[str, float]) -> float:
    """Seconds that reading the prompts cannot be faster than: products of each token with the layers, attention to what
    stands before it. A prompt needs no logits."""
    m, pairs = model.config, columns * (columns + 1) / 2
    return rows * (2.0 * columns * layer_weights(m) + _pair(m) * pairs) / found["flops"]


def decode_limit(model, rows: int, columns: float, found: dict[str, float]) -> float:
    """Seconds that a pass of decoding cannot be faster than: its arithmetic, or the weights and caches that it reads."""
    m = model.config
    weights = layer_weights(m) + m.vocab_size * m.hidden_size
    flops = rows * (2.0 * weights + _pair(m) * columns)
    read = 4.0 * (weights + rows * m.num_layers * 2 * m.num_kv_heads * m.head_dim * columns)
    return max(flops / found["flops"], read / found["bytes"])
