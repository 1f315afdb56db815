"""The host's side of an episode: prompts in, completions out (`sampler.py`).

Which prompts come next: `prompts.py`; which rows are trained on: `select.py`; which come back: `replay.py`; what the
next ones are guessed from: `earlier.py`.
"""

from jaxrl_lm.rollout.earlier import Earlier
from jaxrl_lm.rollout.prompts import (
    CategoryBandit,
    Curriculum,
    PromptSampling,
    Shuffled,
    SolveRates,
    categories_of,
    never_solved_share,
)
from jaxrl_lm.rollout.replay import Group, Replay, last_tokens, pack_array, unpack_array
from jaxrl_lm.rollout.sampler import EVAL, GREEDY, PROBE, TRAIN, Sampled, Sampler
from jaxrl_lm.rollout.select import choose_rows, join, unequal_groups

__all__ = [
    "EVAL",
    "GREEDY",
    "PROBE",
    "TRAIN",
    "CategoryBandit",
    "Curriculum",
    "Earlier",
    "Group",
    "PromptSampling",
    "Replay",
    "Sampled",
    "Sampler",
    "Shuffled",
    "SolveRates",
    "categories_of",
    "choose_rows",
    "join",
    "last_tokens",
    "never_solved_share",
    "pack_array",
    "unequal_groups",
    "unpack_array",
]
