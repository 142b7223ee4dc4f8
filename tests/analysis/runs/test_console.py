"""verl's console output as users save it: with Ray's prefix and colours or without, behind progress bars, in parts, of
two processes, of a second run or a resumed one; the configuration in it; what can't be told, as lines that a terminal
wrapped, is refused by name. Not covered: a number at whose end a terminal wrapped the line.
"""

import json
from functools import cache
from pathlib import Path
from pprint import pformat

import pytest
from omegaconf import OmegaConf

from tests.analysis.runs.commands import answer, clipx
from tests.composition import composition
from verl_clipx.analysis.demo.files import SHIPPED
from verl_clipx.analysis.runs.folder import RunFolder, read_run

RAY, RAY_ELSEWHERE = "(TaskRunner pid=17)", "(TaskRunner pid=123456, ip=10.0.0.12)"
BAR = "Training Progress:  50%|█████     | 4/8 [00:05<00:05,  5.00s/it]"


@cache
def steps() -> dict[int, dict[str, float]]:
    """The numbers of a real run of verl's."""
    lines = (SHIPPED / "grpo-seed1/metrics.jsonl").read_text().splitlines()[:3]
    return {one["step"]: {k: v for k, v in one["data"].items() if v is not None} for one in map(json.loads, lines)}


def printed(prefix: str, colour: bool, bar: bool) -> list[str]:
    """The lines of a console, as verl, Ray and tqdm print them."""
    before = (f"\x1b[36m{prefix}\x1b[0m " if colour else f"{prefix} ") if prefix else ""
    lines = []
    for step, data in steps().items():
        lines += [f"{before}12:30:05 - INFO - all is well", f"{before}{BAR}"]
        metrics = " - ".join(f"{key}:{value!r}" for key, value in data.items())
        lines.append(f"{BAR * bar}{before}step:{step} - {metrics}")
    return lines


@pytest.mark.parametrize("bar", [False, True])
@pytest.mark.parametrize(("prefix", "colour"), [("", False), (RAY, False), (RAY_ELSEWHERE, True)])
def test_lines_are_read_whole_also_those_of_which_ray_had_read_a_part(tmp_path, prefix, colour, bar):
    path, lines = tmp_path / "train.log", printed(prefix, colour, bar)
    path.write_text("\n".join(lines) + "\n")
    assert RunFolder(path).rows == steps()
    for cut in range(200, 500, 7) if prefix else []:
        before = lines[0].removesuffix("12:30:05 - INFO - all is well")
        rows = [row for one in lines for row in (one[:cut], *([before + one[cut:]] if one[cut:] else []))]
        path.write_text("\n".join(rows) + "\n")
        assert RunFolder(path).rows == steps(), cut


def test_metrics_whose_step_is_cut_off_are_not_lost_without_a_word(tmp_path):
    text = (
        line(1) + line(2).replace(" - critic", "\nUserWarning: slow\n - critic").strip() + " - critic/x:1\n" + line(3)
    )
    (tmp_path / "train.log").write_text(text)
    with pytest.warns(UserWarning, match="train.log: metrics without their step, and ignored: ' - critic/score/mean"):
        assert list(read_run(tmp_path / "train.log").log.index) == [1, 2, 3]
    # One step lost two rows, the other none.
    (tmp_path / "train.log").write_text(line(1) + ("│ critic/x:1 - critic/y:2\n" * 2) + line(2))
    with pytest.warns(UserWarning, match="Damaged parts in all: 2"):
        assert list(read_run(tmp_path / "train.log").log.index) == [1, 2]
    # Where a border stands before every further row, the whole is refused.
    (tmp_path / "train.log").write_text("".join(line(step).strip() + "\n: " + line(9)[9:] for step in (1, 2)))
    assert "train.log: metrics without their step" in clipx("diagnose", tmp_path / "train.log", code=1)


def line(step: int, entropy: float = 0.5, process: str = "") -> str:
    return f"{process}step:{step} - actor/entropy:{entropy} - critic/score/mean:0.25\n"


def read(tmp_path: Path, text: str) -> dict[int, float]:
    """The entropy by step."""
    (tmp_path / "train.log").write_text(text)
    return read_run(tmp_path / "train.log").values("actor/entropy").to_dict()


@pytest.mark.parametrize(
    "text",
    [
        line(1) + f"\r{BAR}" + line(2),
        line(1) + BAR + line(2),
        line(1, process=f"{BAR}{RAY}") + line(2, process=f"{RAY} {BAR}"),
        # Unbuffered, a line's end is written by itself.
        line(1).strip() + BAR + "\n" + line(2).strip() + " [repeated 2x across cluster]\n",
        line(1, process=f"{RAY} ").strip() + line(2, process=f"{RAY} "),
        # Ray had read a part of the line.
        f"{RAY} step:1 - actor/entropy:0.5 - critic/sco\n{RAY} re/mean:0.25\n(WorkerDict pid=3) x\n" + line(2),
    ],
)
def test_a_step_that_something_is_glued_to_is_read(tmp_path, text):
    assert read(tmp_path, text) == {1: 0.5, 2: 0.5}
    assert read_run(tmp_path / "train.log").values("critic/score/mean").to_dict() == {1: 0.25, 2: 0.25}


def test_names_and_values_of_every_form_are_read(tmp_path):
    metrics = {"val-core/my data/acc": "0.5", "val-core/lighteval:MATH/acc": "np.float64(1e-05)", "actor/x": "True"}
    (tmp_path / "a.log").write_text("step:1 - " + " - ".join(map(":".join, metrics.items())) + " - actor/y:-inf\n")
    row = read_run(tmp_path / "a.log").log.loc[1].to_dict()
    assert row == {**dict(zip(metrics, (0.5, 1e-5, 1.0), strict=True)), "actor/y": float("-inf")}


A, B = "(TaskRunner pid=17) ", "(TaskRunner pid=18) "
FIRST = "".join(line(step, 0.5, A) for step in (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("after", "entropy", "said"),
    [
        # A second run, by another process, by one of the same number in a container, and one that validates first.
        (line(1, 0.7, B) + line(2, 0.7, B), [0.7, 0.7], "after step 4 it begins anew"),
        (line(1, 0.7, A) + line(2, 0.7, A), [0.7, 0.7], "after step 4 it begins anew"),
        (f"{B}step:0 - val-core/x/acc:1\n" + line(1, 0.7, B), [0.7], "after step 4 it begins anew"),
        # A resumed run: with steps that are there twice, with its validation first, shorter than before, without any.
        (line(3, 0.7, B) + line(4, 0.7, B) + line(5, 0.7, B), [0.5, 0.5, 0.7, 0.7, 0.7], "goes on, as a resumed run"),
        (f"{B}step:2 - val-core/x/acc:1\n" + line(3, 0.7, B), [0.5, 0.5, 0.7], "goes on, as a resumed run"),
        (line(5, 0.7, B), [0.5, 0.5, 0.5, 0.5, 0.7], None),
        # A validation of an earlier checkpoint, after the training.
        (f"{B}step:2 - val-core/x/acc:1\n", [0.5, 0.5, 0.5, 0.5], None),
    ],
)
@pytest.mark.parametrize("ending", ["log", "jsonl"])
def test_a_second_run_is_read_alone_and_a_resumed_one_whole(tmp_path, after, entropy, said, ending):
    text = FIRST + after
    if ending == "jsonl":
        steps = [row.partition("step:")[2].split(" - ") for row in text.splitlines()]
        pairs = [(int(step), dict(one.rsplit(":", 1) for one in metrics)) for step, *metrics in steps]
        data = [(step, {key: float(value) for key, value in metrics.items()}) for step, metrics in pairs]
        text = "".join(json.dumps({"step": step, "data": metrics}) + "\n" for step, metrics in data)
    path = tmp_path / f"train.{ending}"
    path.write_text(text)
    shown = clipx("diagnose", path)
    assert ("train." in shown and "after step" in shown) == (said is not None) and (said or "") in shown
    if said:
        with pytest.warns(UserWarning, match=said):
            run = read_run(path)
    else:
        run = read_run(path)
    assert list(run.values("actor/entropy")) == entropy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            line(1, 0.5, A) + line(1, 0.7, B) + line(2, 0.5, A) + line(2, 0.7, B),
            "(TaskRunner pid=17) and (TaskRunner pid=18) alternate",
        ),
        ("".join(line(step) for step in (1, 1, 2, 2, 3, 3)), "steps alternate, so several runs wrote"),
        # Wrapped by a terminal, or with a border.
        ("".join(line(step).replace("score", "sc\nore") for step in (1, 2)), "as if a terminal"),
        ("".join(line(step).replace("score", "sc\n│ ore") for step in (1, 2)), "as if a terminal"),
        ("{'loss': 0.1, 'reward': 0.5}\n", "clipx reads verl's logs"),
        ("step 1: {'train/loss': 0.1, 'rollout/raw_reward': 0.5}\n", "clipx reads verl's logs"),
        ("12:30:05 SUCCESS Step 1 | Time: 5.0s | Reward: 0.5 | Throughput: 10 tokens/s\n", "clipx reads verl's logs"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(tmp_path, text, said):
    path = tmp_path / "train.log"
    path.write_text(text)
    shown = clipx("diagnose", path, code=1)
    assert "train.log" in shown and said in shown


def test_what_is_left_out_is_said(tmp_path):
    cut = line(2)[: -len("an:0.25\n")]
    (tmp_path / "train.log").write_text(line(1) + cut + "\nTraceback (most recent call last)\n" + line(3))
    shown = clipx("diagnose", tmp_path / "train.log")
    assert "train.log, step 2: damaged, and ignored: 'critic/score/me'" in shown
    assert answer("diagnose", tmp_path / "train.log")["checked"]
    with pytest.warns(UserWarning, match="step 2"):
        assert list(read_run(tmp_path / "train.log").log.index) == [1, 2, 3]


@cache
def configuration() -> str:
    """verl's configuration as its trainer prints it: DAPO's upper bound, eight updates a step, and a token."""
    overrides = [
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "actor_rollout_ref.actor.ppo_mini_batch_size=10",
        "data.train_batch_size=80",
        "data.max_response_length=20",
        "data.seed=7",
    ]
    whole = OmegaConf.to_container(composition(*overrides), resolve=True)
    whole["actor_rollout_ref"]["actor"]["hf_token"] = "hf_abcdefghijklmnopqrstuvwxyz"
    return pformat(whole)


def trained(entropies: list[float], prefix: str = "", cut: float = 0.0, longest: int = 20) -> str:
    of_lengths = f"response_length/max:{longest} - response_length/clip_ratio:{cut}"
    return "".join(line(step, one, prefix).strip() + f" - {of_lengths}\n" for step, one in enumerate(entropies, 1))


def behind(prefix: str, text: str, among: str = "") -> str:
    return "".join(f"{prefix}{row}\n{among}" for row in text.splitlines())


@pytest.mark.parametrize(
    ("prefix", "among"),
    [
        ("", "UserWarning: 'data': {'max_response_length': 9}\n"),
        (f"\x1b[36m{RAY}\x1b[0m ", ""),
        (f"{RAY} ", f"{RAY_ELSEWHERE}  'clip_ratio_high': 0.2,\n"),
    ],
)
def test_the_configuration_that_verl_prints_is_read(tmp_path, prefix, among):
    text = behind(prefix, configuration(), among) + trained([1.0] * 9 + [0.01] * 9, prefix, cut=0.5)
    (tmp_path / "train.log").write_text(text)
    said = clipx("diagnose", tmp_path / "train.log")
    assert "set actor.clip_ratio_high (here 0.28) to 1" in said and "Raise data.max_response_length (here 20)." in said
    assert "train: responses cut at the limit from step 1 on. response_length/clip_ratio 0.5, at most 0.5." in said
    run = read_run(tmp_path / "train.log")
    assert (run.seed, run.schedule.updates_a_step) == (7, 8) and "hf_abc" not in str(run.configuration)


def test_which_configuration_is_the_run_s(tmp_path):
    path, other = (
        tmp_path / "train.log",
        configuration().replace("'max_response_length': 20", "'max_response_length': 99"),
    )
    own = behind(RAY + " ", configuration())
    # That of a run before it, and of one after it that has not trained.
    elsewhere = behind(RAY_ELSEWHERE + " ", other)
    path.write_text(elsewhere + trained([0.5] * 3) + own + trained([0.7] * 3) + elsewhere)
    with pytest.warns(UserWarning, match="begins anew"):
        assert read_run(path).configuration["data.max_response_length"] == 20
    # A row of it is missing.
    rows = own.splitlines(keepends=True)
    path.write_text("".join([*rows[:40], "(TaskRunner pid=17)  cut\n", *rows[41:]]) + trained([0.7] * 3))
    with pytest.warns(UserWarning, match="train.log: the configuration in it is damaged"):
        assert read_run(path).configuration == {}
    # Nothing else that is printed is taken for one.
    path.write_text("{'score': 1.0}\n" + trained([0.7] * 3) + "{'actor_rollout_ref': {}}\n")
    assert read_run(path).configuration == {}
