"""`clipx blame` on a planted folder: a made log that collapses at step 8, a record that verl composed, a checkpoint, a
launcher that writes logs as a test says. Covers the plan and its checks of arms, the words of every rerun, the table
of answers, what a kill leaves, each refusal. Not covered: reruns of verl (tests/end_to_end/test_blame.py), how often it
is right (docs/results/blame.md).
"""

import json
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.composition import composition
from tests.runs.commands import clipx
from tests.runs.example_runs import write_log
from verl_clipx.run.start import decide
from verl_clipx.runs.sameness import flat
from verl_clipx.trainer.log import write_record

# A plan composes verl's configuration five times.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LR = "actor_rollout_ref.actor.optim.lr"
ARMS = ("--arm", f"lr: {LR}=1e-7", "--arm", "acpo: +clipx=acpo")
FALL, STEPS, FROM, UNTIL, SEEDS = 8, 12, 6, 13, (4, 5, 6, 7)
# What a training is to these tests: it notes its words, and logs a reward that falls where the test says so.
LAUNCHER = """
import json, os, sys, pathlib, yaml
log = pathlib.Path(os.environ["VERL_FILE_LOGGER_PATH"])
words = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
arm, seed = log.parent.name.split("-seed")
with (log.parents[1] / "made.jsonl").open("a") as made:
    made.write(json.dumps({"name": log.parent.name, "words": sys.argv[1:]}) + chr(10))
fate = json.loads(os.environ["FATES"])[arm][int(seed) - 4]
first = int(words["trainer.resume_from_path"].strip("'").rsplit("_", 1)[1]) + 1
config = yaml.safe_load((pathlib.Path(words["--config-dir"]) / (words["--config-name"] + ".yaml")).read_text())
last = config["trainer"]["total_training_steps"] - 2 * (fate == "error")
rewards = {step: 0.01 * step if fate == "failed" and step >= 8 else 0.6 for step in range(first, last + 1)}
log.write_text("".join(json.dumps({"step": s, "data": {"critic/score/mean": r}}) + chr(10) for s, r in rewards.items()))
sys.exit(fate == "error")
"""


@pytest.fixture
def failing(tmp_path):
    """Writes a failed run's folder with overrides, and with a log or a record changed."""

    def write(*overrides, loss="+clipx=grpo", steps=STEPS, fall=FALL, record=None, checkpoints=(FROM, 9)):
        folder = tmp_path / "run"
        rewards = [0.01 * step if step >= fall else 0.5 + 0.01 * step for step in range(1, steps + 1)]
        log = write_log(folder / "metrics.jsonl", [{"critic/score/mean": of, "timing_s/step": 2.0} for of in rewards])
        words = [*([loss] if loss else []), "trainer.save_freq=3", "data.seed=3", *overrides]
        config = composition(*words, f"trainer.default_local_dir={folder / 'checkpoints'}")
        decide(config)
        (folder / "overrides.json").write_text(json.dumps(words))
        write_record(log, OmegaConf.to_container(config, resolve=True))
        path = folder / "metrics.run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | (record or {})))
        for step in checkpoints:
            write_checkpoint(folder / f"checkpoints/global_step_{step}")
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        return folder

    return write


def write_checkpoint(folder):
    (folder / "actor").mkdir(parents=True)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    torch.save(optimizer.state_dict(), folder / "actor/optim_world_size_1_rank_0.pt")
    extra = {"lr_scheduler": schedule.state_dict(), "rng": None}
    torch.save(extra, folder / "actor/extra_state_world_size_1_rank_0.pt")
    for name in ("actor/model_world_size_1_rank_0.pt", "data.pt"):
        (folder / name).write_bytes(b"as it was")


def blame(folder, *words, code=0, arms=ARMS, start=FROM):
    launcher = f"{shlex.quote(sys.executable)} {folder.parent / 'launcher.py'}"
    out = folder.parent / "plan"
    return clipx("blame", folder, "--from", start, *arms, "--out", out, "--launcher", launcher, *words, code=code)


def fates(monkeypatch, **by_arm):
    monkeypatch.setenv("FATES", json.dumps(by_arm))


def made_in(folder):
    path = folder.parent / "plan/made.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def commands_of(said):
    """The words of each rerun that a dry run prints, after its launcher's two."""
    return [shlex.split(one)[3:] for one in said.split("env VERL_FILE_LOGGER_PATH=")[1:]]


def composed_by(words):
    """What verl's main would make of a rerun's words."""
    options = dict(word.split("=", 1) for word in words if word.startswith("--"))
    others = [word for word in words if not word.startswith(("--", "hydra."))]
    with initialize_config_dir(options["--config-dir"], version_base=None):
        return compose(options["--config-name"], others)


def contents(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


ROLLOUT = "actor_rollout_ref.rollout.name=vllm"
ALL, NONE = ["failed"] * 4, ["held"] * 4


def test_the_arm_without_failures_is_named_and_nothing_of_the_run_is_touched(failing, monkeypatch):
    folder = failing()
    before = contents(folder)
    fates(monkeypatch, unchanged=ALL, lr=NONE, acpo=["failed", "held", "failed", "failed"])
    said = blame(folder)
    assert contents(folder) == before
    assert f"reward collapse from step {FALL} on. Reruns from step 6 to 13, 4 seeds an arm:" in said
    assert "unchanged failed 4 of 4 lr failed 0 of 4 prevents it (p 0.029 after Holm over 2 arms) acpo" in said
    assert "acpo failed 3 of 4 can't be said Not said:" in said and "a sample of the run, not a replay" in said
    # What it costs is said before anything is made.
    assert said.index("3 arms with 4 seeds, 7 steps each: 84 steps, about 0.047 h") < said.index("1 of 12")
    made = made_in(folder)
    assert [one["name"] for one in made[:4]] == ["unchanged-seed4", "lr-seed4", "acpo-seed4", "unchanged-seed5"]
    for one in made[:3]:
        arm, _, seed = one["name"].partition("-seed")
        config, own = composed_by(one["words"]), folder.parent / "plan"
        policy = config.actor_rollout_ref
        seeds = (config.data.seed, policy.actor.data_loader_seed, policy.rollout.seed)
        assert seeds == (int(seed),) * 3
        trainer, rate = config.trainer, policy.actor.optim.lr
        assert trainer.default_local_dir == f"{own / one['name']}/checkpoints"
        assert f"hydra.run.dir='{own / one['name']}'" in one["words"]
        checkpoints = own / "lr-checkpoint" if arm == "lr" else folder / "checkpoints"
        assert trainer.resume_from_path == f"{checkpoints}/global_step_6" and trainer.resume_mode == "resume_path"
        assert (trainer.save_freq, trainer.total_training_steps) == (-1, UNTIL)
        assert trainer.del_local_ckpt_after_load is False
        assert (rate, config.clipx.method) == (1e-7 if arm == "lr" else 1e-6, "acpo" if arm == "acpo" else "grpo")
        # What an arm changes, others of verl's keys follow.
        assert all(OmegaConf.is_interpolation(policy.rollout, key) for key in ("response_length", "mtp"))


def test_a_learning_rate_is_changed_where_verls_resume_takes_it_from(failing, monkeypatch):
    folder = failing()
    blame(folder, "--dry-run")
    copy = folder.parent / "plan/lr-checkpoint/global_step_6"
    (group,) = torch.load(copy / "actor/optim_world_size_1_rank_0.pt", weights_only=False)["param_groups"]
    schedule = torch.load(copy / "actor/extra_state_world_size_1_rank_0.pt", weights_only=False)["lr_scheduler"]
    rates = [group["lr"], group["initial_lr"], *schedule["base_lrs"], *schedule["_last_lr"]]
    assert rates == pytest.approx([1e-7] * 4)
    assert (copy / "actor/model_world_size_1_rank_0.pt").read_bytes() == b"as it was"


def test_a_dry_run_prints_a_command_for_each_rerun_and_what_others_made_counts(failing, monkeypatch):
    folder = failing()
    said = blame(folder, "--dry-run")
    assert said.count("env VERL_FILE_LOGGER_PATH=") == 12 and made_in(folder) == []
    fates(monkeypatch, unchanged=ALL, lr=NONE, acpo=ALL)
    for seed in SEEDS:
        write_log(folder.parent / f"plan/lr-seed{seed}/metrics.jsonl", [{"critic/score/mean": 0.6}] * 7, first=FROM + 1)
    assert "lr failed 0 of 4 prevents it" in blame(folder)
    assert {one["name"].partition("-")[0] for one in made_in(folder)} == {"unchanged", "acpo"}


def test_a_failure_that_does_not_recur_blames_nothing_and_says_how_often_it_would_be_missed(failing, monkeypatch):
    fates(monkeypatch, unchanged=["failed", "failed", "held", "held"], lr=NONE, acpo=NONE)
    said = blame(failing())
    assert "unchanged failed 2 of 4 lr failed 0 of 4 acpo failed 0 of 4 The failure did not recur" in said
    assert "so nothing is blamed. Its rate may be up to 93% (95 % interval), and one that high" in said
    assert "prevents" not in said and "missed so in 3% of the cases" in said


def test_a_rerun_that_ends_by_an_error_counts_neither_way(failing, monkeypatch):
    fates(monkeypatch, unchanged=ALL, lr=["held", "error", "held", "held"], acpo=["error"] * 4)
    said = blame(failing())
    assert "lr failed 0 of 3, 1 ended by an error and count neither way can't be said" in said
    assert "acpo failed 0 of 0, 4 ended by an error and count neither way can't be said" in said


def test_what_a_kill_left_is_made_anew_and_finished_reruns_are_kept(failing, monkeypatch):
    folder = failing()
    fates(monkeypatch, unchanged=ALL, lr=NONE, acpo=ALL)
    blame(folder)
    for part in ("lr-seed5", "acpo-seed7"):
        log = folder.parent / f"plan/{part}/metrics.jsonl"
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))
    before = len(made_in(folder))
    assert "lr failed 0 of 4 prevents it" in blame(folder)
    assert [one["name"] for one in made_in(folder)[before:]] == ["lr-seed5", "acpo-seed7"]
    assert "--out=" in (said := blame(folder, "--until", 14, code=1)) and "with until 13, now it is 14" in said


@pytest.mark.parametrize(
    "words",
    [
        ("+clipx=bapo", "clipx.target=0.45"),
        ("+clipx=dapo",),
        ("+clipx=grpo", "actor_rollout_ref.actor.clip_ratio_high=0.28"),
        ("+clipx=observe", "actor_rollout_ref.actor.clip_ratio_high=0.28"),
        ("+clipx=acpo_reference", "+clipx/rollout=stale", "clipx_rollout.versions_old=2", ROLLOUT),
        ("+clipx=cispo", "+clipx/shaping=advantage_reweighting", "+clipx/trace=prompts"),
        ("+clipx=grpo", "+clipx/mask=icepop", "data.train_files=['/data/it\\'s/a b.parquet','x=[1,2]']"),
        ("+clipx=grpo", "trainer.n_gpus_per_node=2", "+data.apply_chat_template_kwargs.enable_thinking=false"),
    ],
    ids=" ".join,
)
def test_a_records_configuration_comes_back_whatever_its_loss_and_values(failing, words):
    loss, *overrides = words
    folder = failing(*overrides, loss=loss)
    config = composed_by(commands_of(blame(folder, "--dry-run", arms=("--arm", f"lr: {LR}=1e-7")))[0])
    decide(config)
    recorded = flat(json.loads((folder / "metrics.run.json").read_text())["configuration"])
    ours, expected = (
        {
            key: value
            for key, value in leaves.items()
            if not re.match(r"trainer\.|ray_kwargs\.|.*(seed|run\.line)$|.*\btrace", key)
        }
        for leaves in (flat(OmegaConf.to_container(config, resolve=True)), recorded)
    )
    assert ours == expected


def test_a_run_without_a_clipx_node_has_its_configuration_from_hydra(failing, monkeypatch):
    folder = failing("+ray_kwargs.ray_init.num_gpus=1", "actor_rollout_ref.actor.clip_ratio_high=0.28", loss=None)
    (folder / ".hydra").mkdir()
    composed = composition(*json.loads((folder / "overrides.json").read_text()))
    OmegaConf.save(composed, folder / ".hydra/config.yaml")
    (folder / "metrics.run.json").unlink()
    said = blame(folder, "--dry-run", arms=("--arm", "acpo: +clipx=acpo"))
    unchanged, acpo = commands_of(said)[:2]
    for config in map(composed_by, (unchanged, acpo)):
        assert config.ray_kwargs.ray_init.num_gpus == 1 and config.actor_rollout_ref.actor.clip_ratio_high == 0.28
    assert "clipx" not in composed_by(unchanged) and composed_by(acpo).clipx.missing_state == "fresh"


OLD = {"versions": {"verl": "0.8.0"}}
COSINE, LAST = f"{LR[:-2]}lr_scheduler_type=cosine", "trainer.total_training_steps"


@pytest.mark.parametrize(
    ("given", "words", "said"),
    [
        (
            {},
            {"start": 7},
            "--from=7: {run}/checkpoints has no whole checkpoint of this step. There are: global_step_6",
        ),
        ({"checkpoints": ()}, {}, "has no whole checkpoint of this step. Put the run's checkpoints there"),
        ({}, {"start": 8}, "--from=8: reward collapse begins at step 8. Name a checkpoint before it."),
        ({"fall": 99}, {}, "nothing failed. Name what counts as failed. The run meets: no rule."),
        ({"record": OLD}, {}, "versions.verl='0.8.0': so says the run's record, and {verl} is installed"),
        ({"record": {"configuration": {}}}, {}, "{run}: nothing says what the run trained. Name a run with"),
        ({"checkpoints": (), "overrides": ["trainer.save_freq=-1"]}, {}, "trainer.save_freq=-1: the run kept no check"),
        ({}, {"more": ("--seeds", 3)}, "--seeds=3: with so few seeds nothing can be said: 2 arms take 4 at least."),
        ({}, {"more": ("--until", 9)}, "--until=9: the run itself shows it at step 10. Give 10 or more."),
        ({}, {"more": ("--rule", "entropy collapse")}, "--rule=entropy collapse: the run does not meet a rule of this"),
        ({"overrides": [COSINE, f"{LAST}=40"]}, {}, "--until=13: the learning rate depends on the last step, which"),
        ({}, {"arm": "lr"}, "--arm=lr: must be a name of its own, a colon and overrides"),
        ({}, {"arm": "unchanged: data.shuffle=false"}, "unchanged is the first arm's name"),
        ({}, {"arm": f"same: {LR}=1e-6"}, "--arm same=" + LR + "=1e-6: the run has these values already"),
        ({}, {"arm": "seed: data.seed=4"}, "--arm seed=data.seed=4: the run has these values already, or no result"),
        ({}, {"arm": f"typo: {LR}x=1e-7"}, "does not compose: Could not override"),
        ({}, {"arm": f"decay: {LR[:-2]}weight_decay=0"}, "verl's resume puts the checkpoint's value over"),
        ({}, {"arm": "many: +recipe=reversal/base"}, "--arm many=+recipe=reversal/base: it also changes"),
        ({}, {"arm": "many: model_engine=megatron"}, "--arm many=model_engine=megatron: does not compose: Could not"),
        ({"overrides": ["+async_training.x=1"]}, {}, "async_training: verl's fully asynchronous main"),
        ({"overrides": ["+data.hf_token=hf_abcdefghijklmnopqrstuvwxyzabcdefgh"]}, {}, "hides it as a credential"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_key_value_and_what_to_do(failing, given, words, said):
    folder = failing(*given.get("overrides", ()), **{key: of for key, of in given.items() if key != "overrides"})
    arms = ("--arm", words["arm"]) if "arm" in words else ARMS
    refused = blame(folder, *words.get("more", ()), code=1, arms=arms, start=words.get("start", FROM))
    assert said.format(run=folder, verl=metadata.version("verl")) in refused
    assert not (folder.parent / "plan").exists()


def words_of_page(command):
    """The words of a command of clipx on the page of planted causes."""
    page = (ROOT / "docs/results/blame.md").read_text().replace("\\\n", "")
    (line,) = [line for line in page.splitlines() if f"clipx {command} " in line]
    return shlex.split(line.partition("clipx ")[2])


def test_the_committed_run_is_planned_as_its_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    said = clipx(*words_of_page("blame"), "--out", tmp_path / "plan", "--dry-run")
    assert "2 arms with 4 seeds, 7 steps each: 56 steps" in said and said.count("env VERL_FILE_LOGGER_PATH=") == 8
    record = (ROOT / "docs/results/runs/blame/rate-seed50/failing/metrics.run.json").read_text()
    assert not re.search(r'"/(?!tmp/ray/)', record), "a path of the machine that made it"


def test_the_page_has_the_table_that_the_kept_answers_give():
    printed = subprocess.run(
        [sys.executable, ROOT / "benchmarks/blame_faults.py", "table"], capture_output=True, text=True
    )
    rows = printed.stdout.splitlines()
    assert len(rows) > 2 and printed.stdout in (ROOT / "docs/results/blame.md").read_text(), printed.stderr
