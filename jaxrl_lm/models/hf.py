"""Loading and saving models: a Hugging Face directory, a GGUF file or a hub id in, a Hugging Face directory out.

Weights go slice by slice from the file into their dtype and their place on the mesh. The pieces: `hf_config.py`
(config.json), `hf_table.py` (names of tensors), `hf_files.py` (safetensors), `gguf.py`.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from jaxrl_lm.models import gguf
from jaxrl_lm.models.decoder import Model, build
from jaxrl_lm.models.hf_config import config_from_hf, config_to_hf, read_json
from jaxrl_lm.models.hf_files import Fetch, Safetensors, write_shards
from jaxrl_lm.models.hf_table import Tensor, flatten, read_params, write_plan
from jaxrl_lm.sharding import Plan
from jaxrl_lm.types import Params

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FETCHED = ("*.json", "*.safetensors", "tokenizer.model", "merges.txt", "*.jinja")
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load(
    path_or_hub_id: str | os.PathLike,
    *,
    mesh: Mesh | None = None,
    rules: dict[str, Any] | None = None,
    dtype: str = "float32",
    plan: Plan | None = None,
    compute_dtype: str | None = None,
) -> tuple[Model, Params, PreTrainedTokenizerFast]:
    """The model, its parameters in `dtype`, and its tokenizer.

    With a mesh (and rules, by default the package's), or a plan, each device gets its part of each parameter;
    otherwise everything is on the first device. The model computes in `compute_dtype`, by default `dtype`.

    Raises ValueError or FileNotFoundError, naming the file, tensor, setting or numbers, for whatever does not fit:
    see `config_from_hf`, `hf_table.check`, `load_tokenizer`.
    """
    if plan is not None and (mesh is not None or rules is not None):
        raise ValueError("load: give plan, or mesh with rules, not both")
    if plan is None and mesh is None and rules is not None:
        raise ValueError("load: rules need a mesh")
    path = resolve(path_or_hub_id)
    if path.suffix == ".gguf":
        source = gguf.GGUFFile(path)
        config, tokenizer = source.config(), source.tokenizer()
    else:
        config, tokenizer, source = config_from_hf(path), load_tokenizer(path), Safetensors(path)
    check_vocabulary(config.vocab_size, tokenizer, path)
    if plan is None and mesh is not None:
        plan = Plan(mesh) if rules is None else Plan(mesh, tuple(rules.items()))
    model = build(dataclasses.replace(config, dtype=compute_dtype or dtype), plan=plan)
    if plan is None:
        device = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, model.specs)
    else:
        shardings = plan.tree(model.specs)
    return model, read_params(source, model.specs, shardings, dtype), tokenizer


def resolve(path_or_hub_id: str | os.PathLike) -> Path:
    """The local directory or GGUF file; a hub id is fetched first.

    Raises FileNotFoundError where it is neither there nor to be had.
    """
    path = Path(path_or_hub_id)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ValueError(f"{path}: a file that is not GGUF; give the directory that holds config.json")
    name = os.fspath(path_or_hub_id)
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise FileNotFoundError(f"{name}: no such file or directory")
    from huggingface_hub import snapshot_download  # here, so that local use never touches the network's settings

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FETCHED)))
    except (OSError, ValueError) as error:  # huggingface_hub's own errors derive from these
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{name}: no such directory here, and the Hugging Face hub could not give it ({reason}); "
            "give a local directory or GGUF file, or check the id, the network and the access token"
        ) from error


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a directory; its tokenizer.json, where there is one, to the letter.

    transformers' AutoTokenizer would rebuild it from the vocabulary by its class, which loses, for example, the
    splitting of digits in SmolLM2. Raises FileNotFoundError naming the directory, TypeError for a slow tokenizer.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{directory}: no tokenizer; expected one of {', '.join(_TOKENIZER_FILES)}")
    exact = (directory / "tokenizer.json").is_file()
    verbosity = transformers_logging.get_verbosity()
    # It remarks that the class differs from the one named in tokenizer_config.json, which is intended.
    transformers_logging.set_verbosity_error()
    try:
        tokenizer = (PreTrainedTokenizerFast if exact else AutoTokenizer).from_pretrained(str(directory))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValueError(f"{directory}: the tokenizer cannot be read: {error}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"{directory}: {type(tokenizer).__name__} is not a fast tokenizer; save it as tokenizer.json")
    return tokenizer


def check_vocabulary(rows: int, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Raises ValueError where the tokenizer has ids beyond the embedding; logs padding rows."""
    ids = max(tokenizer.get_vocab().values()) + 1
    if ids > rows:
        raise ValueError(
            f"{path}: the tokenizer has {ids} tokens, the embedding only {rows} rows; they do not belong together"
        )
    if ids < rows:
        logger.info("%s: %d embedding rows for %d tokens; the rest is padding", path, rows, ids)


def generation_config(path_or_hub_id: str | os.PathLike) -> dict[str, Any]:
    """The generation settings that came with a model: generation_config.json over config.json's special ids."""
    path = resolve(path_or_hub_id)
    if path.suffix == ".gguf":
        return gguf.GGUFFile(path).generation_config()
    config = read_json(path / "config.json")
    special = {name: config[name] for name in _SPECIAL_IDS if config.get(name) is not None}
    file = path / "generation_config.json"
    given = read_json(file) if file.is_file() else {}
    return special | {name: value for name, value in given.items() if value is not None}


def eos_token_ids(generation: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """All ids that end a sequence: those of the generation config (an int or a list), then the tokenizer's own.

    Raises ValueError where neither knows one.
    """
    given = generation.get("eos_token_id")
    ids = [given] if isinstance(given, int) else list(given or ())
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "no end-of-sequence token is known: set eos_token_id in generation_config.json or config.json, "
            "or eos_token in tokenizer_config.json"
        )
    return tuple(dict.fromkeys(ids))


def save(
    directory: str | os.PathLike,
    model: Model,
    params: Params,
    tokenizer: PreTrainedTokenizerFast,
    *,
    dtype: str | None = None,
    generation_config: dict[str, Any] | None = None,
    max_shard_bytes: int | float = 5e9,
    overwrite: bool = False,
) -> None:
    """Writes a directory that transformers' from_pretrained accepts, weights in `dtype` (default: as they are).

    It is written beside its place and renamed, so a failure leaves what was there before. Raises FileExistsError for
    a directory that is not empty unless `overwrite`; ValueError for parameters that do not fit the model.
    """
    target = free_place(directory, overwrite=overwrite)
    check_vocabulary(model.config.vocab_size, tokenizer, target)
    dtype = dtype or str(flatten(params)["embed.table"].dtype)
    special = special_ids(tokenizer)
    generation = special if generation_config is None else generation_config
    special |= {name: generation[name] for name in _SPECIAL_IDS if generation.get(name) is not None}
    config = config_to_hf(model.config, dtype=dtype, special_ids=special)
    tensors = list(write_plan(params, model.specs, dtype))
    with replacing(target) as partial:
        _write_json(partial / "generation_config.json", generation)
        write_model(partial, config, tokenizer, tensors, dtype, max_shard_bytes=max_shard_bytes)


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The tokenizer's bos_token_id, eos_token_id and pad_token_id, those that it has."""
    return {name: getattr(tokenizer, name) for name in _SPECIAL_IDS if getattr(tokenizer, name) is not None}


def free_place(directory: str | os.PathLike, *, overwrite: bool) -> Path:
    """The absolute path. Raises FileExistsError where something is there, unless `overwrite`."""
    target = Path(directory).absolute()
    if not overwrite and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists and is not empty; choose another directory or pass overwrite=True")
    return target


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty directory beside `target` to write into, which takes its place at the end; a failure changes nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier process with this id
    try:
        partial.mkdir()
        yield partial
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_model(
    directory: Path,
    config: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    tensors: list[tuple[Tensor, Fetch]],
    dtype: str,
    *,
    max_shard_bytes: int | float = 5e9,
) -> None:
    """Writes config.json, the tokenizer's files and the tensors into an existing directory."""
    _write_json(directory / "config.json", config)
    tokenizer.save_pretrained(str(directory))
    _name_fast_class(directory / "tokenizer_config.json")
    write_shards(directory, tensors, dtype, max_shard_bytes)


def _put_in_place(partial: Path, target: Path) -> None:
    """Renames; the old directory is removed only once the new one stands."""
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    existed = target.exists()
    if existed:
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if existed:
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _name_fast_class(path: Path) -> None:
    """Names the class that both transformers 4 and 5 know and that reads tokenizer.json to the letter."""
    settings = read_json(path)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_json(path, settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
