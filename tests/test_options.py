"""Options: defaults < file < command line, one check for all three, exact round trips, and what a resume may change."""

import dataclasses
import tomllib
import typing
from typing import Literal

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.fit_config import SFTConfig
from jaxrl_lm.options import RESUMABLE, ConfigError, changed, check_resume, from_dict, parse, to_toml

REQUIRED = ["--model", "m", "--dataset", "d.jsonl", "--output_dir", "runs/a"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every:
    """A field of each kind."""

    text: str
    number: float = 1.5
    count: int = 3
    flag: bool = False
    choice: Literal["a", "b", 3] = "a"
    maybe: float | None = None
    maybe_choice: Literal["x", "y"] | None = None
    names: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    table: dict[str, int] = dataclasses.field(default_factory=lambda: {"fsdp": -1})
    paths: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.count == 13:
            raise ValueError("count=13: not this one")


def values_of(hint):
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values_of(arguments[1]), max_size=3)
    if type(None) in arguments:
        return st.one_of(*(st.none() if one is type(None) else values_of(one) for one in arguments))
    plain = {bool: st.booleans(), int: st.integers(), str: st.text(), float: st.floats(allow_nan=False)}
    return plain[hint]


configs = st.builds(Every, **{name: values_of(hint) for name, hint in typing.get_type_hints(Every).items()})


@hypothesis.settings(max_examples=100, deadline=None, database=None)
@hypothesis.given(config=configs)
def test_toml_round_trip(config):
    again = from_dict(Every, tomllib.loads(to_toml(config)), where="config.toml")
    assert again == config
    assert repr(again) == repr(config)  # types too: 1 is not 1.0, a list is not a tuple


def grpo(**changes) -> GRPOConfig:
    return GRPOConfig(**{"model": "m", "dataset": "d.jsonl", "output_dir": "runs/a", **changes})


def test_toml_round_trip_of_a_real_config():
    config = grpo(eval_dataset={"in dist": "a"}, reward=("x",), reward_weights=(1.0,), top_p=0.5, mesh={"data": 2})
    text = to_toml(config)
    assert "top_k" not in text
    assert 'reward = [\n    "x",\n]' in text
    assert from_dict(GRPOConfig, tomllib.loads(text), where="config.toml") == config


def test_from_dict_converts_exactly():
    config = from_dict(Every, {"text": "a", "number": 2, "numbers": [1, 2.5], "names": ["x"], "maybe": None}, where="f")
    assert repr(config.number) == "2.0"
    assert config.numbers == (1.0, 2.5)
    assert config.names == ("x",)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"cuont": 1}, "f.toml: unknown key 'cuont'; the nearest is 'count'"),
        ({"count": True}, "f.toml: count = True: expected an integer"),
        ({"count": 1.0}, "f.toml: count = 1.0: expected an integer"),
        ({"number": True}, "f.toml: number = True: expected a number"),
        ({"number": "1"}, "f.toml: number = '1': expected a number"),
        ({"flag": 1}, "f.toml: flag = 1: expected true or false"),
        ({"text": 1}, "f.toml: text = 1: expected a string"),
        ({"text": None}, "f.toml: text = None: expected a string"),
        ({"choice": "c"}, "f.toml: choice = 'c': expected one of 'a', 'b', 3"),
        ({"choice": 3.0}, "f.toml: choice = 3.0: expected one of 'a', 'b', 3"),
        ({"maybe": "x"}, "f.toml: maybe = 'x': expected a number"),
        ({"names": "x"}, "f.toml: names = 'x': expected a list of strings"),
        ({"names": ["x", 1]}, "f.toml: names[1] = 1: expected a string"),
        ({"table": 8}, "f.toml: table = 8: expected a table of integers by name"),
        ({"table": {"fsdp": "8"}}, "f.toml: table.fsdp = '8': expected an integer"),
        ({"count": 1}, "f.toml: text must be given"),
        ({"text": "a", "count": 13}, "f.toml: count=13: not this one"),
    ],
)
def test_from_dict_refuses(mapping, message):
    with pytest.raises(ConfigError) as error:
        from_dict(Every, mapping, where="f.toml")
    assert str(error.value) == message


def run(*argv, config_class=GRPOConfig):
    return parse(config_class, list(argv), prog="jaxrl-lm grpo", description="Trains.")


def test_defaults_and_both_spellings():
    assert run(*REQUIRED) == grpo()
    assert run(*REQUIRED, "--max-steps", "3", "--eval_steps=5") == grpo(max_steps=3, eval_steps=5)


def test_every_kind_of_option():
    config = run(
        *["--text=a=b", "--number", "-1e-3", "--flag", "--choice", "3", "--maybe", "2", "--maybe_choice", "y"],
        *["--names", "p", "q", "--numbers", "1", "-2", "--table.fsdp=8", "--table.a-b", "-1", "--paths.in", "x.jsonl"],
        config_class=Every,
    )
    assert config == Every(
        text="a=b",
        number=-1e-3,
        flag=True,
        choice=3,
        maybe=2.0,
        maybe_choice="y",
        names=("p", "q"),
        numbers=(1.0, -2.0),
        table={"fsdp": 8, "a-b": -1},
        paths={"in": "x.jsonl"},
    )
    assert run("--text", "a", "--flag", "false", config_class=Every).flag is False
    assert run("--text", "a", "--flag=True", "--maybe", "None", config_class=Every) == Every(text="a", flag=True)


def test_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text('model = "from file"\nmax_steps = 7\nmask_truncated_completions = true\n[mesh]\ntensor = 2\n')
    config = run("--config", str(path), *REQUIRED[2:], "--max_steps", "9", "--mesh.data", "4")
    assert config == grpo(
        model="from file", max_steps=9, mask_truncated_completions=True, mesh={"tensor": 2, "data": 4}
    )
    assert run(f"--config={path}", *REQUIRED, "--mask-truncated-completions", "false").model == "m"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max_stps", "3"], ["unknown option --max_stps", "nearest is --max_steps"]),
        (["--mseh.fsdp", "3"], ["unknown option --mseh.fsdp", "nearest is --mesh"]),
        (["--model.x", "3"], ["unknown option --model.x"]),
        (["--max_steps", "x"], ["--max_steps", "INT"]),
        (["--max_steps", "1.5"], ["--max_steps", "INT"]),
        (["--kl_in", "x"], ["--kl_in", "'loss'", "'reward'"]),
        (["--mesh", "8"], ["--mesh is a table", "--mesh.NAME INT"]),
        (["--mesh.fsdp", "x"], ["--mesh.fsdp = 'x': expected an integer"]),
        (["--mesh.fsdp"], ["--mesh.fsdp: a value must follow"]),
        (["--config", "nowhere.toml"], ["nowhere.toml", "cannot be read"]),
        (["--mask_truncated_completions", "maybe"], ["--mask_truncated_completions", "'True', 'False'"]),
        (["surplus"], ["surplus"]),
    ],
)
def test_mistakes_end_with_code_2_and_a_message(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*REQUIRED, *argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "jaxrl-lm grpo" in captured.err
    for word in words:
        assert word in captured.err


def test_missing_and_invalid_options_end_with_code_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        run("--model", "m")
    message = capsys.readouterr().err
    assert "--dataset" in message
    assert "--output_dir" in message
    with pytest.raises(SystemExit, match="2"):
        run("--text", "a", "--count", "13", config_class=Every)
    assert "count=13: not this one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_stps = 3", ["unknown key 'max_stps'", "'max_steps'"]),
        ('max_steps = "3"', ["max_steps = '3': expected an integer"]),
        ("max_steps = ", ["not valid TOML"]),
    ],
)
def test_mistakes_in_the_file_name_the_file(text, words, tmp_path, capsys):
    path = tmp_path / "f.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        run(*REQUIRED, "--config", str(path))
    message = capsys.readouterr().err
    for word in [str(path), *words]:
        assert word in message


def test_help_shows_every_key_with_default_and_meaning(capsys):
    with pytest.raises(SystemExit, match="0"):
        run("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in dataclasses.fields(GRPOConfig):
        assert f"--{field.name}" in text
    assert "--save_steps INT Checkpoint every so many steps and at the end; 0: only at the end. (default: 50)" in text
    assert "--model STR Directory in Hugging Face format, GGUF file, or hub id. (required)" in text
    assert "--mesh.NAME INT" in text
    assert "(default: fsdp = -1)" in text
    assert "--config FILE" in text


def test_what_a_resume_may_change():
    names = [{field.name for field in dataclasses.fields(kind)} for kind in (GRPOConfig, SFTConfig)]
    assert set.union(*names) >= RESUMABLE
    old = grpo()
    assert changed(old, grpo()) == {}
    new = grpo(max_steps=200, mesh={"data": 8}, microbatch_completions=4)
    pairs = {"max_steps": (None, 200), "mesh": ({"fsdp": -1}, {"data": 8}), "microbatch_completions": (None, 4)}
    assert changed(old, new) == pairs
    assert check_resume(old, new) == pairs
    with pytest.raises(ConfigError) as error:
        check_resume(old, grpo(max_steps=200, seed=1, learning_rate=1e-5))
    assert str(error.value).splitlines() == [
        "this run was started with other options:",
        "  learning_rate: 1e-06 -> 1e-05 (not allowed)",
        "  seed: 0 -> 1 (not allowed)",
        "  max_steps: None -> 200 (allowed)",
        "Set those that are not allowed back to resume it, or give another output_dir to start a new run.",
    ]
    with pytest.raises(TypeError, match="two kinds of run: GRPOConfig and Every"):
        changed(old, Every(text="a"))


def test_a_length_that_the_schedule_depends_on_may_not_change():
    old = grpo(lr_scheduler="cosine")
    assert check_resume(old, dataclasses.replace(old, save_steps=5)) == {"save_steps": (50, 5)}
    with pytest.raises(ConfigError, match=r"max_steps: None -> 200 \(not allowed with lr_scheduler='cosine'"):
        check_resume(old, dataclasses.replace(old, max_steps=200))
