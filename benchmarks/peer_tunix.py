"""Tunix's sampler on CPU, as a peer of peers.py: `python peer_tunix.py MODEL_DIRECTORY REPLY_DESCRIPTOR`.

Each call has a cache of exactly its length; log-probs of the sampled tokens are recorded; no token ends a row. Tunix has
no limit per row: a batch decodes to its longest request.
"""

import functools
import json
import sys
from pathlib import Path

import jax.numpy as jnp
from peer_serve import serve
from peer_work import batches, long_tail, prompts
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params

NO_TOKEN = -1


class Ids:
    """A tokenizer whose text is the ids, so that tokenizing costs next to nothing; no id is special."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # Tunix adds none then

    def eos_id(self) -> int:
        return NO_TOKEN

    def pad_id(self) -> int:
        return NO_TOKEN


def load(directory: Path) -> llama.Llama3:
    """The directory's model in float32, by Tunix's own reader."""
    hf = json.loads((directory / "config.json").read_text())
    config = llama.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(hf["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        weight_tying=hf["tie_word_embeddings"],
    )
    # Tunix 0.1.7's Llama ignores its rope_theta and takes the function's default of 1,000,000.
    llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=config.rope_theta)
    return params.create_model_from_safe_tensors(str(directory), config, dtype=jnp.float32)


def caller(model, ids: list[list[int]], new: int, *, greedy: bool = False):
    """A function that generates `new` tokens for each row and returns Tunix's output."""
    config = model.config
    columns = max(len(row) for row in ids)
    cache = CacheConfig(
        cache_size=columns + new,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = Sampler(model, Ids(), cache)
    texts = [" ".join(map(str, row)) for row in ids]
    # Without top_p Tunix is greedy; with 1.0 and no top_k it samples from all tokens and sorts nothing.
    how = {} if greedy else {"top_p": 1.0, "temperature": 1.0}
    return functools.partial(
        sampler,
        texts,
        max_generation_steps=new,
        max_prompt_length=columns,
        eos_tokens=[NO_TOKEN],
        return_logprobs=True,
        seed=0,
        **how,
    )


def made(output) -> int:
    return sum(len(row) for row in output.tokens)


def tasks(model) -> dict:
    """What peers.py may ask for."""

    def generate(*, rows: int, prompt: int = 40, new: int = 64, group: int = 1, greedy: bool = False):
        call = caller(model, prompts(rows=rows, columns=prompt, group=group), new, greedy=greedy)
        return lambda: {"tokens": made(call())}

    def tail(*, batch: int, prompt: int = 40, **drawn):
        lengths = long_tail(**drawn)
        ids = prompts(rows=len(lengths), columns=prompt)
        cuts = list(zip(batches(ids, batch), batches(lengths, batch), strict=True))
        calls = [caller(model, rows, max(limits)) for rows, limits in cuts]
        return lambda: {"decoded": sum(made(call()) for call in calls), "tokens": sum(lengths)}

    def tokens(*, ids: list[list[int]], new: int):
        call = caller(model, ids, new, greedy=True)

        def run():
            output = call()
            return {"ids": [row.tolist() for row in output.tokens], "logprobs": [list(x) for x in output.logprobs]}

        return run

    return {"generate": generate, "long_tail": tail, "greedy": tokens}


if __name__ == "__main__":
    serve(tasks(load(Path(sys.argv[1]))), ("google-tunix", "jax", "flax"))
