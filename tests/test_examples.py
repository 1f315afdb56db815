"""The examples run, and are as short as they say."""

import ast
import json
import runpy

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from jaxrl_lm.checkpoint import Checkpoints

COMPOSE = tiny_run.REPOSITORY / "examples" / "compose_your_own.py"


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(COMPOSE), run_name="compose_your_own")


def test_the_algorithm_takes_25_lines_of_functions_outside_the_package():
    tree = ast.parse(COMPOSE.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(functions) == {"advantages", "objective", "main"}
    own = (functions["advantages"], functions["objective"])
    assert sum(function.end_lineno - function.lineno + 1 for function in own) <= 25
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    private = [alias.name for node in imported for alias in node.names if alias.name.startswith("_")]
    assert not private


def test_its_advantages_are_distances_from_the_median(example):
    returns = jnp.array([0.0, 1.0, 2.0, 5.0, 3.0, 3.0, 9.0, 4.0])
    valid = jnp.array([True] * 4 + [True, True, False, True])
    found = example["advantages"](returns, group_size=4, valid=valid)
    np.testing.assert_allclose(found, [-1.5, -0.5, 0.5, 3.5, 0.0, 0.0, 0.0, 1.0])


def test_it_trains_in_the_same_loop(example, tmp_path, capsys):
    tiny_run.save_model(tmp_path / "sft")
    (tmp_path / "data").mkdir()
    train, test = tiny_run.problems("train", 32), tiny_run.problems("test", 8)
    tiny_run.write_rows(tmp_path / "data" / "train.jsonl", train)
    tiny_run.write_rows(tmp_path / "data" / "test.jsonl", test)
    example["main"](str(tmp_path), 2)
    printed = capsys.readouterr().out.splitlines()[-1]
    run = tmp_path / "compose_your_own"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(np.isfinite([row["loss"], row["grad_norm"], row["entropy"]]).all() for row in rows[1:])
    assert "eval/test/pass@8" in printed
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [2]
        assert int(checkpoints.restore_host()["step"]) == 2
