"""THE table from logical axes to mesh axes, and the plan that applies it.

A weight names its logical axes where it is declared (`models/layers.py`); an activation names them where it is
constrained. Nothing else in the package knows a mesh axis.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None

RULES: dict[str, MeshAxes] = {
    "batch": ("data", "fsdp"),
    "columns": "sequence",  # of the activations of a row, see docs/scale_mesh.md
    "prompts": ("data", "fsdp"),  # the rows of a prefill: each prompt once
    "layers": None,
    "embed": ("fsdp", "sequence"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "norm": None,
    "rank": None,  # of LoRA's factors: the other axis is split as the matrix that they adapt
    # The table is split over its rows only: split over its width on the batch's own axis, a look-up makes XLA
    # rematerialise it whole.
    "vocab": ("tensor", "fsdp", "sequence"),
    "vocab_embed": None,
}

# Generation's own table: every decoded token reads every weight, so none is gathered over fsdp for each of them. A
# token at a time has no columns to split: rows take that axis too.
DECODE_RULES: dict[str, MeshAxes] = {
    **RULES,
    "batch": ("data", "fsdp", "sequence"),
    "columns": None,
    "embed": None,
    "vocab": "tensor",
}

_NO_TENSOR: dict[str, MeshAxes] = {"heads": None, "kv_heads": None, "mlp": None, "vocab": ("fsdp", "sequence")}

# What differs from the table. A preset says what the mesh is for: an axis that it splits nothing over is refused.
PRESETS: dict[str, dict[str, MeshAxes]] = {
    "fsdp": {**_NO_TENSOR, "columns": None, "embed": "fsdp", "vocab": "fsdp"},
    "fsdp+tensor": {"columns": None, "embed": "fsdp", "vocab": ("tensor", "fsdp")},
    "tensor": {"columns": None, "embed": None, "vocab": "tensor"},
    "sequence": _NO_TENSOR,
}

REPLICATED_LIMIT = 1 << 22  # elements of a matrix that may stand whole on every device of a model-sharded mesh


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mesh and the rules on it. Hashable, so that a model can hold it as a static part."""

    mesh: Mesh | AbstractMesh  # without devices: for sizes of layouts
    rules: tuple[tuple[str, MeshAxes], ...] = tuple(RULES.items())
    allow_replicated: bool = False
    decode_rules: tuple[tuple[str, MeshAxes], ...] = ()  # what generation's table has otherwise

    @property
    def platform(self) -> str | None:
        """That of the mesh's devices, cpu, gpu or tpu; None where it has none."""
        return self.mesh.devices.flat[0].platform if isinstance(self.mesh, Mesh) else None

    def axes(self, axis: str) -> tuple[str, ...]:
        """The mesh axes of more than one device that a logical axis is split over. Raises ValueError as `sharding`."""
        return self._axes(axis, "rule")

    def ways(self, axis: str) -> int:
        """Over how many devices a logical axis is split."""
        return math.prod(self.mesh.shape[name] for name in self.axes(axis))

    def _axes(self, axis: str | None, path: str) -> tuple[str, ...]:
        table = dict(self.rules)
        if axis is not None and axis not in table:
            raise ValueError(f"{path}: unknown logical axis {axis!r}; known are {', '.join(sorted(table))}")
        names = table[axis] if axis is not None else None
        names = (names,) if isinstance(names, str) else tuple(names or ())
        missing = [name for name in names if name not in self.mesh.shape]
        if missing:
            raise ValueError(f"{path}: axis {axis!r} is ruled onto {missing[0]!r}, no axis of {dict(self.mesh.shape)}")
        return tuple(name for name in names if self.mesh.shape[name] > 1)

    def sharding(self, axes: tuple[str | None, ...], shape: tuple[int, ...], path: str = "array") -> NamedSharding:
        """The sharding of an array with these logical axes.

        Raises ValueError, with the path, for an unknown logical axis, a mesh axis used twice, or a dimension that its
        mesh axes do not divide.
        """
        if len(axes) != len(shape):
            raise ValueError(f"{path}: {len(axes)} logical axes {axes} for shape {shape}")
        spec, used = [], set()
        for axis, size in zip(axes, shape, strict=True):
            names = self._axes(axis, path)
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
        splits_models = self.mesh.size > self.mesh.shape["data"]

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
        """The plan of the weights that generation reads, and of its rows. Weights are whole on the devices of data, fsdp
        and sequence, which is asked for here."""
        changed = {axis: DECODE_RULES[axis] for axis in DECODE_RULES if DECODE_RULES[axis] != RULES[axis]}
        return dataclasses.replace(self._with(**changed | dict(self.decode_rules)), allow_replicated=True)

    def for_prompts(self) -> "Plan":
        """The plan of a prefill: rows are prompts."""
        return self._with(batch=self.axes("prompts"))

    def for_logits(self) -> "Plan":
        """The plan of logits and of the states that they are made of: the vocabulary has its mesh axes for itself.

        Rows and columns are gathered over these axes, a chunk at a time; the table never is.
        """
        taken = self.axes("vocab")
        return self._with(batch=_without(self.axes("batch"), taken), columns=_without(self.axes("columns"), taken))

    def for_draws(self, shape: tuple[int, int], *, block: int = 128) -> "Plan":
        """The plan of logits [rows, vocabulary] that tokens are drawn from, of a plan `for_logits`.

        Draws read blocks of the vocabulary. Where the devices' parts are no whole blocks, rows take its axes: each number
        moves once, where XLA would gather the logits on several devices.
        """
        (rows, size), axes = shape, (*self.axes("batch"), *self.axes("vocab"))
        part = size // self.ways("vocab")
        if part % block == 0 or part < block or rows % math.prod(self.mesh.shape[name] for name in axes):
            return self
        return self._with(batch=axes, vocab=None)

    def for_lookup(self) -> tuple["Plan", ...]:
        """The plans that a look-up in the table goes through: mesh axes that the table shares with rows and columns lie on
        its width first, then rows take theirs back, then columns. So neither the table nor its rows stand whole anywhere.
        """
        vocab, batch, columns = self.axes("vocab"), self.axes("batch"), self.axes("columns")
        moved = tuple(name for name in vocab if name in (*batch, *columns))
        width = (*self.axes("vocab_embed"), *moved)
        rest = {"vocab": _without(vocab, moved), "columns": _without(columns, width)}
        first = self._with(**rest, vocab_embed=width, batch=_without(batch, width))
        return first, self._with(**rest, vocab_embed=_without(width, batch)), self._with(vocab_embed=None)

    def _with(self, **rules: MeshAxes) -> "Plan":
        return dataclasses.replace(self, rules=tuple({**dict(self.rules), **rules}.items()))

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
        return self.ways("batch")

    @property
    def notes(self) -> list[str]:
        """What a run says of it at its start."""
        ways, every = self.ways("columns"), self.for_decode().batch_ways
        split = f"columns over {ways} devices in training and scoring; generation has its rows over {every}"
        return [split] if ways > 1 else []

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """x, with its layout fixed inside a compiled step."""
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape, f"activation {axes}"))


def platform_of(plan: Plan | None) -> str | None:
    """The platform that programs of this plan run on, cpu, gpu or tpu; without a plan JAX's default, None as
    `Plan.platform`."""
    return jax.default_backend() if plan is None else plan.platform


def divided(layout: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The layout of an array that has fewer numbers along some axes of another, as it has where that divides, else whole."""
    names = [*layout.spec, *[None] * (len(shape) - len(layout.spec))]
    single = lambda axes: (axes,) if isinstance(axes, str) else tuple(axes or ())
    ways = lambda axes: math.prod(layout.mesh.shape[name] for name in single(axes))
    kept = [axes if size % ways(axes) == 0 else None for size, axes in zip(shape, names, strict=True)]
    return NamedSharding(layout.mesh, PartitionSpec(*kept))


def _without(names: tuple[str, ...], taken: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in taken)
