"""Layouts whose devices exchange while they compute, and must be in one machine: a shard of every
weight on each, or a slice of every matrix."""
