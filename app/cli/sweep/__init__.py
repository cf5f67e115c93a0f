"""``sweep``: values of options, tried over machines."""
