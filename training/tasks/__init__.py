"""Tasks: model, data sets, collation, loss and metrics of each kind of job."""
