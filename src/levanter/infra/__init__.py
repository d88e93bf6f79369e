"""Launching: the same command on every host of a pod, of a Ray cluster, of a Slurm allocation, or as local processes.

    python -m levanter.infra.launch …        TPU VMs through gcloud; `local`; `slurm`
    python -m levanter.infra.ray_run …       one actor per host of a slice on a Ray cluster

Terms. *pod*: the slices of one run, under one name. *slice*: an ICI domain of many hosts. *host* (of a TPU VM:
*worker*): one process with its chips. *attempt*: one start of the command on all hosts; a preemption ends an attempt,
and another follows. *gang*: the processes of an attempt, which start and end together.

This package runs on a laptop: it never imports JAX, and preflight is a subprocess (`preflight`).
"""
