"""Prints what pages are made of: `python scripts/key_tables.py`.

docs/support.md has what has run where, and verl's keys that are refused; docs/swap.md what becomes of its clip keys;
docs/dev/testing.md the goals on a GPU; README.md and README.zh.md the devices.
"""

import sys
from pathlib import Path

from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.run import support
from verl_clipx.run.keys import ROWS
from verl_clipx.run.takeover import find_verl_key

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from gpu import failures, goal_table
from shared import table


def refusal_list() -> str:
    """The list in docs/support.md of the keys that a run may be refused for."""
    refused = [row for row in ROWS.values() if row.refusal]
    return "\n".join(f"- `{row.key.removeprefix('actor_rollout_ref.')}`: {row.refused_when}" for row in refused)


def clip_key_table() -> str:
    """The table in docs/swap.md of what each of verl's clip keys becomes, by method."""
    takers: dict[tuple[str, str], list[str]] = {}
    for name in BUILT_IN:
        for parameter in METHODS[name].__dataclass_fields__:
            verl = find_verl_key(METHODS[name], parameter)
            if verl is not None:
                keys = " or ".join(f"`{key}`" for key in verl.names)
                takers.setdefault((keys, f"`{NODE}.{parameter}` = {verl.conversion.formula}"), []).append(name)
    lines = ["| verl's key, set to x | becomes | under |", "|---|---|---|"]
    lines += [
        f"| {keys} | {formula} | {', '.join(f'`{name}`' for name in names)} |"
        for (keys, formula), names in sorted(takers.items(), key=lambda row: row[0])
    ]
    return "\n".join(lines)


def device_table() -> str:
    """The table in docs/support.md of each device's parts, and the lists of options that tests have run on it."""
    records = support.read_records(support.RESULTS)
    rows, lists, others, passed = [], {}, {}, support.passed_options()
    for record in records:
        for name, part in record["parts"].items():
            outcome = ": ".join(filter(None, [part["outcome"], ", ".join(failures(part))]))
            rows.append([record["device"], name, outcome, part["commit"][:8], part["date"]])
        options = support.options_of(record).items()
        lists[f"tests on {record['device']}"] = {name: of for name, of in options if of["outcome"] == support.PASSED}
        others |= {name: of for name, of in options if name not in passed}
    lists["no test"] = others
    tables = [f"**Run by {runner}:**\n\n{option_table(options)}" for runner, options in lists.items() if options]
    return "\n\n".join([table(["device", "part", "outcome", "commit", "date"], rows), *tables])


def option_table(options: dict[str, dict[str, str]]) -> str:
    """Options in alphabetical order, a row each, with their notes."""
    names = sorted(options, key=str.casefold)
    return table(["option", "note"], [[name, options[name].get("note", "")] for name in names])


def measured_goals() -> str:
    """The table in docs/dev/testing.md of the goals, with what each GPU has reached."""
    return goal_table([record for record in support.read_records(support.RESULTS) if record["kind"] == "cuda"])


def device_names() -> dict[str, str]:
    """The devices that something has run on, by the page that names them."""
    names = support.passed_devices()
    return {"README.md": ", ".join(names), "README.zh.md": "、".join(names).replace("CPUs", "CPU")}


if __name__ == "__main__":
    tables = (device_table(), refusal_list(), clip_key_table(), measured_goals(), *device_names().values())
    print(*tables, sep="\n\n")
