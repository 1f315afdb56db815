"""Options of `jaxrl-lm plan`: those of a GRPO run, and where it would run. No file of the run has to exist.

Next to read: `plan_steps.py` (what is compiled), `plan_report.py` (what is said).
"""

import dataclasses
from pathlib import Path

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.models import ModelConfig
from jaxrl_lm.models.hf_config import config_from_hf, read_json
from jaxrl_lm.options import nearest

SHIPPED = Path(__file__).parent / "configs"  # config.json files: facts of public models, no weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(GRPOConfig):
    """Options of a plan."""

    model: str
    """Shipped config (such as llama-3.1-8b), config.json, directory that holds one, or hub id; no weights are read."""
    topology: str
    """TPU slice, such as v5e:8x8, v5p:4x4x8 or v6e:16x16; or GPUs, such as gpu:H100x64, which are only estimated."""
    dataset: str = ""
    """Not read."""
    output_dir: str = ""
    """Not written."""
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    """Mesh axes (data, fsdp, sequence, tensor) and their sizes; one may be -1. Empty: the least tensor axis that fits by
    estimate."""
    max_suggestions: int = 4
    """Changes that are tried, each by compiling, where something does not fit; 0: none."""
    json: bool = False
    """Print the report as JSON instead of tables."""


def shipped_models() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def open_model_config(name: str) -> ModelConfig:
    """The ModelConfig of a shipped name, a config.json, a directory that holds one, or a hub id.

    Of a hub id config.json alone is fetched. Raises ValueError or FileNotFoundError that says what there is.
    """
    path = Path(name)
    if name.lower() in shipped_models():
        return config_from_hf(read_json(SHIPPED / f"{name.lower()}.json"))
    if path.is_dir():
        return config_from_hf(path)
    if path.suffix == ".json":
        return config_from_hf(read_json(path))
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise FileNotFoundError(
            f"model={name!r}: no shipped config, config.json or directory; the nearest shipped one is "
            f"{nearest(name, shipped_models())!r} of {', '.join(shipped_models())}"
        )
    return config_from_hf(read_json(_fetched(name)))


def _fetched(name: str) -> Path:
    from huggingface_hub import hf_hub_download  # here, so that local use never touches the network's settings

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:  # huggingface_hub's own errors derive from these
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"model={name!r}: no such directory here, and the Hugging Face hub could not give its config.json "
            f"({reason}); shipped configs are {', '.join(shipped_models())}"
        ) from error
