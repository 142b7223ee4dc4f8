# shellcheck shell=bash
# Slurm runs a copy of the script from its spool folder and gives it these variables.
nodes=1
while [[ $1 == --* ]]; do [[ $1 != --nodes=* ]] || nodes=${1#*=}; shift; done
script=$1; shift
mkdir -p "$HOME/spool" && cp "$script" "$HOME/spool/slurm_script"
last=$(printf %02d $((6 + nodes)))
export SLURM_JOB_ID=4242 SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NODELIST="gpu[07-$last]"
export SLURM_GPUS_ON_NODE=8 SLURM_CPUS_ON_NODE=96
cd / && exec bash "$HOME/spool/slurm_script" "$@"
