"""What the options of overlap must satisfy; called by `checks.py`. Every error names the option and what to do."""

from jaxrl_lm import algos
from jaxrl_lm.config import GRPOConfig

LEAST = {"decode_chunk": 1}


def check(config: GRPOConfig, chosen: algos.Preset, old_logprobs: str) -> None:
    """Raises ValueError for a lag that there is not, and for a loss that would not know of it."""
    lag = config.max_off_policy_steps
    if lag not in (0, 1):
        raise ValueError(
            f"max_off_policy_steps={lag}: must be 0 (each batch is sampled by the newest weights) or 1 (by those before "
            "the update that it is sampled beside)"
        )
    if not lag or chosen.sampler_correction != "none":
        return
    if chosen.surrogate == "policy-gradient":
        raise ValueError(
            f"max_off_policy_steps={lag} with surrogate='policy-gradient' needs a sampler_correction: it has no other "
            "ratio to the policy that sampled"
        )
    if old_logprobs != "sampler":
        raise ValueError(
            f"max_off_policy_steps={lag} with sampler_correction='none' and old_logprobs={old_logprobs!r}: the ratio is to "
            "the policy at the start of the step, and nothing weighs what older weights sampled; give a sampler_correction, "
            "or old_logprobs='sampler'"
        )
