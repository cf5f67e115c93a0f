"""A run as data: its state, series and sentences, computed from its events; every display renders them."""
