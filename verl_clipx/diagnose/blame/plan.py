"""A plan of reruns: which run, from which checkpoint, until when, by which rule, with which arms and seeds."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

from verl_clipx.base.method import NODE
from verl_clipx.base.refusal import ABSENT, Refusal
from verl_clipx.common.command_line import installed_version
from verl_clipx.common.files import read_json_object, write_json
from verl_clipx.common.run_files import LOG_VARIABLE, METRICS, STEP_FOLDER
from verl_clipx.common.statistics.comparison import least_seeds
from verl_clipx.diagnose.blame.configuration import (
    DERIVED,
    check_arm,
    compose_run,
    composed_of,
    key_of,
    taken_over,
    without_loss,
    words_of,
)
from verl_clipx.diagnose.diagnosis import diagnose
from verl_clipx.diagnose.rule import LASTING, Kind, Onset, Rule
from verl_clipx.runs.folder import RunFolder, read_run
from verl_clipx.runs.run import Run
from verl_clipx.runs.sameness import nested

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
        words: name to all words but those of seeds and places.
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
    words: dict[str, list[str]]
    rates: dict[str, dict[str, float]]
    launcher: list[str]

    def checkpoint_of(self, arm: str, out: Path) -> Path:
        """The checkpoint that an arm goes on from: the run's, or a copy with other learning rates."""
        copy = (out / f"{arm}-checkpoint" / Path(self.checkpoint).name).absolute()
        return copy if self.rates[arm] else Path(self.checkpoint)

    def reruns(self, out: Path) -> list[Rerun]:
        """All reruns in the order in which they are made: every arm has a seed before any has the next one."""
        reruns = []
        for seed in self.seeds:
            for arm, words in self.words.items():
                folder = (out / f"{arm}-seed{seed}").absolute()
                places = {"trainer.default_local_dir": folder / "checkpoints", "hydra.run.dir": folder}
                places |= {"trainer.resume_from_path": self.checkpoint_of(arm, out)}
                own = [f"++{key}={seed}" for key in SEEDS] + [f"{key}='{value}'" for key, value in places.items()]
                reruns.append(Rerun(arm, folder, [*words, f"trainer.experiment_name={folder.name}", *own]))
        return reruns

    def shell_line(self, rerun: Rerun) -> str:
        """The command of a rerun as a shell takes it."""
        log = shlex.quote(f"{LOG_VARIABLE}={rerun.folder / METRICS}")
        return f"env {log} {shlex.join([*self.launcher, *rerun.words])}"

    def keep(self, out: Path) -> None:
        """Writes the plan before its first rerun; raises Refusal if the folder has reruns of another one."""
        path, content = out / "plan.json", asdict(self)
        before = read_json_object(path, {}, "choose another folder by --out") if path.exists() else content
        changed = next((key for key in content if before.get(key) != content[key]), None)
        if changed is not None and any(out.glob("*-seed*")):
            reason = f"its reruns were planned with {changed} {before.get(changed)}, now it is {content[changed]}"
            raise Refusal("--out", str(out), reason, "Give the options of before, or another folder.")
        write_json(path, content)


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
    if "trainer.save_freq" not in run.configuration:
        advice = "Name a run with a clipx node (+clipx=observe will do), or one with Hydra's record of it."
        raise Refusal(str(path), ABSENT, "nothing says what the run trained", advice)
    if any(key.startswith("async_training.") for key in run.configuration):
        raise Refusal(
            "async_training", ABSENT, "verl's fully asynchronous main trained this run", f"Name one of {MAIN}."
        )
    for name in ("verl", "verl-clipx"):
        if run.versions.get(name, here := installed_version(name)) != here:
            reason = f"so says the run's record, and {here} is installed: it may read and train otherwise"
            raise Refusal(f"versions.{name}", run.versions[name], reason, f"Install {name}=={run.versions[name]}.")
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
    words = words_of_arms(run, named, [*common, *FIXED, f"trainer.total_training_steps={until}"])
    rates = check_arms(run, named, words, until, checkpoint)
    return Plan(
        *(str(path.absolute()), str(checkpoint), step),
        *(chosen.name, onset.evidence, onset.step, until, [*range(first, first + (seeds or fewest))], named, words),
        *(rates, shlex.split(launcher or MAIN)),
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
    return arms


def failure_of(run: Run, name: str | None) -> tuple[Onset, Rule]:
    """The onset of what counts as failed, and its rule; raises Refusal if the run does not meet it."""
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
    """A run as it was after a step."""
    before = {key: [at for at in steps if at <= step] for key, steps in run.not_finite.items()}
    return replace(run, log=run.log.loc[:step], not_finite={key: at for key, at in before.items() if at})


def checkpoint_of(path: Path, run: Run, step: int) -> Path:
    """The folder of a run's checkpoint; raises Refusal if it is not there, or was not written to its end."""
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
    raise Refusal("--from", step, reason, f"There are: {', '.join(sorted(there)) or 'none'}.")


def words_of_arms(run: Run, arms: Mapping[str, Sequence[str]], common: Sequence[str]) -> dict[str, list[str]]:
    """All words of each arm but those of seeds and places."""
    base, words = words_of(run.configuration), {}
    for name, own in arms.items():
        chosen = [word for word in own if key_of(word) == NODE]
        # The checkpoint has no state of another loss's bounds.
        fresh = [f"{NODE}.missing_state=fresh"] * (bool(chosen) and not chosen[0].endswith("=observe"))
        words[name] = [*(without_loss(base) if chosen else base), *own, *fresh, *common]
    return words


def check_arms(
    run: Run, arms: Mapping[str, list[str]], words: Mapping[str, list[str]], until: int, checkpoint: Path
) -> dict[str, dict[str, float]]:
    """By arm the factors of its learning rates, if it changes any; raises Refusal if an arm is not as asked for."""
    composed = {name: compose_run(of) for name, of in words.items()}
    unchanged, recorded = composed[UNCHANGED], composed_of(OmegaConf.create(nested(run.configuration))).setting
    setting, leaves = unchanged.setting, unchanged.leaves
    ours = {key_of(word) for word in words[UNCHANGED] if not word.startswith("++")} | taken_over(run.configuration)
    for key in sorted((recorded.keys() | setting.keys()) - ours):
        if recorded.get(key) != setting.get(key) and not DERIVED.match(key):
            reason = f"so says the run's record, while a rerun would have {setting.get(key)}"
            raise Refusal(key, recorded.get(key), reason, "Look at the versions, or give the value by --with.")
    total, steps = run.configuration.get("trainer.total_training_steps"), leaves[f"{OPTIMIZER}.lr_warmup_steps"]
    warms_up = steps <= 0 < leaves[f"{OPTIMIZER}.lr_warmup_steps_ratio"]
    if until != total and (warms_up or leaves[f"{OPTIMIZER}.lr_scheduler_type"] != "constant"):
        reason = f"the learning rate depends on the last step, which was {total or 'that of the data'}"
        raise Refusal("--until", until, reason, "Give that step.")
    for name, own in arms.items():
        if name != UNCHANGED:
            check_arm(name, own, unchanged, composed[name])
    roles = [(role, key) for role, key in RATES.items() if (checkpoint / role).is_dir()]
    return {
        name: {role: of.leaves[key] / leaves[key] for role, key in roles if of.leaves[key] != leaves[key]}
        for name, of in composed.items()
    }
