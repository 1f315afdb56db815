"""Accelerators that a plan can be made for: what a chip has, and the devices of a topology that nobody need own.

`v5e:8x8` names a TPU slice: its devices are descriptions that the real TPU compiler of the extra `tpu` compiles for.
`gpu:H100x64` names 64 GPUs, for which only estimates are made. Next to read: `plan_steps.py`.
"""

import dataclasses
import math
import os
import re
from typing import Any

GB, GIB = 1e9, float(1 << 30)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device has, in bytes, FLOP/s and bytes/s."""

    name: str
    hbm: float  # that a program may use
    flops: float  # dense bfloat16
    hbm_bandwidth: float
    link: float  # of a single transfer to a neighbour, one way
    ring: float  # of a ring collective, per device
    dimensions: int = 0  # of a TPU's torus; 0: no TPU
    fast_group: int = 0  # GPUs that the fast links join; 0: all devices
    slow_ring: float = 0.0  # between those groups, per device


# HBM sizes: what the compiler itself has left for a program ("Used … of 15.75G hbm" in its out-of-memory report).
# The rest: cloud.google.com/tpu/docs/v5e, /v5p, /v6e (peak compute, HBM and interconnect bandwidth per chip) and the
# one-way bandwidth of a link in "How to Scale Your Model" (Austin et al., 2025), chapter "TPUs". A ring uses a link in
# both directions.
TPUS = {
    "v5e": Chip("TPU v5e", 15.75 * GIB, 197e12, 819 * GB, 45 * GB, 90 * GB, dimensions=2),
    "v5p": Chip("TPU v5p", 95.74 * GIB, 459e12, 2765 * GB, 90 * GB, 180 * GB, dimensions=3),
    "v6e": Chip("TPU v6e", 31.25 * GIB, 918e12, 1640 * GB, 90 * GB, 180 * GB, dimensions=2),
}

# NVIDIA's data sheets (SXM parts, dense bfloat16 without sparsity). NVLink counts one way; 8 GPUs share it, and between
# them there is a network card of 200 (A100) or 400 Gbit/s a GPU. 7 % of the memory is left to CUDA and NCCL.
GPUS = {
    "A100": Chip("NVIDIA A100 80 GB", 0.93 * 80 * GB, 312e12, 2039 * GB, 300 * GB, 300 * GB, 0, 8, 25 * GB),
    "H100": Chip("NVIDIA H100", 0.93 * 80 * GB, 989e12, 3350 * GB, 450 * GB, 450 * GB, 0, 8, 50 * GB),
    "H200": Chip("NVIDIA H200", 0.93 * 141 * GB, 989e12, 4800 * GB, 450 * GB, 450 * GB, 0, 8, 50 * GB),
    "B200": Chip("NVIDIA B200", 0.93 * 180 * GB, 2250e12, 8000 * GB, 900 * GB, 900 * GB, 0, 8, 50 * GB),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A named set of equal devices."""

    name: str
    chip: Chip
    count: int

    @property
    def compiled(self) -> bool:
        """Whether programs are compiled for it; otherwise they are estimated."""
        return self.chip.dimensions > 0


def parse_topology(name: str) -> Topology:
    """The topology of a name such as v5e:8x8, v5p:4x4x8 or gpu:H100x64.

    Raises ValueError that says which names there are.
    """
    kind, _, shape = name.partition(":")
    if kind == "gpu":
        found = re.fullmatch(r"(\w+?)x(\d+)", shape)
        if found is None or found[1].upper() not in GPUS or not int(found[2]):
            raise ValueError(f"topology {name!r}: write gpu:MODELxCOUNT, such as gpu:H100x64; MODEL is {_any(GPUS)}")
        return Topology(name, GPUS[found[1].upper()], int(found[2]))
    if kind not in TPUS:
        raise ValueError(
            f"topology {name!r} is unknown: write a TPU slice such as v5e:8x8 or v5p:4x4x8 ({_any(TPUS)}), or "
            f"GPUs such as gpu:H100x64 ({_any(GPUS)})"
        )
    chip, sizes = TPUS[kind], shape.split("x")
    if len(sizes) != chip.dimensions or not all(size.isdigit() and int(size) for size in sizes):
        example = "x".join(["4"] * chip.dimensions)
        raise ValueError(
            f"topology {name!r}: a {kind} slice has {chip.dimensions} dimensions, such as {kind}:{example}"
        )
    return Topology(name, chip, math.prod(map(int, sizes)))


def _any(table: dict[str, Chip]) -> str:
    return ", ".join(table)


def topology_devices(topology: Topology) -> list[Any]:
    """Descriptions of a TPU slice's devices, for `make_mesh` and the TPU compiler.

    Raises ImportError without the extra `tpu`, ValueError where no such slice exists.
    """
    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"a plan for {topology.name} needs the TPU compiler: pip install 'jaxrl-lm[tpu]' (no TPU is needed)"
        ) from error
    # Nothing here asks a machine's metadata server which TPU it has: there need be none. Nor is one opened, so that
    # several plans, and a run that holds a TPU, do not keep each other out.
    quiet = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    }
    for key, value in (quiet | {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}).items():
        os.environ.setdefault(key, value)
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology.name)
    except RuntimeError as error:  # XLA's own error is one
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"topology {topology.name!r}: the TPU compiler knows no such slice ({reason})") from error
    devices = list(description.devices)
    if len(devices) != topology.count:
        raise ValueError(f"topology {topology.name!r} has {len(devices)} devices, not {topology.count}")
    return devices
