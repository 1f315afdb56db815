"""The lab in a smaller size, for tables of many runs: one supervised start that all of them share."""

import dataclasses
from pathlib import Path

import jax

from jaxrl_lm import models
from jaxrl_lm.lab.config import LabConfig
from jaxrl_lm.lab.run import model_config, sft_config, supervised, write_data
from jaxrl_lm.lab.tokenizer import lab_tokenizer

SMALL = LabConfig(hidden_size=80, num_layers=3, digits=2, sft_steps=400, train_problems=6000, test_problems=128)
# What reward models of the small model's working start from: it has seen right working only, and has twice the layers.
SCORER = dataclasses.replace(SMALL, hidden_size=160, num_layers=6, slip=0.0, drop=0.0, skip=0.0)


def small_start(directory: str | Path, config: LabConfig = SMALL) -> dict[str, str]:
    """The data files by name, and under "model" what has learned a careless demonstrator's working; made once."""
    directory = Path(directory)
    files, model = write_data(config, directory / "data"), directory / "sft"
    if not model.exists():
        fresh = models.build(model_config(config, len(lab_tokenizer())))
        models.save(directory / "start", fresh, fresh.init(jax.random.key(0)), lab_tokenizer(), overwrite=True)
        supervised(sft_config(config, files, directory, directory / "start", config.sft_steps), model)
    return {**files, "model": str(model), "start": str(directory / "start")}
