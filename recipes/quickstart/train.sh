# shellcheck shell=bash
# Sourced by the recipes in this folder: what all of them tell verl, by the variables that each of them sets.

# shellcheck source=recipes/text.sh
source "$(dirname "${BASH_SOURCE[0]}")/../text.sh"

# Trains, or with DRY_RUN=1 only prints the command. The arguments are the task, whose reward scores the responses, and
# the recipe's own overrides.
train() {
    local task=$1
    shift

    local data=(
        data.train_files="$(text "$TRAIN_FILE")"
        data.val_files="$(text "$TEST_FILE")"
        data.train_batch_size="$TRAIN_BATCH_SIZE"
        data.max_prompt_length="$MAX_PROMPT_LENGTH"
        data.max_response_length="$MAX_RESPONSE_LENGTH"
        data.seed="$SEED"
        reward.custom_reward_function.path="pkg://verl_clipx.papers.tasks.$task.reward"
        reward.custom_reward_function.name=compute_score
    )

    local actor=(
        algorithm.adv_estimator=grpo
        actor_rollout_ref.model.path="$(text "$MODEL_PATH")"
        actor_rollout_ref.actor.optim.lr="$ACTOR_LR"
        actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
        actor_rollout_ref.actor.data_loader_seed="$SEED"
    )

    local rollout=(
        actor_rollout_ref.rollout.n="$ROLLOUT_N"
        actor_rollout_ref.rollout.seed="$SEED"
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
        actor_rollout_ref.rollout.val_kwargs.n="$VAL_N"
        actor_rollout_ref.rollout.val_kwargs.do_sample=True
        actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    )

    local trainer=(
        trainer.nnodes="$NNODES"
        trainer.n_gpus_per_node="$NGPUS_PER_NODE"
        trainer.total_training_steps="$TOTAL_STEPS"
        trainer.total_epochs=1000
        trainer.val_before_train=True
        trainer.test_freq="$TEST_FREQ"
        trainer.save_freq="$SAVE_FREQ"
        trainer.logger='[console,file]'
        trainer.validation_data_dir="$(text "$RUN_FOLDER/validation")"
        trainer.default_local_dir="$(text "$RUN_FOLDER/checkpoints")"
        trainer.resume_mode=disable
        trainer.project_name="$(text "$PROJECT_NAME")"
        trainer.experiment_name="$(text "$EXPERIMENT_NAME")"
    )

    local hardware=${HARDWARE:-cpu} platform=()
    [[ $hardware != cpu ]] || platform=(VERL_PLATFORM=cpu)
    local command=(
        env ${platform[@]+"${platform[@]}"} VERL_FILE_LOGGER_PATH="$RUN_FOLDER/metrics.jsonl"
        python3 -m verl.trainer.main_ppo +hardware="$hardware" +clipx="$METHOD" clipx.receipt=auto
        "${data[@]}" "${actor[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
    )
    print_command "${command[@]}"
    [[ ${DRY_RUN:-0} != 1 ]] || return 0
    mkdir -p "$RUN_FOLDER"
    # In this shell's place, so that a signal to the recipe is one to the training.
    exec "${command[@]}"
}
