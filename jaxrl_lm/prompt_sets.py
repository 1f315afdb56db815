"""The prompts of a run: rows of files read, routed to rewards, encoded, and the padded lengths that hold them."""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxrl_lm.checks import check_held_out, check_routes
from jaxrl_lm.config import GRPOConfig, PromptOptions
from jaxrl_lm.data import choose_bucket, default_buckets, read_rows
from jaxrl_lm.encode import EncodedPrompts, encode_prompts
from jaxrl_lm.judges import Rewards

Rows = list[dict[str, Any]]


class Data(NamedTuple):
    """Encoded prompts, and the padded lengths that hold them."""

    prompts: EncodedPrompts
    eval_sets: dict[str, EncodedPrompts]
    buckets: tuple[int, ...]


def encode_with(config: PromptOptions, tokenizer: Any, rows: list[dict[str, Any]], name: str) -> EncodedPrompts:
    """The rows' prompts, encoded as a config's options say."""
    return encode_prompts(
        rows,
        tokenizer,
        max_prompt_length=config.max_prompt_length,
        long_prompts=config.long_prompts,
        prompt_template=config.prompt_template,
        system_prompt=config.system_prompt,
        name=name,
    )


def drop_notes(sets: dict[str, EncodedPrompts], limit: int) -> list[str]:
    """What to say of prompts that were longer than the limit."""
    return [
        f"{name}: {encoded.dropped} prompts dropped and {encoded.cut} cut, longer than max_prompt_length={limit}"
        for name, encoded in sets.items()
        if encoded.dropped or encoded.cut
    ]


def fingerprint(prompts: EncodedPrompts) -> str:
    """A hash of the encoded prompts and their rows, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for ids, row in zip(prompts.ids, prompts.rows, strict=True):
        digest.update(repr((ids, sorted(row.items()))).encode())
    return digest.hexdigest()


def read_data(config: GRPOConfig, dataset: Any, rewards: Rewards) -> tuple[Rows, dict[str, Rows]]:
    """Rows of the training set and of the evaluation sets, whose routes to rewards are checked."""
    rows = read_rows(dataset if dataset is not None else config.dataset, name="dataset")
    check_routes(rewards.train, rows, "dataset")
    eval_rows = {name: read_rows(source, name=f"eval_dataset {name!r}") for name, source in config.eval_dataset.items()}
    for name, held in eval_rows.items():
        check_routes(rewards.evaluate, held, f"eval_dataset {name!r}")
    return rows, eval_rows


def encode_data(config: GRPOConfig, tokenizer: Any, rows: Rows, eval_rows: dict[str, Rows]) -> Data:
    """The prompts as tokens. Raises ValueError for a held-out prompt that is trained on, or that fits no bucket."""
    prompts = encode_with(config, tokenizer, rows, "dataset")
    eval_sets = {
        name: encode_with(config, tokenizer, held, f"eval_dataset {name!r}") for name, held in eval_rows.items()
    }
    check_held_out(prompts, eval_sets)
    return Data(prompts, eval_sets, buckets_of(config, (prompts, *eval_sets.values()))[0])


def buckets_of(config: PromptOptions, sets: Iterable[EncodedPrompts]) -> tuple[tuple[int, ...], int]:
    """The padded lengths of prompts in rising order, and the one that holds the longest prompt of these sets.

    Those that are declared, or one that holds all. Raises ValueError where the longest fits none.
    """
    lengths = [len(ids) for encoded in sets for ids in encoded.ids]
    buckets = tuple(sorted(config.prompt_buckets)) or default_buckets(lengths)
    return buckets, choose_bucket(max(lengths), buckets)
