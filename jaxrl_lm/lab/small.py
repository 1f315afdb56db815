"""The lab in a smaller size, for tables of many runs: supervised starts that all of them share."""

import dataclasses
from pathlib import Path

import jax

from jaxrl_lm import models
from jaxrl_lm.lab.config import LabConfig
from jaxrl_lm.lab.run import model_config, sft_config, supervised, write_data
from jaxrl_lm.lab.tokenizer import lab_tokenizer

SMALL = LabConfig(hidden_size=80, num_layers=3, digits=2, sft_steps=400, train_problems=6000, test_problems=128)
# Sums of five columns each, all worked out rightly.
LONG = dataclasses.replace(
    SMALL,
    digits=5,
    least_digits=5,
    train_problems=20000,
    test_problems=256,
    sft_steps=800,
    slip=0.0,
    drop=0.0,
    skip=0.0,
)


def small_start(directory: str | Path, config: LabConfig = SMALL) -> dict[str, str]:
    """The data files by name, and under "model" what has learned the demonstrator's working; made once."""
    directory = Path(directory)
    files, model = write_data(config, directory / "data"), directory / "sft"
    if not model.exists():
        fresh = models.build(model_config(config, len(lab_tokenizer())))
        models.save(directory / "start", fresh, fresh.init(jax.random.key(0)), lab_tokenizer(), overwrite=True)
        supervised(sft_config(config, files, directory, directory / "start", config.sft_steps), model)
    return {**files, "model": str(model), "start": str(directory / "start")}


def careless_start(directory: str | Path, *, slip: float = 0.02, drop: float = 0.5) -> dict[str, str]:
    """As `small_start`, of one that can add five columns and is careless: chances `slip` a column and `drop` a carry.

    It has learned from right working first ("careful" is that model), then for 150 steps from careless working. The
    defaults are for scorers: a model of this size learns from labels which carries are missing, and not which columns are
    miscounted (`examples/learn_process.py mistakes`).
    """
    directory = Path(directory)
    careful = small_start(directory / "careful", LONG)["model"]
    config = dataclasses.replace(LONG, slip=slip, drop=drop, sft_learning_rate=1e-3)
    place = directory / f"careless_{slip}_{drop}"
    files, model = write_data(config, place / "data"), place / "sft"
    if not model.exists():
        supervised(sft_config(config, files, place, careful, 150), model)
    return {**files, "model": str(model), "careful": careful}
