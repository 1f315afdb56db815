"""The lab's whole path, as small as it goes: what `make quickstart` runs."""

import json

import pytest

from jaxrl_lm.lab.config import LabConfig
from jaxrl_lm.lab.run import SHOWN, _make_room, run_lab, training_seconds, with_training_time
from jaxrl_lm.options import read_toml
from jaxrl_lm.report import load_metrics


def tiny(directory) -> LabConfig:
    return LabConfig(
        output_dir=str(directory),
        train_problems=64,
        test_problems=8,
        ood_problems=8,
        hidden_size=40,
        num_layers=1,
        sft_steps=4,
        sft_rows=8,
        grpo_steps=2,
        prompts_per_step=8,
        num_generations=2,
        max_completion_length=8,
        eval_steps=2,
    )


def test_the_whole_path_leaves_what_it_names(tmp_path, capsys):
    directory = tmp_path / "lab"
    found = run_lab(tiny(directory))
    assert json.loads((directory / "summary.json").read_text()) == found
    history = load_metrics(directory / "grpo" / "metrics.jsonl")
    assert [row["step"] for row in history] == [0, 1, 2]
    for name, row in (("before", history[0]), ("after", history[-1])):
        assert found[name] == {key: pytest.approx(row[f"eval/test/{key}"]) for key in SHOWN}
    assert found["supervised"].keys() == found["before"].keys()
    assert found["grpo_seconds"] == pytest.approx(sum(row["step_time"] for row in history[1:]))
    for path in ("curves.png", "export/config.json", "export/model.safetensors", "data/demonstrations.jsonl"):
        assert (directory / path).stat().st_size > 0, path
    assert read_toml(directory / "grpo.toml")["model"] == str(directory / "sft")
    printed = capsys.readouterr().out
    assert "after GRPO" in printed
    assert "How to go on" in printed
    _make_room(directory)  # what the next lab in the same place begins with
    assert [path.name for path in directory.iterdir()] == [".jaxrl_lm_lab"]


def test_a_directory_that_is_no_lab_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and no earlier lab"):
        run_lab(tiny(tmp_path))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_training_time_leaves_evaluation_out():
    history = [{"step": 0}, {"step": 1, "step_time": 2.0}, {"step": 2, "step_time": 3.0}]
    assert training_seconds(history) == 5.0
    assert [row["time"] for row in with_training_time(history)] == [0.0, 2.0, 5.0]
