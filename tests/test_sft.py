"""Supervised steps: the loss and gradient of torch on the same rows, on completions alone, with one end-of-sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from transformers import AutoModelForCausalLM

from jaxrl_lm import SFTConfig
from jaxrl_lm.data import batch_indices, pad_rows
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.models import load
from jaxrl_lm.sft import prepare_sft, sft_policy, sft_steps

EOS = 1  # of the lab's tokenizer


@pytest.fixture(scope="module", autouse=True)
def cached(tmp_path_factory):
    with tiny_run.compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def rows():
    """Prompts of 4 to 6 tokens and completions of 3 to 26; two already end with the end-of-sequence token."""
    rows = demonstration_rows(make_problems(14, seed=0, digits=2), seed=0, skip=0.3)
    return [{**row, "completion": row["completion"] + "<eos>" * (n < 2)} for n, row in enumerate(rows)]


@pytest.fixture(scope="module")
def options(model, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("sft"))
    defaults = {
        "model": model,
        "dataset": "rows",
        "output_dir": directory,
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "rows_per_step": 8,
        "microbatch_rows": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "max_steps": 12,
    }
    return lambda **changes: SFTConfig(**defaults | changes)


@pytest.fixture(scope="module")
def setup(options, rows):
    return prepare_sft(options(), dataset=rows)


@pytest.fixture(scope="module")
def trained(setup):
    """The metrics of each step, and the last state; the setup's own parameters stay."""
    metrics, state = [], None
    own = setup._replace(params=jax.tree.map(jnp.copy, setup.params))
    for step, newest, values in sft_steps(own):
        state = newest
        metrics.append({"step": step, **values})
    return metrics, state


def torch_step(model, pairs):
    """Loss and gradient norm in float64: the mean of −log p over the completions' tokens, each row on its own."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    losses = []
    for prompt, completion in pairs:
        logprobs = torch.log_softmax(network(torch.tensor([[*prompt, *completion]])).logits[0], -1)
        losses += [-logprobs[len(prompt) + i - 1, token] for i, token in enumerate(completion)]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), torch.stack([p.grad.square().sum() for p in network.parameters()]).sum().sqrt().item()


def test_a_step_is_that_of_torch_in_float64(model, setup, trained):
    pairs = [setup.data.pairs[i] for i in batch_indices(14, seed=0, position=0, count=8)]
    assert len({len(prompt) for prompt, _ in pairs}) > 1
    assert len({len(completion) for _, completion in pairs}) > 1
    loss, norm = torch_step(model, pairs)
    first = trained[0][0]
    assert first["step"] == 1
    assert first["loss"] == pytest.approx(loss, rel=2e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert first["num_tokens"] == sum(len(completion) for _, completion in pairs)


def test_the_loss_goes_down(setup, trained):
    metrics, state = trained
    assert [row["step"] for row in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < 0.6 * metrics[0]["loss"]
    assert int(state.step) == 12
    assert all(np.isfinite(list(row.values())).all() for row in metrics)


def test_every_completion_has_one_eos_at_its_end_and_no_prompt_has_one(setup, rows):
    tokenizer = setup.tokenizer
    for (prompt, completion), row in zip(setup.data.pairs, rows, strict=True):
        assert completion[-1] == EOS
        assert [*prompt, *completion].count(EOS) == 1
        assert tokenizer.decode(prompt) == row["prompt"]
        assert tokenizer.decode(completion[:-1]) == row["completion"].removesuffix("<eos>")


def test_weights_are_equal_on_completions_and_zero_elsewhere(setup):
    """The pad token is not asked for its value: the first column of a completion is a column of the batch."""
    pairs = [setup.data.pairs[i] for i in batch_indices(14, seed=0, position=0, count=8)]
    arrays = pad_rows(pairs, *setup.lengths, setup.pad_token_id)
    batch = setup.steps.sft_batch(*setup.steps.place(arrays))
    weights = np.asarray(batch.weights)
    start, total = setup.lengths[0], sum(len(completion) for _, completion in pairs)
    for row, (prompt, completion) in enumerate(pairs):
        assert np.asarray(batch.tokens)[row, start : start + len(completion)].tolist() == completion
        expected = np.zeros(weights.shape[1], np.float32)
        expected[start : start + len(completion)] = np.float32(1) / np.float32(total)
        np.testing.assert_array_equal(weights[row], expected)
        assert np.asarray(batch.segment_ids)[row].sum() == len(prompt) + len(completion)


def test_a_non_finite_loss_stops_with_the_step(setup):
    poisoned = setup._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, setup.params))
    with pytest.raises(FloatingPointError, match="step 1: the loss or its gradient is not finite; lower learning_rate"):
        next(sft_steps(poisoned))


def test_long_rows_are_dropped_and_said(options, rows):
    setup = prepare_sft(options(max_length=20), dataset=rows)
    kept = len(setup.data.pairs)
    assert 0 < kept < 14
    assert setup.notes == [f"{14 - kept} rows dropped, longer than max_length=20"]
    assert all(len(prompt) + len(completion) <= 20 for prompt, completion in setup.data.pairs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows_per_step": 6}, "rows_per_step=6 is not divisible by the 4 devices"),
        ({"microbatch_rows": 2}, "microbatch_rows=2 is not divisible by the 4 devices"),
        ({"rows_per_step": 16, "microbatch_rows": 12}, "microbatch_rows=12 does not divide rows_per_step=16"),
        ({"max_length": 3}, "dataset: no row is left: all 14 have more than max_length=3 tokens"),
    ],
)
def test_options_that_do_not_fit(changes, message, options, rows):
    with pytest.raises(ValueError, match=message):
        prepare_sft(options(**changes), dataset=rows)


def test_a_row_without_a_completion_is_named(options, rows):
    with pytest.raises(ValueError, match="dataset: row 14 has no 'completion'"):
        prepare_sft(options(), dataset=[*rows, {"prompt": "1+1="}])


def test_an_adapter_learns_over_frozen_weights(options, rows, model):
    setup = prepare_sft(options(lora_rank=4, max_steps=6), dataset=rows)
    losses, state = [], None
    for _, newest, values in sft_steps(setup):
        state = newest
        losses.append(values["loss"])
    assert losses[-1] < losses[0]
    _, base, _ = load(model)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(setup.base), base)
    kernel = lambda params: np.asarray(params["layers"]["attn"]["q_proj"]["kernel"])
    merged = sft_policy(setup, state)
    assert np.abs(kernel(merged) - kernel(base)).max() > 1e-4
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(state.params)) < sum(leaf.size for leaf in jax.tree.leaves(base)) / 2
    )


def test_the_first_loss_of_an_adapter_is_the_base_models(options, rows, trained):
    setup = prepare_sft(options(lora_rank=4, max_steps=1), dataset=rows)
    _, _, values = next(sft_steps(setup))
    assert values["loss"] == pytest.approx(trained[0][0]["loss"], rel=1e-6)
