"""Commands about machines: find, log in, check, clean."""
