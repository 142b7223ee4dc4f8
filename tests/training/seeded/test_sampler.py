"""The order of rows whatever the order of arrival, verl's replay buffer built from the configuration, and the settings
that are refused. TransferQueue and verl's waiting are replaced. Not covered: a run (tests/end_to_end/test_resume.py).
"""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests.composition import composition
from tests.training.cpu.test_replay_buffer import build_replay_buffer
from verl_clipx.training.seeded import sampler as seeded_sampler
from verl_clipx.training.seeded.sampler import SeededReplayBuffer, row_order, seeded


def fields_of(index, seed):
    """The extra fields of a row, by which rows are ordered."""
    return {"prompt_index": index, "sampling_seed": seed}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # From each row's key to its prompt's index and its seed. By index, then sample, then output.
        ({"a_10_0": (12, 5), "a_2_1": (12, 6), "b_0_0": (3, 9), "a_2_0": (12, 6)}, "b_0_0 a_2_0 a_2_1 a_10_0"),
        # An index may be a text.
        ({"a_0_0": ("x-10", 1), "b_0_0": (7, 2), "c_0_0": ("w", 3)}, "b_0_0 c_0_0 a_0_0"),
        # Prompts with one index are ordered by seed and not mixed.
        ({"a_0_0": (0, 50), "b_0_0": (0, 40), "a_1_0": (0, 1), "b_1_0": (0, 60)}, "b_0_0 b_1_0 a_0_0 a_1_0"),
    ],
)
def test_rows_are_ordered_by_hand(rows, expected):
    keys = [*rows]
    order = row_order(keys, [fields_of(index, seed) for index, seed in rows.values()])
    assert [keys[row] for row in order] == expected.split()


def test_a_row_of_another_agent_loop_is_refused():
    with pytest.raises(ValueError, match=r"a_0_0 has no seed.*default_agent_loop.*agent_name"):
        row_order(["a_0_0"], [{"turn_scores": []}])


@pytest.fixture
def make_buffer(monkeypatch):
    """Returns a function that makes a replay buffer at which certain rows have arrived.

    The function takes the extra fields of each row by the row's key. It replaces verl's waiting and TransferQueue.
    """

    def make(rows: dict[str, dict]) -> SeededReplayBuffer:
        def return_all_rows(self, global_steps, partition_id, batch_size):
            # Each tag says which row it is of.
            tags = [{"row": key} for key in rows]
            return KVBatchMeta(partition_id=partition_id, keys=list(rows), tags=tags), {"metric": 1.0}

        def get_extra_fields(keys, partition_id, select_fields):
            assert (partition_id, select_fields) == ("train", ["extra_fields"])
            return {"extra_fields": [SimpleNamespace(data=rows[key]) for key in keys]}

        monkeypatch.setattr(ReplayBuffer, "sample", return_all_rows)
        monkeypatch.setattr(seeded_sampler.tq, "kv_batch_get", get_extra_fields)
        # Without __init__, which needs a configuration and which these tests do not need.
        return object.__new__(SeededReplayBuffer)

    return make


def test_tags_follow_their_rows_and_metrics_stay(make_buffer):
    buffer = make_buffer({"a_1_0": fields_of(2, 8), "b_0_0": fields_of(1, 7), "a_0_0": fields_of(2, 9)})
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert batch.keys == ["b_0_0", "a_0_0", "a_1_0"]
    assert [tag["row"] for tag in batch.tags] == batch.keys
    assert metrics == {"metric": 1.0}
    # A batch in which every sample failed passes.
    batch, _ = make_buffer({}).sample(global_steps=1, partition_id="val", batch_size=2)
    assert batch.keys == []


def build(*overrides):
    config = composition("actor_rollout_ref.rollout.name=vllm", *overrides)
    OmegaConf.resolve(config.trainer.v1.sampler)
    return build_replay_buffer(config)


@pytest.mark.slow
def test_verl_builds_its_own_buffer_with_ordered_rows_and_refuses_rollouts_of_earlier_weights():
    for refill_failed in (False, True):
        refills = f"trainer.v1.sampler.sync_refill_failed_groups={refill_failed}"
        seeded_buffer = build(refills, "+clipx/rollout=seeded")
        buffer_of_verl = build(refills)
        assert type(seeded_buffer).__name__ == "SeededReplayBuffer" and type(buffer_of_verl) is ReplayBuffer
        assert vars(seeded_buffer) == vars(buffer_of_verl) | {"sampler_kwargs": seeded_buffer.sampler_kwargs}
    message = r"clipx_rollout\.versions_old=3: must be 0; only training in one process"
    with pytest.raises(ValueError, match=message):
        build("+clipx/rollout=stale", "clipx_rollout.versions_old=3")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"trainer_mode": "colocate_async"}, r"trainer_mode=colocate_async: must be sync"),
        ({"trainer_config": {"parameter_sync_step": 2}}, r"parameter_sync_step=2: must be 1"),
        ({"filter_groups": {"enable": True}}, r"filter_groups\.enable=True: must be False"),
        ({"rollout_name": "sglang"}, r"rollout\.name=sglang: must be vllm or cpu"),
    ],
)
def test_what_depends_on_time_is_refused(override, message):
    arguments = {"trainer_mode": "sync", "trainer_config": {}, "max_off_policy_threshold": 8}
    sampler = {"rollout_name": "vllm", "filter_groups": None, "train_batch_size": 8, "sync_refill_failed_groups": False}
    for key, value in override.items():
        (sampler if key in sampler else arguments)[key] = value
    with pytest.raises(ValueError, match=message):
        seeded(max_off_policy_strategy="drop", sampler_kwargs=sampler, **arguments)
