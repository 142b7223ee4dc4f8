"""A policy loss that knows the whole mini-batch: needs verl 0.9.1 with pre_update_hook.patch.

KL-Cov centres each token's advantage and log-probability on their means. These are the means of the micro-batch in
verl; here they are those of the mini-batch.
"""

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss, register_pre_update
from verl.workers.utils.padding import no_padding_2_padding


@register_pre_update("centred")
def means(engine, data, config):
    sums = torch.zeros(3, dtype=torch.float64)

    def observe(model_output, data, dp_group=None):
        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        fields = data.select("response_mask", "advantages").to_padded_tensor()
        mask = fields["response_mask"].double()
        sums.add_(torch.stack([(mask * of).sum() for of in (torch.ones_like(mask), log_prob, fields["advantages"])]))
        return log_prob.new_zeros(()), {}

    engine.forward_backward_batch(data, observe, forward_only=True)
    torch.distributed.all_reduce(sums, group=engine.get_data_parallel_group())
    return {"log_prob": sums[1] / sums[0], "advantage": sums[2] / sums[0]}


@register_policy_loss("centred")
def loss(old_log_prob, log_prob, advantages, response_mask, pre_update, **others):
    tensors = dict(old_log_prob=old_log_prob, log_prob=log_prob, response_mask=response_mask)
    return get_policy_loss_fn("vanilla")(**tensors, advantages=advantages - pre_update["advantage"].float(), **others)
