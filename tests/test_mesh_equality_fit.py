"""Whole updates on given rows are on each mesh what they are on one device; as `test_mesh_equality.py`.

What a run is made of is made by the real `prepare_…` from a saved model, on one device and on two meshes in turn; its
batches, updates and moving reference go ten steps.
"""

from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
from test_mesh_equality import OPTIMISER, STEPS, Facts, Recorder, assert_equal, in_turn, plan_on

from jaxrl_lm import metrics as metric
from jaxrl_lm import prepare
from jaxrl_lm.assemble import copy_params
from jaxrl_lm.clock import Clock
from jaxrl_lm.dpo import prepare_dpo
from jaxrl_lm.fit_config import DPOConfig, PRMConfig, RewardConfig, SFTConfig
from jaxrl_lm.reward_fit import prepare_prm, prepare_reward
from jaxrl_lm.sft import prepare_sft

FIT = OPTIMISER | {"rows_per_step": 16, "max_length": 24, "max_steps": STEPS, "dataset": "own", "output_dir": "own"}
PAIRS = {"beta": 0.5}
FITS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft, packed, of an adapter": (prepare_sft, SFTConfig, {"packing": True, "lora_rank": 4, "microbatch_rows": 8}),
    "dpo": (prepare_dpo, DPOConfig, PAIRS | {"microbatch_rows": 8, "reference_reset_steps": 4}),
    "ipo, bco and sft": (
        prepare_dpo, DPOConfig, PAIRS | {"loss_type": ("ipo", "bco_pair", "sft"), "loss_weights": (1.0, 0.5, 0.2)},
    ),
    "aot": (prepare_dpo, DPOConfig, PAIRS | {"loss_type": ("aot",), "precompute_ref_log_probs": True}),
    "kto": (prepare_dpo, DPOConfig, PAIRS | {"loss_type": ("kto",), "desirable_weight": 1.3}),
    "reward, an ensemble": (
        prepare_reward, RewardConfig, {"members": 3, "center_rewards_coefficient": 0.01, "label_smoothing": 0.1},
    ),
    "outcome": (prepare_reward, RewardConfig, {"loss_type": "outcome"}),
    "prm": (prepare_prm, PRMConfig, {}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with tiny_run.compile_cache(tmp_path_factory.mktemp("xla")):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("tiny"), num_layers=1)


def given_rows(name):
    """24 rows of the columns that a case reads: sums, right and wrong."""
    rng, rows = np.random.default_rng(4), []
    for a, b in rng.integers(0, 50, (24, 2)):
        right, wrong, label = str(a + b), str(a + b + rng.integers(1, 200)), bool(rng.integers(2))
        row = {"prompt": f"{a}+{b}="}
        if name.startswith("sft"):
            row |= {"completion": right}
        elif name in ("kto", "outcome"):
            row |= {"completion": right if label else wrong, "label": label}
        elif name == "prm":
            row |= {"completions": [f"{a}", wrong, right][: rng.integers(1, 4)]}
            row |= {"labels": [True, False, True][: len(row["completions"])]}
        else:
            row |= {"chosen": right, "rejected": wrong} | (
                {"margin": 0.5 * (a > b)} if name.startswith("reward") else {}
            )
        rows.append(row)
    return rows


def fitted(name, saved, mesh):
    """The facts of a case on a mesh, all of its parts made as a run makes them."""
    make, config_class, changes = FITS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "build_plan", lambda *_, **__: plan_on(mesh))
        setup = make(config_class(model=saved, **(FIT | changes)), dataset=given_rows(name))
    frozen = setup.frozen
    if setup.reference_is_start:
        frozen = frozen._replace(reference=copy_params(setup.params["policy"]))
    frozen = setup.prepare_frozen(frozen)
    state, recorder, first = setup.steps.init(setup.params, jax.random.key(3)), Recorder(setup.steps.update), None
    for step in range(1, STEPS + 1):
        batch, _ = setup.source.take(step, state, frozen, Clock())
        state, found = recorder(state, frozen, batch)
        found = metric.result(found)
        setup.source.observe(found)
        first = first or found
        if setup.reset_steps and step % setup.reset_steps == 0:
            follow = setup.steps.follow(state.extra["reference"], state.params["policy"], np.float32(0))
            state = state._replace(extra=state.extra | {"reference": follow})
    return Facts(recorder.gradient, jax.device_get(state.params), first)


@pytest.mark.parametrize(("name", "meshes"), in_turn(FITS))
def test_ten_updates_on_given_rows(name, meshes, saved):
    expected = fitted(name, saved, "one")
    assert expected.metrics["nonfinite"] == 0
    assert expected.metrics["grad_norm"] > 0
    for mesh in meshes:
        assert_equal(fitted(name, saved, mesh), expected)
