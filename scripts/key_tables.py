"""Prints the tables of docs/support.md and docs/swap.md about verl's keys: `python scripts/key_tables.py`."""

from verl_clipx.base.method import NODE
from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.run.keys import ROWS
from verl_clipx.run.takeover import verl_key


def refusal_list() -> str:
    """The list in docs/support.md of the keys that a run may be refused for."""
    refused = [row for row in ROWS.values() if row.refusal]
    return "\n".join(f"- `{row.key.removeprefix('actor_rollout_ref.')}`: {row.refusal.__doc__}" for row in refused)


def clip_key_table() -> str:
    """The table in docs/swap.md of what each of verl's clip keys becomes, by method."""
    takers: dict[tuple[str, str], list[str]] = {}
    for name in BUILT_IN:
        for parameter in METHODS[name].__dataclass_fields__:
            verl = verl_key(METHODS[name], parameter)
            if verl is not None:
                keys = " or ".join(f"`{key}`" for key in verl.names)
                takers.setdefault((keys, f"`{NODE}.{parameter}` = {verl.conversion.formula}"), []).append(name)
    lines = ["| verl's key, set to x | becomes | under |", "|---|---|---|"]
    lines += [
        f"| {keys} | {formula} | {', '.join(f'`{name}`' for name in names)} |"
        for (keys, formula), names in sorted(takers.items(), key=lambda row: row[0])
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(refusal_list(), clip_key_table(), sep="\n\n")
