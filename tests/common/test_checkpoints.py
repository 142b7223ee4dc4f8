"""Which of verl's checkpoints a run goes on from, when the newest is not whole or its step not logged.

Covers: files cut off and missing, verl's file of the last step cut off, another number of ranks, a step that was saved
and not logged; that nothing is said or changed where all is well. tests/driver/test_start.py has verl's door. Not
covered: bytes that changed within a file, which only reading all of it would tell; engines other than FSDP.
"""

import json
import shutil

import pytest
import torch

from verl_clipx.common.checkpoints import LATEST, choose_checkpoint, faults_of

KINDS = ("model", "optim", "extra_state")


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 2, 4 and 6 by two ranks, as verl lays them out, and a log up to step 6."""
    for step in (2, 4, 6):
        actor = tmp_path / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        for kind in KINDS:
            for rank in range(2):
                torch.save({"weight": torch.ones(100)}, actor / f"{kind}_world_size_2_rank_{rank}.pt")
        torch.save({}, actor.parent / "data.pt")
    (tmp_path / LATEST).write_text("6")
    log(tmp_path, 6)
    return tmp_path


def log(folder, last):
    (folder / "metrics.jsonl").write_text(
        "".join(f"{json.dumps({'step': n, 'data': {}})}\n" for n in range(1, last + 1))
    )


def choose(folder, nodes=1, ranks=2):
    said = choose_checkpoint(folder, folder / "metrics.jsonl", nodes=nodes, ranks_a_node=ranks)
    return said, (folder / LATEST).read_text()


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def test_a_whole_checkpoint_is_left_alone(folder):
    assert choose(folder) == ([], "6")


@pytest.mark.parametrize(
    "name", ["actor/model_world_size_2_rank_1.pt", "actor/optim_world_size_2_rank_0.pt", "data.pt"]
)
def test_the_one_before_is_taken_and_both_are_named(folder, name):
    cut(folder / "global_step_6" / name)
    (broken, chosen), named = choose(folder)
    assert broken == f"{folder}/global_step_6 is not whole ({name} is cut off)" and named == "4"
    assert chosen == f"the run goes on from {folder}/global_step_4"


def test_what_is_missing_is_named_where_all_files_must_be_here(folder):
    (folder / "global_step_6" / "actor" / "model_world_size_2_rank_0.pt").unlink()
    assert faults_of(folder / "global_step_6", one_node=False) == []
    assert choose(folder)[0][0].endswith("(there is no actor/model_world_size_2_rank_0.pt)")


@pytest.mark.parametrize("text", ["", "6x"])
def test_verls_file_of_the_last_step_may_be_cut_off(folder, text):
    (folder / LATEST).write_text(text)
    said, named = choose(folder)
    assert named == "6" and "is not a whole number" in said[0]


def test_a_checkpoint_that_is_gone_is_no_fresh_start(folder):
    (folder / "global_step_6").rename(folder / "elsewhere")
    said, named = choose(folder)
    assert named == "4" and "which latest_checkpointed_iteration.txt names, is not there" in said[0]


def test_without_a_whole_one_the_run_stops(folder):
    for step in (2, 4, 6):
        cut(folder / f"global_step_{step}" / "actor" / "model_world_size_2_rank_0.pt")
    with pytest.raises(
        ValueError, match=r"global_step_6 is not whole .* start from scratch: trainer\.resume_mode=disable"
    ):
        choose(folder)


def test_another_number_of_ranks_stops(folder):
    with pytest.raises(ValueError, match=r"global_step_6 was saved by 2 ranks and this run has 8 \(trainer\.nnodes=2"):
        choose(folder, nodes=2, ranks=4)


def test_a_step_that_was_saved_and_not_logged_is_made_again_where_that_costs_only_it(folder):
    log(folder, 5)
    said, named = choose(folder)
    assert named == "6" and "its numbers are lost, its update is not" in said[0]
    (folder / "global_step_4").rename(folder / "global_step_5")
    said, named = choose(folder)
    assert named == "5" and "was saved, and the run ended before the step's line was in" in said[0]


@pytest.mark.parametrize("logged", [[], [0]], ids=["nothing", "the validation before training"])
def test_the_first_step_that_was_saved_and_not_logged_is_made_again_from_scratch(folder, logged):
    for step in (4, 6):
        shutil.rmtree(folder / f"global_step_{step}")
    (folder / "global_step_2").rename(folder / "global_step_1")
    (folder / LATEST).write_text("1")
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "data": {{}}}}\n' for step in logged))
    (said,) = choose_checkpoint(folder, folder / "metrics.jsonl", nodes=1, ranks_a_node=2)
    assert said.endswith("the run starts from scratch") and not (folder / LATEST).exists()


def test_a_log_that_ended_earlier_says_nothing_about_checkpoints(folder):
    log(folder, 3)
    assert choose(folder) == ([], "6")
