"""Sharding is said once: a mesh, one table of rules, a plan that applies it. See `rules.py`."""

from jaxrl_lm.sharding.mesh import AXES, make_mesh
from jaxrl_lm.sharding.rules import DECODE_RULES, PRESETS, RULES, Plan, parse_rules, resolve_rules

__all__ = ["AXES", "DECODE_RULES", "PRESETS", "RULES", "Plan", "make_mesh", "parse_rules", "resolve_rules"]
