"""THE table from logical axes to mesh axes, and the plan that applies it.

A weight names its logical axes where it is declared (`models/layers.py`); an activation names them where it is
constrained. Nothing else in the package knows a mesh axis.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None

RULES: dict[str, MeshAxes] = {
    "batch": ("data", "fsdp"),
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
    "rank": None,  # of LoRA's factors: the other axis is split as the matrix that they adapt
    # The table is split over its rows only: split over its width on the batch's own axis, a look-up makes XLA
    # rematerialise it whole.
    "vocab": ("tensor", "fsdp"),
    "vocab_embed": None,
}

# Generation's own table: every decoded token reads every weight, so none is gathered over fsdp for each of them.
DECODE_RULES: dict[str, MeshAxes] = {**RULES, "embed": None, "vocab": "tensor"}

REPLICATED_LIMIT = 1 << 22  # elements of a matrix that may stand whole on every device of a model-sharded mesh


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh and the rules on it. Hashable, so that a model can hold it as a static part."""

    mesh: Mesh
    rules: tuple[tuple[str, MeshAxes], ...] = tuple(RULES.items())
    allow_replicated: bool = False

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], path: str = "array") -> NamedSharding:
        """The sharding of an array with these logical axes.

        Raises ValueError, with the path, for an unknown logical axis, a mesh axis used twice, or a dimension that its
        mesh axes do not divide.
        """
        if len(axes) != len(shape):
            raise ValueError(f"{path}: {len(axes)} logical axes {axes} for shape {shape}")
        table, spec, used = dict(self.rules), [], set()
        for axis, size in zip(axes, shape, strict=True):
            if axis is not None and axis not in table:
                raise ValueError(f"{path}: unknown logical axis {axis!r}; known are {', '.join(sorted(table))}")
            names = table[axis] if axis is not None else None
            names = (names,) if isinstance(names, str) else tuple(names or ())
            missing = [name for name in names if name not in self.mesh.shape]
            if missing:
                raise ValueError(
                    f"{path}: axis {axis!r} is ruled onto {missing[0]!r}, no axis of {dict(self.mesh.shape)}"
                )
            names = tuple(name for name in names if self.mesh.shape[name] > 1)
            if used & set(names):
                raise ValueError(f"{path}: mesh axis {sorted(used & set(names))[0]!r} is used twice by axes {axes}")
            used |= set(names)
            ways = math.prod(self.mesh.shape[name] for name in names)
            if size % ways:
                raise ValueError(
                    f"{path}: dimension {axis!r} of size {size} is not divisible by {ways} ({'×'.join(names)})"
                )
            spec.append(names if len(names) > 1 else names[0] if names else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def tree(self, specs: Mapping[str, Any]) -> dict[str, Any]:
        """Shardings for a nested dict of records with `.shape` and `.axes`.

        Raises ValueError, with the path, for a large matrix that would stand whole on every device although the mesh
        has axes to split models on (set allow_replicated=True to ask for it).
        """
        splits_models = self.mesh.shape["fsdp"] * self.mesh.shape["tensor"] > 1

        def one(path, spec):
            name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            sharding = self.sharding(spec.axes, spec.shape, name)
            # A low-rank factor whose one wide axis is not split is meant to be whole: it is small beside its matrix.
            large = len(spec.shape) > 1 and math.prod(spec.shape) > REPLICATED_LIMIT and "rank" not in spec.axes
            if large and splits_models and sharding.is_fully_replicated and not self.allow_replicated:
                raise ValueError(
                    f"{name}: shape {spec.shape} would be whole on every device of {dict(self.mesh.shape)}"
                )
            return sharding

        return jax.tree.map_with_path(one, dict(specs), is_leaf=lambda leaf: hasattr(leaf, "axes"))

    def for_decode(self) -> "Plan":
        """The plan of the weights that generation reads. Whole on the devices of data and fsdp, which is asked for here."""
        changed = {axis: DECODE_RULES[axis] for axis in DECODE_RULES if DECODE_RULES[axis] != RULES[axis]}
        return dataclasses.replace(self, rules=tuple({**dict(self.rules), **changed}.items()), allow_replicated=True)

    @property
    def rows(self) -> NamedSharding:
        """Of arrays of any rank whose first dimension is rows."""
        return self.sharding(("batch",), (self.batch_ways,), "rows")

    @property
    def replicated(self) -> NamedSharding:
        """One copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_ways(self) -> int:
        """Over how many devices rows are split."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """x, with its layout fixed inside a compiled step."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape, f"activation {axes}"))
