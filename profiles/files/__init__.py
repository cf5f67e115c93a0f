"""INI files: parsed, layered, resolved to settings with the origin of every value."""
