"""Short runs that measure a task, or a device."""
