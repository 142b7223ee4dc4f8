"""Made-up arms for `clipx certify`: the folders of sound runs, in which a test changes what it asks about."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tests.analysis.runs.commands import clipx
from tests.analysis.runs.example_runs import write_validation
from tests.messages import assert_names
from verl_clipx.run.record import as_json, record_of

STEPS = range(1, 6)
ACTOR = "actor_rollout_ref.actor"
CONFIGURATION = {
    "data": {"seed": 1, "train_batch_size": 16, "train_files": "train.parquet", "val_files": "test.parquet"},
    "actor_rollout_ref": {
        "actor": {
            "loss_agg_mode": "token-mean",
            "ppo_mini_batch_size": 4,
            "ppo_epochs": 1,
            # Which has no rounding worth a floor.
            "fsdp_config": {"mixed_precision": {"param_dtype": "fp32"}},
            "policy_loss": {"loss_mode": "clipx_grpo"},
            "optim": {"lr": 1e-6},
        },
        "model": {"path": "models/base"},
        "rollout": {"n": 8, "name": "vllm"},
    },
    "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync", "sampler": {"max_off_policy_threshold": 8}}},
    "reward": {"custom_reward_function": {"path": "reward.py", "name": "score"}},
    "clipx": {"method": "grpo", "clip_low": 0.8, "clip_high": 1.2},
}
SOUND_VERSIONS = {"verl": "0.9.1", "verl-clipx": "0.1.0", "torch": "2.9.0", "transformers": "4.57.0", "vllm": "0.11.0"}
ACPO = {f"{ACTOR}.policy_loss.loss_mode": "clipx_acpo", "clipx.method": "acpo", "clipx.alpha": 3.0}


# The arguments of `write_run` for an arm of two runs that have no fault.
SOUND = ({}, {})


def fingerprint_of(*parts):
    """Return a fingerprint that is the same for the same parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def updates_of(run_name, step):
    """Return the fingerprints of two updates that have the rows of a step's batch between them."""
    rows = int(fingerprint_of(run_name, step, "rows"), 16)
    first = int(fingerprint_of(run_name, step, "half"), 16)
    # The fingerprint of several rows is the sum of theirs, modulo 2**64.
    second = (rows - first) % 2**64
    return [f"{first:016x}", f"{second:016x}"]


def write_run(folder, seed=1, overrides=None, loss=None, edit_line=None, record=None, validations=None):
    """Write a run's folder: five steps of a sound run, with changes.

    Args:
        folder: the folder, whose name is the run's.
        seed: the value of data.seed.
        overrides: from keys of the configuration to values.
        loss: the same for the keys of the loss.
        edit_line: takes a line of the log and returns what is written instead.
        record: from parts of the run's record, or "part/field", to values.
        validations: from steps to the rewards of each problem.
    """
    folder.mkdir(parents=True)
    configuration = json.loads(json.dumps(CONFIGURATION))
    for key, value in ({"data.seed": seed} | (loss or {}) | (overrides or {})).items():
        *nodes, last = key.split(".")
        node = configuration
        for part in nodes:
            node = node.setdefault(part, {})
        node[last] = value
    lines = []
    # The arms have the same weights in the first step only.
    offset = int(fingerprint_of(folder.name), 16) % 97 * 1e-5
    for step in STEPS:
        data = {
            "critic/score/mean": 0.3 + 0.01 * step + 0.001 * seed + offset * (step > 1),
            "response_length/mean": 40.0 + step * seed,
            "critic/advantages/max": 1.5 + 0.1 * step * seed,
            "actor/clipx/clip_fraction_low": 0.01,
            "actor/clipx/clip_fraction_high": 0.002,
            "training/off_policy/trajectory_staleness/max": 0.0,
            "actor/lr": 1e-6,
        }
        if step == 1:
            data["actor/clipx/receipt"] = 0.0
            data["actor/clipx/receipt_failed"] = 0.0
        batch = {
            "prompts": fingerprint_of(seed, step),
            "responses": fingerprint_of(folder.name, step),
            "rows": fingerprint_of(folder.name, step, "rows"),
            "groups": 16,
            "sequences": 128,
            "tokens": 128 * (40 + step * seed),
            "distinct": 120,
            "versions": [step - 1, step - 1],
            "updates": updates_of(folder.name, step),
        }
        line = {"step": step, "data": data, "batch": batch}
        if edit_line is not None:
            line = edit_line(line)
        lines.append(json.dumps({key: value for key, value in line.items() if value is not None}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    kept = as_json(record_of(configuration)) | {"versions": SOUND_VERSIONS, "commit": "c" * 40}
    for name in ("model", "data", "validation", "reward"):
        kept[name] |= {"hash": fingerprint_of(name)}
    for key, value in (record or {}).items():
        part, _, name = key.partition("/")
        kept[part] = {**kept[part], name: value} if name else value
    (folder / "metrics.run.json").write_text(json.dumps(kept))
    write_validation(folder / "validation", validations or {5: [(1.0,), (0.0,)]})
    return folder


def with_metrics(metrics):
    """Return an `edit_line` that sets metrics: from their keys to values, or to functions of the step."""

    def edit(line):
        for key, value in metrics.items():
            line["data"][key] = value(line["step"]) if callable(value) else value
        return line

    return edit


def with_fingerprints(**fingerprints):
    """Return an `edit_line` that sets fields of the batch to values, or to functions of the step."""

    def edit(line):
        for name, value in fingerprints.items():
            line["batch"][name] = value(line["step"]) if callable(value) else value
        return line

    return edit


def without_metrics(*prefixes):
    """Return an `edit_line` that leaves out the metrics whose keys begin with a prefix."""

    def edit(line):
        data = {key: value for key, value in line["data"].items() if not key.startswith(prefixes)}
        return line | {"data": data}

    return edit


def without_fingerprints(line):
    """Return a line without its fingerprints; an `edit_line`."""
    return line | {"batch": None}


def both_runs(**arguments):
    """Return an arm of two runs that have the same arguments of `write_run`."""
    return (arguments, arguments)


def second_run(**arguments):
    """Return an arm of a sound run and one with these arguments of `write_run`."""
    return ({}, arguments)


def vary(*patterns):
    """Return the words of the command line that name in which keys the arms are to differ."""
    words = []
    for pattern in patterns:
        words += ["--vary", pattern]
    return words


@dataclass
class PrintedAnswer:
    """What `clipx certify` printed about a question."""

    verdict: str
    evidence: str


@dataclass
class PrintedAnswers:
    """What `clipx certify` printed: its whole text, the line that counts verdicts, and the answers by question."""

    text: str
    summary: str
    answers: dict[str, PrintedAnswer]

    def assert_verdict(self, question: str, verdict: str, *facts: str) -> None:
        """Assert the verdict on a question, and that the evidence names each fact."""
        answer = self.answers[question]
        assert answer.verdict == verdict, self.text
        assert_names(answer.evidence, *facts)


def certify_arms(tmp_path, *, first=SOUND, second=SOUND, words=(), code) -> PrintedAnswers:
    """Write two arms and return what `clipx certify` prints about them.

    Args:
        tmp_path: the folder for the runs, which are called grpo-seed1, acpo-seed1 and so on.
        first: the arguments of `write_run` for each run of the first arm, which trains GRPO.
        second: the same for the second arm, which trains ACPO.
        words: further words of the command line.
        code: the exit code that is asserted; None for any.
    """
    paths_of_first = write_arm(tmp_path, name="grpo", loss={}, arguments_of_runs=first)
    paths_of_second = write_arm(tmp_path, name="acpo", loss=ACPO, arguments_of_runs=second)
    text = clipx("certify", *paths_of_first, "vs", *paths_of_second, *words, code=code)
    return read_answers(text)


def write_arm(tmp_path, *, name: str, loss: dict[str, Any], arguments_of_runs):
    """Write the runs of an arm, with the seeds 1, 2 and so on, and return their folders."""
    folders = []
    for seed, arguments in enumerate(arguments_of_runs, start=1):
        given = {"seed": seed, "loss": loss} | arguments
        folders.append(write_run(tmp_path / f"{name}-seed{seed}", **given))
    return folders


def read_answers(text: str) -> PrintedAnswers:
    """Read what `clipx certify` printed, in which a single blank stands for each white space."""
    lines = text
    for verdict in ("passed", "failed", "not recorded"):
        lines = lines.replace(f" {verdict}: ", f"\n{verdict}: ")
    summary, *lines_of_answers = lines.splitlines()
    answers = {}
    for line in lines_of_answers:
        verdict, question, evidence = line.split(": ", maxsplit=2)
        answers[question] = PrintedAnswer(verdict=verdict, evidence=evidence)
    return PrintedAnswers(text=text, summary=summary, answers=answers)
