"""What is read of a user's own code: hashes of its source, data that come one after the other. The tasks call it."""
