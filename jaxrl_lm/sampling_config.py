"""What a sampler compiles in, and which of its options go together.

From a run's options it is made by `rule_tables.sampling_of`.
"""

import dataclasses
import math

SOURCES = ("prompt_lookup", "last_epoch")  # of speculation's drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What a sampler compiles in. Temperatures, limits and keys are arrays instead (`types.Requests`)."""

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    slots: int | None = None  # rows that are decoded at once, at most; None: all
    # Rules, see `logit_rules.py`.
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    min_new_tokens: int = 0
    forced_tokens: tuple[int, ...] = ()
    max_thinking_tokens: int | None = None  # with a table of where thinking ends
    end_of_thinking: tuple[int, ...] = ()  # what is then forced
    vocabulary_mask: bool = False  # with the table of a grammar
    kv_cache_dtype: str | None = None  # int8, or None: that of the computation
    observation_columns: int | None = None  # tokens that a turn's row is given at once, at most; None: it is over
    num_speculative_tokens: int | None = None  # read beside each new token, see speculate.py; None, 0: none
    speculative_source: str = "prompt_lookup"
    prompt_lookup_max: int = 3

    def __post_init__(self):
        if self.observation_columns is not None and self.observation_columns < 1:
            raise ValueError(
                f"observation_columns={self.observation_columns}: must be at least 1 (leave it out to end rows with their "
                "first turn)"
            )
        if self.kv_cache_dtype not in (None, "int8"):
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is unknown: use int8, or leave it out for the computation's own"
            )
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"decode_slots={self.slots}: must be at least 1 (leave it out to decode all rows at once)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: at least one token must be asked for")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be at least 1 (leave it out to turn it off)")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value}: must be in (0, 1] (leave it out to turn it off)")
        self._check_rules()
        self._check_speculation()

    def _check_speculation(self) -> None:
        draft = self.num_speculative_tokens or 0
        if draft < 0:
            raise ValueError(f"num_speculative_tokens={draft}: must be at least 1 (leave it out to turn it off)")
        if draft >= self.max_new_tokens:
            raise ValueError(
                f"num_speculative_tokens={draft}: must be below the {self.max_new_tokens} new tokens that a row has room "
                "for (max_completion_length)"
            )
        if self.speculative_source not in SOURCES:
            raise ValueError(f"speculative_source={self.speculative_source!r} is unknown: use {' or '.join(SOURCES)}")
        other = self.changes_logits or self.forces or self.observation_columns is not None
        if draft and other:
            raise ValueError(
                "num_speculative_tokens with rules of drawing (repetition_penalty, logit_bias, suppress_tokens, "
                "allowed_token_ids, min_new_tokens, forced_tokens, max_thinking_tokens, vocabulary_mask) or "
                "observation_columns: guesses do not follow them; leave one of the two out"
            )
        if self.prompt_lookup_max < 1:
            raise ValueError(f"prompt_lookup_max={self.prompt_lookup_max}: at least 1 token must match")

    @property
    def truncates(self) -> bool:
        """Whether the distribution that is sampled differs from the softmax."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty not in (None, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether a rule changes the logits that are drawn from."""
        given = self.logit_bias or self.suppress_tokens or self.allowed_token_ids or self.min_new_tokens
        return bool(given) or self.penalises or self.vocabulary_mask

    @property
    def reshapes(self) -> bool:
        """Whether what is sampled from is not the policy's softmax, so that there are behaviour log-probs."""
        return self.truncates or self.changes_logits

    @property
    def forces(self) -> bool:
        """Whether a row may have tokens that the policy did not choose."""
        return bool(self.forced_tokens) or self.max_thinking_tokens is not None

    def _check_rules(self) -> None:
        if self.repetition_penalty is not None and not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be above 0 (1 is off)")
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids) or not all(math.isfinite(bias) for _, bias in self.logit_bias):
            raise ValueError(f"logit_bias={self.logit_bias}: one finite number a token; suppress_tokens bans")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens}: must be from 0 to max_completion_length={self.max_new_tokens}"
            )
        banned = set(self.suppress_tokens)
        both = banned & set(self.allowed_token_ids)
        if both:
            raise ValueError(f"suppress_tokens and allowed_token_ids both have token {min(both)}: leave it out of one")
        for name in ("forced_tokens", "end_of_thinking"):
            for token in getattr(self, name):
                if token in banned or (self.allowed_token_ids and token not in self.allowed_token_ids):
                    raise ValueError(
                        f"{name}: token {token} is forced, and banned by suppress_tokens or allowed_token_ids"
                    )
                if token in self.eos_token_ids:
                    raise ValueError(f"{name}: token {token} ends the sequence: every completion would end with it")
        self._check_thinking()
        counts = self.penalises or self.min_new_tokens or self.forces or self.vocabulary_mask
        if self.observation_columns is not None and counts:
            raise ValueError(
                "observation_columns with repetition_penalty, min_new_tokens, forced_tokens, max_thinking_tokens or "
                "vocabulary_mask: these rules follow one completion, not turns; leave one of the two out"
            )

    def _check_thinking(self) -> None:
        budget, end = self.max_thinking_tokens, self.end_of_thinking
        if (budget is not None) != bool(end):
            raise ValueError(f"max_thinking_tokens={budget} and end_of_thinking={end}: give both, or neither")
        if budget is not None and budget < 0:
            raise ValueError(f"max_thinking_tokens={budget}: must be at least 0")
        taken = len(self.forced_tokens) + (budget or 0) + len(end)
        if taken and taken >= self.max_new_tokens:
            raise ValueError(
                f"forced_tokens, max_thinking_tokens and end_of_thinking take {taken} tokens: that leaves no answer of "
                f"max_completion_length={self.max_new_tokens}"
            )
