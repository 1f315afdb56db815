"""Datasets on the host: reading rows, the order they are visited in, padding and length buckets.

A row is a plain dict; which columns it needs depends on the algorithm (docs/data_and_rewards.md). Nothing here knows a
tokenizer or a device. Next to read: `encode.py` (rows to token ids), then `rewards/protocol.py` (scoring completions).
"""

import csv
import difflib
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Bool, Int32, Int64

Row = dict[str, Any]


# --- reading --------------------------------------------------------------------------------------------------------


def read_rows(source: Any, *, name: str) -> list[Row]:
    """Rows of a dataset, in the order of its source; a column that a row lacks is None there.

    `source`: a JSONL, JSON, CSV or Parquet file; a directory of files of one of these kinds (read in the order of their
    names); "package.module:function" or "path/file.py:function" or a callable, each returning an iterable of dicts; an
    iterable of dicts; a hub dataset id. A function or a hub id takes arguments after a question mark:
    "my_tasks:sums?count=512&seed=1", "openai/gsm8k?name=main&split=train" (values are read as JSON where they are
    JSON; the default split is "train").

    `name` is what error messages call the dataset, such as the option it came from. Raises ValueError for an empty
    dataset, a bad file (with its line) or a row that is not a dict, FileNotFoundError for a missing file, and
    ImportError where a hub id is given and the package `datasets` is not installed.
    """
    rows = [_with_ground_truth(row) for row in _iterate(source, name)]
    if not rows:
        raise ValueError(f"{name}: {_label(source)} holds no rows")
    # Every batch has the columns of the dataset, also one whose rows all lack a column that other rows have.
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def validate(rows: Sequence[Row], required: Sequence[str] = ("prompt",), *, name: str) -> None:
    """Nothing, when every row has every required column; else raises ValueError with the row (0-based)."""
    for index, row in enumerate(rows):
        for column in required:
            if row.get(column) is None:
                columns = sorted(str(key) for key, value in row.items() if value is not None)
                raise ValueError(f"{name}: row {index} has no {column!r}; its columns are {columns}")


def load_function(spec: str, *, option: str) -> Callable[..., Any]:
    """The function that "package.module:function" or "path/file.py:function" names.

    `option` is what error messages call the place the spec came from. Raises ImportError or FileNotFoundError for the
    module, ValueError for the function (with the nearest name) and where it is not callable.
    """
    place, _, attribute = spec.rpartition(":")
    if place.endswith(".py"):
        module = _load_file(Path(place).expanduser(), option)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            # A module that exists and fails on an import of its own says so itself.
            if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
                raise
            raise ImportError(
                f"{option}: {spec!r}: there is no module {error.name!r}. Put its directory on PYTHONPATH, or give "
                "path/file.py:function"
            ) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{option}: {spec!r}: {place} has no {attribute!r}{hint}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"{option}: {spec!r} is of type {type(function).__name__}, not a function")
    return function


def _load_file(path: Path, option: str) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{option}: there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _label(source: Any) -> str:
    if isinstance(source, str | Path):
        return repr(str(source))
    return getattr(source, "__name__", type(source).__name__)


def _iterate(source: Any, name: str) -> Iterator[Row]:
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.is_dir():
            for file in _files(path, name):
                yield from _read_file(file, name)
        elif path.is_file():
            yield from _read_file(path, name)
        else:
            yield from _read_elsewhere(str(source), name)
    else:
        yield from _checked(source() if callable(source) else source, _label(source), name)


def _checked(rows: Any, label: str, name: str) -> Iterator[Row]:
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ValueError(f"{name}: {label} gave a {type(rows).__name__}, not an iterable of dicts")
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"{name}: {label}: row {index} is of type {type(row).__name__}, not a dict")
        yield dict(row)


def _read_elsewhere(source: str, name: str) -> Iterator[Row]:
    base, _, query = source.partition("?")
    arguments = {key: _json_or_text(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    if ":" in base:
        yield from _checked(load_function(base, option=name)(**arguments), repr(source), name)
        return
    if Path(base).suffix in _READERS or base.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"{name}: there is no file or directory {source!r}")
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name}: {source!r} is neither a file nor a directory here, and reading it as a hub dataset needs the "
            "package datasets: pip install 'jaxrl-lm[hub-datasets]'"
        ) from error
    yield from _checked(datasets.load_dataset(base, **{"split": "train", **arguments}), repr(source), name)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _files(directory: Path, name: str) -> list[Path]:
    entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders:
        raise ValueError(f"{name}: {str(directory)!r} holds folders ({', '.join(folders)}): give the one to read")
    files = [entry for entry in entries if entry.suffix in _READERS]
    kinds = sorted({file.suffix for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{name}: {str(directory)!r} holds files of several kinds ({', '.join(kinds)}): give one file")
    if not files:
        raise ValueError(f"{name}: {str(directory)!r} holds no {', '.join(_READERS)} file")
    return files


def _read_file(path: Path, name: str) -> Iterator[Row]:
    if path.suffix not in _READERS:
        raise ValueError(f"{name}: {str(path)!r}: the kinds of file that are read are {', '.join(_READERS)}")
    try:
        yield from _READERS[path.suffix](path, name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {str(path)!r} is not UTF-8 text: {error}") from error


def _read_jsonl(path: Path, name: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}: {path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{name}: {path}, line {number} is a {type(row).__name__}, not an object")
            yield row


def _read_json(path: Path, name: str) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name}: {path} is not JSON: {error}. (One object a line belongs in a .jsonl file.)"
        ) from error
    if not isinstance(rows, list):
        raise ValueError(f"{name}: {path} holds a {type(rows).__name__}, not a list of objects")
    yield from _checked(rows, str(path), name)


def _read_csv(path: Path, name: str) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        f"{name}: {path}, line {reader.line_num} does not have the {len(reader.fieldnames)} fields of "
                        "the header"
                    )
                yield row
        except csv.Error as error:
            raise ValueError(f"{name}: {path}, line {reader.line_num} is not CSV: {error}") from error


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            yield from file.read().to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{name}: {path} is not a readable Parquet file: {error}") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}


def _with_ground_truth(row: Row) -> Row:
    """A verl row keeps its ground truth inside `reward_model`; reward functions ask for columns."""
    nested = row.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested and "ground_truth" not in row:
        return {**row, "ground_truth": nested["ground_truth"]}
    return row


# --- order ----------------------------------------------------------------------------------------------------------


def permutation(size: int, *, seed: int, epoch: int) -> Int64[np.ndarray, " size"]:
    """The order of the rows in an epoch: a function of (size, seed, epoch).

    Ranks of `size` raw 64-bit draws of PCG64 seeded by SeedSequence([seed, epoch]): unlike `Generator.permutation`,
    these streams are promised not to change with the version of numpy, so a run resumes under a newer one.
    """
    if size < 1 or seed < 0 or epoch < 0:
        raise ValueError(f"size={size}, seed={seed}, epoch={epoch}: size must be positive, seed and epoch not negative")
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(draws, kind="stable").astype(np.int64)


def batch_indices(size: int, *, seed: int, position: int, count: int) -> Int64[np.ndarray, " count"]:
    """Dataset rows of the global positions position … position + count − 1.

    Position p is index p mod size of epoch p // size, so that a batch may cross epochs, and the position is all that a
    resumed run needs to know.
    """
    if position < 0 or count < 0:
        raise ValueError(f"position={position}, count={count}: neither may be negative")
    if count == 0:
        return np.zeros(0, np.int64)
    first, last = position // size, (position + count - 1) // size
    rows = np.concatenate([permutation(size, seed=seed, epoch=epoch) for epoch in range(first, last + 1)])
    start = position - first * size
    return rows[start : start + count]


# --- padding --------------------------------------------------------------------------------------------------------


def left_pad(
    ids_list: Sequence[Sequence[int]], length: int, pad_id: int
) -> tuple[Int32[np.ndarray, "P Tp"], Int32[np.ndarray, "P Tp"]]:
    """Tokens and segment ids of prompts, padded on the left to `length`; segment id 0 is padding, 1 a token.

    Raises ValueError with the index of a prompt that is longer.
    """
    tokens = np.full((len(ids_list), length), pad_id, np.int32)
    segment_ids = np.zeros((len(ids_list), length), np.int32)
    for index, ids in enumerate(ids_list):
        if len(ids) > length:
            raise ValueError(f"prompt {index} has {len(ids)} tokens, more than the {length} it is padded to")
        tokens[index, length - len(ids) :] = ids
        segment_ids[index, length - len(ids) :] = 1
    return tokens, segment_ids


def pad_rows(
    prompt_completion_pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    prompt_length: int,
    completion_length: int,
    pad_id: int,
) -> tuple[Int32[np.ndarray, "N T"], Int32[np.ndarray, "N T"], Bool[np.ndarray, "N T"]]:
    """Tokens, segment ids and completion mask, T = prompt_length + completion_length.

    Prompts are padded on the left, completions on the right, so every completion begins at column prompt_length. The
    mask is that of the completions' own tokens, whatever their values. Raises ValueError with the row that is longer.
    """
    prompts, prompt_segments = left_pad([pair[0] for pair in prompt_completion_pairs], prompt_length, pad_id)
    completions = np.full((len(prompt_completion_pairs), completion_length), pad_id, np.int32)
    mask = np.zeros(completions.shape, bool)
    for index, (_, ids) in enumerate(prompt_completion_pairs):
        if len(ids) > completion_length:
            raise ValueError(
                f"completion {index} has {len(ids)} tokens, more than the {completion_length} it is padded to"
            )
        completions[index, : len(ids)] = ids
        mask[index, : len(ids)] = True
    tokens = np.concatenate([prompts, completions], axis=1)
    segment_ids = np.concatenate([prompt_segments, mask.astype(np.int32)], axis=1)
    return tokens, segment_ids, np.concatenate([np.zeros(prompts.shape, bool), mask], axis=1)


def default_buckets(lengths: Sequence[int]) -> tuple[int, ...]:
    """One padded length that holds every prompt: the longest, rounded up to a multiple of 8, the rows of a TPU's tile."""
    if not lengths:
        raise ValueError("default_buckets: there are no lengths")
    return (-(-max(lengths) // 8) * 8,)


def choose_bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length` tokens. Raises ValueError where none does."""
    fitting = [bucket for bucket in buckets if bucket >= length]
    if not fitting:
        raise ValueError(
            f"prompt_buckets={tuple(buckets)}: none holds a prompt of {length} tokens; add a longer one or lower "
            "max_prompt_length"
        )
    return min(fitting)
