"""The host's side of sampling: encoded prompts in, token arrays on the devices and texts out.

The compiled part is `generate.py`. Rewards are computed on what comes from here: `rewards/`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxrl_lm.chunks import sample_in_chunks
from jaxrl_lm.data import choose_bucket, left_pad
from jaxrl_lm.distributed import gather, spread
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.steps import Steps
from jaxrl_lm.types import Requests, Rollout

# Purposes, whose rows never share a key; evaluation set i has EVAL + i.
TRAIN, PROBE, EVAL, GREEDY = 0, 1, 2, 1 << 29


class Sampled(NamedTuple):
    """Completions of some prompts, a prompt's G rows adjacent; rows that only fill the batch stand at the end."""

    rollout: Rollout  # on the devices, all N rows
    temperature: Float[Array, "N"]
    count: int  # rows that are real
    rows: list[dict[str, Any]]  # the dataset row of each real row
    prompts: list[Any]  # as in the dataset, text or messages
    texts: list[str]
    completion_ids: list[list[int]]  # the tokens of the completion: those that the policy chose, and forced ones
    logprob_sums: np.ndarray  # [count], of the tokens that the policy chose
    truncated: np.ndarray  # [count]
    passes: np.ndarray | None = None  # [count], forward passes of decoding; None: one a token, or not known


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What sampling needs beside weights and prompts."""

    steps: Steps
    tokenizer: Any
    buckets: tuple[int, ...]
    prompts_per_call: int
    group_size: int
    max_new_tokens: int
    pad_token_id: int
    stops: Any = None  # table of stop strings on the devices, or `logit_rules.Tables`
    forces: bool = False  # whether rules put tokens into rows that the policy did not choose
    source: Callable[..., Rollout] | None = None  # (indices, weights, requests, stops): what samples, if not `steps`
    drafts: bool = False  # earlier completions go with the requests

    def __call__(
        self,
        decode_params: Any,
        key: jax.Array,
        prompts: EncodedPrompts,
        indices: Sequence[int],
        *,
        purpose: int,
        step: int,
        temperature: Float[np.ndarray, "N"] | float,
        policy_step: int,
        first_only: bool = False,
        earlier: Sequence[np.ndarray] = (),
        beside: Any = None,
    ) -> Sampled:
        """G completions of each of the prompts `indices` (at most `prompts_per_call`); `first_only`: the first of each.

        `earlier`: completions that speculation guesses from, one a row, which may be empty; read where `drafts` says so.
        `beside` sees rows as they end (`beside.Beside`), where decoding runs in chunks.

        Keys are a function of (key, purpose, step, row). Raises ValueError if a prompt fits no bucket.
        """
        rows = self.prompts_per_call * self.group_size
        count = len(indices) * self.group_size
        filled = [*indices, *[indices[0]] * (self.prompts_per_call - len(indices))]
        ids = [prompts.ids[i] for i in filled]
        tokens, segment_ids = left_pad(ids, choose_bucket(max(map(len, ids)), self.buckets), self.pad_token_id)
        sampled = (np.arange(rows) < count) & (~np.bool_(first_only) | (np.arange(rows) % self.group_size == 0))
        limits = np.where(sampled, self.max_new_tokens, 0).astype(np.int32)
        temperature = np.broadcast_to(np.asarray(temperature, np.float32), (rows,))
        keys = self.steps.row_keys(key, np.int32(purpose), np.int32(step))
        drafts = self._drafts(earlier, rows) if self.drafts else None
        requests = Requests(tokens, segment_ids, keys, limits, temperature, np.int32(policy_step), drafts)
        requests = self.steps.place_rollout(requests)
        if self.source is not None:
            rollout = self.source(filled, decode_params, requests, self.stops)
        elif self.steps.chunks is None:
            rollout = self.steps.generate(decode_params, requests, self.stops)
        else:
            watch = None if beside is None else beside.watch
            rollout = sample_in_chunks(self.steps.chunks, decode_params, requests, self.stops, watch)
        chosen, mask, logprobs, truncated, passes = gather(
            (rollout.tokens, rollout.action_mask, rollout.logprobs, rollout.truncated, rollout.passes)
        )
        written = mask
        if self.forces:
            written = (gather(rollout.segment_ids) > 0) & (np.arange(mask.shape[1]) >= tokens.shape[1])
        completion_ids = [chosen[n, written[n]].tolist() for n in range(count)]
        decode = lambda own: self.tokenizer.batch_decode(completion_ids[own.start : own.stop], skip_special_tokens=True)
        texts = spread(count, decode) if beside is None else beside.texts()
        dataset_rows = [prompts.rows[i] for i in indices for _ in range(self.group_size)]
        return Sampled(
            rollout=self.steps.place(rollout),
            temperature=self.steps.place(temperature),
            count=count,
            rows=dataset_rows,
            prompts=[row["prompt"] for row in dataset_rows],
            texts=texts,
            completion_ids=completion_ids,
            logprob_sums=np.where(mask, logprobs, 0.0).sum(1)[:count],
            truncated=truncated[:count],
            passes=None if passes is None else passes[:count],
        )

    def _drafts(self, earlier: Sequence[np.ndarray], rows: int) -> Int32[np.ndarray, "N C"]:
        drafts = np.full((rows, self.max_new_tokens), -1, np.int32)
        for row, ids in zip(drafts, earlier, strict=False):
            row[: len(ids)] = ids
        return drafts
