"""A plan of reruns: which run, from which checkpoint, until when, by which rule, with which arms and seeds."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from verl_clipx.base.method import NODE
from verl_clipx.base.refusal import ABSENT, Refusal
from verl_clipx.common.command_line import installed_version
from verl_clipx.common.files import read_json_object, write_json, write_text
from verl_clipx.common.run_files import LOG_VARIABLE, METRICS, STEP_FOLDER
from verl_clipx.common.statistics.comparison import least_seeds
from verl_clipx.diagnose.blame.configuration import base_of, compose_arms, keys_of
from verl_clipx.diagnose.diagnosis import diagnose
from verl_clipx.diagnose.rule import LASTING, Kind, Onset, Rule
from verl_clipx.runs.folder import RunFolder, read_run
from verl_clipx.runs.run import Run

UNCHANGED, MAIN = "unchanged", "python -m verl.trainer.main_ppo"
SEEDS = ("data.seed", "actor_rollout_ref.actor.data_loader_seed", "actor_rollout_ref.rollout.seed")
OPTIMIZER = "actor_rollout_ref.actor.optim"
RATES = {"actor": f"{OPTIMIZER}.lr", "critic": "critic.optim.lr"}
# Of every rerun: no checkpoints, and nothing that writes where the run wrote.
FIXED = (
    *("trainer.save_freq=-1", "trainer.resume_mode=resume_path", "trainer.del_local_ckpt_after_load=false"),
    *("trainer.logger=[console,file]", "trainer.val_before_train=false", "trainer.default_hdfs_dir=null"),
    *("trainer.rollout_data_dir=null", "trainer.validation_data_dir=null"),
)


class Rerun(NamedTuple):
    """A rerun: its arm, its folder, and its words after the launcher's."""

    arm: str
    folder: Path
    words: list[str]


@dataclass(frozen=True)
class Plan:
    """A plan, as its file has it.

    Args:
        run, checkpoint, step: the failed run, verl's folder from which reruns go on, and its step.
        rule, evidence, onset: the rule of diagnose that the run meets, what shows it, and from which step on.
        until, seeds: the last step of a rerun, and the seeds of every arm.
        arms: name to words; the first is the unchanged run.
        configurations: name to what verl's main gets besides an arm's words, seeds and places, in YAML.
        rates: name to the factors of its learning rates by verl's role, if it changes any.
    """

    run: str
    checkpoint: str
    step: int
    rule: str
    evidence: str
    onset: int
    until: int
    seeds: list[int]
    arms: dict[str, list[str]]
    configurations: dict[str, str]
    rates: dict[str, dict[str, float]]
    launcher: list[str]

    def checkpoint_of(self, arm: str, out: Path) -> Path:
        """Returns the checkpoint that an arm goes on from: the run's, or a copy with other learning rates."""
        copy = (out / f"{arm}-checkpoint" / Path(self.checkpoint).name).absolute()
        return copy if self.rates[arm] else Path(self.checkpoint)

    def reruns(self, out: Path) -> list[Rerun]:
        """Returns all reruns in the order in which they are made: every arm has a seed before any has the next one."""
        reruns = []
        for seed in self.seeds:
            for arm, words in self.arms.items():
                folder = (out / f"{arm}-seed{seed}").absolute()
                own = [f"--config-dir={out.absolute()}", f"--config-name={base_of(words)}", *words]
                own += [f"trainer.experiment_name={folder.name}", *(f"++{key}={seed}" for key in SEEDS)]
                places = {"trainer.default_local_dir": folder / "checkpoints", "hydra.run.dir": folder}
                places |= {"trainer.resume_from_path": self.checkpoint_of(arm, out)}
                reruns.append(Rerun(arm, folder, [*own, *(f"{key}='{value}'" for key, value in places.items())]))
        return reruns

    def shell_line(self, rerun: Rerun) -> str:
        """Returns the command of a rerun as a shell takes it."""
        log = shlex.quote(f"{LOG_VARIABLE}={rerun.folder / METRICS}")
        return f"env {log} {shlex.join([*self.launcher, *rerun.words])}"

    def keep(self, out: Path) -> None:
        """Writes the plan before its first rerun; raises Refusal if the folder has reruns of another one."""
        path, content = out / "plan.json", asdict(self)
        before = read_json_object(path, {}, "choose another folder by --out") if path.exists() else content
        changed = next((key for key in content if before.get(key) != content[key]), None)
        if changed is not None and any(out.glob("*-seed*")):
            old, new = (shorten(f"{of.get(changed)}", 80) for of in (before, content))
            reason = f"its reruns were planned with {changed} {old}, now it is {new}"
            raise Refusal("--out", str(out), reason, "Give the options of before, or another folder.")
        write_json(path, content)
        for name, text in self.configurations.items():
            write_text(out / f"{name}.yaml", text)


def make_plan(
    path: Path,
    step: int,
    arms: Sequence[str],
    *,
    rule: str | None = None,
    until: int | None = None,
    seeds: int | None = None,
    common: Sequence[str] = (),
    launcher: str | None = None,
) -> Plan:
    """Plans the reruns of a run from the checkpoint of a step; arguments as for `clipx blame`.

    Raises:
        Refusal: key, value and what to do.
        FileNotFoundError, ValueError: the run cannot be read.
    """
    run, named = read_run(path), {UNCHANGED: [], **arms_of(arms)}
    check_origin(path, run)
    onset, chosen = failure_of(run, rule)
    if step >= onset.step:
        raise Refusal("--from", step, f"{chosen.name} begins at step {onset.step}", "Name a checkpoint before it.")
    said = int(next(at for at in run.log.index if at >= onset.step and chosen.onset(until_step(run, at))))
    if until is not None and until < said:
        raise Refusal("--until", until, f"the run itself shows it at step {said}", f"Give {said} or more.")
    fewest = least_seeds(len(arms))
    if seeds is not None and seeds < fewest:
        reason = f"with so few seeds nothing can be said: {len(arms)} arms take {fewest} at least"
        raise Refusal("--seeds", seeds, reason, "Give more, or leave it out.")
    until, first = until or said + LASTING, (run.seed or 0) + 1
    checkpoint = checkpoint_of(path, run, step).absolute()
    common = [*common, *FIXED, f"trainer.total_training_steps={until}"]
    configurations, values = compose_arms(run.configuration, named, common)
    before = values[UNCHANGED]
    check_schedule(run.configuration.get("trainer.total_training_steps"), until, before)
    roles = [(role, key) for role, key in RATES.items() if (checkpoint / role).is_dir()]
    return Plan(
        *(str(path.absolute()), str(checkpoint), step),
        *(chosen.name, onset.evidence, onset.step, until, [*range(first, first + (seeds or fewest))], named),
        configurations,
        {
            arm: {role: of[key] / before[key] for role, key in roles if of[key] != before[key]}
            for arm, of in values.items()
        },
        shlex.split(launcher or MAIN),
    )


def arms_of(given: Sequence[str]) -> dict[str, list[str]]:
    """Reads arms, `NAME: OVERRIDE …`, by name; raises Refusal."""
    arms: dict[str, list[str]] = {}
    for text in given:
        name, _, words = text.partition(":")
        if not words.split() or not name.isidentifier() or name in (UNCHANGED, *arms):
            reason = f"must be a name of its own, a colon and overrides; {UNCHANGED} is the first arm's name"
            raise Refusal("--arm", text, reason, f"Write --arm 'lr: {OPTIMIZER}.lr=3e-7'.")
        arms[name] = words.split()
        # The checkpoint has no state of another loss's bounds.
        if NODE in keys_of(arms[name]) and f"+{NODE}=observe" not in arms[name]:
            arms[name].append(f"{NODE}.missing_state=fresh")
    return arms


def check_origin(path: Path, run: Run) -> None:
    """Refuses a run that cannot be trained again here as it was."""
    if "trainer.save_freq" not in run.configuration:
        advice = "Name a run with a clipx node (+clipx=observe will do), or one with Hydra's record of it."
        raise Refusal(str(path), ABSENT, "nothing says what the run trained", advice)
    if any(key.startswith("async_training.") for key in run.configuration):
        reason = "verl's fully asynchronous main trained this run"
        raise Refusal("async_training", ABSENT, reason, f"Name one of {MAIN}.")
    for name in ("verl", "verl-clipx"):
        if run.versions.get(name, here := installed_version(name)) != here:
            reason = f"so says the run's record, and {here} is installed: it may read and train otherwise"
            raise Refusal(f"versions.{name}", run.versions[name], reason, f"Install {name}=={run.versions[name]}.")


def failure_of(run: Run, name: str | None) -> tuple[Onset, Rule]:
    """Returns the onset of what counts as failed, and its rule; raises Refusal if the run does not meet it."""
    met = {one.rule.name: one for one in diagnose(run)}
    known = f"The run meets: {', '.join(met) or 'no rule'}."
    if name is not None and name not in met:
        raise Refusal("--rule", name, "the run does not meet a rule of this name", known)
    failures = [name] if name else [of for of, one in met.items() if one.rule.kind is not Kind.REMARK]
    if not failures:
        reason = "clipx diagnose finds no fact and no trend in its log: nothing failed"
        raise Refusal("--rule", ABSENT, reason, f"Name what counts as failed. {known}")
    return met[failures[0]].onset, met[failures[0]].rule


def until_step(run: Run, step: int) -> Run:
    """Returns a run as it was after a step."""
    before = {key: [at for at in steps if at <= step] for key, steps in run.not_finite.items()}
    return replace(run, log=run.log.loc[:step], not_finite={key: at for key, at in before.items() if at})


def checkpoint_of(path: Path, run: Run, step: int) -> Path:
    """Returns the folder of a run's checkpoint; raises Refusal if it is not there, or was not written to its end."""
    folder = path if path.is_dir() else RunFolder(path).log.parent
    recorded = Path(str(run.configuration.get("trainer.default_local_dir")))
    places = [place for place in (folder / "checkpoints", folder / recorded, recorded) if place.is_dir()]
    there = {one.name: one for place in places for one in place.iterdir() if STEP_FOLDER.fullmatch(one.name)}
    checkpoint = there.get(f"global_step_{step}")
    # verl writes the place in the data last, and its rotation removes what is in actor.
    if checkpoint and (checkpoint / "data.pt").exists() and any((checkpoint / "actor").glob("*")):
        return checkpoint
    saves = run.configuration["trainer.save_freq"]
    if not there and saves <= 0:
        raise Refusal("trainer.save_freq", saves, "the run kept no checkpoints", "Train again with one every N steps.")
    reason = f"{places[-1] if places else recorded} has no whole checkpoint of this step"
    advice = f"There are: {', '.join(sorted(there))}." if there else "Put the run's checkpoints there."
    raise Refusal("--from", step, reason, advice)


def check_schedule(total: int | None, until: int, values: Mapping[str, Any]) -> None:
    """Refuses a last step that would change the learning rates of the steps before."""
    warms_up = values[f"{OPTIMIZER}.lr_warmup_steps"] <= 0 < values[f"{OPTIMIZER}.lr_warmup_steps_ratio"]
    if until != total and (warms_up or values[f"{OPTIMIZER}.lr_scheduler_type"] != "constant"):
        reason = f"the learning rate depends on the last step, which was {total or 'that of the data'}"
        raise Refusal("--until", until, reason, "Give that step.")
