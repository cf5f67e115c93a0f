"""Schedules, random generators and norms: small functions of numbers."""
