"""Recordings from anywhere become a data set to train on: read, fetched, checked, divided by speaker, written."""
