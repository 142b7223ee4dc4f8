"""What every preset sets and every table defines, as a hash each, in configurations.json, which
`python -m tests.papers.tables.configurations` writes.

Run it after a change of values that is meant, and look at the diff: a line a preset or table that changed.
"""

import json
from pathlib import Path
from typing import Any

from verl_clipx.common.files import hash_of_json
from verl_clipx.papers.tables.collect import hash_of_definition
from verl_clipx.papers.tables.definition import load_table, table_names
from verl_clipx.papers.tables.origins import is_wiring, read_origins
from verl_clipx.papers.tables.presets import preset_names

FILE = Path(__file__).with_suffix(".json")


def configurations() -> dict[str, str]:
    """By preset, the hash of what `clipx papers recipe show` shows; by table, that of its definition."""
    presets = {name: hash_of_json(_values(name), str) for name in preset_names()}
    return presets | {name: hash_of_definition(load_table(name)) for name in table_names()}


def _values(name: str) -> dict[str, Any]:
    return {key: origin.value for key, origin in read_origins(name).items() if not is_wiring(origin)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(configurations(), indent=0) + "\n")
