"""What a person chose: option schema, INI inheritance, saved profiles. Imports nothing of ours."""
