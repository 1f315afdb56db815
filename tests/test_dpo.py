"""Training on given preferences: the loss and gradient of torch in float64, references of every kind, resumed, exported."""

import dataclasses
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxrl_lm import DPOConfig, train_dpo
from jaxrl_lm.assemble import lora_of
from jaxrl_lm.cli import main
from jaxrl_lm.data import batch_indices
from jaxrl_lm.dpo import check, parts_of, prepare_dpo
from jaxrl_lm.fit import updates
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.models import load, merge, save

EOS = 1  # of the lab's tokenizer
ROWS, BETA = 8, 0.5
LN2 = math.log(2.0)
SUM = {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.3, 0.5), "microbatch_rows": 4}
MEASURED = ("time", "step_time", "tokens_per")  # beginnings of the names of metrics that no two runs share


@pytest.fixture(scope="module", autouse=True)
def cached(tmp_path_factory):
    """And one thread for torch, whose models here are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tiny_run.compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("other") / "tiny", seed=1)


@pytest.fixture(scope="module")
def rows():
    """Prompts of 4 to 6 tokens, chosen and rejected of 3 to 26."""
    problems = make_problems(14, seed=0, digits=2)
    good = demonstration_rows(problems, seed=0, slip=0.0, drop=0.0, skip=0.3)
    bad = demonstration_rows(problems, seed=1, slip=1.0, drop=0.0, skip=0.3)
    pairs = zip(good, bad, strict=True)
    return [{"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"]} for a, b in pairs]


@pytest.fixture(scope="module")
def judged(rows):
    sides = [("chosen", "rejected")[n % 3 == 1] for n in range(len(rows))]
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(rows, sides, strict=True)
    ]


@pytest.fixture(scope="module")
def options(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dpo")
    defaults = {
        "model": model,
        "dataset": "rows",
        "output_dir": str(directory / "run"),
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "rows_per_step": ROWS,
        "beta": BETA,
        "learning_rate": 1e-2,
        "adam_eps": 1e-3,
        "remat": "none",
        "max_grad_norm": 0.0,
        "max_steps": 3,
    }
    return lambda **changes: DPOConfig(**defaults | changes)


def steps_of(setup, directory=None):
    """The metrics of each step, and the last state; with a directory, the policy after step n stands there as n."""
    metrics, state = [], None
    for step, newest, values in updates(setup._replace(params=jax.tree.map(jnp.copy, setup.params))):
        state = newest
        metrics.append({"step": step, **values})
        if directory is not None:
            save(directory / str(step), setup.model, state.params["policy"], setup.tokenizer)
    return metrics, state


def batch_of(setup, step):
    """The examples of a step, by row and side."""
    sides = setup.source.table.data.sides
    return [sides[i] for i in batch_indices(len(sides), seed=0, position=(step - 1) * ROWS, count=ROWS)]


def open_torch(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)


def token_logprobs(network, example):
    """log p of each marked token, the example alone in its row."""
    logprobs = torch.log_softmax(network(torch.tensor([example.ids])).logits[0], -1)
    return torch.stack([logprobs[t - 1, example.ids[t]] for t in range(1, len(example.ids)) if example.mask[t]])


def torch_step(policy, reference, pairs, loss):
    """The loss of a batch and the norm of its gradient: loss([(log p, log p_ref) of chosen, of rejected] a pair)."""
    network, frozen = open_torch(policy), open_torch(reference)
    with torch.no_grad():
        ref = [[token_logprobs(frozen, side) for side in pair] for pair in pairs]
    own = [[token_logprobs(network, side) for side in pair] for pair in pairs]
    value = loss([list(zip(*pair, strict=True)) for pair in zip(own, ref, strict=True)])
    value.backward()
    norm = torch.stack([p.grad.square().sum() for p in network.parameters() if p.grad is not None]).sum().sqrt()
    return value.item(), norm.item()


def rewards_of(pairs):
    return torch.stack([torch.stack([BETA * (own.sum() - ref.sum()) for own, ref in pair]) for pair in pairs])


def sigmoid_loss(pairs):
    rewards = rewards_of(pairs)
    return -logsigmoid(rewards[:, 0] - rewards[:, 1]).mean()


def sum_loss(pairs, shift):
    """SUM of the config: the sft part is a mean over all chosen tokens of the batch."""
    rewards = rewards_of(pairs) - shift
    bco = -(logsigmoid(rewards[:, 0]) + logsigmoid(-rewards[:, 1])).mean()
    sft = -torch.cat([chosen[0] for chosen, _ in pairs]).mean()
    return 0.8 * sigmoid_loss(pairs) + 0.3 * bco + 0.5 * sft


def agrees(step, expected):
    loss, norm = expected
    assert step["loss"] == pytest.approx(loss, rel=5e-6)
    assert step["grad_norm"] == pytest.approx(norm, rel=5e-5)


# --- losses and references ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sigmoid(options, rows, tmp_path_factory):
    """Setup, metrics, last state and the policies of three steps."""
    setup, directory = prepare_dpo(options(), dataset=rows), tmp_path_factory.mktemp("sigmoid")
    return setup, *steps_of(setup, directory), directory


def test_steps_are_those_of_torch_in_float64(model, sigmoid):
    setup, metrics, state, directory = sigmoid
    batch = batch_of(setup, 1)
    assert len({len(side.ids) for pair in batch for side in pair}) > 3
    agrees(metrics[0], torch_step(model, model, batch, sigmoid_loss))
    assert metrics[0]["loss"] == pytest.approx(LN2, rel=1e-6)
    assert metrics[0]["rewards/margins"] == metrics[0]["rewards/accuracies"] == 0.0
    batch = batch_of(setup, 3)
    agrees(metrics[2], torch_step(directory / "2", model, batch, sigmoid_loss))
    assert abs(metrics[2]["loss"] - LN2) > 0.05
    assert int(state.step) == 3


def test_metrics_are_those_of_torch(model, sigmoid):
    setup, metrics, _, directory = sigmoid
    batch, network, frozen = batch_of(setup, 3), open_torch(directory / "2"), open_torch(model)
    with torch.no_grad():
        pairs = [[(token_logprobs(network, s), token_logprobs(frozen, s)) for s in pair] for pair in batch]
        whole = [torch.log_softmax(network(torch.tensor([pair[0].ids])).logits[0], -1) for pair in batch]
    rewards = rewards_of(pairs)
    margins = rewards[:, 0] - rewards[:, 1]
    first = [pair[0].mask.index(True) for pair in batch]
    entropies = [-(x.exp() * x).sum(-1)[start - 1 : -1] for x, start in zip(whole, first, strict=True)]
    expected = {
        "rewards/chosen": rewards[:, 0].mean(),
        "rewards/rejected": rewards[:, 1].mean(),
        "rewards/margins": margins.mean(),
        "rewards/accuracies": (margins > 0).double().mean(),
        "logps/chosen": sum(pair[0][0].sum() for pair in pairs) / ROWS,
        "logps/rejected": sum(pair[1][0].sum() for pair in pairs) / ROWS,
        "entropy": torch.cat(entropies).mean(),
    }
    for name, value in expected.items():
        assert metrics[2][name] == pytest.approx(float(value), rel=2e-5, abs=2e-6), name
    seen = [sum(len(side.ids) for pair in batch_of(setup, step) for side in pair) for step in (1, 2, 3)]
    assert [row["num_tokens"] for row in metrics] == np.cumsum(seen).tolist()


@pytest.fixture(scope="module")
def summed(options, rows, other, tmp_path_factory):
    setup = prepare_dpo(options(reference_model=other, **SUM), dataset=rows)
    directory = tmp_path_factory.mktemp("sum")
    return setup, *steps_of(setup, directory), directory


def test_a_sum_of_losses_in_microbatches_is_torchs_of_the_whole_batch_and_another_reference(model, other, summed):
    """BCO's δ is 0, then 0.1 · the first step's mean reward, then 0.9 of that + 0.1 · the second one's.

    The sft part is a mean over the tokens of the batch, which no microbatch knows.
    """
    setup, metrics, _, directory = summed
    shift, policies = 0.0, [model, directory / "1", directory / "2"]
    for step, (found, policy) in enumerate(zip(metrics, policies, strict=True), start=1):
        batch, seen = batch_of(setup, step), []
        halves = [sum(sum(chosen.mask) for chosen, _ in batch[part::2]) for part in (0, 1)]
        assert halves[0] != halves[1]

        def loss(pairs, shift=shift, seen=seen):
            seen.append(rewards_of(pairs).detach().mean(0))
            return sum_loss(pairs, shift)

        agrees(found, torch_step(policy, other, batch, loss))
        names = ("chosen", "rejected")
        assert [found[f"rewards/{name}"] for name in names] == pytest.approx(seen[0].tolist(), rel=2e-5)
        shift = 0.9 * shift + 0.1 * seen[0].mean().item()
    assert setup.source.state()["shift"] == pytest.approx(shift, rel=2e-5)
    assert abs(shift) > 0.1


def test_losses_without_a_reference_have_none(options, rows, model):
    """simpo, orpo and cpo, each alone and all three as a sum."""
    for name in ("simpo", "orpo", "cpo", "sft"):
        setup = prepare_dpo(options(loss_type=(name,)), dataset=rows)
        assert not setup.reference_is_start
        assert setup.frozen.reference is setup.frozen.base is None
    weights = {"loss_type": ("simpo", "orpo", "cpo"), "loss_weights": (1.0, 0.7, 0.4), "simpo_gamma": 0.3}
    setup = prepare_dpo(options(max_steps=1, **weights), dataset=rows)
    (first,), state = steps_of(setup)
    batch = batch_of(setup, 1)
    host = setup.source.table.batch(range(ROWS))
    assert setup.source.make(host, setup.source.table, state, setup.frozen).ref_logprobs is None

    def loss(pairs):
        sums = torch.stack([torch.stack([own.sum() for own, _ in pair]) for pair in pairs])
        means = torch.stack([torch.stack([own.mean() for own, _ in pair]) for pair in pairs])
        nll = -torch.cat([chosen[0] for chosen, _ in pairs]).mean()
        simpo = -logsigmoid(BETA * (means[:, 0] - means[:, 1]) - 0.3).mean()
        odds = means - torch.log1p(-means.exp())
        orpo = nll - BETA * logsigmoid(odds[:, 0] - odds[:, 1]).mean()
        cpo = -logsigmoid(BETA * (sums[:, 0] - sums[:, 1])).mean() + nll
        return simpo + 0.7 * orpo + 0.4 * cpo

    agrees(first, torch_step(model, model, batch, loss))


def test_a_reference_that_is_reset_becomes_the_policy(options, rows, sigmoid):
    setup = prepare_dpo(options(reference_reset_steps=2), dataset=rows)
    assert setup.frozen.reference is None
    assert not setup.reference_is_start
    metrics, references = [], []
    for _, state, values in updates(setup):
        metrics.append(values)
        references.append(tiny_run.bits(state.extra["reference"]) == tiny_run.bits(state.params["policy"]))
    assert metrics[0]["loss"] == pytest.approx(LN2, rel=1e-6)
    assert metrics[1]["loss"] == pytest.approx(sigmoid[1][1]["loss"], rel=1e-6)
    assert abs(metrics[1]["loss"] - LN2) > 0.05
    assert metrics[2]["loss"] == pytest.approx(LN2, rel=1e-6)
    assert references == [False, True, False]


KTO = {"loss_type": ("kto",), "desirable_weight": 1.3, "undesirable_weight": 0.7, "max_steps": 1}


def mismatched_gap(network, frozen, batch):
    """The mean log-ratio of each prompt with the completion of the next row of the batch."""
    gaps = []
    for one, after in zip(batch, [*batch[1:], batch[0]], strict=True):
        prompt, completion = one.ids[: one.mask.index(True)], after.ids[after.mask.index(True) :]
        mixed = one._replace(ids=prompt + completion, mask=[False] * len(prompt) + [True] * len(completion))
        gaps.append(float((token_logprobs(network, mixed) - token_logprobs(frozen, mixed)).sum()))
    return sum(gaps) / len(gaps)


def test_kto_is_that_of_torch_with_the_mismatched_kl(options, judged, model, other):
    """The KL has no gradient."""
    setup = prepare_dpo(options(model=other, reference_model=model, **KTO), dataset=judged)
    (first,), _ = steps_of(setup)
    table = setup.source.table.data
    indices = batch_indices(14, seed=0, position=0, count=ROWS).tolist()
    batch = [table.sides[i][0] for i in indices]
    network, frozen = open_torch(other), open_torch(model)
    with torch.no_grad():
        kl = mismatched_gap(network, frozen, batch)
        ref = [token_logprobs(frozen, one).sum() for one in batch]
    assert kl > 0.5
    assert first["kl"] == pytest.approx(kl, rel=1e-5)
    losses, rewards = [], {True: [], False: []}
    for index, one, base in zip(indices, batch, ref, strict=True):
        gap, label = token_logprobs(network, one).sum() - base, table.rows[index]["label"]
        rewards[label].append(BETA * gap.item())
        desirable, undesirable = 1 - torch.sigmoid(BETA * (gap - kl)), 1 - torch.sigmoid(BETA * (kl - gap))
        losses.append(1.3 * desirable if label else 0.7 * undesirable)
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in network.parameters()]).sum().sqrt()
    agrees(first, (loss.item(), norm.item()))
    for name, label in (("chosen", True), ("rejected", False)):
        assert rewards[label]
        assert first[f"rewards/{name}"] == pytest.approx(np.mean(rewards[label]), rel=1e-5)


def test_a_negative_estimate_of_ktos_kl_counts_as_0(options, judged, model, other):
    setup = prepare_dpo(options(model=model, reference_model=other, **KTO), dataset=judged)
    source = setup.source
    key = jax.device_put(jax.random.key(0), setup.steps.plan.replicated)
    state = setup.steps.init(jax.tree.map(jnp.copy, setup.params), key)
    batch = source.make(source.table.batch(range(ROWS)), source.table, state, setup.frozen)
    with torch.no_grad():
        gap = mismatched_gap(open_torch(model), open_torch(other), [one for (one,) in source.table.data.sides[:ROWS]])
    assert gap < -0.5
    np.testing.assert_array_equal(batch.kl, np.zeros(ROWS, np.float32))


# --- whole runs ---------------------------------------------------------------------------------------------------------


def read(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    train = tiny_run.write_rows(directory / "train.jsonl", rows[:11])
    return {"dataset": train, "eval_dataset": {"test": tiny_run.write_rows(directory / "test.jsonl", rows[11:])}}


@pytest.fixture(scope="module")
def whole(options, files, tmp_path_factory):
    """Six steps at once, with BCO's δ in the loss and three held-out pairs."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return train_dpo(options(**files, **SUM, max_steps=6, eval_steps=3, output_dir=str(directory)))


def test_a_run_resumes_bit_for_bit_through_the_command_line(options, files, whole, tmp_path, capsys):
    """Three steps and three: δ comes back from the checkpoint, the reference from the model's directory."""
    directory = tmp_path / "parts"
    first = train_dpo(options(**files, **SUM, max_steps=3, eval_steps=3, output_dir=str(directory)))
    assert first.step == 3
    assert not first.interrupted
    main(["dpo", "--config", str(directory / "config.toml"), "--max_steps", "6"])
    assert f"{directory}: step 6. Next: jaxrl-lm export" in capsys.readouterr().out
    assert read(directory) == read(whole.directory)
    assert {"eval/test/loss", "eval/test/rewards/accuracies"} <= read(directory)[-1].keys()
    for name, run in (("a", directory), ("b", whole.directory)):
        main(["export", "--run", str(run), "--directory", str(tmp_path / name)])
    params = [load(tmp_path / name)[1] for name in "ab"]
    assert tiny_run.bits(params[0]) == tiny_run.bits(params[1])
    jax.tree.map(np.testing.assert_array_equal, params[0], jax.device_get(whole.state.params["policy"]))


def test_the_shift_and_the_reference_matter_to_a_resumed_run(whole):
    """So that the test before could fail."""
    rows = read(whole.directory)
    assert [row["step"] for row in rows] == list(range(7))
    assert abs(rows[3]["rewards/chosen"] + rows[3]["rewards/rejected"]) > 0.1
    assert whole.frozen.reference is not None


def test_log_probs_of_the_reference_computed_beforehand_change_no_bit(options, files, whole, tmp_path):
    changes = {"max_steps": 6, "eval_steps": 3, "precompute_ref_log_probs": True, "output_dir": str(tmp_path / "run")}
    run = train_dpo(options(**files, **SUM, **changes))
    assert run.frozen.reference is None
    assert tiny_run.bits(run.state) == tiny_run.bits(whole.state)
    assert read(run.directory) == read(whole.directory)


def test_an_adapter_is_compared_with_the_weights_below_it_and_exported_merged(options, rows, model, tmp_path):
    """Two steps, whose merged weights are exported, and a third one, resumed, that is torch's on the export."""
    config = options(lora_rank=4, max_steps=2, output_dir=str(tmp_path / "run"))
    run = train_dpo(config, dataset=rows)
    assert run.metrics[0]["loss"] == np.float32(LN2)
    assert run.metrics[0]["rewards/margins"] == 0.0
    assert run.metrics[0]["grad_norm"] > 1e-3
    assert run.frozen.reference is None
    _, base, _ = load(model)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.frozen.base), base)
    main(["export", "--run", str(run.directory), "--directory", str(tmp_path / "out")])
    merged = jax.device_get(merge(run.frozen.base, run.state.params["policy"], lora_of(config)))
    exported = load(tmp_path / "out")[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), exported, merged)
    kernel = lambda params: np.asarray(params["layers"]["attn"]["q_proj"]["kernel"])
    assert np.abs(kernel(exported) - kernel(base)).max() > 1e-3
    (third,) = train_dpo(dataclasses.replace(config, max_steps=3), dataset=rows).metrics
    batch = batch_of(prepare_dpo(options(), dataset=rows), 3)
    loss, _ = torch_step(tmp_path / "out", model, batch, sigmoid_loss)
    assert third["step"] == 3
    assert third["loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(loss - LN2) > 0.02


# --- rows with a catch --------------------------------------------------------------------------------------------------


def test_a_pair_of_equal_sides_is_counted_and_has_no_gradient(options, rows, model):
    given = [*rows[:3], {**rows[3], "rejected": rows[3]["chosen"]}, *rows[4:8]]
    setup = prepare_dpo(options(max_steps=1), dataset=given)
    assert "dataset: 1 pairs with two equal sides, which teach nothing" in setup.notes
    (first,), _ = steps_of(setup)
    others = [pair for pair in batch_of(setup, 1) if pair[0] != pair[1]]
    assert len(others) == 7
    loss, norm = torch_step(model, model, others, sigmoid_loss)
    assert first["loss"] == pytest.approx(loss, rel=1e-6)  # ln 2 with it and without
    assert first["grad_norm"] == pytest.approx(norm * 7 / 8, rel=5e-5)


def test_pairs_that_are_all_equal_are_refused(options, rows):
    with pytest.raises(ValueError, match="dataset: chosen and rejected have the same tokens in all 14 rows"):
        prepare_dpo(options(), dataset=[{**row, "rejected": row["chosen"]} for row in rows])


def test_a_pair_of_which_a_response_is_cut_away_is_left_out_and_counted(options, rows):
    long = {**rows[0], "prompt": "1+1+1+1+1+1="}
    setup = prepare_dpo(options(max_length=12), dataset=[*rows, long])
    assert "dataset: 1 rows dropped: cut to max_length=12 nothing of a response would be left" in setup.notes
    sides = setup.source.table.data.sides
    assert len(sides) == 14
    assert all(any(side.mask) and len(side.ids) <= 12 for pair in sides for side in pair)
    assert all(pair[0].ids[0] != EOS for pair in sides)


def test_a_prompt_that_brings_the_bos_has_it_once(options, rows, tmp_path):
    directory = tiny_run.save_model(tmp_path / "bos")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.bos_token = "<r0>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<r0> $A", special_tokens=[("<r0>", bos)])
    tokenizer.save_pretrained(directory)
    given = [{**row, "prompt": "<r0>" * (n % 2) + row["prompt"]} for n, row in enumerate(rows)]
    setup = prepare_dpo(options(model=directory), dataset=given)
    for pair in setup.source.table.data.sides:
        assert [side.ids.count(bos) for side in pair] == [1, 1]
        assert [side.ids[0] for side in pair] == [bos, bos]
        assert [side.ids.count(EOS) for side in pair] == [1, 1]


# --- options that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": ()}, "loss_type is empty: give one or several of sigmoid, "),
        ({"loss_type": ("sigmiod",)}, "loss_type=sigmiod is unknown; did you mean sigmoid?"),
        ({"loss_type": ("kto", "sft")}, "loss_type=kto stands alone, and on given rows with a label"),
        ({"loss_type": ("kto",), "refresh_steps": 1}, "loss_type=kto stands alone, and on given rows"),
        ({"loss_type": ("aot",), "microbatch_rows": 4}, "loss_type=aot compares pairs of the whole batch"),
        ({"loss_type": ("simpo",), "reference_model": "x"}, "reference_model: loss_type=simpo reads no reference"),
        ({"loss_type": ("cpo", "sft"), "reference_reset_steps": 2}, "reference_reset_steps: loss_type=cpo, sft reads"),
        ({"loss_type": ("orpo",), "precompute_ref_log_probs": True}, "precompute_ref_log_probs: loss_type=orpo reads"),
        ({"reference_reset_steps": 2, "precompute_ref_log_probs": True}, "reference_reset_steps: a reference that moves"),
        ({"reference_reset_steps": 2, "lora_rank": 2}, "reference_reset_steps: a reference that moves"),
        ({"reference_reset_steps": 2, "reference_model": "x"}, "reference_model: with reference_reset_steps"),
        ({"reference_reset_steps": 0}, "reference_reset_steps=0: must be at least 1"),
        ({"refresh_steps": 1, "reward": ("random",), "precompute_ref_log_probs": True}, "precompute_ref_log_probs: with"),
        ({"refresh_steps": 1}, "refresh_steps: give either reward or judge"),
        ({"refresh_steps": 1, "reward": ("random",), "judge": "a:b"}, "refresh_steps: give either reward or judge"),
        ({"reward": ("random",)}, "reward and judge rank samples of the policy: give refresh_steps too"),
        ({"judge": "a:b"}, "reward and judge rank samples of the policy: give refresh_steps too"),
        ({"loss_type": ("inpo",)}, "loss_type=inpo learns from the policy's own samples: give refresh_steps"),
        ({"inpo_eta": 0.2}, "inpo_eta: loss_type=sigmoid does not read it; inpo does"),
        ({"loss_weights": (1.0, 2.0)}, "loss_weights has 2 values for 1 losses of loss_type"),
        ({"simpo_gamma": 1.0}, "simpo_gamma: loss_type=sigmoid does not read it; simpo does"),
        ({"discopop_tau": 0.2}, "discopop_tau: loss_type=sigmoid does not read it; discopop does"),
        ({"undesirable_weight": 2.0}, "undesirable_weight: loss_type=sigmoid does not read it; kto does"),
        ({"loss_type": ("kto",), "label_smoothing": 0.1}, "label_smoothing: loss_type=kto does not read it; sigmoid, "),
        ({"loss_type": ("kto",), "rpo_alpha": 0.1}, "rpo_alpha: loss_type=kto does not read it"),
        ({"loss_type": ("kto",), "loss_weights": (2.0,)}, "loss_weights: loss_type=kto does not read it"),
        ({"loss_type": ("kto",), "beta": 0.0}, "beta=0.0: must be above 0"),
        ({"loss_type": ("kto",), "precompute_ref_log_probs": True}, "precompute_ref_log_probs: loss_type=kto scores"),
        ({"loss_type": ("ipo",), "length_alpha": 0.1}, "length_alpha: loss_type=ipo does not read it; sigmoid, "),
        ({"f_alpha_divergence_coef": 0.2}, "f_alpha_divergence_coef belongs to f_divergence_type=alpha_divergence"),
        ({"label_smoothing": 0.5}, "loss_type=sigmoid: label_smoothing=0.5: at least 0 and below 0.5"),
        ({"loss_type": ("exo_pair",)}, "loss_type=exo_pair: label_smoothing=0.0: above 0 for exo_pair"),
        ({"loss_type": ("sigmoid", "apo_zero"), "f_divergence_type": "forward_kl"}, "'apo_zero' does not read f_diverg"),
        ({"beta": 0.0}, "beta=0.0: must be above 0"),
        ({"rpo_alpha": -1.0}, "rpo_alpha=-1.0: must be at least 0"),
        ({"rows_per_step": 6}, "rows_per_step=6 is not divisible by the 4 devices"),
        ({"temperature": 0.7}, "temperature=0.7 has no effect: without refresh_steps pairs are given; leave it out"),
        ({"max_prompt_length": 8}, "max_prompt_length=8 has no effect: without refresh_steps"),
        ({"eval_reward_functions": ("random",)}, r"eval_reward_functions=\('random',\) has no effect: without"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(changes, message, options, rows):
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?") if "'" not in message else message):
        prepare_dpo(options(**changes), dataset=rows)


def test_kto_needs_another_row_to_compare_with(options):
    with pytest.raises(ValueError, match="rows_per_step=1: loss_type=kto compares each row with the next one"):
        check(options(loss_type=("kto",), rows_per_step=1), 1)


def test_a_reference_of_another_shape_is_refused(options, rows, tmp_path):
    small = tiny_run.save_model(tmp_path / "small", num_layers=1)
    with pytest.raises(ValueError, match="has another shape than the policy; give one of it"):
        prepare_dpo(options(reference_model=small), dataset=rows)


def test_the_sft_term_of_rpo_joins_the_parts(options):
    assert parts_of(options(rpo_alpha=0.3)) == (("sigmoid", 1.0), ("sft", 0.3))


def test_a_mistake_ends_the_command_with_its_message(options, files, capsys):
    with pytest.raises(SystemExit) as end:
        main(
            [
                "dpo",
                "--model",
                options().model,
                "--dataset",
                files["dataset"],
                "--output_dir",
                "x",
                "--loss_type",
                "dop",
            ]
        )
    assert end.value.code == 2
    assert "jaxrl-lm dpo: error: loss_type=dop is unknown" in capsys.readouterr().err


def test_dropout_of_a_model_disturbs_neither_policy_nor_reference(options, rows, model, tmp_path):
    """A config that asks for dropout: both are read without it, so that at the start they are equal to the last bit."""
    shutil.copytree(model, tmp_path / "dropout")
    config = json.loads((tmp_path / "dropout" / "config.json").read_text())
    (tmp_path / "dropout" / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    setup = prepare_dpo(options(model=str(tmp_path / "dropout"), max_steps=1), dataset=rows)
    (first,), _ = steps_of(setup)
    assert first["loss"] == float(np.float32(np.log(2)))
    assert (first["rewards/chosen"], first["rewards/rejected"]) == (0.0, 0.0)
