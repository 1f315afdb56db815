"""Supervised training: the loss and gradient of torch on the same rows, completions alone, packed as unpacked, resumed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from transformers import AutoModelForCausalLM

from jaxrl_lm import SFTConfig, train_sft
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.cli import main
from jaxrl_lm.data import batch_indices
from jaxrl_lm.fit import updates
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.models import load
from jaxrl_lm.runs import NonFiniteError
from jaxrl_lm.sft import prepare_sft, trained_policy

pytestmark = pytest.mark.usefixtures("cached")

EOS = 1  # of the lab's tokenizer
CHATML = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


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
    directory = tmp_path_factory.mktemp("sft")
    defaults = {
        "model": model,
        "dataset": "rows",
        "output_dir": str(directory / "run"),
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "rows_per_step": 8,
        "microbatch_rows": 4,
        "learning_rate": 1e-2,
        "adam_eps": 1e-3,
        "max_grad_norm": 0.0,
        "max_steps": 12,
    }
    return lambda **changes: SFTConfig(**defaults | changes)


@pytest.fixture(scope="module")
def setup(options, rows):
    return prepare_sft(options(), dataset=rows)


def steps_of(setup):
    """The metrics of each step, and the last state; the setup's own parameters stay."""
    metrics, state = [], None
    own = setup._replace(params=jax.tree.map(jnp.copy, setup.params))
    for step, newest, values in updates(own):
        state = newest
        metrics.append({"step": step, **values})
    return metrics, state


@pytest.fixture(scope="module")
def trained(setup):
    return steps_of(setup)


def torch_step(model, examples):
    """Loss and gradient norm in float64: the mean of −log p over the marked tokens, each row on its own."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    losses = []
    for example in examples:
        logprobs = torch.log_softmax(network(torch.tensor([example.ids])).logits[0], -1)
        losses += [-logprobs[t - 1, example.ids[t]] for t in range(1, len(example.ids)) if example.mask[t]]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), torch.stack([p.grad.square().sum() for p in network.parameters()]).sum().sqrt().item()


def examples_of(setup, count=8):
    sides = setup.source.table.data.sides
    return [sides[i][0] for i in batch_indices(len(sides), seed=0, position=0, count=count)]


def test_a_step_is_that_of_torch_in_float64(model, setup, trained):
    examples = examples_of(setup)
    assert len({len(one.ids) for one in examples}) > 1
    assert len({one.mask.index(True) for one in examples}) > 1
    loss, norm = torch_step(model, examples)
    first = trained[0][0]
    assert first["step"] == 1
    assert first["loss"] == pytest.approx(loss, rel=2e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert first["num_tokens"] == sum(len(one.ids) for one in examples)


@pytest.mark.parametrize("kind", ["messages", "text"])
def test_the_other_kinds_of_rows_take_torchs_step_too(kind, model, options, rows, tmp_path):
    directory = tiny_run.save_model(tmp_path / "chat", chat_template=CHATML)
    turn = lambda role, text: {"role": role, "content": text}
    if kind == "messages":  # two assistant turns, of which each is trained, its end included
        given = [
            {
                "messages": [
                    turn("user", r["prompt"]),
                    turn("assistant", "7"),
                    turn("user", "1+1="),
                    turn("assistant", "12;"),
                ]
            }
            for r in rows
        ]
    else:
        given = [{"text": row["prompt"] + row["completion"].removesuffix("<eos>")} for row in rows]
    setup = prepare_sft(options(model=directory, max_steps=1), dataset=given)
    examples = examples_of(setup)
    tokenizer = setup.tokenizer
    shown = tokenizer.decode([t for t, marked in zip(examples[0].ids, examples[0].mask, strict=True) if marked])
    assert shown == "7<eos>12;<eos>" if kind == "messages" else shown.endswith("<eos>")
    loss, norm = torch_step(directory, examples)
    (first,), _ = steps_of(setup)
    assert first["loss"] == pytest.approx(loss, rel=2e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=2e-5)


def test_packed_rows_take_the_step_of_unpacked_ones(options, rows):
    """The same 14 rows as one batch: each on its own, and several to a row of 64 tokens."""
    alone = prepare_sft(options(rows_per_step=16, microbatch_rows=None, max_steps=1), dataset=[*rows, *rows[:2]])
    packed = prepare_sft(
        options(rows_per_step=8, microbatch_rows=None, max_steps=1, packing=True, max_length=64),
        dataset=[*rows, *rows[:2]],
    )
    table = packed.source.table.data.sides
    assert len(table) < 8
    assert max(max(one.segments) for (one,) in table) > 1
    # Rows that fill the batch repeat others, whose weight would count twice: take the batch of all rows once.
    host = packed.source.table.batch(range(len(table)))
    state = packed.steps.init(packed.params, jax.random.key(0))
    batch = packed.source.make(host, packed.source.table, state, packed.frozen)
    _, found = packed.steps.update(state, packed.frozen, batch)
    (first,), _ = steps_of(alone)
    assert float(found["loss"].total) == pytest.approx(first["loss"], rel=2e-6)
    assert float(found["grad_norm"].total) == pytest.approx(first["grad_norm"], rel=2e-5)


def test_the_loss_goes_down(trained):
    metrics, state = trained
    assert [row["step"] for row in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < 0.6 * metrics[0]["loss"]
    assert int(state.step) == 12
    assert all(np.isfinite(list(row.values())).all() for row in metrics)


def test_every_completion_has_one_eos_at_its_end_and_no_prompt_has_one(setup, rows):
    tokenizer = setup.tokenizer
    for (example,), row in zip(setup.source.table.data.sides, rows, strict=True):
        first = example.mask.index(True)
        assert example.ids[-1] == EOS
        assert example.ids.count(EOS) == 1
        assert tokenizer.decode(example.ids[:first]) == row["prompt"]
        assert tokenizer.decode(example.ids[first:-1]) == row["completion"].removesuffix("<eos>")


def test_weights_are_equal_on_completions_and_zero_elsewhere(setup, trained):
    source, state = setup.source, trained[1]
    indices = batch_indices(14, seed=0, position=0, count=8).tolist()
    batch = source.make(source.table.batch(indices), source.table, state, setup.frozen)
    examples = [source.table.data.sides[i][0] for i in indices]
    total = sum(sum(one.mask) for one in examples)
    weights, start = np.asarray(batch.weights), source.table.start
    for row, one in enumerate(examples):
        count = sum(one.mask)
        assert np.asarray(batch.tokens)[row, start : start + count].tolist() == one.ids[-count:]
        expected = np.zeros(weights.shape[1], np.float32)
        expected[start : start + count] = np.float32(1) / np.float32(total)
        np.testing.assert_array_equal(weights[row], expected)
        assert np.asarray(batch.segment_ids)[row].sum() == len(one.ids)


def test_a_non_finite_loss_stops_with_the_step_and_keeps_the_batch(setup):
    poisoned = setup._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, setup.params))
    with pytest.raises(NonFiniteError, match="step 1: the loss or its gradient is not finite; the batch is in"):
        next(updates(poisoned))
    with np.load(setup.directory / "nonfinite_step_000001.npz") as kept:
        assert kept["tokens"].shape[0] == 8


def test_a_run_evaluates_saves_and_resumes_bit_for_bit(options, rows, model, tmp_path, capsys):
    """Six steps at once, and three and three: the same metrics and the same weights; the command line is the same run."""
    train = tiny_run.write_rows(tmp_path / "train.jsonl", rows[:11])
    test = tiny_run.write_rows(tmp_path / "test.jsonl", rows[11:])
    options_of = lambda name, steps: options(
        dataset=train, eval_dataset={"test": test}, eval_steps=2, save_steps=2, max_steps=steps,
        output_dir=str(tmp_path / name), best_metric="eval/test/entropy",
    )  # fmt: skip
    whole = train_sft(options_of("whole", 6))
    train_sft(options_of("parts", 3))
    second = train_sft(options_of("parts", 6))
    assert tiny_run.bits(whole.state) == tiny_run.bits(second.state)
    read = lambda name: [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time", "step_time", "tokens_per"))}
        for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    ]
    first, other = read("whole"), read("parts")
    assert [row["step"] for row in first] == [0, 1, 2, 3, 4, 5, 6]
    assert {k: v for row in other for k, v in row.items()}.keys() == {k for row in first for k in row}
    for one, two in zip(first, other, strict=True):  # the evaluation at the end of the first part is one more
        assert {k: two[k] for k in one} == one
    assert "eval/test/loss" in first[-1]
    assert "resumed from step 3" in capsys.readouterr().out
    with Checkpoints(tmp_path / "whole" / "checkpoints", read_only=True) as kept:
        assert kept.latest() == 6
    main(["export", "--run", str(tmp_path / "whole"), "--directory", str(tmp_path / "out")])
    _, params, _ = load(str(tmp_path / "out"))
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(whole.state.params["policy"]))
    with pytest.raises(ValueError, match="the training rows are not those that this run was started with"):
        train_sft(options_of("whole", 8), dataset=rows[1:11])
    with pytest.raises(ValueError, match=r"learning_rate: 0\.01 -> 0\.5"):
        train_sft(options(**vars(options_of("whole", 8)) | {"learning_rate": 0.5}))


def test_long_rows_are_dropped_cut_or_refused(options, rows):
    setup = prepare_sft(options(max_length=20), dataset=rows)
    kept = len(setup.source.table.data.sides)
    assert 0 < kept < 14
    assert f"dataset: {14 - kept} rows dropped, longer than max_length=20" in setup.notes
    assert all(len(one.ids) <= 20 for (one,) in setup.source.table.data.sides)
    cut = prepare_sft(options(max_length=20, long_rows="keep_start"), dataset=rows)
    assert f"dataset: {14 - kept} rows cut to max_length=20" in cut.notes
    assert len(cut.source.table.data.sides) == 14
    with pytest.raises(ValueError, match=r"dataset: row .*max_length"):
        prepare_sft(options(max_length=20, long_rows="error"), dataset=rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows_per_step": 6}, "rows_per_step=6 is not divisible by the 4 devices"),
        ({"microbatch_rows": 2}, "microbatch_rows=2 is not divisible by the 4 devices"),
        ({"rows_per_step": 16, "microbatch_rows": 12}, "microbatch_rows=12 does not divide rows_per_step=16"),
        ({"max_length": 3}, "dataset: no row is left"),
        ({"length_buckets": (8,)}, r"length_buckets=\(8,\): the longest row takes 32 columns"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0: must be at least 0"),
        ({"best_metric": "eval/test/loss"}, "best_metric='eval/test/loss' is best where it is lowest"),
        ({"best_metric": "eval/test/entropy"}, "best_metric='eval/test/entropy' needs an eval_dataset"),
        ({"num_epochs": 0.0}, r"num_epochs=0\.0: must be above 0"),
    ],
)
def test_options_that_do_not_fit(changes, message, options, rows):
    with pytest.raises(ValueError, match=message):
        prepare_sft(options(**changes), dataset=rows)


def test_a_row_without_a_completion_is_named(options, rows):
    with pytest.raises(
        ValueError, match=r"dataset: row 14 has the columns \['prompt'\]: it needs one of 'prompt' with"
    ):
        prepare_sft(options(), dataset=[*rows, {"prompt": "1+1="}])


def test_a_held_out_row_that_is_trained_on_is_refused(options, rows, tmp_path):
    test = tiny_run.write_rows(tmp_path / "test.jsonl", rows[3:5])
    with pytest.raises(ValueError, match="eval_dataset 'test': 2 of its rows stand in the training set too"):
        prepare_sft(options(eval_dataset={"test": test}), dataset=rows)


def test_an_adapter_learns_over_frozen_weights(options, rows, model, trained):
    setup = prepare_sft(options(lora_rank=4, max_steps=6), dataset=rows)
    losses, state = [], None
    for _, newest, values in updates(setup):
        state = newest
        losses.append(values["loss"])
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(trained[0][0]["loss"], rel=1e-6)  # a fresh adapter changes nothing
    _, base, _ = load(model)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(setup.frozen.base), base)
    kernel = lambda params: np.asarray(params["layers"]["attn"]["q_proj"]["kernel"])
    merged = trained_policy(setup.config, setup.frozen.base, state)
    assert np.abs(kernel(merged) - kernel(base)).max() > 1e-4
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.params, base)]
    assert sizes[0] < sizes[1] / 2


def test_rows_in_buckets_are_padded_less_and_learn_the_same(options, rows):
    one = prepare_sft(options(max_steps=2, rows_per_step=4, microbatch_rows=None), dataset=rows)
    two = prepare_sft(
        options(max_steps=2, rows_per_step=4, microbatch_rows=None, length_buckets=(24, 32)), dataset=rows
    )
    widths = {two.source.table.batch([i] * 4).tokens.shape[-1] for i in range(14)}
    assert widths == {24, 32}
    losses = [[row["loss"] for row in steps_of(setup)[0]] for setup in (one, two)]
    np.testing.assert_allclose(*losses, rtol=2e-6)
