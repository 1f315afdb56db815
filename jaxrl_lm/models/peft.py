"""Reading and writing adapters in the format of the PEFT library: adapter_config.json and adapter_model.safetensors.

Torch keeps a matrix as [out, in] and one tensor a layer, so lora_A is the transpose of a layer of our lora_a. Nothing is
skipped: a setting that changes the arithmetic, and a tensor that is missing, unknown or misshapen, are errors that name
it. Dropout is not read: we train without.
"""

import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrl_lm.distributed import place_tree
from jaxrl_lm.models import lora
from jaxrl_lm.models.config import PROJECTIONS, LoraConfig
from jaxrl_lm.models.decoder import Model
from jaxrl_lm.models.hf_config import read_json
from jaxrl_lm.models.hf_files import write_safetensors
from jaxrl_lm.models.hf_table import TABLE, Tensor, flatten, unflatten
from jaxrl_lm.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_READ = {"r", "lora_alpha", "target_modules", "use_rslora"}

# Settings that change nothing in the arithmetic of a trained adapter.
_FREE = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "layers_pattern",  # says how to read layers_to_transform
    "lora_dropout",
    "megatron_core",  # says how to read megatron_config
    "peft_version",
    "qalora_group_size",  # says how to read use_qalora
    "revision",
    "runtime_config",
}

# Other settings, each with the values under which it changes nothing; of one that is not here, "nothing" is asked for.
_INACTIVE = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),  # others change the base's weights too
}
_NOTHING = (None, False, {}, [])
_NUMBERS = {"r": int, "lora_alpha": int | float}
_DTYPES = ("F32", "BF16", "F16")
_SHOWN = 10  # names an error lists at most, of each kind


def read_adapter(directory: str | os.PathLike, model: Model) -> tuple[LoraConfig, Params]:
    """The adapter that a directory holds for this model, in the file's dtype; with a plan, each part in its place.

    Raises FileNotFoundError or ValueError naming the file, setting or tensors that are absent or do not fit.
    """
    directory = Path(directory)
    config = _config(read_json(directory / CONFIG), model, directory / CONFIG)
    with _open(directory / WEIGHTS) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        found = {name: tuple(part.get_shape()) for name, part in parts.items()}
        declared = flatten(lora.specs(model, config))
        expected = {tensor.name: tensor.shape for path in declared for tensor in _tensors(path, declared[path].shape)}
        _check(found, expected, directory / WEIGHTS)
        dtypes = sorted({part.get_dtype() for part in parts.values()})
        if len(dtypes) > 1 or dtypes[0] not in _DTYPES:
            raise ValueError(f"{directory / WEIGHTS}: dtypes {', '.join(dtypes)}; one of {', '.join(_DTYPES)} is read")
        read = lambda tensor: np.asarray(parts[tensor.name][:, :]).T
        stacks = {path: np.stack([read(one) for one in _tensors(path, spec.shape)]) for path, spec in declared.items()}
    adapter = unflatten(stacks)
    if model.plan is None:
        return config, jax.tree.map(jnp.asarray, adapter)
    return config, place_tree(adapter, model.plan.tree(lora.specs(model, config)))


def _open(path: Path):
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; convert adapter_model.bin to safetensors if that is there")
    try:
        return safe_open(path, "numpy")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error


def _config(raw: dict[str, Any], model: Model, where: Path) -> LoraConfig:
    for key, value in raw.items():
        if key not in _READ | _FREE and value not in _INACTIVE.get(key, _NOTHING):
            raise ValueError(f"{where}: {key}={value!r} is not supported: it changes what the adapter computes")
    absent = sorted({"peft_type", "r", "lora_alpha", "target_modules"} - raw.keys())
    if absent:
        raise ValueError(f"{where}: {', '.join(absent)} is not given")
    wrong = [key for key, kind in _NUMBERS.items() if not isinstance(raw[key], kind) or isinstance(raw[key], bool)]
    if wrong or not isinstance(raw["target_modules"], str | list):
        raise ValueError(f"{where}: {(wrong or ['target_modules'])[0]} has a value of another type than PEFT writes")
    targets = _targets(raw["target_modules"], model, where)
    rslora = bool(raw.get("use_rslora"))
    return LoraConfig(rank=raw["r"], alpha=float(raw["lora_alpha"]), targets=targets, rslora=rslora)


def _targets(chosen: str | list[str], model: Model, where: Path) -> tuple[str, ...]:
    """PEFT's rule: a string is a pattern for the whole name of a module, a list holds names or their ends."""
    if chosen == "all-linear":
        return PROJECTIONS
    items = [chosen] if isinstance(chosen, str) else chosen
    if isinstance(chosen, str):
        fits = lambda item, name: re.fullmatch(item, name) is not None
    else:
        fits = lambda item, name: f".{name}".endswith(f".{item}")
    used, targets = set(), []
    for target, stem in _stems().items():
        names = [stem.format(layer) for layer in range(model.config.num_layers)]
        hits = [{item for item in items if fits(item, name)} for name in names]
        used |= set().union(*hits)
        if any(hits) and not all(hits):
            raise ValueError(f"{where}: target_modules={chosen!r} names {target}_proj of some layers only")
        targets += [target] if all(hits) else []
    if set(items) - used:
        raise ValueError(
            f"{where}: target_modules names {', '.join(sorted(set(items) - used))}; "
            f"supported are {', '.join(f'{name}_proj' for name in PROJECTIONS)}"
        )
    return tuple(targets)


def _stems() -> dict[str, str]:
    """The Hugging Face name of each projection's module, `{}` standing for the layer."""
    kernels = {path.split(".")[-2]: names.hf for path, names in TABLE.items() if path.endswith("_proj.kernel")}
    return {name: kernels[f"{name}_proj"].removesuffix(".weight") for name in PROJECTIONS}


def _tensors(path: str, shape: tuple[int, ...]) -> list[Tensor]:
    """The file's tensors, one a layer, of one stacked factor."""
    _, _, projection, factor = path.split(".")
    stem = _stems()[projection.removesuffix("_proj")]
    kind = {"lora_a": "lora_A", "lora_b": "lora_B"}[factor]
    name = f"base_model.model.{stem}.{kind}.weight"
    return [Tensor(name.format(layer), layer, shape[:0:-1]) for layer in range(shape[0])]


def _check(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], where: Path) -> None:
    both = [name for name in expected if name in found]
    complaints = {
        "missing tensors": [name for name in expected if name not in found],
        "unknown tensors": [name for name in found if name not in expected],
        "wrong shapes": [
            f"{name} has shape {found[name]}, expected {expected[name]}"
            for name in both
            if found[name] != expected[name]
        ],
    }
    told = [f"{title}: {', '.join(names[:_SHOWN])}" for title, names in complaints.items() if names]
    if told:
        raise ValueError(f"{where} does not fit its config and the model: {'; '.join(told)}")


def save_adapter(
    directory: str | os.PathLike, model: Model, adapter: Params, config: LoraConfig, base_name: str
) -> None:
    """Writes a directory that PEFT loads onto the base model called `base_name`, in the dtype that the adapter has.

    It is written beside its place and renamed. Raises FileExistsError for a directory that is not empty; ValueError,
    with the path, for an adapter that does not fit the model and config or is not wholly on this process.
    """
    target = Path(directory).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists and is not empty; choose another directory")
    leaves, declared = flatten(adapter), flatten(lora.specs(model, config))
    dtype = _check_leaves(leaves, {path: spec.shape for path, spec in declared.items()})
    tensors = [
        (tensor, functools.partial(_fetch, leaves[path], tensor.layer))
        for path, spec in declared.items()
        for tensor in _tensors(path, spec.shape)
    ]
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with this id
    partial.mkdir(parents=True)
    try:
        settings = json.dumps(_config_to_peft(config, base_name), indent=2, ensure_ascii=False)
        (partial / CONFIG).write_text(settings + "\n", encoding="utf-8")
        write_safetensors(partial / WEIGHTS, tensors, dtype)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_leaves(leaves: dict[str, jax.Array], wanted: dict[str, tuple[int, ...]]) -> str:
    """The one dtype of the factors. Raises ValueError where they cannot be written."""
    for path in sorted(leaves.keys() | wanted.keys()):
        shape = tuple(leaves[path].shape) if path in leaves else None
        if shape != wanted.get(path):
            raise ValueError(f"{path} has shape {shape} in the adapter, {wanted.get(path)} by its config and model")
        if not leaves[path].is_fully_addressable:
            raise ValueError(f"{path} is spread over several processes: gather it before saving")
    dtypes = sorted({str(leaf.dtype) for leaf in leaves.values()})
    if len(dtypes) > 1:
        raise ValueError(f"the adapter's leaves have several dtypes: {', '.join(dtypes)}")
    return dtypes[0]


def _fetch(leaf: jax.Array, layer: int) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(leaf[layer]).T)


def _config_to_peft(config: LoraConfig, base_name: str) -> dict[str, Any]:
    """Settings that every version of PEFT with safetensors knows."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "target_modules": [f"{name}_proj" for name in config.targets],
        "use_rslora": config.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
