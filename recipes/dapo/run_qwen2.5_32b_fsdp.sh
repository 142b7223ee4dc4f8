#!/usr/bin/env bash
# DAPO's run of Qwen2.5-32B by verl 0.9.1's own main, with the loss of this plugin: clip-higher, dynamic sampling,
# overlong shaping, token-mean, 16 updates a rollout batch. METHOD=none trains verl's own loss, with the same settings.
set -euo pipefail

############################# user-adjustable #############################

# a group of configs/clipx; none: verl's own loss
METHOD=${METHOD:-acpo}

NNODES=${NNODES:-8}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}

# all nodes must see these at the same paths
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B}
TRAIN_FILE=${TRAIN_FILE:-data/dapo_17k/train.parquet}
TEST_FILE=${TEST_FILE:-data/aime24/test.parquet}
RUN_FOLDER=${RUN_FOLDER:-runs/dapo_32b_$METHOD}

# empty: until the epochs end
TOTAL_STEPS=${TOTAL_STEPS:-}
SAVE_FREQ=${SAVE_FREQ:-5}
TEST_FREQ=${TEST_FREQ:-5}
LOGGER=${LOGGER:-[console,file]}

###########################################################################

MAX_PROMPT_LENGTH=$((1024 * 2))
MAX_RESPONSE_LENGTH=$((1024 * 20))
OVERLONG_BUFFER=$((1024 * 4))

data=(
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.prompt_key=prompt
    data.truncation=left
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.train_batch_size=512
)

algorithm=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=10
)

reward=(
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.max_resp_len="$MAX_RESPONSE_LENGTH"
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len="$OVERLONG_BUFFER"
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward.reward_kwargs.overlong_buffer_cfg.log=False
)

actor=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.grad_clip=1.0
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH))
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)

rollout=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.rollout.val_kwargs.n=1
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
)

trainer=(
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.val_before_train=True
    trainer.test_freq="$TEST_FREQ"
    trainer.save_freq="$SAVE_FREQ"
    trainer.total_epochs=1
    trainer.logger="$LOGGER"
    trainer.project_name=dapo
    trainer.experiment_name="dapo_32b_$METHOD"
    trainer.default_local_dir="$RUN_FOLDER"
    trainer.resume_mode=auto
)
[[ -z $TOTAL_STEPS ]] || trainer+=(trainer.total_training_steps="$TOTAL_STEPS")

# The lines that the plugin adds. The second has no plus, at which a verl without the plugin stops.
swap=()
[[ $METHOD == none ]] || swap=(
    +clipx="$METHOD"
    clipx.receipt=auto
)

exec python3 -m verl.trainer.main_ppo \
    "${data[@]}" "${algorithm[@]}" "${reward[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" \
    ${swap[@]+"${swap[@]}"} "$@"
