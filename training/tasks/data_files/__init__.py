"""Files that data sets consist of: tables, splits, data sets of the hub."""
