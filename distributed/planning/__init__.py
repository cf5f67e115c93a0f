"""The cost model: what was measured goes in as documents, the ranking of all ways to train comes out."""
