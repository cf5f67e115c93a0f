"""Names that ExoGym has for options, where the nearest word would mislead, or there is no near one."""

from __future__ import annotations

_OPTIMIZER = "write optimizer = adamw (or sgd, ...) and learning_rate"
_OUTER = "write diloco.outer_lr, diloco.outer_momentum and diloco.outer_optimizer"
_COLLATE = "leave it out, and give collate= to the trainer; order and batches follow from seed and batch_size"
_RATE = "write lr_schedule, warmup_steps and lr_decay_share"
_WANDB = "write trackers = wandb; the project is in the variable WANDB_PROJECT, a run is called by its id"

HINTS = {
    "h": "write sync_interval",
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
"""What to write instead, by the name in lower case."""
