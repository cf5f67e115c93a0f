"""Recordings and their transcripts: tables, patches, decoding; a data set for speech models."""
