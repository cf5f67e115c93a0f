"""Everything of ours off a machine again, and the proof that it is gone."""
