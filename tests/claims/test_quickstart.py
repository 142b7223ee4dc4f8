"""What scripts/quickstart.sh runs: GRPO and the method, by seed, with whose overrides; which methods it refuses.

Covers: its order of commands, with stand-ins for Python and clipx; names of runs, which of them are trained, what is
kept; the choices with MODEL. Not covered: the model itself (tests/papers/tasks/pretrained), training and the page
(tests/end_to_end/test_quickstart.py), signals (tests/recipes/test_signals.py).
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.recipes.shell import Machine

from .test_groups import METHODS, REFUSED

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.sh"


# What would follow a missing refusal ends at its first step and leaves nothing behind.
NOWHERE = {"PYTHON": "/nowhere/python", "VENV": "/nowhere/venv", "RUNS": "/nowhere/runs"}


def refusal(*arguments: str) -> str:
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], capture_output=True, text=True, check=False, env=os.environ | NOWHERE
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_its_list_is_of_the_groups_that_need_nothing_more():
    _, _, offered = refusal("nonsense").partition("the methods are: ")
    assert offered.split() == sorted(group.removeprefix("+clipx=") for group in {*METHODS} - {*REFUSED})


@pytest.mark.parametrize("group", sorted(REFUSED))
def test_a_group_that_cannot_train_as_it_is_is_refused_at_once(group):
    name = group.removeprefix("+clipx=")
    message = refusal(name)
    expected = {
        "base": "no method base",
        "custom": "add clipx.function=…",
        "grpo_clip_high_acpo": "add clipx.clip_high=…",
    }
    assert expected.get(name, "add clipx.clip_low=…") in message


def test_each_value_that_is_missing_is_asked_for():
    assert "add clipx.clip_high=…" in refusal("grpo_clip_acpo_average", "clipx.clip_low=0.5")


# A training leaves its log and what it was given, prints as verl does, and ends as the test says.
VERL = """
echo trained >>"$RUN_FOLDER/metrics.jsonl"
echo "$MODEL_PATH ${PARAM_DTYPE:-} ${MAX_PROMPT_LENGTH:-} $TOTAL_STEPS $TRAIN_FILE" >"$RUN_FOLDER/given"
echo "clipx: clipx_$METHOD (+clipx=$METHOD), bounds as announced"
echo "a warning of verl's" >&2
printf '\\e[36m(TaskRunnerV1 pid=7)\\e[0m step:1 - actor/lr:0.001 - critic/rewards/mean:0.25 - perf/time:2\\n'
exit "${TRAINING_EXIT:-0}"
"""


# Its last line is a folder, or the longest prompt's length.
PYTHON = """
case $2 in
    *.prompt_length) echo 38 ;;
    *.pretrained) [[ -z ${NO_INDEX:-} ]] || { echo "error: pip cannot fetch it" >&2; exit 1; }; echo /models/smollm2 ;;
    *) echo policy ;;
esac
"""


def start(tmp_path, *arguments: str, **variables: str) -> tuple[Machine, subprocess.CompletedProcess]:
    """A start of the script, among the runs of earlier ones."""
    machine = Machine(tmp_path / "venv", python=PYTHON, python3=VERL, clipx="", lscpu='echo "Flags: ${CPU_FLAGS:-}"')
    given = {"VENV": str(tmp_path / "venv"), "RUNS": str(tmp_path / "runs"), **variables}
    machine.record.unlink(missing_ok=True)
    return machine, machine.run(SCRIPT, *arguments, **given)


def commands(tmp_path, *arguments: str, **variables: str) -> tuple[list[list[str]], list[str]]:
    """The overrides of each training, and the runs that the page is of."""
    machine, done = start(tmp_path, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    data, (command, *folders) = [words[1:] for words in machine.calls if words[0] == "clipx"]
    assert data[:2] == ["data", "build"] and command == "report"
    return [call[3:] for call in trainings(machine)], [Path(name).name for name in folders[: folders.index("--out")]]


def trainings(machine) -> list[list[str]]:
    """The calls of verl's main."""
    return [call for call in machine.calls if call[:3] == ["python3", "-m", "verl.trainer.main_ppo"]]


def test_grpo_comes_first_and_gets_the_overrides_that_are_not_the_methods(tmp_path):
    shared, own = "data.train_batch_size=8", ["clipx.alpha=2", "+clipx/update=lopti", "++clipx.bins=10"]
    (grpo, acpo), runs = commands(tmp_path, "acpo", own[0], shared, *own[1:], TOTAL_STEPS="3")
    assert grpo[:2] == ["+hardware=cpu", "+clipx=grpo"] and acpo[:2] == ["+hardware=cpu", "+clipx=acpo"]
    of_recipe = grpo[2:-1]
    assert "trainer.total_training_steps=3" in of_recipe and grpo[-1] == shared
    changed = [word.replace(runs[0], runs[1]) for word in of_recipe]
    names = [f"trainer.experiment_name='{name}'" for name in ("grpo", "acpo")]
    assert acpo[2:] == [names[1] if word == names[0] else word for word in changed] + [own[0], shared, *own[1:]]


def test_it_shows_the_runs_line_and_steps_and_keeps_the_rest_in_a_log(tmp_path):
    _, done = start(tmp_path, "acpo", TOTAL_STEPS="3")
    shown = [line for line in done.stdout.splitlines() if line.startswith("    ")]
    steps = "    step 1 of 3: reward 0.25"
    lines = [(f"    clipx_{name} (+clipx={name}), bounds as announced", steps) for name in ("grpo", "acpo")]
    assert shown == [*lines[0], *lines[1]]
    # The end is short: the page's sentences are in its log.
    *_, page, what_if, other, seeds, own = done.stdout.splitlines()
    assert page.endswith("/runs/acpo_TOTAL_STEPS=3-page/report.html") and "clipx replay" in what_if
    assert other.endswith("bash scripts/quickstart.sh dgpo") and seeds.endswith("quickstart.sh acpo")
    assert "+clipx=acpo" in own and done.stdout.count("\n  ") == 4 + 5
    log = (tmp_path / "runs" / "acpo_TOTAL_STEPS=3-seed1" / "run.log").read_text()
    assert "a warning of verl's" in log and "critic/rewards/mean:0.25" in log
    _, done = start(tmp_path, "dgpo", TRAINING_EXIT="7", SEED="2")
    assert done.returncode == 7
    assert "training with +clipx=grpo failed. Its log: " in done.stderr and "a warning of verl's" in done.stderr


def test_a_method_is_compared_by_seeds(tmp_path):
    _, runs = commands(tmp_path, "dgpo", SEED="2", SEEDS="3")
    assert runs == [f"{method}-seed{seed}" for seed in (2, 3, 4) for method in ("grpo", "dgpo")]


def test_grpo_stands_alone_with_all_overrides(tmp_path):
    ((*_, last),), runs = commands(tmp_path, "grpo", "clipx.clip_high=1.28")
    assert (last, runs) == ("clipx.clip_high=1.28", ["grpo_clipx.clip_high=1.28-seed1"])


def logs(tmp_path) -> dict[str, str]:
    """Folder to log of each run that is there."""
    return {path.parent.name: path.read_text() for path in (tmp_path / "runs").glob("*/metrics.jsonl")}


def trained(machine) -> list[str]:
    """The runs that a start trained."""
    return [folder_of(call).name for call in trainings(machine)]


def folder_of(training: list[str]) -> Path:
    """The folder of a run: that of its checkpoints."""
    (checkpoints,) = [word for word in training if word.startswith("trainer.default_local_dir=")]
    return Path(checkpoints.partition("=")[2].strip("'\"")).parent


def test_another_parameter_is_another_run_and_a_finished_one_is_used_again(tmp_path):
    """What the script and docs/dev/launching.md advise next."""
    start(tmp_path)
    machine, done = start(tmp_path, "acpo", "clipx.alpha=2")
    assert trained(machine) == ["acpo_clipx.alpha=2-seed1"]
    assert f"{tmp_path}/runs/grpo-seed1 is finished and used again" in done.stdout
    assert logs(tmp_path) == dict.fromkeys(["grpo-seed1", "acpo-seed1", "acpo_clipx.alpha=2-seed1"], "trained\n")
    report = machine.calls[-1]
    assert [Path(word).name for word in report[2:4]] == ["grpo-seed1", "acpo_clipx.alpha=2-seed1"]
    assert Path(report[-1]).name == "acpo_clipx.alpha=2-page"
    settings = (tmp_path / "runs" / "acpo_clipx.alpha=2-seed1" / "finished.txt").read_text()
    assert settings.split() == ["+clipx=acpo", "SEED=1", "clipx.alpha=2"]


def test_a_start_like_an_earlier_one_makes_its_page_alone(tmp_path):
    start(tmp_path, "dgpo", "clipx.kappa=1", TOTAL_STEPS="3")
    machine, done = start(tmp_path, "dgpo", "clipx.kappa=1", TOTAL_STEPS="3")
    assert done.returncode == 0 and trained(machine) == [] and machine.calls[-1][:2] == ["clipx", "report"]
    machine, _ = start(tmp_path, "dgpo", "clipx.kappa=1", SEED="2", TOTAL_STEPS="3")
    assert trained(machine) == ["grpo_TOTAL_STEPS=3-seed2", "dgpo_TOTAL_STEPS=3_clipx.kappa=1-seed2"]


def test_a_variable_of_the_recipe_is_another_run(tmp_path):
    start(tmp_path, "grpo")
    machine, _ = start(tmp_path, "grpo", TOTAL_STEPS="40", ACTOR_LR="1e-4")
    assert trained(machine) == ["grpo_TOTAL_STEPS=40_ACTOR_LR=1e-4-seed1"]


def test_what_is_no_name_for_a_folder_gets_one_of_its_own(tmp_path):
    wild = [
        "data.train_files=/a/b.parquet",
        "data.train_files=/a-b.parquet",
        "+x='../../$(touch y)'",
        "+x=" + "z" * 300,
    ]
    names = set()
    for override in wild:
        machine, done = start(tmp_path, "grpo", override)
        assert done.returncode == 0
        names.update(trained(machine))
    assert len(names) == len(wild) and all(re.fullmatch(r"[\w.=-]{1,80}_[0-9a-f]{8}-seed1", name) for name in names)
    assert set(logs(tmp_path)) == names


def test_a_run_that_did_not_come_to_its_end_is_kept_and_trained_anew(tmp_path):
    for _ in range(2):
        machine, done = start(tmp_path, "grpo", TRAINING_EXIT="7")
        assert done.returncode == 7
    machine, done = start(tmp_path, "grpo")
    assert trained(machine) == ["grpo-seed1"]
    assert f"it is now {tmp_path}/runs/grpo-seed1-unfinished2" in done.stdout
    assert set(logs(tmp_path)) == {"grpo-seed1", "grpo-seed1-unfinished1", "grpo-seed1-unfinished2"}


@pytest.mark.parametrize("wrong", [{"SEEDS": "0"}, {"SEEDS": "three"}, {"SEED": "-1"}, {"SEED": "08"}])
def test_seeds_are_whole_numbers(tmp_path, wrong):
    done = Machine(tmp_path).run(SCRIPT, **wrong, **NOWHERE)
    assert (done.returncode, done.stdout) == (2, "") and "must be a whole number" in done.stderr


def given(tmp_path, run: str) -> list[str]:
    """What a training was given: model, precision, longest prompt, steps, training file."""
    return (tmp_path / "runs" / run / "given").read_text().split()


def test_a_pretrained_model_is_fetched_measured_and_trained_in_bfloat16_where_the_cpu_has_it(tmp_path):
    machine, done = start(tmp_path, MODEL="smollm2", CPU_FLAGS="avx512f avx512_bf16 amx")
    assert done.returncode == 0, done.stderr
    runs = tmp_path / "runs" / "smollm2_sums"
    data = [str(runs / "data" / f"{split}.parquet") for split in ("train", "test")]
    prepared = [call for call in machine.calls if call[1:3] == ["data", "build"] or "verl_clipx." in " ".join(call)]
    assert prepared[:3] == [
        ["clipx", "data", "build", "sums", "--out", str(runs / "data")],
        ["python", "-m", "verl_clipx.papers.tasks.pretrained", str(tmp_path / "runs" / "models")],
        ["python", "-m", "verl_clipx.papers.tasks.prompt_length", "/models/smollm2", *data],
    ]
    assert ".[cpu,pretrained]" in " ".join(word for call in machine.calls for word in call)
    assert trained(machine) == ["grpo-seed1", "acpo-seed1"]
    for call in trainings(machine):
        assert "reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.sums.reward" in call
    settings = ["/models/smollm2", "bf16", "38", "6", data[0]]
    assert given(tmp_path, f"{runs.name}/grpo-seed1") == given(tmp_path, f"{runs.name}/acpo-seed1") == settings
    assert "this CPU computes in bfloat16" in done.stdout and "Apache-2.0" in done.stdout
    assert "MODEL=smollm2 bash scripts/quickstart.sh dgpo" in done.stdout
    # What the page rightly calls ill, it also says to be there on purpose: by the limit that the recipe has.
    assert "cut at 14 tokens on purpose" in machine.calls[-1][-1]
    assert "max_response_length=14" in " ".join(trainings(machine)[0])


def test_float32_where_the_cpu_has_no_bfloat16_or_the_user_says_so(tmp_path):
    _, done = start(tmp_path, "grpo", MODEL="smollm2", CPU_FLAGS="avx512f avx512bw")
    assert given(tmp_path, "smollm2_sums/grpo-seed1")[1] == "fp32"
    assert "compute in fp32" in done.stdout and "this CPU computes in bfloat16" not in done.stdout
    _, done = start(tmp_path, "grpo", MODEL="smollm2", CPU_FLAGS="avx512_bf16", PARAM_DTYPE="fp32")
    assert given(tmp_path, "smollm2_sums/grpo_PARAM_DTYPE=fp32-seed1")[1] == "fp32"


def test_without_the_package_the_tiny_policy_is_offered_and_nothing_trained(tmp_path):
    machine, done = start(tmp_path, MODEL="smollm2", NO_INDEX="1")
    assert done.returncode == 1 and trained(machine) == []
    assert "error: pip cannot fetch it" in done.stderr and "no pretrained model" in done.stderr
    assert "the tiny policy              bash scripts/quickstart.sh" in done.stderr


def test_any_model_by_its_folder_or_its_name_on_the_hub(tmp_path):
    (tmp_path / "own model").mkdir()
    for model, name in ((str(tmp_path / "own model"), None), ("org/Model-1B", "org-Model-1B_sums")):
        machine, done = start(tmp_path, "grpo", MODEL=model, TOTAL_STEPS="2")
        assert done.returncode == 0, done.stderr
        assert not any("verl_clipx.papers.tasks.pretrained" in call for call in machine.calls)
        (run,) = map(folder_of, trainings(machine))
        assert run.name == "grpo_TOTAL_STEPS=2-seed1" and (name is None or run.parent.name == name)
        assert (run / "given").read_text().startswith(f"{model} ")
        assert ".[cpu]" in " ".join(word for call in machine.calls for word in call) or name
