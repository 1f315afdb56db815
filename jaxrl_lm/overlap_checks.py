"""What the options of overlap must satisfy; called by `checks.py`. Every error names the option and what to do."""

from jaxrl_lm import algos
from jaxrl_lm.config import GRPOConfig

LEAST = {"decode_chunk": 1}


def check(config: GRPOConfig, chosen: algos.Preset) -> None:
    """Raises ValueError for a lag that there is not, and for a loss that would not know of it."""
    lag = config.max_off_policy_steps
    if lag not in (0, 1):
        raise ValueError(
            f"max_off_policy_steps={lag}: must be 0 (each batch is sampled by the newest weights) or 1 (by those before "
            "the update that it is sampled beside)"
        )
    if lag and chosen.surrogate == "policy-gradient" and chosen.sampler_correction == "none":
        raise ValueError(
            f"max_off_policy_steps={lag} with surrogate='policy-gradient' needs a sampler_correction: it has no other "
            "ratio to the policy that sampled"
        )
