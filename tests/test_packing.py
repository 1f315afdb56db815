"""Packing: every token once and in order, best fit decreasing, and log-probs that are those of the rows alone."""

import jax
import numpy as np
import pytest
import tiny_run
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_lm import models
from jaxrl_lm.packing import pack, packing_share
from jaxrl_lm.score import score
from jaxrl_lm.sequences import Example, align, encode_sft, layout

PAD, EOS = 0, 1
CHAT = (
    "{% for m in messages %}#{{ '+' if m.role == 'assistant' else '-' }}{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}#+{% endif %}"
)


def examples_of(lengths, labelled=()):
    """Examples whose tokens occur nowhere else; every third token but the first is marked."""
    made, token = [], 0
    for number, length in enumerate(lengths):
        ids = list(range(token, token + length))
        labels = [id / 8 for id in ids] if number in labelled else None
        made.append(Example(ids, [i > 0 and i % 3 == 0 for i in range(length)], None, labels))
        token += length
    return made


def parts(row):
    """The examples in a row, as the segment ids have them."""
    numbers = sorted(set(row.segments))
    assert numbers == list(range(1, len(numbers) + 1))
    assert row.segments == sorted(row.segments)
    cut = lambda values, number: [v for v, s in zip(values, row.segments, strict=True) if s == number]
    return [(cut(row.ids, number), cut(row.mask, number)) for number in numbers]


def best_fit_decreasing(lengths, max_length):
    """Indices in each row, by looking at every row for every example."""
    rows = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        free = [max_length - sum(lengths[i] for i in row) for row in rows]
        fitting = [(space, number) for number, space in enumerate(free) if space >= lengths[index]]
        if fitting:
            rows[min(fitting)[1]].append(index)
        else:
            rows.append([index])
    return rows


# --- where things go ------------------------------------------------------------------------------------------------


def test_an_example_by_hand():
    packed = pack(examples_of([3, 6, 4, 1, 5, 2]), max_length=8)  # tokens 0-2, 3-8, 9-12, 13, 14-18, 19-20
    assert [row.ids for row in packed] == [
        [3, 4, 5, 6, 7, 8, 19, 20],  # 6 + 2
        [14, 15, 16, 17, 18, 0, 1, 2],  # 5 + 3
        [9, 10, 11, 12, 13],  # 4 + 1
    ]
    assert packed[0].segments == [1, 1, 1, 1, 1, 1, 2, 2]
    assert packed[0].mask == [False, False, False, True, False, False, False, False]
    assert packed[0].labels is None
    assert packing_share(packed, 8) == 21 / 24


def test_the_fullest_row_that_holds_an_example_takes_it_not_the_first():
    packed = pack(examples_of([6, 7, 3, 2]), max_length=10)
    assert [[len(ids) for ids, _ in parts(row)] for row in packed] == [[7, 3], [6, 2]]
    packed = pack(examples_of([6, 5, 4]), max_length=10)
    assert [[len(ids) for ids, _ in parts(row)] for row in packed] == [[6, 4], [5]]
    packed = pack(examples_of([7, 5, 3, 3]), max_length=10)  # free: 3 and 5
    assert [[len(ids) for ids, _ in parts(row)] for row in packed] == [[7, 3], [5, 3]]


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, extra=st.integers(0, 20), labelled=st.sets(st.integers(0, 39)))
def test_every_token_is_in_one_place_and_its_example_is_whole(lengths, extra, labelled):
    max_length = max(lengths) + extra
    made = examples_of(lengths, labelled)
    packed = pack(made, max_length=max_length)
    found = sorted(part for row in packed for part in parts(row))
    assert found == sorted((example.ids, example.mask) for example in made)  # ids tell the examples apart
    assert [[made[i].ids for i in row] for row in best_fit_decreasing(lengths, max_length)] == [
        [ids for ids, _ in parts(row)] for row in packed
    ]
    sizes = [len(row.ids) for row in packed]
    assert max(sizes) <= max_length
    assert all(a + b > max_length for n, a in enumerate(sizes) for b in sizes[:n])  # no two rows could be one
    assert packing_share(packed, max_length) == pytest.approx(sum(lengths) / (max_length * len(packed)))
    owner = {id: number for number, example in enumerate(made) for id in example.ids}
    for row in packed:
        held = labelled & {owner[id] for id in row.ids}
        assert (row.labels is not None) == bool(held)
        if held:
            assert row.labels == [id / 8 if owner[id] in labelled else 0.0 for id in row.ids]


def test_the_same_examples_are_packed_the_same_way():
    lengths = np.random.default_rng(0).integers(1, 200, 3000).tolist()
    first, second = (pack(examples_of(lengths), max_length=256) for _ in range(2))
    assert first == second
    assert packing_share(first, 256) > 0.97


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example([1] * 9, [False] * 9), "example 1 has 9 tokens: 1 to max_length=8 can be packed"),
        (Example([], []), "example 1 has 0 tokens"),
        (Example([1, 2], [False, True], [1, 1]), "example 1 is packed already"),
        (Example([1, 2], [True, True]), "example 1 marks its first token, which nothing predicts"),
    ],
)
def test_an_example_that_cannot_be_packed_is_named(example, message):
    with pytest.raises(ValueError, match=message):
        pack([*examples_of([3]), example], max_length=8)


def test_no_rows_have_no_share():
    with pytest.raises(ValueError, match="packing_share: there are no rows"):
        packing_share([], 8)


# --- packed = unpacked ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with tiny_run.compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        directory = tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny", chat_template=CHAT)
        yield models.load(directory)


ROWS = (
    [{"prompt": f"{n}+{n + 1}=", "completion": ";".join("123"[: 1 + n % 3])} for n in range(8)],
    [{"messages": [{"role": role, "content": f"{n}{k}+1"} for k in range(1 + n % 2) for role in ("user", "assistant")]}
     for n in range(8)],
    [{"text": "1+2=3;4+5=9 "[: 3 + n]} for n in range(8)],
)  # fmt: skip


def logprobs(model, params, tokens, segment_ids, start=1):
    run = jax.jit(lambda *arrays: score(*arrays, model=model, start=start).logprobs)
    return np.asarray(run(params, tokens, segment_ids))


def test_packed_log_probs_are_those_of_the_rows_alone(model):
    model, params, tokenizer = model
    encoded = [encode_sft(rows, tokenizer, max_length=40, eos_token_id=EOS, name="rows") for rows in ROWS]
    sides = [row for data in encoded for row in data.sides]
    examples = [example for (example,) in sides]

    tokens, segment_ids = np.full((2, len(examples), 40), PAD, np.int32)  # each row by itself, from column 0
    for number, example in enumerate(examples):
        tokens[number, : len(example.ids)], segment_ids[number, : len(example.ids)] = example.ids, 1
    found = logprobs(model, params, tokens, segment_ids)
    alone = [row[: len(example.ids)][example.mask] for row, example in zip(found, examples, strict=True)]
    assert all(np.abs(values).min() > 1e-3 for values in alone)  # none is the 0 of a column that has no log-prob

    start, columns = layout(sides)
    tokens, segment_ids, mask, _ = align(examples, start=start, columns=columns, pad_id=PAD)
    found = logprobs(model, params, tokens, segment_ids, start)
    for number, values in enumerate(alone):
        np.testing.assert_allclose(found[number][mask[number]], values, atol=1e-5)

    packed = pack(examples, max_length=40)
    assert len(packed) < len(examples) / 2
    start, columns = layout([(row,) for row in packed])
    tokens, segment_ids, mask, _ = align(packed, start=start, columns=columns, pad_id=PAD)
    found = logprobs(model, params, tokens, segment_ids, start)
    by_hand = best_fit_decreasing([len(example.ids) for example in examples], 40)
    expected = [np.concatenate([alone[number] for number in row]) for row in by_hand]
    for row, values in enumerate(expected):
        np.testing.assert_allclose(found[row][mask[row]], values, atol=1e-5)

    as_one = logprobs(model, params, tokens, np.minimum(segment_ids, 1), start)  # what segment ids prevent
    assert max(np.abs(as_one[row][mask[row]] - values).max() for row, values in enumerate(expected)) > 0.1
