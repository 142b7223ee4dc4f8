"""verl's console output as users save it: with Ray's prefix and colours or without, behind progress bars, in parts, of
two processes, of a second run or a resumed one; the configuration in it; what can't be told, as lines that a terminal
wrapped, is refused by name. Not covered: a number at whose end a terminal wrapped the line.
"""

import json
from collections.abc import Iterable
from functools import cache
from pprint import pformat

import pytest
from omegaconf import OmegaConf

from tests.analysis.runs.commands import answer, clipx
from tests.composition import composition
from tests.messages import assert_names
from verl_clipx.analysis.demo.files import SHIPPED
from verl_clipx.analysis.runs.folder import RunFolder, read_run

# What Ray puts before a line: the process, and elsewhere its node.
RAY_PREFIX = "(TaskRunner pid=17)"
RAY_PREFIX_OF_ANOTHER = "(TaskRunner pid=18)"
RAY_PREFIX_ELSEWHERE = "(TaskRunner pid=123456, ip=10.0.0.12)"
PROGRESS_BAR = "Training Progress:  50%|█████     | 4/8 [00:05<00:05,  5.00s/it]"


@cache
def shipped_steps() -> dict[int, dict[str, float]]:
    """The numbers of a real run of verl's."""
    steps = {}
    for line in (SHIPPED / "grpo-seed1/metrics.jsonl").read_text().splitlines()[:3]:
        row = json.loads(line)
        steps[row["step"]] = {key: value for key, value in row["data"].items() if value is not None}
    return steps


def print_steps(prefix: str, *, bar_before_step: bool) -> list[str]:
    """Return the lines of a console as verl, Ray and tqdm print them.

    Args:
        prefix: what Ray puts before each line.
        bar_before_step: whether a progress bar stands before a step, on its line.
    """
    lines = []
    for step, data in shipped_steps().items():
        lines.append(f"{prefix}12:30:05 - INFO - all is well")
        lines.append(f"{prefix}{PROGRESS_BAR}")
        metrics = " - ".join(f"{key}:{value!r}" for key, value in data.items())
        bar = PROGRESS_BAR if bar_before_step else ""
        lines.append(f"{bar}{prefix}step:{step} - {metrics}")
    return lines


PREFIXES = [
    pytest.param("", id="without Ray"),
    pytest.param(f"{RAY_PREFIX} ", id="Ray"),
    pytest.param(f"\x1b[36m{RAY_PREFIX_ELSEWHERE}\x1b[0m ", id="Ray elsewhere, in colour"),
]


@pytest.mark.parametrize("bar_before_step", [False, True])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_lines_are_read_whole(tmp_path, prefix, bar_before_step):
    path = tmp_path / "train.log"
    path.write_text("\n".join(print_steps(prefix, bar_before_step=bar_before_step)) + "\n")
    assert RunFolder(path).rows == shipped_steps()


@pytest.mark.parametrize("bar_before_step", [False, True])
@pytest.mark.parametrize("prefix", PREFIXES[1:])
def test_lines_of_which_ray_had_read_a_part_are_put_together(tmp_path, prefix, bar_before_step):
    path = tmp_path / "train.log"
    lines = print_steps(prefix, bar_before_step=bar_before_step)
    for length in range(200, 500, 7):
        parts = []
        for line in lines:
            parts.append(line[:length])
            if line[length:]:
                parts.append(prefix + line[length:])
        path.write_text("\n".join(parts) + "\n")
        assert RunFolder(path).rows == shipped_steps(), length


def print_step(step: int, entropy: float = 0.5, prefix: str = "") -> str:
    return f"{prefix}step:{step} - actor/entropy:{entropy} - critic/score/mean:0.25\n"


def print_several(steps: Iterable[int], entropy: float = 0.5, prefix: str = "") -> str:
    return "".join(print_step(step, entropy, prefix) for step in steps)


def test_metrics_that_another_line_cut_off_from_their_step_are_named(tmp_path):
    step_2 = print_step(2).replace(" - critic", "\nUserWarning: slow\n - critic").strip() + " - critic/x:1\n"
    (tmp_path / "train.log").write_text(print_step(1) + step_2 + print_step(3))
    with pytest.warns(UserWarning, match="train.log: metrics without their step, and ignored: ' - critic/score/mean"):
        assert list(read_run(tmp_path / "train.log").log.index) == [1, 2, 3]


def test_metrics_without_their_step_are_counted(tmp_path):
    two_cut_off_rows = "│ critic/x:1 - critic/y:2\n" * 2
    (tmp_path / "train.log").write_text(print_step(1) + two_cut_off_rows + print_step(2))
    with pytest.warns(UserWarning, match="Damaged parts in all: 2"):
        assert list(read_run(tmp_path / "train.log").log.index) == [1, 2]


def test_a_log_whose_every_step_was_cut_off_is_refused(tmp_path):
    # As where a border stands before every further row of a line.
    metrics = print_step(9).removeprefix("step:9 -")
    text = "".join(f"{print_step(step).strip()}\n: {metrics}" for step in (1, 2))
    (tmp_path / "train.log").write_text(text)
    output = clipx("diagnose", tmp_path / "train.log", code=1)
    assert_names(output, "train.log", "metrics without their step")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"{print_step(1)}\r{PROGRESS_BAR}{print_step(2)}", id="a bar that is written over"),
        pytest.param(f"{print_step(1)}{PROGRESS_BAR}{print_step(2)}", id="a bar"),
        pytest.param(
            print_step(1, prefix=f"{PROGRESS_BAR}{RAY_PREFIX}") + print_step(2, prefix=f"{RAY_PREFIX} {PROGRESS_BAR}"),
            id="a bar before Ray's prefix, and after it",
        ),
        # Unbuffered, a line's end is written by itself.
        pytest.param(
            f"{print_step(1).strip()}{PROGRESS_BAR}\n{print_step(2).strip()} [repeated 2x across cluster]\n",
            id="a bar behind it, and Ray's count of repetitions",
        ),
        pytest.param(
            print_step(1, prefix=f"{RAY_PREFIX} ").strip() + print_step(2, prefix=f"{RAY_PREFIX} "),
            id="the next step",
        ),
        pytest.param(
            f"{RAY_PREFIX} step:1 - actor/entropy:0.5 - critic/sco\n{RAY_PREFIX} re/mean:0.25\n"
            f"(WorkerDict pid=3) x\n{print_step(2)}",
            id="in two parts",
        ),
    ],
)
def test_a_step_that_something_is_glued_to_is_read(tmp_path, text):
    (tmp_path / "train.log").write_text(text)
    run = read_run(tmp_path / "train.log")
    assert run.values("actor/entropy").to_dict() == {1: 0.5, 2: 0.5}
    assert run.values("critic/score/mean").to_dict() == {1: 0.25, 2: 0.25}


def test_names_and_values_of_every_form_are_read(tmp_path):
    (tmp_path / "a.log").write_text(
        "step:1 - val-core/my data/acc:0.5 - val-core/lighteval:MATH/acc:np.float64(1e-05) - actor/x:True"
        " - actor/y:-inf\n"
    )
    assert read_run(tmp_path / "a.log").log.loc[1].to_dict() == {
        "val-core/my data/acc": 0.5,
        "val-core/lighteval:MATH/acc": 1e-5,
        "actor/x": 1.0,
        "actor/y": float("-inf"),
    }


OWN = f"{RAY_PREFIX} "
OTHER = f"{RAY_PREFIX_OF_ANOTHER} "
FOUR_STEPS = print_several([1, 2, 3, 4], entropy=0.5, prefix=OWN)
BEGINS_ANEW = "after step 4 it begins anew"
GOES_ON = "goes on, as a resumed run"


def as_json_lines(text: str) -> str:
    """Return what verl's file logger writes where its console logger prints this."""
    rows = []
    for line in text.splitlines():
        step, *metrics = line.partition("step:")[2].split(" - ")
        data = {}
        for metric in metrics:
            key, value = metric.rsplit(":", 1)
            data[key] = float(value)
        rows.append(json.dumps({"step": int(step), "data": data}) + "\n")
    return "".join(rows)


@pytest.mark.parametrize(
    ("text_after_step_4", "entropies", "warning"),
    [
        pytest.param(print_several([1, 2], 0.7, OTHER), [0.7, 0.7], BEGINS_ANEW, id="another process"),
        pytest.param(print_several([1, 2], 0.7, OWN), [0.7, 0.7], BEGINS_ANEW, id="a process of the same number"),
        pytest.param(
            f"{OTHER}step:0 - val-core/x/acc:1\n" + print_step(1, 0.7, OTHER),
            [0.7],
            BEGINS_ANEW,
            id="a run that validates first",
        ),
        pytest.param(
            print_several([3, 4, 5], 0.7, OTHER),
            [0.5, 0.5, 0.7, 0.7, 0.7],
            GOES_ON,
            id="resumed, with two steps twice",
        ),
        pytest.param(
            f"{OTHER}step:2 - val-core/x/acc:1\n" + print_step(3, 0.7, OTHER),
            [0.5, 0.5, 0.7],
            GOES_ON,
            id="resumed, with its validation first, and shorter",
        ),
        pytest.param(print_step(5, 0.7, OTHER), [0.5, 0.5, 0.5, 0.5, 0.7], None, id="resumed, without a step twice"),
        pytest.param(
            f"{OTHER}step:2 - val-core/x/acc:1\n",
            [0.5, 0.5, 0.5, 0.5],
            None,
            id="a validation of an earlier checkpoint, after the training",
        ),
    ],
)
@pytest.mark.parametrize("ending", ["log", "jsonl"])
def test_a_second_run_is_read_alone_and_a_resumed_one_whole(tmp_path, text_after_step_4, entropies, warning, ending):
    text = FOUR_STEPS + text_after_step_4
    path = tmp_path / f"train.{ending}"
    path.write_text(as_json_lines(text) if ending == "jsonl" else text)
    output = clipx("diagnose", path)
    if warning is None:
        assert "after step" not in output
        run = read_run(path)
    else:
        assert_names(output, f"train.{ending}", warning)
        with pytest.warns(UserWarning, match=warning):
            run = read_run(path)
    assert list(run.values("actor/entropy")) == entropies


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        pytest.param(
            print_step(1, 0.5, OWN) + print_step(1, 0.7, OTHER) + print_step(2, 0.5, OWN) + print_step(2, 0.7, OTHER),
            f"{RAY_PREFIX} and {RAY_PREFIX_OF_ANOTHER} alternate",
            id="two processes at once",
        ),
        pytest.param(
            print_several([1, 1, 2, 2, 3, 3]), "steps alternate, so several runs wrote", id="two runs without a prefix"
        ),
        pytest.param(print_several([1, 2]).replace("score", "sc\nore"), "as if a terminal", id="wrapped by a terminal"),
        pytest.param(
            print_several([1, 2]).replace("score", "sc\n│ ore"), "as if a terminal", id="wrapped, with a border"
        ),
        pytest.param("{'loss': 0.1, 'reward': 0.5}\n", "clipx reads verl's logs", id="TRL"),
        pytest.param("step 1: {'train/loss': 0.1, 'rollout/raw_reward': 0.5}\n", "clipx reads verl's logs", id="slime"),
        pytest.param(
            "12:30:05 SUCCESS Step 1 | Time: 5.0s | Reward: 0.5 | Throughput: 10 tokens/s\n",
            "clipx reads verl's logs",
            id="prime-rl",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(tmp_path, text, fact):
    path = tmp_path / "train.log"
    path.write_text(text)
    assert_names(clipx("diagnose", path, code=1), "train.log", fact)


def test_a_step_that_was_cut_off_is_named_and_read_as_far_as_it_goes(tmp_path):
    cut_off = print_step(2).removesuffix("an:0.25\n")
    text = f"{print_step(1)}{cut_off}\nTraceback (most recent call last)\n{print_step(3)}"
    (tmp_path / "train.log").write_text(text)
    output = clipx("diagnose", tmp_path / "train.log")
    assert_names(output, "train.log, step 2", "damaged, and ignored", "'critic/score/me'")
    assert answer("diagnose", tmp_path / "train.log")["checked"]
    with pytest.warns(UserWarning, match="step 2"):
        assert list(read_run(tmp_path / "train.log").log.index) == [1, 2, 3]


@cache
def printed_configuration() -> str:
    """verl's configuration as its trainer prints it: DAPO's upper bound, eight updates a step, and a token."""
    overrides = [
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.ppo_mini_batch_size=10",
        "data.train_batch_size=80",
        "data.max_response_length=20",
        "data.seed=7",
    ]
    configuration = OmegaConf.to_container(composition(*overrides), resolve=True)
    configuration["actor_rollout_ref"]["actor"]["hf_token"] = "hf_abcdefghijklmnopqrstuvwxyz"
    return pformat(configuration)


def print_entropies(entropies: list[float], prefix: str = "", *, share_as_long_as_longest: float = 0.0) -> str:
    """Return a line for each step, whose longest response has 20 tokens."""
    lengths = f"response_length/max:20 - response_length/clip_ratio:{share_as_long_as_longest}"
    steps = [print_step(step, entropy, prefix).strip() for step, entropy in enumerate(entropies, 1)]
    return "".join(f"{step} - {lengths}\n" for step in steps)


def put_before_lines(prefix: str, text: str, line_between: str = "") -> str:
    return "".join(f"{prefix}{line}\n{line_between}" for line in text.splitlines())


@pytest.mark.parametrize(
    ("prefix", "line_between"),
    [
        pytest.param("", "UserWarning: 'data': {'max_response_length': 9}\n", id="among warnings"),
        pytest.param(f"\x1b[36m{RAY_PREFIX}\x1b[0m ", "", id="behind a prefix in colour"),
        pytest.param(
            f"{RAY_PREFIX} ", f"{RAY_PREFIX_ELSEWHERE}  'clip_ratio_high': 0.2,\n", id="among another process's lines"
        ),
    ],
)
def test_the_configuration_that_verl_prints_is_read(tmp_path, prefix, line_between):
    configuration = put_before_lines(prefix, printed_configuration(), line_between)
    steps = print_entropies([1.0] * 9 + [0.01] * 9, prefix, share_as_long_as_longest=0.5)
    (tmp_path / "train.log").write_text(configuration + steps)
    run = read_run(tmp_path / "train.log")
    assert run.seed == 7
    assert run.schedule.updates_a_step == 8
    assert "hf_abc" not in str(run.configuration)
    output = clipx("diagnose", tmp_path / "train.log")
    assert_names(output, "actor.clip_ratio_high (here 0.28)", "data.max_response_length (here 20)")
    assert_names(output, "train: responses cut at the limit from step 1 on", "response_length/clip_ratio 0.5")


def test_the_configuration_before_the_last_run_that_trained_is_its_own(tmp_path):
    own = put_before_lines(f"{RAY_PREFIX} ", printed_configuration())
    of_others = printed_configuration().replace("'max_response_length': 20", "'max_response_length': 99")
    of_others = put_before_lines(f"{RAY_PREFIX_ELSEWHERE} ", of_others)
    path = tmp_path / "train.log"
    # A run before it, and one after it that has not trained.
    path.write_text(of_others + print_entropies([0.5] * 3) + own + print_entropies([0.7] * 3) + of_others)
    with pytest.warns(UserWarning, match="begins anew"):
        assert read_run(path).configuration["data.max_response_length"] == 20


def test_a_configuration_that_lacks_a_line_is_not_read(tmp_path):
    lines = put_before_lines(f"{RAY_PREFIX} ", printed_configuration()).splitlines(keepends=True)
    lines[40] = f"{RAY_PREFIX}  cut\n"
    path = tmp_path / "train.log"
    path.write_text("".join(lines) + print_entropies([0.7] * 3))
    with pytest.warns(UserWarning, match="train.log: the configuration in it is damaged"):
        assert read_run(path).configuration == {}


def test_no_other_dictionary_that_is_printed_is_taken_for_the_configuration(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("{'score': 1.0}\n" + print_entropies([0.7] * 3) + "{'actor_rollout_ref': {}}\n")
    assert read_run(path).configuration == {}
