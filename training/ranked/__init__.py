"""Training under an engine that has started the processes: torchrun, srun, Kubeflow, Ray Train, dstack, SkyPilot."""
