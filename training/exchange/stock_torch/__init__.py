"""Engine ``nccl``: means over a process group of stock torch, in addition to the mesh."""
