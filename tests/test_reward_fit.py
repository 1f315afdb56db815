"""Training reward models: the loss and gradient of torch, ensembles, exports that score as what was trained, resumed."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from jaxrl_lm import PRMConfig, RewardConfig, train_prm, train_reward
from jaxrl_lm.cli import main
from jaxrl_lm.data import batch_indices
from jaxrl_lm.fit import updates
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.models import classifier_settings, init_head, load, load_process_model, load_reward_model
from jaxrl_lm.prepare import build_plan
from jaxrl_lm.process_model import ProcessModel
from jaxrl_lm.reward_fit import head_key, prepare_prm, prepare_reward
from jaxrl_lm.reward_model import RewardModel

EOS, ROWS = 1, 8
TERMS = {"center_rewards_coefficient": 0.1, "label_smoothing": 0.2}
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
MEASURED = ("time", "step_time", "tokens_per")


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
def rows():
    """Pairs with margins."""
    problems = make_problems(14, seed=0, digits=2)
    good = demonstration_rows(problems, seed=0, slip=0.0, drop=0.0, skip=0.3)
    bad = demonstration_rows(problems, seed=1, slip=1.0, drop=0.0, skip=0.3)
    return [
        {"prompt": a["prompt"], "chosen": a["completion"], "rejected": b["completion"], "margin": n % 3 / 4}
        for n, (a, b) in enumerate(zip(good, bad, strict=True))
    ]


@pytest.fixture(scope="module")
def outcomes(rows):
    sides, labels = ("chosen", "rejected", "chosen"), (True, 0, 0.75)
    return [
        {"prompt": row["prompt"], "completion": row[sides[n % 3]], "label": labels[n % 3]} for n, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def stepwise(rows):
    """Two or three steps a row; some labels are soft."""
    steps = [["1+2=3", "4+0=4", "#43"], ["#5", "7"]]
    labels = [[True, 0.25, False], [1, 0.0]]
    return [
        {"prompt": row["prompt"], "completions": steps[n % 2], "labels": labels[n % 2]} for n, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def defaults(model, tmp_path_factory):
    return {
        "model": model,
        "dataset": "rows",
        "output_dir": str(tmp_path_factory.mktemp("reward") / "run"),
        "mesh": MESH,
        "rows_per_step": ROWS,
        "learning_rate": 1e-2,
        "adam_eps": 1e-3,
        "max_grad_norm": 0.0,
        "remat": "none",
        "max_steps": 2,
    }


@pytest.fixture(scope="module")
def options(defaults):
    return lambda **changes: RewardConfig(**defaults | changes)


@pytest.fixture(scope="module")
def steps_options(defaults):
    return lambda **changes: PRMConfig(**defaults | {"step_separator": ";"} | changes)


def steps_of(setup):
    """The metrics of each step, the trained parameters after each, and the last state."""
    metrics, params, state = [], [], None
    for _, newest, values in updates(setup._replace(params=jax.tree.map(jnp.copy, setup.params))):
        state = newest
        metrics.append(values)
        params.append(jax.device_get(state.params["reward"]))
    return metrics, params, state


def drawn(step, size=14):
    return batch_indices(size, seed=0, position=(step - 1) * ROWS, count=ROWS).tolist()


def open_torch(directory, head, kind=AutoModelForSequenceClassification):
    """The language model's trunk with this head."""
    kernel = np.asarray(head["kernel"])
    network = kind.from_pretrained(directory, dtype=torch.float64, num_labels=kernel.shape[1])
    with torch.no_grad():
        network.score.weight.copy_(torch.tensor(kernel.T))
        if "bias" in head:
            network.score.bias.copy_(torch.tensor(np.array(head["bias"])))
    return network


def logits_of(network, ids):
    """[T C]: the head at every token of a row that stands alone."""
    return network.score(network.model(torch.tensor([ids])).last_hidden_state)[0]


def norm_of(network):
    return torch.stack([p.grad.square().sum() for p in network.parameters()]).sum().sqrt().item()


def agrees(step, loss, network):
    """Runs torch's backward pass too."""
    loss.backward()
    assert step["loss"] == pytest.approx(loss.item(), rel=5e-6)
    assert step["grad_norm"] == pytest.approx(norm_of(network), rel=5e-5)


def chars(tokenizer, text):
    return tokenizer.convert_tokens_to_ids(list(text))


def read(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]


# --- comparisons --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(options, rows):
    setup = prepare_reward(options(**TERMS), dataset=rows)
    return setup, *steps_of(setup)


def test_a_step_on_comparisons_is_that_of_torch(model, rows, compared):
    """With a margin, centring and smoothing: the head reads the eos after prompt and completion as one text."""
    setup, (first, _), _, _ = compared
    network = open_torch(model, setup.params["reward"]["head"])
    batch = [rows[i] for i in drawn(1)]
    ids = lambda row, side: [*chars(setup.tokenizer, row["prompt"] + row[side]), EOS]
    scores = torch.stack(
        [torch.stack([logits_of(network, ids(row, side))[-1, 0] for side in ("chosen", "rejected")]) for row in batch]
    )
    gap = scores[:, 0] - scores[:, 1]
    d = gap - torch.tensor([row["margin"] for row in batch], dtype=torch.float64)
    loss = -0.8 * logsigmoid(d) - 0.2 * logsigmoid(-d) + 0.1 * scores.sum(1).square()
    assert first["accuracy"] == (gap > 0).double().mean().item()
    assert first["margin"] == pytest.approx(gap.mean().item(), rel=1e-4, abs=1e-6)
    assert first["mean_reward"] == pytest.approx(scores.mean().item(), rel=1e-4, abs=1e-6)
    lengths = [len(ids(row, side)) for row in batch for side in ("chosen", "rejected")]
    correlation = np.corrcoef(lengths, scores.detach().numpy().reshape(-1))[0, 1]
    assert first["length_reward_correlation"] == pytest.approx(correlation, abs=1e-4)
    agrees(first, loss.mean(), network)
    assert "a fresh head on a language model" in setup.notes


def test_a_head_is_drawn_by_the_seed(options, rows, compared, model):
    config = load(model)[0].config
    first = compared[0].params["reward"]["head"]["kernel"]
    np.testing.assert_array_equal(first, init_head(config, key=head_key(0, 0))["kernel"])
    other = prepare_reward(options(seed=1), dataset=rows).params["reward"]["head"]["kernel"]
    np.testing.assert_array_equal(other, init_head(config, key=head_key(1, 0))["kernel"])
    assert np.abs(np.asarray(first) - np.asarray(other)).max() > 0.1


def test_margins_are_those_of_the_rows(options, rows, compared):
    """Rows that only fill the batch have no weight; rows without margins have none."""
    plain = [{name: value for name, value in row.items() if name != "margin"} for row in rows]
    setup = prepare_reward(options(), dataset=plain)
    state, host = compared[3], setup.source.table.batch(range(ROWS))
    assert setup.source.make(host, setup.source.table, state, setup.frozen).margin is None
    setup = compared[0]
    batch = setup.source.make(setup.source.table.batch([1, 2, 5]), setup.source.table, state, setup.frozen)
    np.testing.assert_array_equal(batch.margin, np.array([0.25, 0.5, 0.5, 0, 0, 0, 0, 0], np.float32))
    np.testing.assert_array_equal(batch.weights > 0, np.arange(8) < 3)


def test_a_padding_token_that_is_the_eos_changes_no_bit(options, rows, compared, tmp_path):
    directory = tiny_run.save_model(tmp_path / "pad")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(directory)
    setup = prepare_reward(options(model=directory, **TERMS), dataset=rows)
    assert setup.source.table.pad_id == EOS
    metrics, params, _ = steps_of(setup)
    assert [row["loss"] for row in metrics] == [row["loss"] for row in compared[1]]
    assert tiny_run.bits(params[-1]) == tiny_run.bits(compared[2][-1])


# --- outcomes and steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["outcome", "outcome_per_token"])
def test_a_step_on_outcomes_is_that_of_torch(loss_type, model, options, outcomes):
    """At the last token, or the mean over rows of each one's mean over the completion and its eos; labels may be soft."""
    setup = prepare_reward(options(loss_type=loss_type, max_steps=1), dataset=outcomes)
    (first,), _, _ = steps_of(setup)
    network = open_torch(model, setup.params["reward"]["head"])
    losses, chances = [], []
    for row in [outcomes[i] for i in drawn(1)]:
        ids = [*chars(setup.tokenizer, row["prompt"] + row["completion"]), EOS]
        logits = logits_of(network, ids)[:, 0]
        read = logits[-1:] if loss_type == "outcome" else logits[len(row["prompt"]) :]
        losses.append(binary_cross_entropy_with_logits(read, torch.full_like(read, float(row["label"]))))
        chances.append(torch.sigmoid(read).detach())
    assert len({float(outcomes[i]["label"]) for i in drawn(1)}) == 3
    assert first["mean_probability"] == pytest.approx(torch.cat(chances).mean().item(), rel=1e-4)
    agrees(first, torch.stack(losses).mean(), network)


@pytest.fixture(scope="module")
def processed(steps_options, stepwise, tmp_path_factory):
    """A run of two steps and its export."""
    directory = tmp_path_factory.mktemp("prm")
    run = train_prm(steps_options(output_dir=str(directory / "run")), dataset=stepwise)
    main(["export", "--run", str(run.directory), "--directory", str(directory / "out")])
    return run, directory / "out"


def test_a_step_on_labelled_steps_is_that_of_torch(model, steps_options, stepwise, processed):
    """Cross-entropy of two classes at the last token of each step's separator, a mean over the labelled tokens."""
    setup = prepare_prm(steps_options(), dataset=stepwise)
    network = open_torch(model, setup.params["reward"]["head"], AutoModelForTokenClassification)
    losses = []
    for row in [stepwise[i] for i in drawn(1)]:
        text, ends = row["prompt"], []
        for step in row["completions"]:
            text += step + ";"
            ends.append(len(text) - 1)
        logits = torch.log_softmax(logits_of(network, chars(setup.tokenizer, text)), -1)
        for end, label in zip(ends, map(float, row["labels"]), strict=True):
            losses.append(-label * logits[end, 1] - (1 - label) * logits[end, 0])
    assert len(losses) > 2 * ROWS
    agrees(processed[0].metrics[0], torch.stack(losses).mean(), network)
    assert "a fresh head on a language model" in setup.notes


def test_an_exported_process_model_scores_as_what_was_trained(processed, stepwise):
    run, directory = processed
    assert classifier_settings(directory)["step_separator"] == ";"
    network = AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float64)
    score = ProcessModel(f"prm:{directory}", plan=build_plan(MESH))
    found = score([row["prompt"] for row in stepwise[:2]], ["1+2=3;4+0=4;#43;", "#5;7;"])
    kernel = lambda params: np.asarray(params["head"]["kernel"])
    np.testing.assert_array_equal(kernel(load_process_model(directory)[1]), kernel(run.state.params["reward"]))
    for row, chances in zip(stepwise[:2], found, strict=True):
        text = row["prompt"] + "".join(step + ";" for step in row["completions"])
        with torch.no_grad():
            logits = logits_of(network, chars(run.tokenizer, text))
        ends = [len(row["prompt"]) + end - 1 for end, _ in chances]
        expected = torch.softmax(logits, -1)[ends, 1].tolist()
        assert [chance for _, chance in chances] == pytest.approx(expected, abs=1e-5)
        assert len(chances) == len(row["completions"])


def test_training_goes_on_from_an_exported_process_model(steps_options, stepwise, processed):
    run, directory = processed
    setup = prepare_prm(steps_options(model=str(directory), max_steps=1), dataset=stepwise)
    assert "training goes on from a trained head" in setup.notes
    equal = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(equal, setup.params["reward"], jax.device_get(run.state.params["reward"]))


# --- runs and exports ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    train = tiny_run.write_rows(directory / "train.jsonl", rows[:11])
    return {"dataset": train, "eval_dataset": {"test": tiny_run.write_rows(directory / "test.jsonl", rows[11:])}}


@pytest.fixture(scope="module")
def whole(options, files, tmp_path_factory):
    """A run of four steps and its export."""
    directory = tmp_path_factory.mktemp("whole")
    run = train_reward(options(**files, **TERMS, max_steps=4, eval_steps=2, output_dir=str(directory / "run")))
    main(["export", "--run", str(run.directory), "--directory", str(directory / "out")])
    return run, directory / "out"


def test_a_run_resumes_bit_for_bit_through_the_command_line(options, files, whole, tmp_path, capsys):
    directory = tmp_path / "parts"
    train_reward(options(**files, **TERMS, max_steps=2, eval_steps=2, output_dir=str(directory)))
    main(["reward", "--config", str(directory / "config.toml"), "--max_steps", "4"])
    assert f"{directory}: step 4. Next: jaxrl-lm export" in capsys.readouterr().out
    metrics = read(whole[0].directory)
    assert read(directory) == metrics
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert {"eval/test/accuracy", "eval/test/loss", "eval/test/calibration_error"} <= metrics[-1].keys()
    main(["export", "--run", str(directory), "--directory", str(tmp_path / "out")])
    params = [load_reward_model(place)[1] for place in (tmp_path / "out", whole[1])]
    assert tiny_run.bits(params[0]) == tiny_run.bits(params[1])


def test_an_exported_model_scores_as_what_was_trained(whole, rows):
    run, directory = whole
    _, params, tokenizer = load_reward_model(directory)
    equal = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(equal, params, jax.device_get(run.state.params["reward"]))
    assert classifier_settings(directory)["append_eos"] is True
    scores = RewardModel(f"reward_model:{directory}", plan=build_plan(MESH))(
        [row["prompt"] for row in rows], [row["chosen"] for row in rows]
    )
    network = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float64)
    with torch.no_grad():
        ids = [[*chars(tokenizer, row["prompt"] + row["chosen"]), EOS] for row in rows]
        expected = [network(torch.tensor([one])).logits.item() for one in ids]
    assert scores == pytest.approx(expected, abs=2e-5)
    assert np.std(expected) > 0.05


def test_training_goes_on_from_an_exported_model(options, rows, whole):
    run, directory = whole
    setup = prepare_reward(options(model=str(directory)), dataset=rows)
    assert "training goes on from a trained head" in setup.notes
    equal = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(equal, setup.params["reward"], jax.device_get(run.state.params["reward"]))


def test_a_trained_model_is_the_reward_of_a_run(model, whole, tmp_path):
    data = tiny_run.write_rows(tmp_path / "train.jsonl", tiny_run.problems("train", 8))
    seen = []
    tiny_run.CALLS.append(lambda *, completions, **columns: seen.append(list(completions)))
    changes = {"eval_dataset": {}, "eval_steps": 0, "probe_prompts": 0, "max_steps": 1, "num_iterations": 1}
    changes |= {"minibatch_completions": None, "beta": 0.0, "prompt_buckets": (8,), "true_reward": None}
    changes |= {"reward": (f"reward_model:{whole[1]}?name=learned", "tiny_run:digits"), "reward_weights": (1.0, 0.0)}
    data = {"train": data, "test": data, "ood": data}
    try:
        run, _ = tiny_run.run(tiny_run.options(model, data, tmp_path / "run", **changes))
    finally:
        tiny_run.CALLS.clear()
    (row,) = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert row["rewards/learned/mean"] == pytest.approx(row["reward"], rel=1e-6)
    assert row["grad_norm"] > 0
    (texts,) = seen
    prompts = [p["prompt"] for p in tiny_run.problems("train", 8)]
    order = [prompts[i] for i in batch_indices(8, seed=0, position=0, count=4) for _ in range(4)]
    scores = RewardModel(f"reward_model:{whole[1]}", plan=build_plan(MESH))(order, texts)
    assert row["reward"] == pytest.approx(np.mean(scores), abs=1e-5)


# --- ensembles ----------------------------------------------------------------------------------------------------------


def test_each_member_learns_as_a_model_alone_with_its_head(options, files, rows, tmp_path):
    """Also where gradients are clipped; and the exported ensemble scores with the members that were trained."""
    terms = {**TERMS, "max_grad_norm": 0.5, **files}
    config = options(members=3, eval_steps=0, output_dir=str(tmp_path / "run"), **terms)
    run = train_reward(config)
    assert min(row["grad_norm"] for row in run.metrics) > 1.0  # of all three, so that some are clipped
    members = jax.device_get(run.state.params["reward"])
    single = prepare_reward(options(**terms))
    heads = [init_head(single.model.config, key=head_key(0, k)) for k in range(3)]
    layout = single.params["reward"]["head"]["kernel"].sharding
    losses, alone = [], []
    for head in heads:
        params = {"reward": {**single.params["reward"], "head": jax.device_put(head, layout)}}
        metrics, trained, _ = steps_of(single._replace(params=params))
        losses.append([row["loss"] for row in metrics])
        alone.append(trained[-1])
    for k in range(3):
        close = lambda whole, one, k=k: np.testing.assert_allclose(whole[k], one, atol=2e-5)
        jax.tree.map(close, members, alone[k])
    assert [row["loss"] for row in run.metrics] == pytest.approx(np.sum(losses, axis=0), rel=1e-5)
    assert np.abs(alone[0]["head"]["kernel"] - alone[1]["head"]["kernel"]).max() > 0.1
    assert run.metrics[0]["ensemble_std"] > 0.01
    main(["export", "--run", str(run.directory), "--directory", str(tmp_path / "out")])
    assert sorted(place.name for place in (tmp_path / "out").iterdir()) == ["member_0", "member_1", "member_2"]
    plan = build_plan(MESH)
    prompts, completions = [row["prompt"] for row in rows[:4]], [row["rejected"] for row in rows[:4]]
    ids = [[*chars(run.tokenizer, p + c), EOS] for p, c in zip(prompts, completions, strict=True)]
    every = []
    for k in range(3):
        place = tmp_path / "out" / f"member_{k}"
        equal = lambda one, whole, k=k: np.testing.assert_array_equal(np.asarray(one), whole[k])
        jax.tree.map(equal, load_reward_model(place)[1], members)
        network = AutoModelForSequenceClassification.from_pretrained(place, dtype=torch.float64)
        with torch.no_grad():
            every.append([network(torch.tensor([one])).logits.item() for one in ids])
    mean = RewardModel(f"reward_model:{tmp_path / 'out'}", plan=plan)
    assert mean.members == 3
    assert mean(prompts, completions) == pytest.approx(np.mean(every, axis=0).tolist(), abs=1e-5)
    least = RewardModel(f"reward_model:{tmp_path / 'out'}?ensemble=min", plan=plan)
    assert least(prompts, completions) == pytest.approx(np.min(every, axis=0).tolist(), abs=1e-5)


def test_members_do_not_start_from_a_trained_head(options, rows, whole):
    with pytest.raises(ValueError, match=r"members=2: .* has a head already, with which all members would be the same"):
        prepare_reward(options(model=str(whole[1]), members=2), dataset=rows)


# --- what does not fit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss_type": "outcome", "center_rewards_coefficient": 0.1},
            "center_rewards_coefficient: belongs to loss_type=",
        ),
        (
            {"loss_type": "outcome", "label_smoothing": 0.1},
            "label_smoothing: belongs to loss_type=bradley_terry, not to o",
        ),
        (
            {"loss_type": "outcome_per_token", "members": 2},
            "members: belongs to loss_type=bradley_terry, not to outcome_",
        ),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5: must be at least 0 and below 0.5"),
        ({"members": 0}, "members=0: must be at least 1"),
        ({"center_rewards_coefficient": -0.1}, "center_rewards_coefficient=-0.1: must be at least 0"),
        ({"rows_per_step": 6}, "rows_per_step=6 is not divisible by the 4 devices"),
        ({"max_length": 4}, "dataset: no row is left of 14"),
    ],
)
def test_options_that_do_not_fit(changes, message, options, rows):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_reward(options(**changes), dataset=rows)


def changed(row, name, value):
    """The row with a column changed, or without it."""
    return {**row, name: value} if value is not ... else {k: v for k, v in row.items() if k != name}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rejected", ..., "dataset: row 3"),
        ("prompt", ..., "dataset: row 3"),
        ("margin", ..., "dataset: 'margin' of row 3 of those kept is None: every row needs a finite number, or none"),
        ("margin", math.nan, "dataset: 'margin' of row 3 of those kept is nan"),
        ("margin", "large", "dataset: 'margin' of row 3 of those kept is 'large'"),
    ],
)
def test_comparisons_that_do_not_fit(name, value, message, options, rows):
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_reward(options(), dataset=[*rows[:3], changed(rows[3], name, value), *rows[4:]])


def test_a_margin_that_the_first_row_lacks_is_not_passed_over(options, rows):
    with pytest.raises(ValueError, match="'margin' of row 0 of those kept is None"):
        prepare_reward(options(), dataset=[changed(rows[0], "margin", ...), *rows[1:]])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("label", ..., "dataset: row 3"),
        ("label", -100, "dataset: row 3: 'label' is -100: it must be true, false, or a number from 0 to 1"),
        ("label", math.nan, "dataset: row 3: 'label' is nan: it must be true, false, or a number from 0 to 1"),
        ("completion", ..., "dataset: row 3"),
    ],
)
def test_outcomes_that_do_not_fit(name, value, message, options, outcomes):
    given = [*outcomes[:3], changed(outcomes[3], name, value), *outcomes[4:]]
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_reward(options(loss_type="outcome"), dataset=given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", ..., "dataset: row 2"),
        ("completions", ..., "dataset: row 2"),
        ("labels", [1, 0], "dataset: row 2: 'labels' has 2 entries and 'completions' 3 steps"),
        ("labels", [1, -100, 0], "dataset: row 2: the label of step 1 is -100: it must be true, false, or a number"),
        ("labels", [1, 0, math.nan], "dataset: row 2: the label of step 2 is nan: it must be true, false, or a number"),
    ],
)
def test_steps_that_do_not_fit(name, value, message, steps_options, stepwise):
    given = [*stepwise[:2], changed(stepwise[2], name, value), *stepwise[3:]]
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare_prm(steps_options(), dataset=given)


def test_steps_need_a_separator(steps_options, stepwise):
    with pytest.raises(ValueError, match="step_separator must not be empty"):
        prepare_prm(steps_options(step_separator=""), dataset=stepwise)


def test_a_model_of_the_other_kind_is_refused(options, steps_options, rows, stepwise, whole, processed):
    with pytest.raises(ValueError, match="a process reward model; a reward model starts from a language model"):
        prepare_reward(options(model=str(processed[1])), dataset=rows)
    with pytest.raises(ValueError, match="a reward model; a process reward model starts from a language model"):
        prepare_prm(steps_options(model=str(whole[1])), dataset=stepwise)


def test_a_tokenizer_that_does_not_fit_is_refused(options, rows, tmp_path):
    directory = tiny_run.save_model(tmp_path / "large")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([f"<new{n}>" for n in range(9)])
    tokenizer.save_pretrained(directory)
    with pytest.raises(ValueError, match="the tokenizer has 33 tokens, the embedding only 24 rows; they do not belong"):
        prepare_reward(options(model=directory), dataset=rows)


def test_a_reward_run_writes_no_text(whole):
    with pytest.raises(SystemExit):
        main(["generate", "--model", str(whole[0].directory), "--prompt", "1+1="])
