#!/bin/bash
# The runs of a sweep as one SLURM array: a task a run, each with its own folder, queued again by itself when it is stopped.
#
#   bash examples/slurm_array.sh examples/sweep.yaml --partition=gpu --time=04:00:00
#
# Run it on a login node, in the project's folder with its environment active. What follows the sweep file goes to
# sbatch. lightning_configs/slurm/array.sbatch is the job and says what else it sets (one GPU, eight CPUs, no network).
set -euo pipefail

sweep="${1:?give a sweep file, such as examples/sweep.yaml}"
shift

count="$(python main.py sweep "$sweep" --count)"
mkdir -p checkpoints/slurm  # SLURM writes each task's output there, and does not make the folder
sbatch --array="0-$((count - 1))%4" "$@" lightning_configs/slurm/array.sbatch "$sweep"
echo "$count runs are queued, four at a time; when they have ended: python main.py sweep $sweep --results true"
