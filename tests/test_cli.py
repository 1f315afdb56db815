"""The command line: help and mistakes, and the way from a run to an export that transformers loads."""

import dataclasses
import json
import logging
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jaxrl_lm import GRPOConfig, cli
from jaxrl_lm.config import EvalConfig, ExportConfig, GenerateConfig
from jaxrl_lm.lab.config import LabConfig
from jaxrl_lm.options import to_toml

MESH = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
SHAPE = ["--prompts_per_step", "4", "--num_generations", "4", "--prompt_buckets", "8", *MESH]


@pytest.fixture(scope="module", autouse=True)
def cached(tmp_path_factory):
    level = logging.getLogger("absl").level  # main quietens it
    with tiny_run.compile_cache(tmp_path_factory.getbasetemp() / "xla"):
        yield
    logging.getLogger("absl").setLevel(level)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    return tiny_run.save_model(directory / "tiny"), tiny_run.write_data(directory)


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """A run directory of two steps, by a file and overrides."""
    directory = tmp_path_factory.mktemp("grpo")
    config = directory / "grpo.toml"
    options = tiny_run.options(
        *files, "elsewhere", eval_dataset={}, eval_steps=0, probe_prompts=0, prompt_buckets=(16,)
    )
    config.write_text(to_toml(GRPOConfig(**options)))
    cli.main(["grpo", "--config", str(config), "--output_dir", str(directory / "run"), "--max_steps", "2"])
    return directory / "run"


@pytest.fixture(scope="module")
def export(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "model"
    cli.main(["export", "--run", str(run), "--directory", str(directory)])
    return directory


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def fails(argv, capsys):
    """What a command that ends with code 2 says on stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main(argv)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


# --- help and mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "config"),
    [
        ("grpo", GRPOConfig),
        ("generate", GenerateConfig),
        ("eval", EvalConfig),
        ("export", ExportConfig),
        ("lab", LabConfig),
    ],
)
def test_help_shows_every_option(command, config, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(config):
        assert f"--{field.name}" in shown
    assert f"usage: jaxrl-lm {command}" in shown
    assert "--config" in shown


@pytest.mark.parametrize(
    ("script", "command"),
    [("train_grpo", "grpo"), ("generate", "generate"), ("evaluate", "eval"), ("export_hf", "export")],
)
def test_scripts_are_the_commands(script, command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(tiny_run.REPOSITORY / "scripts" / f"{script}.py"), run_name="__main__")
    assert end.value.code == 0
    assert f"usage: jaxrl-lm {command}" in capsys.readouterr().out


def test_the_list_of_commands(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("grpo", "generate", "eval", "export", "lab"))
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 2
    assert "no command 'gpro'; the nearest is 'grpo'" in fails(["gpro"], capsys)


def test_a_process_with_an_unknown_option_ends_with_2_and_no_traceback():
    """The command as it is installed: python -m jaxrl_lm."""
    command = [sys.executable, "-m", "jaxrl_lm", "grpo", "--learning_rat", "1e-3"]
    done = subprocess.run(command, cwd=tiny_run.REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "unknown option --learning_rat; the nearest is --learning_rate" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_mistakes_end_with_2_and_a_message(files, run, tmp_path, capsys, monkeypatch):
    model, data = files
    config = tmp_path / "wrong.toml"
    config.write_text('modle = "x"\n')
    assert "wrong.toml: unknown key 'modle'; the nearest is 'model'" in fails(["grpo", "--config", str(config)], capsys)
    grpo = ["grpo", "--model", model, "--dataset", data["train"], "--output_dir", str(tmp_path / "run")]
    assert "jaxrl-lm grpo: error: reward: no reward function is given" in fails(grpo, capsys)
    said = fails([*grpo, "--reward", "arithmetics"], capsys)
    assert "reward='arithmetics' is unknown; did you mean 'arithmetic'?" in said
    assert not (tmp_path / "run").exists()
    assert "either prompt or dataset" in fails(["generate", "--model", model], capsys)
    both = ["--prompt", "1+1=", "--dataset", data["test"]]
    assert "either prompt or dataset" in fails(["generate", "--model", model, *both], capsys)
    assert "eval_dataset: no set is given" in fails(["eval", "--model", model], capsys)
    said = fails(["eval", "--model", model, "--eval_dataset.test", data["test"]], capsys)
    assert "eval_reward_functions: no reward function is given" in said
    said = fails(["export", "--run", str(tmp_path), "--directory", str(tmp_path / "out")], capsys)
    assert "no run directory (it has no config.toml)" in said
    said = fails(["export", "--run", str(run), "--directory", str(tmp_path / "out"), "--step", "7"], capsys)
    assert "no checkpoint of step 7; there are [1, 2]" in said
    said = fails(["export", "--run", str(run), "--directory", str(tmp_path / "out"), "--best"], capsys)
    assert "no checkpoint has a best_metric" in said
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("JAXRL_LM_TRACEBACK", "1")
    with pytest.raises(ValueError, match="either prompt or dataset"):
        cli.main(["generate", "--model", model])


# --- from a run to transformers ---------------------------------------------------------------------------------------


def test_greedy_tokens_of_run_export_and_transformers_are_equal(run, export, files, tmp_path, capsys):
    data = files[1]
    common = ["--dataset", data["test"], "--temperature", "0", *SHAPE]
    cli.main(["generate", "--model", str(run), "--output", str(tmp_path / "run.jsonl"), *common])
    assert f"6 rows written to {tmp_path / 'run.jsonl'}" in capsys.readouterr().out
    length = ["--max_completion_length", "8"]  # a run brings its own
    cli.main(["generate", "--model", str(export), "--output", str(tmp_path / "export.jsonl"), *length, *common])
    ours = lines(tmp_path / "run.jsonl")
    assert ours == lines(tmp_path / "export.jsonl")
    assert [row["prompt"] for row in ours] == [row["prompt"] for row in lines(data["test"])]

    tokenizer = AutoTokenizer.from_pretrained(export)
    network = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    for row in ours:
        ids = tokenizer(row["prompt"], return_tensors="pt")
        with torch.no_grad():
            out = network.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
            logits = network(torch.tensor([[*ids["input_ids"][0].tolist(), *out]])).logits[0, -len(out) - 1 : -1]
        assert row["completion_ids"] == [out] * 4
        assert row["completions"] == [tokenizer.decode(out, skip_special_tokens=True)] * 4
        logprob = torch.log_softmax(logits, -1)[range(len(out)), out].sum().item()
        assert row["logprobs"] == pytest.approx([logprob] * 4, abs=1e-4)
    assert len({tuple(row["completion_ids"][0]) for row in ours}) > 1


def test_the_export_is_the_last_or_the_named_checkpoint(run, export, tmp_path, capsys):
    said = fails(["export", "--run", str(run), "--directory", str(export)], capsys)
    assert "exists and is not empty" in said
    weights = {}
    for step in ("1", "2"):
        directory = tmp_path / step
        cli.main(["export", "--run", str(run), "--directory", str(directory), "--step", step, "--dtype", "bfloat16"])
        network = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        weights[step] = network.get_input_embeddings().weight.detach()
        assert weights[step].dtype == torch.bfloat16
    last = AutoModelForCausalLM.from_pretrained(export, dtype="auto").get_input_embeddings().weight.detach()
    assert last.dtype == torch.float32
    assert torch.equal(weights["2"], last.to(torch.bfloat16))
    assert not torch.equal(weights["1"], weights["2"])
    cli.main(["export", "--run", str(run), "--directory", str(tmp_path / "1"), "--overwrite"])
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "1").get_input_embeddings().weight, last)


def test_prompts_on_the_command_line_are_answered_in_the_terminal(export, capsys):
    capsys.readouterr()
    command = ["generate", "--model", str(export), "--prompt", "1+1=", "20+3=", "--max_completion_length", "8", *SHAPE]
    cli.main(command)
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("--- ")] == ["--- 1+1=", "--- 20+3="]
    assert len(shown) == 2 + 8
    cli.main(command)
    assert capsys.readouterr().out.splitlines() == shown
    cli.main([*command, "--seed", "1"])
    assert capsys.readouterr().out.splitlines() != shown


def test_eval_and_probe_of_a_run_and_of_its_export(run, export, files, tmp_path, capsys):
    data = files[1]
    common = ["--eval_dataset.test", data["test"], "--eval_dataset.ood", data["ood"], "--eval_num_generations", "3"]
    common += ["--eval_reward_functions", "tiny_run:digits", *SHAPE]
    length = ["--max_completion_length", "8"]
    found, probes = [], []
    for model, more in ((run, []), (export, length)):
        output = tmp_path / model.name
        cli.main(["eval", "--model", str(model), "--output", str(output), *more, *common])
        shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
        metrics = json.loads((output / "metrics.json").read_text())
        assert {name: f"{value:.4f}" for name, value in metrics.items()} == shown
        assert [len(lines(output / f"{name}.jsonl")) for name in ("test", "ood")] == [6, 3]
        cli.main(["eval", "--probe", "--model", str(model), "--output", str(output), *more, *common])
        shown = capsys.readouterr().out
        probe = json.loads((output / "probe.json").read_text())
        assert f"test: probe of 6 training prompts: pass@1 {probe['probe/test/pass@1']:.3f}" in shown
        assert probe["probe/ood/num_generations"] == 4
        found.append(metrics)
        probes.append(probe)
    assert found[0] == found[1]
    assert probes[0] == probes[1]
    assert {"eval/test/greedy_accuracy", "eval/test/pass@1", "eval/test/pass@2", "eval/ood/pass@1"} < found[0].keys()
