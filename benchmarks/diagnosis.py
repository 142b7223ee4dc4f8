"""What the rules of `clipx diagnose` find in logs that they were not fixed on.

Run: python benchmarks/diagnosis.py              every table; takes minutes
     python benchmarks/diagnosis.py --rules      only the list of rules in docs/reading.md
     python benchmarks/diagnosis.py --rule NAME  prints how many healthy logs meet a rule; writes nothing
     python benchmarks/diagnosis.py --has KEY    prints how many healthy logs have a metric or a key; writes nothing

Reads the logs under docs/results, of which benchmarks/known_faults.py and benchmarks/table_fill.py made those that are
kept apart. Writes the list of rules in docs/reading.md and the tables of docs/dev/diagnosis_evidence.md, each as soon
as it is made. A trend may warn while a run trains if no beginning of a healthy log met its rule.
"""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
import pandas
import typer

from verl_clipx.analysis.diagnose.diagnosis import diagnose, keys_missing_for, missing_in
from verl_clipx.analysis.diagnose.parting import find_parting
from verl_clipx.analysis.diagnose.rule import Kind, Rule
from verl_clipx.analysis.diagnose.rules import ROUNDING, RULES
from verl_clipx.analysis.diagnose.timeline import find_changes
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.floor import count_clipped_by_step
from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.run_log import not_finite_in, table_of, with_entropy
from verl_clipx.common.files import read_text, write_text
from verl_clipx.common.statistics.estimate import estimate_share
from verl_clipx.papers.tables.collect import read_configurations

DOCS = Path(__file__).parents[1] / "docs"
PAGE, LIST, RESULTS = DOCS / "dev/diagnosis_evidence.md", DOCS / "reading.md", DOCS / "results"
FAULTS, REVERSAL, VALIDATED = (RESULTS / "runs" / name for name in ("faults", "reversal", "validated"))
BEGIN, END = "<!-- from here on: benchmarks/diagnosis.py, {} -->\n", "<!-- up to here: {} -->\n"

COLLAPSED = "countdown_gppo_off"
COLUMNS = {
    "reward": keys.REWARD,
    "entropy": keys.ENTROPY,
    "kl": keys.KL,
    "clip_fraction_low": keys.CLIPPED_LOW,
    "clip_fraction_high": keys.CLIPPED_HIGH,
    "grad_norm": keys.GRADIENT_NORM,
    "response_length": keys.LENGTH,
}
# For these two rules were changed; but the last one's entropy did not collapse, so that there is nothing to find.
CHANGED_FOR = {
    f"{name}.jsonl.gz" for name in ("old_samples-seed31", "entropy_penalty-seed31", "entropy_penalty-seed32")
}
NOT_COUNTED = CHANGED_FOR | {"reward_for_a_letter-seed31.jsonl.gz"}
ALL_RULES = "**all rules together**"
# Logs that say how much rounding clips.
WITH_FLOOR = RESULTS / "runs/evidence_default"
# Made-up ones: how many of a kind, their steps, the updates of each, and the share of the tokens that rounding clips.
MADE_UP, STEPS, UPDATES, ROUNDED = 50, 30, 4, 0.002
TOKENS_OF_RESPONSE = 200
FOUR_UPDATES = {
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "data.train_batch_size": UPDATES,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "actor_rollout_ref.actor.ppo_epochs": 1,
}
# A finding that begins within so many steps of the fault is in time.
IN_TIME = 2
# By fault what it acts on first, of what the logs have.
TRIGGERS = {
    "no_reward": keys.REWARD,
    "nan_reward": "health/not_finite/rewards",
    "no_end": keys.CUT,
    "frozen_rollout": keys.MISMATCH,
    "rounded_rollout": keys.MISMATCH,
    "damaged_weights": keys.GRADIENT_NORM,
    "huge_advantages": keys.GRADIENT_NORM,
    "fast_learning": keys.KL,
}


class Trial(NamedTuple):
    """What the rules said of a run with a known fault.

    Args:
        since: the first step of the fault; None: it has none.
        onsets: by expected rule, the onset that it named; None: it did not find anything.
        false: findings that the fault does not explain.
    """

    name: str
    seed: int
    since: int | None
    onsets: dict[str, int | None]
    false: dict[str, int]


def run_of(log: pandas.DataFrame, configuration: dict[str, Any], name: str) -> Run:
    """A log as what the rules read."""
    return Run(name, with_entropy(log), configuration)


def fixed_on() -> dict[tuple[str, int], Run]:
    """The logs that thresholds were chosen on, by preset and seed."""
    steps = pandas.read_csv(RESULTS / "cpu_small_steps.csv")
    return {
        key: run_of(log.set_index("step")[[*COLUMNS]].rename(columns=COLUMNS), {}, f"{key[0]}-seed{key[1]}")
        for key, log in steps.groupby(["preset", "seed"])
    }


def controls() -> list[Run]:
    """The runs of the table reversal that were there when the rules were tried: six seeds of its controls."""
    rows = ("dppo_stale", "dppo_narrow_stale", "grpo_16", "grpo_narrow_16")
    names = {f"{row}-seed{seed}.jsonl.gz" for row in rows for seed in range(1, 7)}
    return [run for path, run in kept_runs(REVERSAL).items() if path.name in names]


@cache
def kept_runs(folder: Path) -> dict[Path, Run]:
    """The kept runs of a folder."""
    runs: dict[Path, Run] = {}
    for path in sorted(folder.glob("*.jsonl.gz")):
        kept = RunFolder(path)
        run = run_of(table_of(kept.rows), kept.record_content.get("configuration", {}), path.name)
        runs[path] = replace(run, not_finite=not_finite_in(kept.rows))
    return runs


def known_faults() -> dict[Path, Run]:
    """The runs of benchmarks/known_faults.py."""
    return kept_runs(FAULTS) | kept_runs(VALIDATED)


def fell(run: Run) -> int | None:
    """The first step whose reward is below a quarter of the best before."""
    reward = run.values(keys.REWARD)
    low = reward.index[reward < reward.cummax() / 4]
    return int(low[0]) if len(low) else None


def entropy_fell(run: Run) -> int | None:
    """The first step whose entropy is below a tenth of the first one's."""
    entropy = run.values(keys.ENTROPY)
    low = entropy.index[entropy < entropy.iloc[0] / 10]
    return int(low[0]) if len(low) else None


def try_rules(path: Path, run: Run) -> Trial:
    """What the rules say of a run of benchmarks/known_faults.py, beside what that page expected."""
    record = RunFolder(path).record_content
    onsets = {one.rule.name: one.onset.step for one in diagnose(run)}
    expected, since = record["expected"], record["since"]
    if expected and since is None:
        # Whether what is wrong with it ends in a collapse is in the log.
        since = entropy_fell(run) if expected == ["entropy collapse"] else fell(run)
        expected = expected if since is not None else []
    explained = {*expected, *record["also"]}
    # One rule when the faults were declared, as what is not finite is why an update is skipped.
    explained |= {"values that are not finite"} if "skipped updates" in explained else set()
    explained |= {"no learning signal"} if "few prompts teach, because samples score alike" in explained else set()
    explained |= {"sampler jumps away from the trainer"} if "mismatch of rollout and training" in explained else set()
    # The reward falls with the entropy, and a fall that is no collapse is a decline.
    falls = {"reward collapse", "entropy collapse"} & explained
    explained |= {"reward decline"} if falls else set()
    return Trial(
        record["name"],
        record["seed"],
        since if expected else None,
        {name: onsets.get(name) for name in expected},
        {name: step for name, step in onsets.items() if name not in explained},
    )


def faults_table(trials: list[Trial]) -> str:
    """What was found in time, by kind of fault; then each run in which it was not, or something else was."""
    late = [
        trial
        for trial in trials
        if trial.false or any(onset is None or abs(onset - trial.since) > IN_TIME for onset in trial.onsets.values())
    ]
    rest = {trial.name for trial in late}
    clear = dict.fromkeys(trial.name for trial in trials if trial.onsets and trial.name not in rest)
    seeds: dict[str, dict[str, list[str]]] = {}
    for trial in late:
        seeds.setdefault(_said_of(trial), {}).setdefault(trial.name, []).append(str(trial.seed))
    of_runs = (", ".join(f"`{name}` {' and '.join(of[name])}" for name in of) for of in seeds.values())
    others = "; ".join(f"{runs}: {said}" for runs, said in zip(of_runs, seeds, strict=True))
    return (
        f"In every run with one of these faults the expected finding began within {IN_TIME} steps of it, and there was "
        f"no other: {', '.join(clear)}.\n\nThe others (fault since → found since): {others}.\n"
    )


def _said_of(trial: Trial) -> str:
    parts = [f"{rule} {trial.since} → {'**missed**' if at is None else at}" for rule, at in trial.onsets.items()]
    parts += [f"{'besides ' * bool(parts)}{rule} ({at})" for rule, at in trial.false.items()]
    return ", ".join(parts)


def beginnings_of(run: Run) -> list[Run]:
    """What a run's log was after each of its steps."""
    return [
        replace(
            run,
            log=run.log.loc[:step],
            not_finite={key: [one for one in at if one <= step] for key, at in run.not_finite.items()},
        )
        for step in run.log.index
    ]


@cache
def false_alarms() -> dict[str, tuple[int, int]]:
    """By rule, the healthy logs of which a beginning meets it, the whole log included, and those with what it reads."""
    runs, counts, any_met = healthy_runs(), {}, set[int]()
    beginnings = [beginnings_of(run) for run in runs]
    for rule in RULES:
        met, having = alarms_of(rule, runs, beginnings)
        counts[rule.name] = (len(met), len(having))
        any_met.update(met)
    return counts | {ALL_RULES: (len(any_met), len(runs))}


def alarms_of(rule: Rule, runs: list[Run], beginnings: list[list[Run]]) -> tuple[list[int], list[int]]:
    """The places of the runs of which a beginning meets a rule, and of those that have what it reads."""
    having = [index for index, run in enumerate(runs) if not keys_missing_for(rule, run)]
    return [index for index in having if _meets(rule, beginnings[index])], having


def _meets(rule: Rule, beginnings: list[Run]) -> bool:
    return any(rule.onset(run) is not None for run in beginnings)


def alarms_table(counts: dict[str, tuple[int, int]]) -> str:
    """A line for each share of healthy logs of which a beginning meets a rule, and the rules with that share."""
    rules: dict[tuple[int, int], list[str]] = {}
    for rule in RULES:
        rules.setdefault(counts[rule.name], []).append(rule.name + " (heuristic)" * rule.heuristic)
    rules[counts[ALL_RULES]] = [ALL_RULES]
    return "".join(f"- {alarms} of {logs}: {'; '.join(names)}\n" for (alarms, logs), names in rules.items())


def summary(found: list[Trial], healthy: dict[str, list[Run]]) -> str:
    """How often the rules were right, with exact intervals."""
    pairs = [(one.since, onset) for one in found for onset in one.onsets.values()]
    known = [onset - since for since, onset in pairs if onset is not None]
    of_faulty = [one for one in found if one.onsets]
    kinds = {one.name: True for one in of_faulty}
    for one in of_faulty:
        kinds[one.name] &= None not in one.onsets.values()
    rows = [
        ("expected findings made", [onset is not None for _, onset in pairs]),
        ("kinds of faults of which none was missed", list(kinds.values())),
        (
            f"of the findings made, begun within {IN_TIME} steps of the fault",
            [abs(delay) <= IN_TIME for delay in known],
        ),
        ("runs with a fault that had another finding too", [bool(one.false) for one in of_faulty]),
    ]
    rows.append(
        (
            "runs of benchmarks/known_faults.py without a fault that had a finding",
            [bool(one.false) for one in found if not one.onsets],
        )
    )
    rows += [(f"{name} that had a finding", [bool(diagnose(run)) for run in runs]) for name, runs in healthy.items()]
    return counted(rows)


@cache
def healthy_runs() -> list[Run]:
    """All healthy logs: those that thresholds were fixed on, and those kept apart."""
    runs = [run for (preset, _), run in fixed_on().items() if preset != COLLAPSED]
    runs += controls()
    return runs + [run for path, run in known_faults().items() if not RunFolder(path).record_content["expected"]]


def counted(rows: list[tuple[str, list[bool]]]) -> str:
    """A table of how often something is so, with exact intervals."""
    lines = ["| counted | result | exact 95 % interval |", "|---|---|---|"]
    for what, flags in rows:
        interval = estimate_share(sum(flags), len(flags))
        percents = f"{100 * interval.low:.0f} to {100 * interval.high:.0f} %"
        lines.append(f"| {what} | {sum(flags)} of {len(flags)} | {percents} |")
    return "\n".join(lines) + "\n"


def runs_with_floor() -> list[Run]:
    """The runs that chose the learning rates of docs/results/protocol_default.md and that the rule on rounding reads.

    They compute in float32.
    """
    configurations = read_configurations(WITH_FLOOR)
    folders = [RunFolder(path) for path in sorted((WITH_FLOOR / "tuning").rglob("*.jsonl.gz"))]
    runs = [
        run_of(table_of(kept.rows), configurations[kept.record_content["config_hash"]], kept.path.name)
        for kept in folders
    ]
    return [run for run in runs if len(count_clipped_by_step(run))]


def made_up_clipping(tokens: int, times: float, generator: numpy.random.Generator) -> Run:
    """A log in which rounding clips a share of the tokens of each update.

    Responses clip together: the share of each response is drawn, from a distribution as wide as its mean.

    Args:
        tokens: of an update.
        times: how many times as many tokens the updates after the first clip; at 1 all of it is rounding.
    """
    responses = tokens // TOKENS_OF_RESPONSE

    def clipped(share: float) -> float:
        shares = generator.exponential(share, size=(STEPS, responses)).clip(max=1)
        return generator.binomial(TOKENS_OF_RESPONSE, shares).sum(1) / tokens

    first = clipped(ROUNDED)
    later = sum(clipped(times * ROUNDED) for _ in range(UPDATES - 1))
    log = {
        keys.FLOOR_LOW: first,
        keys.FLOOR_HIGH: 0.0,
        keys.CLIPPED_LOW: (first + later) / UPDATES,
        keys.CLIPPED_HIGH: 0.0,
        keys.FLOOR_TOKENS.replace("*", "0"): float(tokens),
    }
    return run_of(pandas.DataFrame(log, index=range(1, STEPS + 1)), FOUR_UPDATES, "made up")


def rounding_table() -> str:
    """How often the rule on rounding is met: in kept runs, and in made-up ones by what their clipping is."""
    (rule,) = [rule for rule in RULES if rule.name == ROUNDING]
    rows = [("runs in float32", [rule.onset(run) is not None for run in runs_with_floor()])]
    generator = numpy.random.default_rng(0)
    for tokens in (2_000, 20_000, 200_000):
        for times in (1, 1.5, 2, 4):
            runs = [made_up_clipping(tokens, times, generator) for _ in range(MADE_UP)]
            rows.append(
                (
                    f"made-up logs, {tokens:,} tokens an update: clipped {times:g} times as much",
                    [rule.onset(run) is not None for run in runs],
                )
            )
    return counted(rows)


def timeline_table() -> str:
    """How often the timeline has a change in healthy logs, and the trigger of a known fault in time."""
    healthy, known = healthy_runs(), {run.name for run in controls()}
    others = [run for run in kept_runs(REVERSAL).values() if run.name not in known]
    by_setting: dict[str, list[Run]] = {}
    for run in [*healthy, *others]:
        by_setting.setdefault(run.name.rpartition("-seed")[0], []).append(run)
    pairs = [pair for runs in by_setting.values() for pair in itertools.combinations(runs, 2)]
    kept = [(RunFolder(path).record_content, run) for path, run in kept_runs(FAULTS).items()]
    of_seed = {record["seed"]: run for record, run in kept if record["name"] == "healthy_grpo_4"}
    seen = [_seen(record, run, of_seed[record["seed"]]) for record, run in kept if record["name"] in TRIGGERS]
    first, trigger, sooner, exactly = (list(flags) for flags in zip(*seen, strict=True))
    rows = [
        ("healthy logs with a change that stays", [_changes(run) for run in healthy]),
        ("other runs of the table reversal with one", [_changes(run) for run in others]),
        ("healthy logs with a spike", [_spikes(run) for run in healthy]),
        ("other runs of the table reversal with one, on which its size was fixed", [_spikes(run) for run in others]),
        ("pairs of seeds whose difference has a change", [bool(find_parting(*pair).changes) for pair in pairs]),
        (f"logs with a fault at a known step whose first change is within {IN_TIME} steps of it", first),
        (f"… in which what the fault acts on changes within {IN_TIME} steps", trigger),
        ("… and does so before any rule has a finding", sooner),
        ("… that leave the healthy run of their seed at exactly that step", exactly),
    ]
    return counted(rows)


def _changes(run: Run) -> bool:
    return any(one.stays for one in find_changes(run.log))


def _spikes(run: Run) -> bool:
    return not all(one.stays for one in find_changes(run.log))


def _seen(record: dict[str, Any], run: Run, healthy: Run) -> tuple[bool, bool, bool, bool]:
    steps = {change.key: change.step for change in find_changes(run.log) if change.stays}
    first = min(steps.values(), default=numpy.inf)
    trigger = steps.get(TRIGGERS[record["name"]], numpy.inf)
    in_time = abs(trigger - record["since"]) <= IN_TIME
    sooner = trigger < min((one.onset.step for one in diagnose(run)), default=numpy.inf)
    parts = find_parting(healthy, run).step == record["since"]
    return abs(first - record["since"]) <= IN_TIME, in_time, in_time and sooner, parts


def rule_list() -> str:
    """The names of the rules by their kinds, as in docs/reading.md."""
    lines = []
    for kind in Kind:
        lines.append(f"- **{kind.value.capitalize()}s**\n")
        lines += [f"    - {rule.name}\n" for rule in RULES if rule.kind is kind]
    return "".join(lines)


def tables() -> Iterator[tuple[str, str]]:
    """The parts of docs/dev/diagnosis_evidence.md with their names."""
    trials = [try_rules(path, run) for path, run in known_faults().items() if path.name not in NOT_COUNTED]
    yield "summary", summary(trials, {"runs of the table reversal": controls()})
    yield "faults", faults_table(trials)
    yield "false alarms", alarms_table(false_alarms())
    yield "rounding", rounding_table()
    yield "timeline", timeline_table()


def put(page: Path, name: str, part: str) -> None:
    """Writes a part of a page between its marks."""
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = read_text(page).partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        sys.exit(f"{page}: has no place for {name}.")
    write_text(page, f"{before}{begin}{part}{end}{after}")


def alarms_in_words(name: str) -> str:
    """Says how many healthy logs meet a rule."""
    rule = next((rule for rule in RULES if rule.name == name), None)
    if rule is None:
        sys.exit(f"There is no rule {name}; the rules are: {'; '.join(rule.name for rule in RULES)}.")
    runs = healthy_runs()
    met, having = alarms_of(rule, runs, [beginnings_of(run) for run in runs])
    return f"{name}: met in a beginning of {len(met)} of {len(having)} healthy logs that have what it reads."


def having_in_words(key: str) -> str:
    """Says how many healthy logs have a metric, in which * stands for anything, or a key of the configuration."""
    runs = healthy_runs()
    having = [run for run in runs if not missing_in(run, [key])]
    return f"{key}: in {len(having)} of {len(runs)} healthy logs."


def main(
    rules: Annotated[bool, typer.Option("--rules", help="Only write the list of rules in docs/reading.md.")] = False,
    rule: Annotated[str | None, typer.Option(help="Only print how many healthy logs meet this rule.")] = None,
    has: Annotated[str | None, typer.Option(help="Only print how many healthy logs have this metric or key.")] = None,
) -> None:
    """Writes the list of rules and the tables of the evidence, or prints one count."""
    if rule is not None:
        print(alarms_in_words(rule))
        return
    if has is not None:
        print(having_in_words(has))
        return
    put(LIST, "rules", rule_list())
    if not rules:
        for name, table in tables():
            put(PAGE, name, table)


if __name__ == "__main__":
    typer.run(main)
