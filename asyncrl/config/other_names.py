"""Names of commands and keys in TRL, verl, AReaL, OpenRLHF and prime-rl, for hints.
docs/coming-from.md says what differs.
"""

from __future__ import annotations


def _by_their_name(table: str) -> dict[str, str]:
    """Read lines of our name, a colon, and their names."""
    rows = [line.split(": ") for line in table.strip().splitlines()]
    return {theirs: ours for ours, names in rows for theirs in names.split()}


COMMANDS = _by_their_name("""
run: train fit start finetune grpo ppo rl
check: validate verify dry-run plan
runs: list ls
status: show
inspect: samples
report: plot compare diff
watch: dashboard tensorboard tail logs follow
export: merge save convert
keys: config settings
RUN --help: help man
init: new create
work: worker
stop: kill cancel interrupt pause
delete: rm remove del clean prune
eval: evaluate test score bench benchmark
sweep: tune search grid hpo
run RUN/config.yaml --run-dir RUN: resume continue restart
""")

OPTIONS = {
    "--resume": "--resume takes auto, never or must; auto, the default, resumes the run in --run-dir.",
    "--dry-run": "`asyncrl check CONFIG` validates a config and starts nothing.",
    "--config": "write the config without --config: asyncrl run CONFIG.",
    "-c": "write the config without -c: asyncrl run CONFIG.",
    "--debug": "RUN_DIR/logs has all messages; `asyncrl status --verbose` shows waits and queues.",
    "-q": "write observe.console=none after the config.",
    "--quiet": "write observe.console=none after the config.",
    "--format": "an export is a Hugging Face folder, for transformers, vLLM and peft.",
    "-o": "write --run-dir RUN_DIR.",
    "--follow": "`asyncrl watch RUN_DIR` shows a live run.",
    "--set": "write settings without --set: KEY=VALUE after the config.",
    "--override": "write settings without --override: KEY=VALUE after the config.",
    "CONFIG": "name a YAML file; `asyncrl init quickstart` writes quickstart.yaml.",
    "CONFIG|RUN_DIR": "name a YAML file, or a run of `asyncrl runs`.",
    "RUN_DIR": "name a run of `asyncrl runs`.",
    "KEY=A,B,C...": "write values like trainer.learning_rate=1e-5,3e-5 after the config.",
    "quickstart|gsm8k|agent": "write `asyncrl init quickstart`.",
    "-v": "--verbose belongs to `asyncrl status`; -V prints the version.",
}

KEYS = _by_their_name("""
trainer.num_groups: batch_size train_batch_size rollout_batch_size global_batch_size consumer_batch_size
trainer.num_groups: per_device_train_batch_size gen_batch_size
trainer.mini_batches: ppo_mini_batch_size ppo_n_minibatches num_minibatches
trainer.micro_batch_tokens: gradient_accumulation_steps ppo_micro_batch_size_per_gpu
trainer.micro_batch_tokens: ppo_max_token_len_per_gpu micro_batch_size max_tokens_per_mb
trainer.epochs: num_iterations ppo_epochs
trainer.num_steps: max_steps num_train_epochs total_epochs total_training_steps total_train_epochs
trainer.num_steps: total_train_steps
trainer.optimizer: optim optimizer_type
trainer.learning_rate: lr actor_learning_rate
trainer.schedule: lr_scheduler_type
trainer.warmup_steps: warmup_ratio lr_warmup_steps
trainer.max_grad_norm: grad_clip gradient_clipping
trainer.betas: adam_beta1 adam_beta2
trainer.lora: lora_rank lora_r peft_config
trainer.offload.by_layer: cpu_offload offload_policy fsdp_cpu_offload
trainer.offload.gradients: grad_offload
trainer.offload.optimizer: optimizer_offload offload_optimizer adam_offload
trainer.offload.weights: param_offload offload_param offload_params offload_train
rollout.group_size: num_generations n n_samples n_samples_per_prompt rollouts_per_example
rollout.max_tokens: max_completion_length max_response_length max_new_tokens generate_max_len
rollout.max_tokens: response_length
rollout.max_prompt_tokens: max_prompt_length prompt_max_len
rollout.engine: use_vllm
rollout.tensor_parallel: tensor_model_parallel_size tensor_parallel_size tp
rollout.vllm: gpu_memory_utilization vllm_gpu_memory_utilization
rollout.slots: max_num_seqs max_concurrent_rollouts
algorithm.kl_coefficient: beta kl_coef kl_ctl kl_loss_coef init_kl_coef
algorithm.kl_estimator: kl_loss_type
algorithm.kl_in: use_kl_in_reward
algorithm.clip_low: epsilon clip_ratio clip_ratio_low eps_clip clip_eps
algorithm.clip_high: epsilon_high clip_ratio_high eps_clip_higher
algorithm.clip_delta: delta
algorithm.loss: loss_type use_decoupled_loss
algorithm.advantage: scale_rewards adv_estimator advantage_estimator
algorithm.aggregate: loss_agg_mode
buffer.max_staleness: max_async_level off_policy_steps max_head_offpolicyness
model.path: model_name_or_path model_name pretrain tokenizer_path
model.dtype: torch_dtype bf16 fp16 precision
task.files: train_files train_file
task.dataset: dataset_name train_dataset prompt_data
task.reward_weights: reward_weights gdpo_reward_weights
task.reward: reward_funcs reward_fn reward_function
task.prompt_column: prompt_key input_key
task.answer_column: label_key
eval.task: val_files eval_dataset
eval.every: test_freq eval_steps
checkpoint.every: save_freq save_steps save_interval
checkpoint.keep_last: save_total_limit max_ckpt_to_keep
observe.trackers: report_to logger wandb use_wandb
observe.tracker_args: project_name
placement.trainer: n_gpus_per_node nnodes num_gpus device devices
placement.trainer: actor
placement.rollout: colocate
rollout.num_engines: num_rollout_workers
""")
