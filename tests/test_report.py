"""The reporter: files exact and readable while the run goes on, a bar for terminals, plain lines for logs."""

import io
import json
import math
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrl_lm.checkpoint import rewind
from jaxrl_lm.report import Reporter, load_metrics


def plain() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_metrics_rows(tmp_path):
    with Reporter(tmp_path / "run", total_steps=3, console=plain()) as reporter:
        reporter.log(1, {"reward": np.float32(0.5), "kl": math.nan, "loss": math.inf})
        line = (tmp_path / "run" / "metrics.jsonl").read_text()  # flushed at once
        assert line.endswith("\n")
        row = json.loads(line, parse_constant=pytest.fail)
        assert list(row) == ["step", "time", "reward", "kl", "loss"]
        assert row["reward"] == 0.5
        assert row["kl"] is None
        assert row["loss"] is None
        assert row["time"] > 1.6e9
        with pytest.raises(ValueError, match=r"step 2: \['time'\]"):
            reporter.log(2, {"time": 1.0})
    rows = load_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 1
    assert rows[0]["step"] == 1
    assert math.isnan(rows[0]["kl"])


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    console = plain()
    metrics = {
        "reward": 0.51234,
        "completions/mean_length": 20.0,
        "tokens_per_second/generate": 12345.6,
        "loss": -0.000123456,
    }
    with Reporter(tmp_path, total_steps=5, logging_steps=2, console=console) as reporter:
        for step in range(1, 6):
            reporter.log(step, metrics)
        reporter.log(3, {"eval/test/greedy_accuracy": 0.25})
        reporter.message("saved [bold]here[/bold]")
    shown = "reward 0.512  length 20.0  tok/s 12,346  loss -0.0001235"
    assert console.file.getvalue().splitlines() == [
        f"step 2/5  {shown}",
        f"step 4/5  {shown}",
        f"step 5/5  {shown}",
        "step 3/5    eval/test/greedy_accuracy 0.25",
        "saved [bold]here[/bold]",
    ]
    assert [row["step"] for row in load_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 3]  # all of them


def test_bar_in_a_terminal(tmp_path):
    console = Console(file=io.StringIO(), width=140, force_terminal=True, color_system=None)
    with Reporter(tmp_path, total_steps=4, console=console) as reporter:
        reporter.log(3, {"reward": 0.25})
        reporter.log(3, {"eval/a/accuracy": 1.0})  # the reward stays beside the bar
        reporter.message("a message")
    text = console.file.getvalue()
    assert "3/4" in text
    assert "left" in text
    assert "reward 0.250" in text[text.index("a message") :]
    assert "a message" in text


def test_completions(tmp_path):
    console = plain()
    rows = [
        {
            "prompt": f"[red]2+{i}[/red]=",
            "completion": "x" * 700 + "END",
            "rewards/a": None if i else 0.5,
            "rewards/b": None,
            "advantage": -1.25,
            "turn_ids": np.array([0, 1, 1], np.int32),
            "policy_step": [0, 7, 7],
        }
        for i in range(5)
    ]
    with Reporter(tmp_path, total_steps=10, console=console) as reporter:
        path = reporter.completions(10, rows)
        with pytest.raises(ValueError, match=r"step 11, row 1: columns differ from row 0: \['extra'\]"):
            reporter.completions(11, [{"prompt": "a"}, {"prompt": "a", "extra": 1}])
        with pytest.raises(ValueError, match="step 11, column 'prompt'"):
            reporter.completions(11, [{"prompt": "a"}, {"prompt": ["b"]}])
        with pytest.raises(ValueError, match="no rows"):
            reporter.completions(11, [])
    assert path == tmp_path / "completions" / "step_000010.parquet"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    table = pq.read_table(path)
    assert table.column_names == list(rows[0])
    assert str(table.schema.field("turn_ids").type) == "list<element: int32>"
    assert str(table.schema.field("rewards/b").type) == "double"
    back = table.to_pylist()
    assert back[0] == {**rows[0], "turn_ids": [0, 1, 1]}
    assert back[1]["rewards/a"] is None
    shown = console.file.getvalue()
    assert "[red]2+2[/red]=" in shown.replace("\n", "")
    assert "2+3" not in shown  # three rows at most
    assert "END" in shown
    assert "-1.25" in shown


def test_tensorboard(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with Reporter(tmp_path, total_steps=3, report_to=("tensorboard",), console=plain()) as reporter:
        reporter.log(1, {"reward": 0.5})
        reporter.log(2, {"reward": 0.75})
    rewind(tmp_path, 1)
    with Reporter(tmp_path, total_steps=3, report_to=("tensorboard",), console=plain()) as reporter:
        reporter.log(2, {"reward": 1.5})
    scalars, starts = [], []
    for path in sorted((tmp_path / "tb").iterdir()):
        data = path.read_bytes()
        while data:  # a record: length (8), its checksum (4), the event, its checksum (4)
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            scalars += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            if event.session_log.status == event.session_log.START:
                starts.append(event.step)
    assert sorted(scalars) == [(1, "reward", 0.5), (2, "reward", 0.75), (2, "reward", 1.5)]
    assert starts == [2]  # TensorBoard drops the earlier step 2


def test_sinks_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no sink 'tensorbord'; the nearest is 'tensorboard'"):
        Reporter(tmp_path, total_steps=1, report_to=("tensorbord",))
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"jaxrl-lm\[tensorboard\]"):
        Reporter(tmp_path, total_steps=1, report_to=("tensorboard",))
    with pytest.raises(ValueError, match="logging_steps=0"):
        Reporter(tmp_path, total_steps=1, logging_steps=0)


def test_resume_appends_after_a_rewind(tmp_path):
    with Reporter(tmp_path, total_steps=3, console=plain()) as reporter:
        for step in (1, 2, 3):
            reporter.log(step, {"loss": step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "los')
    assert [row["step"] for row in load_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    rewind(tmp_path, 1)
    with Reporter(tmp_path, total_steps=3, console=plain()) as reporter:
        reporter.log(2, {"loss": 20.0})
    assert [(row["step"], row["loss"]) for row in load_metrics(tmp_path / "metrics.jsonl")] == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("bad", ["nonsense", "[1]", '{"loss": 1}'])
def test_a_broken_row_is_named(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + bad + '\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1: no row of metrics"):
        load_metrics(tmp_path / "metrics.jsonl")
