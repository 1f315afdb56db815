"""The host's side of an episode: prompts in, completions out. See `sampler.py`."""

from jaxrl_lm.rollout.sampler import EVAL, PROBE, TRAIN, Sampled, Sampler

__all__ = ["EVAL", "PROBE", "TRAIN", "Sampled", "Sampler"]
