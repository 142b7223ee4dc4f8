"""The questions about what the arms were told to do, by what code, and from what: keys, versions, contents, start."""

import json
from collections.abc import Callable, Mapping, Sequence

from verl_clipx.analysis.certify.arms import Arms, Found, Verdict, decided, listed, missing_seeds, question
from verl_clipx.analysis.certify.settings import LOSS, compared_values, differing, matches
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.content import OF_COMMIT
from verl_clipx.run.kept_values import is_hash
from verl_clipx.run.keys import (
    CRITIC_MODEL_PATH,
    FACTS,
    LOSS_AGG_MODE,
    MODEL_PATH,
    RESUME_PATH,
    REWARD_FUNCTIONS,
    REWARD_MODELS,
    TRAINING_FILES,
    VALIDATION_FILES,
    further_files,
)
from verl_clipx.run.record import Content

REWARD_PATHS = tuple(f"{node}.path" for node in REWARD_FUNCTIONS)
# What every run needs, and those rollout engines that are packages of their own.
PACKAGES = ("verl", "torch", "transformers", "verl-clipx")
ENGINES = ("vllm", "sglang")
# What `--vary` calls the hash of the plugin's files, as the driver carried it to the workers.
OWN_FILES = f"{FACTS}.identity.package"
# A mean difference of probabilities up to which engines differ by rounding, and how often the one of another run is in
# the difference that is taken for more.
NEAR, FARTHER = 1e-3, 4
# How many characters of a hash tell two of them apart for a reader.
SHOWN = 8
# What a run without a checkpoint started from.
FROM_MODEL = "the model"


@question("the arms differ in nothing but what should differ", "the configuration", lambda run: run.configuration)
def differ_as_stated(arms: Arms) -> Found:
    """Do the arms differ in what should differ, and in nothing else?"""
    apart = between(arms, compared_values)
    wrong: list[str] = []
    for key, (first, second) in apart.items():
        if not matches(key, arms.vary or LOSS):
            wrong.append(in_words(key, first, second))
    if wrong and not arms.vary:
        wrong[-1] += " (what should differ beside the loss: --vary KEY)"
    varied = [*between(arms, values_besides), *apart]
    for pattern in arms.vary:
        if not any(matches(name, [pattern]) for name in varied):
            wrong.append(f"--vary {pattern}: the arms do not differ in it")
    if not apart and not arms.vary:
        wrong.append("the arms have one configuration: nothing is compared")
    as_stated = [name for name in varied if matches(name, arms.vary or LOSS)]
    return decided(wrong, f"in {listed(as_stated)}")


def in_words(key: str, first: str | None, second: str | None) -> str:
    """Says by a key's two values in JSON, None for unset, that they differ; of texts that no record keeps no more."""
    if any(is_hash(json.loads(value)) for value in (first, second) if value is not None):
        return f"{key} differs"
    return f"{key} is {first or 'unset'} and {second or 'unset'}"


def between(arms: Arms, values_of: Callable[[Run], Mapping[str, str]]) -> dict[str, tuple[str | None, str | None]]:
    """Returns what sets the arms apart: name to the value of each arm's first run, None where it lacks the name."""
    cut = len(arms.first)
    return {
        name: (values[0], values[cut])
        for name, values in differing(arms.runs, values_of).items()
        if {*values[:cut]} != {*values[cut:]}
    }


def values_besides(run: Run) -> dict[str, str]:
    """Returns what `--vary` may name beside the keys of the configuration that are compared: versions and contents."""
    contents = {key: content_of(run) for key, content_of in CONTENTS.items()}
    contents |= dict.fromkeys(REWARD_PATHS, run.record.reward)
    named = {key: content.hash or " ".join(content.paths) for key, content in contents.items()}
    named |= {key: run.record.files.get(key) or path for key, path in further_files(run.configuration).items()}
    started = {RESUME_PATH: start_of(run) or str(run.record.resumption.path)}
    return {name: value for name, value in (named | started | versions_of(run)).items() if value}


@question("the runs of an arm differ in seeds only", "the configuration", lambda run: run.configuration)
def differ_in_seeds_only(arms: Arms) -> Found:
    """Do the runs of an arm differ in their seeds only?"""
    names = {name for arm in arms.both for name in differing(arm, compared_values)}
    wrong = [f"the runs of one arm differ in {name}" for name in sorted(names)]
    if any(len({run.record.identity.get("function") for run in arm}) > 1 for arm in arms.both):
        wrong.append("the runs of one arm differ in the source of clipx.function")
    return decided(wrong, "no other key differs", missing_seeds(arms))


@question("one version of each package", "versions", lambda run: run.record.versions)
def same_versions(arms: Arms) -> Found:
    """Had all runs the same verl, torch, transformers, rollout engine, plugin, of one commit, and accelerators?"""
    wrong: list[str] = []
    unknown = [f"the version of {package} in {run.name}" for run in arms.runs for package in missing_packages(run)]
    for name, values in differing(arms.runs, versions_of).items():
        known = sorted({value for value in values if value is not None})
        if matches(name, arms.vary):
            continue
        if len(known) > 1:
            wrong.append(f"{name}: {' and '.join(known)}")
        else:
            lacking = [run.name for run, value in zip(arms.runs, values, strict=True) if value is None]
            unknown.append(f"{name} in {listed(lacking)}")
    right = ", ".join(f"{name} {version}" for name, version in arms.runs[0].record.versions.items())
    return decided(wrong, right, unknown)


def versions_of(run: Run) -> dict[str, str]:
    """Returns a run's versions, the plugin's commit and hash, and the kinds of accelerators, named as for `--vary`."""
    named = {f"versions.{package}": version for package, version in run.record.versions.items()}
    named |= {"commit": run.record.commit, OWN_FILES: run.record.identity.get("package")}
    named["machines.accelerators"] = ", ".join(run.record.machines.accelerators)
    return {name: str(value) for name, value in named.items() if value}


def missing_packages(run: Run) -> list[str]:
    """Returns the packages that a run needed and whose version its record lacks."""
    needed = list(PACKAGES)
    if run.record.rollout.name in ENGINES:
        needed.append(run.record.rollout.name)
    return [package for package in needed if not run.record.versions.get(package)]


def model_of(run: Run) -> Content:
    return run.record.model


def critic_of(run: Run) -> Content:
    return run.record.critic


def data_of(run: Run) -> Content:
    return run.record.data


def validation_of(run: Run) -> Content:
    return run.record.validation


# From the key of what a run reads to its content in the record.
CONTENTS: dict[str, Callable[[Run], Content]] = {
    MODEL_PATH: model_of,
    CRITIC_MODEL_PATH: critic_of,
    TRAINING_FILES: data_of,
    VALIDATION_FILES: validation_of,
}


@question("one model", "the configuration", lambda run: run.configuration)
def same_model(arms: Arms) -> Found:
    """Had all runs the same model and tokenizer, and the same critic if there is one?"""
    with_critic = any(run.record.estimator == "gae" for run in arms.runs)
    return same_contents(arms, [MODEL_PATH, CRITIC_MODEL_PATH] if with_critic else [MODEL_PATH])


@question("one set of data", "the configuration", lambda run: run.configuration)
def same_data(arms: Arms) -> Found:
    """Did all runs read the same files, to train on and to validate on?"""
    return same_contents(arms, [TRAINING_FILES, VALIDATION_FILES])


def same_contents(arms: Arms, keys: Sequence[str]) -> Found:
    """Answers whether what the runs read has one content, by the key of each."""
    wrong: list[str] = []
    unknown: list[str] = []
    asked = [key for key in keys if not matches(key, arms.vary)]
    for key in asked:
        apart, lacking = compare_hashes(key, {run.name: CONTENTS[key](run).hash for run in arms.runs})
        wrong += apart
        unknown += lacking
    right = f"one hash of what {' and '.join(asked)} names" if asked else f"{' and '.join(keys)} should differ"
    return decided(wrong, right, unknown)


def compare_hashes(key: str, hashes: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """Returns what is wrong with the hashes of what a key names, and what is not recorded, as `decided` takes them.

    Args:
        hashes: run to hash.
    """
    wrong: list[str] = []
    unknown: list[str] = []
    by_kind: dict[bool, set[str]] = {True: set(), False: set()}
    for digest in filter(None, hashes.values()):
        by_kind[digest.startswith(OF_COMMIT)].add(digest.removeprefix(OF_COMMIT)[:SHOWN])
    for known in by_kind.values():
        if len(known) > 1:
            wrong.append(f"what {key} names has the hashes {listed(sorted(known))}")
    if all(by_kind.values()):
        unknown.append(f"whether the folder and the name on the hub that {key} names are one model")
    lacking = [name for name, digest in hashes.items() if not digest]
    if lacking:
        unknown.append(f"the hash of what {key} names in {listed(lacking)}")
    return wrong, unknown


@question("one content of each further file", "the configuration", lambda run: run.configuration)
def same_files(arms: Arms) -> Found:
    """Had all runs the same data class, tools, agent loops and further models, where the configuration names files?"""
    wrong: list[str] = []
    unknown: list[str] = []
    named = {run.name: further_files(run.configuration) for run in arms.runs}
    named_keys = sorted({key for files in named.values() for key in files if not matches(key, arms.vary)})
    for key in named_keys:
        without = [name for name, files in named.items() if key not in files]
        if without:
            wrong.append(f"{key} is not set in {listed(without)}")
            continue
        apart, lacking = compare_hashes(key, {run.name: run.record.files.get(key) for run in arms.runs})
        wrong += apart
        unknown += lacking
    right = f"one hash of what {listed(named_keys)} names" if named_keys else "the configuration names none"
    return decided(wrong, right, unknown)


@question("one start")
def same_start(arms: Arms) -> Found:
    """Did all runs start from the model, or from one checkpoint?"""
    starts = {run.name: start_of(run) for run in arms.runs}
    known = sorted({start for start in starts.values() if start is not None})
    lacking = [name for name, start in starts.items() if start is None]
    wrong: list[str] = []
    if len(known) > 1 and not matches(RESUME_PATH, arms.vary):
        wrong.append(f"runs started from {listed(known)}")
    if lacking and FROM_MODEL in known:
        wrong.append(f"{listed(lacking)} started from a checkpoint, other runs from the model")
    wrong += samplers_unlike(arms)
    unknown = [f"the hash of the checkpoint that {name} started from" for name in lacking]
    return decided(wrong, f"from {listed(known)}", unknown)


def samplers_unlike(arms: Arms) -> list[str]:
    """Returns that a sampler was much farther from its trainer than another in the first step, if it was.

    The weights are the same ones there, so that another precision, temperature or set of weights is the reason, unless
    the arms are to differ in more than the loss.
    """
    if any(not matches(pattern, LOSS) for pattern in arms.vary):
        return []
    distances = {run.name: run.values(keys.MISMATCH) for run in arms.runs}
    first = {name: float(values.iloc[0]) for name, values in distances.items() if len(values)}
    if len(first) < len(arms.runs):
        return []
    nearest = min(first, key=first.__getitem__)
    farthest = max(first, key=first.__getitem__)
    if first[farthest] < FARTHER * max(first[nearest], NEAR):
        return []
    far = f"{first[farthest]:.2g} in {farthest} and {first[nearest]:.2g} in {nearest}"
    return [f"the sampler's probabilities were {far} from the trainer's in the first step"]


def start_of(run: Run) -> str | None:
    """Returns what a run started from; None for a checkpoint whose hash it does not have."""
    if run.record.start.paths:
        digest = run.record.start.hash
        return None if digest is None else f"the checkpoint {digest[:SHOWN]}"
    first = min((step for step in run.log.index if step > 0), default=1)
    if first > 1 or run.record.resumption.is_named:
        return None
    return FROM_MODEL


@question("one denominator", LOSS_AGG_MODE, lambda run: run.record.aggregation)
def same_denominator(arms: Arms) -> Found:
    """Is the loss averaged in the same way in both arms?"""
    modes = sorted({run.record.aggregation for run in arms.runs})
    wrong: list[str] = []
    if len(modes) > 1 and not matches(LOSS_AGG_MODE, arms.vary):
        wrong.append(f"{LOSS_AGG_MODE} is {' and '.join(modes)}")
    return decided(wrong, ", ".join(modes))


@question("one reward", "the configuration", lambda run: run.configuration)
def same_reward(arms: Arms) -> Found:
    """Is the reward the same function, of a file with the same content?"""
    first = arms.runs[0]
    others = [run.name for run in arms.runs if reward_of(run, arms.vary) != reward_of(first, arms.vary)]
    if others:
        return Verdict.FAILED, f"another reward than in {first.name}: {listed(others)}"
    if not any(run.record.reward.paths for run in arms.runs):
        return Verdict.PASSED, "verl's own, chosen by the data's source"
    if any(matches(path, arms.vary) for path in REWARD_PATHS):
        return Verdict.PASSED, "the file should differ"
    hashes = {run.record.reward.hash for run in arms.runs}
    if len(hashes - {None}) > 1:
        return Verdict.FAILED, "the reward's file differs between runs"
    if None in hashes:
        return Verdict.UNKNOWN, "the hash of the reward's file: not recorded in some runs"
    return Verdict.PASSED, "one file by its hash"


def reward_of(run: Run, vary: Sequence[str]) -> dict[str, object]:
    """Returns a run's keys of the reward that should not differ, a path only by whether there is one."""
    nodes = (*REWARD_FUNCTIONS, *REWARD_MODELS)
    keys = {key: value for key, value in run.configuration.items() if key.startswith(nodes) and not matches(key, vary)}
    return {key: bool(value) if key in REWARD_PATHS else value for key, value in keys.items()}
