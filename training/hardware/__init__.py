"""The machine: device, cores, memory, load, heat and power."""
