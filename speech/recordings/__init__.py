"""Prepares data sets of recordings from any source: reads, fetches and checks them, and divides them by speaker."""
