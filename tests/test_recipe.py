"""Recipes: the order of stages, what braces mean, mistakes that show before anything runs, and resuming at any stage."""

import dataclasses
import json
import os
import signal
import tomllib
import types
from pathlib import Path

import pytest
import tiny_run
import tomli_w

from jaxrl_lm import stages
from jaxrl_lm.config import ExportConfig, GRPOConfig
from jaxrl_lm.data import read_rows
from jaxrl_lm.inference import run_export
from jaxrl_lm.lab.task import check, make_problems, prompt
from jaxrl_lm.loop import train
from jaxrl_lm.models import load
from jaxrl_lm.options import ConfigError, to_toml
from jaxrl_lm.recipe import check_recipe, run_recipe
from jaxrl_lm.recipe_file import Command, parse_recipe, read_recipe, resolve

pytestmark = pytest.mark.usefixtures("cached")

RECIPES = sorted((tiny_run.REPOSITORY / "recipes").glob("*.toml"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoteConfig:
    """Options of a command that writes what it was told."""

    text: str
    output: str
    number: int = 0
    names: tuple[str, ...] = ()
    by_name: dict[str, str] = dataclasses.field(default_factory=dict)
    note_template: str | None = None
    flag: bool = False

    def __post_init__(self):
        if self.number == 13:
            raise ValueError("number=13: not this one")


class Notes:
    """The commands of the tests, and the configs that `note` was run with; `then` is called in each run."""

    def __init__(self):
        self.ran, self.then = [], lambda config: None
        self.commands = {
            "note": Command(NoteConfig, self.run, self.result, {"output": "note.txt"}, self.check),
            "other": Command(NoteConfig, self.run, self.result, {"output": "other.txt"}),
        }

    def run(self, config):
        ended = self.then(config)
        Path(config.output).write_text(config.text)
        self.ran.append(config)
        return ended

    def result(self, config, directory):
        assert Path(config.output).parent == directory
        return config.output

    def check(self, config):
        if "{output_dir}" in config.text:
            raise ValueError(f"text={config.text}: a check sees paths")
        if config.text == "refused":
            raise ValueError("text=refused: and so it is")


@pytest.fixture
def notes():
    return Notes()


def recipe_of(tmp_path, text, name="recipe.toml"):
    path = tmp_path / name
    path.write_text(f'output_dir = "{tmp_path}/out"\n{text}')
    return read_recipe(path)


def stage(name, text="x", more="", kind="[[stage]]", command="note"):
    return f'{kind}\nname = "{name}"\ncommand = "{command}"\ntext = "{text}"\n{more}\n'


def loop_stage(name, text="x", more=""):
    return stage(name, text, more, kind="[[loop.stage]]")


def texts(notes, recipe):
    """What each stage was told, the recipe's directory written as OUT."""
    return [config.text.replace(str(recipe.output_dir), "OUT") for config in notes.ran]


# --- order and references ---------------------------------------------------------------------------------------------


def test_a_stage_gets_what_an_earlier_one_has_written(tmp_path, notes, capsys):
    more = 'names = ["{a}", "reward_model:{b}?name=r"]\nby_name = {held = "{a.dir}/x"}\n'
    more += 'note_template = "{prompt} {a} {output_dir}"'
    recipe = recipe_of(tmp_path, stage("a") + stage("b", "of {a}") + stage("c", "{b} and {output_dir}", more))
    out = f"{tmp_path}/out"
    found = run_recipe(recipe, notes.commands)
    assert found == {name: f"{out}/{name}/note.txt" for name in "abc"}
    assert [config.text for config in notes.ran] == ["x", f"of {out}/a/note.txt", f"{out}/b/note.txt and {out}"]
    last = notes.ran[-1]
    assert last.names == (f"{out}/a/note.txt", f"reward_model:{out}/b/note.txt?name=r")
    assert last.by_name == {"held": f"{out}/a/x"}
    assert last.note_template == "{prompt} {a} {output_dir}"
    assert last.output == f"{out}/c/note.txt"
    assert Path(found["b"]).read_text() == f"of {out}/a/note.txt"

    record = json.loads((tmp_path / "out" / "b" / "done.json").read_text())
    assert record["command"] == "note"
    assert record["result"] == "{output_dir}/b/note.txt"
    assert record["options"]["text"] == "of {output_dir}/a/note.txt"
    summary = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert [row["stage"] for row in summary["stages"]] == ["a", "b", "c"]
    assert [row["result"] for row in summary["stages"]] == list(found.values())
    assert summary["stages"][1]["seconds"] == record["seconds"] > 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"stage 1 of 3, a (note): begins in {out}/a"
    assert shown[1].startswith("stage 1 of 3, a (note): 0.")
    assert shown[-4].split() == ["stage", "command", "seconds", "result"]
    assert shown[-1].split()[::3] == ["c", f"{out}/c/note.txt"]


def test_a_loop_comes_after_the_stage_it_names_and_otherwise_last(tmp_path, notes):
    rounds = "[[loop]]\nrounds = 2\n"
    text = stage("a") + stage("b") + rounds + loop_stage("d") + loop_stage("e") + rounds + 'after = "a"\n'
    recipe = recipe_of(tmp_path, text + loop_stage("c"))
    assert [one.name for one in recipe.stages] == ["a", "c-1", "c-2", "b", "d-1", "e-1", "d-2", "e-2"]
    assert [one.round for one in recipe.stages] == [None, 1, 2, None, 1, 1, 2, 2]


def test_a_name_means_the_newest_stage_before(tmp_path, notes):
    text = stage("m", "outside") + '[[loop]]\nrounds = 2\nafter = "m"\n'
    text += loop_stage("see", "m={m} made={made|nothing yet} round {round}", 'number = "{round}"')
    text += loop_stage("made", "from {see}") + loop_stage("m", "after {made}, before it {m}")
    text += stage("last", "{m} {m-1} {made}")
    recipe = recipe_of(tmp_path, text)
    run_recipe(recipe, notes.commands)
    path = "OUT/{}/note.txt".format
    assert texts(notes, recipe) == [
        "outside",
        f"m={path('m')} made=nothing yet round 1",
        f"from {path('see-1')}",
        f"after {path('made-1')}, before it {path('m')}",
        f"m={path('m-1')} made={path('made-1')} round 2",
        f"from {path('see-2')}",
        f"after {path('made-2')}, before it {path('m-1')}",
        f"{path('m-2')} {path('m-1')} {path('made-2')}",
    ]
    assert [config.number for config in notes.ran] == [0, 1, 0, 0, 2, 0, 0, 0]


def test_defaults_reach_the_stages_that_have_the_key_and_a_stage_wins(tmp_path, notes):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Small:
        output_dir: str
        seed: int = 0

    made = []
    run = lambda config: made.append(config) or Path(config.output_dir, "x").touch()
    commands = notes.commands | {"small": Command(Small, run, lambda config, directory: directory / "x")}
    text = "[defaults]\nnumber = 5\nseed = 7\n" + stage("a") + stage("b", more="number = 6")
    recipe = recipe_of(tmp_path, text + '[[stage]]\nname = "c"\ncommand = "small"\n')
    found = run_recipe(recipe, commands)
    assert [config.number for config in notes.ran] == [5, 6]
    assert made == [Small(output_dir=f"{tmp_path}/out/c", seed=7)]
    assert found["c"] == f"{tmp_path}/out/c/x"


def test_a_default_leaves_out_the_stages_in_which_nothing_would_read_it(tmp_path):
    pairs = '[[stage]]\nname = "{}"\ncommand = "dpo"\nmodel = "m"\ndataset = "d"\n'
    text = "[defaults]\nmax_length = 64\nmax_completion_length = 8\n" + pairs.format("given")
    recipe = recipe_of(tmp_path, text + pairs.format("sampled") + 'refresh_steps = 1\nreward = ["random"]\n')
    given, sampled = (resolve(recipe, one, SHIPPED["dpo"], {})[0] for one in recipe.stages)
    assert (given.max_length, sampled.max_length) == (64, 1024)
    assert (given.max_completion_length, sampled.max_completion_length) == (512, 8)
    idle = recipe_of(tmp_path, "[defaults]\nprompt_buckets = [8]\n" + pairs.format("given"), name="idle.toml")
    with pytest.raises(ConfigError, match="no stage takes 'prompt_buckets'"):
        check_recipe(idle, SHIPPED)


# --- mistakes ---------------------------------------------------------------------------------------------------------

A = stage("a")
LOOP = "[[loop]]\nrounds = 2\n"
MISTAKES = {
    "no stage": ("", "no stage: write [[stage]]"),
    "unknown key": ("[[stages]]\n" + A, "unknown key 'stages'; the nearest is 'stage'"),
    "one bracket": ("[stage]\nname='a'", "stage must be an array of tables: write [[stage]]"),
    "no command": (A + "[[stage]]\nname='b'", "stage 'b': command must be given"),
    "no name": (A + "[[stage]]\ncommand='note'", "stage 2: name must be given"),
    "name of a number": (A + "[[stage]]\nname=3\ncommand='note'", "stage 3: name = 3: expected a string"),
    "bad name": (stage("a/b"), "stage 'a/b': a name has letters, digits, - and _"),
    "reserved name": (stage("round"), "is not round or output_dir"),
    "same name": (A + stage("b") + A, "two stages are called 'a'"),
    "name of a round": (stage("b-2") + LOOP + loop_stage("b"), "two stages are called 'b-2'"),
    "unknown command": (A + stage("b", command="nota"), "stage 'b': there is no command 'nota'; the nearest is 'note'"),
    "unknown option": (A + stage("b", more="nubmer=1"), "stage 'b': unknown key 'nubmer'; the nearest is 'number'"),
    "wrong type": (A + stage("b", more="number='1'"), "stage 'b': number = '1': expected an integer"),
    "missing option": (A + "[[stage]]\nname='b'\ncommand='note'", "stage 'b': text must be given"),
    "refused value": (A + stage("b", more="number=13"), "stage 'b': number=13: not this one"),
    "the command's check": (A + stage("b", "refused"), "stage 'b': text=refused: and so it is"),
    "a place": (A + stage("b", more="output='z'"), "stage 'b': output is set by the recipe, to a path in"),
    "unknown stage": (A + stage("b", "{c}"), "stage 'b': {c}: there is no stage 'c'; the nearest is"),
    "misspelt stage": (stage("demo") + stage("b", "{dmeo}"), "there is no stage 'dmeo'; the nearest is 'demo'"),
    "itself": (A + stage("b", "{b}"), "{b}: b does not stand before this stage"),
    "forward": (stage("b", "{a}") + A, "stage 'b': {a}: a does not stand before this stage"),
    "forward with another": (stage("b", "{a|x}") + A, "{a|x}: a does not stand before this stage"),
    "forward in a list": (stage("b", more="names = ['{a}']") + A, "{a}: a does not stand before this stage"),
    "first round": (LOOP + loop_stage("a", "{b}") + loop_stage("b"), "no b before the first one; {b|OTHERWISE} says"),
    "a loop that is later": (stage("b", "{c|x}") + LOOP + loop_stage("c"), "{c|x}: c does not stand before"),
    "round outside": (A + stage("b", "{round}"), "{round}: braces hold a stage's name"),
    "unknown part": (A + stage("b", "{a.model}"), "{a.model}: braces hold a stage's name"),
    "empty braces": (A + stage("b", "{}"), "{}: there is no stage ''"),
    "no rounds": (A + "[[loop]]\n" + loop_stage("b"), "loop 1: rounds must be given"),
    "round 0": (A + "[[loop]]\nrounds=0\n" + loop_stage("b"), "loop 1: rounds=0: must be at least 1"),
    "unknown after": (A + LOOP + "after='b'\n" + loop_stage("c"), "loop 1: after = 'b': there is no [[stage]]"),
    "empty loop": (A + LOOP, "loop 1: no stage: write [[loop.stage]]"),
    "key of a loop": (A + LOOP + "afer='a'\n" + loop_stage("c"), "loop 1: unknown key 'afer'; the nearest is 'after'"),
    "stage of a loop": (A + LOOP + "[[loop.stage]]\nname='b'", "loop 1, stage 'b': command must be given"),
    "idle default": ("[defaults]\nnamse=['x']\n" + A, "[defaults]: no stage takes 'namse'; the nearest option is 'names'"),
    "placed default": ("[defaults]\noutput='z'\n" + A, "[defaults]: no stage takes 'output'"),
    "default's type": ("[defaults]\nnumber='z'\n" + A, "stage 'a': number = 'z': expected an integer"),
    "defaults": ("defaults = 3\n" + A, "defaults = 3: expected a table"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_anywhere_shows_before_anything_runs(mistake, tmp_path, notes):
    text, message = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        run_recipe(recipe_of(tmp_path, text), notes.commands)
    assert message in str(error.value)
    assert "recipe.toml" in str(error.value)
    assert notes.ran == []
    assert not (tmp_path / "out").exists()


def test_mistakes_of_the_command_line(tmp_path, notes, capsys):
    recipe_of(tmp_path, A + LOOP + loop_stage("b"))
    config = ["--config", str(tmp_path / "recipe.toml")]
    recipe, until = parse_recipe([*config, "--output_dir", "elsewhere", "--until", "b"])
    assert (recipe.output_dir, until) == (Path("elsewhere"), "b")
    assert parse_recipe(config)[0].output_dir == tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        parse_recipe([*config, "--untill", "b"])
    assert end.value.code == 2
    with pytest.raises(ConfigError, match="no such stage; the nearest is 'b-2'"):
        run_recipe(parse_recipe(config)[0], notes.commands, until="b-3")
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read"):
        read_recipe(tmp_path / "gone.toml")
    (tmp_path / "homeless.toml").write_text(A)
    with pytest.raises(ConfigError, match=r"homeless\.toml: output_dir must be given"):
        read_recipe(tmp_path / "homeless.toml")
    assert read_recipe(tmp_path / "homeless.toml", output_dir=tmp_path).output_dir == tmp_path
    assert notes.ran == []


# --- resuming ---------------------------------------------------------------------------------------------------------

CHAIN = stage("a") + stage("b", "of {a}") + stage("c", "of {b}") + stage("d", "alone")


def test_done_stages_are_not_run_again(tmp_path, notes, capsys):
    recipe = recipe_of(tmp_path, CHAIN)
    assert list(run_recipe(recipe, notes.commands, until="b")) == ["a", "b"]
    assert not (tmp_path / "out" / "c").exists()
    assert list(run_recipe(recipe, notes.commands)) == ["a", "b", "c", "d"]
    assert texts(notes, recipe) == ["x", "of OUT/a/note.txt", "of OUT/b/note.txt", "alone"]
    capsys.readouterr()
    run_recipe(recipe, notes.commands)
    assert len(notes.ran) == 4
    assert "stage 2 of 4, b (note): done before, in 0." in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert [row["stage"] for row in summary["stages"]] == ["a", "b", "c", "d"]


def test_until_in_a_loop(tmp_path, notes):
    recipe = recipe_of(tmp_path, A + LOOP + loop_stage("b") + loop_stage("c"))
    assert list(run_recipe(recipe, notes.commands, until="b-1")) == ["a", "b-1"]
    assert list(run_recipe(recipe, notes.commands, until="b")) == ["a", "b-1", "c-1", "b-2"]


def test_changed_options_of_a_done_stage_are_refused_with_what_to_delete(tmp_path, notes):
    recipe = recipe_of(tmp_path, CHAIN)
    run_recipe(recipe, notes.commands)
    changed = recipe_of(tmp_path, CHAIN.replace('text = "of {a}"', 'text = "of {a}!"\nnumber = 3'))
    with pytest.raises(ConfigError) as error:
        run_recipe(changed, notes.commands)
    said = str(error.value)
    assert "stage 'b' is done, with other options:" in said
    assert "  text: 'of {output_dir}/a/note.txt' -> 'of {output_dir}/a/note.txt!'" in said
    assert "  number: 0 -> 3" in said
    out = tmp_path / "out"
    assert f"To run it again delete {out / 'b'}, {out / 'c'}; or give another output_dir." in said
    with pytest.raises(ConfigError, match="command: 'note' -> 'other'"):
        run_recipe(recipe_of(tmp_path, CHAIN.replace('"note"', '"other"')), notes.commands)
    assert len(notes.ran) == 4


def remove(directory):
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_what_was_made_from_a_removed_stage_must_be_removed_too(tmp_path, notes):
    recipe, out = recipe_of(tmp_path, CHAIN), tmp_path / "out"
    run_recipe(recipe, notes.commands)
    remove(out / "a")
    with pytest.raises(ConfigError) as error:
        run_recipe(recipe, notes.commands)
    assert f"b, c read what is not there any more, or would be made anew: delete {out / 'b'}, {out / 'c'}" in str(
        error.value
    )
    remove(out / "b")
    (out / "c" / "done.json").unlink()  # half-finished: it has begun from what is gone
    with pytest.raises(ConfigError, match=f"c read what is not there any more, or would be made anew: delete {out}/c"):
        run_recipe(recipe, notes.commands)
    remove(out / "c")
    run_recipe(recipe, notes.commands)
    assert len(notes.ran) == 7
    assert texts(notes, recipe)[4:] == ["x", "of OUT/a/note.txt", "of OUT/b/note.txt"]
    (out / "b" / "note.txt").unlink()
    with pytest.raises(
        ConfigError, match=f"the result {out}/b/note.txt is gone. To run it again delete {out}/b, {out}/c"
    ):
        run_recipe(recipe, notes.commands)
    (out / "b" / "done.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"b/done\.json: not what a finished stage writes"):
        run_recipe(recipe, notes.commands)


def test_a_recipe_goes_on_in_a_directory_that_was_moved(tmp_path, notes):
    recipe = recipe_of(tmp_path, CHAIN)
    run_recipe(recipe, notes.commands, until="b")
    (tmp_path / "out").rename(tmp_path / "moved")
    recipe = read_recipe(tmp_path / "recipe.toml", output_dir=tmp_path / "moved")
    found = run_recipe(recipe, notes.commands)
    assert len(notes.ran) == 4
    assert notes.ran[2].text == f"of {tmp_path}/moved/b/note.txt"
    assert found["a"] == f"{tmp_path}/moved/a/note.txt"


def test_a_relative_directory_is_kept_as_it_is(tmp_path, notes, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text('output_dir = "."\n' + CHAIN)
    recipe = read_recipe("recipe.toml")
    assert run_recipe(recipe, notes.commands, until="b") == {"a": "./a/note.txt", "b": "./b/note.txt"}
    run_recipe(recipe, notes.commands)
    assert len(notes.ran) == 4


def test_further_rounds_of_a_finished_loop(tmp_path, notes):
    text = "[[loop]]\nrounds = {}\n" + loop_stage("a", "of {{a|base}}")
    recipe = recipe_of(tmp_path, text.format(2))
    run_recipe(recipe, notes.commands)
    run_recipe(recipe_of(tmp_path, text.format(3)), notes.commands)
    assert texts(notes, recipe) == ["of base", "of OUT/a-1/note.txt", "of OUT/a-2/note.txt"]


def test_a_result_elsewhere_is_handed_on(tmp_path, notes):
    elsewhere = tmp_path / "elsewhere.txt"
    elsewhere.touch()
    commands = {"note": notes.commands["note"]._replace(result=lambda config, directory: elsewhere)}
    recipe = recipe_of(tmp_path, A + stage("b", "of {a}"))
    assert run_recipe(recipe, commands) == {"a": str(elsewhere), "b": str(elsewhere)}
    assert notes.ran[1].text == f"of {elsewhere}"


def test_a_stage_that_leaves_nothing_is_not_done(tmp_path, notes):
    commands = {"note": notes.commands["note"]._replace(result=lambda config, directory: directory / "model")}
    with pytest.raises(FileNotFoundError, match=r"stage a: note has left no .*/out/a/model"):
        run_recipe(recipe_of(tmp_path, A), commands)
    assert not (tmp_path / "out" / "a" / "done.json").exists()


def _returns_interrupted(config):
    return types.SimpleNamespace(interrupted=True, stopped="SIGUSR1")


def _exits(config):
    raise SystemExit("runs/x: SIGUSR1")


def _is_terminated(config):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it goes on after the signal")


@pytest.mark.parametrize("ending", [_returns_interrupted, _exits, _is_terminated])
def test_a_stage_that_is_ended_is_run_again(ending, tmp_path, notes):
    handler = signal.getsignal(signal.SIGTERM)
    recipe = recipe_of(tmp_path, CHAIN)
    notes.then = lambda config: ending(config) if "a/note" in config.text else None
    with pytest.raises(SystemExit) as end:
        run_recipe(recipe, notes.commands)
    reason = {"_exits": "runs/x: SIGUSR1", "_is_terminated": "SIGTERM"}.get(ending.__name__, "SIGUSR1")
    assert end.value.code == f"stage b: {reason}; the same command goes on with this stage"
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not (tmp_path / "out" / "b" / "done.json").exists()
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["stages"][-1]["stage"] == "a"
    notes.then = lambda config: None
    notes.ran.clear()
    run_recipe(recipe, notes.commands)
    assert texts(notes, recipe) == ["of OUT/a/note.txt", "of OUT/b/note.txt", "alone"]


def test_an_error_or_a_kill_while_a_stage_is_recorded_leaves_it_undone(tmp_path, notes, monkeypatch):
    recipe = recipe_of(tmp_path, CHAIN)

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            run_recipe(recipe, notes.commands)
    assert not (tmp_path / "out" / "a" / "done.json").exists()
    notes.then = lambda config: 1 / 0 if config.text == "alone" else None
    with pytest.raises(ZeroDivisionError):
        run_recipe(recipe, notes.commands)
    notes.then = lambda config: None
    run_recipe(recipe, notes.commands)
    assert texts(notes, recipe) == ["x", "x", "of OUT/a/note.txt", "of OUT/b/note.txt", "alone"]


def test_an_option_that_is_new_since_a_stage_was_done_counts_as_its_default(tmp_path, notes):
    recipe = recipe_of(tmp_path, A)
    run_recipe(recipe, notes.commands)
    path = tmp_path / "out" / "a" / "done.json"
    record = json.loads(path.read_text())
    del record["options"]["flag"]
    path.write_text(json.dumps(record))
    run_recipe(recipe, notes.commands)
    assert len(notes.ran) == 1


# --- real commands ----------------------------------------------------------------------------------------------------


def policy_result(config, directory):
    return run_export(ExportConfig(run=str(directory), directory=str(directory / "model"), overwrite=True))


GRPO = Command(GRPOConfig, train, policy_result)
SMALL = {"prompts_per_step": 4, "num_generations": 4, "prompt_buckets": (16,), "max_completion_length": 8}
SMALL |= {"reward": ("tiny_run:digits",), "reward_weights": (), "true_reward": None, "beta": 0.0, "eval_dataset": {}}
SMALL |= {"max_steps": 2, "num_iterations": 1, "minibatch_completions": None, "probe_prompts": 0, "save_steps": 0}


def weights(directory):
    return tiny_run.bits(load(directory, dtype="float32")[1])


def test_a_chain_of_runs_that_was_terminated_ends_like_runs_by_hand(tmp_path, notes):
    model, data = tiny_run.save_model(tmp_path / "tiny"), tiny_run.write_data(tmp_path)
    config = GRPOConfig(**tiny_run.options(model, data, "x", **SMALL))
    table = tomllib.loads(to_toml(config)) | {"command": "grpo"}
    del table["output_dir"]
    stages = [table | {"name": "first"}, table | {"name": "second", "model": "{first}", "seed": 1}]
    recipe = recipe_of(tmp_path, tomli_w.dumps({"stage": stages}) + stage("last", "of {second}"))
    commands = {"grpo": GRPO} | notes.commands
    calls = []
    tiny_run.CALLS.append(lambda **_: calls.append(0) or (len(calls) == 3 and os.kill(os.getpid(), signal.SIGTERM)))
    try:
        with pytest.raises(SystemExit) as end:
            run_recipe(recipe, commands)  # in the first step of the second run
    finally:
        tiny_run.CALLS.clear()
    assert end.value.code == "stage second: SIGTERM; the same command goes on with this stage"
    assert (tmp_path / "out" / "first" / "done.json").exists()
    assert not (tmp_path / "out" / "second" / "model").exists()
    found = run_recipe(recipe, commands)
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/second/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]

    first = found["first"]
    assert weights(first) != weights(model)
    by_hand = dataclasses.replace(config, output_dir=str(tmp_path / "hand"), model=first, seed=1)
    train(by_hand)
    assert weights(policy_result(by_hand, tmp_path / "hand")) == weights(found["second"]) != weights(first)
    assert texts(notes, recipe) == ["of OUT/second/model"]


# --- the recipes of the repository ------------------------------------------------------------------------------------


def _never(config, *_):
    raise AssertionError("a check runs nothing")


SHIPPED = {name: command._replace(run=_never, result=_never) for name, command in stages.STAGES.items()}
STAGES = {
    "cold_start": "sft from_sft from_base eval_from_sft eval_from_base",
    "expert_iteration": "before traces-1 policy-1 traces-2 policy-2 traces-3 policy-3 after",
    "r1_chain": "cold_start rl samples sft rl_again",
    "reward_refresh": "pairs-1 reward-1 policy-1 pairs-2 reward-2 policy-2 pairs-3 reward-3 policy-3",
    "rlhf": "sft reward ppo grpo online_dpo",
    "sft_dpo_rlvr": "sft dpo rlvr best",
}


def test_every_recipe_is_tested():
    assert [path.stem for path in RECIPES] == sorted(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_a_shipped_recipe_has_options_that_exist(name, tmp_path):
    recipe = read_recipe(tiny_run.REPOSITORY / "recipes" / f"{name}.toml")
    assert recipe.output_dir == Path("runs") / name
    assert [one.name for one in recipe.stages] == STAGES[name].split()
    assert check_recipe(recipe._replace(output_dir=tmp_path), SHIPPED) == {}


def test_expert_iteration_samples_the_last_policy_and_starts_from_the_base():
    recipe = read_recipe(tiny_run.REPOSITORY / "recipes" / "expert_iteration.toml")
    found = {one.name: resolve(recipe, one, SHIPPED[one.command], {})[0] for one in recipe.stages}
    base, path = "runs/lab/sft", "{{output_dir}}/{}/result".format
    assert [found[f"traces-{n}"].model for n in (1, 2, 3)] == [base, path("policy-1"), path("policy-2")]
    assert [found[f"traces-{n}"].seed for n in (1, 2, 3)] == [1, 2, 3]
    assert [found[f"policy-{n}"].model for n in (1, 2, 3)] == [base] * 3
    assert [found[f"policy-{n}"].dataset for n in (1, 2, 3)] == [path(f"traces-{n}") for n in (1, 2, 3)]
    assert found["after"].model == path("policy-3")


def test_what_a_recipe_evaluates_it_does_not_train(monkeypatch):
    monkeypatch.chdir(tiny_run.REPOSITORY)
    rows = lambda source: read_rows(source, name="dataset")
    pairs = [
        (one.options["dataset"], held)
        for path in RECIPES
        for one in read_recipe(path).stages
        for held in one.options.get("eval_dataset", {}).values()
        if held.startswith("recipes/")
    ]
    assert len(pairs) == 2
    for trained, held in pairs:
        assert not {row["prompt"] for row in rows(trained)} & {row["prompt"] for row in rows(held)}


def test_the_rows_of_the_recipes():
    source = f"{tiny_run.REPOSITORY}/recipes/lab.py"
    problems = {prompt(problem): problem for problem in make_problems(500, seed=1)}
    rows = read_rows(f"{source}:comparisons?count=100&seed=1", name="dataset")
    assert len(rows) == 100
    assert rows == read_rows(f"{source}:comparisons?count=100&seed=1", name="dataset")
    for row in rows:
        better, worse = (check(problems[row["prompt"]], row[side]) for side in ("chosen", "rejected"))
        assert sum(better.steps) + better.correct > sum(worse.steps) + worse.correct
    problems = {prompt(problem): problem for problem in make_problems(20, seed=2)}
    rows = read_rows(f"{source}:solutions?count=20&seed=2", name="dataset")
    assert all(check(problems[row["prompt"]], row["completion"]).correct for row in rows)
