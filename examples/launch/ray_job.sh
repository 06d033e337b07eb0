#!/usr/bin/env bash
# Submits a run as a job of a Ray cluster that is already up. The controller runs on the cluster's head, so this machine may leave.
#   examples/launch/ray_job.sh http://HEAD:8265
#   CONFIG=my.yaml RUN_DIR=/shared/runs/mine examples/launch/ray_job.sh http://HEAD:8265 trainer.num_steps=400
# The sizes are those of the config's placement; the cluster must have these nodes.
# The head needs Ray's dashboard (pip install 'ray[default]'), every node asyncrl with its extras train and ray (and vllm), all of the same
# version, and /shared, where the run and the model are. This folder goes to the nodes, except the paths that runtime_env.yaml excludes:
# your configs, tasks and agents are read from it, and its asyncrl/ comes before an installed asyncrl.
# The same command resumes an interrupted run. `ray job stop asyncrl-...` interrupts it, which writes a checkpoint first;
# `ray job logs -f ...` shows it.
set -euo pipefail
cd "$(dirname "$0")/../.."

dashboard=${1:?usage: examples/launch/ray_job.sh http://HEAD:8265 [KEY=VALUE ...]}
shift
config=${CONFIG:-configs/gsm8k-qwen2.5-7b-2x8gpu.yaml}
model=${MODEL:-/shared/models/Qwen2.5-7B-Instruct}
run_dir=${RUN_DIR:-/shared/runs/first}

# The entrypoint takes no CPU of Ray's: it runs next to the processes that it starts. Stopping it takes longer than Ray's own 3 s.
ray job submit --address "$dashboard" --submission-id "asyncrl-$(basename "$run_dir")-$(date +%Y%m%d-%H%M%S)" \
    --runtime-env examples/launch/runtime_env.yaml --entrypoint-num-cpus 0 --no-wait -- \
    asyncrl run "$config" launcher=ray model.path="$model" --run-dir "$run_dir" "$@"
