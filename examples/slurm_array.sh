#!/bin/bash
# Submits the runs of a sweep as one SLURM array: one task per run, each with its own folder, requeued if it is stopped.
#
#   bash examples/slurm_array.sh examples/sweep.yaml --partition=gpu --time=04:00:00
#
# Run it on a login node, in the project's folder with its environment active. Arguments after the sweep file are passed to
# sbatch. The job is lightning_configs/slurm/array.sbatch: one GPU and eight CPUs per task by default, without the Hub.
set -euo pipefail

sweep="${1:?give a sweep file, such as examples/sweep.yaml}"
shift

count="$(python main.py sweep "$sweep" --count)"
mkdir -p checkpoints/slurm  # SLURM writes each task's output there but does not create the folder
sbatch --array="0-$((count - 1))%4" "$@" lightning_configs/slurm/array.sbatch "$sweep"
echo "submitted $count runs, four at a time; after they have finished: python main.py sweep $sweep --results true"
