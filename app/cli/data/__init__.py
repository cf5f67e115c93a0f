"""Commands that prepare and correct data sets."""
