"""Packing weights into messages and writing them into a model. Not covered: Ray's transport."""

import numpy as np
import pytest
import torch

from tests.training.cpu.policy import random_policy
from verl_clipx.training.cpu.rollout.weights import copy_weights, missing_weights, pack_weights


def test_messages_carry_everything_in_order_within_their_size():
    weights = [(name, torch.full((count,), float(count))) for name, count in [("a", 2), ("b", 3), ("c", 100), ("d", 1)]]
    messages = list(pack_weights(weights, max_bytes=20))
    assert [list(message) for message in messages] == [["a", "b"], ["c"], ["d"]]
    assert messages[1]["c"].tolist() == [100.0] * 100
    assert list(pack_weights([], max_bytes=1)) == [{}]
    # Half precision is widened.
    (message,) = pack_weights([("a", torch.tensor([1.5], dtype=torch.bfloat16))], max_bytes=100)
    assert message["a"].dtype == np.float32 and message["a"].tolist() == [1.5]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_receives_anothers_weights(tied):
    source, target = random_policy(1, tied=tied), random_policy(2, tied=tied)
    for message in pack_weights(source.named_parameters(), max_bytes=10_000):
        for array in message.values():
            array.setflags(write=False)
        copy_weights(target, message)
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(source(tokens).logits, target(tokens).logits)


def test_tied_weights_count_as_received_and_unknown_names_and_shapes_are_refused():
    tied, model = random_policy(tied=True), random_policy()
    names = {name for name, _ in tied.named_parameters()}
    assert "lm_head.weight" not in names and missing_weights(tied, names) == []
    assert missing_weights(tied, names - {"model.norm.weight"}) == ["model.norm.weight"]
    assert "lm_head.weight" in missing_weights(model, names)
    with pytest.raises(KeyError, match="no_such_weight"):
        copy_weights(model, {"no_such_weight": np.zeros(3, dtype=np.float32)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight with shape"):
        copy_weights(model, {"model.norm.weight": np.zeros(3, dtype=np.float32)})
