"""The shared training core: everything one worker process does. Knows nothing of SSH, hosts or screens."""
