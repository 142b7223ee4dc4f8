"""The questions about what the arms were told to do, by what code, and from what: keys, versions, contents, start."""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from verl_clipx.analysis.certify.arms import (
    Arms,
    Outcome,
    Verdict,
    decided,
    listed,
    question,
    unrecorded_second_runs,
)
from verl_clipx.analysis.certify.settings import LOSS, compared_values, differing, matches
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.content import COMMIT_PREFIX
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
# The packages that every run needs.
PACKAGES = ("verl", "torch", "transformers", "verl-clipx")
# The rollout engines that are packages of their own.
ENGINES = ("vllm", "sglang")
# What `--vary` calls the hash of the plugin's files, as the driver carried it to the workers.
OWN_FILES = f"{FACTS}.identity.package"
# Rounding explains a mean difference between the sampler's and the trainer's probabilities up to this one.
DIFFERENCE_BY_ROUNDING = 1e-3
# A run's mean difference is too large if it is at least this many times the smallest of all runs and at least this many
# times `DIFFERENCE_BY_ROUNDING`.
TIMES_TOO_LARGE = 4
# How many characters of a hash are shown: enough for a reader to tell two hashes apart.
SHOWN_CHARACTERS = 8
# What a run without a checkpoint started from.
FROM_MODEL = "the model"


@question(
    "the arms differ in nothing but what should differ",
    needs="the configuration",
    has=lambda run: run.configuration,
)
def differ_as_stated(arms: Arms) -> Outcome:
    """Do the arms differ in what should differ, and in nothing else?"""
    should_differ = arms.vary or LOSS
    differences = differences_between(arms, compared_values)
    wrong: list[str] = []
    for key, (first_value, second_value) in differences.items():
        if not matches(key, should_differ):
            wrong.append(describe_difference(key, first_value, second_value))
    if wrong and not arms.vary:
        # The advice is given once, after the last difference.
        last_difference = wrong.pop()
        wrong.append(f"{last_difference} (name what should differ beside the loss: --vary KEY)")
    differing_names = [*differences_between(arms, further_values), *differences]
    for pattern in arms.vary:
        if not any(matches(name, [pattern]) for name in differing_names):
            wrong.append(f"the arms do not differ in {pattern}, which --vary names")
    if not differences and not arms.vary:
        wrong.append("the arms have the same configuration, so that nothing is compared")
    as_stated = [name for name in differing_names if matches(name, should_differ)]
    return decided(wrong, right=f"in {listed(as_stated)}")


def describe_difference(key: str, first: str | None, second: str | None) -> str:
    """Return the message that the arms differ in a key.

    Args:
        key: the key of the configuration.
        first: its value in the first arm, in JSON; None if it is unset there.
        second: its value in the second arm, as `first`.

    Returns:
        The message, without the values where the record keeps only the hash of one.
    """
    for value in (first, second):
        if value is not None and is_hash(json.loads(value)):
            return f"{key} differs"
    return f"{key} is {first or 'unset'} and {second or 'unset'}"


def differences_between(
    arms: Arms, values_of: Callable[[Run], Mapping[str, str]]
) -> dict[str, tuple[str | None, str | None]]:
    """Return the values in which the arms differ.

    Args:
        arms: the two arms.
        values_of: returns the values of a run by their names.

    Returns:
        From each name whose values are not the same set in both arms to two values: that of the first arm's first run,
        and that of the second arm's first run. A value is None where the run lacks the name.
    """
    differences = {}
    runs_of_first = len(arms.first)
    for name, values in differing(arms.runs, values_of).items():
        first_values = values[:runs_of_first]
        second_values = values[runs_of_first:]
        if {*first_values} != {*second_values}:
            differences[name] = (first_values[0], second_values[0])
    return differences


def further_values(run: Run) -> dict[str, str]:
    """Return what `--vary` may name beside the keys of the configuration that are compared, by name.

    These are the hash of each thing that the run read, or its paths where the hash is not recorded; what the run
    started from; and its versions. Empty values are left out.
    """
    values: dict[str, str | None] = {}
    for key, content_of in CONTENTS.items():
        content = content_of(run)
        values[key] = content.hash or " ".join(content.paths)
    reward = run.record.reward
    for key in REWARD_PATHS:
        values[key] = reward.hash or " ".join(reward.paths)
    for key, path in further_files(run.configuration).items():
        values[key] = run.record.files.get(key) or path
    values[RESUME_PATH] = start_of(run) or str(run.record.resumption.path)
    values.update(versions_of(run))
    return {name: value for name, value in values.items() if value}


@question("the runs of an arm differ in seeds only", needs="the configuration", has=lambda run: run.configuration)
def differ_in_seeds_only(arms: Arms) -> Outcome:
    """Do the runs of an arm differ in their seeds only?"""
    differing_keys: set[str] = set()
    differs_in_function = False
    for arm in arms.pair:
        differing_keys.update(differing(arm, compared_values))
        functions = {run.record.identity.get("function") for run in arm}
        if len(functions) > 1:
            differs_in_function = True
    wrong = [f"the runs of one arm differ in {key}" for key in sorted(differing_keys)]
    if differs_in_function:
        wrong.append("the runs of one arm differ in the source of clipx.function")
    return decided(wrong, right="no other key differs", unknown=unrecorded_second_runs(arms))


@question("one version of each package", needs="versions", has=lambda run: run.record.versions)
def same_versions(arms: Arms) -> Outcome:
    """Did all runs have the same packages, the same commit of the plugin, and the same kinds of accelerators?"""
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
    """Return a run's versions, the plugin's commit and hash, and the kinds of accelerators.

    They have the names by which `--vary` takes them.
    """
    values = {f"versions.{package}": version for package, version in run.record.versions.items()}
    values["commit"] = run.record.commit
    values[OWN_FILES] = run.record.identity.get("package")
    values["machines.accelerators"] = ", ".join(run.record.machines.accelerators)
    return {name: str(value) for name, value in values.items() if value}


def missing_packages(run: Run) -> list[str]:
    """Return the packages that a run needed and whose version its record lacks."""
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


# From the key of what a run reads to the function that returns its content in the record.
CONTENTS: dict[str, Callable[[Run], Content]] = {
    MODEL_PATH: model_of,
    CRITIC_MODEL_PATH: critic_of,
    TRAINING_FILES: data_of,
    VALIDATION_FILES: validation_of,
}


@question("one model", needs="the configuration", has=lambda run: run.configuration)
def same_model(arms: Arms) -> Outcome:
    """Did all runs have the same model and tokenizer, and the same critic if there is one?"""
    compared_keys = [MODEL_PATH]
    if any(run.record.estimator == "gae" for run in arms.runs):
        compared_keys.append(CRITIC_MODEL_PATH)
    return same_contents(arms, compared_keys)


@question("one set of data", needs="the configuration", has=lambda run: run.configuration)
def same_data(arms: Arms) -> Outcome:
    """Did all runs read the same files, to train on and to validate on?"""
    return same_contents(arms, [TRAINING_FILES, VALIDATION_FILES])


def same_contents(arms: Arms, compared_keys: Sequence[str]) -> Outcome:
    """Decide whether what each key names has the same content in all runs; keys that `--vary` names are left out."""
    wrong: list[str] = []
    unknown: list[str] = []
    asked_keys = [key for key in compared_keys if not matches(key, arms.vary)]
    for key in asked_keys:
        hashes = [CONTENTS[key](run).hash for run in arms.runs]
        differences, missing = compare_hashes(key, arms.runs, hashes)
        wrong += differences
        unknown += missing
    if asked_keys:
        right = f"one hash of what {' and '.join(asked_keys)} names"
    else:
        right = f"{' and '.join(compared_keys)} should differ"
    return decided(wrong, right, unknown)


def compare_hashes(key: str, runs: Sequence[Run], hashes: Sequence[str | None]) -> tuple[list[str], list[str]]:
    """Compare the hashes of what a key names.

    Args:
        key: the key of the configuration.
        runs: the runs that are compared.
        hashes: the hash of each run, in their order; None where it is not recorded.

    Returns:
        Texts for the arguments `wrong` and `unknown` of `decided`.
    """
    wrong: list[str] = []
    unknown: list[str] = []
    # A name on the hub has the hash of a commit, a folder has the hash of its files. The two cannot be compared.
    hashes_of_commits: set[str] = set()
    hashes_of_files: set[str] = set()
    for digest in hashes:
        if not digest:
            continue
        shown = digest.removeprefix(COMMIT_PREFIX)[:SHOWN_CHARACTERS]
        if digest.startswith(COMMIT_PREFIX):
            hashes_of_commits.add(shown)
        else:
            hashes_of_files.add(shown)
    for comparable_hashes in (hashes_of_commits, hashes_of_files):
        if len(comparable_hashes) > 1:
            wrong.append(f"what {key} names has the hashes {listed(sorted(comparable_hashes))}")
    if hashes_of_commits and hashes_of_files:
        unknown.append(f"whether the folder and the name on the hub that {key} names are one model")
    lacking = [run.name for run, digest in zip(runs, hashes, strict=True) if not digest]
    if lacking:
        unknown.append(f"the hash of what {key} names in {listed(lacking)}")
    return wrong, unknown


@question("one content of each further file", needs="the configuration", has=lambda run: run.configuration)
def same_further_files(arms: Arms) -> Outcome:
    """Did each further file that the configuration names have the same content in all runs?

    Further files are those of data classes, tools, agent loops and further models (`run.keys.further_files`).
    """
    wrong: list[str] = []
    unknown: list[str] = []
    all_keys: set[str] = set()
    for run in arms.runs:
        all_keys.update(further_files(run.configuration))
    asked_keys = sorted(key for key in all_keys if not matches(key, arms.vary))
    for key in asked_keys:
        names_without_key = [run.name for run in arms.runs if key not in further_files(run.configuration)]
        if names_without_key:
            wrong.append(f"{key} is not set in {listed(names_without_key)}")
            continue
        hashes = [run.record.files.get(key) for run in arms.runs]
        differences, missing = compare_hashes(key, arms.runs, hashes)
        wrong += differences
        unknown += missing
    right = "the configuration names none"
    if asked_keys:
        right = f"one hash of what {listed(asked_keys)} names"
    return decided(wrong, right, unknown)


@question("one start")
def same_start(arms: Arms) -> Outcome:
    """Did all runs start from the model, or from the same checkpoint?"""
    known: set[str] = set()
    lacking: list[str] = []
    for run in arms.runs:
        start = start_of(run)
        if start is None:
            lacking.append(run.name)
        else:
            known.add(start)
    wrong: list[str] = []
    if len(known) > 1 and not matches(RESUME_PATH, arms.vary):
        wrong.append(f"runs started from {listed(sorted(known))}")
    if lacking and FROM_MODEL in known:
        wrong.append(f"{listed(lacking)} started from a checkpoint, other runs from the model")
    wrong += unlike_samplers(arms)
    unknown = [f"the hash of the checkpoint that {name} started from" for name in lacking]
    return decided(wrong, f"from {listed(sorted(known))}", unknown)


def unlike_samplers(arms: Arms) -> list[str]:
    """Compare how far each run's sampler was from its trainer in the first step.

    In the first step the trainers of all runs have the same weights. A run whose sampler is much farther away therefore
    samples with another precision or temperature, or its sampler did not get these weights.

    Returns:
        One message if the largest distance is too large beside the smallest; else an empty list. The list is also empty
        if the arms are to differ in more than the loss, and if not all runs logged the distance in the same first step.
    """
    if vary_more_than_loss(arms):
        return []
    distances: list[tuple[float, str]] = []
    first_steps: set[int] = set()
    for run in arms.runs:
        logged = run.values(keys.MISMATCH)
        if logged.empty:
            return []
        first_steps.add(logged.index[0])
        distances.append((float(logged.iloc[0]), run.name))
    if len(first_steps) > 1:
        return []
    smallest, name_of_nearest = min(distances, key=itemgetter(0))
    largest, name_of_farthest = max(distances, key=itemgetter(0))
    if largest < TIMES_TOO_LARGE * max(smallest, DIFFERENCE_BY_ROUNDING):
        return []
    return [
        "in the first step the mean distance between the sampler's probabilities and the trainer's was "
        f"{largest:.2g} in {name_of_farthest} and {smallest:.2g} in {name_of_nearest}"
    ]


def vary_more_than_loss(arms: Arms) -> bool:
    """Return whether `--vary` names something in which the arms differ and that is no key of the loss."""
    if not arms.vary:
        return False
    differing_names = {*differences_between(arms, further_values), *differences_between(arms, compared_values)}
    return any(matches(name, arms.vary) and not matches(name, LOSS) for name in differing_names)


def start_of(run: Run) -> str | None:
    """Return what a run started from, in words.

    None is returned for a checkpoint whose hash is not known: the record lacks it, or the run seems to have started
    from a checkpoint only because it names one or because its log begins after step 1.
    """
    if run.record.start.paths:
        digest = run.record.start.hash
        if digest is None:
            return None
        return f"the checkpoint {digest[:SHOWN_CHARACTERS]}"
    first_step = min((step for step in run.log.index if step > 0), default=1)
    if first_step > 1 or run.record.resumption.is_named:
        return None
    return FROM_MODEL


@question("one denominator", needs=LOSS_AGG_MODE, has=lambda run: run.record.aggregation)
def same_denominator(arms: Arms) -> Outcome:
    """Is the loss averaged in the same way in both arms?"""
    modes = sorted({run.record.aggregation for run in arms.runs})
    wrong: list[str] = []
    if len(modes) > 1 and not matches(LOSS_AGG_MODE, arms.vary):
        wrong.append(f"{LOSS_AGG_MODE} is {' and '.join(modes)}")
    return decided(wrong, ", ".join(modes))


@question("one reward", needs="the configuration", has=lambda run: run.configuration)
def same_reward(arms: Arms) -> Outcome:
    """Is the reward the same function with the same settings, from a file with the same content?"""
    reference = arms.runs[0]
    expected = select_reward_settings(reference, arms.vary)
    unlike = [run.name for run in arms.runs if select_reward_settings(run, arms.vary) != expected]
    if unlike:
        return Outcome(Verdict.FAILED, f"another reward than in {reference.name}: {listed(unlike)}")
    if not any(run.record.reward.paths for run in arms.runs):
        return Outcome(Verdict.PASSED, "verl's own, chosen by the data's source")
    if any(matches(path, arms.vary) for path in REWARD_PATHS):
        return Outcome(Verdict.PASSED, "the file should differ")
    hashes = {run.record.reward.hash for run in arms.runs}
    if len(hashes - {None}) > 1:
        return Outcome(Verdict.FAILED, "the reward's file differs between runs")
    if None in hashes:
        return Outcome(Verdict.UNKNOWN, "the hash of the reward's file: not recorded in some runs")
    return Outcome(Verdict.PASSED, "one file by its hash")


def select_reward_settings(run: Run, vary: Sequence[str]) -> dict[str, object]:
    """Return the keys of a run's reward that should not differ, with their values.

    In place of a path, the value is whether the path is set, because files are compared by their content.
    """
    nodes = (*REWARD_FUNCTIONS, *REWARD_MODELS)
    values = {}
    for key, value in run.configuration.items():
        if not key.startswith(nodes) or matches(key, vary):
            continue
        values[key] = bool(value) if key in REWARD_PATHS else value
    return values
