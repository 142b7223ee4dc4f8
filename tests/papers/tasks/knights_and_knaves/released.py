"""Invented puzzles in the schema of AR-Lopti's released files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Ann: Bob is a knave. Bob: Ann is a knave and Cid is a knight. Cid: Ann is a knight. Were Ann a knave, Bob would be a
# knight and Cid, whose words were false, a knight; so Ann is a knight, Bob a knave, Cid a knight.
STATEMENTS = "(('lying', 1), ('and', ('lying', 0), ('telling-truth', 2)), ('telling-truth', 0))"
# The same with Bob first, worded otherwise.
REORDERED = "(('and', ('telling-truth', 2), ('lying', 1)), ('not', ('telling-truth', 0)), ('telling-truth', 1))"
# Nobody can say truly "I am a knave and": the first is a knave, so the second a knight, and the third's words are true.
OTHER = "(('and', ('lying', 0), ('lying', 1)), ('lying', 0), ('->', ('telling-truth', 0), ('lying', 1)))"


def make_record(statements: str, solution: tuple[bool, ...], names=("Ann", "Bob", "Cid")) -> dict:
    """Return a row of the release."""
    truth = "\n".join(
        f"({number}) {name} is a {'knight' if knight else 'knave'}"
        for number, (name, knight) in enumerate(zip(names, solution, strict=False), 1)
    )
    return {
        "quiz": f"You meet {', '.join(names[: len(solution)])}.",
        "statements": statements,
        "solution": list(solution),
        "solution_text_format": truth,
        "reward_model": {"style": "rule", "ground_truth": {"solution_text_format": truth}},
    }


TRAIN = [make_record(STATEMENTS, (True, False, True))]


def write_release(folder: Path, train: list[dict], test: list[dict]) -> Path:
    """Write both splits; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, records in (("train", train), ("test", test)):
        pq.write_table(pa.Table.from_pylist(records), folder / f"{split}.parquet")
    return folder
