"""Sharding is said once: a mesh, one table of rules, a plan that applies it. See `rules.py`."""

from jaxrl_lm.sharding.mesh import AXES, make_mesh
from jaxrl_lm.sharding.rules import RULES, Plan

__all__ = ["AXES", "RULES", "Plan", "make_mesh"]
