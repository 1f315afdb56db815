"""Pairs of the policy's own samples: how they are chosen, that they are the sampler's, windows of one policy, resumed."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from jaxrl_lm import DPOConfig, train_dpo
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.cli import main
from jaxrl_lm.data import batch_indices
from jaxrl_lm.dpo import prepare_dpo
from jaxrl_lm.encode import EncodedPrompts
from jaxrl_lm.fit import updates
from jaxrl_lm.models import load
from jaxrl_lm.online_pairs import best_and_worst, win_rates
from jaxrl_lm.rewards import RewardError
from jaxrl_lm.rollout import TRAIN, Sampled
from jaxrl_lm.types import Rollout

GROUP, ROWS, BETA = 4, 4, 0.5
INPO = {"loss_type": ("inpo",), "beta": 0.2, "inpo_eta": 0.5}
MEASURED = ("time", "step_time", "tokens_per")


def digits(*, completions, **_):
    return [sum(c.isdigit() for c in text) / 8 for text in completions]


def constant(*, completions, **_):
    return [0.25] * len(completions)


def picky(*, completions, answer, **_):
    """Ranks the samples of one prompt in about three, and has nothing against all others."""
    values = digits(completions=completions)
    return [value if total % 3 == 0 else 0.0 for value, total in zip(values, answer, strict=True)]


def prefers_digits(*, prompts, completions, others, answer, **_):
    """P(first is preferred), a little more where the answer is even; not a difference of two rewards."""
    first, second = digits(completions=completions), digits(completions=others)
    sharp = [4.0 + total % 2 for total in answer]
    return [1 / (1 + math.exp(-s * (a - b) ** 3)) for s, a, b in zip(sharp, first, second, strict=True)]


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
def prompts():
    return tiny_run.problems("train", 15)


@pytest.fixture(scope="module")
def options(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("online")
    defaults = {
        "model": model,
        "dataset": "rows",
        "output_dir": str(directory / "run"),
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "reward": ("test_online_pairs:digits",),
        "refresh_steps": 1,
        "rows_per_step": ROWS,
        "prompts_per_step": 4,
        "num_generations": GROUP,
        "max_completion_length": 8,
        "prompt_buckets": (8,),
        "beta": BETA,
        "learning_rate": 1e-2,
        "adam_eps": 1e-3,
        "max_grad_norm": 0.0,
        "remat": "none",
        "max_steps": 1,
    }
    return lambda **changes: DPOConfig(**defaults | changes)


class Recorder:
    """A source that keeps what it gave, and the policy of each step."""

    def __init__(self, source):
        self.source, self.batches, self.found, self.policies = source, [], [], []

    def __getattr__(self, name):
        return getattr(self.source, name)

    def take(self, step, state, frozen, clock):
        batch, found = self.source.take(step, state, frozen, clock)
        self.batches.append(batch)
        self.found.append(dict(found))
        self.policies.append(jax.device_get(state.params["policy"]))
        return batch, found


def run_of(setup):
    """What the source gave, the metrics of each step, and the last state."""
    recorder, metrics, state = Recorder(setup.source), [], None
    for _, newest, values in updates(setup._replace(source=recorder, params=jax.tree.map(jnp.copy, setup.params))):
        state = newest
        metrics.append(values)
    return recorder, metrics, state


def sampled_by(setup, *, call, indices):
    """The completions that the run's sampler gives with the first weights for a number of call."""
    online = setup.source._online
    weights = online.steps.prepare_decode(setup.params["policy"], None)
    key = jax.device_put(jax.random.key(0), setup.steps.plan.replicated)
    options = {"purpose": TRAIN, "step": call, "temperature": 1.0, "policy_step": 0}
    return online.sampler(weights, key, online.prompts, indices, **options)


def drawn(first, count, size=15):
    return batch_indices(size, seed=0, position=first, count=count).tolist()


def pairs_in(batch):
    """(prompt and chosen, prompt and rejected) of each pair with a weight, and where the completions begin."""
    found = []
    for row in np.flatnonzero(np.asarray(batch.weights)):
        keep = [np.asarray(batch.segment_ids)[row, side] > 0 for side in (0, 1)]
        ids = [np.asarray(batch.tokens)[row, side][keep[side]].tolist() for side in (0, 1)]
        marks = [np.asarray(batch.action_mask)[row, side][keep[side]].tolist() for side in (0, 1)]
        found.append(tuple(zip(ids, [mark.index(True) for mark in marks], strict=True)))
    return found


def by_hand(sampled, prompts, indices, score):
    """The same of samples: of every prompt the first best and the first worst one that have a token."""
    found = []
    for place, index in enumerate(indices):
        group = range(place * GROUP, (place + 1) * GROUP)
        rows = [(score(sampled, row), row) for row in group if sampled.completion_ids[row]]
        best, worst = max(rows, key=lambda one: one[0]), min(rows, key=lambda one: one[0])
        if best[0] > worst[0]:
            ids = prompts.ids[index]
            sides = (best[1], worst[1])
            found.append(tuple((ids + sampled.completion_ids[row], len(ids)) for row in sides))
    return found


def by_digits(sampled, row):
    return digits(completions=[sampled.texts[row]])[0]


# --- choosing a pair ----------------------------------------------------------------------------------------------------


def made(lengths, logprobs=None):
    """Hand-made samples of two prompts, three each, of these lengths; a token's id is 10 · row + its number."""
    ids = [[10 * row + k for k in range(length)] for row, length in enumerate(lengths)]
    mask = np.array([[2 <= t < 2 + length for t in range(6)] for length in lengths])
    logprobs = -np.arange(36.0, dtype=np.float32).reshape(6, 6) if logprobs is None else logprobs
    array = np.zeros((6, 6), np.int32)
    rollout = Rollout(array, array, mask, logprobs, None, np.zeros(6, bool), array, array)
    rows = [{"prompt": name, "answer": n} for n, name in enumerate("ab") for _ in range(3)]
    texts = [f"t{row}" for row in range(6)]
    shown = [row["prompt"] for row in rows]
    return Sampled(rollout, None, 6, rows, shown, texts, ids, np.zeros(6), np.zeros(6, bool))


PROMPTS = EncodedPrompts(rows=[{}, {}], ids=[[1, 2], [3]], texts=["", ""], dropped=0, cut=0)


@pytest.mark.parametrize(
    ("values", "valid", "lengths", "expected"),
    [
        ([[1, 3, 2], [0, 0, 1]], None, (2, 2, 2, 2, 2, 2), [(0, 1, 0), (1, 5, 3)]),
        ([[3, 3, 1], [2, 5, 5]], None, (2, 2, 2, 2, 2, 2), [(0, 0, 2), (1, 4, 3)]),  # the first of equal ones
        ([[2, 2, 2], [1, 2, 1]], None, (2, 2, 2, 2, 2, 2), [(1, 4, 3)]),  # all alike: no pair
        ([[9, 1, 2], [1, 2, 0]], [[0, 1, 1], [1, 1, 0]], (2,) * 6, [(0, 2, 1), (1, 4, 3)]),  # abstentions
        ([[9, 1, 2], [1, 2, 0]], [[0, 1, 0], [0, 0, 0]], (2,) * 6, []),
        ([[9, 1, 2], [1, 2, 0]], None, (0, 2, 2, 0, 0, 3), [(0, 2, 1)]),  # empty completions
        ([[0, 0, 0], [0, 0, 0]], None, (0,) * 6, []),
    ],
)
def test_a_pair_is_the_first_best_and_the_first_worst_sample(values, valid, lengths, expected):
    sampled = made(lengths)
    valid = np.ones((2, 3), bool) if valid is None else np.array(valid, bool)
    pairs = best_and_worst(PROMPTS, [1, 0], sampled, np.array(values, np.float64), valid)
    prompt = ([3], [1, 2])  # the prompts were drawn in the order 1, 0
    assert [(pair.prompt, pair.chosen, pair.rejected) for pair in pairs] == [
        (prompt[place], sampled.completion_ids[best], sampled.completion_ids[worst]) for place, best, worst in expected
    ]
    for pair, (_, *rows) in zip(pairs, expected, strict=True):
        own = [[-6.0 * row - 2 - k for k in range(lengths[row])] for row in rows]
        assert list(map(list, pair.logprobs)) == own


# --- judges -------------------------------------------------------------------------------------------------------------


def test_a_win_rate_is_the_mean_chance_against_the_others_of_the_prompt():
    """By enumeration, of a preference with a cycle that no reward explains; the columns are the prompt's."""
    chance = {(0, 1): 0.9, (1, 2): 0.8, (2, 0): 0.7, (3, 4): 0.5, (4, 5): 1.0, (3, 5): 0.25}
    chance |= {(b, a): 1 - p for (a, b), p in chance.items()}
    seen = []

    def judge(prompts, completions, others, answer):
        seen.extend(zip(prompts, completions, others, answer, strict=True))
        return [chance[int(a[1]), int(b[1])] for a, b in zip(completions, others, strict=True)]

    rates, valid = win_rates(judge, made((2,) * 6), 3, name="mine")
    expected = [[(0.9 + 0.3) / 2, (0.1 + 0.8) / 2, (0.2 + 0.7) / 2], [(0.5 + 0.25) / 2, 0.75, (0.0 + 0.75) / 2]]
    np.testing.assert_allclose(rates, expected, rtol=1e-12)
    assert valid.all()
    assert len(seen) == 12
    assert {(p, n) for p, *_, n in seen} == {("a", 0), ("b", 1)}
    assert all((int(a[1]) < 3) == (int(b[1]) < 3) == (p == "a") for p, a, b, _ in seen)


async def _late(**_):
    return [0.5] * 12


def _answers(value):
    return lambda **_: value


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (_answers([0.5] * 11), "judge mine: 11 answers for 12 pairs"),
        (_answers([0.5, 1.5, *[0.5] * 10]), "judge mine: pair 1: 1.5 is no probability"),
        (_answers([*[0.5] * 11, -0.1]), "judge mine: pair 11: -0.1 is no probability"),
        (_answers([math.nan, *[0.5] * 11]), "judge mine: pair 0: nan is no probability"),
        (_answers([None, *[0.5] * 11]), "judge mine: pair 0: None is no probability"),
        (_answers(["first", *[0.5] * 11]), "judge mine: pair 0: 'first' is no probability"),
        (_answers(None), "judge mine: returned None, not a list"),
        (_answers(0.5), "judge mine: returned 0.5, not a list"),
        (_late, "judge mine: an async judge is not supported; return a list"),
    ],
    ids=["few", "above", "below", "nan", "none", "text", "nothing", "number", "async"],
)
def test_answers_that_are_no_chances_are_errors(judge, message):
    with pytest.raises(RewardError, match="^" + re.escape(message)):
        win_rates(judge, made((2,) * 6), 3, name="mine")


def test_an_error_of_a_judge_names_it():
    def judge(**_):
        raise KeyError("colour")

    with pytest.raises(RewardError, match="judge mine: KeyError: 'colour'"):
        win_rates(judge, made((2,) * 6), 3, name="mine")


def test_a_judge_may_return_an_array():
    rates, _ = win_rates(_answers(np.full(12, 0.5, np.float32)), made((2,) * 6), 3, name="mine")
    np.testing.assert_array_equal(rates, np.full((2, 3), 0.5))


# --- runs ---------------------------------------------------------------------------------------------------------------


def torch_step(model, pairs):
    """DPO's loss and gradient norm in float64, the policy being its own reference."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    network.get_input_embeddings().padding_idx = None  # it is sampled too, and torch would leave out its gradient

    def log_ratio(ids, begin):
        logprobs = torch.log_softmax(network(torch.tensor([ids])).logits[0], -1)
        whole = torch.stack([logprobs[t - 1, ids[t]] for t in range(begin, len(ids))]).sum()
        return whole - whole.detach()

    losses = [-logsigmoid(BETA * (log_ratio(*chosen) - log_ratio(*rejected))) for chosen, rejected in pairs]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), torch.stack([p.grad.square().sum() for p in network.parameters()]).sum().sqrt().item()


def test_an_online_step_is_dpos_on_the_pairs_that_the_sampler_gives(model, options, prompts):
    setup = prepare_dpo(options(), dataset=prompts)
    indices = drawn(0, 4)
    sampled = sampled_by(setup, call=1, indices=indices)
    expected = by_hand(sampled, setup.source._online.prompts, indices, by_digits)
    assert len(expected) == ROWS  # or the run would have asked further prompts
    recorder, (first,), state = run_of(setup)
    (batch,) = recorder.batches
    assert pairs_in(batch) == expected
    np.testing.assert_array_equal(batch.weights, np.full(4, 0.25, np.float32))
    assert batch.old_logprobs is None
    loss, norm = torch_step(model, expected)
    assert first["loss"] == pytest.approx(loss, rel=1e-6)
    assert first["grad_norm"] == pytest.approx(norm, rel=5e-5)
    assert first["reward"] == pytest.approx(np.mean([by_digits(sampled, row) for row in range(16)]))
    assert first["pairs/kept_share"] == first["pairs/share"] == 1.0
    assert first["completions/mean_length"] == np.mean([len(ids) for ids in sampled.completion_ids])
    assert first["num_tokens"] == sum(len(ids) for pair in expected for ids, _ in pair)
    assert int(state.step) == 1


@pytest.fixture(scope="module")
def windowed(options, prompts):
    """Four steps of INPO; the first three learn from samples of the first policy."""
    setup = prepare_dpo(options(refresh_steps=3, max_steps=4, **INPO), dataset=prompts)
    return setup, *run_of(setup)


def test_the_steps_of_a_window_have_pairs_of_one_policy(windowed):
    setup, recorder, _, state = windowed
    expected, position, call = [], 0, 0
    while len(expected) < 3 * ROWS:
        count = min(4, 3 * ROWS - len(expected))
        indices, call = drawn(position, count), call + 1
        sampled = sampled_by(setup, call=call, indices=indices)
        expected += by_hand(sampled, setup.source._online.prompts, indices, by_digits)
        position += count
    assert [pair for batch in recorder.batches[:3] for pair in pairs_in(batch)] == expected
    assert ["reward" in found for found in recorder.found] == [True, False, False, True]
    assert len(pairs_in(recorder.batches[3])) == ROWS
    assert int(state.step) == 4


def test_inpo_compares_with_the_policy_that_sampled(windowed):
    """Its log-probs are the scorer's, and the losses those of the formula, of the policies of each step."""
    setup, recorder, metrics, _ = windowed
    base, eta, tau = recorder.policies[0], INPO["inpo_eta"], INPO["beta"]
    old_of = [recorder.policies[0]] * 3 + [recorder.policies[3]]
    layout, start = setup.steps.plan.tree(setup.model.specs), setup.source._online.table.start

    def scores(params, batch):
        tokens = (batch.tokens, batch.segment_ids)
        return np.asarray(setup.steps.score_base(jax.device_put(params, layout), *tokens, start), np.float64)

    for step, batch in enumerate(recorder.batches):
        mask = np.asarray(batch.action_mask)
        policy, old, ref = (scores(params, batch) for params in (recorder.policies[step], old_of[step], base))
        np.testing.assert_allclose(np.asarray(batch.old_logprobs)[mask], old[mask], atol=2e-5)
        gap = lambda x, m=mask: np.where(m, x, 0.0)[:, 0].sum(1) - np.where(m, x, 0.0)[:, 1].sum(1)
        h = gap(policy) - tau / eta * gap(ref) - (1 - tau / eta) * gap(old)
        assert metrics[step]["loss"] == pytest.approx(np.mean((h - 1 / (2 * eta)) ** 2), rel=1e-4)
    assert metrics[0]["loss"] == pytest.approx(1.0, rel=1e-4)  # 1 / (2 η)
    assert abs(metrics[2]["loss"] - 1.0) > 0.05


def read(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]


def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_window(options, prompts, tmp_path):
    """Two steps of a window of three; the pairs that wait come back with the log-probs of the policy that sampled."""
    train = tiny_run.write_rows(tmp_path / "train.jsonl", prompts)
    config = lambda name, steps: options(
        dataset=train, refresh_steps=3, max_steps=steps, output_dir=str(tmp_path / name), **INPO
    )
    whole = train_dpo(config("whole", 5))
    train_dpo(config("parts", 2))
    with Checkpoints(tmp_path / "parts" / "checkpoints", read_only=True) as kept:
        assert len(kept.restore_host()["source"]["waiting"]) == ROWS
    main(["dpo", "--config", str(tmp_path / "parts" / "config.toml"), "--max_steps", "5"])
    rows = read(tmp_path / "whole")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert ["reward" in row for row in rows] == [True, False, False, True, False]
    assert read(tmp_path / "parts") == rows
    for name in ("whole", "parts"):
        main(["export", "--run", str(tmp_path / name), "--directory", str(tmp_path / f"{name}_out")])
    params = [load(tmp_path / f"{name}_out")[1] for name in ("whole", "parts")]
    assert tiny_run.bits(params[0]) == tiny_run.bits(params[1])
    jax.tree.map(np.testing.assert_array_equal, params[0], jax.device_get(whole.state.params["policy"]))


def test_a_step_without_a_pair_makes_no_step_of_the_optimiser(options, prompts, model, tmp_path):
    """Four times as many prompts as pairs are needed are asked, and the weights stay; evaluation goes on."""
    test = tiny_run.write_rows(tmp_path / "test.jsonl", tiny_run.problems("test", 3))
    changes = {"eval_dataset": {"test": test}, "eval_steps": 2, "max_steps": 2, "output_dir": str(tmp_path / "run")}
    asked = []

    def counted(*, completions, **columns):
        asked.append(len(completions))
        return constant(completions=completions)

    run = train_dpo(
        options(**changes, eval_reward_functions=("test_online_pairs:digits",)),
        dataset=prompts,
        reward_functions=[counted],
    )
    assert run.step == 2
    assert int(run.state.step) == 0
    assert asked == [16] * 8
    for row in run.metrics:
        assert (row["updates"], row["pairs/kept_share"], row["pairs/share"], row["reward"]) == (0.0, 0.0, 0.0, 0.25)
        assert "loss" not in row
    assert 0.0 <= run.metrics[-1]["eval/test/greedy_accuracy"] <= 1.0
    _, params, _ = load(model)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state.params["policy"]), params)


def test_fewer_pairs_than_asked_for_are_spread_over_the_window(options, prompts):
    """Only prompts whose answer is divisible by 3 give one; the rows that fill a batch have no weight."""
    few = [row for row in prompts if row["answer"] % 3][:5] + [row for row in prompts if row["answer"] % 3 == 0][:1]
    changes = {"reward": ("test_online_pairs:picky",), "refresh_steps": 2, "max_steps": 2, "num_generations": GROUP}
    recorder, metrics, state = run_of(prepare_dpo(options(**changes), dataset=few))
    shares = [row["pairs/share"] for row in metrics]
    count = round(sum(shares) * ROWS)
    assert 2 <= count <= 7
    assert metrics[0]["pairs/kept_share"] == count / 32
    assert round(shares[0] * ROWS) == math.ceil(count / 2)
    for batch, share in zip(recorder.batches, shares, strict=True):
        own = round(share * ROWS)
        expected = np.where(np.arange(ROWS) < own, np.float32(1) / max(own, 1), 0).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(batch.weights), expected)
    assert int(state.step) == 2


def test_a_judge_ranks_the_samples(options, prompts):
    setup = prepare_dpo(options(reward=(), judge="test_online_pairs:prefers_digits"), dataset=prompts)
    indices = drawn(0, 4)
    sampled = sampled_by(setup, call=1, indices=indices)

    def rate(found, row):
        begin = row - row % GROUP
        others = [n for n in range(begin, begin + GROUP) if n != row]
        answer = prompts[indices[row // GROUP]]["answer"]
        one = lambda n: prefers_digits(
            prompts=[""], completions=[found.texts[row]], others=[found.texts[n]], answer=[answer]
        )[0]
        return np.mean([one(n) for n in others])

    expected = by_hand(sampled, setup.source._online.prompts, indices, rate)
    recorder, (first,), _ = run_of(setup)
    assert pairs_in(recorder.batches[0])[: len(expected)] == expected
    assert len(expected) >= 3
    assert first["reward"] == pytest.approx(0.5)  # of win rates within groups
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)


# --- options that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 1}, "num_generations=1: a pair needs at least 2 samples of a prompt"),
        ({"refresh_steps": 0}, "refresh_steps=0: must be at least 1"),
        ({"max_completion_length": 0}, "max_completion_length=0: must be at least 1"),
        ({"prompts_per_step": 0}, "prompts_per_step=0: must be at least 1"),
        ({"prompts_per_step": 6}, "prompts_per_step=6 is not divisible by the 4 devices of the mesh's batch axes"),
        ({"eval_num_generations": 0}, "eval_num_generations=0: must be at least 1"),
        ({"temperature": 0.0}, "temperature=0.0: pairs are of different samples, so it must be above 0"),
        ({"temperature": 0.7, **INPO}, "temperature=0.7: loss_type=inpo compares with the policy that sampled"),
        ({"inpo_eta": 0.0, "loss_type": ("inpo",)}, "loss_type=inpo: eta=0.0, tau=0.5: need 0 <= tau <= eta"),
        ({"num_speculative_tokens": 2, "speculative_source": "last_epoch"}, "speculative_source='last_epoch': sampled"),
        ({"prompt_lookup_max": 5}, "prompt_lookup_max=5 has no effect without num_speculative_tokens"),
        ({"reward_weights": (1.0, 2.0)}, "reward_weights has 2 values for 1 reward functions"),
        ({"reward": (), "judge": "test_online_pairs:constant", "reward_weights": (2.0,)}, "reward_weights: belongs to"),
        ({"reward": ("digit",)}, "reward='digit' is unknown; did you mean"),
        ({"reward": (), "judge": "test_online_pairs:missing"}, "test_online_pairs has no 'missing'"),
        ({"prompt_buckets": (4,)}, "prompt_buckets"),
        ({"reward": ("test_online_pairs:digits",), "judge": "a:b"}, "refresh_steps: give either reward or judge"),
        ({"reward": ()}, "refresh_steps: give either reward or judge"),
        ({"max_length": 32}, "max_length=32 has no effect: with refresh_steps pairs are sampled; leave it out"),
        ({"long_rows": "drop"}, "long_rows='drop' has no effect: with refresh_steps"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(changes, message, options, prompts):
    with pytest.raises((ValueError, ImportError, AttributeError), match=re.escape(message)):
        prepare_dpo(options(**changes), dataset=prompts)


def test_a_judge_cannot_evaluate(options, prompts, tmp_path):
    test = tiny_run.write_rows(tmp_path / "test.jsonl", tiny_run.problems("test", 3))
    changes = {"reward": (), "judge": "test_online_pairs:prefers_digits", "eval_dataset": {"test": test}}
    with pytest.raises(ValueError, match="eval_reward_functions: with a judge, the evaluation needs reward functions"):
        prepare_dpo(options(**changes), dataset=prompts)
