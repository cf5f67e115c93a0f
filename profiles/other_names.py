"""Hints for option names of ExoGym and, for `launch`, of other launchers, that resemble none of ours."""

from __future__ import annotations

_OPTIMIZER = "write optimizer = adamw (or sgd, ...) and learning_rate"
_OUTER = "write diloco.outer_lr, diloco.outer_momentum and diloco.outer_optimizer"
_COLLATE = "leave it out, and give collate= to the trainer; order and batches follow from seed and batch_size"
_RATE = "write lr_schedule, warmup_steps and lr_decay_share, or give lr_scheduler= to the trainer"
_WANDB = "write trackers = wandb; the project is in the variable WANDB_PROJECT, a run is called by its id"

HINTS = {
    "h": "write sync_interval",
    "lr": "write learning_rate",
    "num_nodes": "write LocalTrainer(..., workers=N) or simulate=N; --local N or --simulate N on the command line",
    "num_epochs": "write epochs",
    "minibatch_size": "write it as batch_size, and as gradient_accumulation how often it goes into a step's samples",
    "shuffle": "leave it out: samples come in a new order in every epoch, which follows from seed",
    "val_size": "write max_eval_samples, of all machines together",
    "val_interval": "write eval_interval",
    "autocast": "write mixed_precision = bf16",
    "checkpoint_interval": "write snapshot_interval",
    "correlation_interval": "leave it out: every synchronisation tells its correlation",
    "save_dir": "write output_dir",
    "dataloader_kwargs": _COLLATE,
    "devices": "leave it out: workers take turns over the visible GPUs (CUDA_VISIBLE_DEVICES)",
    "start_port": "write coordinator_port, or leave it out for a free one",
    "port": "write coordinator_port, or leave it out for a free one",
    "wandb_project": _WANDB,
    "run_name": _WANDB,
    "disable_logging": "write trackers only where you want any",
    "p_sparta": "write sparta.share",
    "sparta_interval": "write sparta.interval",
    "compression_topk": "write demo.topk",
    "compression_chunk": "write demo.chunk",
    "compression_decay": "write demo.decay",
    "optim_spec": _OPTIMIZER,
    "inner_optim": _OPTIMIZER,
    "inner_optim_spec": _OPTIMIZER,
    "outer_optim_spec": _OUTER,
    "max_norm": "write max_grad_norm",
    "lr_scheduler": _RATE,
    "lr_scheduler_kwargs": _RATE,
    "cosine_anneal": "write lr_schedule = cosine",
    "force_minibatch_recalculate": "leave it out: a step that does not fit into memory is done in more passes",
}
"""Hint by the foreign name in lower case."""

_COUNT = "write --local N for N processes here, or --nproc-per-machine N beside --hosts"
_MACHINES = "write --hosts FILE or --hosts HOST,HOST: one launch starts all machines"
_SHOWN = "leave it out: all ranks' output is shown with their names, and stays in logs/ of the run folder"
_WATCHED = "leave it out: each rank is a process of its own, watched to its end, and with one that fails all end"
_SCRIPTS = "leave it out, and say it in the script: Accelerator(...) takes it"
_ENVIRONMENT = "set it in the script, in os.environ, before it is used: it holds on all machines"

LAUNCH_HINTS = {
    **dict.fromkeys(("n", "np", "nproc", "num_processes", "num_gpus", "num_accelerators", "num_workers"), _COUNT),
    **dict.fromkeys(
        ("num_machines", "num_nodes", "machine_rank", "main_process_ip", "main_process_port", "hostfile", "include",
         "exclude", "host", "h"), _MACHINES,
    ),
    **dict.fromkeys(("log_dir", "redirects", "tee", "r", "t", "local_ranks_filter", "logs_specs", "verbose"), _SHOWN),
    **dict.fromkeys(
        ("role", "monitor_interval", "start_method", "signals_to_handle", "event_log_handler", "virtual_local_rank",
         "numa_binding"), _WATCHED,
    ),
    **dict.fromkeys(
        ("multi_gpu", "cpu", "mixed_precision", "config_file", "dynamo_backend", "use_fsdp", "use_deepspeed",
         "gradient_accumulation_steps"), _SCRIPTS,
    ),
    **dict.fromkeys(("env", "x"), _ENVIRONMENT),
    **dict.fromkeys(("gpu_ids", "gpus"), "set CUDA_VISIBLE_DEVICES, or `devices` of a machine in the hosts file"),
    "use_env": "leave it out: LOCAL_RANK and the others are in the environment",
    "no_python": "name a Python script or -m MODULE, which may start another program",
    "run_path": "leave it out: a script runs as python SCRIPT would run it",
    "python": "write it as `python` of a machine into the hosts file",
    "cwd": "write --folder DIR for what goes to other machines; here a script runs in the current folder",
}  # fmt: skip
"""Hints for options of torchrun, accelerate, deepspeed, mlx.launch and mpirun."""
