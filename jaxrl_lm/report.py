"""What a run shows while it goes on: metrics.jsonl, TensorBoard, a progress display and tables of completions.

`Reporter` belongs to the one process that writes the run directory. Not here: what is measured (`metrics.py`) and
rewinding the files to a restored step (`checkpoint.rewind`, to be called before a Reporter opens them). Next to read:
`loop.py`.
"""

import difflib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

SINKS = ("tensorboard",)
_SHOWN = (  # label, metric and format of what stands beside the bar
    ("reward", "reward", "{:.3f}"),
    ("length", "completions/mean_length", "{:.1f}"),
    ("tok/s", "tokens_per_second/generate", "{:,.0f}"),
    ("loss", "loss", "{:.4g}"),
)
_INT_LISTS = ("turn_ids", "policy_step")
_TABLE_ROWS = 3
_TABLE_CHARACTERS = 600  # of a prompt or completion in the terminal's table; the file has all


class Reporter:
    """The outputs of a run, as a context manager.

    metrics.jsonl gets every row; TensorBoard and the plain lines that replace the bar where the output is no terminal
    get those of every `logging_steps`-th step, of the last one, and all with an `eval/` metric.
    With `writes=False`, for the other processes of a run, nothing is written or shown.
    Raises ValueError for a sink that does not exist and ImportError, naming the extra, for one that is not installed.
    """

    def __init__(
        self,
        run_directory: str | Path,
        *,
        total_steps: int,
        report_to: Sequence[str] = (),
        logging_steps: int = 1,
        console: Console | None = None,
        writes: bool = True,
    ):
        if logging_steps < 1:
            raise ValueError(f"logging_steps={logging_steps}: must be at least 1")
        self.run_directory = Path(run_directory)
        self.console = console or Console(quiet=not writes)
        self._total_steps = total_steps
        self._logging_steps = logging_steps
        self._writes = writes
        self._latest: dict[str, float] = {}
        self._progress = self._task = self._tensorboard = None
        if not writes:
            self._file = open(os.devnull, "w")  # noqa: SIM115 (closed in close)
            return
        self.run_directory.mkdir(parents=True, exist_ok=True)
        path = self.run_directory / "metrics.jsonl"
        earlier = load_metrics(path) if path.exists() else []
        resumed = earlier[-1]["step"] if earlier else None
        self._tensorboard = _open_sinks(self.run_directory, report_to, resumed)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)
        if self.console.is_terminal:
            self._progress = _progress(self.console)
            self._task = self._progress.add_task("step", total=total_steps, completed=resumed or 0, facts="")

    def __enter__(self) -> "Reporter":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Ends the display and closes the files."""
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Writes one row: step, time (seconds since 1970), metrics; NaN and infinity as null. Raises ValueError when a
        metric takes one of those two names."""
        taken = {"step", "time"} & metrics.keys()
        if taken:
            raise ValueError(f"metrics at step {step}: {sorted(taken)} are columns of every row; rename the metric")
        values = {name: float(value) for name, value in metrics.items()}
        row = {"step": step, "time": time.time()}
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        self._latest |= values
        evaluated = any(name.startswith("eval/") for name in values)
        shown = evaluated or step % self._logging_steps == 0 or step == self._total_steps
        if shown and self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step, walltime=row["time"])
            self._tensorboard.flush()
        if self._progress is not None:
            self._progress.update(self._task, completed=step, facts=_facts(self._latest))
        elif shown:
            held_out = {name: value for name, value in values.items() if name.startswith("eval/")}
            rest = "".join(f"  {name} {value:.4g}" for name, value in held_out.items())
            self.message(f"step {step}/{self._total_steps}  {_facts(values)}{rest}".rstrip())

    def message(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        self.console.print(Text(text), soft_wrap=True)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes completions/step_000010.parquet, shows the first rows in the terminal, and returns the path.

        Every row has the same columns: `prompt`, `completion`, each reward (None = abstained), `advantage`, the lists
        `turn_ids` and `policy_step`, any other. Raises ValueError naming the row or the column that does not fit.
        """
        table = _columns(rows, f"completions of step {step}")
        directory = self.run_directory / "completions"
        path = directory / f"step_{step:06d}.parquet"
        if not self._writes:
            return path
        directory.mkdir(exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        pa.parquet.write_table(table, temporary)
        os.replace(temporary, path)
        self.console.print(_shown_table(step, rows[:_TABLE_ROWS]))
        return path


def load_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in their order, null read as NaN; a last line cut short by a kill is left out.

    Raises ValueError naming the line that is no JSON table with a step.
    """
    rows = []
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n")[:-1]):
        try:
            row = json.loads(line)
            rows.append({"step": row["step"]} | {k: math.nan if v is None else v for k, v in row.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {i}: no row of metrics ({error!r}); repair or remove the line") from error
    return rows


def _open_sinks(run_directory: Path, report_to: Iterable[str], resumed: int | None) -> Any:
    """The TensorBoard writer, where asked for."""
    wanted = list(report_to)
    for sink in wanted:
        if sink not in SINKS:
            close = difflib.get_close_matches(sink, SINKS, n=1, cutoff=0.0)[0]
            raise ValueError(f"report_to: there is no sink {sink!r}; the nearest is {close!r}")
    if "tensorboard" not in wanted:
        return None
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError("report_to: tensorboard needs a package: pip install 'jaxrl-lm[tensorboard]'") from error
    # purge_step makes TensorBoard forget what an interrupted run wrote beyond the step it is resumed from. The suffix:
    # file names count seconds, and a second writer within one would empty the first one's file.
    return SummaryWriter(
        str(run_directory / "tb"),
        purge_step=None if resumed is None else resumed + 1,
        filename_suffix=f".{os.getpid()}.{resumed or 0}",
    )


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("left"),
        TextColumn("{task.fields[facts]}", markup=False),
        console=console,
        refresh_per_second=2,
    )


def _facts(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{label} {form.format(metrics[name])}" for label, name, form in _SHOWN if name in metrics)


def _columns(rows: Sequence[Mapping[str, Any]], where: str) -> pa.Table:
    if not rows:
        raise ValueError(f"{where}: there are no rows")
    for i, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(f"{where}, row {i}: columns differ from row 0: {sorted(row.keys() ^ rows[0].keys())}")
    columns = {}
    for name in rows[0]:
        values = [np.asarray(row[name]).tolist() if name in _INT_LISTS else row[name] for row in rows]
        try:
            column = pa.array(values, type=pa.list_(pa.int32()) if name in _INT_LISTS else None)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise ValueError(f"{where}, column {name!r}: {error}") from error
        # a reward that abstained on every row has no type of its own
        columns[name] = column.cast(pa.float64()) if pa.types.is_null(column.type) else column
    return pa.table(columns)


def _shown_table(step: int, rows: Sequence[Mapping[str, Any]]) -> Table:
    texts = [name for name in ("prompt", "completion") if name in rows[0]]
    numbers = [
        name
        for name in rows[0]
        if all(row[name] is None or isinstance(row[name], float | int | np.number) for row in rows)
    ]
    table = Table(title=f"completions, step {step}", title_justify="left", show_lines=True)
    for name in texts:
        table.add_column(name, ratio=1, overflow="fold")
    for name in numbers:
        table.add_column(Text(name), justify="right")
    for row in rows:
        cells = [_short(str(row[name])) for name in texts]
        cells += ["" if row[name] is None else f"{row[name]:.3g}" for name in numbers]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _short(text: str) -> str:
    """The ends of a long text."""
    if len(text) <= _TABLE_CHARACTERS:
        return text
    half = _TABLE_CHARACTERS // 2
    return f"{text[:half]} … {text[-half:]}"
