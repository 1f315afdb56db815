"""Sharding is said once: a mesh, one table of rules, a plan that applies it. See `rules.py`."""

from jaxrl_lm.sharding.across import spread_layout
from jaxrl_lm.sharding.mesh import AXES, make_mesh
from jaxrl_lm.sharding.moves import HOST, has_host_memory, keep, move, moved_bytes, on_host
from jaxrl_lm.sharding.presets import build_plan, ruled
from jaxrl_lm.sharding.rules import DECODE_RULES, PRESETS, RULES, Plan, divided, platform_of

__all__ = [
    "AXES",
    "DECODE_RULES",
    "HOST",
    "PRESETS",
    "RULES",
    "Plan",
    "build_plan",
    "divided",
    "has_host_memory",
    "keep",
    "make_mesh",
    "move",
    "moved_bytes",
    "on_host",
    "platform_of",
    "ruled",
    "spread_layout",
]
