"""Choosing by scores: curves against loops, beams against a search by hand, and whole calls with known scorers."""

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tiny_run

from jaxrl_lm.beams import Beam, beam_search
from jaxrl_lm.completions import Completer
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.search import (
    Candidates,
    answer_ids,
    best_of_n_curve,
    judge_candidates,
    majority_curve,
    pass_curve,
    process_scorer,
    run_search,
    sample_counts,
    search_table,
)
from jaxrl_lm.tools_config import SearchConfig

pytestmark = pytest.mark.usefixtures("cached")

MESH = {"data": 2, "fsdp": 2, "tensor": 2}


def digits(*, completions, **_):
    """The share of digits among six characters."""
    return [sum(c.isdigit() for c in text) / 6 for text in completions]


def fewer(*, completions, **_):
    """Ranks the other way round."""
    return [1 - value for value in digits(completions=completions)]


def silent(*, completions, **_):
    return [None] * len(completions)


def odd_only(*, completions, answer, **_):
    """The share of digits; nothing where the answer is even."""
    found = digits(completions=completions)
    return [value if total % 2 else None for value, total in zip(found, answer, strict=True)]


def first_digit(text):
    return next((c for c in text if c.isdigit()), None)


def broken(text):
    raise KeyError("x")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny", num_layers=1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return tiny_run.write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny_run.problems("train", 5))


def config(model="m", dataset="d", **changes):
    options = {"prompts_per_step": 4, "num_generations": 6, "max_completion_length": 8, "mesh": MESH}
    options |= {"reward": ("test_search:digits",), "scorer": "test_search:digits", "temperature": 1.5}
    return SearchConfig(model=model, dataset=dataset, **options | changes)


# --- curves -----------------------------------------------------------------------------------------------------------


def test_the_numbers_of_samples():
    assert [sample_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("seed", range(2))
def test_best_of_n_is_the_mean_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    gold = rng.random((4, 6))
    scores = 1000 + rng.permuted(np.tile(np.arange(6) * 1e-5, (4, 1)), axis=1)  # closer than float32 could tell
    subsets = lambda k: itertools.product(range(4), itertools.combinations(range(6), k))
    best = lambda p, subset: gold[p][max(subset, key=lambda n: scores[p, n])]
    wanted = [np.mean([best(p, subset) for p, subset in subsets(k)]) for k in (1, 3, 6)]
    np.testing.assert_allclose(best_of_n_curve(scores, gold, [1, 3, 6]), wanted, atol=1e-6)
    ceiling = best_of_n_curve(gold, gold, [6])
    assert ceiling == pytest.approx([np.mean(gold.max(1))], abs=1e-6)
    right = (gold > 0.5).astype(np.float64)
    assert pass_curve(right, [1, 2, 6]) == pytest.approx(best_of_n_curve(right, right, [1, 2, 6]), abs=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_votes_are_counted_in_disjoint_blocks(weighted):
    rng = np.random.default_rng(5)
    answers = rng.integers(-1, 3, size=(20, 7)).astype(np.int32)
    gold = rng.random((20, 7))
    weights = rng.random((20, 7)) if weighted else np.ones((20, 7))

    def one(columns, p):
        votes = {}
        for n in columns:
            if answers[p, n] >= 0:
                votes[answers[p, n]] = votes.get(answers[p, n], 0) + weights[p, n]  # kept in the order of first sight
        if not votes:
            return 0.0
        chosen = max(votes, key=votes.get)
        return np.mean([gold[p, n] for n in columns if answers[p, n] == chosen])

    for k in (1, 3, 7):
        blocks = [range(start, start + k) for start in range(0, 7 // k * k, k)]
        wanted = np.mean([one(block, p) for p in range(20) for block in blocks])
        found = majority_curve(answers, gold, [k], weights=weights if weighted else None)
        np.testing.assert_allclose(found, [wanted], atol=1e-6)


def test_scores_below_0_are_no_votes_and_nan_is_refused():
    answers, gold = np.zeros((1, 2), np.int32), np.ones((1, 2))
    with pytest.raises(ValueError, match=r"weighted_majority: the scorer gave -0.5, and with scores below 0"):
        majority_curve(answers, gold, [1], weights=np.array([[0.5, -0.5]]))
    with pytest.raises(ValueError, match="completion 1 of prompt 0 has the score NaN"):
        best_of_n_curve(np.array([[0.0, math.nan]]), gold, [1])
    with pytest.raises(ValueError, match="completion 0 of prompt 0 has the score NaN"):
        pass_curve(np.array([[math.nan, 1.0]]), [1])


def test_answers_are_numbered_by_prompt():
    from jaxrl_lm.rewards.arithmetic import extract_number

    texts = [["1=#4", "8/2", "no", "#5"], ["5", "#4", "", "4.0"]]
    np.testing.assert_array_equal(answer_ids(texts, extract_number), [[0, 0, -1, 1], [0, 1, -1, 1]])
    assert extract_number("8/2") == Fraction(4)
    with pytest.raises(ValueError, match="answer_function: KeyError: 'x' on the completion '1=#4'"):
        answer_ids(texts, broken)
    with pytest.raises(ValueError, match="answer_function: TypeError"):
        answer_ids(texts, lambda text: [text])


def test_prompts_that_are_not_judged_are_left_out_and_logits_become_chances():
    gold = np.array([[0.0, 0.0, 1.0], [1.0, math.nan, 0.0]])
    scores = np.array([[-1.0, -2.0, 3.0], [9.0, 9.0, 9.0]])
    candidates = Candidates([["a"] * 3] * 2, scores, gold, np.array([[0, 0, 1], [0, 0, 0]], np.int32), 0)
    every = ("best_of_n", "majority", "weighted_majority")
    found = judge_candidates(candidates, every, logits=True)
    assert (found["prompts"], found["unjudged"], found["n"]) == (1, 1, [1, 2, 3])
    assert found["majority"][2] == 0.0
    assert found["weighted_majority"][2] == 1.0  # σ(3) > σ(−1) + σ(−2)
    assert found["best_of_n"][2] == 1.0
    np.testing.assert_allclose(found["best_of_n"], [1 / 3, 2 / 3, 1], atol=1e-6)
    np.testing.assert_allclose(found["regret"], 0, atol=1e-6)
    with pytest.raises(ValueError, match="scores below 0"):
        judge_candidates(candidates, every, logits=False)
    with pytest.raises(ValueError, match="judged no prompt"):
        judge_candidates(candidates._replace(gold=np.full((2, 3), math.nan)), every, logits=True)


@pytest.mark.parametrize(
    ("credit", "wanted"), [("last", [0.5, 0.9, 0]), ("min", [0.25, 0.9, 0]), ("product", [0.1, 0.9, 0])]
)
def test_a_process_model_gives_one_score_a_completion(credit, wanted):
    steps = {"a": [(2, 0.8), (5, 0.25), (7, 0.5)], "b": [(1, 0.9)], "c": []}
    function = process_scorer(lambda prompts, completions: [steps[text] for text in completions], credit)
    np.testing.assert_allclose(
        function(prompts=["p"] * 3, completions=["a", "b", "c"], answer=[1] * 3), wanted, atol=1e-6
    )
    mean = process_scorer(lambda prompts, completions: [steps[text] for text in completions], "mean")
    np.testing.assert_allclose(mean(prompts=["p"], completions=["a"]), [1.55 / 3], atol=1e-6)


# --- beams ------------------------------------------------------------------------------------------------------------


def ends(text):
    return len(text) >= 5 or (len(text) >= 2 and text.endswith("c"))


def tree(ways):
    """A continuation by names of its ways, and a fixed score for each name."""

    def grow(number, places, beams):
        asked.append((number, list(places), [beam.text for beam in beams]))
        return [[longer(place, beam, way) for way in range(ways)] for place, beam in zip(places, beams, strict=True)]

    def longer(place, beam, way):
        text = f"{beam.text}{'abc'[way]}"
        return Beam((*beam.ids, way), text, ends(text), beam.steps + 1)

    def value(place, text):
        return np.random.default_rng([place, *text.encode()]).random()

    asked = []
    return (
        grow,
        lambda places, beams: [value(p, beam.text) for p, beam in zip(places, beams, strict=True)],
        asked,
        value,
    )


def by_hand(value, prompt, *, width, ways, max_steps):
    """The same search as a loop over one prompt."""
    beams = [("", False, 0.0)] * width
    for _ in range(max_steps):
        grown = []
        for text, done, score in beams:
            new = [f"{text}{'abc'[way]}" for way in range(ways)]
            grown += [(text, True, score)] if done else [(t, ends(t), value(prompt, t)) for t in new]
        beams = sorted(grown, key=lambda beam: -np.float32(beam[2]))[:width]
        if all(done for _, done, _ in beams):
            break
    return sorted(beams, key=lambda beam: not beam[1])


@pytest.mark.parametrize(("width", "max_steps"), [(1, 9), (3, 9), (3, 2)])
def test_beams_are_those_of_a_search_by_hand(width, max_steps):
    grow, score, asked, value = tree(3)
    found = beam_search(grow, score, 4, width=width, max_steps=max_steps)
    for prompt in range(4):
        wanted = by_hand(value, prompt, width=width, ways=3, max_steps=max_steps)
        assert [(beam.text, beam.finished) for beam in found[prompt]] == [(text, done) for text, done, _ in wanted]
        assert [beam.score for beam in found[prompt]] == pytest.approx([score for _, _, score in wanted])
        assert all(beam.steps == len(beam.text) for beam in found[prompt])
    assert [number for number, _, _ in asked] == list(range(len(asked)))
    assert all("" not in texts for number, _, texts in asked if number)
    lengths = {len(beam.text) for group in found for beam in group}
    assert len(lengths) > 1 or max_steps == 2  # some finish before others
    assert all(beam.finished for group in found for beam in group) or max_steps == 2


def test_a_finished_beam_stays_with_its_score_and_the_finished_come_first():
    """A good short answer keeps one place; what goes on is better in the end and not finished."""
    scores = {"a": 0.5, "b": 0.9, "ba": 0.6, "bb": 0.4, "baa": 0.8, "bab": 0.1}

    def grow(number, places, beams):
        return [[Beam((), beam.text + way, beam.text + way == "a", beam.steps + 1) for way in "ab"] for beam in beams]

    def score(places, beams):
        return [scores[beam.text] for beam in beams]

    (found,) = beam_search(grow, score, 1, width=2, max_steps=1)
    assert [beam.text for beam in found] == ["b", "b"]  # two copies of the empty beam
    scores["a"] = 0.95
    (found,) = beam_search(grow, score, 1, width=2, max_steps=3)
    assert [(beam.text, beam.score) for beam in found] == [("a", 0.95), ("a", 0.95)]


# --- whole calls ------------------------------------------------------------------------------------------------------


def test_a_scorer_that_is_the_verifier_has_no_regret(model, dataset, tmp_path):
    options = {"answer_function": "test_search:first_digit", "output": str(tmp_path / "new" / "out.json")}
    result = run_search(config(model, dataset, **options))
    written = json.loads(Path(options["output"]).read_text())
    records = written.pop("records")
    assert written == result
    assert result["n"] == [1, 2, 4, 6]
    np.testing.assert_allclose(result["regret"], 0, atol=1e-6)
    assert [record["row"] for record in records] == list(range(5))
    gold = np.array([record["gold"] for record in records])
    for record in records:
        assert record["gold"] == record["scores"] == digits(completions=record["completions"])
        assert len(record["completions"]) == 6
    np.testing.assert_allclose(result["best_of_n"], best_of_n_curve(gold, gold, [1, 2, 4, 6]))
    assert result["best_of_n"][0] == pytest.approx(gold.mean())
    assert result["best_of_n"][-1] == pytest.approx(gold.max(1).mean())
    assert gold.max(1).mean() > gold.mean()
    ids = answer_ids([record["completions"] for record in records], first_digit)
    np.testing.assert_allclose(result["majority"], majority_curve(ids, gold, result["n"]))
    np.testing.assert_allclose(result["weighted_majority"], majority_curve(ids, gold, result["n"], weights=gold))
    table = search_table(result).splitlines()
    assert [line.split()[0] for line in table[1:7]] == [
        "pass@n", "gold_best_of_n", "best_of_n", "regret", "majority", "weighted_majority",
    ]  # fmt: skip
    assert table[3].split()[1:] == [f"{value:.4f}" for value in result["best_of_n"]]


def test_a_scorer_that_ranks_backwards_picks_the_worst_of_the_same_samples(model, dataset):
    right, wrong = (
        run_search(config(model, dataset, scorer=f"test_search:{name}", methods=("best_of_n",)))
        for name in ("digits", "fewer")
    )
    assert right["gold_best_of_n"] == wrong["gold_best_of_n"]  # the same samples
    assert right["best_of_n"][0] == pytest.approx(wrong["best_of_n"][0], abs=1e-6)
    assert wrong["best_of_n"][-1] < wrong["best_of_n"][0] < right["best_of_n"][-1]
    assert "majority" not in right
    assert run_search(config(model, dataset, seed=1, methods=("best_of_n",)))["pass@n"] != right["pass@n"]


def test_beams_of_a_model_are_steps_up_to_the_separator(model, dataset, tmp_path, monkeypatch):
    """By a process model that knows the digits: each beam is the tokens that were sampled, cut where it may be."""
    opened = []

    class ProcessModel:
        def __init__(self, option, *, plan, dtype=None):
            opened.append((option, dtype))

        def __call__(self, prompts, completions):
            assert all(isinstance(prompt, str) and prompt.endswith("=") for prompt in prompts)
            asked.extend(completions)
            return [[(len(text), liked(text))] for text in completions]

    def liked(text):
        """More digits, and a step that has ended: such beams go on; a little less the stop string, which ends one."""
        return 0.1 * digits(completions=[text])[0] + 0.5 * text.endswith("+") + 0.45 * ("=" in text)

    asked, read = [], []
    draw = Completer.draw

    def recorded(self, sampler, prompts, indices, *, number):
        read.append((number, [row["prompt"] for row in prompts.rows], prompts.ids))
        return draw(self, sampler, prompts, indices, number=number)

    monkeypatch.setattr(Completer, "draw", recorded)
    monkeypatch.setattr("jaxrl_lm.search.ProcessModel", ProcessModel)
    options = {"scorer": "prm:somewhere?x=1", "methods": ("beam",), "step_separator": "+", "stop": ("=",)}
    options |= {"beam_width": 2, "beam_expand": 3, "max_step_length": 6, "max_steps": 3, "max_completion_length": 16}
    result = run_search(config(model, dataset, output=str(tmp_path / "out.json"), **options))
    assert opened == [("prm:somewhere?x=1", None)]
    beams = [record["beam"] for record in json.loads((tmp_path / "out.json").read_text())["records"]]
    assert result["beam"]["gold"] == pytest.approx(np.mean([beam["gold"] for beam in beams]))
    for beam in beams:
        text = beam["completion"]
        assert text in asked
        assert beam["score"] == pytest.approx(liked(text))
        assert beam["gold"] == digits(completions=[text])[0]
        assert 1 <= beam["steps"] <= 3
        assert text.rstrip("+").count("+") <= beam["steps"] - 1
        if not beam["finished"]:
            assert text.endswith("+")
            assert beam["steps"] == 3
            assert "=" not in text
    tokenizer = lab_tokenizer()
    assert [number for number, _, _ in read] == list(range(1, len(read) + 1))  # keys of their own in every round
    assert len(read) > 1
    for number, prompts, ids in read:
        for prompt, row in zip(prompts, ids, strict=True):
            start = tokenizer(prompt)["input_ids"]
            assert row[: len(start)] == start
            text = tokenizer.decode(row[len(start) :], skip_special_tokens=True)
            assert text == "" if number == 1 else text in asked  # goes on from a beam that was scored
            assert text.endswith("+") or number == 1
    assert set(result["beam"]) == {"gold", "unjudged", "finished", "steps", "tokens"}
    assert 5 * 6 <= result["beam"]["tokens"] <= 5 * 6 * 6 * 3
    assert max(len(lab_tokenizer()(text)["input_ids"]) for text in asked) > 6  # beyond the first step
    # The beam is better than what it chose from.
    assert np.mean([beam["score"] for beam in beams]) > np.mean([liked(text) for text in asked])
    assert search_table(result).startswith("beam: gold")


def test_prompts_without_a_verdict_are_counted(model, dataset):
    rows = [json.loads(line) for line in Path(dataset).read_text().splitlines()]
    even = sum(row["answer"] % 2 == 0 for row in rows)
    assert 0 < even < 5
    result = run_search(config(model, dataset, reward=("test_search:odd_only",), methods=("majority",)))
    assert (result["prompts"], result["unjudged"]) == (5 - even, even)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("bestofn",)}, "methods: 'bestofn' is unknown; the nearest is 'best_of_n'"),
        ({"methods": ()}, "methods: give some of best_of_n"),
        (
            {"methods": ("beam",), "min_new_tokens": 4, "model": "/nowhere"},
            "min_new_tokens: counts from the first token",
        ),
        ({"beam_width": 0}, "beam_width=0: must be at least 1"),
        ({"step_separator": ""}, "step_separator=''"),
        ({"reward": ()}, "reward: no reward function is given"),
        ({"scorer": "arithmetik"}, "scorer='arithmetik':.*did you mean 'arithmetic'"),
        ({"scorer": "reward_model:/nowhere"}, "scorer='reward_model:/nowhere'"),
        ({"scorer": "test_search:silent"}, "scorer 'silent' gave no score to a completion"),
        ({"reward": ("test_search:silent",)}, "judged no prompt's completions whole"),
        ({"answer_function": "test_search:missing"}, "answer_function: .*has no 'missing'"),
        ({"answer_function": "test_search:broken"}, "answer_function: KeyError"),
    ],
    ids=str,
)
def test_mistakes_are_named(changes, message, model, dataset):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_search(config(**{"model": model, "dataset": dataset} | changes))
