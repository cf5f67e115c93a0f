"""Commands about machines: find, check, measure, clean."""
